"""`sapo-node peers`: whom a node met, how, and what it thinks of them; and the owner's word on single peers.

What is shown is read from peers.json, which the node writes every few seconds and at its end; what the owner says goes
into denied.json, which a running node reads again. So all of it works whether the node runs or not. Texts of others are
cleaned before they reach the terminal.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import click

from sapo_node.commands.output import say_json
from sapo_node.commands.status import duration
from sapo_node.config_addresses import is_peer_id
from sapo_node.datadir import DataDir
from sapo_node.errors import DataDirLocked, SapoError
from sapo_node.monitor.text import clean
from sapo_node.swarm import denials
from sapo_node.swarm.peers import AGED_HOURS, AGED_SECONDS, PeerBook, PeerRecord, decayed, forgiven_at, load_peers

EARLIER = "an earlier run"
BY_COMMAND = "`sapo-node peers deny`"
CELL_LIMIT = 160


def run(data_dir: Path, as_json: bool) -> int:
    """Print the peers; 0. Raises SapoError where there is nothing to tell."""
    running, records = _met(DataDir(data_dir))
    if as_json:
        say_json({"running": running, "data_dir": str(data_dir), "peers": records})
    elif not records:
        click.echo(f"The node in {data_dir} has met nobody yet. `sapo-node status` says why an address leads nowhere.")
    else:
        click.echo(table(records, time.time()))
    return 0


def why(data_dir: Path, peer_id: str, as_json: bool) -> int:
    """Print what the node thinks of one peer, and for which reasons; 0. Raises SapoError for one that it never met."""
    _check(peer_id)
    running, records = _met(DataDir(data_dir))
    record = next((r for r in records if r.peer_id == peer_id), None)
    if record is None:
        raise SapoError(f"the node in {data_dir} has not met {peer_id}, or has forgotten it")
    if as_json:
        say_json({"running": running, "data_dir": str(data_dir), "peer": record})
    else:
        click.echo(report(record, PeerBook(known=records).share(peer_id), time.time()))
    return 0


def deny(data_dir: Path, peer_id: str, purge: bool) -> int:
    """Deny a peer, and with `purge` remove its groups from the pool; 0. Raises SapoError."""
    _check(peer_id)
    data = _existing(data_dir)
    try:
        new = denials.deny(data.denied, peer_id, time.time(), purge=purge)
    except OSError as error:
        raise SapoError(f"{data.denied} cannot be written: {error.strerror}") from error
    running, records = _met(data)
    click.echo(
        f"{peer_id} is {'now' if new else 'already'} denied: it gets no answer, and nothing is taken from it. "
        f"{'The running node obeys within seconds.' if running else 'It holds from the next start.'}"
    )
    if all(record.peer_id != peer_id for record in records):
        click.echo("This node has not met that peer, or has forgotten it: compare the id.")
    if purge:
        gone = _purge(data, peer_id)
        click.echo(
            "The running node removes its groups from the pool within seconds."
            if gone is None
            else f"{gone} of its groups were removed from the pool."
        )
    return 0


def allow(data_dir: Path, peer_id: str) -> int:
    """Take back what `deny` said of a peer; 0. Raises SapoError."""
    _check(peer_id)
    data = _existing(data_dir)
    try:
        was_denied = denials.allow(data.denied, peer_id, time.time())
    except OSError as error:
        raise SapoError(f"{data.denied} cannot be written: {error.strerror}") from error
    click.echo(f"{peer_id} is no longer denied by command." if was_denied else f"{peer_id} was not denied by command.")
    click.echo("swarm.deny and swarm.allow of the settings hold as before, and what it did keeps its score.")
    return 0


def table(records: list[PeerRecord], now: float) -> str:
    """One line a peer, the connected ones first. `now` in seconds since 1970."""
    ordered = sorted(records, key=lambda r: (not r.connected, -r.last_seen))
    return _aligned([("peer", "seen", "found", "groups", "score", "address"), *(_row(r, now) for r in ordered)])


def report(record: PeerRecord, share: str, now: float) -> str:
    """What a node thinks of a peer, for people: a line a fact, then a line a reason."""
    facts = {
        "peer": record.peer_id,
        "standing": _standing(record, now),
        "score": f"{decayed(record.score, record.scored_at, now):.1f}",
        "history": _history(record, now),
        "counts as": "itself" if share == record.peer_id else share,
        "reached at": record.reached_at,
    }
    lines = [f"{name:<10}  {clean(text, CELL_LIMIT)}" for name, text in facts.items() if text]
    if not record.reasons:
        return "\n".join([*lines, "Nothing that it sent was judged yet."])
    rows = [("reason", "count", "points now", "last")]
    for reason, tally in sorted(record.reasons.items(), key=lambda item: -item[1].last):
        points = decayed(tally.points, tally.last, now)
        ago = f"{duration(now - tally.last)} ago"
        rows.append((clean(reason, CELL_LIMIT), str(tally.count), f"{points:+.1f}" if tally.points else "", ago))
    return "\n".join([*lines, "", _aligned(rows)])


def _standing(record: PeerRecord, now: float) -> str:
    if record.denied:
        return f"denied by {record.denied}"
    until = forgiven_at(record)
    if record.shunned and until > now:
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(until))
        return f"shunned until {at} (in {duration(until - now)}) if it does nothing worse"
    return "welcome" + (", connected" if record.connected else "")


def _history(record: PeerRecord, now: float) -> str:
    if not record.first_accepted:
        return "none of its groups was accepted yet, or not since it was shunned"
    needs = (
        f"a newcomer until they lie {duration(AGED_SECONDS)} apart, with usable ones in {AGED_HOURS} different hours"
    )
    return (
        f"accepted groups from {duration(now - record.first_accepted)} to {duration(now - record.last_accepted)} ago"
        f"{': aged' if record.worked_a_day else f', {needs} (now {record.hours})'}"
    )


def _row(record: PeerRecord, now: float) -> tuple[str, ...]:
    cells = (
        record.peer_id,
        "connected" if record.connected else f"{duration(now - record.last_seen)} ago",
        record.found or EARLIER,
        f"{record.accepted} taken, {record.usable} usable" + (f", {record.rejected} refused" * (record.rejected > 0)),
        "denied" if record.denied else "shunned" if record.shunned else f"{record.score:.0f}",
        record.addresses[0] if record.addresses else "",
    )
    return tuple(clean(cell, CELL_LIMIT) for cell in cells)


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return "\n".join("  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows)


def _met(data: DataDir) -> tuple[bool, list[PeerRecord]]:
    """Whether the node runs, and the peers that it wrote down, with the owner's present word. Raises SapoError."""
    running = data.running()
    records, fault = load_peers(data.peers)
    if fault:
        raise SapoError(fault)
    words = denials.read(data.denied)
    for record in records:
        if record.peer_id in words and words[record.peer_id].denied:
            record.denied = BY_COMMAND
        record.connected = record.connected and running  # when it last wrote is not now
    return running, records


def _check(peer_id: str) -> None:
    if not is_peer_id(peer_id):
        raise click.UsageError(
            f"{clean(peer_id, CELL_LIMIT)} is no peer id; `sapo-node peers` lists those of the peers met (12D3KooW...)"
        )


def _existing(data_dir: Path) -> DataDir:
    if not data_dir.is_dir():
        raise SapoError(f"there is no data directory {data_dir}; say which node is meant with --config or --data-dir")
    return DataDir(data_dir)


def _purge(data: DataDir, peer_id: str) -> int | None:
    """Remove a peer's groups; how many, or None where the running node does it, since a pool has one writer."""
    if not data.pool.exists():
        return None if data.running() else 0
    try:
        with data.lock():
            return asyncio.run(_purge_pool(data.pool, peer_id))
    except DataDirLocked:
        return None


async def _purge_pool(path: Path, peer_id: str) -> int:
    from sapo_node.config import RolloutsSection
    from sapo_node.rollouts.pool import Pool

    pool = await Pool.open(path, RolloutsSection())
    try:
        return await pool.purge(peer_id)
    finally:
        await pool.close()
