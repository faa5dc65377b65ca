"""Attacks by announcing what is never given: a listing is a word, and identities are free."""

import asyncio
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sapo_node.config import SwarmSection
from sapo_node.identity import Identity
from sapo_node.rollouts import codec
from sapo_node.rollouts.schema import Announcement, Listing
from sapo_node.swarm import catalogue, protocol
from sapo_node.swarm.catalogue import Catalogue, Wanted
from sapo_node.swarm.exchange import AUTO_PUSH_PEERS, Exchange
from sapo_node.swarm.peers import PeerBook
from tests.swarm.test_exchange import SWARM, make_batch

HONEST = 3


def announcement(*batches: Listing, seq: int = 1) -> Announcement:
    now = time.time()
    return Announcement(
        proto=1,
        swarm=SWARM,
        epoch=protocol.epoch_of(now),
        k=0,
        prefix=0,
        seq=seq,
        created_at=now,
        version="",
        roles=[],
        addresses=[],
        batches=list(batches),
    )


def large(number: int) -> Listing:
    """A listing of all that a batch may be."""
    return Listing(number.to_bytes(32, "big"), protocol.MAX_ENVELOPE_BYTES, protocol.MAX_GROUPS, time.time())


def alone(folder: Path, **options: Any) -> Exchange:
    """An exchange without a network."""
    me = Identity.create(folder / "me.key")
    nowhere: Any = SimpleNamespace()
    settings = SwarmSection(name=SWARM)
    return Exchange(nowhere, nowhere, me, SWARM, settings, max_age_seconds=300.0, seq_start=0, **options)


class Publishers:
    """Honest peers and silent ones, all of whom one exchange knows; `transfer` takes the place of its streams."""

    def __init__(self, exchange: Exchange, folder: Path) -> None:
        self.exchange = exchange
        self.honest = [Identity.create(folder / f"honest{n}") for n in range(HONEST)]
        self.data: dict[bytes, bytes] = {}
        self.taken: set[str] = set()
        exchange._transfer = self.transfer  # type: ignore[method-assign]

    async def transfer(self, wanted: Wanted) -> bytes:
        if (found := self.data.get(wanted.listing.content_id)) is None:
            await asyncio.sleep(3600)
            raise AssertionError
        return found

    def silent(self, count: int) -> None:
        for n in range(count):
            self.exchange._catalogue.add(f"silent{n}", bytes(32), announcement(large(n)), "hint", time.time())

    def publish(self, seq: int, by: int = HONEST) -> None:
        for identity in self.honest[:by]:
            made = codec.encode_batch(make_batch(identity, seq, 4), identity)
            self.data[made.content_id] = made.data
            listing = Listing(made.content_id, len(made.data), 4, time.time())
            news = announcement(listing, seq=seq)
            self.exchange._catalogue.add(identity.peer_id, identity.public_key, news, "dht", time.time())
        self.exchange._fetch_now.set()

    async def take(self) -> None:
        async for received in self.exchange.subscribe():
            self.taken.add(received.peer_id)


def fetched(publishers: Publishers, count: int, seconds: float = 3.0) -> None:
    """Let the exchange fetch until `count` peers gave something."""

    async def body() -> None:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(publishers.exchange._fetch_loop(tasks)), tasks.create_task(publishers.take())]
            started = time.monotonic()
            while len(publishers.taken) < count and time.monotonic() - started < seconds:
                await asyncio.sleep(0.01)
            for task in [*running, *(t for t in asyncio.all_tasks() if t.get_name() == "fetch a batch")]:
                task.cancel()

    asyncio.run(body())
    assert len(publishers.taken) == count


def test_promises_of_silent_publishers_do_not_count_as_groups(tmp_path: Path) -> None:
    """Hope: one listing of 32 groups, never sent, is all that a node wants, so that it asks nobody else."""
    publishers = Publishers(alone(tmp_path, want=lambda: protocol.MAX_GROUPS), tmp_path)
    publishers.silent(1)
    publishers.publish(1, by=1)
    fetched(publishers, 1)


