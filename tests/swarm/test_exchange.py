"""Nodes on loopback, with real p2pd processes: batches travel, and hostile publishers cost little and are counted."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from sapo_node.config import SwarmSection
from sapo_node.identity import Identity
from sapo_node.rollouts import codec
from sapo_node.rollouts.schema import Announcement, Batch, Completion, Group, Listing, ModelCard, TaskRef
from sapo_node.swarm import discovery, fetch, protocol
from sapo_node.swarm.dht import SwarmDHT, shard_prefix
from sapo_node.swarm.discovery import Shard
from sapo_node.swarm.exchange import Exchange, Received
from sapo_node.swarm.hivemind_light import p2pd_pb2
from sapo_node.swarm.p2p import Network
from tests.swarm.conftest import Loopback

OnLoopback = Callable[[Callable[[Loopback], Awaitable[None]]], None]
SWARM = "test"


def make_batch(identity: Identity, seq: int = 0, groups: int = 2) -> Batch:
    answers = [Completion(text="4", finish="stop", n_tokens=2), Completion(text="5", finish="stop", n_tokens=2)]

    def task(index: int) -> TaskRef:
        return TaskRef(
            source="reasoning_gym", version="0.1.25", name="t", config_hash=bytes(32), config={}, epoch=seq, index=index
        )

    return Batch(
        proto=1,
        swarm=SWARM,
        peer_id=identity.peer_id,
        seq=seq,
        created_at=time.time(),
        model=ModelCard(name="tiny", params=1, licence="mit", tokenizer_sha256=bytes(32)),
        groups=[
            Group(
                task=task(i), question_sha256=bytes(32), completions=answers, sampled_at=time.time(), policy_version=0
            )
            for i in range(groups)
        ],
    )


class Member:
    """A node's exchange on its network and DHT; collects what it receives."""

    def __init__(self, identity: Identity, network: Network, dht: SwarmDHT, push: str, want: int) -> None:
        self.identity, self.network, self.dht, self.want = identity, network, dht, want
        self.received: list[Received] = []
        settings = SwarmSection(name=SWARM, push=push)  # type: ignore[arg-type]
        self.exchange = Exchange(
            network, dht, identity, SWARM, settings, max_age_seconds=300.0, seq_start=0, want=lambda: self.want
        )
        self.tasks = [asyncio.create_task(self.exchange.run()), asyncio.create_task(self._collect())]

    async def _collect(self) -> None:
        async for received in self.exchange.subscribe():
            self.want -= len(received.opened.batch.groups)
            self.received.append(received)

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        for task in self.tasks:
            with suppress(asyncio.CancelledError):
                await task
        await self.dht.close()
        await self.network.close()


async def enter(loopback: Loopback, name: str, first: Member | None) -> tuple[Network, SwarmDHT]:
    """Start a node's network and DHT; it enters the swarm by `first`."""
    initial = [await loopback.address_of(first.network)] if first else []
    network = await loopback.start(name)
    return network, await SwarmDHT.start(network, SWARM, initial_peers=initial)


async def join(
    loopback: Loopback, name: str, first: Member | None = None, push: str = "off", want: int = 100
) -> Member:
    """Start a node with its exchange."""
    network, dht = await enter(loopback, name, first)
    member = Member(loopback.identity(name), network, dht, push, want)
    loopback.stack.push_async_callback(member.stop)
    return member


