"""One run: four honest nodes as `sapo-node swarm` starts them, four others beside them, and what is measured of both.

The measured time of a node begins with its first round that ends after all others are at work, and has a fixed number
of rounds. CPU time is sampled, and taken between the moments at which the node's own records say that rounds ended.
Nodes take further rounds until the slowest has all of its own, so that none of them trains among fewer than the rest.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from hostile_bench import audit, procfs
from hostile_bench.report import ATTACKERS, BUSY, NODES, Result
from sapo_node import config_load, local_swarm
from sapo_node.identity import Identity
from sapo_node.local_swarm import Node
from sapo_node.monitor import history
from sapo_node.monitor.metrics import RoundRecord

TICK_SECONDS: Final = 0.5
POOL_SECONDS: Final = 2.0
UP_SECONDS: Final = 300.0  # for nodes, then for the others; both load libraries, on few cores
ROUND_SECONDS: Final = 60.0  # a round takes a second or a few; when all take longer than this, the run has failed
END_SECONDS: Final = 75.0  # drain_seconds of a node and a margin
PSS_SAMPLES: Final = 3

PARTS: Final = ("node", "p2pd", "policy_worker", "scorer_worker")
"""Of a node; the last three by a word of their command lines."""

SETTINGS: Final = ["training.rule=capped", "node.threads=1", "tasks.eval_every=0"]
"""On top of configs/demo.yaml. Held-out scores are left out: they would be part of some rounds and not of others."""

REPOSITORY: Final = Path(__file__).resolve().parents[3]


class RunFailed(Exception):
    """A run that measured nothing; the message says why."""


@dataclass
class Other:
    """An attacker, or a non-attacker that is as busy."""

    folder: Path
    process: "subprocess.Popen[bytes]"

    @property
    def ready(self) -> bool:
        """Whether it is at work."""
        return (self.folder / "ready").exists()

    def check(self) -> None:
        """Raise RunFailed when it has ended by itself."""
        if (code := self.process.poll()) is not None:
            raise RunFailed(f"an attacker ended with {code}:\n{(self.folder / 'log').read_text()[-2000:]}")

    def counts(self) -> dict[str, Any]:
        """Its operations so far."""
        file = self.folder / "counts.json"
        return dict(json.loads(file.read_text())) if file.exists() else {"done": 0, "failed": 0, "last": ""}


@dataclass
class Trace:
    """CPU time of a process and all below it, sampled, and who of them was there."""

    pid: int
    times: list[float] = field(default_factory=list)
    cpu: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    alive: dict[tuple[int, int], str] = field(default_factory=dict)  # (pid, begun) -> its command line
    gone: list[str] = field(default_factory=list)

    def take(self, processes: dict[int, procfs.Process], now: float) -> None:
        """Add a sample."""
        tree = procfs.below(processes, self.pid)
        self.times.append(now)
        here = {(one.pid, one.begun) for one in tree}
        self.gone += [self.alive.pop(key) for key in set(self.alive) - here]
        for key in here - set(self.alive):
            self.alive[key] = procfs.command(key[0])
        sums = dict.fromkeys(PARTS, 0.0)
        for one in tree:
            sums[part_of(self.alive[one.pid, one.begun])] += one.cpu_seconds
        for part, seconds in sums.items():
            self.cpu[part].append(seconds)

    def between(self, begin: float, end: float) -> dict[str, float]:
        """CPU-seconds of each part from one moment to another, in seconds since 1970."""
        return {
            part: procfs.at(self.times, seconds, end) - procfs.at(self.times, seconds, begin)
            for part, seconds in self.cpu.items()
        }


@dataclass(frozen=True)
class Window:
    """The measured rounds of one node."""

    begin: float
    end: float


def window(records: Sequence[RoundRecord], since: float, rounds: int) -> Window | None:
    """From the first round that ended after `since` (seconds since 1970) to the one `rounds` later, if that ended."""
    ends = [record.time for record in records if record.time >= since]
    return Window(ends[0], ends[rounds]) if len(ends) > rounds else None


def part_of(command: str) -> str:
    """Which of PARTS a process is, by its command line. What an ended one used is its parent's from then on."""
    return next((part for part in PARTS[1:] if part in command), PARTS[0])


