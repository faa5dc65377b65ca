"""A running node obeys its owner: who is denied by command gets nothing, over streams or in the DHT, until allowed."""

import asyncio
import time
from contextlib import suppress
from typing import Any

import pytest

from sapo_node.commands import peers as command
from sapo_node.config import NodeConfig, SwarmSection
from sapo_node.datadir import DataDir
from sapo_node.errors import SapoError
from sapo_node.identity import Identity
from sapo_node.rollouts.pool import Pool
from sapo_node.rollouts.schema import ModelCard
from sapo_node.swarm import protocol
from sapo_node.swarm import service as service_module
from sapo_node.swarm.candidates import Candidates
from sapo_node.swarm.dht import SwarmDHT
from sapo_node.swarm.exchange import Exchange
from sapo_node.swarm.p2pd import NetworkError
from sapo_node.swarm.peers import PeerBook
from sapo_node.swarm.service import SwarmService
from tests.swarm.conftest import Loopback

CARD = ModelCard(name="tiny", params=1, licence="mit", tokenizer_sha256=bytes(32))


class Running:
    """A node's network, as the daemon keeps it up, with its data directory locked."""

    def __init__(self, loopback: Loopback, **swarm: Any) -> None:
        listen = {"name": "test", "listen": ["/ip4/127.0.0.1/tcp/0"], "nat_port_map": False}
        self.config = NodeConfig.model_validate({"swarm": listen | swarm})
        self.data = DataDir(loopback.folder / "node")
        self.identity = loopback.identity("node")

    async def __aenter__(self) -> "Running":
        self.lock = self.data.lock()
        self.pool = await Pool.open(self.data.pool, self.config.rollouts)
        self.service = SwarmService(self.config, self.identity, self.data)
        self.task = asyncio.create_task(self.service.run(self.pool, CARD, lambda: 0, self._read_nothing))
        await self.until(lambda: self.service.connections == 1)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError, SapoError):
            await self.task
        await self.pool.close()
        self.lock.close()

    async def until(self, condition: Any, seconds: float = 5.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.02)

    @property
    def address(self) -> str:
        return next(a for a in self.service.addresses if a.startswith("/ip4/127.0.0.1/"))

    @staticmethod
    async def _read_nothing(_exchange: Exchange) -> None:
        await asyncio.Event().wait()


async def is_answered(network: Any, peer_id: str) -> bool:
    """Whether a request for a batch gets any answer; that there is no such batch is one."""
    try:
        reader, writer = await network.open_stream(peer_id, protocol.FETCH_PROTOCOL)
    except NetworkError:
        return False
    writer.write(bytes(32))
    try:
        return len(await reader.read(5)) > 0
    except OSError:
        return False
    finally:
        writer.close()


def test_a_running_node_obeys_deny_and_allow(on_loopback: Any) -> None:
    async def body(loopback: Loopback) -> None:
        async with Running(loopback) as node:
            other = await loopback.start("b")
            dht = await SwarmDHT.start(other, "test")
            loopback.stack.push_async_callback(dht.close)
            assert await dht.join([node.address]) == 1
            assert await is_answered(other, node.identity.peer_id)

            command.deny(node.data.path, other.peer_id, purge=False)
            await node.until(lambda: other.peer_id in node.service.book.denied)
            await asyncio.sleep(0.1)  # for its connections to be cut
            await other.connect(node.address)  # it comes again at once
            assert await dht.join([node.address]) == 0
            assert not await is_answered(other, node.identity.peer_id)

            command.allow(node.data.path, other.peer_id)
            await node.until(lambda: not node.service.book.denied)
            assert await is_answered(other, node.identity.peer_id)
            assert await dht.join([node.address]) == 1

    on_loopback(body)


def test_where_some_are_allowed_strangers_get_nothing(on_loopback: Any) -> None:
    async def body(loopback: Loopback) -> None:
        friend = loopback.identity("friend")
        async with Running(loopback, allow=[friend.peer_id]) as node:
            for name, answered in (("stranger", False), ("friend", True)):
                network = await loopback.start(name)
                dht = await SwarmDHT.start(network, "test")
                loopback.stack.push_async_callback(dht.close)
                await network.connect(node.address)
                assert await dht.join([node.address]) == int(answered)
                assert await is_answered(network, node.identity.peer_id) == answered

    on_loopback(body)


def test_a_denial_holds_from_the_start_and_its_address_is_not_dialled(on_loopback: Any) -> None:
    async def body(loopback: Loopback) -> None:
        other = await loopback.start("b")
        address = await loopback.address_of(other)
        node = Running(loopback, initial_peers=[address])
        node.data.prepare()
        command.deny(node.data.path, other.peer_id, purge=False)
        async with node:
            await asyncio.sleep(0.3)
            assert await other.peers() == []
            await other.connect(node.address)
            assert not await is_answered(other, node.identity.peer_id)

    on_loopback(body)


def test_an_address_to_join_by_whose_peer_is_denied_is_told_once_until_it_is_allowed() -> None:
    told: list[str] = []
    friend = "/ip4/192.0.2.1/tcp/1/p2p/12D3KooWGDqASXuD5zKMfCSDjuNJAw8kb8LASW658eFj8348YfDh"
    book = PeerBook()
    book.denied = frozenset({friend.rpartition("/")[2]})
    candidates = Candidates(SwarmSection(initial_peers=[friend]), book, told.append)
    assert candidates.current(lonely=True) == candidates.current(lonely=True) == []
    assert len(told) == 1
    assert candidates.faults == told
    book.denied = frozenset()
    assert [candidate.address for candidate in candidates.current(lonely=True)] == [friend]
    assert candidates.faults == []


def test_a_node_does_not_start_with_denials_that_it_cannot_read(tmp_path: Any) -> None:
    data = DataDir(tmp_path)
    data.prepare()
    data.denied.write_text("{")
    with pytest.raises(SapoError, match=r"denied\.json"):
        SwarmService(NodeConfig(), Identity.load_or_create(data.key), data)


def test_a_start_warns_of_a_licence_that_is_not_named(on_loopback: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(service_module.log, "warning", lambda event, **_: told.append(event))

    async def body(loopback: Loopback) -> None:
        node = Running(loopback)
        node.config = NodeConfig.model_validate({"training": {"model": "org/model"}})
        node.data.prepare()
        SwarmService(node.config, node.identity, node.data)._tell_ways("trainer")

    on_loopback(body)
    assert any("training.licence" in line for line in told)


def test_what_counts_is_the_far_end_of_the_connection(on_loopback: Any) -> None:
    async def body(loopback: Loopback) -> None:
        a, b = await loopback.swarm("ab")

        async def serve(_peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.readexactly(1))

        await a.serve_stream("/test", serve)
        seen: list[tuple[str, str]] = []
        b.reached = lambda peer_id, far_end: seen.append((peer_id, far_end))
        _, writer = await b.open_stream(a.peer_id, "/test")
        writer.close()
        assert seen == [(a.peer_id, (await loopback.address_of(a)).partition("/p2p/")[0])]

    on_loopback(body)


def test_an_address_that_was_reached_is_kept_for_a_peer_that_is_known(tmp_path: Any) -> None:
    data = DataDir(tmp_path)
    data.prepare()
    book = SwarmService(NodeConfig(), Identity.load_or_create(data.key), data).book
    book.came_from("a", "/ip4/8.8.8.8/tcp/1")
    assert book.get("a") is None
    book.saw("a", (), time.time())
    book.came_from("a", "/ip4/8.8.8.8/tcp/1")
    assert book.share("a") == "8.8.8.0/24"
