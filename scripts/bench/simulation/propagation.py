"""How a skill spreads: one node of eight can do a task, the others all but cannot. When can they?

The first node begins as a teacher, a base that kept more right answers to one task. All train on the whole mixture.
Measured is the others' held-out pass@1 on that task.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import csv_files
import torch

from sapo_node.evaluate import HeldOut

from .arms import ARMS
from .swarm import swarm

LEVEL = 0.25  # median of the others' pass@1 from which the skill counts as theirs
EVAL_EVERY = 10  # rounds
SAMPLES = 4
AFTER_REMOVAL = 40  # rounds that are still taken when the teacher has gone

Variant = Literal["teacher", "perfect teacher", "no teacher", "alone", "removed"]


@dataclass(frozen=True)
class Trial:
    """One run. `teacher`, `perfect teacher` and `removed` have one; `alone` has one too, but J is 0."""

    variant: Variant
    task: str
    seed: int
    lr: float
    rounds: int

    @property
    def arm(self) -> str:
        """The settings of every node."""
        return "8/0" if self.variant == "alone" else "4/4"

    @property
    def share(self) -> float | None:
        """Right answers to the task that its teacher kept; None without one."""
        return {"no teacher": None, "perfect teacher": 1.0}.get(self.variant, 0.6)


@dataclass(frozen=True)
class Level:
    """Held-out pass@1 on the task at one evaluation."""

    round: int
    teacher: float | None  # None: none, or gone
    others: float  # median of the other nodes
    lowest: float
    mean: float
    seconds: float


async def execute(trial: Trial, base: Path, teacher: Path | None, told: Callable[[int], None]) -> list[Level]:
    """Take a trial from start to end."""
    torch.set_num_threads(1)
    async with swarm(ARMS[trial.arm], base, trial.seed, trial.lr, teacher) as (made, held, scorers):
        asked = [one for one in held.questions if one.entry.spec.name == trial.task]
        task = HeldOut(held.config, asked, [])
        others, first = made.nodes[1:], made.nodes[0]
        levels: list[Level] = []
        spent, number, end, gone = 0.0, 0, trial.rounds, False
        while True:
            if number % EVAL_EVERY == 0 or number == end:
                scores = []
                for node in [first, *others]:
                    engine: Any = node.policy
                    record = await task.score(engine, scorers, round=number, samples=SAMPLES)
                    scores.append(record.mean)
                has_teacher = teacher is not None and not gone
                levels.append(
                    Level(
                        round=number,
                        teacher=scores[0] if has_teacher else None,
                        others=median(scores[1:]),
                        lowest=min(scores[1:]),
                        mean=fmean(scores[1:]),
                        seconds=spent,
                    )
                )
                if trial.variant == "removed" and not gone and levels[-1].others > LEVEL:
                    made.nodes.remove(first)
                    gone, end = True, number + AFTER_REMOVAL
            if number == end:
                return levels
            began = time.process_time()
            await made.round(number)
            spent += time.process_time() - began
            number += 1
            told(number)


def read(file: Path) -> dict[Trial, list[Level]]:
    """The trials of a results file; none where there is none."""
    found: dict[Trial, list[Level]] = defaultdict(list)
    for line in csv_files.read(file):
        found[csv_files.typed(line, Trial)].append(csv_files.typed(line, Level))
    return dict(found)


def table(trials: Mapping[Trial, list[Level]]) -> str:
    """Markdown: a line a variant."""
    variants: dict[str, list[list[Level]]] = defaultdict(list)
    for trial, levels in trials.items():
        variants[f"{trial.variant}, {trial.rounds} rounds"].append(levels)
    lines = [
        "| variant | runs | rounds until the others can do it | others at the end | worst of them |",
        "|---" * 5 + "|",
    ]
    for variant, runs in variants.items():
        rounds = ", ".join("never" if at is None else str(at) for at in map(crossing, runs))
        ends = fmean(levels[-1].others for levels in runs), fmean(levels[-1].lowest for levels in runs)
        lines.append(f"| {variant} | {len(runs)} | {rounds} | {ends[0]:.2f} | {ends[1]:.2f} |")
    return "\n".join(lines)


def crossing(levels: list[Level]) -> int | None:
    """The first evaluation at which the others can do it."""
    return next((level.round for level in levels if level.others > LEVEL), None)
