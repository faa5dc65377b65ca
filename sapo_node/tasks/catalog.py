"""Which ReasoningGYM tasks are offered, and between which bounds their generators may be set.

A stranger's coordinates name a task and its settings, and this node then runs that generator: a setting is an attack
surface (a matrix of 3000 x 3000, a loop that never ends because two bounds are equal). So every field that may be set
is declared here with its range, the fields that belong together are checked together, and whatever is not declared is
refused. Within these bounds a question takes well under half a second and stays below MAX_QUESTION_BYTES; the deadline
of the scorer worker stands behind them.

Nothing here imports reasoning_gym: the node itself uses this module, the generators run in the scorer workers only.
"""

import functools
import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct

from sapo_node.rollouts.schema import ConfigValue
from sapo_node.tasks.base import TaskRefused, TaskSpec

MAX_QUESTION_BYTES: Final = 16 * 1024
"""Longest question, in UTF-8. Longer ones are refused: they would crowd out the answers in every limit behind."""

MAX_LIST: Final = 16
"""Entries of a list setting. A repeated entry is allowed, as the generators take it for a weight."""

_UNSTABLE = (
    "its questions depend on the hash seed of the Python process, so two nodes never agree on what was asked (its "
    "generator walks over sets)"
)
UNUSABLE: Final[dict[str, str]] = {
    "codeio": _UNSTABLE,
    "isomorphic_strings": _UNSTABLE,
    "knight_swap": _UNSTABLE,
    "polynomial_multiplication": _UNSTABLE,
    "ransom_note": _UNSTABLE,
    "word_ladder": _UNSTABLE,
    "intermediate_integration": "its questions depend on what the process generated before",
    "list_functions": "its questions depend on what the process generated before",
    "coin_flip": "its scorer takes the answer 0 for right, whatever was asked",
    "acre": "its questions depend on the size of the data set, so coordinates do not address them",
}
"""Tasks that cannot be part of a swarm, with the reason."""


class Int(Struct, frozen=True):
    """A whole number between two bounds, both included."""

    default: int
    low: int
    high: int

    def problem(self, value: ConfigValue) -> str | None:
        """What is wrong with a value, or None."""
        if type(value) is int and self.low <= value <= self.high:
            return None
        return f"must be a whole number from {self.low} to {self.high}"


class Real(Struct, frozen=True):
    """A finite number between two bounds, both included. Whole numbers count as such."""

    default: float
    low: float
    high: float

    def problem(self, value: ConfigValue) -> str | None:
        """What is wrong with a value, or None. NaN lies between no bounds."""
        if isinstance(value, int | float) and type(value) is not bool and self.low <= value <= self.high:
            return None
        return f"must be a number from {self.low:g} to {self.high:g}"


class Flag(Struct, frozen=True):
    """true or false."""

    default: bool

    def problem(self, value: ConfigValue) -> str | None:
        """What is wrong with a value, or None."""
        return None if type(value) is bool else "must be true or false"


class Choice(Struct, frozen=True):
    """One of a few words."""

    default: str
    words: tuple[str, ...]

    def problem(self, value: ConfigValue) -> str | None:
        """What is wrong with a value, or None."""
        return None if value in self.words else f"must be one of {', '.join(self.words)}"


class Several(Struct, frozen=True):
    """A list of words out of a few; at least one."""

    default: tuple[str, ...]

    def problem(self, value: ConfigValue) -> str | None:
        """What is wrong with a value, or None."""
        if isinstance(value, list) and 0 < len(value) <= MAX_LIST and all(entry in self.default for entry in value):
            return None
        return f"must be a list of 1 to {MAX_LIST} out of {', '.join(self.default)}"


Field = Int | Real | Flag | Choice | Several
Rule = Callable[[Mapping[str, ConfigValue]], str | None]


class Task(Struct, frozen=True):
    """The settings of one generator. Defaults are the library's own: a rule may join a set field to an unset one."""

    fields: dict[str, Field]
    rules: tuple[Rule, ...] = ()


