"""The connection to the swarm over real p2pd processes: it comes back, and whom it answers follows the peer book."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest

from sapo_node.config import NodeConfig
from sapo_node.datadir import DataDir
from sapo_node.errors import SapoError
from sapo_node.identity import Identity
from sapo_node.rollouts.pool import Pool
from sapo_node.rollouts.schema import ModelCard
from sapo_node.swarm import service as service_module
from sapo_node.swarm.dht import SwarmDHT
from sapo_node.swarm.exchange import Exchange
from sapo_node.swarm.service import SwarmService
from tests.harness import descendants, free_port
from tests.swarm.conftest import Loopback

OnLoopback = Callable[[Callable[[Loopback], Awaitable[None]]], None]
CARD = ModelCard(name="tiny", params=1, licence="mit", tokenizer_sha256=bytes(32))


async def read_nothing(_exchange: Exchange) -> None:
    await asyncio.Event().wait()


@asynccontextmanager
async def running(loopback: Loopback, port: int) -> AsyncIterator[tuple[SwarmService, asyncio.Task[None]]]:
    """A service that listens on a port of 127.0.0.1, and the task that runs it."""
    swarm = {"name": "test", "listen": [f"/ip4/127.0.0.1/tcp/{port}"], "nat_port_map": False}
    config = NodeConfig.model_validate({"swarm": swarm})
    data = DataDir(loopback.folder / "node")
    identity = loopback.identity("node")
    data.prepare()
    pool = await Pool.open(data.pool, config.rollouts)
    service = SwarmService(config, identity, data)
    task = asyncio.create_task(service.run(pool, CARD, lambda: 0, read_nothing))
    try:
        yield service, task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, SapoError):
            await task
        await pool.close()


async def until(condition: Callable[[], Any], task: asyncio.Task[None], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            assert not task.done()
            await asyncio.sleep(0.02)


def p2pd_of_this_process() -> int:
    (pid,) = [pid for pid in descendants(os.getpid()) if Path(f"/proc/{pid}/comm").read_text().strip() == "p2pd"]
    return pid


def test_a_port_that_is_taken_at_the_start_ends_the_node(on_loopback: OnLoopback) -> None:
    async def body(loopback: Loopback) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            async with running(loopback, taken.getsockname()[1]) as (_, task):
                with pytest.raises(SapoError, match="is in use by another program"):
                    await task

    on_loopback(body)


def test_a_port_that_is_lost_later_is_waited_for(on_loopback: OnLoopback, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "FIRST_PAUSE_SECONDS", 0.3)
    monkeypatch.setattr(service_module, "LONGEST_PAUSE_SECONDS", 0.3)
    warnings: list[str] = []
    monkeypatch.setattr(service_module.log, "warning", lambda _, reason, **__: warnings.append(reason))
    port = free_port()

    async def body(loopback: Loopback) -> None:
        async with running(loopback, port) as (service, task):
            await until(lambda: service.connections == 1, task)
            os.kill(p2pd_of_this_process(), signal.SIGKILL)
            with socket.socket() as thief:
                thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                await until(lambda: _took(thief, port), task)
                await until(lambda: any("is in use by another program" in reason for reason in warnings), task)
            await until(lambda: service.connections == 2, task)
        assert warnings[0].startswith("p2pd ended with status -9")

    on_loopback(body)


def _took(thief: socket.socket, port: int) -> bool:
    try:
        thief.bind(("127.0.0.1", port))
    except OSError:
        return False
    thief.listen()
    return True


def test_p2pd_leaves_the_other_cores_to_training_but_not_where_nothing_trains(on_loopback: OnLoopback) -> None:
    def cores() -> list[bytes]:
        variables = Path(f"/proc/{p2pd_of_this_process()}/environ").read_bytes().split(b"\0")
        return [one for one in variables if one.startswith(b"GOMAXPROCS=")]

    async def body(loopback: Loopback) -> None:
        async with running(loopback, 0) as (service, task):
            await until(lambda: service.connections == 1, task)
            assert cores() == [b"GOMAXPROCS=1"]
        bootstrap = asyncio.create_task(service.serve())
        await until(lambda: service.connections == 2, bootstrap)
        assert cores() == []
        bootstrap.cancel()
        await asyncio.gather(bootstrap, return_exceptions=True)

    on_loopback(body)


def test_a_shunned_peer_gets_no_answer_in_the_dht(on_loopback: OnLoopback) -> None:
    async def body(loopback: Loopback) -> None:
        async with running(loopback, 0) as (service, task):
            await until(lambda: service.connections == 1, task)
            address = next(a for a in service.addresses if a.startswith("/ip4/127.0.0.1/"))
            network = await loopback.start("b")
            dht = await SwarmDHT.start(network, "test")
            loopback.stack.push_async_callback(dht.close)
            assert await dht.join([address]) == 1
            for _ in range(4):
                service.book.rejected(network.peer_id, time.time())
            async with asyncio.timeout(5 * service_module.DENY_SECONDS):
                while await dht.join([address]):
                    await asyncio.sleep(0.1)

    on_loopback(body)


class Heard:
    """An exchange that heard of one peer some time ago."""

    def __init__(self, ago: float) -> None:
        self.at = time.time() - ago

    def heard(self) -> dict[str, float]:
        return {"a": self.at}


def idle(folder: Path) -> SwarmService:
    data = DataDir(folder)
    data.prepare()
    config = NodeConfig.model_validate({"node": {"data_dir": folder}})
    return SwarmService(config, Identity.load_or_create(data.key), data)


@pytest.mark.parametrize(("ago", "counted"), [(10.0, 1), (service_module.RECORD_SECONDS + 1.0, 0)])
def test_a_peer_that_was_never_connected_counts_while_its_announcement_lives(
    tmp_path: Path, ago: float, counted: int
) -> None:
    service = idle(tmp_path)
    service._exchange = cast(Exchange, Heard(ago))
    assert service.peers == counted


def test_a_peer_that_goes_counts_no_longer_at_once(tmp_path: Path) -> None:
    service = idle(tmp_path)
    service._exchange = cast(Exchange, Heard(100.0))
    service.book.set_connected({"a"}, (), time.time())
    assert service.peers == 1
    service.book.set_connected((), (), time.time())
    assert service.peers == 0


def test_whom_a_node_meets_is_written_down_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "SAVE_NEWS_SECONDS", 0.05)
    service = idle(tmp_path)
    writes: list[int] = []

    async def save() -> None:
        writes.append(len(service.book.connected()))

    monkeypatch.setattr(service, "save_peers", save)

    async def body() -> None:
        saving = asyncio.create_task(service._save_peers())
        await asyncio.sleep(0.2)
        service.book.set_connected({"a"}, (), time.time())
        await asyncio.sleep(0.3)
        saving.cancel()

    asyncio.run(body())
    assert writes == [1]
