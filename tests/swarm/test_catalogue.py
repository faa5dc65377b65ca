"""What is fetched next: uniform over peers, one fetch a peer, nothing twice, bounded in number and retries."""

import random
from collections import Counter
from typing import Any

from sapo_node.rollouts.schema import Announcement, Listing
from sapo_node.swarm import catalogue, protocol
from sapo_node.swarm.catalogue import Catalogue

NOW = 3000.0


def listing(tag: int, created_at: float = NOW, groups: int = 4) -> Listing:
    return Listing(tag.to_bytes(32, "big"), 500, groups, created_at)


def announcement(*batches: Listing, **changes: Any) -> Announcement:
    fields: dict[str, Any] = {"proto": 1, "swarm": "s", "epoch": protocol.epoch_of(NOW), "k": 0, "prefix": 0, "seq": 1}
    fields |= {"created_at": NOW, "version": "", "roles": [], "addresses": ["/ip4/127.0.0.1/tcp/1"]}
    return Announcement(**{**fields, "batches": list(batches), **changes})


def make(shunned: frozenset[str] = frozenset()) -> Catalogue:
    return Catalogue("me", 300.0, lambda peer_id, now: peer_id not in shunned, random.Random(0))


def add(c: Catalogue, peer: str, *batches: Listing, now: float = NOW, **changes: Any) -> bool:
    return c.add(peer, peer.encode(), announcement(*batches, **changes), "dht", now)


def test_a_peer_with_many_batches_is_drawn_no_more_often() -> None:
    drawn: Counter[str] = Counter()
    for seed in range(600):
        c = Catalogue("me", 300.0, lambda peer_id, now: True, random.Random(seed))
        add(c, "loud", *(listing(i) for i in range(8)))
        add(c, "quiet", listing(9))
        wanted = c.take(NOW)
        assert wanted is not None
        drawn[wanted.peer_id] += 1
    assert 240 < drawn["loud"] < 360


def test_the_newest_unseen_batch_of_a_peer_comes_first() -> None:
    c = make()
    add(c, "a", listing(1, NOW - 20), listing(2, NOW - 10))
    first = c.take(NOW)
    assert first is not None
    c.fetched(first, 0.1, NOW)
    second = c.take(NOW)
    assert second is not None
    c.fetched(second, 0.1, NOW)
    assert [first.listing, second.listing] == [listing(2, NOW - 10), listing(1, NOW - 20)]
    assert c.take(NOW) is None


def test_one_fetch_a_peer_at_a_time() -> None:
    c = make()
    add(c, "a", listing(1), listing(2))
    assert c.take(NOW) is not None
    assert c.take(NOW) is None
    assert c.available(NOW) == 0


def test_a_batch_that_another_peer_lists_and_does_not_serve_stays_available() -> None:
    c = make()
    add(c, "thief", listing(1))
    wanted = c.take(NOW)
    assert wanted is not None
    c.failed(wanted, NOW, give_up=True)
    add(c, "owner", listing(1))
    assert (found := c.take(NOW)) is not None
    assert found.peer_id == "owner"


def test_a_failed_peer_rests_longer_each_time_and_the_batch_is_given_up() -> None:
    c, now, pauses = make(), NOW, []
    add(c, "a", listing(1))
    for _ in range(catalogue.MAX_ATTEMPTS):
        wanted = c.take(now)
        assert wanted is not None
        c.failed(wanted, now)
        start = now
        while not c._free("a", c._offers["a"], now) and now < start + 100.0:
            now += 0.1
        pauses.append(now - start)
    assert 0.4 < pauses[0] < 1.7
    assert 0.9 < pauses[1] < 3.2
    assert c.take(now) is None


def test_a_peer_whose_batches_are_gone_again_and_again_waits_for_the_others() -> None:
    c = make()
    add(c, "gone", *(listing(i) for i in range(3)))
    first = c.take(NOW)
    assert first is not None
    c.failed(first, NOW, give_up=True)  # as of a node that was started again
    assert c.available(NOW + 2) == 8
    second = c.take(NOW + 2)
    assert second is not None
    c.failed(second, NOW + 2, give_up=True)
    assert c.available(NOW + 6) == 0, "what it offers ends no search any more"
    for other in range(5):
        add(c, f"new {other}", listing(10 + other), now=NOW + 6)
    asked = [one.peer_id for _ in range(6) if (one := c.take(NOW + 6)) is not None]
    assert asked[-1] == "gone"
    assert len(asked) == 6


def test_a_clock_that_was_set_back_does_not_lengthen_a_rest() -> None:
    c = make()
    add(c, "a", listing(1))
    wanted = c.take(NOW)
    assert wanted is not None
    c.failed(wanted, NOW)
    assert c.available(NOW) == 0
    assert c.available(NOW - 3600) > 0


def test_a_clock_that_was_set_back_does_not_keep_the_gone() -> None:
    c = make()
    add(c, "a", listing(1))
    assert c.peers(NOW - 3600) == []


def test_own_stale_future_and_old_announcements_are_no_news() -> None:
    c = make()
    epoch = protocol.epoch_of(NOW)
    assert not add(c, "me", listing(1))
    assert not add(c, "a", listing(1), epoch=epoch - 11)
    assert not add(c, "a", listing(1), epoch=epoch + 2)
    assert add(c, "a", listing(1), epoch=epoch + 1, seq=5)
    assert not add(c, "a", listing(2), epoch=epoch + 1, seq=5)
    assert add(c, "a", listing(2), epoch=epoch + 1, seq=6)


def test_stale_batches_are_not_offered() -> None:
    c = make()
    add(c, "a", listing(1, NOW - 301))
    assert c.take(NOW) is None


def test_shunned_peers_are_not_asked() -> None:
    c = make(shunned=frozenset(["a"]))
    add(c, "a", listing(1))
    assert c.take(NOW) is None


def test_peers_are_forgotten_when_unheard() -> None:
    c = make()
    add(c, "a", listing(1))
    assert c.peers(NOW + 299) == ["a"]
    assert c.peers(NOW + 301) == []


def test_everything_is_bounded() -> None:
    c = make()
    for i in range(catalogue.MAX_OFFERING + 10):
        add(c, f"peer{i}", listing(i))
        assert len(c.peers(NOW)) <= catalogue.MAX_OFFERING
    assert len(c.peers(NOW)) > catalogue.MAX_OFFERING * 0.9
    assert "peer0" not in c.peers(NOW)


def test_a_busy_peer_is_asked_again_and_its_batch_is_not_given_up() -> None:
    c, now = make(), NOW
    add(c, "a", listing(1, NOW))
    for _ in range(3 * catalogue.MAX_ATTEMPTS):
        wanted = c.take(now)
        assert wanted is not None
        assert wanted.reliable
        c.failed(wanted, now, busy=True)
        assert c.take(now) is None, "it rests as after any failure"
        now += 1.0
        c._offers["a"].rest = 0.0


def test_available_counts_groups() -> None:
    c = make()
    add(c, "a", listing(1, groups=4), listing(2, groups=3))
    add(c, "b", listing(1, groups=2))
    assert c.available(NOW) == 9
