"""One attacker's process: a member of the swarm with a key and a p2pd of its own, that does one kind of harm.

    python -m hostile_bench.attacker JOB.json

A job with `busy` makes the same process burn that many CPU-seconds a second instead: it has loaded what an attacker has
and runs a p2pd too, but joins nobody. It is what an attacker is compared with, since both take the same cores, and both
share the same pages with the nodes, which a proportional set size depends on.

Everything stays on 127.0.0.1, at most OPERATIONS_A_SECOND, and ends with the bench.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvloop

from hostile_bench import procfs
from hostile_bench.member import Member
from sapo_node import workers
from sapo_node.identity import Identity
from sapo_node.swarm.p2p import Network

OPERATIONS_A_SECOND: Final = 200.0
TOGETHER: Final = 8  # operations at the same time: one that waits for a deadline must not make the attacker idle
OPERATION_SECONDS: Final = 15.0
BURN_SECONDS: Final = 0.01
REST_SECONDS: Final = 0.02
MOST_CREDIT: Final = 0.2  # CPU-seconds that may be burnt without a rest
LISTEN: Final = ["/ip4/127.0.0.1/tcp/0"]

Operation = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Job:
    """What the bench writes down for an attacker."""

    kind: str
    number: int  # from 0; attackers of one kind differ by it
    swarm: str
    nodes: list[str]  # addresses with /p2p/; the first is joined by, the others are what announcements would tell
    folder: str
    marker: str  # path that planted code tries to make
    tasks: list[tuple[str, dict[str, Any]]]
    busy: float | None
    parent: int


class Pace:
    """At most so many operations a second, by all that share it."""

    def __init__(self, a_second: float) -> None:
        self._pause = 1.0 / a_second
        self._next = 0.0

    async def turn(self) -> None:
        """Wait for the next place."""
        now = time.monotonic()
        self._next = max(now, self._next + self._pause)
        await asyncio.sleep(self._next - now)


class Counts:
    """Operations done and failed, written down for the bench."""

    def __init__(self, file: Path) -> None:
        self.done = self.failed = 0
        self.last = ""
        self._file = file

    async def write(self) -> None:
        """Keep the file up to date until cancelled."""
        while True:
            temporary = self._file.with_suffix(".new")
            temporary.write_text(json.dumps({"done": self.done, "failed": self.failed, "last": self.last}))
            temporary.replace(self._file)
            await asyncio.sleep(0.5)


async def repeat(operation: Operation, pace: Pace, counts: Counts) -> None:
    """One operation after another. One that fails is an attack that was repelled."""
    while True:
        await pace.turn()
        try:
            async with asyncio.timeout(OPERATION_SECONDS):
                await operation()
        except Exception as error:  # noqa: BLE001  whatever being refused looks like: it is counted, and told
            counts.failed += 1
            counts.last = repr(error)[:300]
        counts.done += 1


async def attack(job: Job) -> None:
    """Join, then do harm until cancelled."""
    from hostile_bench import network_kinds, work_kinds

    folder = Path(job.folder)
    makers = {**network_kinds.KINDS, **work_kinds.KINDS}
    member = await Member.start(folder, job.swarm, job.nodes, LISTEN)
    counts, pace = Counts(folder / "counts.json"), Pace(OPERATIONS_A_SECOND)
    try:
        async with asyncio.TaskGroup() as tasks:
            operation = await makers[job.kind](job, member, tasks)
            (folder / "ready").touch()
            tasks.create_task(counts.write())
            for _ in range(TOGETHER):
                tasks.create_task(repeat(operation, pace, counts))
    finally:
        await member.close()


def cpu_seconds(p2pd: int) -> float:
    """CPU time of this process and its p2pd."""
    return time.process_time() + procfs.parse_stat(Path(f"/proc/{p2pd}/stat").read_text()).cpu_seconds


async def burn(job: Job, rate: float) -> None:
    """Use `rate` CPU-seconds a second until cancelled."""
    from hostile_bench import work_kinds

    folder = Path(job.folder)
    work_kinds.load(job)
    identity = Identity.load_or_create(folder / "identity.key")
    network = await Network.start(identity, work_dir=folder / "run", listen=LISTEN)
    try:
        (folder / "ready").touch()
        spent, at = cpu_seconds(network.daemon.pid), time.monotonic()
        credit = 0.0
        while True:
            now, used = time.monotonic(), cpu_seconds(network.daemon.pid)
            # What could not be burnt in time is not made up for: it would be burnt when the attackers would rest.
            credit = min(MOST_CREDIT, credit + rate * (now - at) - (used - spent))
            spent, at = used, now
            until = time.process_time() + min(credit, BURN_SECONDS)
            while time.process_time() < until:
                pass
            await asyncio.sleep(0.0 if credit > BURN_SECONDS else REST_SECONDS)
    finally:
        await network.close()


def main() -> None:
    """Run the job until a SIGTERM, or until the bench is gone."""
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    workers.die_with_parent(job.parent)
    os.umask(0o077)

    async def run() -> None:
        work = asyncio.ensure_future(attack(job) if job.busy is None else burn(job, job.busy))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)
        try:
            await work
        except asyncio.CancelledError:
            return

    uvloop.run(run())


if __name__ == "__main__":
    main()
