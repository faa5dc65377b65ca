"""Attacks on streams beyond those of tests/swarm/test_fetch.py and test_p2p.py."""

import asyncio
import socket
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import base58
import pytest

from sapo_node.swarm import fetch, places, protocol
from sapo_node.swarm.fetch import CHUNK, FetchFailed, FetchServer, Status
from sapo_node.swarm.hivemind_light import p2pd_pb2
from sapo_node.swarm.p2p import Network
from sapo_node.swarm.p2pd import read_message
from sapo_node.swarm.places import FAIR_SECONDS, MAX_STREAMS, Incoming, RequestReader, Streams, has_place
from sapo_node.swarm.rate_limit import BURST, RateLimit
from tests.swarm.conftest import Loopback
from tests.swarm.test_fetch import ask, envelope, head, in_loop, listing, says, server, shelf

OnLoopback = Callable[[Callable[[Loopback], Awaitable[None]]], None]


@in_loop
async def test_a_half_open_stream_ends_at_once() -> None:
    """Hope: half a request and a closed end leave the server waiting for the rest until its deadline."""
    good = envelope(1000)
    made, sent = server(shelf(good))
    ended = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with pytest.raises(EOFError):
            await made.serve("peer", reader, writer)
        writer.close()
        ended.set()

    listener = await asyncio.start_server(handler, "127.0.0.1", 0)
    async with listener, asyncio.timeout(2.0):
        _, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
        writer.write(good.content_id[:16])
        writer.write_eof()
        await ended.wait()
        writer.close()
    assert sent == []


@in_loop
async def test_an_endless_answer_is_read_no_further_than_announced() -> None:
    """Hope: a publisher that never stops sending fills the memory of whoever fetches."""
    wanted = envelope(protocol.MAX_ENVELOPE_BYTES)
    sent, ended = 0, asyncio.Event()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readexactly(32)
        writer.write(head(0, len(wanted.data)))
        try:
            while sent < 64 << 20:
                writer.write(b"\xff" * CHUNK)
                await writer.drain()
                sent += CHUNK
        finally:
            ended.set()

    tracemalloc.start()
    try:
        with pytest.raises(FetchFailed, match="digest"):
            await ask(endless, listing(wanted))
        async with asyncio.timeout(5.0):
            await ended.wait()
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert sent < 8 << 20, "what was not asked for stays with the sender"


def incoming(folder: Path) -> tuple[Network, list[str]]:
    """A network without p2pd, whose stream handler holds every stream it is given; who has one."""
    network = Network.__new__(Network)
    network.denied, network.foreign = set().__contains__, set()
    network.known = set().__contains__
    network._streams, network._closed = {}, False
    served: list[str] = []

    async def hold(peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(peer_id)
        try:
            await reader.readexactly(32)
        finally:
            served.remove(peer_id)

    network._handlers = {"/held": hold}
    return network, served


def opening(peer: bytes) -> bytes:
    """What p2pd writes before a stream of a peer."""
    info = p2pd_pb2.StreamInfo(peer=peer, addr=b"", proto="/held").SerializeToString()
    return bytes([len(info)]) + info


async def settled(network: Network) -> None:
    """Wait until every stream has been given its peer's name, and those that had to go are gone."""
    async with asyncio.timeout(5.0):
        while any(not stream.peer_id for stream in network._streams.values()):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)


async def flooded(folder: Path, peers: list[bytes]) -> tuple[list[str], int]:
    """Open a stream for each of `peers` and leave it silent: who holds a place in the end, and how many in all do."""
    network, served = incoming(folder)
    loop = asyncio.get_running_loop()
    path = str(folder / "s.sock")
    listener = await loop.create_unix_server(
        lambda: asyncio.StreamReaderProtocol(RequestReader(loop=loop), network._incoming), path
    )
    open_streams = []
    most = 0
    async with listener:
        for number, peer in enumerate(peers):
            if number == len(peers) - 1:
                await settled(network)
            _, writer = await asyncio.open_unix_connection(path)
            writer.write(opening(peer))
            open_streams.append(writer)
            await asyncio.sleep(0)
            most = max(most, len(network._streams))
        await settled(network)
        held = list(served)
        network._closed = True
        for task in list(network._streams):
            task.cancel()
        await asyncio.sleep(0.05)
        for writer in open_streams:
            writer.close()
    return held, most


