"""`sapo-node swarm`: several real nodes on this machine, watched in one live table, with a verdict at the end.

Each node is a process of its own, `sapo-node start` with its own settings, key, data directory and loopback port. This
module writes their settings, starts them, looks at what they write about themselves, and ends them. It carries nothing
between them: they find each other and exchange groups over the network as any nodes do.

Nothing is left running. A node dies with this process (where the kernel offers that: Linux), the first Ctrl-C lets the
nodes end their round, the second kills them, and a node that does not end in time is killed and named.
"""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from rich.console import Console

from sapo_node import config_load, fit, machine, workers
from sapo_node.config import NodeConfig
from sapo_node.datadir import DataDir
from sapo_node.errors import ConfigError, SapoError
from sapo_node.identity import Identity
from sapo_node.monitor import history, live
from sapo_node.monitor.log import clean
from sapo_node.monitor.metrics import Record
from sapo_node.monitor.status import NodeStatus, StatusUnreadable, read_status

DEFAULT_MINUTES = 4.0  # the demo's rise is visible in it
PREFERENCE = 3.0  # weight of a node's preferred tasks under --demo, where the others have 1
TICK_SECONDS = 0.25
STALL_SECONDS = 3600.0  # without any node moving on; a round of a large model on a CPU takes minutes
END_MARGIN = 15.0  # beyond drain_seconds: a node's children and its network end after its checkpoint is written
LAST_LINES = 10  # of a dead node's log
TAIL_BYTES = 1 << 16  # of a log, in which they are looked for
MAX_NODES = 64
INTERRUPTED = 130

# Ports are taken from below the range that kernels hand out by themselves, so no outgoing connection can take one
# between our check and the node's start.
PORTS = range(20_000, 32_000)
PORT_TRIES = 200


@dataclass
class Node:
    """One node of the run."""

    name: str
    config_path: Path
    data: DataDir
    log: Path  # all that the process writes to its output
    started: float = 0.0
    process: "subprocess.Popen[bytes] | None" = None
    status: NodeStatus | None = None
    killed: bool = False

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative after a signal."""
        return None if self.process is None else self.process.poll()

    @property
    def ended(self) -> str:
        """How it ended: finished or failed; empty while it runs."""
        code = self.exit_code
        return "" if code is None else "finished" if code == 0 else "failed"

    def look(self) -> None:
        """Read what the node last said of itself. A status it cannot make sense of is as good as none."""
        with contextlib.suppress(StatusUnreadable):
            self.status = read_status(self.data.status) or self.status

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; SIGKILL goes to its whole process group."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                self.killed = self.killed or self.exit_code is None
                os.killpg(self.process.pid, number)
            elif self.exit_code is None:
                os.kill(self.process.pid, number)


@dataclass
class Run:
    """The state of a run."""

    nodes: list[Node]
    seconds: float | None
    rounds: int | None
    end_seconds: float
    begun: float = field(default_factory=time.monotonic)
    ending_at: float | None = None  # when the nodes were told to end
    moved_at: float = field(default_factory=time.monotonic)
    progress: list[tuple[str, int]] = field(default_factory=list)
    interrupts: int = 0
    reported: set[str] = field(default_factory=set)

    def end(self) -> None:
        """Tell every node to end its round and stop."""
        if self.ending_at is None:
            self.ending_at = time.monotonic()
            for node in self.nodes:
                node.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill what still runs, at once."""
        for node in self.nodes:
            node.signal(signal.SIGKILL)

    def look(self) -> list[live.Row]:
        """What the nodes say of themselves now, noting whether any of them has moved on."""
        for node in self.nodes:
            node.look()
        rows = [live.Row(name=node.name, status=node.status, ended=node.ended) for node in self.nodes]
        progress = [(row.state, row.status.round if row.status else 0) for row in rows]
        if progress != self.progress:
            self.progress, self.moved_at = progress, time.monotonic()
        return rows

    def keep_time(self, now: float) -> None:
        """End the nodes when their time is over or nothing moves any more, and kill those that do not end."""
        if (self.seconds is not None and now - self.begun >= self.seconds) or now - self.moved_at > STALL_SECONDS:
            self.end()
        if self.ending_at is not None and now - self.ending_at > self.end_seconds:
            self.kill()

    @property
    def over(self) -> bool:
        """Whether every node that was started has ended."""
        return all(node.process is None or node.exit_code is not None for node in self.nodes)


