"""The owner's word on peers: what is written, who wins, and what a running node notices."""

import os
from pathlib import Path

import pytest

from sapo_node.errors import SapoError
from sapo_node.identity import peer_id_from_public_key
from sapo_node.swarm import denials
from sapo_node.swarm.denials import Denials, DenialsUnreadable

NOW = 1.8e9


def peer(number: int) -> str:
    return peer_id_from_public_key(number.to_bytes(32, "big"))


def test_a_denial_is_kept_privately_and_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "denied.json"
    assert denials.deny(path, peer(1), NOW, purge=False)
    assert not denials.deny(path, peer(1), NOW, purge=False)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [peer_id for peer_id, word in denials.read(path).items() if word.denied] == [peer(1)]
    assert denials.allow(path, peer(1), NOW)
    assert not denials.allow(path, peer(1), NOW)
    assert denials.read(path) == {}
    assert os.listdir(tmp_path) == ["denied.json"]


def test_a_purge_is_not_forgotten_when_the_peer_is_allowed_again_and_spares_what_comes_later(tmp_path: Path) -> None:
    path = tmp_path / "denied.json"
    denials.deny(path, peer(1), NOW, purge=True)
    denials.allow(path, peer(1), NOW + 5)
    assert not denials.read(path)[peer(1)].denied
    assert denials.read(path)[peer(1)].purge_until == NOW + 5
    denials.deny(path, peer(2), NOW + 5 + 2 * denials.PURGE_SECONDS, purge=False)
    assert list(denials.read(path)) == [peer(2)]


def test_one_command_waits_for_another_but_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(denials, "LOCK_SECONDS", 0.05)
    path = tmp_path / "denied.json"
    with denials._changing(path), pytest.raises(SapoError, match="another `sapo-node peers`"):
        denials.deny(path, peer(1), NOW, purge=False)
    assert denials.deny(path, peer(1), NOW, purge=False)


def test_the_list_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(denials, "MAX_DENIED", 3)
    path = tmp_path / "denied.json"
    for number in range(3):
        denials.deny(path, peer(number), NOW, purge=False)
    with pytest.raises(SapoError, match=r"swarm\.allow"):
        denials.deny(path, peer(9), NOW, purge=False)
    assert len(denials.read(path)) == 3


def test_a_full_list_fits_into_the_file(tmp_path: Path) -> None:
    path = tmp_path / "denied.json"
    words = {peer(number): denials.Word(denied=True, at=NOW, purge=True) for number in range(denials.MAX_DENIED)}
    denials._write(path, words, NOW)
    assert denials.read(path) == words


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"version": 2}',
        b'{"peers": {"me": {"denied": true, "at": 1}}}',
        b'{"peers": {"x": 1}}',
        b" " * 300_000,
    ],
)
def test_a_file_that_cannot_be_read_is_named_and_keeps_a_node_from_starting(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "denied.json"
    path.write_bytes(content)
    with pytest.raises(DenialsUnreadable, match=r"denied\.json"):
        Denials(path)


def test_a_running_node_notices_each_change_once(tmp_path: Path) -> None:
    path = tmp_path / "denied.json"
    watch = Denials(path)
    assert not watch.changed()
    denials.deny(path, peer(1), NOW, purge=False)
    assert watch.changed()
    assert not watch.changed()
    assert watch.words[peer(1)].denied
    path.unlink()
    assert watch.changed()
    assert watch.words == {}


def test_a_file_that_breaks_while_the_node_runs_changes_nothing_and_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "denied.json"
    denials.deny(path, peer(1), NOW, purge=False)
    watch = Denials(path)
    path.write_bytes(b"{")
    with pytest.raises(DenialsUnreadable):
        watch.changed()
    assert not watch.changed()
    assert watch.words[peer(1)].denied
