"""`sapo-node peers`: whom a node met, how, and what it thinks of them.

It reads peers.json, which the node writes every few seconds and at its end, so it works whether the node runs or not.
Texts of others are cleaned before they reach the terminal.
"""

import time
from pathlib import Path

import click
import msgspec

from sapo_node.commands.output import say_json
from sapo_node.commands.status import duration
from sapo_node.datadir import DataDir
from sapo_node.errors import SapoError
from sapo_node.monitor.text import clean
from sapo_node.swarm.peers import PeerRecord, load_peers

EARLIER = "an earlier run"
CELL_LIMIT = 160


def run(data_dir: Path, as_json: bool) -> int:
    """Print the peers; 0. Raises SapoError where there is nothing to tell."""
    data = DataDir(data_dir)
    running = data.running()
    records, fault = load_peers(data.peers)
    if fault:
        raise SapoError(fault)
    if not running:  # what was connected when the node last wrote is not connected now
        records = [msgspec.structs.replace(record, connected=False) for record in records]
    if as_json:
        say_json({"running": running, "data_dir": str(data_dir), "peers": records})
    elif not records:
        click.echo(f"The node in {data_dir} has met nobody yet. `sapo-node status` says why an address leads nowhere.")
    else:
        click.echo(table(records, time.time()))
    return 0


def table(records: list[PeerRecord], now: float) -> str:
    """One line a peer, the connected ones first. `now` in seconds since 1970."""
    ordered = sorted(records, key=lambda r: (not r.connected, -r.last_seen))
    rows = [("peer", "seen", "found", "groups", "score", "address"), *(_row(record, now) for record in ordered)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return "\n".join("  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows)


def _row(record: PeerRecord, now: float) -> tuple[str, ...]:
    cells = (
        record.peer_id,
        "connected" if record.connected else f"{duration(now - record.last_seen)} ago",
        record.found or EARLIER,
        f"{record.accepted} taken, {record.usable} usable" + (f", {record.rejected} refused" * (record.rejected > 0)),
        "shunned" if record.shunned else f"{record.score:.0f}",
        record.addresses[0] if record.addresses else "",
    )
    return tuple(clean(cell, CELL_LIMIT) for cell in cells)
