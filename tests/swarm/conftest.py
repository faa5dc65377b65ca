"""Loopback nodes: real p2pd processes that find only each other."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import uvloop

from sapo_node.identity import Identity
from sapo_node.swarm.p2p import Network
from sapo_node.swarm.sealed import start_network
from sapo_node.swarm.secret import Secret

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]


class Loopback:
    """Starts nodes on 127.0.0.1 and closes them, last first, when the block ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stack = AsyncExitStack()

    async def __aenter__(self) -> "Loopback":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stack.aclose()

    def identity(self, name: str) -> Identity:
        (self.folder / name).mkdir(exist_ok=True)
        return Identity.load_or_create(self.folder / name / "identity.key")

    async def start(self, name: str, secret: Secret | None = None, **options: Any) -> Network:
        """A node with the identity and sockets of that name; of a private swarm if there is a `secret`."""
        options = {"listen": LOOPBACK, **options}
        network = await start_network(secret, self.identity(name), work_dir=self.folder / name, **options)
        self.stack.push_async_callback(network.close)
        return network

    @staticmethod
    async def address_of(network: Network) -> str:
        """The loopback address of a node, with its peer id."""
        (address, *_) = [a for a in await network.addresses() if a.startswith("/ip4/127.0.0.1/tcp/")]
        return f"{address}/p2p/{network.peer_id}"

    @staticmethod
    async def freeze(network: Network) -> None:
        """Stop the node's p2pd, so that it hangs; all its threads have stopped when this returns."""
        os.kill(network.daemon.pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{network.daemon.pid}/task")
        while any(file.read_text().rpartition(")")[2].split()[0] != "T" for file in tasks.glob("*/stat")):
            await asyncio.sleep(0.01)

    async def swarm(self, names: str, **options: Any) -> list[Network]:
        """Connected nodes, one a letter; each knows the address of the first alone."""
        networks = [await self.start(name, **options) for name in names]
        for network in networks[1:]:
            await network.connect(await self.address_of(networks[0]))
        return networks


@pytest.fixture
def loopback(tmp_path: Path) -> Loopback:
    return Loopback(tmp_path)


@pytest.fixture
def on_loopback(loopback: Loopback) -> Callable[[Callable[[Loopback], Awaitable[None]]], None]:
    """Run an async test body with loopback nodes on uvloop, as the node does."""

    def run(body: Callable[[Loopback], Awaitable[None]]) -> None:
        async def main() -> None:
            async with loopback:
                await body(loopback)

        uvloop.run(main())

    return run
