"""The pure parts of scripts/bench/hostile.py: reading /proc, comparing with the attackers' books, table and goals."""

import sqlite3
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sapo_node.rollouts.schema import TaskRef

SCRIPTS = str(Path(__file__).parents[2] / "scripts" / "bench")


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(SCRIPTS)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("hostile", "hostile_bench")]:
        del sys.modules[name]


STAT = "42 (a) b (c)) S 7 42 42 0 -1 4194560 9 9 0 0 150 50 30 20 20 0 3 0 777 1 1 1"


def result(**changes: Any) -> Any:
    from hostile_bench.report import ATTACKERS, COLUMNS, Result

    fields: dict[str, Any] = dict.fromkeys(COLUMNS, 0) | {
        "repeat": 1,
        "kind": "work",
        "beside": ATTACKERS,
        "rounds": 6,
        "seconds": 1.5,
        "cpu_a_round": 1.0,
        "pss_mib": 500.0,
        "others_cpu": 0.5,
    }
    return Result(**fields | changes)


def pair(repeat: int, cost: float, mib: float, **changes: Any) -> list[Any]:
    from hostile_bench.report import BUSY

    attacked = result(repeat=repeat, cpu_a_round=2.0 * cost, pss_mib=500.0 + mib, **changes)
    return [attacked, result(repeat=repeat, kind=attacked.kind, beside=BUSY, cpu_a_round=2.0, pss_mib=500.0)]


def test_a_process_name_may_hold_spaces_and_parentheses() -> None:
    from hostile_bench.procfs import TICKS, Process, parse_stat

    assert parse_stat(STAT) == Process(pid=42, parent=7, begun=777, cpu_seconds=250 / TICKS)


def test_memory_is_the_proportional_set_size() -> None:
    from hostile_bench.procfs import parse_pss

    assert parse_pss("00-ff ---p 00 00:00 0 [rollup]\nRss: 9000 kB\nPss:    2048 kB\nPss_Anon: 1 kB\n") == 2.0
    with pytest.raises(ValueError, match="no Pss"):
        parse_pss("Rss: 9000 kB\n")


def test_a_tree_is_a_process_and_all_below_it() -> None:
    from hostile_bench.procfs import Process, below

    processes = {pid: Process(pid, parent, 0, 1.0) for pid, parent in ((1, 0), (2, 1), (3, 2), (4, 1), (5, 9))}
    assert {one.pid for one in below(processes, 2)} == {2, 3}
    assert below(processes, 8) == []


def test_a_value_between_samples() -> None:
    from hostile_bench.procfs import at

    assert [at([1.0, 3.0], [10.0, 20.0], when) for when in (0.0, 1.0, 2.5, 9.0)] == [10.0, 10.0, 17.5, 20.0]


def test_a_process_that_ends_is_noted_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from hostile_bench import procfs
    from hostile_bench.swarm import Trace, lost

    monkeypatch.setattr(procfs, "command", {1: "node", 2: "-m scorer_worker", 3: "/bin/p2pd"}.__getitem__)
    trace = Trace(1)
    everyone = {pid: procfs.Process(pid, pid > 1, pid, 1.0) for pid in (1, 2, 3)}
    trace.take(everyone, 0.0)
    trace.take({1: everyone[1], 2: replace(everyone[2], begun=9)}, 2.0)  # the id is another process's now
    assert sorted(trace.gone) == ["-m scorer_worker", "/bin/p2pd"]
    assert lost(trace.gone) == (1, 1)
    assert trace.between(0.0, 1.0) == {"node": 0.0, "p2pd": -0.5, "policy_worker": 0.0, "scorer_worker": 0.0}


def test_measured_rounds_begin_after_the_others_do() -> None:
    from hostile_bench.swarm import Window, window

    from sapo_node.monitor.metrics import RoundRecord

    records = [RoundRecord(round=n, time=float(n), policy_version=n) for n in range(1, 6)]
    assert window(records, since=1.5, rounds=3) == Window(2.0, 5.0)
    assert window(records, since=1.5, rounds=4) is None


