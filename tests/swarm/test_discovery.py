"""When announcements are written, and where they are looked for."""

import math
import random

import pytest

from sapo_node.swarm import discovery, protocol
from sapo_node.swarm.discovery import AnnouncePlan, choose_shards
from sapo_node.swarm.records import latest_expiry

START = 3000.0  # the beginning of an epoch


def plan() -> AnnouncePlan:
    return AnnouncePlan(random.Random(0))


def test_nothing_is_announced_without_a_batch() -> None:
    assert plan().pause(False, START, 0.0) == math.inf
    assert plan().pause(True, START, 0.0) == math.inf


def test_the_first_announcement_goes_out_at_once() -> None:
    p = plan()
    p.published()
    assert p.pause(True, START, 0.0) == 0.0


def test_announcements_are_three_seconds_apart() -> None:
    p = plan()
    p.published()
    p.started(START, 7.0)
    p.published()
    assert p.pause(True, START, 7.0) == discovery.REWRITE_SECONDS
    assert p.pause(True, START + 2, 9.0) == discovery.REWRITE_SECONDS - 2


def test_it_is_rewritten_soon_after_each_new_epoch_while_a_batch_is_fresh() -> None:
    p = plan()
    p.published()
    p.started(START, 0.0)
    tick = 0.0
    for n in (1, 2):
        due = tick + p.pause(True, START + tick, tick)
        assert 0.0 <= due - n * protocol.EPOCH_SECONDS <= discovery.REWRITE_SECONDS
        tick = due
        p.started(START + tick, tick)
    assert p.pause(False, START + tick, tick) == math.inf


def test_a_failed_announcement_is_repeated() -> None:
    p = plan()
    p.published()
    p.started(START, 0.0)
    p.failed()
    assert p.pause(True, START, 0.0) == discovery.REWRITE_SECONDS


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_a_clock_that_is_set_does_not_silence_a_node(published: bool, step: float) -> None:
    p = plan()
    p.published()
    p.started(START, 0.0)
    if published:
        p.published()
    assert p.pause(True, START + step, 0.0) <= discovery.REWRITE_SECONDS
    assert p.pause(True, START + step + discovery.REWRITE_SECONDS, discovery.REWRITE_SECONDS) == 0.0


def test_each_record_expires_strictly_later_also_when_the_clock_steps_back() -> None:
    p = plan()
    expiries = [p.started(now, 0.0) for now in (START, START + 3, START - 60, START - 57)]
    assert sorted(set(expiries)) == expiries


def test_records_expire_within_the_limit_of_holders_whatever_the_clock_does() -> None:
    p = plan()
    for now in (START, START - 3600):
        assert now < p.started(now, 0.0) <= latest_expiry(protocol.epoch_of(now))


def test_a_look_opens_this_epoch_the_last_and_a_neighbouring_k() -> None:
    for seed in range(50):
        shards = choose_shards(100, 3, [2, 3, 4], random.Random(seed))
        assert [(s.epoch, s.k) for s in shards[:2]] == [(100, 3), (99, 3)]
        assert shards[2].k in (2, 4)
        assert all(0 <= s.prefix < 1 << s.k for s in shards)


def test_looks_reach_every_shard() -> None:
    rng = random.Random(0)
    assert {choose_shards(100, 2, [2], rng)[0].prefix for _ in range(100)} == {0, 1, 2, 3}