def test_a_thousand_streams_of_one_peer_hold_four_places(tmp_path: Path) -> None:
    """Hope: one peer opens all the streams that a node serves, and nobody else is heard."""
    peer, other = b"\0\x24" + bytes(36), b"\0\x24" + bytes(35) + b"\1"
    held, most = asyncio.run(flooded(tmp_path, [peer] * 1000 + [other]))
    name = base58.b58encode(peer).decode()
    assert held.count(name) == places.MAX_STREAMS_PER_PEER
    assert len(held) == places.MAX_STREAMS_PER_PEER + 1, "another peer still finds one"
    assert most <= 2 * places.MAX_STREAMS


def test_a_thousand_peers_with_a_silent_stream_each(tmp_path: Path) -> None:
    """Hope: a thousand identities take all the places, and the newest, an honest one, gets none."""
    peers = [b"\0\x24" + n.to_bytes(36, "big") for n in range(1000)]
    held, most = asyncio.run(flooded(tmp_path, peers))
    assert len(held) == places.MAX_STREAMS
    assert base58.b58encode(peers[-1]).decode() in held
    assert most <= 2 * places.MAX_STREAMS


@in_loop
async def test_a_frame_that_claims_gigabytes_makes_no_room() -> None:
    """Hope: a length in front of a frame is believed before its bytes are there."""
    for claimed in (b"\xff\xff\xff\xff\x0f", b"\x80" * 20, b"\x81\x80\x40"):
        reader = asyncio.StreamReader()
        reader.feed_data(claimed + bytes(100))
        reader.feed_eof()
        with pytest.raises((ConnectionError, EOFError)):
            await read_message(reader, 4096)


@pytest.mark.slow
def test_a_flood_of_connections_keeps_no_member_out(on_loopback: OnLoopback) -> None:
    """Hope: three hundred TCP connections that say nothing use up what p2pd accepts."""

    async def body(loopback: Loopback) -> None:
        victim = await loopback.start("victim")
        address = await loopback.address_of(victim)
        host, port = address.split("/")[2], int(address.split("/")[4])
        flood = []
        try:
            for _ in range(300):
                flood.append(socket.create_connection((host, port), timeout=5.0))
            honest = await loopback.start("honest")
            async with asyncio.timeout(20.0):
                await honest.connect(address)
            assert honest.peer_id in await victim.peers()
        finally:
            for one in flood:
                one.close()

    on_loopback(body)


def test_asking_for_ever_is_slowed_to_a_few_a_second() -> None:
    """Hope: the same batch, or one that is not there, asked for without a pause, keeps the server busy."""
    rate = RateLimit()
    granted = sum(rate.take("peer", n * 0.001) for n in range(60_000))  # a thousand a second for a minute
    assert granted <= BURST + 4 * 60


def test_a_thousand_identities_are_served_no_more_than_a_link_bears() -> None:
    """Hope: each free identity brings a burst of its own: 16 MiB for each key, out of the victim's link."""
    rate: Any = RateLimit()
    granted = sum(rate.take(f"peer {n}", 0.0) for n in range(1000) for _ in range(BURST))
    assert granted <= 64 * BURST


class Asked:
    """Both ends of a stream that asks for `content_id`; what is answered."""

    def __init__(self, content_id: bytes) -> None:
        self.content_id, self.answer = content_id, b""

    async def readexactly(self, size: int) -> bytes:
        return self.content_id

    def write(self, data: bytes) -> None:
        self.answer += data

    async def drain(self) -> None:
        return


async def answered(made: FetchServer, peer_id: str, content_id: bytes) -> Status:
    stream: Any = Asked(content_id)
    await made.serve(peer_id, stream, stream)
    return Status(stream.answer[0])


@in_loop
async def test_asking_in_vain_by_many_identities_keeps_nobody_out() -> None:
    """Hope: two hundred identities ask for batches that do not exist, until the total is used up and all are busy."""
    good = envelope(1000)
    made, _ = server(shelf(good))
    for n in range(3000):
        assert await answered(made, f"peer {n % 200}", n.to_bytes(32, "big")) in (Status.GONE, Status.BUSY)
    assert await answered(made, "honest", good.content_id) is Status.OK


