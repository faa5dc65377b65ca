"""Scores: what raises and lowers them, when a peer is shunned and forgiven, and what survives a restart."""

import asyncio
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from sapo_node.swarm import peers
from sapo_node.swarm.peers import AGED_HOURS, AGED_SECONDS, Found, PeerBook, forgiven_at, load_peers, save_peers
from tests.aged import work_a_day


def test_strangers_are_welcome() -> None:
    assert PeerBook().welcome("a", 0.0)
    assert PeerBook().score("a", 0.0) == 0.0


def test_usable_groups_raise_the_score_more_than_filler() -> None:
    book = PeerBook()
    book.accepted("learn", groups=4, usable=4, now=0.0)
    book.accepted("filler", groups=4, usable=0, now=0.0)
    assert book.score("learn", 0.0) == 4.0
    assert book.score("filler", 0.0) == 0.0


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
    book.accepted("a", groups=10, usable=5, now=1000.0)
    assert book.score("a", 1000.0 + peers.HALF_LIFE_SECONDS) == pytest.approx(2.5)
    assert book.score("a", 0.0) == 5.0


def test_the_owners_word_comes_first() -> None:
    assert not PeerBook(deny=["a"]).welcome("a", 0.0)
    book = PeerBook(allow=["a"])
    assert book.welcome("a", 0.0)
    assert not book.welcome("b", 0.0)


def test_the_network_answers_nobody_who_is_denied_or_shunned_or_not_among_the_allowed() -> None:
    book = PeerBook(deny=["set"])
    for _ in range(4):
        book.rejected("bad", 0.0)
    assert [book.welcome(peer, 0.0) for peer in ("set", "bad", "fine")] == [False, False, True]
    book.denied = frozenset({"fine"})
    assert not book.welcome("fine", 0.0)
    assert not PeerBook(allow=["friend"]).welcome("stranger", 0.0)
    assert PeerBook(allow=["friend"]).welcome("friend", 0.0)


def test_a_denial_wins_over_an_allowance_wherever_they_are_said() -> None:
    book = PeerBook(allow=["a", "b"], deny=["a"])
    book.denied = frozenset({"b"})
    assert not book.may("a")
    assert not book.may("b")


def test_the_table_is_bounded_and_keeps_those_it_has_an_opinion_on() -> None:
    book = PeerBook()
    for _ in range(4):
        book.rejected("bad", 0.0)
    for i in range(3 * peers.MAX_PEERS):
        book.saw(f"peer{i}", [], float(i))
    assert len(book) <= peers.MAX_PEERS
    assert not book.welcome("bad", 0.0)


def test_who_announced_itself_last_does_not_push_out_those_that_worked() -> None:
    book = PeerBook()
    for name in ("old friend", "new friend"):
        book.reached(name, "/ip4/127.0.0.1/tcp/1", NOW, Found.DHT)
    work_a_day(book, "old friend", NOW)
    book.accepted("new friend", groups=1, usable=1, now=NOW)
    for i in range(20):
        book.reached(f"crowd{i}", "/ip4/127.0.0.1/tcp/1", NOW + 1 + i, Found.DHT)
    assert [r.peer_id for r in book.best(NOW + 60, 4)] == ["old friend", "new friend", "crowd19", "crowd18"]


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
    asyncio.run(save_peers(path, book.best(1.0)))
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
    asyncio.run(save_peers(tmp_path / "peers.json", book.best(1e3, limit=10_000)))
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
    asyncio.run(save_peers(tmp_path / "peers.json", book.to_save(1.0)))
    records, _ = load_peers(tmp_path / "peers.json")
    assert records[0].addresses == ["/ip4/1.1.1.1/tcp/1"]


DAY = AGED_SECONDS
NOW = 1.8e9


def test_a_peer_is_aged_when_accepted_groups_lie_a_day_apart() -> None:
    book = PeerBook()
    book.accepted("a", groups=1, usable=1, now=NOW)
    assert not book.aged("a", NOW + 2 * DAY), "one group and waiting is no history"
    for hour in range(25):
        assert not book.aged("b", NOW + DAY)
        book.accepted("b", groups=1, usable=int(hour < AGED_HOURS), now=NOW + 3600 * hour)
    assert book.aged("b", NOW + DAY)
    assert not book.aged("b", NOW)


