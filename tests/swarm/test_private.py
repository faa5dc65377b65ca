"""A private swarm over real p2pd processes, with an outsider who knows every name and lacks only the key."""

import asyncio
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sapo_node.config import NodeConfig
from sapo_node.datadir import DataDir
from sapo_node.errors import SapoError
from sapo_node.identity import Identity
from sapo_node.rollouts import codec
from sapo_node.rollouts.schema import Listing
from sapo_node.swarm import fetch, protocol, secret
from sapo_node.swarm.bootstrap import Result, explain_greeting
from sapo_node.swarm.dht import SwarmDHT, node_id_of, shard_prefix
from sapo_node.swarm.fetch import FetchServer, Shelf
from sapo_node.swarm.hello import Greeter, Verdict
from sapo_node.swarm.hivemind_light import P2PDaemonError, P2PHandlerError, PeerID, dht_pb2
from sapo_node.swarm.p2p import Network, NetworkError
from sapo_node.swarm.records import key_ids
from sapo_node.swarm.sealed import MAX_REQUEST_BYTES, PrivateNetwork, _AnsweringStream, _AskingStream, _both
from sapo_node.swarm.secret import REQUEST_OVERHEAD, Secret
from sapo_node.swarm.service import SwarmService
from tests.swarm.conftest import LOOPBACK, Loopback
from tests.swarm.test_dht import announcement
from tests.swarm.test_exchange import Member, make_batch, until

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]
OnLoopback = Callable[[Callable[[Loopback], Awaitable[None]]], None]
SWARM = "test"
OLD, NEW = bytes(range(32)), bytes(range(1, 33))
CALLS = ("rpc_ping", "rpc_store", "rpc_find")
ANSWER_SECONDS = 1.0


async def join(loopback: Loopback, name: str, key: bytes | None, first: Member | None = None) -> Member:
    """A member with its greeter and exchange, of a swarm with a key or without one."""
    network = await loopback.start(name, key and Secret([key], SWARM))
    initial = [await loopback.address_of(first.network)] if first else []
    await Greeter(network, SWARM).start()
    dht = await SwarmDHT.start(network, SWARM, initial)
    member = Member(loopback.identity(name), network, dht, "on", 100)
    loopback.stack.push_async_callback(member.stop)
    return member


