"""The data plane as the node sees it: `await exchange.publish(batch)` and `async for r in exchange.subscribe()`.

Publishing puts the signed batch on this node's shelf and announces it: in the DHT, which is the truth and the way to
catch up, and as a gossip hint, which is quick and may be lost. Receiving is sampling: while the node `want`s groups,
announcements are read from a few random shards of recent epochs, and unseen batches are fetched from their publishers
over streams, a few at a time. A node that wants nothing fetches nothing; nobody downloads the swarm.

The decisions are made without I/O: when to announce and what to read (`discovery.py`), what to fetch (`catalogue.py`),
whom to trust (`peers.py`). What a received batch is worth is decided later, in `rollouts/verify.py`.
"""

import asyncio
import hashlib
import logging
import math
import random
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

import msgspec

from sapo_node.config import SwarmSection
from sapo_node.identity import Identity, peer_id_from_public_key
from sapo_node.rollouts import codec
from sapo_node.rollouts.codec import Opened, Rejected, UnknownVersion
from sapo_node.rollouts.schema import Announcement, Batch
from sapo_node.swarm import fetch, protocol
from sapo_node.swarm.addresses import reach
from sapo_node.swarm.catalogue import Catalogue, Via, Wanted
from sapo_node.swarm.dht import SwarmDHT
from sapo_node.swarm.discovery import REWRITE_SECONDS, AnnouncePlan, HintFlood, Shard, choose_shards
from sapo_node.swarm.fetch import FetchFailed, FetchServer, Shelf
from sapo_node.swarm.p2p import Network
from sapo_node.swarm.p2pd import NetworkError
from sapo_node.swarm.peers import PeerBook
from sapo_node.swarm.rate_limit import RateLimit
from sapo_node.swarm.records import shard_prefix
from sapo_node.swarm.waiting import Waiting

log = logging.getLogger(__name__)

READ_SECONDS: Final = 2.0
MAX_READ_SECONDS: Final = 5.0
IDLE_READ_SECONDS: Final = 20.0
"""Pause between two looks into the DHT while groups are wanted (longer each time there is no news), and while none are
wanted: then only to know who is there and how large the shards are."""

RESUBSCRIBE_SECONDS: Final = 3.0
"""Pause before a lost subscription to hints is taken up again."""

POLL_SECONDS: Final = 0.5
"""How soon a rise of `want` is noticed. News and finished fetches are noticed at once."""

AUTO_PUSH_PEERS: Final = 64
"""`push: auto` stops gossiping above this many peers that announce: gossip's cost grows with the swarm, the DHT's does
not. Those count that gave something lately or are connected, and once a network: announcing alone is free, and would
end gossip for all."""

OPEN_SECONDS: Final = 15.0
"""For a stream to a publisher: names, a dial and the opening have deadlines of their own, together twice that."""

MAX_HEARD: Final = 4096
"""Digests of announcements already taken note of, so that a copy costs no signature check."""


@dataclass(frozen=True, slots=True)
class Received:
    """A well-formed, signed batch of another node; whether it is true is not known yet."""

    opened: Opened
    size: int  # bytes of the envelope
    peer_id: str
    via: Via
    seconds: float  # from the first byte asked for to a decoded batch

    @property
    def memory(self) -> int:
        """Bytes that it takes while it waits."""
        return self.opened.memory


@dataclass(slots=True)
class ExchangeStats:
    """Counters since the start. `bytes_*` are envelopes only: neither the DHT's nor gossip's own traffic."""

    bytes_in: int = 0
    bytes_out: int = 0
    batches_published: int = 0
    batches_in: int = 0
    batches_out: int = 0
    hints_in: int = 0
    hints_out: int = 0
    hints_dropped: int = 0
    hint_floods: int = 0
    announcements_in: int = 0
    announcements_out: int = 0
    announcements_invalid: int = 0
    store_failures: int = 0
    read_failures: int = 0
    fetch_failures: int = 0
    fetch_faults: int = 0
    rejected: int = 0
    dropped: int = 0
    peers_known: int = 0


