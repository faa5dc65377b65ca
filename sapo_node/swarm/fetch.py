"""Batches over a stream: the shelf they are served from, the framing, and both ends with their caps and deadlines.

A fetch is one libp2p stream of protocol FETCH_PROTOCOL, opened to the batch's publisher:

    request    content id, 32 bytes
    response   status, 1 byte | length, 4 bytes big endian | that many bytes: the envelope (empty unless status is OK)

Both ends assume that the other is hostile. The fetcher knows size and digest from the signed announcement and reads
not one byte more; the server sends only what lies on its own shelf, at a limited rate for each peer and for all
together; and every wait has a deadline, so that a slow peer costs one slot for a bounded time.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from sapo_node.rollouts.codec import HEADER_BYTES, Envelope, Rejected, content_id_of
from sapo_node.rollouts.schema import Listing
from sapo_node.swarm import protocol
from sapo_node.swarm.rate_limit import RateLimit, nobody
from sapo_node.swarm.secret import FRAME_BYTES

CHUNK: Final = FRAME_BYTES

REQUEST_SECONDS: Final = 5.0
"""For 32 bytes to arrive, and for 5 of the answer: a round trip with much to spare."""

MIN_BYTES_PER_SECOND: Final = 64 * 1024
"""Slower peers are given up: at this rate the largest batch takes 16 s, within half an epoch."""

MAX_SHELF_BYTES: Final = 64 << 20
MAX_SHELF_BATCHES: Final = 256
"""Memory for own batches; the oldest go first. An announcement lists only the newest MAX_LISTINGS."""


class Status(IntEnum):
    """First byte of a response."""

    OK = 0
    GONE = 1
    BUSY = 2


class FetchFailed(Exception):
    """A fetch that brought no batch. `fault` tells whether the peer did what no honest node does."""

    def __init__(self, reason: str, *, fault: bool = False, gone: bool = False, busy: bool = False) -> None:
        """`gone`: the publisher has dropped this batch, so asking again is useless. `busy`: it has others to serve."""
        super().__init__(reason)
        self.fault = fault
        self.gone = gone
        self.busy = busy


def transfer_seconds(size: int) -> float:
    """Deadline for moving `size` bytes."""
    return REQUEST_SECONDS + size / MIN_BYTES_PER_SECOND


@dataclass(frozen=True, slots=True)
class _Shelved:
    envelope: Envelope
    listing: Listing


class Shelf:
    """This node's own batches, young enough to be fetched. Bounded in bytes, count and age."""

    def __init__(self, max_age_seconds: float) -> None:
        self._max_age = max_age_seconds
        self._batches: OrderedDict[bytes, _Shelved] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    def put(self, envelope: Envelope, groups: int, created_at: float, now: float) -> None:
        self._expire(now)
        if envelope.content_id in self._batches:
            return
        listing = Listing(envelope.content_id, len(envelope.data), groups, created_at)
        self._batches[envelope.content_id] = _Shelved(envelope, listing)
        self._bytes += len(envelope.data)
        while self._bytes > MAX_SHELF_BYTES or len(self._batches) > MAX_SHELF_BATCHES:
            self._drop_oldest()

    def get(self, content_id: bytes, now: float) -> bytes | None:
        """The envelope, or None when it is not or no longer here."""
        self._expire(now)
        shelved = self._batches.get(content_id)
        return None if shelved is None else shelved.envelope.data

    def newest(self, now: float) -> list[Listing]:
        """What an announcement lists, newest first; at most MAX_LISTINGS."""
        self._expire(now)
        shelved = list(self._batches.values())[-protocol.MAX_LISTINGS :]
        return [s.listing for s in reversed(shelved)]

    def _expire(self, now: float) -> None:
        while self._batches:
            oldest = next(iter(self._batches.values()))
            if now - oldest.listing.created_at <= self._max_age:
                return
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, shelved = self._batches.popitem(last=False)
        self._bytes -= len(shelved.envelope.data)


class FetchServer:
    """Answers fetches from the shelf. `serve` is the handler of FETCH_PROTOCOL streams; the network bounds how many of
    them are open, in all and for a peer."""

    def __init__(
        self,
        shelf: Shelf,
        welcome: Callable[[str], bool],
        sent: Callable[[str, int], None],
        known_as: Callable[[str], str] = nobody,
    ) -> None:
        """`welcome` tells whether to talk to a peer at all, `known_as` who is no stranger, and of which network; `sent`
        is told of each served batch and its bytes."""
        self._shelf = shelf
        self._welcome = welcome
        self._sent = sent
        self._rate = RateLimit(known_as)

    async def serve(self, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request. Raises TimeoutError, EOFError or OSError when the peer is slow or breaks off."""
        if not self._welcome(peer_id):
            return
        async with asyncio.timeout(REQUEST_SECONDS):
            content_id = await reader.readexactly(32)
        found = self._shelf.get(content_id, time.time())
        granted = self._rate.take_own if found is None else self._rate.take  # who asks in vain costs the others nothing
        if not granted(peer_id, time.monotonic()):
            answer, data = Status.BUSY, b""
        elif found is None:
            answer, data = Status.GONE, b""
        else:
            answer, data = Status.OK, found
        async with asyncio.timeout(transfer_seconds(len(data))):
            await _send(writer, answer, data)
        if answer is Status.OK:
            self._sent(peer_id, len(data))


async def _send(writer: asyncio.StreamWriter, status: Status, data: bytes) -> None:
    writer.write(bytes([status]) + len(data).to_bytes(4, "big"))
    for start in range(0, len(data), CHUNK):
        writer.write(data[start : start + CHUNK])
        await writer.drain()  # so that no more than a chunk waits in memory for a slow reader
    await writer.drain()


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, listing: Listing) -> bytes:
    """Fetch the envelope that `listing` names over a fresh stream; closes it.

    Raises FetchFailed: too slow, broken off, gone, busy, or (a fault of the peer) another length or digest than its
    signed announcement said.
    """
    started = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            writer.write(listing.content_id)
            await writer.drain()
            head = await reader.readexactly(5)
        _check_head(head, listing)
        data = await _body(reader, listing.size, started)
    except TimeoutError:
        raise FetchFailed("too slow") from None
    except (EOFError, OSError):
        raise FetchFailed("the stream broke off") from None
    finally:
        writer.close()
    try:
        right = content_id_of(data) == listing.content_id
    except Rejected:
        right = False
    if not right:
        raise FetchFailed("the bytes do not have the announced digest", fault=True)
    return data


async def _body(reader: asyncio.StreamReader, size: int, started: float) -> bytes:
    """`size` bytes, at the least rate from the start on: a deadline for the whole alone would let silence hold a slot
    for as long as the largest batch may take."""
    data = bytearray()
    while len(data) < size:
        step = min(CHUNK, size - len(data))
        async with asyncio.timeout_at(started + transfer_seconds(len(data) + step)):
            data += await reader.readexactly(step)
    return bytes(data)


def _check_head(head: bytes, listing: Listing) -> None:
    """Status and length, before a byte of the body is read."""
    status, length = head[0], int.from_bytes(head[1:], "big")
    if status == Status.GONE:
        raise FetchFailed("the batch is gone", gone=True)
    if status == Status.BUSY:
        raise FetchFailed("the peer is busy", busy=True)
    if status != Status.OK:
        raise FetchFailed("the answer has an unknown status", fault=True)
    if length != listing.size or not HEADER_BYTES < length <= protocol.MAX_ENVELOPE_BYTES:
        raise FetchFailed("the answer is not as long as announced", fault=True)