def test_a_crowd_of_silent_publishers_does_not_stop_what_reliable_peers_give(tmp_path: Path) -> None:
    """Hope: a hundred identities that announce and say nothing hold every slot for fetches, all the time."""
    exchange = alone(tmp_path, want=lambda: protocol.MAX_GROUPS)
    publishers = Publishers(exchange, tmp_path)
    for identity in publishers.honest:
        exchange.book.accepted(identity.peer_id, 4, 4, time.time())
    publishers.silent(100)
    publishers.publish(1)
    fetched(publishers, HONEST)


@pytest.mark.parametrize("reached_at", ["/ip4/11.1.1.{}/tcp/1", "/ip4/11.1.1.1/tcp/1/p2p/relay/p2p-circuit"])
def test_a_crowd_of_one_network_that_gives_slowly_leaves_half_of_the_slots(tmp_path: Path, reached_at: str) -> None:
    """Hope: a hundred keys behind one address, or one relay, each of which gives groups, hold every slot for as long as
    they may."""
    exchange = alone(tmp_path, want=lambda: protocol.MAX_GROUPS)
    publishers = Publishers(exchange, tmp_path)
    for n in range(100):
        exchange.book.accepted(f"silent{n}", 32, 32, time.time())
        exchange.book.came_from(f"silent{n}", reached_at.format(n))
    for identity in publishers.honest:
        exchange.book.accepted(identity.peer_id, 4, 4, time.time())
    publishers.silent(100)
    publishers.publish(1)
    fetched(publishers, HONEST)


def test_a_publisher_that_gives_now_and_then_and_is_silent_else_is_not_reliable() -> None:
    """Hope: a batch that is accepted buys the slots of those that keep their word, again and again."""
    made = Catalogue("me", 300.0, lambda *_: True, random.Random(0))
    now = time.time()
    made.add("evil", bytes(32), announcement(large(1), large(2)), "hint", now)
    first = made.take(now, only_reliable=True)
    assert first is not None
    assert first.reliable
    made.failed(first, now)
    later = now + catalogue.MAX_BACKOFF_SECONDS * 2
    assert made.take(later, only_reliable=True) is None
    assert (again := made.take(later)) is not None, "it is still asked, in the slots of strangers"
    assert not again.reliable


def test_silent_strangers_are_asked_after_those_that_were_not_asked_yet() -> None:
    """Hope: a few identities, silent again and again, take the strangers' slots from honest newcomers."""
    made = Catalogue("me", 300.0, lambda *_: True, random.Random(0), gave=lambda *_: False)
    now = time.time()
    for n in range(12):
        made.add(f"evil{n}", bytes(32), announcement(large(n), large(n + 100)), "hint", now)
        wanted = made.take(now)
        assert wanted is not None
        made.failed(wanted, now)
    later = now + catalogue.MAX_BACKOFF_SECONDS * 2
    for n in range(5):
        made.add(f"new{n}", bytes(32), announcement(large(n + 200)), "dht", later)
    asked = [wanted.peer_id for _ in range(5) if (wanted := made.take(later)) is not None]
    assert sorted(asked) == [f"new{n}" for n in range(5)]


def test_offers_of_strangers_do_not_end_the_search_for_more(tmp_path: Path) -> None:
    """Hope: who announces thousands of groups keeps a hungry node from looking into the DHT."""
    exchange = alone(tmp_path, want=lambda: 8)
    exchange._catalogue.add("evil", bytes(32), announcement(*map(large, range(8))), "hint", time.time())
    assert exchange._is_hungry()
    exchange.book.accepted("evil", 4, 4, time.time())
    assert not exchange._is_hungry()