async def until(condition: Callable[[], Any], seconds: float) -> float:
    """Wait for a condition; returns how long it took, fails after `seconds`."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, "it did not happen in time"
        await asyncio.sleep(0.02)
    return time.monotonic() - started


async def trio(loopback: Loopback, push: str) -> list[Member]:
    a = await join(loopback, "a", push=push)
    return [a, await join(loopback, "b", a, push=push), await join(loopback, "c", a, push=push)]


@pytest.mark.slow
def test_without_hints_batches_arrive_by_the_dht_within_ten_seconds(on_loopback: OnLoopback) -> None:
    async def body(loopback: Loopback) -> None:
        a, b, c = await trio(loopback, "off")
        batch = make_batch(a.identity)
        content_id = await a.exchange.publish(batch)
        await until(lambda: b.received and c.received, 10.0)
        for member in (b, c):
            (received,) = member.received
            assert received.opened.batch == batch
            assert (received.opened.content_id, received.peer_id) == (content_id, a.identity.peer_id)
            assert received.via == "dht"
            assert member.exchange.peers_known() == [a.identity.peer_id]
        assert a.exchange.stats.batches_out == 2
        assert a.exchange.stats.bytes_out == 2 * b.exchange.stats.bytes_in > 0
        assert a.received == []

    on_loopback(body)


def test_with_hints_batches_arrive_at_once(on_loopback: OnLoopback) -> None:
    async def body(loopback: Loopback) -> None:
        a, b, c = await trio(loopback, "on")
        await asyncio.sleep(2.0)  # for gossip to form its mesh
        await a.exchange.publish(make_batch(a.identity))
        await until(lambda: b.received and c.received, 2.0)
        assert {r.via for m in (b, c) for r in m.received} == {"hint"}

    on_loopback(body)


@pytest.mark.slow
def test_during_a_flood_of_hints_batches_arrive_by_the_dht(
    on_loopback: OnLoopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "USELESS_HINTS", 50)

    async def body(loopback: Loopback) -> None:
        a, b, _ = await trio(loopback, "on")
        hostile = await loopback.start("h")
        await hostile.connect(await loopback.address_of(b.network))

        async def flood() -> None:
            while True:
                await hostile.publish(protocol.hint_topic(SWARM), b"noise")
                await asyncio.sleep(0.01)

        async def topics() -> list[str]:
            request = p2pd_pb2.PSRequest(type=p2pd_pb2.PSRequest.GET_TOPICS)
            answer = await b.network._ask("topics", 5.0, type=p2pd_pb2.Request.PUBSUB, pubsub=request)
            return list(answer.pubsub.topics)

        assert await topics() == [protocol.hint_topic(SWARM)]
        flooding = asyncio.create_task(flood())
        await until(lambda: b.exchange.stats.hint_floods, 10.0)
        async with asyncio.timeout(5.0):
            while await topics():  # its p2pd has left, too
                await asyncio.sleep(0.1)
        await a.exchange.publish(make_batch(a.identity))
        await until(lambda: b.received, 10.0)
        flooding.cancel()
        assert [received.via for received in b.received] == ["dht"]
        assert b.exchange.stats.hints_dropped + b.exchange.stats.announcements_invalid == 50, "it heard no more"

    on_loopback(body)


def pushed(identity: Identity, prefix: int | None = None) -> bytes:
    """An announcement at k = 8, in its signer's shard unless told otherwise."""
    now = time.time()
    epoch = protocol.epoch_of(now)
    own = shard_prefix(identity.public_key, epoch, 8)
    announcement = Announcement(
        proto=1,
        swarm=SWARM,
        epoch=epoch,
        k=8,
        prefix=own if prefix is None else (own + prefix) % 256,
        seq=1,
        created_at=now,
        version="",
        roles=[],
        addresses=[],
        batches=[],
    )
    return codec.encode_announcement(announcement, identity)


def test_where_a_node_has_many_addresses_it_announces_those_that_lead_farthest(on_loopback: OnLoopback) -> None:
    async def body(loopback: Loopback) -> None:
        node = await join(loopback, "a", None)
        inside = [f"/ip4/10.0.{i}.1/tcp/1" for i in range(protocol.MAX_ADDRESSES)]
        data = node.exchange._sign(Shard(0, 0, 0), 0.0, [*inside, "/ip4/8.8.8.8/tcp/1"])
        assert codec.open_announcement(data, SWARM)[1].addresses == ["/ip4/8.8.8.8/tcp/1", *inside[:-1]]

    on_loopback(body)


def test_a_hint_that_another_replays_does_not_hide_its_signer(on_loopback: OnLoopback) -> None:
    async def body(loopback: Loopback) -> None:
        exchange = (await join(loopback, "a")).exchange
        honest, replayer = loopback.identity("honest"), loopback.identity("replayer")
        data = pushed(honest)
        exchange._take_hint(replayer.peer_id, data)
        assert (exchange.peers_known(), exchange.stats.hints_dropped) == ([], 1)
        exchange._take_hint(honest.peer_id, data)
        assert exchange.peers_known() == [honest.peer_id]

    on_loopback(body)