def test_two_groups_a_day_apart_or_filler_all_day_are_no_day_of_work() -> None:
    book = PeerBook()
    for hour in range(25):
        if hour in (0, 24):
            book.accepted("two groups", groups=1, usable=1, now=NOW + 3600 * hour)
        book.accepted("filler", groups=1, usable=0, now=NOW + 3600 * hour)
    assert not book.aged("two groups", NOW + DAY)
    assert not book.aged("filler", NOW + DAY)


def test_groups_that_could_not_be_trained_on_are_no_work() -> None:
    book = PeerBook()
    for hour in range(25):
        book.accepted("a", groups=1, usable=1, now=NOW + 3600 * hour)
        book.useless("a", 1, NOW + 3600 * hour)
    assert not book.gave("a", NOW + DAY)
    assert not book.aged("a", NOW + DAY)


def test_a_peer_whose_groups_are_too_long_here_is_a_stranger_and_no_culprit() -> None:
    book = PeerBook()
    book.accepted("a", groups=160, usable=160, now=NOW)
    book.useless("a", 160, NOW)
    assert book.score("a", NOW) == 0.0, "an honest peer may write more than this node can read"
    book.rejected("a", NOW)
    assert book.welcome("a", NOW)


def test_after_a_useless_group_usable_ones_of_the_same_hour_count() -> None:
    book = PeerBook()
    book.accepted("a", groups=1, usable=1, now=NOW)
    book.useless("a", 1, NOW)
    book.accepted("a", groups=32, usable=32, now=NOW)
    assert book.gave("a", NOW)


def test_a_crowd_of_shunned_keys_pushes_out_nobody_who_worked() -> None:
    book = PeerBook()
    for hour in range(5):
        book.accepted("worked", groups=40, usable=40, now=NOW + 3600 * hour)
    for n in range(2 * peers.MAX_PEERS):
        for _ in range(4):
            book.rejected(f"bad {n}", NOW + 5 * 3600)
    assert book.gave("worked", NOW + 4 * 3600)


def test_who_gave_something_once_is_a_stranger_again_after_a_while() -> None:
    """Hope: ten keys give a group each, and are served before strangers for ever, restarts included."""
    book = PeerBook()
    book.accepted("once", groups=1, usable=1, now=NOW)
    assert not book.gave("once", NOW)
    book.accepted("once", groups=32, usable=32, now=NOW)
    assert book.known_as("once", NOW) == "once"
    assert not book.known_as("once", NOW + 3 * 3600)


def test_a_crowd_that_is_connected_pushes_nobody_out_of_the_file_who_worked() -> None:
    book = PeerBook()
    for n in range(50):
        book.saw(f"worked {n}", [f"/ip4/1.2.{n}.4/tcp/1"], NOW)
        book.accepted(f"worked {n}", groups=40, usable=40, now=NOW)
    crowd = {f"crowd {n}" for n in range(peers.MAX_SAVED)}
    book.set_connected(crowd, crowd, NOW + 60)
    saved = {record.peer_id for record in book.to_save(NOW + 60)}
    assert all(f"worked {n}" in saved for n in range(50))


def test_many_groups_in_one_hour_are_one_hour() -> None:
    book = PeerBook()
    for second in range(100):
        book.accepted("a", groups=1, usable=1, now=NOW + second)
    book.accepted("a", groups=1, usable=1, now=NOW + DAY + 100)
    assert not book.aged("a", NOW + DAY + 100)


def test_being_seen_or_ignored_gives_no_history() -> None:
    book = PeerBook()
    for now in (NOW, NOW + 2 * DAY):
        book.saw("a", ["/ip4/127.0.0.1/tcp/1"], now)
        book.set_connected({"a"}, (), now)
        book.ignored("a", 100, now)
    assert not book.aged("a", NOW + 2 * DAY)


def test_a_clock_set_back_makes_nobody_aged() -> None:
    book = PeerBook()
    book.saw("other", [], NOW)
    book.accepted("a", groups=1, usable=1, now=NOW - 2 * DAY)  # the clock is wrong for a minute
    book.accepted("a", groups=1, usable=1, now=NOW + 60)
    assert not book.aged("a", NOW + 60)


