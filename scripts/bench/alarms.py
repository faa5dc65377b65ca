"""Do the alarms keep quiet in honest training, and do they fire and end when somebody attacks?

    python scripts/bench/alarms.py run                          # take what is missing: a quarter of an hour
    python scripts/bench/alarms.py run --trial hack --rounds 60 # one trial, shorter
    python scripts/bench/alarms.py report

A trial is a swarm in one process (`simulation/`) whose nodes have alarms and act on them. `honest` has four nodes and
five seeds. The others have two nodes that meet attackers in the second fifth of the rounds: what comes then is a
verdict on the alarms, what comes after it shows whether they end. Results are docs/benchmarks/alarms.csv, one line a
run; a run that was interrupted is taken again.

    hack       answers propositional_logic, whose scorer pays for one constant answer, with that
    negative   one wrong answer among right ones, in groups that outnumber the own ones three to one
    easy       one task only, the one that is easiest
    collapse   on a model that can do the tasks: each task's most frequent answer, in groups that outweigh the own ones
               24 to 1. At three fifths the owner goes back to the checkpoint from before the attack
    drift      as `negative`, at ten times the learning rate on a model that can do the tasks; the owner goes back, too
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a run has one thread

import asyncio
import copy
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import csv_files
import torch
import yaml
from jobs import in_processes
from simulation.arms import LEFT_OUT, MIXTURE, REPOSITORY, Arm, mix
from simulation.node import Node
from simulation.poison import Kind, Poisoner
from simulation.swarm import Swarm, swarm

RESULTS = REPOSITORY / "docs" / "benchmarks" / "alarms.csv"
BENCHMARK, DEMO = (REPOSITORY / "sapo_node" / "assets" / name for name in ("benchmark", "demo"))
LR = 3e-4  # the default of models of this size
HACK = "(P ∨ Q)"
HONEST_SEEDS = range(5)
EDGE = 20  # rounds that the figures of the start and the end are means of


@dataclass(frozen=True)
class Trial:
    """What is tried."""

    arm: Arm
    lr: float = LR
    base: Path = BENCHMARK
    expected: str = ""  # the alarm that should fire; empty: none has to
    too_fast: float = 1.0  # times the learning rate while the attack lasts
    goes_back: bool = False  # to the policy from before the attack, as an owner may


def whole_mixture() -> list[dict[str, Any]]:
    """The demo's tasks, with the one that can be hacked."""
    tasks: list[dict[str, Any]] = yaml.safe_load(MIXTURE.read_text())["tasks"]["mixture"]
    return tasks


def attacked(
    name: str, kind: Kind, local: int, external: int, poisoners: int = 2, weight: float = 1.0, **more: Any
) -> Arm:
    """Two nodes, and attackers beside them; others' groups have that weight in the loss."""
    return Arm(name, mix(local, external, external_weight=weight), nodes=2, poisoners=poisoners, poison=kind, **more)


TRIALS = {
    "honest": Trial(Arm("honest", mix(4, 4), nodes=4)),
    "hack": Trial(attacked("hack", "constant", 4, 4, tasks={"mixture": whole_mixture()}), expected="reward hack"),
    "negative": Trial(attacked("negative", "negative", 4, 12, poisoners=4)),
    "easy": Trial(attacked("easy", "easy", 4, 4)),
    "collapse": Trial(
        attacked("collapse", "constant", 4, 24, poisoners=6, weight=4.0), LR, DEMO, expected="collapse", goes_back=True
    ),
    "drift": Trial(
        attacked("drift", "negative", 4, 12, poisoners=4), LR, DEMO, expected="drift", too_fast=10.0, goes_back=True
    ),
}


