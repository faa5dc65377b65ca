"""How often peers may ask: each of them, and all together."""

from sapo_node.swarm.rate_limit import (
    BURST,
    MAX_BUCKETS,
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
        rate.take(f"peer{i}", 0.0)
    assert len(rate._buckets) == MAX_BUCKETS


def test_all_peers_together_have_a_limit_that_refills() -> None:
    rate = RateLimit()
    assert sum(rate.take(f"peer {n}", 0.0) for n in range(2 * TOTAL_BURST)) == TOTAL_BURST
    assert sum(rate.take(f"late {n}", 1.0) for n in range(2 * TOTAL_BURST)) == TOTAL_REFILL_PER_SECOND


def test_what_a_greedy_peer_is_refused_takes_nothing_from_the_others() -> None:
    rate = RateLimit()
    assert sum(rate.take("greedy", 0.0) for _ in range(10 * TOTAL_BURST)) == BURST
    assert sum(rate.take(f"peer {n}", 0.0) for n in range(TOTAL_BURST)) == TOTAL_BURST - BURST
