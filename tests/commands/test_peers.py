"""`sapo-node peers`: what it says of the peers that a node wrote down."""

import json
import time
from pathlib import Path

import pytest

from sapo_node.commands import peers as command
from sapo_node.datadir import DataDir
from sapo_node.errors import SapoError
from sapo_node.swarm.peers import Found, PeerBook, PeerRecord, save_peers


def met(folder: Path) -> DataDir:
    """A data directory whose node is connected to one peer, and has heard of another an hour ago."""
    data, book, now = DataDir(folder), PeerBook(), time.time()
    data.prepare()
    book.saw("old", ["/ip4/192.0.2.1/tcp/1"], now - 3600)
    book.reached("near", "/ip4/192.0.2.2/tcp/2", now, Found.INITIAL)
    book.accepted("near", groups=3, usable=2, now=now)
    book.set_connected({"near"}, (), now)
    save_peers(data.peers, book.to_save(now))
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
    save_peers(data.peers, [record])
    command.run(tmp_path, as_json=as_json)
    out = capsys.readouterr().out
    assert len(out.splitlines()) == (1 if as_json else 2)
    assert out.replace("\n", "").isprintable()
    assert "/dns4/" not in out
    assert "/ip4/1.1.1.1" in out
