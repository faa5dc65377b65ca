"""What the bench on a real model makes of the nodes' records. The bench itself needs a package registry and an hour."""

import csv
import importlib
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Template

from sapo_node.monitor.metrics import EvalRecord, EventRecord, QuestionScore, Record, RoundRecord

BENCH = Path(__file__).parent.parent.parent / "scripts" / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("real_model")


def taken(number: int, reward: float) -> RoundRecord:
    return RoundRecord(
        round=number,
        time=0.0,
        policy_version=number,
        reward_first_drawn=reward,
        local_groups=3,
        external_groups=1,
        round_seconds=20.0,
    )


def asked(number: int, mean: float) -> EvalRecord:
    scores = [QuestionScore("chain_sum", "ab", mean)]
    return EvalRecord(
        round=number,
        time=0.0,
        policy_version=number,
        mean=mean,
        scores={"chain_sum": mean},
        questions=1,
        samples=4,
        per_question=scores,
    )


KILLED: list[Record] = [
    asked(0, 0.25),
    taken(1, 0.1),
    taken(2, 0.2),
    EventRecord(event="resumed", time=0.0),
    asked(1, 0.5),
    taken(2, 0.3),
    asked(2, 0.75),
]


def test_rounds_that_were_taken_again_count_once(bench: Any) -> None:
    kept = bench.newest(KILLED)
    rounds = [(one.round, one.reward_first_drawn) for one in kept if isinstance(one, RoundRecord)]
    assert rounds == [(1, 0.1), (2, 0.3)]


def test_the_files_hold_every_round_and_evaluation(bench: Any, tmp_path: Path) -> None:
    bench.write(tmp_path, {"node-1": bench.newest(KILLED), "node-2": []})
    rounds, evals = (
        list(csv.DictReader((tmp_path / name).read_text().splitlines())) for name in ("rounds.csv", "evals.csv")
    )
    assert [(row["node"], row["round"], row["reward_first_drawn"]) for row in rounds] == [
        ("node-1", "1", "0.1"),
        ("node-1", "2", "0.3"),
    ]
    assert [(row["round"], row["pass_at_1"]) for row in evals] == [("0", "0.25"), ("1", "0.5"), ("2", "0.75")]


def test_the_paragraph_compares_start_and_end(bench: Any) -> None:
    text = bench.paragraph({"node-1": bench.newest(KILLED), "node-2": bench.newest(KILLED)})
    assert "from 0.250 to 0.750" in text
    assert "2 rounds each" in text
    assert "25% of the groups" in text
    assert "not asked twice" in bench.paragraph({"node-1": [taken(1, 0.1)]})
    assert bench.paragraph({"node-1": []}) == "No round was taken."


def test_worked_examples_come_before_the_question(bench: Any) -> None:
    template = bench.template([("1 + 1 =", "1 + 1 = <answer>2</answer>")])
    rendered = Template(template).render(messages=[{"role": "user", "content": "3 + 4 ="}], add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>user\n1 + 1 =<|im_end|>\n<|im_start|>assistant\n1 + 1 = <answer>2</answer><|im_end|>\n"
        "<|im_start|>user\n3 + 4 =<|im_end|>\n<|im_start|>assistant\n"
    )
