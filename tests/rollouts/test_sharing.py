"""What leaves a node: groups on rows of a data set only where its entry says so."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from sapo_node.config import NodeConfig
from sapo_node.tasks.base import Judged, Question
from tests.rollouts.test_sampling import Setting, ToyScorers


class RowScorers(ToyScorers):
    async def judge_row(self, question: str, answer: str, verifier: str, texts: list[str]) -> Judged:
        return Judged(question=Question(text=question, sha256=bytes(32)), rewards=[1.0, 0.0])


@pytest.mark.parametrize(("share", "published"), [({}, 0), ({"share": False}, 0), ({"share": True}, 2)])
def test_rows_of_a_data_set_stay_at_home_unless_they_are_shared(
    tmp_path: Path, share: dict[str, Any], published: int
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"Double {i}?", "answer": str(2 * i)}) + "\n" for i in range(60)))
    entry = {"source": "dataset", "name": "doubles", "path": str(rows), **share}
    setting = Setting(tmp_path)
    setting.config = NodeConfig.model_validate({"tasks": {"mixture": [entry]}})
    setting.scorers = RowScorers()
    groups = asyncio.run(setting.draw())
    assert len(groups) == 2, "they are trained on"
    assert len(setting.published) == published


def test_rows_are_left_out_of_what_is_shared_beside_them(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"Double {i}?", "answer": str(2 * i)}) + "\n" for i in range(60)))
    entry = {"source": "dataset", "name": "doubles", "path": str(rows)}
    setting = Setting(tmp_path)
    setting.config = NodeConfig.model_validate({"tasks": {"mixture": [entry, {"name": "gcd"}]}})
    setting.scorers = RowScorers()
    for _ in range(4):
        asyncio.run(setting.draw())
    assert {group.task.source for group in setting.published} == {"reasoning_gym"}
