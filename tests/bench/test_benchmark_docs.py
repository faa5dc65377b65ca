"""The figures of docs/benchmarks.md are those that the scripts make of the raw results beside it."""

import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))

import sapo

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
INTERVAL = r"\d+\.\d\d \(\d+\.\d\d to \d+\.\d\d(?:; \d+ of \d+)?"
NUMBER = r"\b\d[\d,]*\.\d+\b"


def part(page: str, heading: str, end: str) -> str:
    return page[page.index(f"\n{heading}\n") : page.index(f"\n{end}\n")]


@pytest.fixture(scope="module")
def reported() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sapo, "draw", lambda *_: None)  # the plots are kept beside the results; drawing takes seconds
        ended = CliRunner().invoke(sapo.cli, ["report"], catch_exceptions=False)
    assert ended.exit_code == 0
    return ended.output


def test_every_interval_and_every_figure_of_a_table_is_one_that_report_prints(reported: str) -> None:
    page = part(PAGE.read_text(), "## SAPO against its controls", "### What selection alone shows")
    intervals, known = re.findall(INTERVAL, page), set(re.findall(NUMBER, reported))
    assert len(intervals) > 50
    assert [one for one in intervals if one not in reported] == []
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    cells = [number for row in rows for cell in row.split("|")[2:] for number in re.findall(NUMBER, cell)]
    assert len(cells) > 200
    assert [number for number in cells if number not in known] == []


def test_no_figure_stands_inside_a_word() -> None:
    assert re.findall(r"[a-z]+\d+\.\d+ \(.*?\)", PAGE.read_text()) == []
