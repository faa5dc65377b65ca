"""Networks over real p2pd processes on 127.0.0.1: calls, streams, gossip, and what happens when p2pd or a node dies."""

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sapo_node.swarm import dnsaddr, p2p, p2pd, places
from sapo_node.swarm.p2p import LeadsInside, Network, NetworkError, PortInUse
from tests.swarm.conftest import Loopback

OnLoopback = Callable[[Callable[[Loopback], Awaitable[None]]], None]

PROTOCOL = "/sapo-test/1/echo"


async def echo(_peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    size = int.from_bytes(await reader.readexactly(4), "big")
    writer.write(await reader.readexactly(size))
    await writer.drain()


async def echoed(streams: tuple[asyncio.StreamReader, asyncio.StreamWriter], data: bytes) -> bytes:
    """The answer; nothing where the stream was ended without one, before or after the request came."""
    reader, writer = streams
    writer.write(len(data).to_bytes(4, "big") + data)
    try:
        return await reader.read(-1)
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def soon(condition: Any, seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_node_has_the_id_of_its_key_and_a_private_socket_folder(on_loopback: Any) -> None:
    async def body(loopback: Any) -> None:
        network = await loopback.start("a")
        assert network.peer_id == loopback.identity("a").peer_id
        folder = network.daemon.folder
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert all("/p2p/" not in address for address in await network.addresses())
        await network.close()
        await network.close()
        assert not folder.exists()
        assert gone(network.daemon.pid)
        with pytest.raises(NetworkError, match="list peers: the network is closed"):
            await network.peers()

    on_loopback(body)


def test_works_on_plain_asyncio_too(loopback: Any) -> None:
    async def main() -> None:
        async with loopback:
            a, b = await loopback.swarm("ab")
            await a.serve_stream(PROTOCOL, echo)
            assert await echoed(await b.open_stream(a.peer_id, PROTOCOL), b"hello") == b"hello"

    asyncio.run(main())


def test_connect_peers_disconnect(on_loopback: Any) -> None:
    async def body(loopback: Any) -> None:
        a, b = await loopback.swarm("ab")
        assert await a.peers() == [b.peer_id]
        async with asyncio.timeout(5):
            while await a.peers():  # again, as p2pd may be opening another connection at this very moment
                await a.disconnect(b.peer_id)
                await asyncio.sleep(0.05)
        assert await b.connect(await loopback.address_of(a)) == a.peer_id

    on_loopback(body)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("/ip4/127.0.0.1/tcp/9", "ends with /p2p/<its peer id>"),
        ("/ip4/127.0.0.1/tcp/9/p2p/l0l", "is not a peer id"),
        ("/nonsense/p2p/12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kSCVe2Xo", "is not a multiaddr"),
        ("/ip4/127.0.0.1/tcp/9/p2p/12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kSCVe2Xo", "connection refused"),
    ],
)
def test_an_address_that_cannot_be_dialled_is_told(on_loopback: Any, address: str, message: str) -> None:
    async def body(loopback: Any) -> None:
        network = await loopback.start("a")
        with pytest.raises(NetworkError, match=f"connect to {address}: .*{message}"):
            await network.connect(address)

    on_loopback(body)


def test_multiaddrs_survive_their_binary_form() -> None:
    for address in (
        "/ip4/127.0.0.1/tcp/4001",
        "/ip6/::1/udp/4001/quic-v1",
        "/dns4/example.org/tcp/443",
    ):
        assert p2pd.decode_multiaddr(p2pd.encode_multiaddr(address)) == address
    relayed = p2pd.encode_multiaddr(
        "/ip4/10.0.0.1/tcp/1/p2p/12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kSCVe2Xo/p2p-circuit"
    )
    assert relayed[8:11] == b"\xa5\x03\x26", "the id itself, 38 bytes, not a CID around it"
    assert relayed.endswith(b"\xa2\x02")


