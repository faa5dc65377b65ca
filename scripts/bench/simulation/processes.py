"""The same swarm as real processes: `sapo-node swarm` on loopback, with an arm's settings. Do the curves agree?

What differs is what the simulation leaves out: nodes wait for nobody, groups come as the network brings them, keys and
sampling noise are new every time, so no two runs are paired. Every run here, simulated ones too, is measured alike: all
held-out questions, eight completions each, every 20 rounds.

With this model a round takes a quarter of a second, and an announcement is written every three, so groups come to eight
hurried nodes by fits and starts. Where they `wait` for them, each batch reaches each node in about its round: that is
what the simulation supposes, and what a model does whose round takes longer than an announcement.
"""

import asyncio
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, get_args

import csv_files
import torch
import yaml

from sapo_node.monitor import history

from .arms import Arm
from .stats import Interval, area, interval
from .swarm import EVAL_EVERY, LAST_SAMPLES, swarm

Mode = Literal["simulated", "waiting", "hurried"]
WAIT_SECONDS = 3.0  # as long as the pause between two announcements
LONGEST_SECONDS = 3600.0  # eight nodes on two cores need some minutes for 100 rounds


@dataclass(frozen=True)
class Trial:
    """One run. Its fields name it in the results; `repeat` is a seed where it is simulated."""

    arm: str
    mode: Mode
    base: str
    lr: float
    repeat: int


@dataclass(frozen=True)
class Measured:
    """One evaluation: held-out pass@1 over a swarm's nodes, and what went before it."""

    round: int
    held_out: float
    lowest: float
    highest: float
    external: float = 0.0  # groups of others in a training set, since the evaluation before


def execute(trial: Trial, arm: Arm, base: Path, rounds: int) -> list[Measured]:
    """Take a trial from start to end. Raises RuntimeError where a real node failed or did not get there."""
    if trial.mode == "simulated":
        return asyncio.run(_simulate(trial, arm, base, rounds))
    return _real(trial, arm, base, rounds)


async def _simulate(trial: Trial, arm: Arm, base: Path, rounds: int) -> list[Measured]:
    torch.set_num_threads(1)
    found: list[Measured] = []
    taken: list[int] = []
    async with swarm(arm, base, trial.repeat, trial.lr) as (made, held, scorers):
        for number in range(rounds + 1):
            if number % EVAL_EVERY == 0 or number == rounds:
                engines: list[Any] = [node.policy for node in made.nodes]
                records = [await held.score(one, scorers, round=number, samples=LAST_SAMPLES) for one in engines]
                found.append(_measured(number, [record.mean for record in records], taken))
                taken.clear()
            if number < rounds:
                await made.round(number)
                taken += [node.record.external_groups for node in made.nodes if node.record is not None]
    return found


def _real(trial: Trial, arm: Arm, base: Path, rounds: int) -> list[Measured]:
    settings = arm.config(base, trial.lr).model_dump(mode="json", exclude_unset=True)
    settings["node"] = {"data_dir": "unused", "threads": 1}
    settings["tasks"] |= {"eval_every": EVAL_EVERY, "eval_samples": LAST_SAMPLES}
    if trial.mode == "waiting":
        settings["training"] |= {"on_shortage": "wait", "shortage_wait_seconds": WAIT_SECONDS}
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
        return _of_histories(nodes.rglob("history.jsonl"), arm.nodes)


def _of_histories(files: Iterable[Path], nodes: int) -> list[Measured]:
    """The evaluations that all nodes have."""
    scores: dict[int, list[float]] = defaultdict(list)
    taken: list[tuple[int, int]] = []
    for file in files:
        records = history.read(file)
        for score in history.evals(records):
            scores[score.round].append(score.mean)
        taken += [(one.round, one.external_groups) for one in history.rounds(records)]
    measured_at = [at for at, found in sorted(scores.items()) if len(found) == nodes]
    return [
        _measured(at, scores[at], [groups for round_, groups in taken if before < round_ <= at])
        for before, at in pairwise([-1, *measured_at])
    ]


def _measured(at: int, scores: list[float], taken: list[int]) -> Measured:
    return Measured(at, fmean(scores), min(scores), max(scores), fmean(taken) if taken else 0.0)


def read(file: Path) -> dict[Trial, list[Measured]]:
    """Finished trials of a results file; none where there is none."""
    found: dict[Trial, list[Measured]] = defaultdict(list)
    for line in csv_files.read(file):
        found[csv_files.typed(line, Trial)].append(csv_files.typed(line, Measured))
    return dict(found)


def table(trials: dict[Trial, list[Measured]]) -> str:
    """Markdown: the mean curve of each arm and mode over its runs, its mean height and its end with the range of their
    runs, and how far both are from the simulation's, with the 90 % interval of that."""
    groups: dict[tuple[str, Mode], list[list[Measured]]] = defaultdict(list)
    for trial, points in trials.items():
        groups[trial.arm, trial.mode].append(points)
    rounds = [one.round for one in next(iter(trials.values()))]
    heads = ["arm", "mode", "runs", "others' groups a round", *(f"round {at}" for at in rounds)]
    heads += ["mean height", "less the simulated", "end", "less the simulated"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for arm in dict.fromkeys(arm for arm, _ in groups):
        known = groups.get((arm, "simulated"), [])
        for mode in get_args(Mode):
            if not (runs := groups.get((arm, mode), [])):
                continue
            cells = [arm, mode, str(len(runs)), f"{fmean(fmean(p.external for p in run[1:]) for run in runs):.1f}"]
            cells += [f"{fmean(run[at].held_out for run in runs):.3f}" for at in range(len(rounds))]
            for measure in (_height, _end):
                own, others = [measure(run) for run in runs], [measure(run) for run in known]
                cells.append(f"{fmean(own):.3f} ({min(own):.3f} to {max(own):.3f})")
                apart = interval(own, others) if mode != "simulated" and len(own) > 1 and len(others) > 1 else None
                cells.append(_told(apart))
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _height(run: list[Measured]) -> float:
    return area([(one.round, one.held_out) for one in run])


def _end(run: list[Measured]) -> float:
    return run[-1].held_out


def _told(apart: Interval | None) -> str:
    return f"{apart.estimate:+.3f} ({apart.low:+.3f} to {apart.high:+.3f})" if apart else ""