def kept(producer: str, *texts: str, index: int = 0) -> Any:
    from hostile_bench.audit import Kept

    task = TaskRef(
        source="reasoning_gym", version="1", name="gcd", config_hash=bytes(32), config={}, epoch=1, index=index
    )
    return Kept(producer, task, "?", [0.0] * len(texts), list(texts))


def test_what_its_producer_did_not_make_is_forged() -> None:
    from hostile_bench.audit import Origins, origins
    from hostile_bench.work_kinds import texts_digest

    sent, honest = kept("bad", "a", "b"), kept("good", "a", "b")
    books = {"bad": {sent.key: {texts_digest(["a", "b"])}}}
    own = {honest.key: texts_digest(["a", "b"])}
    assert origins([sent, honest], own, books) == Origins(hostile=1, forged=0, unproven=0)
    assert origins([kept("bad", "a", "c"), kept("bad", "a", "b", index=1)], own, books) == Origins(2, 2, 0)
    assert origins([kept("good", "x", "b")], own, books) == Origins(0, 1, 0)
    assert origins([kept("good", "a", "b", index=1)], own, books) == Origins(0, 0, 1)


def test_a_book_holds_what_may_be_accepted() -> None:
    from hostile_bench.audit import read_book

    line = '{"coordinates": "aa", "texts": "%s", "acceptable": %s}'
    lines = [line % ("1", "true") + "\n", line % ("2", "false") + "\n", line % ("3", "true") + "\n", '{"coord']
    assert read_book(lines) == {"aa": {"1", "3"}}


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    from hostile_bench import report

    file = tmp_path / "folder" / "h.csv"
    assert report.read(file) == []
    report.append(file, pair(1, 1.5, 2.0))
    report.append(file, pair(2, 1.0, 1.0))
    assert report.read(file) == [*pair(1, 1.5, 2.0), *pair(2, 1.0, 1.0)]


def test_only_finished_pairs_of_these_rounds_are_skipped() -> None:
    from hostile import plan

    done = [*pair(1, 1.0, 0.0), result(repeat=2), *pair(2, 1.0, 0.0, kind="dht")]
    assert list(plan(2, ["work", "valid"], 6, done)) == [(1, "valid"), (2, "work"), (2, "valid")]
    assert len(list(plan(2, ["work"], 60, done))) == 2


def test_the_table_has_a_row_a_kind_with_medians_and_ranges() -> None:
    from hostile_bench.report import table

    head, line, row = table([*pair(1, 1.0, 3.0), *pair(2, 1.2, -1.0), *pair(3, 1.05, 1.0)], 6).splitlines()
    assert head.count("|") == line.count("|") == row.count("|")
    start = "| work | 3 | 2.00 | 1.05 (1.00, 1.20) | +0, +0, +0, +0 | 40% (0%, 160%) | 3.2 (0.0, 12.8) |"
    assert f"{start} +1.0 (-1.0, +3.0) |" in row


@pytest.mark.parametrize(
    ("cost", "mib", "changes", "missed"),
    [
        (1.1, 19.9, {}, []),
        (1.2, 20.0, {}, [0, 1]),
        (1.0, 0.0, {"crashes": 1}, [2]),
        (1.0, 0.0, {"forged": 1}, [3]),
        (1.0, 0.0, {"wrong_tokens": 8}, [4]),
        (1.0, 0.0, {"executed": 1}, [5]),
    ],
)
def test_goals_that_are_missed_are_told(cost: float, mib: float, changes: dict[str, int], missed: list[int]) -> None:
    from hostile_bench.report import verdicts

    lines = verdicts(pair(1, cost, mib, **changes), 6)
    assert [n for n, line in enumerate(lines) if line.startswith("not reached")] == missed
    assert len(lines) == 6


def test_a_pool_that_is_just_being_made_is_empty(tmp_path: Path) -> None:
    from hostile_bench.audit import PoolReader

    reader = PoolReader(tmp_path / "pool.sqlite")
    reader.collect()
    sqlite3.connect(reader.path).close()
    reader.path.touch()
    reader.collect()
    assert reader.external == {}