def run(
    *,
    nodes: int,
    rounds: int | None,
    minutes: float | None,
    demo: bool,
    config_path: Path | None,
    sets: Sequence[str],
    directory: Path | None,
    command: Sequence[str] | None = None,
) -> int:
    """Run `nodes` nodes until each has taken `rounds` rounds, or for `minutes` (DEFAULT_MINUTES without either).

    Returns 0 only if every node finished with 0, 130 after Ctrl-C, else 1. Raises ConfigError for settings that cannot
    be used and SapoError for a folder that cannot. `command` is what starts a node, before the path of its settings.
    """
    if not 1 <= nodes <= MAX_NODES:
        raise ConfigError([f"--nodes must be from 1 to {MAX_NODES}, not {nodes}"])
    if demo and config_path:
        raise ConfigError(["--demo brings its own settings; leave out --config, or change single ones with --set"])
    # Without a file the demo's settings serve too: the embedded model learns nothing from harder tasks.
    base = config_load.load(config_path or demo_config_path(), os.environ, sets).config
    fit.check_model(base, machine.look(), nodes)
    fit.refuse_missing(base)
    seconds = minutes * 60 if minutes else None if rounds else DEFAULT_MINUTES * 60
    folder = _make_folder(directory)
    with reserved_ports(nodes) as ports:
        prepared = write_nodes(folder, base, ports, rounds, prefer=demo)
    state = Run(prepared, seconds, rounds, base.node.drain_seconds + END_MARGIN)
    console = Console()
    start = command or (sys.executable, "-m", "sapo_node", "start", "--config")
    with _signals(state):
        try:
            for node in state.nodes:
                if state.ending_at is None:
                    spawn(node, start)
            if state.ending_at is not None:  # Ctrl-C came while a node was being started, and may have missed it
                for node in state.nodes:
                    node.signal(signal.SIGTERM)
            _watch(state, console)
        finally:
            state.kill()  # also sweeps up what an ended node may have left in its process group
            for node in state.nodes:
                if node.process:
                    node.process.wait()
    if state.interrupts > 1:
        console.print(f"Ended at once. Logs: {folder / 'logs'}", markup=False, highlight=False, soft_wrap=True)
        return INTERRUPTED
    _conclude(state, folder, console)
    if state.interrupts:
        return INTERRUPTED
    return 0 if all(node.exit_code == 0 for node in state.nodes) else 1


# ---- before ----------------------------------------------------------------------------------------------------------


def demo_config_path() -> Path:
    """configs/demo.yaml, in a checkout or in an installed package. Raises SapoError when it is in neither."""
    package = Path(__file__).resolve().parent
    for path in (package.parent / "configs" / "demo.yaml", package / "assets" / "demo.yaml"):
        if path.is_file():
            return path
    raise SapoError("the demo's settings are missing from this installation; install sapo-node again")