def test_a_publisher_of_worthless_batches_is_asked_more_and_more_seldom() -> None:
    """Hope: groups that are ignored cost nothing, so a free key holds a node's link and its scorer for ever."""
    made = Catalogue("me", 300.0, lambda *_: True, random.Random(0))
    now, batches, asked = time.time(), 0, 0

    def publish_and_take() -> Wanted | None:
        nonlocal batches
        batches += 1
        listing = Listing(batches.to_bytes(32, "big"), protocol.MAX_ENVELOPE_BYTES, protocol.MAX_GROUPS, now)
        made.add("evil", bytes(32), announcement(listing, seq=batches), "hint", now)
        return made.take(now)

    for _ in range(600):
        if wanted := publish_and_take():
            asked += 1
            made.fetched(wanted, 0.1, now)
            made.judged("evil", False, now)
        now += 0.25
    assert 10 <= asked <= 40, "of 600 offers in 150 s"
    now += 1.5 * catalogue.MAX_VAIN_SECONDS
    wanted = publish_and_take()
    assert wanted is not None, "it is asked still"
    made.fetched(wanted, 0.1, now)
    made.judged("evil", True, now)
    assert publish_and_take(), "and after a batch of use at once"


def test_peers_that_give_slowly_leave_the_others_most_slots() -> None:
    """Hope: keys that give something, each batch just fast enough not to fail, hold every slot all the time."""
    made = Catalogue("me", 300.0, lambda *_: True, random.Random(0))
    now = time.time()
    for name, seconds in (("evil", 15.0), ("home link", 3.0), ("honest", 1.0)):
        made.add(name, bytes(32), announcement(large(1), large(2)), "hint", now)
        wanted = made.take(now, only_reliable=True)
        assert wanted is not None
        made.fetched(wanted, seconds, now)
    reliable = [made.take(now, only_reliable=True) for _ in range(2)]
    assert sorted(wanted.peer_id for wanted in reliable if wanted) == ["home link", "honest"]
    assert made.take(now, only_reliable=True) is None
    assert (slow := made.take(now)) is not None, "it is asked all the same, in the slots of strangers"
    assert slow.peer_id == "evil"


def test_a_thousand_announcing_keys_push_no_reliable_peer_out() -> None:
    """Hope: a full catalogue forgets the longest unheard, so 2048 fresh keys leave a node nothing to fetch."""
    made = Catalogue(
        "me", 300.0, lambda *_: True, random.Random(0), gave=lambda peer_id, _: peer_id.startswith("honest")
    )
    now = time.time()
    for n in range(50):
        made.add(f"honest{n}", bytes(32), announcement(large(n)), "dht", now)
    for n in range(2 * catalogue.MAX_OFFERING):
        made.add(f"evil{n}", bytes(32), announcement(large(n)), "hint", now)
    kept = made.peers(now)
    assert sum(peer_id.startswith("honest") for peer_id in kept) == 50
    assert len(kept) <= catalogue.MAX_OFFERING


def test_empty_announcements_do_not_end_gossip(tmp_path: Path) -> None:
    """Hope: 65 free keys that announce nothing make a swarm look large, and all stop pushing hints."""
    exchange = alone(tmp_path, want=lambda: 8, book=PeerBook())
    for n in range(AUTO_PUSH_PEERS + 1):
        exchange._catalogue.add(f"peer{n}", bytes(32), announcement(), "hint", time.time())
    assert len(exchange.peers_known()) == AUTO_PUSH_PEERS + 1
    assert exchange._push_is_on()
    for n in range(AUTO_PUSH_PEERS + 1):
        exchange.book.accepted(f"peer{n}", 4, 4, time.time())
    assert not exchange._push_is_on(), "a swarm that is large indeed"
    for n in range(AUTO_PUSH_PEERS + 1):
        exchange.book.came_from(f"peer{n}", f"/ip4/11.1.1.{n}/tcp/1")
    assert exchange._push_is_on(), "of one network"


@pytest.mark.parametrize("connected", [AUTO_PUSH_PEERS, AUTO_PUSH_PEERS + 1])
def test_connected_members_count_as_a_large_swarm(tmp_path: Path, connected: int) -> None:
    """Hope: none; a node that fetches nothing must see too that its swarm is large."""
    exchange = alone(tmp_path, want=lambda: 0)
    names = [f"peer{n}" for n in range(connected)]
    for name in names:
        exchange._catalogue.add(name, bytes(32), announcement(), "hint", time.time())
    exchange.book.set_connected(names, (), time.time())
    assert exchange._push_is_on() is (connected <= AUTO_PUSH_PEERS)
