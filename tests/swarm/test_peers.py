"""Scores: what raises and lowers them, when a peer is shunned and forgiven, and what survives a restart."""

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from sapo_node.swarm import peers
from sapo_node.swarm.peers import Found, PeerBook, load_peers, save_peers


def test_strangers_are_welcome() -> None:
    assert PeerBook().welcome("a", 0.0)
    assert PeerBook().score("a", 0.0) == 0.0


def test_usable_groups_raise_the_score_more_than_filler() -> None:
    book = PeerBook()
    book.accepted("learn", groups=4, usable=4, now=0.0)
    book.accepted("filler", groups=4, usable=0, now=0.0)
    assert book.score("learn", 0.0) > book.score("filler", 0.0) > 0.0


def test_ignored_groups_leave_the_score_alone() -> None:
    book = PeerBook()
    book.ignored("a", groups=1000, now=0.0)
    assert book.score("a", 0.0) == 0.0
    assert book.get("a") is not None


def test_four_faults_shun_a_newcomer_and_time_forgives() -> None:
    book = PeerBook()
    for _ in range(3):
        book.rejected("a", 0.0)
    assert book.welcome("a", 0.0)
    book.rejected("a", 0.0)
    assert not book.welcome("a", 0.0)
    assert not book.welcome("a", peers.HALF_LIFE_SECONDS)
    assert book.welcome("a", 1.5 * peers.HALF_LIFE_SECONDS)


def test_merit_does_not_protect_for_ever() -> None:
    book = PeerBook()
    book.accepted("a", groups=100_000, usable=100_000, now=0.0)
    for _ in range(6):
        book.rejected("a", 0.0)
    assert not book.welcome("a", 0.0)


def test_every_peer_is_forgiven_within_two_half_lives() -> None:
    book = PeerBook()
    for _ in range(1000):
        book.rejected("a", 0.0)
    assert book.welcome("a", 2.01 * peers.HALF_LIFE_SECONDS)


def test_scores_decay_and_a_clock_set_back_does_not_raise_them() -> None:
    book = PeerBook()
    book.accepted("a", groups=10, usable=0, now=1000.0)
    assert book.score("a", 1000.0 + peers.HALF_LIFE_SECONDS) == pytest.approx(2.5)
    assert book.score("a", 0.0) == 5.0


def test_the_owners_word_comes_first() -> None:
    assert not PeerBook(deny=["a"]).welcome("a", 0.0)
    book = PeerBook(allow=["a"])
    assert book.welcome("a", 0.0)
    assert not book.welcome("b", 0.0)


def test_the_unwelcome_are_those_denied_and_those_shunned_until_forgiven() -> None:
    book = PeerBook(deny=["denied"])
    book.saw("fine", [], 0.0)
    for _ in range(4):
        book.rejected("bad", 0.0)
    assert book.unwelcome(0.0) == {"denied", "bad"}
    assert book.unwelcome(2.0 * peers.HALF_LIFE_SECONDS) == {"denied"}


def test_the_table_is_bounded_and_keeps_those_it_has_an_opinion_on() -> None:
    book = PeerBook()
    for _ in range(4):
        book.rejected("bad", 0.0)
    for i in range(3 * peers.MAX_PEERS):
        book.saw(f"peer{i}", [], float(i))
    assert len(book) <= peers.MAX_PEERS
    assert not book.welcome("bad", 0.0)


def test_the_best_are_the_most_recently_seen_with_an_address() -> None:
    book = PeerBook()
    book.saw("old", ["/ip4/127.0.0.1/tcp/1"], 1.0)
    book.saw("new", ["/ip4/127.0.0.1/tcp/2"], 2.0)
    book.saw("nowhere", [], 3.0)
    for _ in range(4):
        book.rejected("bad", 4.0)
    book.saw("bad", ["/ip4/127.0.0.1/tcp/3"], 4.0)
    assert [r.peer_id for r in book.best(5.0)] == ["new", "old"]


def test_peers_survive_a_restart(tmp_path: Path) -> None:
    book = PeerBook()
    book.saw("a", ["/ip4/127.0.0.1/tcp/1"], 1.0)
    book.accepted("a", groups=4, usable=2, now=1.0)
    path = tmp_path / "peers.json"
    save_peers(path, book.best(1.0))
    known, warning = load_peers(path)
    assert warning is None
    before, after = book.get("a"), PeerBook(known=known).get("a")
    assert before is not None
    assert after == replace(before, found=""), "how it was found belongs to a run"
    assert os.listdir(tmp_path) == ["peers.json"]


