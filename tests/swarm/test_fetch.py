"""The stream: honest ends meet, and neither end can be held or filled by a hostile one. Real sockets on loopback."""

import asyncio
import functools
import hashlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sapo_node.rollouts.codec import HEADER_BYTES, Envelope
from sapo_node.rollouts.schema import Listing
from sapo_node.swarm import fetch, protocol
from sapo_node.swarm.fetch import FetchFailed, FetchServer, Shelf, Status
from sapo_node.swarm.rate_limit import BURST

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HUGE = 1e12


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test body in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))  # type: ignore[arg-type]

    return run


def envelope(size: int, tag: int = 0) -> Envelope:
    data = bytes(HEADER_BYTES) + tag.to_bytes(4, "big") + bytes(size - HEADER_BYTES - 4)
    return Envelope(data, hashlib.sha256(data[HEADER_BYTES:]).digest())


def listing(of: Envelope) -> Listing:
    return Listing(of.content_id, len(of.data), 1, 0.0)


def shelf(*envelopes: Envelope) -> Shelf:
    made = Shelf(HUGE)
    for e in envelopes:
        made.put(e, 1, 0.0, 0.0)
    return made


def server(of: Shelf, welcome: bool = True) -> tuple[FetchServer, list[int]]:
    sent: list[int] = []
    return FetchServer(of, lambda peer_id: welcome, lambda peer_id, size: sent.append(size)), sent


async def ask(handler: Handler, wanted: Listing) -> bytes:
    """One fetch over a TCP connection to `handler`."""

    async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        except (EOFError, OSError, TimeoutError):
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(closing, "127.0.0.1", 0)
    async with listener:
        reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
        return await fetch.ask(reader, writer, wanted)


def serve(of: Shelf, welcome: bool = True) -> Handler:
    made, _ = server(of, welcome)
    return lambda reader, writer: made.serve("peer", reader, writer)


def says(answer: bytes, then_hang: bool = False) -> Handler:
    """A publisher that answers anything with `answer`."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(32)
        writer.write(answer)
        await writer.drain()
        if then_hang:
            await reader.read()

    return handler


def head(status: int, length: int) -> bytes:
    return bytes([status]) + length.to_bytes(4, "big")


@pytest.mark.parametrize("size", [HEADER_BYTES + 4, 70_000, protocol.MAX_ENVELOPE_BYTES])
@in_loop
async def test_a_batch_arrives_whole(size: int) -> None:
    e = envelope(size)
    assert await ask(serve(shelf(e)), listing(e)) == e.data


@in_loop
async def test_what_is_not_on_the_shelf_is_gone() -> None:
    with pytest.raises(FetchFailed, match="gone") as failure:
        await ask(serve(shelf()), listing(envelope(500)))
    assert failure.value.gone
    assert not failure.value.fault


@in_loop
async def test_a_peer_that_is_not_welcome_gets_nothing() -> None:
    e = envelope(500)
    with pytest.raises(FetchFailed, match="broke off"):
        await ask(serve(shelf(e), welcome=False), listing(e))


@pytest.mark.parametrize("length", [0, 499, 501, 2**32 - 1])
@in_loop
async def test_a_lie_about_the_length_is_a_fault_before_a_byte_is_read(length: int) -> None:
    e = envelope(500)
    with pytest.raises(FetchFailed, match="not as long") as failure:
        await ask(says(head(Status.OK, length), then_hang=True), listing(e))
    assert failure.value.fault


@in_loop
async def test_a_listing_beyond_the_limit_is_not_believed_either() -> None:
    size = protocol.MAX_ENVELOPE_BYTES + 1
    with pytest.raises(FetchFailed, match="not as long"):
        await ask(says(head(Status.OK, size), then_hang=True), Listing(bytes(32), size, 1, 0.0))


@in_loop
async def test_a_wrong_digest_is_a_fault() -> None:
    e, other = envelope(500, 1), envelope(500, 2)
    with pytest.raises(FetchFailed, match="digest") as failure:
        await ask(says(head(Status.OK, 500) + other.data), listing(e))
    assert failure.value.fault


@in_loop
async def test_an_unknown_status_is_a_fault() -> None:
    with pytest.raises(FetchFailed, match="status") as failure:
        await ask(says(head(9, 0)), listing(envelope(500)))
    assert failure.value.fault


@in_loop
async def test_a_stream_that_breaks_off_is_no_fault() -> None:
    e = envelope(500)
    with pytest.raises(FetchFailed, match="broke off") as failure:
        await ask(says(head(Status.OK, 500) + e.data[:300]), listing(e))
    assert not failure.value.fault


@pytest.mark.parametrize("answer", [b"", head(Status.OK, 500) + bytes(100)])
@in_loop
async def test_a_publisher_that_stalls_is_left_at_the_deadline(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "REQUEST_SECONDS", 0.2)
    with pytest.raises(FetchFailed, match="too slow"):
        await ask(says(answer, then_hang=True), listing(envelope(500)))


@in_loop
async def test_a_reader_that_stalls_frees_the_server_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "REQUEST_SECONDS", 0.2)
    monkeypatch.setattr(fetch, "MIN_BYTES_PER_SECOND", 100 * protocol.MAX_ENVELOPE_BYTES)
    e = envelope(protocol.MAX_ENVELOPE_BYTES)
    made, sent = server(shelf(e))
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await made.serve("peer", reader, writer)
            ended.set_result("served")
        except TimeoutError:
            ended.set_result("too slow")
        finally:
            writer.transport.abort()

    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        async with await asyncio.start_server(handler, sock=listener):
            client.connect(listener.getsockname())
            client.send(e.content_id)
            assert await ended == "too slow"
    assert sent == []


@in_loop
async def test_silence_frees_the_server_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "REQUEST_SECONDS", 0.1)
    made, _ = server(shelf())
    with pytest.raises(TimeoutError):
        await made.serve("peer", asyncio.StreamReader(), None)  # type: ignore[arg-type]


@in_loop
async def test_a_greedy_peer_is_told_to_wait() -> None:
    e = envelope(500)
    handler = serve(shelf(e))
    for _ in range(BURST):
        await ask(handler, listing(e))
    with pytest.raises(FetchFailed, match="busy") as failure:
        await ask(handler, listing(e))
    assert not failure.value.fault


def test_the_shelf_lists_the_newest_first_and_not_more_than_fit() -> None:
    made = shelf(*(envelope(500, i) for i in range(20)))
    newest = [envelope(500, i).content_id for i in range(19, 11, -1)]
    assert [entry.content_id for entry in made.newest(0.0)] == newest


def test_the_shelf_is_bounded_in_count_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(shelf(*(envelope(500, i) for i in range(300)))) == fetch.MAX_SHELF_BATCHES
    monkeypatch.setattr(fetch, "MAX_SHELF_BYTES", 1600)
    made = shelf(*(envelope(500, i) for i in range(5)))
    assert len(made) == 3
    assert made.get(envelope(500, 4).content_id, 0.0) is not None
    assert made.get(envelope(500, 1).content_id, 0.0) is None


def test_old_batches_leave_the_shelf() -> None:
    made = Shelf(300.0)
    e = envelope(500)
    made.put(e, 1, created_at=1000.0, now=1000.0)
    assert made.get(e.content_id, 1300.0) == e.data
    assert made.get(e.content_id, 1301.0) is None
    assert made.newest(1301.0) == []
