"""The picture draws what the records say."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from sapo_node.monitor import plot
from sapo_node.monitor.metrics import QuestionScore, Record, RoundRecord, eval_record


def one_round(number: int, local: int, external: int) -> RoundRecord:
    return RoundRecord(round=number, time=1.0, policy_version=number, local_groups=local, external_groups=external)


def score(number: int, value: float) -> Record:
    return eval_record([QuestionScore("a", "1", value)], round=number, time=1.0, policy_version=number, samples=1)


def test_the_external_share_is_over_the_last_rounds() -> None:
    records = [one_round(1, 4, 0), one_round(2, 4, 4), one_round(3, 0, 8)]
    rounds, shares = plot.external_share(records, window=2)
    assert rounds == [1, 2, 3]
    assert shares == pytest.approx([0.0, 4 / 12, 12 / 16])


def test_a_round_without_groups_is_a_gap() -> None:
    assert math.isnan(plot.external_share([one_round(1, 0, 0)])[1][0])


def test_held_out_scores_stand_at_their_rounds() -> None:
    assert plot.held_out([score(0, 0.25), one_round(1, 4, 4), score(1, 0.5)]) == ([0, 1], [0.25, 0.5])


def test_a_png_is_written_for_nine_nodes_and_for_none(tmp_path: Path) -> None:
    nodes = {f"node-{k}": [score(0, 0.1), one_round(1, 4, k), score(1, 0.1 * k)] for k in range(9)}
    for name, given in (("many.png", nodes), ("none.png", {})):
        plot.draw(given, tmp_path / name, title="a run")
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["many.png", "none.png"]


def test_matplotlib_is_imported_only_when_something_is_drawn() -> None:
    code = "import sys, sapo_node.monitor.plot; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