def test_the_file_is_bounded(tmp_path: Path) -> None:
    book = PeerBook()
    for i in range(2 * peers.MAX_SAVED):
        book.saw(f"peer{i}", ["/ip4/127.0.0.1/tcp/1"] * 20, float(i))
    save_peers(tmp_path / "peers.json", book.best(1e3, limit=10_000))
    known, _ = load_peers(tmp_path / "peers.json")
    assert len(known) == peers.MAX_SAVED
    assert max(len(r.addresses) for r in known) == peers.MAX_SAVED_ADDRESSES


def test_no_file_is_no_warning(tmp_path: Path) -> None:
    assert load_peers(tmp_path / "peers.json") == ([], None)


@pytest.mark.parametrize("content", [b"", b"{", b'{"peers": 3}', b'{"version": 2}', b"\xff", b'{"peers": [{}]}'])
def test_a_broken_file_is_named_and_not_used(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "peers.json"
    path.write_bytes(content)
    known, warning = load_peers(path)
    assert known == []
    assert warning is not None
    assert str(path) in warning


def test_the_first_way_in_which_a_peer_was_met_is_kept() -> None:
    book = PeerBook()
    book.reached("a", "/ip4/127.0.0.1/tcp/1", 1.0, Found.INITIAL)
    book.saw("a", [], 2.0)
    record = book.get("a")
    assert record is not None
    assert record.found == Found.INITIAL


def test_a_connected_peer_dialled_us_or_was_met_in_the_dht() -> None:
    book = PeerBook()
    book.set_connected({"a", "b"}, {"a"}, 1.0)
    assert book.counts() == {Found.DHT: 1, Found.INBOUND: 1}
    book.set_connected({"b"}, {"a"}, 2.0)
    assert book.counts() == {Found.DHT: 1}


def test_an_address_that_worked_is_the_first_to_try() -> None:
    book = PeerBook()
    book.saw("a", ["/ip4/127.0.0.1/tcp/1", "/ip4/127.0.0.1/tcp/2"], 1.0)
    book.reached("a", "/ip4/127.0.0.1/tcp/2", 2.0, Found.INITIAL)
    assert book.best(2.0)[0].addresses == ["/ip4/127.0.0.1/tcp/2", "/ip4/127.0.0.1/tcp/1"]


def test_connected_peers_are_saved_also_without_an_address() -> None:
    book = PeerBook()
    book.saw("known", ["/ip4/127.0.0.1/tcp/1"], 5.0)
    book.set_connected({"guest"}, (), 1.0)
    assert [record.peer_id for record in book.to_save(5.0)] == ["guest", "known"]
    assert [record.peer_id for record in book.best(5.0)] == ["known"]


def test_that_others_know_a_peer_too_is_no_news_of_how_it_was_met() -> None:
    book = PeerBook()
    book.saw("a", [], 1.0)
    book.set_connected({"a"}, {"a"}, 2.0)
    assert book.counts() == {Found.INBOUND: 1}


def test_a_peer_that_was_connected_after_its_announcement_and_is_no_longer_has_left() -> None:
    book = PeerBook()
    book.saw("a", [], now=10.0)
    assert book.there("a", heard_at=10.0) is None
    book.set_connected({"a"}, (), now=11.0)
    assert book.there("a", heard_at=10.0) is True
    book.set_connected((), (), now=12.0)
    assert book.there("a", heard_at=10.0) is False
    book.saw("a", [], now=13.0)  # announced again: it lives, though not connected to this node
    assert book.there("a", heard_at=13.0) is None


def test_addresses_of_a_file_that_are_none_are_left_out(tmp_path: Path) -> None:
    book = PeerBook()
    book.saw("a", ["/ip4/1.1.1.1/tcp/1", "/dns4/\x1b[2J", "nonsense"], now=1.0)
    save_peers(tmp_path / "peers.json", book.to_save(1.0))
    records, _ = load_peers(tmp_path / "peers.json")
    assert records[0].addresses == ["/ip4/1.1.1.1/tcp/1"]