class Outsider:
    """Connects, listens and asks by all the names that members use, and keeps every byte that comes."""

    def __init__(self, identity: Identity, network: Network, names: Callable[[str], list[str]]) -> None:
        self.identity, self.network, self._names = identity, network, names
        self.seen: list[bytes] = []
        self.refusals: list[str] = []
        self.captured: list[tuple[str, bytes]] = []  # what members asked of it, and under which name

    @classmethod
    async def start(cls, loopback: Loopback, names: Callable[[str], list[str]]) -> "Outsider":
        self = cls(loopback.identity("outsider"), await loopback.start("outsider"), names)
        listening = asyncio.create_task(self._listen(names(protocol.hint_topic(SWARM))[0]))
        loopback.stack.callback(listening.cancel)
        for name in (protocol.HELLO_PROTOCOL, protocol.FETCH_PROTOCOL):
            await self.network.serve_stream(names(name)[0], self._capture_stream(name))
        for call in CALLS:
            name = f"DHTProtocol.{call}"
            await self.network.p2p._client.add_unary_handler(names(name)[0], self._capture_call(name))
        return self

    async def _listen(self, topic: str) -> None:
        async with aclosing(self.network.subscribe(topic)) as hints:
            async for _, data in hints:
                self.seen.append(data)

    def _capture_stream(self, name: str) -> Any:
        async def serve(_: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            data = await reader.read(1000)
            self.captured.append((name, data))
            writer.write(data)  # their own bytes, for an answer

        return serve

    def _capture_call(self, name: str) -> Any:
        async def answer(data: bytes, _: Any) -> bytes:
            self.captured.append((name, data))
            return data

        return answer

    async def ask(self, member: Network, name: str, data: bytes) -> bytes:
        """What a member answers on a stream before it closes it, or in the time of an honest answer."""
        try:
            reader, writer = await self.network.open_stream(member.peer_id, name)
        except NetworkError as error:
            self.refusals.append(str(error))
            return b""
        answer = b""
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(ANSWER_SECONDS):
                writer.write(data)
                while part := await reader.read(1 << 16):
                    answer += part
        writer.close()
        self.seen.append(answer)
        return answer

    async def call(self, member: Network, name: str, data: bytes) -> bytes:
        """What a member answers to a call of the DHT."""
        peer = PeerID.from_base58(member.peer_id)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                answer: bytes = await self.network.p2p._client.call_unary_handler(peer, name, data)
        except (P2PHandlerError, P2PDaemonError) as refusal:
            self.refusals.append(str(refusal))
            self.seen.append(str(refusal).encode())
            return b""
        self.seen.append(answer)
        return answer

    async def try_everything(self, member: Network, content_id: bytes) -> int:
        """Greet, fetch, ping, store and find, by public names and by those that members use; how many were answered."""
        epoch, own = protocol.epoch_of(time.time()), self.identity
        record = codec.encode_announcement(announcement(own, epoch, version="outsider"), own)
        keys = [key_ids(self._names, SWARM, epoch, 0, shard_prefix(own.public_key, epoch, 0))[0]]
        node = dht_pb2.NodeInfo(node_id=node_id_of(PeerID.from_base58(own.peer_id)).to_bytes())
        packed = b"\xc4\x20" + own.public_key, b"\xc5" + len(record).to_bytes(2, "big") + record
        requests = [
            dht_pb2.PingRequest(peer=node),
            dht_pb2.StoreRequest(
                keys=keys, subkeys=packed[:1], values=packed[1:], expiration_time=[time.time() + 60], peer=node
            ),
            dht_pb2.FindRequest(keys=keys, peer=node),
        ]
        answers = []
        for names in (self._names, lambda name: [name]):
            answers += [
                await self.ask(member, names(protocol.HELLO_PROTOCOL)[0], protocol.greeting(SWARM) + bytes(36)),
                await self.ask(member, names(protocol.FETCH_PROTOCOL)[0], content_id + bytes(36)),
            ]
            for call, request in zip(CALLS, requests, strict=True):
                answers.append(await self.call(member, names(f"DHTProtocol.{call}")[0], request.SerializeToString()))
        return sum(map(bool, answers))

    async def replay(self, member: Network) -> int:
        """Send a member what members asked the outsider; how much was answered."""
        answers = []
        for name, data in list(self.captured):
            send = self.call if name.startswith("DHTProtocol") else self.ask
            answers.append(await send(member, self._names(name)[0], data))
        return sum(map(bool, answers))


async def observed(loopback: Loopback, key: bytes | None) -> tuple[list[Member], Outsider, int]:
    """Two members who share a batch by hint and stream while an outsider looks on, is asked by one of them, and asks
    all it can; how many of its questions were answered."""
    a = await join(loopback, "a", key)
    b = await join(loopback, "b", key, a)
    outsider = await Outsider.start(loopback, a.network.names)
    for member in (a, b):
        await outsider.network.connect(await loopback.address_of(member.network))
    peer_id = outsider.network.peer_id
    await Greeter(a.network, SWARM).greet(peer_id)
    await a.dht._protocol.call_ping(PeerID.from_base58(peer_id))
    await a.dht._protocol.call_find(PeerID.from_base58(peer_id), [a.dht._protocol.node_id])
    with suppress(fetch.FetchFailed):
        stream = await a.network.open_stream(peer_id, protocol.FETCH_PROTOCOL)
        await fetch.ask(*stream, Listing(bytes(32), 200, 1, 0.0))
    async with asyncio.timeout(15):
        while not outsider.seen:  # gossip needs a moment until everybody hears everybody
            await a.network.publish(protocol.hint_topic(SWARM), b"no announcement")
            await asyncio.sleep(0.2)
    content_id = await a.exchange.publish(make_batch(a.identity))
    await until(lambda: b.received and max(map(len, outsider.seen)) > codec.HEADER_BYTES, 15.0)
    return [a, b], outsider, await outsider.try_everything(a.network, content_id)


def test_an_outsider_is_answered_nothing_and_sees_nothing(
    on_loopback: OnLoopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(loopback: Loopback) -> None:
        (a, b), outsider, answered = await observed(loopback, OLD)
        assert answered == 0
        assert {name for name, _ in outsider.captured} == {
            protocol.HELLO_PROTOCOL,
            protocol.FETCH_PROTOCOL,
            "DHTProtocol.rpc_ping",
            "DHTProtocol.rpc_find",
        }
        assert await outsider.replay(a.network) + await outsider.replay(b.network) == 0
        for member in (a, b):
            dht = member.dht._protocol
            assert {r.public_key for shard in dht.records._shards.values() for r in shard.values()} == {
                a.identity.public_key
            }
            assert outsider.network.peer_id not in member.dht.members()
            assert member.exchange.stats.hints_in + member.exchange.stats.announcements_in <= len(b.received) + 1
        everything = b"".join([*outsider.seen, *(data for _, data in outsider.captured)])
        plain = [SWARM.encode(), b"reasoning_gym", b"trainer", b"tiny", protocol.MAGIC, a.identity.public_key]
        assert [word for word in plain if word in everything] == []
        names = [*a.network._handlers, *a.network.p2p._client.control.unary_handlers]
        assert len(names) == 5
        assert all(re.fullmatch("/[0-9a-f]{32}", name) for name in names)
        monkeypatch.setattr(Secret, "heed", lambda *_: pytest.fail("a request that is too large was opened"))
        await outsider.call(a.network, a.network.names("DHTProtocol.rpc_find")[0], bytes(MAX_REQUEST_BYTES + 1))
        assert [text for text in outsider.refusals if "denied" not in text and "not supported" not in text] == []

    on_loopback(body)


def test_the_same_outsider_sees_all_of_a_public_swarm(on_loopback: OnLoopback) -> None:
    """The control: its questions are right, and what it looks for is there."""

    async def body(loopback: Loopback) -> None:
        (a, _), outsider, answered = await observed(loopback, None)
        assert answered == 10
        everything = b"".join(outsider.seen)
        assert all(word in everything for word in (SWARM.encode(), protocol.MAGIC, a.identity.public_key))
        records = [r for shard in a.dht._protocol.records._shards.values() for r in shard.values()]
        assert outsider.identity.public_key in {record.public_key for record in records}
        fetched = next(answer[5:] for answer in outsider.seen if answer[5:9] == protocol.MAGIC)
        assert codec.open_batch(fetched, SWARM).batch.groups[0].task.source == "reasoning_gym"

    on_loopback(body)


# Members


@asynccontextmanager
async def piped() -> AsyncIterator[tuple[Ends, Ends]]:
    """The ends of one stream between members: of the one that asks, and of the one that answers."""
    here, there = socket.socketpair()
    raw = [await asyncio.open_connection(sock=end) for end in (here, there)]
    ids = ("asker", "asked")
    kinds = (_AskingStream, _AnsweringStream)
    ends = []
    for i, kind in enumerate(kinds):
        network = cast(PrivateNetwork, SimpleNamespace(secret=Secret([OLD], SWARM), peer_id=ids[i]))
        ends.append(_both(kind(network, protocol.FETCH_PROTOCOL, ids[1 - i], *raw[i])))
    try:
        yield ends[0], ends[1]
    finally:
        for _, writer in raw:
            writer.close()
            await writer.wait_closed()


def test_a_batch_of_many_frames_arrives_whole() -> None:
    async def body() -> None:
        data = bytes(range(256)) * 1000
        shelf = Shelf(300.0)
        shelf.put(codec.Envelope(data, codec.content_id_of(data)), 1, time.time(), time.time())
        server = FetchServer(shelf, lambda _: True, lambda *_: None)
        async with piped() as (asking, answering):
            serving = asyncio.create_task(server.serve("asker", *answering))
            assert await fetch.ask(*asking, shelf.newest(time.time())[0]) == data
            await serving

    asyncio.run(body())


def test_without_proof_of_the_key_a_stream_ends_as_if_the_peer_had_gone() -> None:
    async def body() -> None:
        server = FetchServer(Shelf(300.0), lambda _: True, lambda *_: None)
        async with piped() as (asking, answering):
            cast(_AskingStream, asking[1])._writer.write(bytes(32 + REQUEST_OVERHEAD))
            with pytest.raises(OSError, match="not sealed"):
                await server.serve("asker", *answering)

    asyncio.run(body())


def test_a_swarm_changes_its_key_without_losing_sight_of_itself(on_loopback: OnLoopback) -> None:
    """One node has moved the new key to the front, the other has not yet."""

    async def body(loopback: Loopback) -> None:
        ahead = await loopback.start("a", Secret([NEW, OLD], SWARM))
        behind = await loopback.start("b", Secret([OLD, NEW], SWARM))
        await behind.connect(await loopback.address_of(ahead))
        ga, gb = Greeter(ahead, SWARM), Greeter(behind, SWARM)
        await ga.start()
        await gb.start()
        assert [await ga.greet(behind.peer_id), await gb.greet(ahead.peer_id)] == [Verdict.MEMBER] * 2
        dhts = [await SwarmDHT.start(network, SWARM) for network in (ahead, behind)]
        for dht in dhts:
            loopback.stack.push_async_callback(dht.close)
        assert await dhts[1].join([ahead.peer_id]) == 1
        epoch = protocol.epoch_of(time.time())
        for dht, name in zip(dhts, "ab", strict=True):
            identity = loopback.identity(name)
            record = codec.encode_announcement(announcement(identity, epoch), identity)
            assert await dht.announce(record, epoch, 0, 0, time.time() + 60)
        assert [len(await dht.read(epoch, 0, 0)) for dht in dhts] == [2, 2]
        for sender, receiver in [(ahead, behind), (behind, ahead)]:
            async with aclosing(receiver.subscribe("t")) as hints, asyncio.timeout(10):
                hint = asyncio.ensure_future(anext(hints))
                while not hint.done():
                    await sender.publish("t", b"news")
                    await asyncio.wait({hint}, timeout=0.1)
                assert await hint == (sender.peer_id, b"news")

    on_loopback(body)


# Who is no member, and what its owner is told


def clock(skew: float) -> Callable[[], float]:
    return lambda: time.time() + skew


@pytest.mark.slow  # five nodes
def test_who_is_no_member_is_met_quietly(on_loopback: OnLoopback) -> None:
    async def body(loopback: Loopback) -> None:
        secrets = {
            "member": Secret([OLD], SWARM),
            "other-key": Secret([NEW], SWARM),
            "other-name": Secret([OLD], "elsewhere"),
            "other-clock": Secret([OLD], SWARM, clock(300.0)),
            "public": None,
        }
        networks = {name: await loopback.start(name, key) for name, key in secrets.items()}
        greeters = {name: Greeter(network, SWARM) for name, network in networks.items()}
        for name, greeter in greeters.items():
            await greeter.start()
            if name != "member":
                await networks[name].connect(await loopback.address_of(networks["member"]))
        member = networks["member"].peer_id
        verdicts = {name: await greeter.greet(member) for name, greeter in greeters.items() if name != "member"}
        assert verdicts == {
            "other-key": Verdict.KEYLESS,
            "other-name": Verdict.KEYLESS,
            "other-clock": Verdict.SILENT,
            "public": Verdict.STRANGER,
        }
        assert await greeters["member"].greet(networks["public"].peer_id) is Verdict.PUBLIC_SWARM
        for name, greeter in greeters.items():
            assert greeter.members == greeter.callers == networks[name].foreign == set()

    on_loopback(body)


@pytest.mark.parametrize(
    ("verdict", "private", "result", "words"),
    [
        (Verdict.KEYLESS, True, Result.NO_MEMBER, "its key (swarm.secret_file) or swarm.name differs"),
        (Verdict.PUBLIC_SWARM, True, Result.OTHER_SWARM, "a swarm without a key"),
        (Verdict.SILENT, True, Result.UNREACHABLE, "clocks differ by more than 60 s"),
        (Verdict.STRANGER, False, Result.NOT_A_NODE, "or one of a private swarm"),
    ],
)
def test_the_owner_is_told_why_a_peer_is_no_member(verdict: Verdict, private: bool, result: Result, words: str) -> None:
    outcome = explain_greeting("/ip4/192.0.2.7/tcp/1/p2p/x", verdict, 0, private)
    assert outcome.result is result
    assert words in outcome.message


# The service


def service(loopback: Loopback, name: str, file: Path | None) -> SwarmService:
    swarm = {"name": SWARM, "listen": LOOPBACK, "public_peers": False, "secret_file": file}
    data = DataDir(loopback.folder / name)
    data.prepare()
    return SwarmService(NodeConfig.model_validate({"swarm": swarm}), loopback.identity(name), data)


def test_a_bootstrap_peer_serves_a_private_swarm_only_with_its_key(on_loopback: OnLoopback) -> None:
    async def body(loopback: Loopback) -> None:
        file = loopback.folder / "swarm.key"
        secret.make(file)
        peers = [service(loopback, "with-key", file), service(loopback, "without", None)]
        serving = [asyncio.create_task(peer.serve()) for peer in peers]
        await until(lambda: all(peer.addresses and peer._exchange for peer in peers), 10.0)
        network = await loopback.start("a", Secret.load(file, SWARM))
        dht = await SwarmDHT.start(network, SWARM)
        loopback.stack.push_async_callback(dht.close)
        assert [await dht.join(peer.addresses[:1]) for peer in peers] == [1, 0]
        identity, epoch = loopback.identity("a"), protocol.epoch_of(time.time())
        record = codec.encode_announcement(announcement(identity, epoch), identity)
        assert await dht.announce(record, epoch, 0, 0, time.time() + 60)
        exchanges = [peer._exchange for peer in peers if peer._exchange]
        assert [len(exchange._dht._protocol.records) for exchange in exchanges] == [1, 0]
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    on_loopback(body)


def test_a_key_that_cannot_be_used_ends_the_node_before_it_starts(loopback: Loopback, tmp_path: Path) -> None:
    (tmp_path / "swarm.key").write_text("secret")
    (tmp_path / "swarm.key").chmod(0o600)
    with pytest.raises(SapoError, match="line 1 is no key"):
        service(loopback, "a", tmp_path / "swarm.key")