def _span(name: str, defaults: tuple[float, float], low: float, high: float, *, strict: bool = False) -> Task:
    """`min_<name>` and `max_<name>` between the same bounds; equal ones are refused where `strict`."""
    smaller, larger = f"min_{name}", f"max_{name}"

    def ordered(values: Mapping[str, ConfigValue]) -> str | None:
        small, large = values[smaller], values[larger]
        assert isinstance(small, int | float)
        assert isinstance(large, int | float)
        if small < large or (small == large and not strict):
            return None
        return f"{smaller} ({small}) must be {'below' if strict else 'at most'} {larger} ({large})"

    whole = all(isinstance(number, int) for number in (*defaults, low, high))
    make: Callable[[float], Field] = (
        (lambda default: Int(int(default), int(low), int(high))) if whole else (lambda d: Real(float(d), low, high))
    )
    return Task({smaller: make(defaults[0]), larger: make(defaults[1])}, (ordered,))


def _one(**fields: Field) -> Task:
    return Task(dict(fields))


def _rule(rule: Rule) -> Task:
    return Task({}, (rule,))


def _task(*parts: Task) -> Task:
    fields = {name: field for part in parts for name, field in part.fields.items()}
    return Task(fields, tuple(rule for part in parts for rule in part.rules))


def _not_only_division(values: Mapping[str, ConfigValue]) -> str | None:
    return "operators must hold one besides '/'" if values["operators"] in (["/"], ["/"] * 2) else None


def _few_digits_in_products(values: Mapping[str, ConfigValue]) -> str | None:
    # The generator looks for the divisors of a whole parenthesis by trial, so a long product takes for ever. With the
    # defaults (6 terms of 4 digits, all operators) one question in 5,000 does; the deadline refuses those.
    operators, terms, digits = values["operators"], values["max_terms"], values["max_digits"]
    assert isinstance(operators, list)
    assert isinstance(terms, int)
    assert isinstance(digits, int)
    limit = 24 if set(operators) == set(_OPERATORS) and len(operators) == len(_OPERATORS) else 15
    if values["allow_parentheses"] and {"*", "/"} <= set(operators) and terms * digits > limit:
        return (
            f"max_terms x max_digits ({terms} x {digits}) must be at most {limit} with these operators in parentheses"
        )
    return None


def _targets_to_hit(values: Mapping[str, ConfigValue]) -> str | None:
    low, high = values["min_target"], values["max_target"]
    assert isinstance(low, int)
    assert isinstance(high, int)
    # The generator throws whole expressions away until one hits; each costs milliseconds of computer algebra, and after
    # a hundred it gives up: with small numbers and larger targets always, after 0.4 s.
    largest = values["max_value"]
    assert isinstance(largest, int)
    if largest < min(low, 25):
        return (
            f"max_value ({largest}) must be at least 25, or min_target ({low}) at most max_value: else few targets hit"
        )
    if low <= 100 and high - low >= 500:
        return None
    return f"min_target ({low}) must be at most 100, and max_target ({high}) must exceed it by 500 or more"


def _precise_enough(values: Mapping[str, ConfigValue]) -> str | None:
    places, precision = values["max_num_decimal_places"], values["precision"]
    assert isinstance(places, int)
    assert isinstance(precision, int)
    if precision > places + 1:
        return None
    return f"precision ({precision}) must exceed max_num_decimal_places ({places}) by 2 or more"


_OPERATORS = ("+", "-", "*", "/")

