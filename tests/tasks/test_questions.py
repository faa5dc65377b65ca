"""The same coordinates ask the same question everywhere, and answers to it are judged strictly."""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sapo_node.tasks.base import TaskRefused
from sapo_node.tasks.catalog import OFFERED, Several

# Other texts, and this node is alone: nobody agrees with it on what was asked. Default settings, seed 5.
PINNED = {
    "arc_1d": "5dfcf9b7b26c107c5f80e2c5855819c81a88bc9a1547a31bc3acc824890d81fe",
    "base_conversion": "9595b5f8a147623ad9fdd5915431d479d9ca6c70c3dd8eba7823789f1cf5de18",
    "basic_arithmetic": "5d91189148a34e4f0b89ab7d0da9e15c950e90c8884cec711f832d76dceba895",
    "bf": "69ccef9c519b29ed75d11e2bdea8799d4217e6b0c24a5ed465b87a2cdae2913a",
    "binary_matrix": "5d9b7c96684621367c055eaffaa18ceeb16200d703dd9ac629991b558e33f9b2",
    "calendar_arithmetic": "6cbbcabb094f35e96a3c34fccdcac8b311fe04264c5576b40d858fdd93996d46",
    "decimal_arithmetic": "e07927972343b1678c69530e5bc806aeb5b2eac07a8dcfa218107cc7388bb455",
    "fraction_simplification": "f165949518f3d4b900bbeebb1b3870eadee793480295ee9ed0e0b8115463ddd1",
    "gcd": "ef204a4d16f53c0ad8c17b05abf372ff10cc0cc0d779692f13f0ea982c149aed",
    "propositional_logic": "827e505d8a18851d56b695cac318cc8a4be019bf2d0019ed9f6d7f4c30f78d3f",
}

JUNK = [
    "",
    " ",
    "junk",
    "nan",
    "NaN",
    "[NaN, NaN, NaN]",
    "inf",
    "-1e999",
    "[]",
    "()",
    "0/0",
    "None",
    "True",
    "(" * 3000,
]


HARDEST = {"vars": 6, "statements": 6, "complexity": 4}  # of propositional_logic

SLOW = [  # texts that are much work for one parser or another
    "¬" * 900 + "P",
    "P∧" * 400 + "P",
    "9" * 16_000,
    "0x" + "f" * 16_000,
    "1e999999999",
    "1E-999999999999",
    "9*" * 249 + "9",
    "1/3+" * 120 + "1",
    "7" * 240 + "/" + "3" * 240,
    "(9-" * 100 + "1" + ")" * 100,
    "(" * 8000 + "1" + ")" * 8000,
    "-" * 16_000,
    " " * 16_000 + "x",
    "1+" * 8000 + "i",
    "×".join(["9"] * 8000),
    "×".join(["9" * 4000] * 4),
    "\\frac{1}{" + "2" * 16_000,
    ",\t" * 8000,
    "[" * 16_000,
    "[" + "1," * 8000 + "1]",
    "<answer>" * 2000,
    "İ" * 16_000,
]


def regenerate(folder: Path, order: str, hash_seed: str) -> dict[str, list[str]]:
    """What `tests.tasks.regenerate` prints in a fresh process."""
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "MPLCONFIGDIR": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.tasks.regenerate", order]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=110, check=True)
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return regenerate(tmp_path_factory.mktemp("mpl"), "forward", "1")


@pytest.fixture(scope="module")
def gym(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The module under test; its import makes matplotlib write."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPLCONFIGDIR", str(tmp_path_factory.mktemp("mpl")))
        from sapo_node.tasks import reasoning_gym
    return reasoning_gym


@pytest.mark.slow
def test_every_task_is_the_same_in_another_process_in_another_order(here: dict[str, list[str]], tmp_path: Path) -> None:
    there = regenerate(tmp_path, "backward", "2")
    assert {key for key in here if here[key] != there[key]} == set()
    assert {key.split()[0] for key in here} == set(OFFERED)
    assert len(here) == len(OFFERED) * 2 * 5
    assert all(len(item) == 2 for item in here.values()), "a bound leaves a generator without questions"


@pytest.mark.slow
def test_no_question_at_the_bounds_is_large(here: dict[str, list[str]]) -> None:
    assert max(len(item[0].encode()) for item in here.values()) < 4096


@pytest.mark.parametrize("name", PINNED)
def test_known_questions_stay_as_they_are(gym: Any, name: str) -> None:
    assert hashlib.sha256(gym.item(name, {}, 5)["question"].encode()).hexdigest() == PINNED[name]


@pytest.mark.parametrize("name", OFFERED)
def test_declared_defaults_are_those_of_the_library(gym: Any, name: str) -> None:
    config = gym.open_dataset(name, {}, 0).config
    declared = {key: field.default for key, field in OFFERED[name].fields.items()}
    actual = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for key, default in declared.items():
        found = tuple(actual[key]) if isinstance(OFFERED[name].fields[key], Several) else actual[key]
        assert found == default, key


@pytest.mark.parametrize("name", OFFERED)
def test_the_truth_is_right_and_junk_is_not(gym: Any, name: str) -> None:
    for seed in range(3):
        dataset = gym.open_dataset(name, {}, seed)
        entry = gym.entry(dataset, name, seed)
        assert gym.reward(dataset, name, entry, f"so <answer> {entry['answer']} </answer>") == 1.0
        junk = [text for text in JUNK if text.strip() != entry["answer"].strip()]
        assert [text for text in junk if gym.reward(dataset, name, entry, text) != 0.0] == []


