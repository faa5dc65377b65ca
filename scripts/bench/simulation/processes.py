"""The same swarm as real processes: `sapo-node swarm` on loopback, with an arm's settings. Do the curves agree?

What differs is what the simulation leaves out: nodes wait for nobody, groups come as the network brings them, keys and
sampling noise are new every time, so no two runs are paired.
"""

import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import csv_files
import yaml

from sapo_node.monitor import history

from .arms import Arm
from .report import Result, by_arm

EVAL_EVERY = 20  # rounds, as in the simulation
LONGEST_SECONDS = 3600.0  # eight nodes on two cores need some minutes for 100 rounds


@dataclass(frozen=True)
class Real:
    """One evaluation of a swarm of real processes: held-out pass@1 over its nodes."""

    arm: str
    base: str
    lr: float
    repeat: int
    round: int
    held_out: float
    lowest: float
    highest: float


def execute(arm: Arm, base: Path, lr: float, rounds: int, repeat: int) -> list[Real]:
    """Run the swarm for so many rounds. Raises RuntimeError where a node failed or did not get there."""
    settings = arm.config(base, lr).model_dump(mode="json", exclude_unset=True)
    settings["node"] = {"data_dir": "unused", "threads": 1}
    settings["tasks"]["eval_every"] = EVAL_EVERY
    with tempfile.TemporaryDirectory() as folder:
        config, nodes, log = (Path(folder) / name for name in ("node.yaml", "nodes", "log"))
        config.write_text(yaml.safe_dump(settings))
        command = ["swarm", "--nodes", arm.nodes, "--rounds", rounds, "--config", config, "--dir", nodes]
        with log.open("wb") as output:
            ended = subprocess.run(
                [sys.executable, "-m", "sapo_node", *map(str, command)],
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=LONGEST_SECONDS,
                check=False,
            )
        if ended.returncode != 0:
            raise RuntimeError(f"the swarm ended with {ended.returncode}:\n{log.read_text()[-2000:]}")
        scores: dict[int, list[float]] = defaultdict(list)
        for file in nodes.rglob("history.jsonl"):
            for record in history.evals(history.read(file)):
                scores[record.round].append(record.mean)
    return [
        Real(arm.name, base.name, lr, repeat, at, fmean(found), min(found), max(found))
        for at, found in sorted(scores.items())
        if len(found) == arm.nodes
    ]


def read(file: Path) -> dict[tuple[str, int], list[Real]]:
    """Runs of a results file by arm and repeat; none where there is none."""
    found: dict[tuple[str, int], list[Real]] = defaultdict(list)
    for line in csv_files.read(file):
        one = csv_files.typed(line, Real)
        found[one.arm, one.repeat].append(one)
    return dict(found)


def table(real: dict[tuple[str, int], list[Real]], simulated: list[Result]) -> str:
    """Markdown: held-out pass@1 at the end of the real runs of each arm, and of the simulated ones. At the end both ask
    the same questions, before it the simulation asks a part of them: areas are not to be compared."""
    arms = by_arm(simulated)
    lines = ["| arm | real processes: each run | mean | simulated: mean (smallest, largest) |", "|---|---|---|---|"]
    for arm in dict.fromkeys(arm for arm, _ in real):
        ends = [points[-1].held_out for (name, _), points in real.items() if name == arm]
        known = [one.last["last"] for one in arms.get(arm, [])]
        told = f"{fmean(known):.3f} ({min(known):.3f}, {max(known):.3f}; {len(known)} swarms)" if known else ""
        lines.append(f"| {arm} | {', '.join(f'{value:.3f}' for value in ends)} | {fmean(ends):.3f} | {told} |")
    return "\n".join(lines)