def test_a_clock_set_back_over_a_restart_makes_nobody_aged(tmp_path: Path) -> None:
    book = PeerBook()
    book.saw("other", ["/ip4/127.0.0.1/tcp/1"], NOW)
    asyncio.run(save_peers(tmp_path / "peers.json", book.to_save(NOW)))
    again = PeerBook(known=load_peers(tmp_path / "peers.json")[0])
    again.accepted("a", groups=1, usable=1, now=NOW - 2 * DAY)
    again.accepted("a", groups=1, usable=1, now=NOW + 60)
    assert not again.aged("a", NOW + 60)


def test_a_clock_that_was_ahead_makes_nobody_aged_once_it_is_right() -> None:
    book = PeerBook()
    book.accepted("a", groups=1, usable=1, now=NOW)
    book.accepted("a", groups=1, usable=1, now=NOW + 5 * DAY)
    assert not book.aged("a", NOW + 60)


def test_who_is_shunned_has_to_earn_its_history_anew() -> None:
    book = PeerBook()
    work_a_day(book, "a", NOW + DAY)
    for _ in range(5):
        book.rejected("a", NOW + DAY)
    later = NOW + 2 * DAY
    book.accepted("a", groups=1, usable=1, now=later)
    assert book.welcome("a", later)
    assert not book.aged("a", later)
    book.accepted("a", groups=1, usable=1, now=later + DAY)
    assert not book.aged("a", later + DAY), "the hours before count no more"


def test_history_survives_a_restart_and_a_crowd_of_new_ids(tmp_path: Path) -> None:
    book = PeerBook()
    work_a_day(book, "old friend", NOW + DAY)
    later = NOW + 3 * DAY  # its score has decayed to nothing
    for i in range(2 * peers.MAX_PEERS):
        book.accepted(f"sybil{i}", groups=1, usable=1, now=later)
        book.reached(f"sybil{i}", "/ip4/127.0.0.1/tcp/1", later, Found.DHT)
    book.set_connected({f"sybil{i}" for i in range(peers.MAX_SAVED)}, (), later)
    asyncio.run(save_peers(tmp_path / "peers.json", book.to_save(later)))
    assert PeerBook(known=load_peers(tmp_path / "peers.json")[0]).aged("old friend", later)


def test_a_restart_forgives_nobody(tmp_path: Path) -> None:
    book = PeerBook(deny=["denied"])
    book.saw("denied", ["/ip4/127.0.0.1/tcp/1"], NOW)
    for _ in range(4):
        book.rejected("bad", NOW)
    asyncio.run(save_peers(tmp_path / "peers.json", book.to_save(NOW)))
    known, _ = load_peers(tmp_path / "peers.json")
    assert {record.peer_id: record.denied for record in known} == {"denied": "the settings", "bad": ""}
    assert not PeerBook(known=known).welcome("bad", NOW)


def test_reasons_are_counted_with_what_they_earned_and_decay() -> None:
    book = PeerBook()
    book.accepted("a", groups=4, usable=2, now=NOW)
    book.ignored("a", 3, NOW, "stale")
    book.rejected("a", NOW + 10, "configuration out of bounds")
    record = book.get("a")
    assert record is not None
    assert {reason: tally.count for reason, tally in record.reasons.items()} == {
        "accepted": 4,
        "usable": 2,
        "ignored: stale": 3,
        "rejected: configuration out of bounds": 1,
    }
    assert record.reasons["rejected: configuration out of bounds"].last == NOW + 10
    book.accepted("a", groups=0, usable=2, now=NOW + peers.HALF_LIFE_SECONDS)
    assert record.reasons["usable"].points == pytest.approx(1.0 + 2.0)


def test_reasons_are_bounded() -> None:
    book = PeerBook()
    for i in range(1000):
        book.ignored("a", 1, NOW, f"reason {i}")
    record = book.get("a")
    assert record is not None
    assert len(record.reasons) <= peers.MAX_REASONS + 1
    assert sum(tally.count for tally in record.reasons.values()) == 1000


def test_the_time_of_forgiveness_is_when_it_comes() -> None:
    book = PeerBook()
    for _ in range(5):
        book.rejected("a", NOW)
    record = book.get("a")
    assert record is not None
    at = forgiven_at(record)
    assert not book.welcome("a", at - 1.0)
    assert book.welcome("a", at + 1.0)