def test_part_marks_are_worth_nothing(gym: Any) -> None:
    dataset = gym.open_dataset("calendar_arithmetic", {"tasks": ["weekday_offset"]}, 1)
    entry = gym.entry(dataset, "calendar_arithmetic", 1)
    wrong = next(day for day in ("Monday", "Tuesday") if day != entry["answer"])
    assert dataset.score_answer(wrong, entry) > 0
    assert gym.reward(dataset, "calendar_arithmetic", entry, wrong) == 0.0


def test_numbers_that_are_no_numbers_do_not_pass_for_sorted(gym: Any) -> None:
    dataset = gym.open_dataset("number_sorting", {}, 1)
    entry = gym.entry(dataset, "number_sorting", 1)
    answer = "[" + ", ".join(["NaN"] * entry["metadata"]["numbers"]) + "]"
    assert dataset.score_answer(answer, entry) == 1.0  # what the library says
    assert gym.reward(dataset, "number_sorting", entry, answer) == 0.0


def test_more_than_the_word_is_no_word_spelt_backward(gym: Any) -> None:
    dataset = gym.open_dataset("spell_backward", {"min_word_len": 9, "max_word_len": 9}, 1)
    entry = gym.entry(dataset, "spell_backward", 1)
    assert dataset.score_answer(entry["answer"] + "x", entry) >= 1.0  # nine ninths are more than 1.0 in floats
    assert gym.reward(dataset, "spell_backward", entry, entry["answer"] + "x") == 0.0


@pytest.mark.parametrize("name", ["binary_matrix", "countdown"])
def test_code_never_reaches_an_evaluating_scorer_of_an_offered_task(gym: Any, name: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    plant = f"__import__('os').mkdir({str(marker)!r})"
    dataset = gym.open_dataset(name, {}, 1)
    entry = gym.entry(dataset, name, 1)
    assert gym.reward(dataset, name, entry, plant) == 0.0
    assert not marker.exists()
    dataset.score_answer(plant, entry)
    assert marker.exists(), "the plant does not fire, so this test shows nothing"


def test_many_names_in_a_formula_are_refused_before_all_their_assignments_are_tried(gym: Any) -> None:
    dataset = gym.open_dataset("propositional_logic", {}, 1)
    entry = gym.entry(dataset, "propositional_logic", 1)
    for names in ([f"x{i}" for i in range(40)], ["P" * i for i in range(1, 40)]):
        assert gym.reward(dataset, "propositional_logic", entry, " ∨ ".join(names)) == 0.0  # else: 2^40 steps


@pytest.mark.parametrize(
    "slow",
    [
        "¬" * 900 + "P",
        "P∧" * 400 + "P",
        "(P)∧" * 200 + "P",
        "¬" * 48 + " " * 239 + "P",
        "¬ ¬ ¬(" * 16 + "P" + ")" * 16,
        "P  ∧  " * 47 + "P",
        "(" * 143 + "P" + ")" * 143,
    ],
)
def test_no_formula_takes_long(gym: Any, slow: str) -> None:
    hardest = {f"{end}_{name}": n for end in ("min", "max") for name, n in HARDEST.items()}
    dataset = gym.open_dataset("propositional_logic", hardest, 1)
    entry = gym.entry(dataset, "propositional_logic", 1)
    started = time.process_time()
    gym.reward(dataset, "propositional_logic", entry, slow)
    assert time.process_time() - started < 0.05


@pytest.mark.parametrize("seed", range(5))
def test_all_premises_together_follow_from_the_premises(gym: Any, seed: int) -> None:
    hardest = {f"{end}_{name}": n for end in ("min", "max") for name, n in HARDEST.items()}
    dataset = gym.open_dataset("propositional_logic", hardest, seed)
    entry = gym.entry(dataset, "propositional_logic", seed)
    together = " ∧ ".join(entry["metadata"]["premises"])
    assert gym.reward(dataset, "propositional_logic", entry, together) == dataset.score_answer(together, entry) == 1.0


@pytest.mark.parametrize("name", OFFERED)
def test_no_text_is_slow_to_judge(gym: Any, name: str) -> None:
    dataset = gym.open_dataset(name, {}, 1)
    entry = gym.entry(dataset, name, 1)
    for text in [*SLOW, entry["answer"] * 100]:
        started = time.process_time()
        gym.reward(dataset, name, entry, text)
        assert time.process_time() - started < 0.05, text[:20]


def test_an_answer_longer_than_any_truth_is_wrong(gym: Any) -> None:
    dataset = gym.open_dataset("gcd", {}, 5)
    entry = gym.entry(dataset, "gcd", 5)
    zeros = "0" * 20_000
    assert gym.reward(dataset, "gcd", entry, zeros + entry["answer"]) == 0.0


def test_a_seed_without_a_question_is_told(gym: Any) -> None:
    with pytest.raises(TaskRefused, match="simple_geometry has no question for seed 3: ValueError: Could not generate"):
        gym.item("simple_geometry", {"min_angle": 170, "max_sides": 3}, 3)