def test_a_hint_of_another_shard_than_its_signers_is_invalid(on_loopback: OnLoopback) -> None:
    async def body(loopback: Loopback) -> None:
        exchange = (await join(loopback, "a")).exchange
        liar = loopback.identity("liar")
        exchange._take_hint(liar.peer_id, pushed(liar, prefix=1))
        assert (exchange.peers_known(), exchange.stats.announcements_invalid) == ([], 1)

    on_loopback(body)


@pytest.mark.slow
def test_a_batch_published_before_a_node_joined_is_found(on_loopback: OnLoopback) -> None:
    async def body(loopback: Loopback) -> None:
        a = await join(loopback, "a")
        await a.exchange.publish(make_batch(a.identity))
        b = await join(loopback, "b", a)
        await until(lambda: b.received, 10.0)

    on_loopback(body)


@pytest.mark.slow
def test_when_the_bootstrap_stops_the_others_go_on(on_loopback: OnLoopback) -> None:
    async def body(loopback: Loopback) -> None:
        a, b, c = await trio(loopback, "off")
        await a.exchange.publish(make_batch(a.identity))
        await until(lambda: b.received and c.received, 10.0)
        await a.stop()
        await b.exchange.publish(make_batch(b.identity, seq=1))
        await until(lambda: len(c.received) == 2, 15.0)

    on_loopback(body)


@pytest.mark.slow
def test_a_node_that_wants_nothing_fetches_nothing(on_loopback: OnLoopback) -> None:
    async def body(loopback: Loopback) -> None:
        a = await join(loopback, "a", push="on")
        b = await join(loopback, "b", a, push="on", want=0)
        await asyncio.sleep(2.0)
        await a.exchange.publish(make_batch(a.identity))
        await until(lambda: b.exchange.stats.hints_in, 5.0)
        await asyncio.sleep(1.0)
        assert a.exchange.stats.batches_out == 0
        b.want = 1
        await until(lambda: b.received, 3.0)

    on_loopback(body)


@pytest.mark.slow
def test_no_more_is_fetched_than_wanted(on_loopback: OnLoopback) -> None:
    async def body(loopback: Loopback) -> None:
        a = await join(loopback, "a")
        for seq in range(6):
            await a.exchange.publish(make_batch(a.identity, seq))
        b = await join(loopback, "b", a, want=5)
        await until(lambda: len(b.received) == 3, 10.0)
        await asyncio.sleep(2.0)
        assert len(b.received) == 3
        assert [r.opened.batch.seq for r in b.received] == [5, 4, 3]

    on_loopback(body)


# Hostile publishers: they announce properly and serve something else


class Liar:
    """A node without an exchange: announces one listing and answers fetches with a handler of its own."""

    def __init__(self, identity: Identity, network: Network, dht: SwarmDHT) -> None:
        self.identity, self.network, self.dht = identity, network, dht

    async def lie(self, listing: Listing, handler: Any) -> None:
        await self.network.serve_stream(protocol.FETCH_PROTOCOL, handler)
        now = time.time()
        epoch = protocol.epoch_of(now)
        announcement = Announcement(
            proto=1,
            swarm=SWARM,
            epoch=epoch,
            k=0,
            prefix=shard_prefix(self.identity.public_key, epoch, 0),
            seq=int(now * 1000),
            created_at=now,
            version="",
            roles=[],
            addresses=await self.network.addresses(),
            batches=[listing],
        )
        data = codec.encode_announcement(announcement, self.identity)
        assert await self.dht.announce(data, epoch, 0, announcement.prefix, now + 90)


async def victim_and_liar(loopback: Loopback) -> tuple[Member, Liar]:
    victim = await join(loopback, "victim")
    network, dht = await enter(loopback, "liar", victim)
    loopback.stack.push_async_callback(dht.close)
    return victim, Liar(loopback.identity("liar"), network, dht)


