"""Which tasks and settings are let through to a generator."""

import subprocess
import sys

import pytest

from sapo_node.rollouts.schema import ConfigValue
from sapo_node.tasks.base import TaskRefused
from sapo_node.tasks.catalog import (
    MAX_LIST,
    OFFERED,
    UNUSABLE,
    Choice,
    Flag,
    Int,
    Real,
    Several,
    library_version,
    validate,
    validate_spec,
)
from tests.tasks.specs import spec

PAPER = [
    "arc_1d",
    "base_conversion",
    "basic_arithmetic",
    "bf",
    "binary_matrix",
    "calendar_arithmetic",
    "decimal_arithmetic",
    "fraction_simplification",
    "propositional_logic",
]
UNSTABLE = ["codeio", "isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"]

FIELDS = [(name, key) for name, task in OFFERED.items() for key in task.fields]


def outside(field: object) -> list[ConfigValue]:
    """Values that a field must refuse: beyond its bounds, or of another kind."""
    if isinstance(field, Int):
        return [field.low - 1, field.high + 1, 10**30, True, float(field.low), "3", [field.low]]
    if isinstance(field, Real):
        return [field.low - 1e-3, field.high + 1e-3, float("nan"), float("inf"), True, "3"]
    if isinstance(field, Flag):
        return [1, 0, "true", [True]]
    if isinstance(field, Choice):
        return ["other", "", 1, True, [field.default]]
    assert isinstance(field, Several)
    return [[], ["other"], list(field.default) * MAX_LIST, "".join(field.default), 1]


def test_the_tasks_of_the_paper_are_offered() -> None:
    for name in PAPER:
        validate(name, {})


@pytest.mark.parametrize(("name", "key"), FIELDS)
def test_every_bound_is_enforced(name: str, key: str) -> None:
    for value in outside(OFFERED[name].fields[key]):
        with pytest.raises(TaskRefused, match=f"{name}: {key} must be"):
            validate(name, {key: value})


@pytest.mark.parametrize("name", [name for name, task in OFFERED.items() if any("min_" in key for key in task.fields)])
def test_a_minimum_above_its_maximum_is_refused(name: str) -> None:
    for key, field in OFFERED[name].fields.items():
        if key.startswith("min_"):
            other = key.replace("min_", "max_", 1)
            low, high = field.low, field.high  # type: ignore[union-attr]
            with pytest.raises(TaskRefused, match=f"{key}.*must be (below|at most) {other}"):
                validate(name, {key: high, other: low})


def test_a_minimum_is_compared_with_the_default_of_its_maximum() -> None:
    with pytest.raises(TaskRefused, match=r"min_terms \(8\) must be at most max_terms \(6\)"):
        validate("basic_arithmetic", {"min_terms": 8})


@pytest.mark.parametrize(
    ("name", "config", "told"),
    [
        ("base_conversion", {"min_base": 7, "max_base": 7}, "below"),
        ("binary_matrix", {"max_n": 3000}, "from 2 to 24"),
        ("arc_1d", {"max_size": 10**6}, "from 10 to 40"),
        ("calendar_arithmetic", {"offset_upper_bound": 0}, "from 1"),
        ("decimal_arithmetic", {"precision": 4}, "by 2 or more"),
        ("basic_arithmetic", {"operators": ["/"]}, "besides"),
        ("basic_arithmetic", {"operators": ["*", "/"]}, "at most 15"),
        ("countdown", {"min_target": 900}, "must be at most 100"),
        ("countdown", {"max_value": 3}, "must be at least 25"),
        ("spell_backward", {"data_file": "../secret"}, "'data_file' cannot be set"),
        ("gcd", {"size": 10**9}, "'size' cannot be set; the settings are min_numbers"),
        ("gcd", {"seed": 1}, "'seed' cannot be set"),
    ],
)
def test_settings_that_hurt_are_refused_with_what_would_do(
    name: str, config: dict[str, ConfigValue], told: str
) -> None:
    with pytest.raises(TaskRefused, match=told):
        validate(name, config)


def test_everything_wrong_is_told_at_once_and_long_values_are_cut() -> None:
    with pytest.raises(TaskRefused) as refusal:
        validate("gcd", {"max_value": "x" * 10_000, "other": 1})
    assert "max_value" in str(refusal.value)
    assert "'other'" in str(refusal.value)
    assert len(str(refusal.value)) < 400


@pytest.mark.parametrize("name", [*UNSTABLE, "intermediate_integration", "list_functions", "acre", "coin_flip"])
def test_unusable_tasks_are_refused_by_name_with_the_reason(name: str) -> None:
    assert name not in OFFERED
    with pytest.raises(TaskRefused, match=f"{name} cannot be used: {UNUSABLE[name][:30]}"):
        validate(name, {})


def test_an_unknown_task_is_answered_with_the_tasks_there_are() -> None:
    with pytest.raises(TaskRefused, match="'sudoku' is not offered; the tasks offered are arc_1d, base_conversion"):
        validate("sudoku", {})


def test_another_version_of_the_library_is_refused() -> None:
    good = spec("gcd")
    validate_spec(good)
    with pytest.raises(TaskRefused, match=rf"0\.0\.1, but {library_version()} is installed"):
        validate_spec(type(good)(source="reasoning_gym", name="gcd", version="0.0.1", config={}))


def test_the_node_side_does_not_import_the_library() -> None:
    script = "import sys, sapo_node.tasks.scoring; print({'reasoning_gym', 'numpy', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