OFFERED: Final[dict[str, Task]] = {
    "arc_1d": _task(_span("size", (10, 30), 10, 40), _one(num_train=Int(3, 1, 5))),
    "base_conversion": _task(
        _span("base", (2, 16), 2, 36, strict=True),  # equal ones send the generator into an endless loop
        _span("value", (0, 1000), 0, 10**12, strict=True),
    ),
    "basic_arithmetic": _task(
        _span("terms", (2, 6), 1, 8),
        _span("digits", (1, 4), 1, 6),
        _one(
            operators=Several(_OPERATORS),
            allow_parentheses=Flag(True),
            allow_negation=Flag(True),
            format_style=Choice("simple", ("simple", "natural")),
            whitespace=Choice("single", ("no_space", "single", "random")),
        ),
        _rule(_not_only_division),
        _rule(_few_digits_in_products),
    ),
    "bf": _one(difficulty=Int(1, 1, 2)),  # at 3 some programs run for minutes
    "binary_alternation": _task(_span("n", (10, 30), 1, 200), _one(p_solvable=Real(0.8, 0.0, 1.0))),
    "binary_matrix": _task(_span("n", (3, 10), 2, 24), _one(p_zero=Real(0.25, 0.01, 1.0))),
    "bitwise_arithmetic": _one(difficulty=Int(2, 1, 6)),
    "caesar_cipher": _task(_span("words", (3, 20), 1, 60), _span("rotation", (1, 25), 1, 25)),
    "calendar_arithmetic": _one(
        year=Int(2022, 1600, 3000),
        tasks=Several(
            (
                "weekday_offset",
                "weekday_of_date",
                "weekday_of_date_from_first_date",
                "recurring_event_day",
                "count_days",
                "count_business_days",
                "is_leap_year",
            )
        ),
        offset_upper_bound=Int(100, 1, 1000),  # 0 sends the generator into an endless loop
        leap_year_range=Int(200, 2, 1000),
    ),
    "chain_sum": _task(_span("terms", (2, 6), 1, 30), _span("digits", (1, 4), 1, 15), _one(allow_negation=Flag(False))),
    "complex_arithmetic": _task(
        _span("real", (-10, 10), -1000, 1000, strict=True), _span("imag", (-10, 10), -1000, 1000, strict=True)
    ),
    "count_bits": _span("n", (1, 2**31 - 1), 1, 2**53 - 1),  # the wire carries no larger numbers
    "count_primes": _span("n", (1, 10_000), 1, 100_000),
    "countdown": _task(
        _span("numbers", (4, 6), 2, 6),
        _span("value", (1, 100), 1, 100),
        _span("target", (100, 999), 1, 2000),
        _one(shuffle=Flag(True)),
        _rule(_targets_to_hit),
    ),
    "decimal_arithmetic": _task(
        _span("num_decimal_places", (3, 3), 1, 10),
        _span("terms", (2, 6), 1, 12),
        _one(precision=Int(12, 3, 28)),
        _rule(_precise_enough),
    ),
    "decimal_chain_sum": _task(
        _span("terms", (2, 6), 1, 20),
        _span("digits", (1, 4), 1, 8),
        _span("decimal_places", (1, 4), 0, 8),
        _one(allow_negation=Flag(False)),
    ),
    "dice": _one(num_dice=Int(4, 1, 8), max_dice_size=Int(20, 2, 40)),
    "fraction_simplification": _task(
        _span("value", (1, 1000), 1, 10**6, strict=True),
        _span("factor", (1, 100), 1, 10**4),
        _one(styles=Several(("plain", "latex_inline", "latex_frac", "latex_dfrac"))),
    ),
    "gcd": _task(_span("numbers", (2, 2), 2, 10), _span("value", (1, 1000), 1, 10**9, strict=True)),
    "lcm": _task(_span("numbers", (2, 2), 2, 6), _span("value", (1, 100), 1, 10**6, strict=True)),
    "leg_counting": _task(_span("animals", (3, 10), 1, 37), _span("instances", (1, 15), 1, 1000)),
    "letter_counting": _span("words", (5, 15), 1, 100),
    "number_filtering": _task(
        _span("numbers", (3, 10), 1, 50),
        _span("decimals", (0, 4), 0, 8),
        _span("value", (-100.0, 100.0), -1e6, 1e6, strict=True),
    ),
    "number_format": _task(
        _span("num_candidates", (2, 5), 2, 20),
        _span("n", (1e3, 1e9), 1.0, 1e12, strict=True),
        _one(max_delta=Real(10.0, 0.01, 1e6)),
    ),
    "number_sorting": _task(
        _span("numbers", (3, 10), 1, 50),
        _span("decimals", (0, 2), 0, 8),
        _span("value", (-100.0, 100.0), -1e6, 1e6, strict=True),
    ),
    "power_function": _task(_span("base", (-1e3, 1e3), -1e4, 1e4), _span("exponent", (0, 8), 0, 12)),
    "prime_factorization": _span("value", (2, 1000), 2, 10**9),
    "products": _task(_span("terms", (2, 2), 1, 6), _span("digits", (1, 5), 1, 10), _one(allow_negation=Flag(False))),
    "propositional_logic": _task(
        _span("vars", (2, 4), 1, 6), _span("statements", (2, 4), 1, 6), _span("complexity", (1, 3), 1, 4)
    ),
    "rotate_matrix": _task(_span("n", (2, 10), 2, 24), _span("rotations", (0, 10), 0, 100)),
    "simple_equations": _task(_span("terms", (2, 4), 1, 8), _span("value", (1, 100), 1, 10**4)),
    "simple_geometry": _task(_span("sides", (3, 6), 3, 16), _span("angle", (10, 170), 1, 179)),
    "spell_backward": _span("word_len", (3, 10), 3, 10),
    "syllogism": _one(invalid_ratio=Real(0.3, 0.0, 1.0), inversion_probability=Real(0.3, 0.0, 1.0)),
    "word_sequence_reversal": _span("words", (3, 8), 1, 60),
    "word_sorting": _task(_span("words", (3, 10), 1, 30), _span("word_length", (3, 12), 1, 14)),
}
"""The tasks offered, by ReasoningGYM's names."""


