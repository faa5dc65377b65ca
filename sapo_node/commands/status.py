"""`sapo-node status`: what a node says about itself, and whether it is alive.

node.json is what the node last said; only the lock on its data directory proves that it runs.
"""

import os
import time
from pathlib import Path

import click

from sapo_node.commands.output import say_json
from sapo_node.datadir import DataDir
from sapo_node.errors import SapoError
from sapo_node.monitor.history import parse
from sapo_node.monitor.metrics import Record
from sapo_node.monitor.status import NodeStatus, StatusUnreadable, read_status
from sapo_node.monitor.text import clean

TAIL_BYTES = 1 << 18  # a line of history.jsonl is a few kilobytes; the last whole one lies within this
LINE_LIMIT = 1000  # characters: reasons and addresses may hold what came from others
SILENT_SECONDS = 30.0  # a running node renews node.json every few seconds
NOT_READY = ("starting", "draining", "stopped")


def run(data_dir: Path, as_json: bool, ready: bool = False) -> int:
    """Print the status; 0 when the node runs (with `ready`: and `is_ready`), else 1.

    Raises SapoError where there is nothing to tell.
    """
    data = DataDir(data_dir)
    running = data.running()
    try:
        status = read_status(data.status)
    except StatusUnreadable as error:
        raise SapoError(f"{error}. The node is {'running' if running else 'not running'}") from error
    except OSError as error:
        raise SapoError(f"{data.status} cannot be read: {error.strerror}") from error
    if as_json:
        report = {"running": running, "data_dir": str(data_dir), "node": status, "last": last_record(data.history)}
        say_json(report)
    elif status is None and not running:
        raise SapoError(
            f"no node has run in {data_dir}; start one with `sapo-node start --config FILE`, or say which one is meant "
            "with --config or --data-dir"
        )
    else:
        click.echo(table(data_dir, running, status, time.time()))
    return 0 if running and (not ready or is_ready(status, time.time())) else 1


def is_ready(status: NodeStatus | None, now: float) -> bool:
    """Whether a running node does its work: it is up, not on its way down, and says so. `now` in seconds since 1970."""
    return status is not None and status.state not in NOT_READY and now - status.updated_at <= SILENT_SECONDS


def last_record(history: Path) -> Record | None:
    """The newest whole line of history.jsonl, None where there is none."""
    try:
        with open(history, "rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - TAIL_BYTES))
            tail = stream.read(TAIL_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SapoError(f"{history} cannot be read: {error.strerror}") from error
    records = (parse(line) for line in reversed(tail.split(b"\n")))
    return next((record for record in records if record is not None), None)


def table(data_dir: Path, running: bool, status: NodeStatus | None, now: float) -> str:
    """One line a fact, for people. `now` in seconds since 1970."""
    if status is None:
        return f"The node in {data_dir} is starting; it has said nothing yet."
    age = max(0.0, now - status.updated_at)
    if running:
        silent = f", but silent for {duration(age)}" if age > SILENT_SECONDS else ""
        alive = f"running for {duration(now - status.started_at)} (process {status.pid}){silent}"
    else:
        alive = f"not running; last heard of {duration(age)} ago"
    reward, held_out, start = status.reward_first_drawn, status.held_out, status.held_out_start
    change = f" ({held_out - start:+.3f} since the start)" if held_out is not None and start is not None else ""
    trains = status.role == "trainer"
    facts: dict[str, str | list[str]] = {
        "node": alive,
        "state": status.state + (f": {status.reason}" if status.reason else ""),
        "round": f"{status.round} (policy version {status.policy_version})" if trains else "",
        "model": status.model,
        "engine": engine(status),
        "swarm": f"{status.swarm}, {status.peers} peer{'' if status.peers == 1 else 's'}" if status.swarm else "",
        "connected": connected(status),
        "peer id": status.peer_id,
        "addresses": status.addresses,
        "unreached": status.unreached if running else [],
        "groups": f"{status.own_groups} own, {status.external_groups_used} of others used, {status.shortage} short"
        if trains
        else "",
        "reward": f"{reward:.3f} of the groups drawn first" if reward is not None else "",
        "held-out": f"{held_out:.3f}{change}" if held_out is not None else "",
        "alarms": status.alarms,
        "data": str(data_dir),
    }
    lines = {name: [text] if isinstance(text, str) else text for name, text in facts.items() if text}
    return "\n".join(
        f"{name if first else '':<9}  {clean(line, LINE_LIMIT)}"
        for name, texts in lines.items()
        for first, line in zip([True, *[False] * len(texts)], texts, strict=False)
    )


def connected(status: NodeStatus) -> str:
    """Members of the swarm that the node is connected to, and how it met them."""
    ways = ", ".join(f"{way}: {count}" for way, count in status.found.items())
    return f"{sum(status.found.values())} ({ways})" if ways else ""


def engine(status: NodeStatus) -> str:
    """What samples completions, how it is, and what befell it."""
    troubles = [f"started again {status.engine_restarts} times"] if status.engine_restarts else []
    troubles += [f"{status.sync_faults} exchanges of weights went wrong"] if status.sync_faults else []
    return "; ".join([part for part in (f"{status.engine}, {status.engine_state}", *troubles) if part.strip(", ")])


def duration(seconds: float) -> str:
    """A time span as people say it: 42 s, 7 min, 3.5 h, 2.1 d."""
    if seconds < 60:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 86400 else f"{seconds / 86400:.1f} d"
