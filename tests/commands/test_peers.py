"""`sapo-node peers`: what it says of the peers that a node wrote down."""

import asyncio
import json
import re
import time
from pathlib import Path

import pytest

from sapo_node import cli
from sapo_node.commands import peers as command
from sapo_node.config import RolloutsSection
from sapo_node.datadir import DataDir
from sapo_node.errors import SapoError
from sapo_node.identity import peer_id_from_public_key
from sapo_node.rollouts.pool import Pool
from sapo_node.swarm import denials
from sapo_node.swarm.peers import Found, PeerBook, PeerRecord, save_peers
from tests.aged import work_a_day
from tests.rollouts.test_pool import NOW, new_group


def met(folder: Path) -> DataDir:
    """A data directory whose node is connected to one peer, and has heard of another an hour ago."""
    data, book, now = DataDir(folder), PeerBook(), time.time()
    data.prepare()
    book.saw("old", ["/ip4/192.0.2.1/tcp/1"], now - 3600)
    book.reached("near", "/ip4/192.0.2.2/tcp/2", now, Found.INITIAL)
    book.accepted("near", groups=3, usable=2, now=now)
    book.set_connected({"near"}, (), now)
    asyncio.run(save_peers(data.peers, book.to_save(now)))
    return data


def test_a_line_tells_who_when_how_and_what_it_was_good_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with met(tmp_path).lock():
        assert command.run(tmp_path, as_json=False) == 0
    head, near, old = capsys.readouterr().out.splitlines()
    assert head.split() == ["peer", "seen", "found", "groups", "score", "address"]
    assert " ".join(near.split()) == "near connected initial peer 3 taken, 2 usable 2 /ip4/192.0.2.2/tcp/2"
    assert " ".join(old.split()) == "old 1.0 h ago the DHT 0 taken, 0 usable 0 /ip4/192.0.2.1/tcp/1"


def test_nobody_is_connected_to_a_node_that_does_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    met(tmp_path)
    assert command.run(tmp_path, as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["running"] is False
    assert {peer["peer_id"]: peer["connected"] for peer in report["peers"]} == {"near": False, "old": False}
    assert {peer["peer_id"]: peer["found"] for peer in report["peers"]} == {"near": "initial peer", "old": "the DHT"}


def test_a_node_that_met_nobody_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(tmp_path, as_json=False) == 0
    assert "met nobody" in capsys.readouterr().out


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "peers.json").write_text("{")
    with pytest.raises(SapoError, match=r"peers\.json"):
        command.run(tmp_path, as_json=False)


EVIL = "\x1b[2J\x1b]0;pwn\x07\x9b31m\u202e\nforged line"


@pytest.mark.parametrize("as_json", [True, False])
def test_no_peer_writes_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    data, now = DataDir(tmp_path), time.time()
    data.prepare()
    record = PeerRecord(
        peer_id=f"x{EVIL}", found=f"y{EVIL}", last_seen=now, addresses=[f"/dns4/{EVIL}", "/ip4/1.1.1.1"]
    )
    asyncio.run(save_peers(data.peers, [record]))
    command.run(tmp_path, as_json=as_json)
    out = capsys.readouterr().out
    assert len(out.splitlines()) == (1 if as_json else 2)
    assert out.replace("\n", "").isprintable()
    assert "/dns4/" not in out
    assert "/ip4/1.1.1.1" in out


BAD = peer_id_from_public_key(bytes(32))


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """What a command line of `sapo-node peers` prints, white space made even."""
    assert cli.run(["peers", *arguments]) == code
    out, err = capsys.readouterr()
    return " ".join((out + err).split())


def judged(folder: Path) -> DataDir:
    """A data directory whose node has reasons to think ill of BAD."""
    data, book, now = DataDir(folder), PeerBook(), time.time()
    data.prepare()
    book.saw(BAD, ["/ip4/192.0.2.1/tcp/1"], now)
    book.came_from(BAD, "/ip4/8.8.8.8/tcp/1")
    book.accepted(BAD, groups=3, usable=1, now=now)
    book.ignored(BAD, 2, now, "stale")
    for _ in range(5):
        book.rejected(BAD, now, "configuration out of bounds")
    asyncio.run(save_peers(data.peers, book.to_save(now)))
    return data


