"""history.jsonl survives being killed, a full file, and readers that come late."""

import contextlib
from pathlib import Path

import pytest

from sapo_node.monitor import history
from sapo_node.monitor.history import Follower, History
from sapo_node.monitor.metrics import EvalRecord, EventRecord, QuestionScore, RoundRecord, eval_record

BIG = 1 << 20


def one_round(number: int) -> RoundRecord:
    return RoundRecord(round=number, time=1000.0 + number, policy_version=number, reward_first_drawn=0.25)


def numbers(records: list[history.Record]) -> list[int]:
    return [record.round for record in history.rounds(records)]


def test_every_kind_of_record_comes_back_as_written(tmp_path: Path) -> None:
    records = [
        EventRecord(event="started", time=1.0, text="hello"),
        eval_record([QuestionScore("sums", "ab", 0.5)], round=0, time=2.0, policy_version=0, samples=2),
        RoundRecord(round=1, time=3.0, policy_version=1, external_producers={"peer": 2}, grad_norm=0.5),
    ]
    with History(tmp_path / "history.jsonl", BIG) as writer:
        for record in records:
            writer.append(record)
    assert history.read(tmp_path / "history.jsonl") == records


def test_a_torn_last_line_is_skipped_and_the_next_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    with History(path, BIG) as writer:
        writer.append(one_round(1))
        writer.append(one_round(2))
    path.write_bytes(path.read_bytes()[:-9])  # as after kill -9
    assert numbers(history.read(path)) == [1]
    with History(path, BIG) as writer:
        writer.append(one_round(3))
    assert numbers(history.read(path)) == [1, 3]


def test_a_number_that_is_not_finite_is_null_and_does_not_lose_the_round(tmp_path: Path) -> None:
    with History(tmp_path / "history.jsonl", BIG) as writer:
        writer.append(RoundRecord(round=1, time=1.0, policy_version=1, loss=float("nan"), grad_norm=float("inf")))
    (record,) = history.rounds(history.read(tmp_path / "history.jsonl"))
    assert record.loss is None
    assert record.grad_norm is None


def test_lines_of_an_unknown_kind_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text('{"kind": "from the future", "x": 1}\n\xff\n{"kind": "round", "round": 7, "time": 1}\n')
    with History(path, BIG) as writer:
        writer.append(one_round(8))
    assert numbers(history.read(path)) == [8]


def test_turning_over_bounds_the_disk_and_keeps_the_newest(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    limit = 4096
    with History(path, limit) as writer:
        for number in range(200):
            writer.append(one_round(number))
    kept = numbers(history.read(path))
    assert kept == list(range(kept[0], 200))
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 2 * limit
    assert sorted(file.name for file in tmp_path.iterdir()) == ["history.1.jsonl", "history.jsonl"]


def test_a_turn_over_on_a_full_disk_ends_the_records_only_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "history.jsonl"

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with History(path, 2000) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(history.os, "open", full)  # which only the turn-over needs
            with contextlib.suppress(OSError):
                for number in range(100):
                    writer.append(one_round(number))
            with pytest.raises(OSError, match="No space"):
                writer.append(one_round(200))
        assert not path.exists()
        writer.append(one_round(201))
        writer.append(one_round(202))
    assert numbers(history.read(path))[-2:] == [201, 202]
    assert history.older(path).exists()


@pytest.mark.parametrize("step", [1, 3, 7])
def test_a_follower_sees_each_record_once_over_turn_overs(tmp_path: Path, step: int) -> None:
    path = tmp_path / "history.jsonl"
    follower = Follower(path)
    assert follower.new() == []
    seen: list[int] = []
    with History(path, 8192) as writer:
        for number in range(100):
            writer.append(one_round(number))
            if number % step == 0:
                seen += numbers(follower.new())
    seen += numbers(follower.new())
    assert seen == list(range(100))


def test_a_follower_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    with History(path, BIG) as writer:
        writer.append(one_round(1))
    line = path.read_bytes()
    path.write_bytes(line[:20])
    follower = Follower(path)
    assert follower.new() == []
    path.write_bytes(line)
    assert numbers(follower.new()) == [1]


def test_the_mean_of_an_evaluation_weighs_questions_not_tasks() -> None:
    scores = [QuestionScore("a", "1", 1.0), QuestionScore("b", "2", 0.0), QuestionScore("b", "3", 0.5)]
    record = eval_record(scores, round=4, time=1.0, policy_version=4, samples=2)
    assert isinstance(record, EvalRecord)
    assert record.mean == pytest.approx(0.5)
    assert record.scores == {"a": 1.0, "b": 0.25}
    assert record.questions == 3


def test_an_evaluation_without_questions_has_no_score() -> None:
    with pytest.raises(ValueError, match="at least one held-out question"):
        eval_record([], round=0, time=1.0, policy_version=0, samples=1)
