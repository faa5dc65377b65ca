"""What is read out of a batch that was taken: the settings of a task, the text of an answer, names that are shown."""

import unicodedata
from random import Random
from typing import Any, Final

import msgspec

from sapo_node.monitor.text import clean, harmless
from sapo_node.rollouts.schema import TaskRef
from sapo_node.tasks import catalog
from sapo_node.tasks.base import TaskRefused, config_hash, extract_answer, has_form
from sapo_node.tasks.verifiers import VERIFIERS

from . import values
from .mutate import hostile, mutate, packed, random_bytes, twist
from .run import Broken, Surface


def _make_coordinates(rng: Random) -> bytes:
    task = values.plain(values.task(rng, 0))
    if rng.random() < 0.7:
        task["config"] = twist(rng, task["config"]) if rng.random() < 0.7 else {"max_n": hostile(rng)}
    data = packed(task)
    return mutate(rng, data) if rng.random() < 0.2 else data


def _read_coordinates(data: bytes) -> None:
    task = msgspec.msgpack.decode(data, type=TaskRef)
    try:
        config_hash(task.config)
    except ValueError:  # NaN, which the codec lets through nowhere
        return
    catalog.validate(task.name, task.config)
    fields = catalog.OFFERED[task.name].fields
    for key, value in task.config.items():
        if not _is_within(fields[key], value):
            raise Broken(f"{task.name}: {key} is beyond its bounds")


def _is_within(declared: catalog.Field, value: Any) -> bool:
    """Whether a value is one that a field allows, decided apart from the catalogue."""
    if isinstance(declared, catalog.Int):
        return type(value) is int and declared.low <= value <= declared.high
    if isinstance(declared, catalog.Real):
        return type(value) in (int, float) and declared.low <= value <= declared.high
    if isinstance(declared, catalog.Flag):
        return value is True or value is False
    if isinstance(declared, catalog.Choice):
        return value in declared.words
    return isinstance(value, list) and 0 < len(value) <= catalog.MAX_LIST and set(value) <= set(declared.default)


_PIECES: Final = ("<answer>", "</answer>", "1,234.5", "(B)", " ", "\n", "\x1b[31m", "\u202e", "9" * 300, "e", "$", "%")


def _make_text(rng: Random, most: int = 3000) -> bytes:
    if rng.random() < 0.3:
        return random_bytes(rng, 300)
    text = "".join(rng.choice(_PIECES) for _ in range(most if rng.random() < 0.002 else rng.randrange(30)))
    return mutate(rng, text.encode()[: 64 * 1024])


def _read_answer(data: bytes) -> None:
    text = data.decode(errors="replace")
    answer = extract_answer(text)
    if answer != answer.strip():
        raise Broken("an answer keeps the space around it")
    if has_form(text, "bare") and has_form(text, "tags"):
        raise Broken("an answer is in two forms")
    for verifier in VERIFIERS.values():
        if verifier(answer, "(B)") not in (True, False):
            raise Broken("a verifier gave no verdict")


_UNSEEN: Final = {"Cc", "Cf", "Cs", "Co", "Cn"}


def _read_shown(data: bytes) -> None:
    text = data.decode("utf-8", errors="surrogateescape")
    short, long = clean(text), harmless(text)
    if len(short) > 80 or any(unicodedata.category(c) in _UNSEEN for c in short):
        raise Broken("a text that is shown moves the terminal, or is too long")
    if any(unicodedata.category(c) in _UNSEEN and c not in "\n\t" for c in long):
        raise Broken("a text that is printed moves the terminal")


SURFACES: Final = (
    Surface(
        name="coordinates",
        reads="a task's settings in a group",
        make=_make_coordinates,
        feed=_read_coordinates,
        refusals=(TaskRefused, msgspec.DecodeError, UnicodeDecodeError, RecursionError),  # but the first: the codec's
    ),
    Surface(name="answer", reads="the text of a completion", make=_make_text, feed=_read_answer),
    Surface(name="shown", reads="any text of a stranger that is logged or shown", make=_make_text, feed=_read_shown),
)
