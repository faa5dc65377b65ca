"""ReasoningGYM behind two functions: the item of some coordinates, and the strict reward of an answer to it.

A data set of the library is opened with size 1; its item 0 is the question. (Item 1 of seed 5 is item 0 of seed 6 in
nearly all tasks, so one question must have one address.) Importing this module imports the library: about a second and
100 MB, so the node does it in scorer workers only.
"""

import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import reasoning_gym

from sapo_node.rollouts.schema import ConfigValue
from sapo_node.tasks.base import AnswerForm, TaskRefused, reward_in_form
from sapo_node.tasks.catalog import MAX_QUESTION_BYTES, validate

# Opened data sets kept: some read a word list each time they are opened (40 ms, 7 MB).
_KEPT = 16

# Longer than any truth. Some scorers take time that grows with the square of the text.
_MAX_ANSWER_CHARS = 16 * 1024

_ARITHMETIC = re.compile(r"[0-9+\-*/(). ]{1,500}")
_FRACTION = re.compile(
    r"\$?\s*(\\d?frac\s*\{\s*[0-9]{1,18}\s*\}\s*\{\s*[0-9]{1,18}\s*\}|[0-9]{1,18}\s*/\s*[0-9]{1,18})\s*\$?"
)
_NO_FORMULA = re.compile(r"[A-Z] *[A-Z]|(¬ *){4}")  # a name of letters, or pointless negation, the slowest to read
_OPERATOR = re.compile(r"[∧∨¬→↔]")

# The library reads a formula once for each operator, and once for each pair of parentheses, in steps of a microsecond.
# Room for the conjunction of all premises of the hardest setting (6 premises of 7 operators), which is a right answer.
_FORMULA = re.compile(r"[A-Z∧∨¬→↔() ]{1,288}")
_MAX_OPERATORS = 48


def item(name: str, config: Mapping[str, ConfigValue], seed: int) -> dict[str, Any]:
    """The item of these coordinates: "question" (str), "answer" (str, the truth), "metadata" (dict).

    Raises TaskRefused when the settings are out of bounds or the generator finds no question for this seed.
    """
    validate(name, config)
    return entry(open_dataset(name, config, seed), name, seed)


def open_dataset(name: str, config: Mapping[str, ConfigValue], seed: int) -> Any:
    """The library's data set of size 1 with this seed. Checks nothing: `item` and the worker check before."""
    dataset = _opened(name, json.dumps(dict(config), sort_keys=True))
    dataset.seed = seed  # item 0 draws from Random(seed + 0); tests compare with data sets opened by that seed
    return dataset


@functools.lru_cache(maxsize=_KEPT)
def _opened(name: str, config: str) -> Any:
    return reasoning_gym.create_dataset(name, seed=0, size=1, **json.loads(config))


def entry(dataset: Any, name: str, seed: int) -> dict[str, Any]:
    """Item 0 of an opened data set, with a truth in "answer" always. Raises TaskRefused when there is none."""
    try:
        made: dict[str, Any] = dataset[0]
    except MemoryError:
        raise  # a fault of this process, not of the coordinates: the worker is replaced
    except Exception as error:  # the generators raise all kinds of things for unlucky seeds
        raise TaskRefused(f"{name} has no question for seed {seed}: {type(error).__name__}: {error}") from error
    if made["answer"] is None:  # any of many answers is right; the library names one
        made["answer"] = made["metadata"]["example_answer"]
    made["answer"] = str(made["answer"])
    size = len(made["question"].encode())
    if size > MAX_QUESTION_BYTES:
        raise TaskRefused(f"{name} with seed {seed} asks {size} bytes, more than {MAX_QUESTION_BYTES}")
    return made


def reward(dataset: Any, name: str, made: Mapping[str, Any], text: str, form: AnswerForm = "any") -> float:
    """1.0 if `text` has that form and the library gives its answer full marks, else 0.0; a scorer that raises gives 0.

    MemoryError passes: after it the process is not to be trusted.
    """
    return reward_in_form(text, form, made["answer"], lambda answer: _full_marks(dataset, name, made, answer))


def _full_marks(dataset: Any, name: str, made: Mapping[str, Any], answer: str) -> float:
    fits = _MUST_FIT.get(name)
    if len(answer) > _MAX_ANSWER_CHARS or (fits is not None and not fits(answer, made)):
        return 0.0
    try:
        return 1.0 if dataset.score_answer(answer, made) >= 1.0 else 0.0
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - strict: whatever a scorer chokes on is not an answer
        return 0.0


def plain_truth(name: str, made: Mapping[str, Any]) -> str:
    """The truth of an item, spelt in one way where the library spells it in several: truths are told apart by it."""
    if name == "fraction_simplification":
        return "/".join(re.findall("[0-9]+", made["answer"]))
    return str(made["answer"])


def _is_truth(answer: str, made: Mapping[str, Any]) -> bool:
    return bool(answer == made["answer"])


def _is_arithmetic(answer: str, _: Mapping[str, Any]) -> bool:
    return _ARITHMETIC.fullmatch(answer) is not None and "**" not in answer


def _is_without_nan(answer: str, _: Mapping[str, Any]) -> bool:
    return "nan" not in answer.lower()


def _is_formula(answer: str, _: Mapping[str, Any]) -> bool:
    return (
        _FORMULA.fullmatch(answer) is not None
        and len(_OPERATOR.findall(answer)) <= _MAX_OPERATORS
        and _NO_FORMULA.search(answer) is None
    )


def _is_truth_in_any_case(answer: str, made: Mapping[str, Any]) -> bool:
    return bool(answer.lower() == made["answer"].lower())


def _is_fraction(answer: str, _: Mapping[str, Any]) -> bool:
    return _FRACTION.fullmatch(answer.strip()) is not None


# What an answer must be before the library's scorer sees it.
_MUST_FIT: dict[str, Callable[[str, Mapping[str, Any]], bool]] = {
    "binary_matrix": _is_truth,  # evaluates any other text, and for part marks only
    "countdown": _is_arithmetic,  # evaluates the text
    "complex_arithmetic": _is_without_nan,  # takes nan for right: min(1.0, nan) is 1.0
    "fraction_simplification": _is_fraction,  # reads the beginning of the text and stops
    "number_sorting": _is_without_nan,  # takes [NaN, NaN, NaN] for right: NaN is neither unsorted nor far off
    "spell_backward": _is_truth_in_any_case,  # adds up 1/length for each letter: more than 1 for some longer answers
    # tries 2^k assignments, where k counts whatever names the text holds; reads it with the square of its length
    "propositional_logic": _is_formula,
}
