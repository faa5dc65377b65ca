"""The settings of a bootstrap peer and what it hands around; tests/e2e/test_bootstrap.py runs it."""

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sapo_node import config_load, durable
from sapo_node.commands import bootstrap
from sapo_node.config import NodeConfig
from sapo_node.datadir import DataDir
from sapo_node.errors import ConfigError, SapoError


def test_without_a_chosen_port_it_takes_one_that_stays() -> None:
    assert bootstrap.settings(config_load.load(None, {})).swarm.listen == [bootstrap.DEFAULT_LISTEN]


def test_a_chosen_port_stays_chosen() -> None:
    loaded = config_load.load(None, {"SAPO_NODE_SWARM__LISTEN": '["/ip4/127.0.0.1/tcp/7"]'})
    assert bootstrap.settings(loaded).swarm.listen == ["/ip4/127.0.0.1/tcp/7"]


def test_without_a_network_there_is_nothing_to_serve() -> None:
    with pytest.raises(ConfigError, match=r"swarm\.enabled"):
        bootstrap.settings(config_load.load(None, {}, ["swarm.enabled=false"]))


def test_loopback_is_handed_around_only_for_want_of_others() -> None:
    local, outside = "/ip4/127.0.0.1/tcp/1/p2p/x", "/dns4/example.org/tcp/1/p2p/x"
    assert bootstrap.worth_telling([local, outside]) == [outside]
    assert bootstrap.worth_telling([local]) == [local]


def test_it_needs_no_model_code() -> None:
    code = (
        "import sys, sapo_node.commands.bootstrap; print({'torch', 'transformers', 'reasoning_gym'} & {*sys.modules})"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


# Disks that fill up


class Full:
    """A disk that is full while `on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on = True
        replace = durable.replace

        def full(path: Path, data: bytes) -> None:
            if self.on:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            replace(path, data)

        monkeypatch.setattr(durable, "replace", full)


def peer(tmp_path: Path) -> bootstrap.BootstrapPeer:
    config = NodeConfig.model_validate({"node": {"data_dir": tmp_path}})
    data = DataDir(tmp_path)
    data.prepare()
    return bootstrap.BootstrapPeer(config, data, tmp_path / "peers.txt")


def test_a_file_that_cannot_be_written_ends_only_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, file = peer(tmp_path), tmp_path / "peers.txt"
    warnings: list[str] = []
    monkeypatch.setattr(bootstrap.log, "warning", warnings.append)
    disk = Full(monkeypatch)
    with pytest.raises(SapoError, match="No space left"):
        made._write_addresses(file, ["/a"])
    disk.on = False
    made._write_addresses(file, ["/a"])
    disk.on = True
    for _ in range(3):
        made._write_addresses(file, ["/b"])
    assert file.read_text() == "/a\n"
    assert len(warnings) == 1
    disk.on = False
    made._write_addresses(file, ["/b"])
    assert file.read_text() == "/b\n"


def test_addresses_that_change_on_a_full_disk_are_written_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, file = peer(tmp_path), tmp_path / "peers.txt"
    monkeypatch.setattr(bootstrap, "STATUS_SECONDS", 0.01)
    disk = Full(monkeypatch)

    async def watched(until: str) -> None:
        watch = asyncio.create_task(made._watch())
        async with asyncio.timeout(5.0):
            while not watch.done() and not (file.exists() and file.read_text() == until):
                await asyncio.sleep(0.01)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)

    async def body() -> None:
        disk.on = False
        made._swarm.addresses = ["/ip4/8.8.8.8/tcp/1"]
        await watched("/ip4/8.8.8.8/tcp/1\n")
        disk.on, made._swarm.addresses = True, ["/ip4/9.9.9.9/tcp/1"]
        asyncio.get_running_loop().call_later(0.2, setattr, disk, "on", False)
        await watched("/ip4/9.9.9.9/tcp/1\n")

    asyncio.run(body())
    assert file.read_text() == "/ip4/9.9.9.9/tcp/1\n"


def test_a_reader_of_the_addresses_that_goes_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_text: str) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    monkeypatch.setattr(bootstrap.click, "echo", gone)
    peer(tmp_path)._tell(["/a"])