def reached(book: PeerBook, **addresses: str) -> PeerBook:
    for peer_id, address in addresses.items():
        book.saw(peer_id, (), NOW)
        book.came_from(peer_id, address)
    return book


def test_peers_of_one_network_have_one_share_and_those_of_a_lan_each_their_own() -> None:
    book = reached(
        PeerBook(),
        a="/ip4/198.51.100.1/tcp/1",
        b="/ip4/8.8.8.1/tcp/1",
        c="/ip4/8.8.8.2/tcp/2",
        d="/ip4/172.17.0.2/tcp/1",
        e="/ip4/172.17.0.3/tcp/1",
    )
    assert book.share("b") == book.share("c") == "8.8.8.0/24"
    assert book.share("d") == "d"
    assert book.share("e") == "e"
    assert book.share("stranger") == "stranger"


def test_what_a_peer_says_of_its_address_is_no_share() -> None:
    book = reached(PeerBook(), a="/ip4/8.8.8.1/tcp/1")
    book.saw("a", ["/ip4/9.9.9.9/tcp/1"], NOW)
    assert book.share("a") == "8.8.8.0/24"


def relayed(relay: str) -> str:
    return f"/ip4/{relay}/tcp/1/p2p/QmRelay/p2p-circuit"


def behind_relays(*relays: str) -> PeerBook:
    """A book with a peer behind each relay (p0, p1, ...) of which a usable group was accepted."""
    book = reached(PeerBook(), **{f"p{i}": relayed(relay) for i, relay in enumerate(relays)})
    for i in range(len(relays)):
        book.accepted(f"p{i}", groups=1, usable=1, now=NOW)
    return book


def test_peers_behind_one_relay_count_as_one_only_where_there_are_three_relays() -> None:
    book = behind_relays("8.8.8.1", "8.8.8.1", "9.9.9.9")
    assert book.share("p0") == "p0"
    book = behind_relays("8.8.8.1", "8.8.8.1", "9.9.9.9", "7.7.7.7")
    assert book.share("p0") == book.share("p1") == "relay 8.8.8.0/24"
    assert book.share("p2") != book.share("p0")


def test_a_stranger_behind_further_relays_makes_nobody_one_with_others() -> None:
    book = behind_relays("8.8.8.1", "8.8.8.1", "9.9.9.9")
    for relay in ("7.7.7.7", "6.6.6.6", "5.5.5.5"):
        reached(book, stranger=relayed(relay))
    assert book.share("p0") == "p0"


def test_a_relay_that_nothing_came_through_for_a_day_counts_no_more() -> None:
    book = behind_relays("8.8.8.1", "8.8.8.1", "9.9.9.9", "7.7.7.7")
    assert book.share("p0") != "p0"
    book.accepted("p0", groups=1, usable=1, now=NOW + DAY + 60)
    assert book.share("p0") == "p0"


def test_many_behind_one_relay_are_one_voice_however_few_relays_there_are() -> None:
    book = behind_relays("8.8.8.1", "8.8.8.1")
    assert book.network("p0") == book.network("p1") == "relay 8.8.8.0/24"
    assert book.network("stranger") == "stranger"


def test_relays_of_one_network_are_one_relay() -> None:
    addresses = {f"p{i}": f"/ip4/8.8.8.{i}/tcp/1/p2p/QmRelay{i}/p2p-circuit" for i in range(1, 9)}
    assert reached(PeerBook(), **addresses).share("p1") == "p1"


def test_no_more_is_fetched_from_the_half_of_which_there_is_enough() -> None:
    book = PeerBook()
    work_a_day(book, "old", NOW + DAY)
    now = NOW + DAY
    book.enough_new = True
    assert book.wanted("old", now)
    assert not book.wanted("new", now)
    book.enough_aged, book.enough_new = True, False
    assert not book.wanted("old", now)
    assert book.wanted("new", now)


def test_a_clock_that_was_ahead_for_a_moment_keeps_nobody_from_an_age() -> None:
    book = PeerBook()
    book.accepted("a", groups=1, usable=1, now=NOW + 10 * DAY)
    for hour in range(30):
        book.accepted("a", groups=1, usable=1, now=NOW + 3600 * hour)
    assert book.aged("a", NOW + 30 * 3600)