@in_loop
async def test_fetching_by_many_identities_keeps_no_known_peer_out() -> None:
    """Hope: a thousand identities fetch what is announced, until the total is used up and all are busy."""
    good = envelope(1000)
    made = FetchServer(shelf(good), lambda _: True, lambda *_: None, lambda peer_id: peer_id == "known")
    answers = [await answered(made, f"peer {n}", good.content_id) for n in range(1000)]
    assert answers[-1] is Status.BUSY
    assert await answered(made, "known", good.content_id) is Status.OK


@in_loop
async def test_silence_after_a_promise_of_a_megabyte_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hope: the head of a large batch and then nothing holds a slot for as long as the batch might take."""
    monkeypatch.setattr(fetch, "REQUEST_SECONDS", 0.2)
    large = envelope(protocol.MAX_ENVELOPE_BYTES)
    loop = asyncio.get_running_loop()
    started = loop.time()
    with pytest.raises(FetchFailed, match="too slow"):
        await ask(says(head(0, len(large.data)), then_hang=True), listing(large))
    assert loop.time() - started < 0.2 + 1.0 + 1.0, "a chunk at the least rate, and some more for a busy machine"


FETCH, HELLO = protocol.FETCH_PROTOCOL, protocol.HELLO_PROTOCOL


def asking(peers: str, protocol_: str = FETCH) -> tuple[Streams, list[int]]:
    """Every place taken by streams that asked and do not read, one a peer; which of them had to go."""
    streams: Any = {}
    gone: list[int] = []
    for n in range(MAX_STREAMS):
        transport = SimpleNamespace(abort=lambda n=n: gone.append(n))
        reader: Any = SimpleNamespace(asked=True)
        writer: Any = SimpleNamespace(transport=transport)
        streams[object()] = Incoming(reader, writer, f"{peers}{n}", protocol_, since=n / MAX_STREAMS)
    return streams, gone


def known(peer_id: str) -> bool:
    return peer_id.startswith("known")


def test_streams_that_ask_and_do_not_read_make_room() -> None:
    """Hope: sixteen identities ask for a large batch on four streams each and read nothing, and nobody is served."""
    streams, gone = asking("evil")
    assert not has_place(streams, "new", FETCH, FAIR_SECONDS - 1.0, known), "all had too little time yet"
    assert has_place(streams, "new", FETCH, FAIR_SECONDS, known)
    assert gone == [0], "the one that had longest"
    assert len(streams) == MAX_STREAMS - 1


def test_a_known_peer_waits_for_no_stranger_that_reads_slowly() -> None:
    """Hope: streams that are opened anew every few seconds never stay long enough to make room."""
    streams, gone = asking("evil")
    assert has_place(streams, "known", FETCH, 1.0, known)
    assert gone == [0]


def test_a_crowd_of_strangers_takes_no_place_of_a_known_peer() -> None:
    """Hope: who asks again and again pushes out those that read over a slow link."""
    streams, gone = asking("known")
    assert not has_place(streams, "new", FETCH, 30.0, known)
    assert not has_place(streams, "known too", FETCH, 30.0, known)
    assert gone == []


def test_strangers_that_open_many_streams_end_no_stream_of_a_known_peer_that_is_about_to_ask() -> None:
    """Hope: 64 streams in a round trip end every stream whose request is still under way."""
    streams, gone = asking("evil")
    for task, stream in list(streams.items()):
        reader: Any = stream.reader
        reader.asked = False
        if stream.peer_id == "evil0":  # the oldest
            streams[task] = Incoming(stream.reader, stream.writer, "known", FETCH, stream.since)
    assert has_place(streams, "new", FETCH, 1.0, known)
    assert gone == [1]


def test_streams_for_fetches_keep_nobody_from_greeting() -> None:
    """Hope: who holds all places for fetches also keeps newcomers from joining by the node."""
    streams, gone = asking("evil")
    assert has_place(streams, "new", HELLO, 0.0, known)
    assert gone == []
