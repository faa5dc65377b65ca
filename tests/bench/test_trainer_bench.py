"""The pure parts of scripts/bench/trainer.py; the other trainers' environments are not made here."""

import csv
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = str(Path(__file__).parents[2] / "scripts" / "bench")


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(SCRIPTS)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("trainer", "trainer_bench")]:
        del sys.modules[name]


def measured(name: str, cpu: list[float], peak: float = 100.0) -> Any:
    from trainer_bench.report import Measured

    return Measured(name, seconds=[2 * one for one in cpu], cpu_seconds=cpu, peak_bytes=peak)


def test_a_ratio_is_taken_repetition_by_repetition() -> None:
    from trainer_bench.report import Ratio, ratio

    assert ratio([2.0, 30.0, 4.0], [1.0, 10.0, 4.0]) == Ratio(2.0, 1.0, 3.0)


def test_the_fastest_of_a_librarys_settings_counts() -> None:
    from trainer_bench.report import fastest

    assert fastest([measured("ours", [1]), measured("trl a", [3]), measured("trl b", [2])], "trl").name == "trl b"


def test_goals_that_are_missed_are_told() -> None:
    from trainer_bench.report import goals

    lines = goals([measured("ours", [1.0]), measured("trl x", [1.4], 250), measured("genrl minibatch 64", [6.0], 150)])
    assert [line.startswith("reached") for line in lines] == [True, False, False, True, True]


def test_a_warm_up_counts_for_memory_alone() -> None:
    one = measured("ours", [])
    one.add({"seconds": 9.0, "cpu_seconds": 9.0, "peak_bytes": 500.0, "left_bytes": 1.0}, warm_up=True)
    one.add({"seconds": 1.0, "cpu_seconds": 1.0, "peak_bytes": 200.0, "left_bytes": 2.0}, warm_up=False)
    assert (one.seconds, one.peak_bytes, one.left_bytes) == ([1.0], 500.0, 2.0)


def test_a_file_has_one_line_a_repetition(tmp_path: Path) -> None:
    from trainer_bench.report import write

    what: dict[str, object] = {"model": "m", "questions": "node", "shape": "full"}
    write(tmp_path / "raw.csv", [(what, [measured("ours", [1.0, 2.0])])])
    with (tmp_path / "raw.csv").open() as file:
        assert [row["cpu_seconds"] for row in csv.DictReader(file)] == ["1.0", "2.0"]


def test_who_does_not_fit_into_memory_is_named_and_has_no_figures(tmp_path: Path) -> None:
    from trainer_bench.report import goals, table, write

    large = measured("genrl minibatch 64", [])
    large.failed = "needs more than the 20 GiB that are free here"
    everyone = [measured("ours", [1.0, 1.0]), measured("trl x", [2.0, 2.0], 250), large]
    assert large.failed in table(everyone)
    assert [line.split()[0] for line in goals(everyone)] == ["left", "reached", "reached", "reached"]
    write(tmp_path / "raw.csv", [({"model": "m", "questions": "node", "shape": "full"}, everyone)])
    with (tmp_path / "raw.csv").open() as file:
        assert [row["failed"] for row in csv.DictReader(file)] == ["", "", "", "", large.failed]


def test_a_contender_fails_beyond_its_memory_and_nobody_is_killed() -> None:
    import trainer

    ended = subprocess.run(
        [sys.executable, "-c", "bytearray(1 << 30)"],
        preexec_fn=lambda: trainer.limit_memory(1 << 28),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert "MemoryError" in ended.stderr


@pytest.mark.parametrize(("left", "ids"), [(True, [[0, 7], [8, 9]]), (False, [[7, 0], [8, 9]])])
def test_rows_are_padded_to_one_width(left: bool, ids: list[list[int]]) -> None:
    from trainer_bench.child import padded

    found, masks = padded([[7], [8, 9]], 0, left)
    assert found == ids
    assert masks == [[int(token != 0) for token in row] for row in ids]


def test_a_flat_group_has_no_advantage_and_the_others_have() -> None:
    from trainer_bench.workload import rewards

    assert len(set(rewards(flat=True))) == 1
    assert sum(rewards(flat=False)) == 4


def test_lengths_are_those_asked_for() -> None:
    from trainer_bench.workload import lengths

    assert lengths("full", 64, random.Random(0)) == [64] * 8
    mixed = lengths("mixed", 64, random.Random(0))
    assert all(16 <= one <= 64 for one in mixed)
    assert len(set(mixed)) > 1


def test_the_compared_logprobs_are_those_that_have_an_exact_value() -> None:
    from trainer_bench.workload import compared

    batch = {"groups": [{"prompt": [1], "completions": [[1, 2]] * 8}, {"prompt": [1], "completions": [[1]] * 8}]}
    values = [float(index) for index in range(24)]
    assert compared(batch, values) == [0.0, 1.0, 16.0]  # the first completion of each group