class Hacker(Poisoner):
    """Sends one answer to every question of a task whose scorer pays for it."""

    def _texts(self, asked: Any, rng: random.Random) -> list[str]:
        if asked.spec.name != LEFT_OUT:
            return []
        count = self._config.rollouts.completions_per_task
        return [HACK] * (count // 2) + ["P"] * (count - count // 2)


@dataclass(frozen=True)
class Run:
    """One run; names it in the results."""

    trial: str
    seed: int
    rounds: int


@dataclass(frozen=True)
class Result:
    """What became of it. Alarms of all nodes together; numbers are means over the nodes."""

    attack: str  # rounds of the attack, "100-199"; empty: none
    began: str  # alarms in their order, "collapse@130", by the number of the round
    ended: str
    lasting: int  # alarms that last at the end
    any_right: str  # at the start, at the lowest, at the end
    reward: str
    entropy: str
    text_logprob: str
    seconds: float


class Course:
    """A number over the rounds of a run."""

    def __init__(self) -> None:
        self._values: list[float] = []

    def add(self, values: list[float | None]) -> None:
        """Its values on all nodes in one round."""
        known = [value for value in values if value is not None]
        if known:
            self._values.append(sum(known) / len(known))

    def __str__(self) -> str:
        """At the start, at its lowest, at the end; each the mean of EDGE rounds or a fifth of all."""
        width = max(1, min(EDGE, len(self._values) // 5))
        means = [sum(self._values[i : i + width]) / width for i in range(len(self._values) - width + 1)]
        return " ".join(f"{value:.3f}" for value in (means[0], min(means), means[-1])) if means else ""


async def execute(run: Run, told: Callable[[int], None] = lambda taken: None) -> Result:
    """Take a run from start to end. `told` hears of every round that ended."""
    torch.set_num_threads(1)
    trial, started = TRIALS[run.trial], time.process_time()
    attack = range(run.rounds // 5, 2 * run.rounds // 5) if run.trial != "honest" else range(0)
    courses = {name: Course() for name in ("any_right", "reward_first_drawn", "entropy_sampled", "text_logprob")}
    events: dict[str, list[str]] = {"began": [], "ended": []}
    async with swarm(trial.arm, trial.base, run.seed, trial.lr, watched=True) as (made, _, _):
        attackers = attackers_of(made, run)
        before: list[set[tuple[str, str]]] = [set() for _ in made.nodes]
        for node in made.nodes:
            assert node.watch is not None
            await node.watch.measure(node.policy)  # as a node does when it starts
        kept: list[Checkpoint] = []
        for number in range(run.rounds):
            if trial.goes_back and number == attack[0]:
                kept = [checkpoint_of(node) for node in made.nodes]
            if trial.goes_back and number == 3 * run.rounds // 5:
                for node, checkpoint in zip(made.nodes, kept, strict=True):
                    go_back(node, checkpoint)
            made.poisoners = attackers if number in attack else []
            for node in made.nodes:
                for parameters in node.policy.trainer.optimizer.param_groups:
                    parameters["lr"] = trial.lr * (trial.too_fast if number in attack else 1.0)
            await made.round(number)
            for index, node in enumerate(made.nodes):
                now = lasting(node)
                events["began"] += [f"{kind}@{number}" for kind, _ in sorted(now - before[index])]
                events["ended"] += [f"{kind}@{number}" for kind, _ in sorted(before[index] - now)]
                before[index] = now
            for name, course in courses.items():
                course.add([getattr(node.record, name) for node in made.nodes])
            told(number + 1)
        return Result(
            attack=f"{attack[0]}-{attack[-1]}" if attack else "",
            began="; ".join(events["began"]),
            ended="; ".join(events["ended"]),
            lasting=sum(map(len, before)),
            any_right=str(courses["any_right"]),
            reward=str(courses["reward_first_drawn"]),
            entropy=str(courses["entropy_sampled"]),
            text_logprob=str(courses["text_logprob"]),
            seconds=time.process_time() - started,
        )


def attackers_of(made: Swarm, run: Run) -> list[Poisoner]:
    """The hostile peers of a run."""
    if run.trial != "hack":
        return made.poisoners
    trial = TRIALS[run.trial]
    config = trial.arm.config(trial.base, trial.lr)
    return [Hacker(i, run.seed, config, made._clock, "constant") for i in range(trial.arm.poisoners)]


Checkpoint = tuple[dict[str, Any], dict[str, Any]]
"""Weights and moments."""


def checkpoint_of(node: Node) -> Checkpoint:
    """A copy of a node's policy."""
    trainer = node.policy.trainer
    return copy.deepcopy((trainer.policy.model.state_dict(), trainer.optimizer.state_dict()))


def go_back(node: Node, checkpoint: Checkpoint) -> None:
    """Put a node's policy back; its alarms remember what they know."""
    trainer, (weights, moments) = node.policy.trainer, checkpoint
    trainer.policy.model.load_state_dict(weights)
    trainer.optimizer.load_state_dict(moments)


def lasting(node: Node) -> set[tuple[str, str]]:
    """Kinds and subjects of a node's alarms."""
    assert node.watch is not None
    return set(node.watch.lasting)


# ---- the command -----------------------------------------------------------------------------------------------------


def read(file: Path) -> dict[Run, dict[str, str]]:
    """The runs that a file holds."""
    return {csv_files.typed(line, Run): line for line in csv_files.read(file)}


def take(run: Run) -> Result:
    """One run, in a process of the pool."""
    return asyncio.run(execute(run))


@click.group()
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, help="The CSV file.")
@click.pass_context
def cli(context: click.Context, results: Path) -> None:
    """Alarms in honest training and under attack."""
    context.obj = results


@cli.command("run")
@click.option("--trial", "only", type=click.Choice(sorted(TRIALS)), help="This trial alone.")
@click.option("--rounds", default=500, show_default=True)
@click.option("--seeds", default=len(HONEST_SEEDS), show_default=True, help="Of the honest trial.")
@click.option("--workers", default=1, show_default=True, help="Runs at once.")
@click.pass_obj
def run_trials(file: Path, only: str | None, rounds: int, seeds: int, workers: int) -> None:
    """Take the runs that are missing."""
    wanted = [Run("honest", seed, rounds) for seed in range(seeds)]
    wanted += [Run(name, 0, rounds) for name in TRIALS if name != "honest"]
    done = read(file)
    jobs = {run: (take, run) for run in wanted if run not in done and only in (None, run.trial)}

    def ended(run: Run, result: Result) -> str:
        csv_files.append(file, [csv_files.row(run, result)])
        return f"{run.trial}, seed {run.seed}: began {result.began or 'none'}, ended {result.ended or 'none'}"

    in_processes(jobs, workers, ended)


@cli.command()
@click.pass_obj
def report(file: Path) -> None:
    """Print a table of the results."""
    click.echo("| trial | seed | rounds | attack | expected | began | ended | last at the end | any right | entropy |")
    click.echo("|---|---|---|---|---|---|---|---|---|---|")
    for run, found in read(file).items():
        cells = [found[name] for name in ("began", "ended", "lasting", "any_right", "entropy")]
        start = [run.trial, str(run.seed), str(run.rounds), found["attack"], TRIALS[run.trial].expected]
        click.echo(f"| {' | '.join(cell or '-' for cell in [*start, *cells])} |")


if __name__ == "__main__":
    cli()