def answering(answer: bytes, pause: float = 0.0, hang: bool = False) -> Any:
    async def handler(peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(32)
        step = 1 if pause else len(answer)
        for start in range(0, len(answer), step):
            writer.write(answer[start : start + step])
            await writer.drain()
            await asyncio.sleep(pause)
        if hang:
            await asyncio.sleep(3600)

    return handler


def response(data: bytes, length: int | None = None) -> bytes:
    return b"\0" + (len(data) if length is None else length).to_bytes(4, "big") + data


def listing_of(envelope: codec.Envelope, groups: int = 2) -> Listing:
    return Listing(envelope.content_id, len(envelope.data), groups, time.time())


@pytest.mark.slow
@pytest.mark.parametrize("lie", ["length", "digest", "signature", "someone else's", "group count"])
def test_a_liar_is_given_up_at_once_and_loses_score(on_loopback: OnLoopback, lie: str) -> None:
    async def body(loopback: Loopback) -> None:
        victim, liar = await victim_and_liar(loopback)
        envelope = codec.encode_batch(make_batch(liar.identity), liar.identity)
        listing, answer = listing_of(envelope), response(envelope.data)
        if lie == "length":
            answer = response(envelope.data, length=2**32 - 1)
        elif lie == "digest":
            answer = response(envelope.data[:-1] + bytes([envelope.data[-1] ^ 1]))
        elif lie == "signature":
            answer = response(envelope.data[:50] + bytes([envelope.data[50] ^ 1]) + envelope.data[51:])
        elif lie == "someone else's":
            other = loopback.identity("other")
            envelope = codec.encode_batch(make_batch(other), other)
            listing, answer = listing_of(envelope), response(envelope.data)
        else:
            listing = msgspec.structs.replace(listing, groups=1)
        await liar.lie(listing, answering(answer))
        stats = victim.exchange.stats
        await until(lambda: stats.fetch_faults, 10.0)
        await asyncio.sleep(2.0)
        assert (stats.fetch_faults, stats.fetch_failures, stats.batches_in) == (1, 1, 0)
        assert victim.exchange.book.score(liar.identity.peer_id, time.time()) < -20
        assert victim.received == []

    on_loopback(body)


@pytest.mark.slow
def test_a_batch_that_is_slow_to_open_stops_nothing(on_loopback: OnLoopback, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    really = codec.open_batch

    def slow(data: bytes, swarm: str) -> codec.Opened:
        threads.append(threading.current_thread())
        time.sleep(1.0)
        return really(data, swarm)

    monkeypatch.setattr(codec, "open_batch", slow)

    async def body(loopback: Loopback) -> None:
        a = await join(loopback, "a", push="on")
        b = await join(loopback, "b", a, push="on")
        await b.exchange.publish(make_batch(b.identity))
        await until(lambda: a.received, 10.0)
        assert threading.current_thread() not in threads, "the event loop goes on meanwhile"

    on_loopback(body)


@pytest.mark.slow
@pytest.mark.parametrize("hang", [True, False])
def test_a_slow_publisher_holds_one_slot_for_a_bounded_time(
    on_loopback: OnLoopback, monkeypatch: pytest.MonkeyPatch, hang: bool
) -> None:
    monkeypatch.setattr(fetch, "REQUEST_SECONDS", 1.0)

    async def body(loopback: Loopback) -> None:
        victim, liar = await victim_and_liar(loopback)
        honest = await join(loopback, "honest", victim)
        envelope = codec.encode_batch(make_batch(liar.identity), liar.identity)
        drip = response(envelope.data)[: 5 if hang else None]
        await liar.lie(listing_of(envelope), answering(drip, pause=0.1, hang=hang))
        await honest.exchange.publish(make_batch(honest.identity))
        await until(lambda: victim.received, 10.0)
        assert victim.received[0].peer_id == honest.identity.peer_id
        await until(lambda: victim.exchange.stats.fetch_failures, 5.0)
        assert victim.exchange.stats.fetch_faults == 0

    on_loopback(body)


@pytest.mark.slow
def test_a_shunned_peer_is_neither_asked_nor_served(on_loopback: OnLoopback) -> None:
    async def body(loopback: Loopback) -> None:
        a = await join(loopback, "a")
        b = await join(loopback, "b", a)
        for _ in range(4):
            a.exchange.book.rejected(b.identity.peer_id, time.time())
        await a.exchange.publish(make_batch(a.identity))
        await b.exchange.publish(make_batch(b.identity))
        await until(lambda: b.exchange.stats.fetch_failures, 10.0)
        assert a.received == []
        assert b.received == []
        assert b.exchange.stats.fetch_faults == 0

    on_loopback(body)