def settings(
    base: NodeConfig, number: int, *, ports: Sequence[int], peer_ids: Sequence[str], rounds: int | None, prefer: bool
) -> dict[str, Any]:
    """Settings of node `number` (from 0), as plain values: what is set in `base`, and what is its own.

    It joins by the first node and by the two after itself, so that no node is needed by all. With `prefer` every node
    draws other tasks more often. Where there is no more than one core a node, each trainer gets one thread.
    """
    count = len(ports)
    data = base.model_dump(mode="json", exclude_unset=True)
    node, swarm = data.setdefault("node", {}), data.setdefault("swarm", {})
    node["data_dir"] = f"node-{number + 1}"
    if rounds is not None:
        node["max_rounds"] = rounds
    if base.node.threads == 0 and count >= (os.cpu_count() or 1):
        node["threads"] = 1  # more threads than cores only wait for each other
    if base.node.seed is not None:
        node["seed"] = base.node.seed + number
    swarm.update(
        listen=[f"/ip4/127.0.0.1/tcp/{ports[number]}"],
        announce=[],
        nat_port_map=False,
        public_peers=False,
        rendezvous=False,
        peers_file=None,
    )
    if base.swarm.enabled:
        others = dict.fromkeys([0, (number + 1) % count, (number + 2) % count])
        swarm["initial_peers"] = [f"/ip4/127.0.0.1/tcp/{ports[k]}/p2p/{peer_ids[k]}" for k in others if k != number]
    if prefer:
        entries = [entry.model_dump(mode="json", exclude_unset=True) for entry in base.tasks.mixture]
        shares = min(count, len(entries))
        for index, entry in enumerate(entries):
            factor = PREFERENCE if index % shares == number % shares else 1.0
            entry["weight"] = entry.get("weight", 1.0) * factor
        data.setdefault("tasks", {})["mixture"] = entries
    return data


def _make_folder(directory: Path | None) -> Path:
    """The run's empty folder, absolute. Raises SapoError."""
    chosen = directory or Path("sapo-swarm") / datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = chosen.absolute()
    try:
        if folder.exists() and any(folder.iterdir()):
            raise SapoError(f"{folder} is not empty; name another folder with --dir, or leave it out")
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SapoError(f"{folder} cannot be made: {error.strerror}; name another folder with --dir") from error
    return folder


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Free loopback ports, held until the block ends. Raises SapoError when none is found."""
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        for port in random.sample(PORTS, PORT_TRIES):
            taken = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            with contextlib.suppress(OSError):
                taken.bind(("127.0.0.1", port))
                ports.append(port)
            if len(ports) == count:
                break
        else:
            raise SapoError(f"no {count} free ports of 127.0.0.1 were found from {PORTS.start} to {PORTS.stop - 1}")
        yield ports


def write_nodes(
    folder: Path, base: NodeConfig, ports: Sequence[int], rounds: int | None, *, prefer: bool
) -> list[Node]:
    """Make each node's data directory with its key, and its settings beside it."""
    nodes: list[Node] = []
    peer_ids: list[str] = []
    for number in range(len(ports)):
        name = f"node-{number + 1}"
        data = DataDir(folder / name)
        data.prepare()
        peer_ids.append(Identity.load_or_create(data.key).peer_id)
        nodes.append(Node(name, folder / f"{name}.yaml", data, folder / "logs" / f"{name}.log"))
    for number, node in enumerate(nodes):
        chosen = settings(base, number, ports=ports, peer_ids=peer_ids, rounds=rounds, prefer=prefer)
        head = f"# Written by `sapo-node swarm`. Start {node.name} again: sapo-node start --config {node.config_path}\n"
        text = yaml.safe_dump(chosen, sort_keys=False, allow_unicode=True)
        node.config_path.write_text(head + text, encoding="utf-8")
    return nodes


