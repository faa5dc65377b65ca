"""How answers to the rows of a data set are judged: three pure functions of an answer and the truth.

Each takes the extracted answer (`base.extract_answer`) and says whether it is right; there are no part marks.
"""

import math
import re
from collections.abc import Callable
from typing import Final, Literal

Verifier = Literal["exact", "numeric", "choice"]

TOLERANCE: Final = 1e-6
"""Relative and absolute error that `numeric` forgives: enough for rounding in the last places of a decimal."""

MAX_NUMBER_CHARS: Final = 100
"""Longer "numbers" are not read: Python's conversion slows down with the square of the length."""

_NUMBER = re.compile(r"[+-]?(\d{1,3}(,\d{3})+|\d+)?(\.\d*)?([eE][+-]?\d{1,4})?", re.ASCII)
_CHOICE = re.compile(r"\(?([A-Za-z])\)?[.:)]?", re.ASCII)


def exact(answer: str, truth: str) -> bool:
    """The same text, apart from space around it and runs of space within."""
    return answer.split() == truth.split()


def numeric(answer: str, truth: str) -> bool:
    """The same finite number within TOLERANCE. Thousands separators (1,234.5), a leading $ and a final % are read
    over; anything else beside the number is wrong."""
    given, right = parse_number(answer), parse_number(truth)
    return given is not None and right is not None and math.isclose(given, right, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def choice(answer: str, truth: str) -> bool:
    """The same letter, in either case, written as B, (B), B. or B)."""
    given, right = parse_choice(answer), parse_choice(truth)
    return given is not None and given == right


VERIFIERS: Final[dict[Verifier, Callable[[str, str], bool]]] = {"exact": exact, "numeric": numeric, "choice": choice}


def parse_number(text: str) -> float | None:
    """A finite number out of a text that holds nothing else, or None."""
    text = text.strip().removeprefix("$").removesuffix("%").strip()
    if not text or len(text) > MAX_NUMBER_CHARS or _NUMBER.fullmatch(text) is None:
        return None
    try:
        number = float(text.replace(",", ""))
    except ValueError:  # the pattern also matches a sign or an exponent alone
        return None
    return number if math.isfinite(number) else None


def parse_choice(text: str) -> str | None:
    """The letter of a multiple-choice answer in upper case, or None when the text is something else."""
    match = _CHOICE.fullmatch(text.strip())
    return match[1].upper() if match else None


def readable_truth(verifier: Verifier, truth: str) -> str | None:
    """What is wrong with a truth that its verifier could never match, for people, or None."""
    if verifier == "numeric" and parse_number(truth) is None:
        return f"verifier 'numeric' needs a finite number as answer, not {truth[:60]!r}"
    if verifier == "choice" and parse_choice(truth) is None:
        return f"verifier 'choice' needs one letter as answer, not {truth[:60]!r}"
    return None
