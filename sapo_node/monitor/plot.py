"""A picture of a run: held-out score and external share over rounds, one line a node."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sapo_node.monitor.metrics import EvalRecord, Record, RoundRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHARE_ROUNDS = 10  # rounds in the moving average of the external share; a round is a handful of groups

# Okabe and Ito's palette: told apart with every common form of colour blindness. Further nodes differ by dashes.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#000000")
DASHES = ("-", "--", ":", "-.")
MARKERS = "osD^vP*"


def external_share(records: Sequence[Record], window: int = SHARE_ROUNDS) -> tuple[list[int], list[float]]:
    """Rounds, and the share (0 to 1) of external groups in the training sets of the last `window` rounds."""
    rounds = [record for record in records if isinstance(record, RoundRecord)]
    shares: list[float] = []
    for index in range(len(rounds)):
        recent = rounds[max(0, index + 1 - window) : index + 1]
        external = sum(record.external_groups for record in recent)
        both = external + sum(record.local_groups for record in recent)
        shares.append(external / both if both else math.nan)
    return [record.round for record in rounds], shares


def held_out(records: Sequence[Record]) -> tuple[list[int], list[float]]:
    """Rounds at which the node was evaluated, and its held-out scores (0 to 1)."""
    found = [record for record in records if isinstance(record, EvalRecord)]
    return [record.round for record in found], [record.mean for record in found]


def draw(nodes: Mapping[str, Sequence[Record]], path: Path, title: str = "") -> None:
    """Write a PNG to `path`, which appears whole or not at all. `nodes` maps the label of a line to its records.

    Raises OSError where it cannot be written.
    """
    # Imported here: matplotlib takes 0.3 s, and only the end of a run needs it. No pyplot: it would keep global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for number, (name, records) in enumerate(nodes.items()):
        colour = COLOURS[number % len(COLOURS)]
        dash = DASHES[number // len(COLOURS) % len(DASHES)]
        marker = MARKERS[number % len(MARKERS)]
        above.plot(*held_out(records), color=colour, linestyle=dash, marker=marker, markersize=5, label=name)
        below.plot(*external_share(records), color=colour, linestyle=dash, linewidth=1.2, label=name)
    _label(above, "held-out score", "Mean score on held-out questions (0 to 1)")
    _label(below, "external share", f"Share of others' groups in the training set (mean of {SHARE_ROUNDS} rounds)")
    above.set_ylim(bottom=0)
    below.set_ylim(-0.03, 1.03)
    below.set_xlabel("round of the node")
    if nodes:
        above.legend(title="node", ncols=2, fontsize="small")
    if title:
        figure.suptitle(title, fontsize="medium", wrap=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(temporary, format="png")
    os.replace(temporary, path)


def _label(axes: "Axes", y: str, title: str) -> None:
    axes.set_ylabel(y)
    axes.set_title(title, fontsize="small", loc="left")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
