"""scripts/bench/connections.py on two real p2pd: every variant is measured, and a peer that was cut off comes back."""

import re
import sys
from pathlib import Path

from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))

import connections


def test_all_variants_are_measured() -> None:
    ended = CliRunner().invoke(connections.main, ["--times", "3"], catch_exceptions=False)
    assert ended.exit_code == 0
    rows = re.findall(r"^\| (.+?) \| (\d+\.\d\d) \(.*\) \| (\d+\.\d\d) \(.*\) \|$", ended.output, re.MULTILINE)
    assert [name for name, *_ in rows] == ["one connection", "the same, p2pd asked", "cut off"]
