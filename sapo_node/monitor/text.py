"""Texts of others, made harmless for a terminal and a reader. Apart from `log.py`, which takes long to import."""

import re
import unicodedata

# Terminal sequences as a whole, so that no "[31m" is left of one: CSI, then strings (OSC, DCS, ...) up to their end.
_SEQUENCES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]" r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
)
_SPACES = re.compile(r"\s+")

# Unicode categories that a reader cannot see or that move what is seen: control, format (bidi and zero-width
# characters), surrogates, private use, unassigned.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn"})


def clean(text: str, limit: int = 80) -> str:
    """`text` on one line without control, bidi, escape or invisible characters, cut to `limit` characters.

    Runs of white space become one space; what was cut ends in "…".
    """
    head = text[: 8 * limit]  # a stranger's megabyte is not searched for what will be cut anyway
    seen = _SEQUENCES.sub("", head)
    shown = "".join(char for char in _SPACES.sub(" ", seen) if unicodedata.category(char) not in _UNSEEN)
    kept = _SPACES.sub(" ", shown).strip()
    return kept if len(kept) <= limit and len(head) == len(text) else kept[: limit - 1] + "…"


def harmless(text: str) -> str:
    """`text` without what a terminal obeys or nobody sees; its line ends and spaces stay. For what is printed."""
    return "".join(c for c in _SEQUENCES.sub("", text) if c in "\n\t" or unicodedata.category(c) not in _UNSEEN)
