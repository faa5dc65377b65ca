"""The alarms in a swarm of real policies: one fires on its attack, and results come back from their file."""

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "scripts" / "bench"))

import alarms
from csv_files import append, row


@pytest.mark.slow  # fifteen rounds of two policies: 6 s on an idle core
def test_a_hack_that_is_sent_by_peers_is_noticed_by_every_node() -> None:
    found = asyncio.run(alarms.execute(alarms.Run("hack", 0, 15)))
    assert found.attack == "3-5"
    kinds, rounds = zip(*(event.split("@") for event in found.began.split("; ")), strict=True)
    assert set(kinds) == {"reward hack"}
    assert len(kinds) >= 2  # one a node, or one for each attacker that it met
    assert all(int(number) in range(3, 6) for number in rounds)


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    run = alarms.Run("honest", 3, 500)
    result = alarms.Result("", "", "", 0, "0.1 0.1 0.2", "0.1 0.1 0.2", "", "", 1.5)
    append(tmp_path / "a.csv", [row(run, result)])
    assert list(alarms.read(tmp_path / "a.csv")) == [run]


def test_a_course_is_told_by_its_start_its_lowest_and_its_end() -> None:
    course = alarms.Course()
    for value in (1.0, 0.5, 0.0, 0.5, 2.0):
        course.add([value, value, None])
    assert str(course) == "1.000 0.000 2.000"
    assert str(alarms.Course()) == ""