class Exchange:
    """Publishes this node's batches and receives others'. `run()` does the work; the rest are its two ends."""

    def __init__(
        self,
        network: Network,
        dht: SwarmDHT,
        identity: Identity,
        swarm: str,
        settings: SwarmSection,
        *,
        max_age_seconds: float,
        seq_start: int,
        want: Callable[[], int],
        book: PeerBook | None = None,
        version: str = "",
        roles: Sequence[str] = (),
        rng: random.Random | None = None,
    ) -> None:
        """`want()` is the number of groups the node could use beyond those it was given; `seq_start` the least `seq` of
        an announcement; `version` and `roles` are told to others."""
        self.stats = ExchangeStats()
        self.book = book if book is not None else PeerBook()
        self._network = network
        self._dht = dht
        self._identity = identity
        self._swarm = swarm
        self._settings = settings
        self._seq = seq_start
        self._want = want
        self._version = version
        self._roles = list(roles)
        self._rng = rng if rng is not None else random.Random()
        self._shelf = Shelf(max_age_seconds)
        self._server = FetchServer(self._shelf, self._welcome_now, self._count_served, self._known_as)
        self._catalogue = Catalogue(
            identity.peer_id, max_age_seconds, self.book.wanted, self._rng, self.book.lot, self.book.gave
        )
        self._announcing = AnnouncePlan(self._rng)
        self._heard: OrderedDict[bytes, None] = OrderedDict()
        self._hint_rate = RateLimit(self._known_as)
        self._here = 0  # groups waiting for the subscriber, or in its hands
        self._running: list[Wanted] = []
        self._announce_now = asyncio.Event()
        self._fetch_now = asyncio.Event()
        self._received = Waiting[Received]()
        # One batch at a time: what several threads free is not given back, tens of MiB where batches are bloated.
        self._opener = ThreadPoolExecutor(1, "open a batch")

    # The two ends

    async def publish(self, batch: Batch) -> bytes:
        """Offer a batch to the swarm; returns its content id. Raises Rejected if it breaks a limit of the wire."""
        envelope = codec.encode_batch(batch, self._identity)
        self._shelf.put(envelope, len(batch.groups), batch.created_at, time.time())
        self.stats.batches_published += 1
        self._announcing.published()
        self._announce_now.set()
        return envelope.content_id

    async def subscribe(self) -> AsyncGenerator[Received, None]:
        """Batches of others as they arrive, for one reader. A batch counts against `want` until the next is asked
        for, so take its groups over before that."""
        while True:
            received = await self._received.get()
            try:
                yield received
            finally:
                self._settle(len(received.opened.batch.groups))

    def judged(self, received: Received, *, useful: bool) -> None:
        """What came of a batch: a peer whose batches are of no use here is asked more seldom."""
        self._catalogue.judged(received.peer_id, useful, time.time())

    def peers_known(self) -> list[str]:
        """Ids of other nodes with a fresh announcement."""
        return self._catalogue.peers(time.time())

    def heard(self) -> dict[str, float]:
        """When the newest announcement of each of those came, in seconds since 1970."""
        return self._catalogue.heard(time.time())

    async def run(self) -> None:
        """Serve, announce, discover and fetch until cancelled. Raises NetworkError when the network is gone."""
        await self._network.serve_stream(protocol.FETCH_PROTOCOL, self._server.serve)
        with self._opener:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._announce_loop(), name="announce")
                tasks.create_task(self._discover_loop(), name="discover")
                tasks.create_task(self._fetch_loop(tasks), name="fetch")
                if self._settings.push != "off":
                    tasks.create_task(self._hint_loop(), name="hints")

    # Announcing

    async def _announce_loop(self) -> None:
        while True:
            self._announce_now.clear()
            now = time.time()
            pause = self._announcing.pause(bool(self._shelf.newest(now)), now, time.monotonic())
            if pause <= 0.0:
                await self._announce(now)
            else:  # not longer, so that a clock that was set is noticed
                await _wait(self._announce_now, min(pause, REWRITE_SECONDS))

    async def _announce(self, now: float) -> None:
        """Push the announcement and write it to the DHT."""
        epoch, k = protocol.epoch_of(now), self._dht.schedule.k
        shard = Shard(epoch, k, shard_prefix(self._identity.public_key, epoch, k))
        expires_at = self._announcing.started(now, time.monotonic())
        # Milliseconds keep it rising across restarts; holders take a record only if its seq is higher.
        self._seq = max(self._seq + 1, int(now * 1000))
        try:
            data = self._sign(shard, now, await self._network.addresses())
            await self._push(data)
            stored = await self._dht.announce(data, shard.epoch, shard.k, shard.prefix, expires_at)
        except NetworkError as error:
            log.debug("announcing failed: %s", error)
            stored = False
        if stored:
            self.stats.announcements_out += 1
        else:
            self.stats.store_failures += 1
            self._announcing.failed()

    async def _push(self, data: bytes) -> None:
        if not self._push_is_on():
            return
        try:
            await self._network.publish(protocol.hint_topic(self._swarm), data)
            self.stats.hints_out += 1
        except NetworkError as error:  # only a hint: the DHT has it too
            log.debug("pushing a hint failed: %s", error)

    def _sign(self, shard: Shard, now: float, addresses: Sequence[str]) -> bytes:
        """The announcement with as many addresses as fit into a record, those that lead farthest first."""
        announcement = Announcement(
            proto=protocol.PROTO,
            swarm=self._swarm,
            epoch=shard.epoch,
            k=shard.k,
            prefix=shard.prefix,
            seq=self._seq,
            created_at=now,
            version=self._version,
            roles=self._roles,
            addresses=[],
            batches=self._shelf.newest(now),
        )
        data = codec.encode_announcement(announcement, self._identity)
        room = protocol.MAX_RECORD_BYTES - len(data)
        fitting: list[str] = []
        for address in sorted(addresses, key=reach):
            cost = len(address.encode()) + 2  # at most two bytes of length before a text of this size
            if len(fitting) < protocol.MAX_ADDRESSES and len(address) <= protocol.MAX_ADDRESS_CHARS and cost <= room:
                fitting.append(address)
                room -= cost
        return codec.encode_announcement(msgspec.structs.replace(announcement, addresses=fitting), self._identity)

    def _push_is_on(self) -> bool:
        if self._settings.push == "auto":
            connected, known = self.book.connected(), self.peers_known()
            met = {self.book.share(p) if p in connected else self._known_as(p) for p in known} - {""}
            return len(met) <= AUTO_PUSH_PEERS
        return self._settings.push == "on"

    # Discovering

    async def _discover_loop(self) -> None:
        pause, last = READ_SECONDS, -math.inf
        while True:
            rest = pause if self._is_hungry() else IDLE_READ_SECONDS
            if time.monotonic() - last >= rest * self._rng.uniform(0.7, 1.3):
                news = await self._look()
                last = time.monotonic()
                pause = READ_SECONDS if news else min(MAX_READ_SECONDS, pause * 1.3)
            self.stats.peers_known = len(self.peers_known())
            await asyncio.sleep(POLL_SECONDS)

    def _is_hungry(self) -> bool:
        """Whether more groups are wanted than the known announcements offer."""
        wanted = self._want() - self._here
        return wanted > 0 and self._catalogue.available(time.time()) < wanted

    async def _look(self) -> int:
        """Read a few shards; returns the number of announcements that were news."""
        schedule = self._dht.schedule
        epoch = protocol.epoch_of(time.time())
        shards = choose_shards(epoch, schedule.k, schedule.readable(), self._rng)
        news = sum(await asyncio.gather(*(self._read(shard) for shard in shards)))
        if news:
            self._fetch_now.set()
        return news

    async def _read(self, shard: Shard) -> int:
        """Read one shard; returns the number of announcements that were news."""
        try:
            records = await self._dht.read(shard.epoch, shard.k, shard.prefix)
        except NetworkError as error:
            log.debug("reading a shard failed: %s", error)
            self.stats.read_failures += 1
            return 0
        news = 0
        for data in records:
            heard = self._hear(data)
            if heard is None:
                continue
            public_key, a = heard
            if (a.epoch, a.k, a.prefix) != (shard.epoch, shard.k, shard_prefix(public_key, shard.epoch, shard.k)):
                self.stats.announcements_invalid += 1
                continue
            self.stats.announcements_in += 1
            news += self._note(data, public_key, a, "dht")
        return news

    def _hear(self, data: bytes) -> tuple[bytes, Announcement] | None:
        """Open an announcement, unless note was taken of this very one before."""
        if hashlib.sha256(data).digest() in self._heard:
            return None
        try:
            return codec.open_announcement(data, self._swarm)
        except Rejected:
            self.stats.announcements_invalid += 1
            return None

    def _note(self, data: bytes, public_key: bytes, announcement: Announcement, via: Via) -> bool:
        """Take note of an announcement that came by the way it should; True if it is news."""
        # Not before: anyone can send a copy by a wrong way, and must not hide the announcement by it.
        self._heard[hashlib.sha256(data).digest()] = None
        if len(self._heard) > MAX_HEARD:
            self._heard.popitem(last=False)
        peer_id, now = peer_id_from_public_key(public_key), time.time()
        news = self._catalogue.add(peer_id, public_key, announcement, via, now)
        if news:
            self.book.saw(peer_id, announcement.addresses, now)
        return news

    async def _hint_loop(self) -> None:
        """Listen to announcements pushed by others, but not to a flood. A lost subscription is taken up again."""
        flood = HintFlood(self._rng)
        while True:
            pause = RESUBSCRIBE_SECONDS
            try:
                if await self._listen(flood):
                    pause = flood.quiet(time.monotonic())
                    self.stats.hint_floods += 1
                    log.warning(
                        "a flood of hints that tell nothing: for %.0f s announcements come by the DHT alone", pause
                    )
            except NetworkError as error:
                log.debug("the subscription to hints ended: %s", error)
            await asyncio.sleep(pause)

    async def _listen(self, flood: HintFlood) -> bool:
        """Take hints until they are a flood. Raises NetworkError when the subscription is lost."""
        async with aclosing(self._network.subscribe(protocol.hint_topic(self._swarm))) as hints:
            async for sender, data in hints:
                if flood.heard(self._take_hint(sender, data), time.monotonic()):
                    return True
        return False

    def _take_hint(self, sender: str, data: bytes) -> bool:
        """Take note of a pushed announcement; True if it is news."""
        if not data or not self._hint_rate.take(sender, time.monotonic()) or not self._welcome_now(sender):
            self.stats.hints_dropped += 1
            return False
        heard = self._hear(data)
        if heard is None:
            return False
        public_key, a = heard
        if peer_id_from_public_key(public_key) != sender:  # everyone pushes their own only
            self.stats.hints_dropped += 1
            return False
        if a.prefix != shard_prefix(public_key, a.epoch, a.k):
            self.stats.announcements_invalid += 1
            return False
        self.stats.hints_in += 1
        news = self._note(data, public_key, a, "hint")
        if news and a.batches:
            self._fetch_now.set()
        return news

    # Fetching

    async def _fetch_loop(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            self._fetch_now.clear()
            # What is being fetched counts nothing yet: how much it will be is the publishers' word.
            while len(self._running) < self._settings.max_fetches and self._want() > self._here:
                wanted = self._catalogue.take(
                    time.time(), only_reliable=self._strangers_fill_their_slots(), without=self._fills_its_slots()
                )
                if wanted is None:
                    break
                self._running.append(wanted)
                tasks.create_task(self._fetch(wanted), name="fetch a batch")
            await _wait(self._fetch_now, POLL_SECONDS)

    def _strangers_fill_their_slots(self) -> bool:
        """Whether peers that are not reliable have all the slots that they may have: half, so that silent ones do not
        keep from this node what the others have."""
        strangers = sum(not wanted.reliable for wanted in self._running)
        return strangers >= max(1, self._settings.max_fetches // 2)

    def _fills_its_slots(self) -> Callable[[str], bool]:
        """Whether a peer's network has all the slots that one may have: half as well. Keys that give groups, each as
        slowly as it may, would have them all."""
        running = Counter(self.book.network(wanted.peer_id) for wanted in self._running)
        full = {network for network, slots in running.items() if slots >= max(1, self._settings.max_fetches // 2)}
        return lambda peer_id: bool(full) and self.book.network(peer_id) in full

    async def _fetch(self, wanted: Wanted) -> None:
        started = time.monotonic()
        try:
            data = await self._transfer(wanted)
            self.stats.bytes_in += len(data)
            opened = await asyncio.get_running_loop().run_in_executor(self._opener, self._open, wanted, data)
            received = Received(opened, len(data), wanted.peer_id, wanted.via, time.monotonic() - started)
            self._catalogue.fetched(wanted, received.seconds, time.time())
        except (FetchFailed, NetworkError) as error:
            self._fetch_failed(wanted, error)
        else:
            self._deliver(received)
        finally:
            self._running.remove(wanted)
            self._fetch_now.set()

    async def _transfer(self, wanted: Wanted) -> bytes:
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                stream = await self._network.open_stream(wanted.peer_id, protocol.FETCH_PROTOCOL, wanted.addresses)
        except TimeoutError:
            raise FetchFailed("the stream took too long to open") from None
        return await fetch.ask(*stream, wanted.listing)

    def _open(self, wanted: Wanted, data: bytes) -> Opened:
        """Decode what was fetched. Raises FetchFailed if it is not what the announcement promised."""
        try:
            opened = codec.open_batch(data, self._swarm)
        except UnknownVersion as error:
            raise FetchFailed(str(error), gone=True) from None
        except Rejected as error:
            self.stats.rejected += 1
            raise FetchFailed(str(error), fault=True) from None
        if opened.public_key != wanted.public_key or len(opened.batch.groups) != wanted.listing.groups:
            raise FetchFailed("the batch is not the one announced", fault=True)
        return opened

    def _fetch_failed(self, wanted: Wanted, error: FetchFailed | NetworkError) -> None:
        why = error if isinstance(error, FetchFailed) else FetchFailed(str(error))
        now = time.time()
        self._catalogue.failed(wanted, now, give_up=why.fault or why.gone, busy=why.busy)
        self.stats.fetch_failures += 1
        if why.fault:
            self.stats.fetch_faults += 1
            self.book.rejected(wanted.peer_id, now)
        log.debug("fetching from %s failed: %s", wanted.peer_id, error)

    def _deliver(self, received: Received) -> None:
        self.stats.batches_in += 1
        self._here += len(received.opened.batch.groups)
        for dropped in self._received.put(received):
            self.stats.dropped += 1
            self._settle(len(dropped.opened.batch.groups))

    def _settle(self, groups: int) -> None:
        self._here -= groups
        self._fetch_now.set()

    # Small things

    def _known_as(self, peer_id: str) -> str:
        return self.book.known_as(peer_id, time.time())

    def _welcome_now(self, peer_id: str) -> bool:
        return self.book.welcome(peer_id, time.time())

    def _count_served(self, peer_id: str, size: int) -> None:
        self.stats.batches_out += 1
        self.stats.bytes_out += size


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Wait for the event, at most `seconds`."""
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await event.wait()
    except TimeoutError:
        return
