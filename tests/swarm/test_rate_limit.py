"""How often peers may ask: each of them, and all together."""

from sapo_node.swarm.rate_limit import (
    BURST,
    LENT,
    MAX_BUCKETS,
    NETWORK,
    REFILL_PER_SECOND,
    TOTAL_BURST,
    TOTAL_REFILL_PER_SECOND,
    RateLimit,
)


def test_the_rate_refills_and_is_kept_apart_for_each_peer() -> None:
    rate = RateLimit()
    assert all(rate.take("a", 0.0) for _ in range(BURST))
    assert not rate.take("a", 0.0)
    assert rate.take("b", 0.0)
    assert rate.take("a", 1.0 / REFILL_PER_SECOND)
    assert not rate.take("a", 1.0 / REFILL_PER_SECOND)


def test_the_rate_table_is_bounded() -> None:
    rate = RateLimit()
    for i in range(2 * MAX_BUCKETS):
        rate.take_own(f"peer{i}", 0.0)
    assert len(rate._peers) == MAX_BUCKETS


def test_all_peers_together_have_a_limit_that_refills() -> None:
    rate = RateLimit(lambda peer_id: peer_id)
    assert sum(rate.take(f"peer {n}", 0.0) for n in range(2 * TOTAL_BURST)) == TOTAL_BURST * (1 + LENT) / 2
    assert sum(rate.take(f"late {n}", 1.0) for n in range(2 * TOTAL_BURST)) == TOTAL_REFILL_PER_SECOND


def test_what_a_greedy_peer_is_refused_takes_nothing_from_the_others() -> None:
    rate = RateLimit()
    assert sum(rate.take("greedy", 0.0) for _ in range(10 * TOTAL_BURST)) == BURST
    for_strangers = TOTAL_BURST * (1 + LENT) / 2
    assert sum(rate.take(f"peer {n}", 0.0) for n in range(TOTAL_BURST)) == for_strangers - BURST


def test_a_flood_of_strangers_leaves_a_part_to_known_peers() -> None:
    rate = RateLimit(lambda peer_id: "network" if peer_id == "known" else "")
    heard = 0
    for tick in range(600):  # a minute
        for n in range(400):
            rate.take(f"stranger {tick} {n}", tick * 0.1)
        heard += tick % 5 == 0 and rate.take("known", tick * 0.1)
    assert heard == 120


def test_peers_that_gave_something_leave_a_part_to_newcomers() -> None:
    """Hope: a group that teaches makes a key known, and known ones may use up what all have together."""
    rate = RateLimit(lambda peer_id: peer_id if peer_id.startswith("known") else "")
    heard = 0
    for tick in range(600):  # a minute
        for n in range(400):
            rate.take(f"known {n}", tick * 0.1)
        heard += rate.take(f"newcomer {tick}", tick * 0.1)
    assert heard == 600


def test_many_keys_of_one_network_have_one_part() -> None:
    """Hope: keys that gave something, behind one address, use up the half of those who gave something elsewhere."""
    rate = RateLimit(lambda peer_id: "evil" if peer_id.startswith("evil") else "honest")
    heard = 0
    for tick in range(600):
        for n in range(64):
            rate.take(f"evil {n}", tick * 0.1)
        heard += tick % 5 == 0 and rate.take("honest", tick * 0.1)
    assert heard == 120


def test_beyond_their_part_they_are_strangers() -> None:
    rate = RateLimit(lambda peer_id: "campus")
    served = sum(rate.take(f"peer {n}", 0.0) for n in range(1000))
    assert served == NETWORK * BURST + TOTAL_BURST / 2 + (TOTAL_BURST / 2 * LENT - NETWORK * BURST)


def test_what_costs_nothing_takes_nothing_from_the_others() -> None:
    rate = RateLimit()
    assert all(rate.take_own(f"curious {n}", 0.0) for n in range(10 * TOTAL_BURST))
    assert rate.take("peer", 0.0)
    assert sum(rate.take_own("greedy", 0.0) for _ in range(100)) == BURST


def test_what_cost_more_than_a_request_is_paid_by_waiting() -> None:
    rate = RateLimit()
    assert rate.take("a", 0.0)
    rate.owe("a", 2.0 * BURST, 0.0)
    assert not rate.take("a", 1.0)
    assert rate.take("a", 1.0 + 2.0 * BURST / REFILL_PER_SECOND)
