"""Attacks by gossip: messages that anyone may push to everyone."""

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import base58
import pytest

from sapo_node.config import SwarmSection
from sapo_node.identity import Identity
from sapo_node.rollouts import codec
from sapo_node.rollouts.schema import Announcement, Listing
from sapo_node.swarm import discovery, protocol
from sapo_node.swarm.catalogue import BACKOFF_SECONDS, MAX_BACKOFF_SECONDS, Catalogue
from sapo_node.swarm.discovery import HintFlood
from sapo_node.swarm.exchange import AUTO_PUSH_PEERS, Exchange
from sapo_node.swarm.hivemind_light import p2pd_pb2
from sapo_node.swarm.p2p import MAX_HINT_BYTES, MAX_QUEUED_HINTS, Network
from sapo_node.swarm.peers import PeerBook
from sapo_node.swarm.rate_limit import BURST
from sapo_node.swarm.records import shard_prefix

SWARM = "test"


def announcement(signer: Identity, seq: int, now: float, batches: int = 1) -> Announcement:
    epoch = protocol.epoch_of(now)
    ids = random.Random(seq)
    return Announcement(
        proto=protocol.PROTO,
        swarm=SWARM,
        epoch=epoch,
        k=0,
        prefix=shard_prefix(signer.public_key, epoch, 0),
        seq=seq,
        created_at=now,
        version="",
        roles=[],
        addresses=["/ip4/192.0.2.66/tcp/443"],
        batches=[Listing(ids.randbytes(32), 5000, 4, now) for _ in range(batches)],
    )


@pytest.fixture
def sender(tmp_path: Path) -> Identity:
    return Identity.create(tmp_path / "sender.key")


@pytest.fixture
def exchange(tmp_path: Path) -> Exchange:
    """An exchange that hears hints and has no network."""
    nowhere: Any = SimpleNamespace()
    me = Identity.create(tmp_path / "me.key")
    settings = SwarmSection(name=SWARM)
    return Exchange(
        nowhere, nowhere, me, SWARM, settings, max_age_seconds=300.0, seq_start=0, want=lambda: 100, book=PeerBook()
    )


class Opened:
    """Counts the announcements that are opened, each at the price of a signature check."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        original = codec.open_announcement

        def counting(data: bytes, swarm: str) -> Any:
            self.count += 1
            return original(data, swarm)

        monkeypatch.setattr(codec, "open_announcement", counting)


def test_a_flood_of_hints_costs_a_few_signature_checks(
    exchange: Exchange, sender: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hope: ten thousand hints a second keep the receiver's processor busy with signatures."""
    opened = Opened(monkeypatch)
    junk = codec.encode_announcement(announcement(sender, 1, time.time()), sender)
    started = time.monotonic()
    for n in range(10_000):
        exchange._take_hint(sender.peer_id, junk[:-1] + bytes([n % 256]))
    assert opened.count <= BURST + 5 * (time.monotonic() - started) + 1
    assert exchange.stats.hints_dropped >= 9_900