async def routed(network: Any, peer_id: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A stream to a peer that only a neighbour knows, once both neighbours have entered each other in their tables."""
    async with asyncio.timeout(10):
        while True:
            try:
                return await network.open_stream(peer_id, PROTOCOL)
            except NetworkError as error:
                if not any(early in str(error) for early in ("not found", "failed to find any peer in table")):
                    raise
                await asyncio.sleep(0.1)


def test_stream_carries_a_mebibyte_both_ways_to_a_peer_found_by_routing(on_loopback: Any) -> None:
    async def body(loopback: Any) -> None:
        _, b, c = await loopback.swarm("abc")
        callers = []

        async def handler(peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            callers.append(peer)
            await echo(peer, reader, writer)

        await c.serve_stream(PROTOCOL, handler)
        data = os.urandom(1 << 20)
        assert await echoed(await routed(b, c.peer_id), data) == data
        assert callers == [b.peer_id]

    on_loopback(body)


def test_stream_to_a_stranger_by_its_addresses(on_loopback: Any) -> None:
    async def body(loopback: Any) -> None:
        a, b = await loopback.start("a"), await loopback.start("b")
        await a.serve_stream(PROTOCOL, echo)
        with pytest.raises(NetworkError, match=f"open {PROTOCOL} to {a.peer_id}"):
            await b.open_stream(a.peer_id, PROTOCOL)
        dead = "/ip4/127.0.0.1/tcp/9"
        stream = await b.open_stream(a.peer_id, PROTOCOL, [dead, *await a.addresses()])
        assert await echoed(stream, b"x") == b"x"

    on_loopback(body)


@pytest.mark.slow
def test_streams_of_a_peer_are_bounded_and_others_still_served(on_loopback: Any) -> None:
    async def body(loopback: Any) -> None:
        a, b, c = await loopback.swarm("abc")
        release = asyncio.Event()
        open_now = 0

        async def slow(peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal open_now
            open_now += 1
            await release.wait()
            await echo(peer, reader, writer)

        await a.serve_stream(PROTOCOL, slow)
        held = [await b.open_stream(a.peer_id, PROTOCOL) for _ in range(places.MAX_STREAMS_PER_PEER)]
        await soon(lambda: open_now == places.MAX_STREAMS_PER_PEER)
        assert await echoed(await b.open_stream(a.peer_id, PROTOCOL), b"one too many") == b""
        other = asyncio.create_task(echoed(await c.open_stream(a.peer_id, PROTOCOL), b"me"))
        await soon(lambda: open_now == places.MAX_STREAMS_PER_PEER + 1)
        release.set()
        assert await other == b"me"
        assert [await echoed(stream, b"x") for stream in held] == [b"x"] * places.MAX_STREAMS_PER_PEER
        assert await echoed(await b.open_stream(a.peer_id, PROTOCOL), b"again") == b"again"

    on_loopback(body)


def test_idle_streams_lock_nobody_out(on_loopback: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "MAX_STREAMS", 2)

    async def body(loopback: Any) -> None:
        a, b, c, d = await loopback.swarm("abcd")
        release = asyncio.Event()

        async def patient(peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked = await reader.readexactly(4)
            await release.wait()
            writer.write(asked)

        await a.serve_stream(PROTOCOL, patient)
        asking = await b.open_stream(a.peer_id, PROTOCOL)
        asking[1].write(b"mine")
        await soon(lambda: [s.reader.asked for s in a._streams.values()] == [True])
        idle = await c.open_stream(a.peer_id, PROTOCOL)
        await soon(lambda: [s.reader.asked for s in a._streams.values()] == [True, False])
        new = asyncio.create_task(echoed(await d.open_stream(a.peer_id, PROTOCOL), b""))
        async with asyncio.timeout(3):
            assert await idle[0].read(-1) == b"", "the idle one made room"
        await soon(lambda: [s.reader.asked for s in a._streams.values()] == [True, True])
        assert await echoed(await c.open_stream(a.peer_id, PROTOCOL), b"x") == b"", "those that asked keep their places"
        release.set()
        assert await asking[0].read(-1) == b"mine"
        assert await new == bytes(4)
        for _, writer in (asking, idle):
            writer.close()

    on_loopback(body)


def test_stream_that_takes_too_long_is_ended(on_loopback: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2p, "STREAM_SECONDS", 0.2)

    async def body(loopback: Any) -> None:
        a, b = await loopback.swarm("ab")
        await a.serve_stream(PROTOCOL, echo)
        reader, writer = await b.open_stream(a.peer_id, PROTOCOL)
        async with asyncio.timeout(3):
            assert await reader.read(-1) == b""
        writer.close()

    on_loopback(body)


def test_a_failing_handler_is_logged_and_ends_only_its_stream(
    on_loopback: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(loopback: Any) -> None:
        a, b = await loopback.swarm("ab")

        async def handler(peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if (await reader.readexactly(1)) == b"!":
                raise KeyError("planted")
            writer.write(b"fine")

        await a.serve_stream(PROTOCOL, handler)
        answers = []
        for sent in (b"!", b"?"):
            reader, writer = await b.open_stream(a.peer_id, PROTOCOL)
            writer.write(sent)
            answers.append(await reader.read(-1))
            writer.close()
        assert answers == [b"", b"fine"]
        assert f"failed on a stream of {b.peer_id}" in caplog.text

    on_loopback(body)


def test_closing_with_an_open_stream_is_quiet(on_loopback: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def body(loopback: Any) -> None:
        a, b = await loopback.swarm("ab")
        await a.serve_stream(PROTOCOL, echo)
        reader, writer = await b.open_stream(a.peer_id, PROTOCOL)
        await soon(lambda: [s.peer_id for s in a._streams.values()] == [b.peer_id])
        await a.close()
        assert await reader.read(-1) == b""
        writer.close()
        assert caplog.text == ""

    on_loopback(body)


def test_denied_peer_gets_no_stream(on_loopback: Any) -> None:
    async def body(loopback: Any) -> None:
        a, b = await loopback.swarm("ab")
        await a.serve_stream(PROTOCOL, echo)
        a.denied = {b.peer_id}.__contains__
        assert await echoed(await b.open_stream(a.peer_id, PROTOCOL), b"x") == b""

    on_loopback(body)


async def gossip_until(condition: Any, network: Any, data: bytes) -> None:
    """Gossip may lose anything, and does until its mesh has formed: repeat."""
    for _ in range(100):
        await network.publish("topic", data)
        await asyncio.sleep(0.05)
        if condition():
            return
    raise AssertionError("no hint arrived in 5 s")


@pytest.mark.slow
def test_hints_reach_the_others_but_not_the_sender_or_those_who_deny_it(on_loopback: Any) -> None:
    async def body(loopback: Any) -> None:
        networks = await loopback.swarm("abc")
        heard: list[list[tuple[str, bytes]]] = [[], [], []]

        async def listen(network: Any, into: list[tuple[str, bytes]]) -> None:
            async for hint in network.subscribe("topic"):
                into.append(hint)

        tasks = [asyncio.create_task(listen(n, h)) for n, h in zip(networks, heard, strict=True)]
        sender = networks[1]
        await gossip_until(lambda: heard[0] and heard[2], sender, b"first")
        assert (heard[0][0], heard[2][0]) == ((sender.peer_id, b"first"),) * 2
        networks[0].denied = {sender.peer_id}.__contains__
        heard[0].clear()
        heard[2].clear()
        await gossip_until(lambda: any(data == b"second" for _, data in heard[2]), sender, b"second")
        assert (sender.peer_id, b"second") not in heard[0]
        assert heard[1] == []
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    on_loopback(body)


def test_slow_listener_loses_the_oldest_hints(on_loopback: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2p, "MAX_QUEUED_HINTS", 3)

    async def body(loopback: Any) -> None:
        a, b = await loopback.swarm("ab")
        hints = a.subscribe("topic")
        first = asyncio.ensure_future(anext(hints))
        await gossip_until(first.done, b, b"start")
        for number in range(20):
            await b.publish("topic", b"%d" % number)
        await asyncio.sleep(1)  # gossip reorders what follows closely
        for number in (100, 101, 102):
            await b.publish("topic", b"%d" % number)
            await asyncio.sleep(0.1)
        await asyncio.sleep(1)
        waiting = [int((await anext(hints))[1]) for _ in range(3)]
        assert sorted(waiting) == [100, 101, 102]
        more = asyncio.ensure_future(anext(hints))
        await asyncio.sleep(0.1)
        assert not more.done(), "three is what fits"
        more.cancel()
        await asyncio.wait({more})
        await hints.aclose()
        with pytest.raises(ValueError, match="at most"):
            await b.publish("topic", bytes(p2p.MAX_HINT_BYTES + 1))

    on_loopback(body)


def test_killed_p2pd_is_noticed_and_every_call_says_so(on_loopback: Any) -> None:
    async def body(loopback: Any) -> None:
        a, b = await loopback.swarm("ab")
        hints = a.subscribe("topic")
        listening = asyncio.ensure_future(anext(hints))
        await asyncio.sleep(0.1)
        os.kill(a.daemon.pid, signal.SIGKILL)
        async with asyncio.timeout(2):
            assert (await a.wait_dead()).startswith("p2pd ended with status -9: ")
            for what, call in {
                "ask p2pd for its addresses": a.addresses(),
                "list peers": a.peers(),
                "connect to": a.connect(await loopback.address_of(b)),
                "open /x": a.open_stream(b.peer_id, "/x"),
                "serve /x": a.serve_stream("/x", echo),
                "publish to topic": a.publish("topic", b"x"),
            }.items():
                with pytest.raises(NetworkError, match=f"{what}.*p2pd ended with status -9"):
                    await call
            with pytest.raises(NetworkError, match="subscribe to topic"):
                await listening
        await soon(lambda: gone(a.daemon.pid))

    on_loopback(body)


def test_a_call_in_flight_ends_when_p2pd_is_killed(on_loopback: Any) -> None:
    async def body(loopback: Any) -> None:
        a = await loopback.start("a")
        await loopback.freeze(a)
        call = asyncio.create_task(a.peers())
        await asyncio.sleep(0.1)
        assert not call.done()
        os.kill(a.daemon.pid, signal.SIGKILL)
        async with asyncio.timeout(2):
            with pytest.raises(NetworkError, match="list peers: p2pd ended"):
                await call

    on_loopback(body)


def test_hung_p2pd_surfaces_as_an_error_naming_the_call(on_loopback: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2p, "CALL_SECONDS", 0.3)
    monkeypatch.setattr(p2pd, "STOP_SECONDS", 0.3)

    async def body(loopback: Any) -> None:
        a = await loopback.start("a")
        await loopback.freeze(a)
        started = time.monotonic()
        with pytest.raises(NetworkError, match=r"list peers: no answer within 0\.3 s"):
            await a.peers()
        assert time.monotonic() - started < 2
        await a.close()  # it does not hear SIGTERM either
        assert gone(a.daemon.pid)

    on_loopback(body)


def test_taken_port_is_refused_before_p2pd_could_share_it(on_loopback: Any) -> None:
    async def body(loopback: Any) -> None:
        a = await loopback.start("a")
        port = (await loopback.address_of(a)).split("/")[4]
        with pytest.raises(PortInUse, match=f"port {port} on 127.0.0.1 is in use"):
            await loopback.start("b", listen=[f"/ip4/127.0.0.1/tcp/{port}"])
        with pytest.raises(PortInUse, match=f"port {port} on 0.0.0.0 is in use"):
            await loopback.start("b", listen=[f"/ip4/0.0.0.0/tcp/{port}"])
        await a.close()
        await loopback.start("b", listen=[f"/ip4/127.0.0.1/tcp/{port}"])

    on_loopback(body)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"listen": ["/ip4/127.0.0.1"]}, "expected a multiaddr like"),
        ({"listen": ["/ip4/127.0.0.1/tcp/70000"]}, "a port is at most 65535"),
        ({"listen": ["/ip4/192.0.2.1/tcp/0"]}, "cannot listen on /ip4/192.0.2.1/tcp/0: "),
        ({"announce": ["/ip4/nonsense"]}, "p2pd ended at its start: .*nonsense"),
    ],
)
def test_a_start_that_cannot_work_says_why(on_loopback: Any, options: dict[str, Any], message: str) -> None:
    async def body(loopback: Any) -> None:
        with pytest.raises(NetworkError, match=message):
            await loopback.start("a", **options)

    on_loopback(body)


def test_taken_udp_port_is_refused() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(PortInUse):
            p2pd.check_port_is_free(f"/ip4/127.0.0.1/udp/{taken.getsockname()[1]}/quic-v1")


def test_sockets_of_a_node_in_a_long_path_lie_elsewhere_and_stale_ones_are_removed(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)
    folder = p2pd.private_folder(deep)
    assert deep not in folder.parents
    assert len(os.fsencode(folder / "streams.sock")) < 104
    (folder / "p2pd.sock").touch()
    assert p2pd.private_folder(deep) == folder
    assert list(folder.iterdir()) == []
    folder.rmdir()
    assert p2pd.private_folder(tmp_path / "y") == tmp_path / "y" / "sockets"


NODE = """
import asyncio, sys
from pathlib import Path
from sapo_node.identity import Identity
from sapo_node.swarm.p2p import Network

async def main():
    folder = Path(sys.argv[1])
    network = await Network.start(Identity.create(folder / "k"), work_dir=folder, listen=["/ip4/127.0.0.1/tcp/0"])
    print(network.daemon.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_node_killed_with_9_leaves_no_p2pd(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", NODE, str(tmp_path)], stdout=subprocess.PIPE) as node:
        assert node.stdout is not None
        pid = int(node.stdout.readline())
        assert not gone(pid)
        node.kill()
        node.wait()
        deadline = time.monotonic() + 3
        while not gone(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert gone(pid)


# Addresses that strangers chose


async def knocks(ask: Callable[[str], Awaitable[object]]) -> int:
    """How many connections a port of 127.0.0.1 takes while a stranger's address of it is used."""
    taken = 0

    def count(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal taken
        taken += 1
        writer.close()

    server = await asyncio.start_server(count, "127.0.0.1", 0)
    with suppress(NetworkError):  # nobody speaks libp2p there
        await ask(f"/ip4/127.0.0.1/tcp/{server.sockets[0].getsockname()[1]}")
    server.close()
    return taken


def reached_from_outside(network: Network) -> None:
    """Let a node on loopback believe that it is in the internet."""
    network._own = ["/ip4/8.8.8.8/tcp/1", "/ip4/127.0.0.1/tcp/1"]
    network._listens = []


@pytest.mark.parametrize("outside", [True, False])
def test_a_stranger_leads_a_node_to_loopback_only_where_it_is_reached_there_alone(
    on_loopback: OnLoopback, outside: bool
) -> None:
    async def body(loopback: Loopback) -> None:
        a, x = await loopback.start("a"), loopback.identity("x").peer_id
        if outside:
            reached_from_outside(a)
        assert await knocks(lambda address: a.connect(f"{address}/p2p/{x}", strange=True)) == (not outside)
        y = loopback.identity("y").peer_id
        assert await knocks(lambda address: a.open_stream(y, PROTOCOL, [address])) == (not outside)

    on_loopback(body)


def test_an_address_of_the_owner_is_followed_anywhere(on_loopback: OnLoopback) -> None:
    async def body(loopback: Loopback) -> None:
        a, x = await loopback.start("a"), loopback.identity("x").peer_id
        reached_from_outside(a)
        assert await knocks(lambda address: a.connect(f"{address}/p2p/{x}")) == 1

    on_loopback(body)


def test_a_strangers_name_leads_no_farther_than_its_number(
    on_loopback: OnLoopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def numeric(address: str) -> list[str]:
        return [address.replace("/dns4/inside.test", "/ip4/127.0.0.1")]

    monkeypatch.setattr(dnsaddr, "numeric", numeric)

    async def body(loopback: Loopback) -> None:
        a, x = await loopback.start("a"), loopback.identity("x").peer_id
        reached_from_outside(a)
        for address in ("/dns4/inside.test/tcp/1", "/dnsaddr/elsewhere.test"):
            with pytest.raises(LeadsInside):
                await a.connect(f"{address}/p2p/{x}", strange=True)

    on_loopback(body)