def test_why_tells_the_score_with_its_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judged(tmp_path)
    out = told(capsys, "--why", BAD, "--data-dir", str(tmp_path))
    assert re.search(r"standing shunned until 20\d\d-.* \(in \d+ min\)", out)
    assert "score -149.0" in out
    assert "counts as 8.8.8.0/24 reached at /ip4/8.8.8.8/tcp/1" in out
    assert "rejected: configuration out of bounds 5 -150.0 0 s ago" in out
    assert "accepted 3 0 s ago usable 1 +1.0" in out
    assert "ignored: stale 2 0 s ago" in out


def test_why_as_json_and_for_an_aged_peer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, book, now = DataDir(tmp_path), PeerBook(), time.time()
    data.prepare()
    work_a_day(book, BAD, now)
    book.saw(BAD, ["/ip4/192.0.2.1/tcp/1"], now)
    asyncio.run(save_peers(data.peers, book.to_save(now)))
    assert "ago: aged" in told(capsys, "--why", BAD, "--data-dir", str(tmp_path))
    report = json.loads(told(capsys, "--why", BAD, "--data-dir", str(tmp_path), "--json"))
    assert report["peer"]["reasons"]["accepted"]["count"] == 1


def test_a_denial_shows_until_it_is_taken_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = judged(tmp_path)
    where = ("--data-dir", str(tmp_path))
    assert f"{BAD} is now denied" in told(capsys, "deny", BAD, *where)
    assert "already denied" in told(capsys, "deny", BAD, *where)
    assert " denied " in told(capsys, *where)
    assert "standing denied by `sapo-node peers deny`" in told(capsys, "--why", BAD, *where)
    assert "no longer denied" in told(capsys, "allow", BAD, *where)
    assert "was not denied" in told(capsys, "allow", BAD, *where)
    assert " denied " not in told(capsys, *where)
    assert denials.read(data.denied) == {}


def test_a_peer_that_was_never_met_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    DataDir(tmp_path).prepare()
    assert "has not met" in told(capsys, "deny", BAD, "--data-dir", str(tmp_path))
    assert "has not met" in told(capsys, "--why", BAD, "--data-dir", str(tmp_path), code=1)


@pytest.mark.parametrize("words", [["deny"], ["allow"], ["--why"]])
@pytest.mark.parametrize("wrong", ["me", f"{BAD} ", f"{BAD}x", "", "\x1b[2J"])
def test_what_is_no_peer_id_is_a_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], wrong: str
) -> None:
    DataDir(tmp_path).prepare()
    assert "is no peer id" in told(capsys, *words, wrong, "--data-dir", str(tmp_path), code=2)
    assert not DataDir(tmp_path).denied.exists()


def test_options_before_the_word_are_refused_and_not_overlooked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = told(capsys, "--data-dir", str(tmp_path), "deny", BAD, code=2)
    assert "sapo-node peers deny ..." in out


def test_there_is_nobody_to_deny_where_no_node_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no data directory" in told(capsys, "deny", BAD, "--data-dir", str(tmp_path / "nosuch"), code=1)


def test_a_purge_empties_the_pool_of_a_node_that_does_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = judged(tmp_path)

    async def fill(*, count: bool = False) -> int:
        pool = await Pool.open(data.pool, RolloutsSection())
        try:
            if not count:
                await pool.add_external(BAD, bytes(32), [new_group(1), new_group(2)], NOW)
                await pool.add_external("good", bytes(31) + b"1", [new_group(3)], NOW)
            return (await pool.stats()).external
        finally:
            await pool.close()

    assert asyncio.run(fill()) == 3
    out = told(capsys, "deny", BAD, "--purge", "--data-dir", str(tmp_path))
    assert "2 of its groups were removed" in out
    assert asyncio.run(fill(count=True)) == 1


def test_a_purge_is_left_to_the_node_that_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = judged(tmp_path)
    data.pool.write_bytes(b"not ours to touch")
    with data.lock():
        out = told(capsys, "deny", BAD, "--purge", "--data-dir", str(tmp_path))
    assert "The running node removes its groups" in out
    assert data.pool.read_bytes() == b"not ours to touch"
    assert denials.read(data.denied)[BAD].purge