def test_the_same_hint_again_and_again_is_opened_once(
    exchange: Exchange, sender: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hope: a captured hint, repeated by the whole mesh, is checked each time."""
    opened = Opened(monkeypatch)
    hint = codec.encode_announcement(announcement(sender, 1, time.time()), sender)
    for _ in range(BURST):
        exchange._take_hint(sender.peer_id, hint)
    assert opened.count == 1


def test_hints_of_a_thousand_free_identities_are_limited_in_total(
    exchange: Exchange, sender: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hope: one host pushes in the name of a thousand fresh keys, each with a burst of its own."""
    opened = Opened(monkeypatch)
    hint = codec.encode_announcement(announcement(sender, 1, time.time()), sender)
    for n in range(2000):
        exchange._take_hint(f"peer {n}", hint[:-2] + n.to_bytes(2, "big"))
    assert opened.count <= 512


def test_hints_of_many_identities_keep_no_known_peer_from_being_heard(
    exchange: Exchange, sender: Identity, tmp_path: Path
) -> None:
    """Hope: two hundred identities use up the hints that a node takes, and batches of others are found late."""
    exchange.book.accepted(sender.peer_id, 4, 4, time.time())
    for n in range(2000):
        exchange._take_hint(f"peer {n % 200}", bytes(200))
    exchange._take_hint("newcomer", bytes(200))
    dropped = exchange.stats.hints_dropped
    exchange._take_hint(sender.peer_id, codec.encode_announcement(announcement(sender, 1, time.time()), sender))
    assert exchange.stats.hints_dropped == dropped
    assert exchange.peers_known() == [sender.peer_id]


class Flooded:
    """A network in which an endless flood of empty hints comes in, and that counts the subscriptions to it."""

    def __init__(self) -> None:
        self.subscribed = self.heard = 0

    async def subscribe(self, *topics: str) -> AsyncGenerator[tuple[str, bytes], None]:
        self.subscribed += 1
        while True:
            await asyncio.sleep(0)
            self.heard += 1
            yield "peer", b""


def test_a_node_does_not_listen_to_a_flood(exchange: Exchange, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hope: one peer gossips junk, and the p2pd of every node checks each signature and passes it on."""
    flooded = Flooded()
    monkeypatch.setattr(exchange, "_network", flooded)

    async def listen_to(floods: int) -> None:
        listening = asyncio.create_task(exchange._hint_loop())
        async with asyncio.timeout(10):
            while exchange.stats.hint_floods < floods:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        listening.cancel()
        await asyncio.wait({listening})

    asyncio.run(listen_to(1))
    assert (flooded.subscribed, flooded.heard) == (1, discovery.USELESS_HINTS)
    monkeypatch.setattr(discovery, "QUIET_SECONDS", 0.1)
    asyncio.run(listen_to(2))
    assert flooded.subscribed >= 3, "it listens again after a while"


class Even(random.Random):
    """Draws the middle."""

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2


def test_the_pause_after_a_flood_doubles_while_it_lasts() -> None:
    """Hope: a flood that never ends is listened to again and again."""
    flood = HintFlood(Even())
    assert [flood.heard(False, n / 100) for n in range(299)] == [False] * 299
    assert flood.heard(False, 3.0)
    assert flood.quiet(3.0) == 30.0
    assert not flood.heard(False, 33.0), "counted anew"
    assert [flood.quiet(tick) for tick in (40.0, 110.0, 240.0)] == [60.0, 120.0, 120.0]
    assert [flood.quiet(10_000.0), flood.quiet(11_000.0)] == [30.0, 30.0], "the last one was long ago"


def test_nodes_come_back_at_different_times() -> None:
    """Hope: one burst, and all leave; the next in the moment in which all are back."""
    pauses = {HintFlood(random.Random(seed)).quiet(0.0) for seed in range(20)}
    assert len(pauses) == 20
    assert 27.0 <= min(pauses) < 29.0 < 31.0 < max(pauses) <= 33.0


@pytest.mark.parametrize(("nodes", "taken"), [(AUTO_PUSH_PEERS, 0.0), (300, 0.64), (600, 0.32)])
def test_hints_of_an_honest_swarm_are_no_flood(nodes: int, taken: float) -> None:
    """Hope: what the DHT told already (of few nodes) or what is beyond the node's rate (of many) ends gossip."""
    flood, rng = HintFlood(random.Random(0)), random.Random(0)
    sent = [n * discovery.REWRITE_SECONDS / nodes for n in range(20 * nodes)]
    assert not any(flood.heard(rng.random() < taken, tick) for tick in sent)


def test_hints_to_nowhere_cause_few_dials_however_many_they_are(sender: Identity, tmp_path: Path) -> None:
    """Hope: amplification. Each hint names new batches at a victim's address, and all who hear it dial the victim."""
    me = Identity.create(tmp_path / "me.key")
    catalogue = Catalogue(me.peer_id, 300.0, lambda *_: True, random.Random(1))
    start, fetches = 1_800_000_000.0, 0
    for second in range(3600):
        now = start + second
        catalogue.add(sender.peer_id, sender.public_key, announcement(sender, second, now, 8), "hint", now)
        while (wanted := catalogue.take(now)) is not None:
            fetches += 1
            catalogue.failed(wanted, now)
    doublings = int(MAX_BACKOFF_SECONDS / BACKOFF_SECONDS).bit_length()
    assert fetches <= doublings + 3600 / (MAX_BACKOFF_SECONDS / 2), "about one a minute, of 28,800 batches named"


def test_a_hint_naming_many_addresses_is_no_hint(sender: Identity) -> None:
    """Hope: one announcement makes every reader dial a thousand addresses."""
    made = announcement(sender, 1, time.time())
    many = type(made)(
        **{f: getattr(made, f) for f in made.__struct_fields__} | {"addresses": ["/ip4/192.0.2.1/tcp/1"] * 9}
    )
    with pytest.raises(codec.Rejected):
        codec.encode_announcement(many, sender)


def pumped(messages: list[tuple[bytes, bytes]]) -> list[tuple[str, bytes]]:
    """What a subscription keeps of (sender, data) that p2pd hands over."""

    async def pump() -> list[tuple[str, bytes]]:
        network = Network.__new__(Network)
        network.peer_id, network.denied = "me", set().__contains__
        reader = asyncio.StreamReader(limit=1 << 24)
        for sender, data in messages:
            body = p2pd_pb2.PSMessage(**{"from": sender}, data=data).SerializeToString()
            size = len(body)
            prefix = bytearray()
            while size > 0x7F:
                prefix.append(size & 0x7F | 0x80)
                size >>= 7
            reader.feed_data(bytes([*prefix, size]) + body)
        reader.feed_eof()
        waiting: deque[tuple[str, bytes]] = deque(maxlen=MAX_QUEUED_HINTS)
        await network._pump(reader, waiting, asyncio.Event())
        return list(waiting)

    return asyncio.run(pump())


def test_an_oversized_hint_is_dropped_before_it_is_read() -> None:
    """Hope: a megabyte a message, kept in a queue by everyone."""
    a, b = (base58.b58encode(name).decode() for name in (b"a", b"b"))
    kept = pumped([(b"a", bytes(MAX_HINT_BYTES + 1)), (b"a", bytes(900_000)), (b"b", b"small")])
    assert kept == [(a, b""), (a, b""), (b, b"small")], "that it came is known"


def test_a_burst_of_hints_leaves_a_short_queue() -> None:
    """Hope: hints pile up in memory while the node is busy."""
    assert len(pumped([(b"a", bytes(1000))] * 2000)) == MAX_QUEUED_HINTS
