"""The live table over several nodes on this machine, and one plain line where there is no terminal.

It only looks: `render` and `plain` are pure functions of what the nodes wrote into their node.json.
"""

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from msgspec import Struct
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sapo_node.monitor.log import clean
from sapo_node.monitor.status import REWARD_ROUNDS, NodeStatus

LINE_SECONDS = 10.0  # between two plain lines: four minutes of a demo stay on one screen

_COLOURS = {
    "starting": "yellow",
    "joining": "yellow",
    "training": "green",
    "silo": "magenta",
    "draining": "cyan",
    "finished": "cyan",
    "failed": "bold red",
}


class Row(Struct, frozen=True, kw_only=True):
    """One node: its name, its status (None before it wrote one), and how it ended, if it did."""

    name: str
    status: NodeStatus | None = None
    ended: str = ""  # "finished", "failed" or ""

    @property
    def state(self) -> str:
        """What the state column shows."""
        return self.ended or (self.status.state if self.status else "starting")


def stage(rows: Sequence[Row], *, ending: bool = False) -> str:
    """What the nodes do as a whole: setting up, training, ending, or ended."""
    if rows and all(row.ended for row in rows):
        return "ended"
    if ending:
        return "ending: last step, checkpoint, held-out score"
    begun = any(row.status is not None and row.status.round > 0 for row in rows)
    return "training" if begun else "setting up: processes, model, first held-out score"


def header(stage: str, elapsed: float, seconds: float | None = None, rounds: int | None = None) -> str:
    """First line: time spent and left (seconds), or the number of rounds it goes to."""
    left = "" if seconds is None else f", {clock(max(0.0, seconds - elapsed))} left"
    goal = "" if rounds is None else f", to round {rounds}"
    return f"{clock(elapsed)}{left}{goal} · {stage}"


def render(rows: Sequence[Row], title: str = "") -> Table:
    """The table, one row a node."""
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=Text(title),
        title_justify="left",
        title_style="bold",
        caption=Text(f"reward: groups the node drew itself, last {REWARD_ROUNDS} rounds; scores are 0 to 1"),
        caption_justify="left",
    )
    table.add_column("node", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for name in ("round", "peers", "own\ngroups", "external\ngroups used", "reward", "held-out score\n(change)"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        status, state = row.status, Text(row.state, style=_COLOURS.get(row.state, ""))
        if status is None:
            table.add_row(Text(clean(row.name)), state)
            continue
        counts = (status.round, status.peers, status.own_groups, status.external_groups_used)
        table.add_row(
            Text(clean(row.name)),
            state,
            *(Text(f"{count:,}") for count in counts),
            Text(_score(status.reward_first_drawn)),
            _held_out(status),
        )
    return table


def plain(rows: Sequence[Row], title: str = "") -> str:
    """All of it in one line of text."""
    found = [row.status for row in rows if row.status is not None]
    if not found:
        return title
    rewards = [status.reward_first_drawn for status in found if status.reward_first_drawn is not None]
    scored = [status for status in found if status.held_out is not None]
    parts = [
        title,
        "states " + " ".join(row.state for row in rows),
        "rounds " + " ".join(str(status.round) for status in found),
        "peers " + " ".join(str(status.peers) for status in found),
        f"own groups {sum(status.own_groups for status in found):,}",
        f"external groups used {sum(status.external_groups_used for status in found):,}",
    ]
    if rewards:
        parts.append(f"reward {sum(rewards) / len(rewards):.3f}")
    if scored:
        score = sum(status.held_out or 0.0 for status in scored) / len(scored)
        start = sum(status.held_out_start or 0.0 for status in scored) / len(scored)
        parts.append(f"held-out {score:.3f} ({score - start:+.3f})")
    return " · ".join(parts)


def clock(seconds: float) -> str:
    """m:ss, or h:mm:ss from an hour on."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _score(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _held_out(status: NodeStatus) -> Text:
    if status.held_out is None:
        return Text("")
    text = Text(_score(status.held_out))
    if status.held_out_start is not None:
        change = status.held_out - status.held_out_start
        text.append(f" ({change:+.3f})", style="green" if change > 0 else "red" if change < 0 else "")
    return text


class Screen:
    """Where the table is shown. A context manager; on leaving, the last table stays on the terminal."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._line_at = float("-inf")
        # Refreshed by `show` alone: a refresh thread would outlive a fork of this process in an undefined state.
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> "Screen":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def show(self, rows: Sequence[Row], title: str) -> None:
        """Show the newest state. Without a terminal at most one line every LINE_SECONDS."""
        if self._live:
            self._live.update(render(rows, title), refresh=True)
        elif self._clock() - self._line_at >= LINE_SECONDS:
            self._line_at = self._clock()
            self.say(plain(rows, title))

    def say(self, text: str) -> None:
        """Text above the table that stays; printed as it is, without markup."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=not self._console.is_terminal)
