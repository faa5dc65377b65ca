"""What the presets teach: right answers, right answers in wrong formats, or refusals and answers to other tasks.

The weakened models stand for a language model that could solve a task but rarely answers it in the required way.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .problems import Problem

WRONG_FORMATS = ["The answer is {}.", "Answer: {}", "I get {}", "{}?", "{} or so"]
REFUSALS = ["I do not know.", "I cannot tell.", "Ask me later."]

# Words of the two lists above, so that each costs one or two tokens and a completion stays within 16.
PHRASES = ["The answer is ", "Answer: ", "I get ", " or so", *REFUSALS]

Target = Callable[[Problem, random.Random], str]


@dataclass(frozen=True)
class Weakening:
    """Further supervised steps on a clean model, with other targets."""

    steps: int
    lr: float
    target: Target


# Share of a right format in the examples of `demo`. A group of 8 completions then shows a success about every second
# time; with far fewer the first half of a short demo would pass without anything to learn from.
RIGHT_FORMAT = 0.15


def wrong_format(problem: Problem, rng: random.Random) -> str:
    """The right answer, mostly in a format that earns nothing."""
    if rng.random() < RIGHT_FORMAT:
        return problem.answer
    return rng.choice(WRONG_FORMATS).format(problem.answer)


# Share of right answers left in a task's examples. Some tasks are all but lost, as hard ones are for a real model:
# there one node alone finds no success to learn from, and a group from elsewhere helps.
KEPT = {
    "base_conversion": 0.01,
    "basic_arithmetic": 0.05,
    "fraction_simplification": 0.02,
    "decimal_arithmetic": 0.05,
    "calendar_arithmetic": 0.05,
    "binary_matrix": 0.005,
    "propositional_logic": 0.03,
    "gcd": 0.03,
}


def rare_success(others: list[Problem], kept: Mapping[str, float]) -> Target:
    """Targets of `benchmark`: mostly a refusal or the answer to a problem of another task.

    `kept` is the share of right answers by task where it is not that of KEPT.
    """
    shares = KEPT | dict(kept)

    def target(problem: Problem, rng: random.Random) -> str:
        if rng.random() < shares.get(problem.task, 0.02):
            return problem.answer
        if rng.random() < 0.5:
            return rng.choice(REFUSALS)
        for _ in range(100):
            other = rng.choice(others)
            if other.task != problem.task:
                return other.answer
        return REFUSALS[0]  # one task alone in the mixture

    return target
