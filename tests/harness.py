"""Drives the real program as a user does: `swarm.node("a").start()`, then look at what it says and wrote.

Every wait is bounded and tells what it waited for, with the end of the node's log. Whatever a test leaves running is
killed by pid when the `Swarm` closes, and `leftovers` finds processes of a node that outlived it.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from sapo_node import scratch
from sapo_node.monitor import history
from sapo_node.monitor.metrics import EvalRecord, EventRecord, RoundRecord
from sapo_node.monitor.status import NodeStatus, read_status

REPOSITORY = Path(__file__).parent.parent
START_SECONDS = 120.0  # four nodes that start at once on two busy cores

# Small and quick, on loopback only; tests override what they are about.
BASE: dict[str, Any] = {
    "node": {"threads": 1, "drain_seconds": 60},
    "tasks": {
        "mixture": [
            {"name": "gcd", "config": {"min_value": 2, "max_value": 40}},
            {"name": "basic_arithmetic", "config": {"min_terms": 2, "max_terms": 2}},
        ],
        "eval_every": 0,
        "eval_questions": 30,
    },
    "inference": {"max_prompt_tokens": 256, "max_completion_tokens": 16},
    "swarm": {"name": "test", "listen": ["/ip4/127.0.0.1/tcp/0"], "public_peers": False},
    "training": {"model": "demo", "producer_gradients": True, "checkpoint_every": 5},
}


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`, section by section; lists and scalars are replaced."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def free_port() -> int:
    """A TCP port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def sapo_node(*arguments: str | Path, timeout: float = 60, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the program to its end."""
    command = [sys.executable, "-m", "sapo_node", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, env={**os.environ, **env}
    )


class Node:
    """One node in a data directory of its own; may be started again after it ended."""

    def __init__(self, name: str, directory: Path, config: dict[str, Any]) -> None:
        self.name = name
        self.directory = directory
        self.data = directory / "data"
        self.config_path = directory / "node.yaml"
        self.log_path = directory / "node.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.module = "sapo_node"  # the program that `start` runs
        directory.mkdir(parents=True, exist_ok=True)
        self.configure(merge(config, {"node": {"data_dir": str(self.data)}}))

    def configure(self, config: dict[str, Any]) -> None:
        """Write node.yaml."""
        self.config = config
        self.config_path.write_text(yaml.safe_dump(config))

    def start(self, *arguments: str) -> "Node":
        """`sapo-node start --config node.yaml`; returns at once."""
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.module, "start", "--config", str(self.config_path), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        return self

    # -- what it says -------------------------------------------------------------------------------------------------

    @property
    def log(self) -> str:
        """All it printed so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    @property
    def status(self) -> NodeStatus | None:
        """Its node.json."""
        return read_status(self.data / "node.json")

    @property
    def rounds(self) -> list[RoundRecord]:
        """The rounds it recorded."""
        return history.rounds(history.read(self.data / history.FILE_NAME))

    @property
    def evals(self) -> list[EvalRecord]:
        """The evaluations it recorded."""
        return history.evals(history.read(self.data / history.FILE_NAME))

    @property
    def events(self) -> list[EventRecord]:
        """Whatever else it recorded."""
        return [r for r in history.read(self.data / history.FILE_NAME) if isinstance(r, EventRecord)]

    def address(self) -> str:
        """Full multiaddr by which others join it; waits until it is known."""
        self.wait(lambda: bool(self.status and self.status.addresses), "an address", START_SECONDS)
        status = self.status
        assert status is not None
        return status.addresses[0]

    # -- waiting ------------------------------------------------------------------------------------------------------

    def wait(self, condition: Callable[[], bool], what: str, seconds: float, *, may_end: bool = False) -> "Node":
        """Wait until `condition` holds; fails with the log's end when it does not, or when the node ended before."""
        end = time.monotonic() + seconds
        while not condition():
            ended = self.process is not None and self.process.poll() is not None
            if ended and not may_end and not condition():
                code = self.process.returncode if self.process else None
                raise AssertionError(f"{self.name} ended with {code} before {what}\n{self.log[-4000:]}")
            if time.monotonic() > end:
                raise AssertionError(f"{self.name}: no {what} within {seconds:.0f} s\n{self.log[-4000:]}")
            time.sleep(0.1)
        return self

    def wait_rounds(self, count: int, seconds: float = START_SECONDS) -> "Node":
        """Wait until it took `count` rounds in all."""
        return self.wait(lambda: bool(self.rounds) and self.rounds[-1].round >= count, f"round {count}", seconds)

    def wait_exit(self, seconds: float = 60.0) -> int:
        """Wait until the process ended; its exit code."""
        assert self.process is not None
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end within {seconds:.0f} s\n{self.log[-4000:]}") from None

    # -- ending -------------------------------------------------------------------------------------------------------

    def signal(self, number: signal.Signals) -> "Node":
        """Send a signal to the node's process alone."""
        assert self.process is not None
        self.process.send_signal(number)
        return self

    def stop(self, seconds: float = 60.0) -> int:
        """SIGTERM and wait; the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait_exit(seconds)

    def kill(self) -> None:
        """kill -9, as a power cut would."""
        self.signal(signal.SIGKILL)
        self.wait_exit(10)


class Swarm:
    """The nodes of one test."""

    def __init__(self, directory: Path, base: dict[str, Any] | None = None) -> None:
        self.directory = directory
        self.base = BASE if base is None else base
        self.nodes: list[Node] = []

    def node(self, name: str, **over: Any) -> Node:
        """A node, not started; keywords are sections of its config laid over the base."""
        node = Node(name, self.directory / name, merge(self.base, over))
        self.nodes.append(node)
        return node

    def close(self) -> None:
        """Kill what still runs, and remove what a killed node leaves for its next start to remove."""
        for node in self.nodes:
            if node.process is not None and node.process.poll() is None:
                node.process.kill()
                node.process.wait(10)
            if node.data.exists():
                shutil.rmtree(scratch.own_folder(Path(tempfile.gettempdir()), node.data), ignore_errors=True)


@contextlib.contextmanager
def swarm(directory: Path) -> Iterator[Swarm]:
    """A swarm that ends with the block."""
    made = Swarm(directory)
    try:
        yield made
    finally:
        made.close()


def descendants(pid: int) -> set[int]:
    """Process ids below `pid`, itself left out."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: set[int] = set()
    todo = [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            found.add(child)
            todo.append(child)
    return found


def alive(pids: set[int]) -> set[int]:
    """Those of `pids` that still run (zombies do not)."""
    running = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            if (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                running.add(pid)
    return running


def wait_gone(pids: set[int], seconds: float = 5.0) -> set[int]:
    """Wait until none of `pids` runs; those that still do at the end."""
    end = time.monotonic() + seconds
    while (left := alive(pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return left