@functools.cache
def library_version() -> str:
    """Version of the installed reasoning-gym, the `version` of its task references."""
    return importlib.metadata.version("reasoning-gym")


def validate(name: str, config: Mapping[str, ConfigValue]) -> None:
    """Check a task's name and explicit settings. Raises TaskRefused with everything that is wrong, for people."""
    if name in UNUSABLE:
        raise TaskRefused(f"{name} cannot be used: {UNUSABLE[name]}")
    task = OFFERED.get(name)
    if task is None:
        raise TaskRefused(f"{name!r} is not offered; the tasks offered are {', '.join(OFFERED)}")
    problems = [_field_problem(task, key, value) for key, value in config.items()]
    if not any(problems):
        values: dict[str, ConfigValue] = {key: _default(field) for key, field in task.fields.items()}
        problems = [rule({**values, **config}) for rule in task.rules]
    told = [problem for problem in problems if problem]
    if told:
        raise TaskRefused(f"{name}: {'; '.join(told)}")


def validate_spec(spec: TaskSpec) -> None:
    """Check a ReasoningGYM task as a whole, its library version too. Raises TaskRefused, for people."""
    if spec.source != "reasoning_gym":
        raise TaskRefused(f"{spec.name}: rows of a data set are not generated")
    if spec.version != library_version():
        raise TaskRefused(
            f"{spec.name}: asked for reasoning-gym {spec.version}, but {library_version()} is installed here; other "
            "versions ask other questions"
        )
    validate(spec.name, spec.config)


def _field_problem(task: Task, key: str, value: ConfigValue) -> str | None:
    field = task.fields.get(key)
    if field is None:
        return f"{key!r} cannot be set; the settings are {', '.join(task.fields)}"
    problem = field.problem(value)
    return f"{key} {problem}, not {_shown(value)}" if problem else None


def _default(field: Field) -> ConfigValue:
    return list(field.default) if isinstance(field, Several) else field.default


def _shown(value: ConfigValue) -> str:
    text = repr(value)  # may be a stranger's
    return text if len(text) <= 60 else text[:57] + "..."