def spawn(node: Node, command: Sequence[str]) -> None:
    """Start the process in a process group of its own, so that the terminal's Ctrl-C reaches us alone."""
    parent = os.getpid()
    # The settings written for it are the whole truth: ours already went into them.
    env = {name: value for name, value in os.environ.items() if not name.startswith(config_load.PREFIX)}
    env["PYTHONSAFEPATH"] = "1"  # else `-m` would run files of this folder that are named like a library's modules
    with node.log.open("ab") as log:
        node.process = subprocess.Popen(
            [*command, str(node.config_path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
            preexec_fn=lambda: workers.die_with_parent(parent),  # safe: no thread runs here before or while we spawn
        )
    node.started = time.monotonic()


# ---- during ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _signals(state: Run) -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP ends the nodes, the second kills them."""

    def handle(number: int, frame: FrameType | None) -> None:
        state.interrupts += 1
        if state.interrupts == 1:
            state.end()
        else:
            state.kill()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(state: Run, console: Console) -> None:
    """Show the nodes until all of them have ended, and end them in time."""
    told = False
    with live.Screen(console) as screen:
        while True:
            over = state.over  # before looking, so that the last look sees what an ended node wrote last
            if state.interrupts == 1 and not told:
                told = True
                screen.say("Ending: the nodes finish their round. Ctrl-C again ends them at once.")
            rows = state.look()
            for node in state.nodes:
                _report_death(state, node, screen)
            stage = live.stage(rows, ending=state.ending_at is not None)
            screen.show(rows, live.header(stage, time.monotonic() - state.begun, state.seconds, state.rounds))
            if over:
                return
            state.keep_time(time.monotonic())
            time.sleep(TICK_SECONDS)


def _report_death(state: Run, node: Node, screen: live.Screen) -> None:
    """Name a node that failed, once, with the last lines of its log. What Ctrl-C ended needs no name."""
    ours = state.interrupts > 1 or (state.interrupts and node.exit_code == -signal.SIGTERM)
    if node.ended != "failed" or node.name in state.reported or ours:
        return
    state.reported.add(node.name)
    screen.say(f"{node.name} {_death(state, node)}. The end of {node.log}:")
    for line in last_lines(node.log) or ["(it is empty)"]:
        screen.say(f"  {line}")


def _death(state: Run, node: Node) -> str:
    code = node.exit_code
    assert code is not None, "only an ended node has failed"
    if node.killed:
        return f"did not end within {state.end_seconds:.0f} s and was killed"
    how = f"with exit code {code}" if code >= 0 else f"by signal {signal.Signals(-code).name}"
    return f"ended {how} after {time.monotonic() - node.started:.0f} s"


def last_lines(log: Path, count: int = LAST_LINES) -> list[str]:
    """The last lines of a node's log, those of JSON shortened to what a person needs; [] where it is empty."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - TAIL_BYTES))
        text = stream.read(TAIL_BYTES).decode(errors="replace")
    lines = [line for raw in text.split("\n") for line in _readable(raw)]
    return lines[-count:]


def _readable(raw: str) -> Iterator[str]:
    try:
        entry = json.loads(raw)
    except ValueError:
        entry = None
    if not isinstance(entry, dict):
        if raw.strip():
            yield clean(raw, 200)
        return
    rest = " ".join(
        f"{key}={value}" for key, value in entry.items() if key not in ("event", "level", "time", "exception")
    )
    yield clean(f"{entry.get('level', 'info')}: {entry.get('event', '')} {rest}", 200)
    for line in str(entry.get("exception", "")).split("\n")[-3:]:
        if line.strip():
            yield clean(line, 200)


# ---- after -----------------------------------------------------------------------------------------------------------


def _conclude(state: Run, folder: Path, console: Console) -> None:
    """Say what happened, from the nodes' own records, and what to do next."""

    def say(text: str = "") -> None:
        # On a terminal between words; elsewhere one line stays one line.
        console.print(text, markup=False, highlight=False, soft_wrap=not console.is_terminal)

    from sapo_node.monitor import plot, verdict  # here: numpy starts threads, and nodes are spawned by a fork

    records: Mapping[str, Sequence[Record]] = {node.name: history.read(node.data.history) for node in state.nodes}
    found = verdict.judge(list(records.values()))
    failed = [node.name for node in state.nodes if node.ended == "failed"]
    say()
    say(found.sentence)
    if failed:
        say(f"{len(failed)} of {len(state.nodes)} nodes did not finish: {', '.join(failed)}.")
    if any(history.rounds(list(of_node)) for of_node in records.values()):
        picture = folder / "swarm.png"
        plot.draw(records, picture, title=found.sentence)
        say(f"Plot:      {picture}")
    say(f"Logs:      {folder / 'logs'}")
    say(f"Settings:  {state.nodes[0].config_path} and the like; keys, pools and checkpoints lie beside them")
    say(f"Disk:      delete {folder} when you are done with it")
    say("Next: measure what node-1 learnt; take its model to transformers; set up a node of your own")
    say(f"  sapo-node eval --config {state.nodes[0].config_path}")
    say(f"  sapo-node export --config {state.nodes[0].config_path} OUT")
    say("  sapo-node init my-node")
