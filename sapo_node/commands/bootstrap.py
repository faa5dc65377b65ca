"""`sapo-node bootstrap`: a process for weeks that others join the swarm by. No model, no tasks, no torch.

It is a node's network and nothing more: the same key and data directory, the same DHT with the same checks of what it
holds for others, the same greeting. It trains nothing, publishes nothing and fetches nothing. The addresses to hand
around go to stdout, one a line, and with `--addresses` into a file that nodes on the same machine (or volume) can
read; the log goes to stderr.
"""

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click
import structlog

from sapo_node import durable, malloc, scratch, stop_signal
from sapo_node.config import NodeConfig, SwarmSection
from sapo_node.config_load import Loaded
from sapo_node.datadir import DataDir
from sapo_node.errors import ConfigError, SapoError
from sapo_node.identity import Identity
from sapo_node.monitor import log as logging_setup
from sapo_node.monitor.status import NodeStatus, State, StatusFile
from sapo_node.swarm.addresses import Reach, reach
from sapo_node.swarm.service import SwarmService

log = structlog.get_logger(__name__)

DEFAULT_LISTEN: Final = "/ip4/0.0.0.0/tcp/31330"
"""Where `swarm.listen` says nothing: addresses that are handed around need a port that stays."""

STATUS_SECONDS: Final = 1.0


def run(loaded: Loaded, addresses: Path | None) -> int:
    """Serve until a signal comes; the exit code. Raises SapoError for what its owner can cure."""
    config = settings(loaded)
    logging_setup.setup(config.monitor.log_level, config.monitor.log_format)
    data = DataDir(config.node.data_dir)
    with data.lock():
        if sys.platform == "win32":
            raise SapoError("sapo-node runs on Linux and macOS; on Windows use WSL2")
        import uvloop

        malloc.one_arena()
        with scratch.temporary_files(data.path):
            return int(uvloop.run(BootstrapPeer(config, data, addresses).run()))


def settings(loaded: Loaded) -> NodeConfig:
    """The settings, with a port that stays where none was chosen. Raises ConfigError."""
    config = loaded.config
    if not config.swarm.enabled:
        raise ConfigError(["swarm.enabled is false, but a bootstrap peer is nothing but network; set it to true"])
    if config.swarm.listen != SwarmSection().listen:
        return config
    swarm = config.swarm.model_copy(update={"listen": [DEFAULT_LISTEN]})
    return config.model_copy(update={"swarm": swarm})


class BootstrapPeer:
    """One bootstrap peer, from start to end."""

    def __init__(self, config: NodeConfig, data: DataDir, addresses: Path | None) -> None:
        """`data` is locked by the caller; `addresses` is the file for the addresses to hand around."""
        self._config = config
        self._file = addresses
        self._identity = Identity.load_or_create(data.key)
        self._swarm = SwarmService(config, self._identity, data)
        self._status_file = StatusFile(data.status, STATUS_SECONDS)
        self._started_at = time.time()
        self._told: list[str] = []
        self._filed: list[str] = []
        self._fault = ""
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT; 0. Raises SapoError for what its owner can cure."""
        loop = asyncio.get_running_loop()
        stop_signal.listen(loop, self._stop.set)
        self._write_status("starting")
        log.info("starting a bootstrap peer", peer_id=self._identity.peer_id, swarm=self._config.swarm.name)
        try:
            self._swarm.check_ports()
            await self._serve(loop)
        except SapoError as fault:
            self._write_status("stopped", str(fault))
            raise
        self._write_status("stopped", "it was asked to stop")
        log.info("stopped")
        return 0

    async def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Until it is asked to stop. Raises what a service raised."""
        tasks = [
            loop.create_task(self._swarm.serve(), name="swarm"),
            loop.create_task(self._watch(), name="status"),
            loop.create_task(self._stop.wait(), name="stop"),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for fault in ended:
            if isinstance(fault, Exception):  # not the cancellation
                raise fault

    async def _watch(self) -> None:
        """Keep the status file and the addresses that were told in step with the network."""
        while True:
            addresses = worth_telling(self._swarm.addresses)
            if addresses and addresses != self._told:
                self._told = addresses
                self._tell(addresses)
            if addresses and addresses != self._filed and self._file is not None:
                self._write_addresses(self._file, addresses)
            self._write_status("serving" if self._swarm.addresses else "starting")
            await asyncio.sleep(STATUS_SECONDS)

    def _tell(self, addresses: Sequence[str]) -> None:
        log.info("others join by these addresses (swarm.initial_peers)")
        try:
            click.echo("\n".join(addresses))
        except OSError as error:  # whoever read them has gone, or the disk is full: others still join by this peer
            log.warning("the addresses cannot be printed; `sapo-node status` has them", reason=str(error))

    def _write_addresses(self, file: Path, addresses: list[str]) -> None:
        """Write the file for `--addresses`. Raises SapoError the first time only: later its readers have the addresses
        from before, others still join by this peer, and the file is tried again."""
        try:
            durable.replace(file, "".join(f"{address}\n" for address in addresses).encode())
            file.chmod(0o644)  # for the nodes of other users: nothing in it is secret
        except OSError as error:
            fault = f"--addresses: {file} cannot be written: {error.strerror}"
            if not self._filed:
                raise SapoError(fault) from error
            if fault != self._fault:
                log.warning(f"{fault}. It is tried again")
            self._fault = fault
        else:
            self._filed, self._fault = addresses, ""

    def _write_status(self, state: State, reason: str = "") -> None:
        swarm = self._swarm
        status = NodeStatus(
            pid=os.getpid(),
            state=state,
            role="bootstrap",
            started_at=self._started_at,
            updated_at=time.time(),
            peer_id=self._identity.peer_id,
            addresses=swarm.addresses,
            peers=swarm.peers,
            found=swarm.book.counts(),
            unreached=swarm.unreached,
            reason=reason,
            swarm=self._config.swarm.name,
        )
        try:
            self._status_file.write(status)
        except OSError as error:  # a full disk must not take the swarm's entrance away
            log.warning("a record could not be written", file="node.json", reason=str(error))


def worth_telling(addresses: Sequence[str]) -> list[str]:
    """The addresses to hand around: those of loopback only if there are no others."""
    outside = [a for a in addresses if reach(a) is not Reach.LOOPBACK]
    return outside or list(addresses)