def lost(gone: Sequence[str]) -> tuple[int, int]:
    """How many of the processes that went were p2pd or policy workers, and how many scorers; by their command lines."""
    parts = [part_of(one) for one in gone]
    return parts.count("p2pd") + parts.count("policy_worker"), parts.count("scorer_worker")


class Run:
    """The state of one run; `measure` is all there is to call."""

    def __init__(self, folder: Path, kind: str, beside: str, rounds: int, rate: float) -> None:
        """`rate`: CPU-seconds a second of each non-attacker."""
        self.folder, self.kind, self.beside, self.rounds, self.rate = folder, kind, beside, rounds, rate
        self.base = config_load.load(local_swarm.demo_config_path(), {}, SETTINGS).config
        (folder / "logs").mkdir()
        self.nodes = self._prepare()
        self.marker = folder / "executed"
        self.others: list[Other] = []
        self.traces: list[Trace] = []
        self.pools = [audit.PoolReader(node.data.pool) for node in self.nodes]
        self.followers = [history.Follower(node.data.history) for node in self.nodes]
        self.records: list[list[RoundRecord]] = [[] for _ in self.nodes]
        self._read_pools_at = 0.0

    def measure(self, repeat: int) -> Result:
        """Run it. Raises RunFailed."""
        with self._running():
            self._wait(lambda: all(len(found) >= 2 for found in self.records), UP_SECONDS, "four nodes that train")
            self._start_others()
            self._wait(lambda: all(one.ready for one in self.others), UP_SECONDS, "the others to be at work")
            begun = time.time()
            others = [Trace(one.process.pid) for one in self.others]
            self.traces += others
            limit = UP_SECONDS + self.rounds * ROUND_SECONDS
            self._wait(lambda: self._measured(begun), limit, f"{self.rounds} rounds")
            windows = self._windows(begun)
            pss = self._pss()
            crashes, scorers = lost([name for trace in self.traces[:NODES] for name in trace.gone])
            counts = [one.counts() for one in self.others]
            ended = [node.exit_code is not None for node in self.nodes]
        crashes += sum(
            early or node.killed or node.exit_code != 0 for early, node in zip(ended, self.nodes, strict=True)
        )
        for pool in self.pools:
            pool.collect()
        spans = [
            (one, trace.between(one.begin, one.end))
            for trace, one in zip(self.traces[:NODES], windows, strict=True)
            if one
        ]
        if not spans:
            raise RunFailed(f"all nodes crashed; the logs are in {self.folder}")
        end = max(one.end for one, _ in spans)
        cpu = {part: sum(span[part] for _, span in spans) / (len(spans) * self.rounds) for part in PARTS}
        used = sum(sum(trace.between(begun, end).values()) for trace in others)
        groups = [one for pool in self.pools for one in pool.external.values()]
        found = audit.origins(groups, {k: v for pool in self.pools for k, v in pool.own.items()}, self._books())
        trained = [one for one in groups if one.uses]
        false = asyncio.run(audit.wrong(trained, self.base.swarm.name))
        tokenizer = REPOSITORY / "sapo_node" / "assets" / "demo" / "tokenizer.json"
        return Result(
            repeat=repeat,
            kind=self.kind,
            beside=self.beside,
            rounds=self.rounds,
            seconds=end - begun,
            cpu_a_round=sum(cpu.values()),
            cpu_node=cpu["node"],
            cpu_p2pd=cpu["p2pd"],
            cpu_policy=cpu["policy_worker"],
            cpu_scorer=cpu["scorer_worker"],
            pss_mib=pss,
            others_cpu=used / (end - begun),
            operations=sum(one["done"] for one in counts),
            failed=sum(one["failed"] for one in counts),
            crashes=crashes,
            scorer_restarts=scorers,
            external=len(groups),
            hostile=found.hostile,
            forged=found.forged,
            unproven=found.unproven,
            trained=len(trained),
            wrong_tokens=audit.tokens(false, tokenizer),
            executed=int(self.marker.exists()),
        )

    # Before

    def _prepare(self) -> list[Node]:
        with local_swarm.reserved_ports(NODES) as ports:
            return local_swarm.write_nodes(self.folder, self.base, ports, None, prefer=True)

    def _start_others(self) -> None:
        addresses = []
        for node in self.nodes:
            node.look()
            found = node.status.addresses if node.status else []
            addresses += [one for one in found if one.startswith("/ip4/127.0.0.1/")][:1]
        if len(addresses) != NODES:
            raise RunFailed("a node does not say where it listens")
        for number in range(NODES):
            folder = self.folder / f"other-{number + 1}"
            folder.mkdir()
            job = {
                "kind": self.kind,
                "number": number,
                "swarm": self.base.swarm.name,
                "nodes": addresses,
                "folder": str(folder),
                "marker": str(self.marker),
                "tasks": [(entry.name, entry.config) for entry in self.base.tasks.mixture],
                "busy": self.rate if self.beside == BUSY else None,
                "parent": os.getpid(),
            }
            (folder / "job.json").write_text(json.dumps(job))
            path = os.pathsep.join([str(REPOSITORY / "scripts" / "bench"), str(REPOSITORY)])
            with (folder / "log").open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "hostile_bench.attacker", str(folder / "job.json")],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                    start_new_session=True,  # as nodes are: Linux shares cores by session (autogroup)
                )
            self.others.append(Other(folder, process))

    # During

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Start the nodes; in the end stop the others, then the nodes, and leave nothing running."""
        try:
            for node in self.nodes:
                local_swarm.spawn(node, [sys.executable, "-m", "sapo_node", "start", "--config"])
            self.traces = [Trace(node.process.pid) for node in self.nodes if node.process]
            yield
        finally:
            for one in self.others:
                one.process.send_signal(signal.SIGTERM)
            for node in self.nodes:
                node.signal(signal.SIGTERM)
            deadline = time.monotonic() + END_SECONDS
            while time.monotonic() < deadline and not self._over():
                time.sleep(TICK_SECONDS)
            for one in self.others:
                one.process.kill()
                one.process.wait()
            for node in self.nodes:
                node.signal(signal.SIGKILL)
                if node.process:
                    node.process.wait()

    def _over(self) -> bool:
        nodes = all(node.process is None or node.exit_code is not None for node in self.nodes)
        return nodes and all(one.process.poll() is not None for one in self.others)

    def _wait(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        """Sample until `done()`. Raises RunFailed when that takes too long, or what was started last ends."""
        deadline = time.monotonic() + seconds
        while not done():
            for node in self.nodes:
                if node.exit_code is not None and not self.others:
                    raise RunFailed(f"{node.name} ended with {node.exit_code}:\n{node.log.read_text()[-3000:]}")
            if time.monotonic() > deadline:
                raise RunFailed(f"waited {seconds:.0f} s for {what}; the logs are in {self.folder}")
            self._tick()
            time.sleep(TICK_SECONDS)

    def _tick(self) -> None:
        processes, now = procfs.look(), time.time()
        for trace in self.traces:
            trace.take(processes, now)
        for follower, found in zip(self.followers, self.records, strict=True):
            found += history.rounds(follower.new())
        for one in self.others:
            one.check()
        if time.monotonic() - self._read_pools_at > POOL_SECONDS:
            self._read_pools_at = time.monotonic()
            for pool in self.pools:
                pool.collect()

    def _windows(self, begun: float) -> list[Window | None]:
        return [window(found, begun, self.rounds) for found in self.records]

    def _measured(self, begun: float) -> bool:
        """Whether every node has its rounds, or has crashed."""
        return all(
            found or node.exit_code is not None for found, node in zip(self._windows(begun), self.nodes, strict=True)
        )

    def _pss(self) -> float:
        """MiB of a node with all below it: mean of the nodes and of some looks."""
        found = []
        for _ in range(PSS_SAMPLES):
            self._tick()
            processes = procfs.look()
            trees = [[one.pid for one in procfs.below(processes, trace.pid)] for trace in self.traces[:NODES]]
            found.append(fmean(procfs.pss_mib(tree) for tree in trees if tree) if any(trees) else 0.0)
            time.sleep(TICK_SECONDS)
        return fmean(found)

    # After

    def _books(self) -> dict[str, dict[str, set[str]]]:
        """What each attacker wrote down, by its peer id."""
        books: dict[str, dict[str, set[str]]] = {}
        if self.beside != ATTACKERS:
            return books
        for one in self.others:
            file = one.folder / "book.jsonl"
            peer_id = Identity.load(one.folder / "identity.key").peer_id
            books[peer_id] = {}
            if file.exists():
                with file.open(encoding="utf-8") as lines:
                    books[peer_id] = audit.read_book(lines)
        return books
