"""The paper's controlled experiment at our scale: swarms in one process, arm against arm, seed by seed.

    python scripts/bench/sapo.py bases                # make the models that the stages begin with
    python scripts/bench/sapo.py plan                 # the stages, and what is done
    python scripts/bench/sapo.py run lr --workers 2   # take what is missing of a stage
    python scripts/bench/sapo.py report               # tables and plots from the results

A run that was interrupted is taken again from its start; finished ones stay. Machines of another kind make other
weights of a base, and arms are compared on the same ones: a seed that was begun on others and not ended is taken again
whole. Results are docs/benchmarks/sapo/*.csv, one line an evaluation. What is compared, on which seeds, and how it is
judged is in `simulation/stages.py`, and was committed before the seeds of the confirmation were run.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a run has one thread

import asyncio
import statistics
import subprocess
import sys
from pathlib import Path

import click
from csv_files import append, drop, row, typed
from jobs import in_processes
from simulation import processes
from simulation import propagation as spread
from simulation import report as tables
from simulation.arms import ARMS, REPOSITORY
from simulation.stages import (
    BASES,
    BORROW,
    CLAIMS,
    COMPARED,
    DRAWN,
    PROCESSES,
    RATE,
    REFERENCES,
    ROUNDS,
    STAGES,
    TASK,
    TEACHERS,
    TRIALS,
    WINNER,
)
from simulation.swarm import Point, Run, Weights, execute

RESULTS = REPOSITORY / "docs" / "benchmarks" / "sapo"


@click.group()
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, help="Folder of the CSV files.")
@click.pass_context
def cli(context: click.Context, results: Path) -> None:
    """SAPO against its controls, on a swarm in one process."""
    results.mkdir(parents=True, exist_ok=True)
    context.obj = results


@cli.command()
@click.pass_obj
def plan(results: Path) -> None:
    """Show the stages."""
    for stage, runs in STAGES.items():
        done = finished(results / f"{stage}.csv")
        minutes = [seconds / 60 for run, seconds in done.items() if run in runs]
        missing = sum(run not in done for run in runs)
        each = statistics.median(minutes) if minutes else 0.0
        click.echo(f"{stage:<14} {len(runs) - missing:>3} of {len(runs):>3} runs, {each:.1f} CPU minutes each")


FOLDER = REPOSITORY / "build" / "bench" / "bases"
in_folder = click.option("--bases", type=click.Path(path_type=Path), default=FOLDER, help="Folder of the models.")
by_workers = click.option("--workers", default=2, show_default=True, help="Runs at once.")


@cli.command("bases")
@in_folder
def make_bases(bases: Path) -> None:
    """Make the models that are missing: two minutes each, and seven more for the first of a seed."""
    for base, command in BASES.items():
        if not (bases / base).is_dir():
            click.echo(f"{base}: {command}")
            subprocess.run([sys.executable, *command.split()[1:], "--out", bases / base], cwd=REPOSITORY, check=True)


@cli.command()
@click.argument("stage", type=click.Choice(sorted(STAGES)))
@by_workers
@in_folder
@click.pass_obj
def run(results: Path, stage: str, workers: int, bases: Path) -> None:
    """Take the runs of STAGE that are missing."""
    file, runs = results / f"{stage}.csv", STAGES[stage]
    here = {name: Weights.of(base_of(bases, name)) for name in {one.base for one in runs}}
    elsewhere = {(one.run, one.began) for one in tables.begun_elsewhere(tables.read(file), runs, here)}
    if drop(file, lambda line: (typed(line, Run), typed(line, Weights)) in elsewhere):
        click.echo(f"{len(elsewhere)} runs are taken again: their seeds were begun on other weights of their bases")
    done = finished(file)
    jobs = {one: (take, one, base_of(bases, one.base)) for one in runs if one not in done}

    def ended(one: Run, points: list[Point]) -> str:
        append(file, [row(one, point, here[one.base]) for point in points])
        return (
            f"{one.arm}, {one.base}, seed {one.seed}, lr {one.lr:g}: held-out {points[0].held_out:.3f} -> "
            f"{points[-1].last:.3f}"
        )

    in_processes(jobs, workers, ended)


@cli.command("propagation")
@by_workers
@in_folder
@click.pass_obj
def run_propagation(results: Path, workers: int, bases: Path) -> None:
    """Take the missing trials of how a skill spreads."""
    file = results / "propagation.csv"
    base = base_of(bases, "base-0")
    teachers = {share: base_of(bases, name) for share, name in TEACHERS.items()}
    here = Weights.of(base)
    if set(TRIALS) - spread.read(file).keys() and drop(file, lambda line: typed(line, Weights) != here):
        click.echo("all trials are taken again: they were begun on other weights of their base")
    done = spread.read(file)
    jobs = {
        one: (spread_of, one, base, None if one.share is None else teachers[one.share])
        for one in TRIALS
        if one not in done
    }

    def ended(one: spread.Trial, levels: list[spread.Level]) -> str:
        append(file, [row(one, level, here) for level in levels])
        return f"{one.variant}, seed {one.seed}: others {levels[0].others:.3f} -> {levels[-1].others:.3f}"

    in_processes(jobs, workers, ended)


@cli.command("processes")
@click.option("--repeats", default=6, show_default=True, help="Runs of each arm and mode.")
@in_folder
@click.pass_obj
def run_processes(results: Path, repeats: int, bases: Path) -> None:
    """Run the plain arms as real node processes, and simulated beside them, one swarm after another."""
    file, base = results / "processes.csv", base_of(bases, "base-0")
    here = Weights.of(base)
    if drop(file, lambda line: typed(line, Weights) != here):
        click.echo("all runs are taken again: they were begun on other weights of their base")
    done = processes.read(file)
    for repeat in range(repeats):
        for arm, mode in PROCESSES:
            trial = processes.Trial(arm, mode, "base-0", RATE, repeat)
            if trial not in done:
                found = processes.execute(trial, ARMS[arm], base, ROUNDS)
                append(file, [row(trial, point, here) for point in found])
                told = f"held-out {found[0].held_out:.3f} -> {found[-1].held_out:.3f}"
                click.echo(f"{arm}, {mode}, run {repeat}: {told}")


def base_of(bases: Path, name: str) -> Path:
    """A base's folder, which has to be there."""
    if not (bases / name).is_dir():
        raise click.ClickException(f"{bases / name} is missing; make it: python scripts/bench/sapo.py bases")
    return bases / name


@cli.command()
@click.pass_obj
def report(results: Path) -> None:
    """Print each stage's tables, and draw its curves beside its results."""
    for stage in STAGES:
        found = tables.read(results / f"{stage}.csv")
        if not found or stage == "start":  # in which nothing is learnt: `dose` tells of it
            continue
        references = COMPARED.get(stage, REFERENCES)
        if stage in BORROW:
            lent = tables.read(results / f"{BORROW[stage]}.csv")
            found = [one for one in lent if one.run.arm in references] + found
        click.echo(f"\n## {stage}\n")
        if len({one.run.lr for one in found}) > 1:
            click.echo(tables.rates(found) + "\n")
            continue  # arms at different rates are no arms to compare
        if stage == "dose":
            click.echo(tables.by_base(found, tables.read(results / "start.csv")))
            continue
        click.echo(tables.comparison(found, references))
        if stage in CLAIMS:
            click.echo(f"\n{tables.claims(found, CLAIMS[stage])}")
        if stage == "confirm":  # under poison the CPU seconds hold the poisoners' as well
            pairs = [(claim.first, claim.second) for claim in CLAIMS[stage]] + [(WINNER, "8/0 resample")]
            click.echo(f"\n{tables.equal_cost(found, pairs)}")
        click.echo(f"\n{tables.costs(found)}")
        if stage in DRAWN:
            draw(found, results / stage)
    if real := processes.read(results / "processes.csv"):
        click.echo(f"\n## real processes\n\n{processes.table(real)}")
    if trials := spread.read(results / "propagation.csv"):
        click.echo(f"\n## propagation of {TASK}\n\n{spread.table(trials)}")


def draw(found: list[tables.Result], path: Path) -> None:
    """A stage's curves by rounds, and by what was sampled for them, where arms of another length can be shown too."""
    arms = list(tables.by_arm(found))
    plain = [arm for arm in arms if ARMS[arm].longer == 1]
    tables.draw(found, plain, path.with_suffix(".png"))
    if plain != arms:
        tables.draw(found, arms, path.with_name(f"{path.name}-completions.png"), x="completions")


def take(one: Run, base: Path) -> list[Point]:
    """One run, in a process of the pool."""
    return asyncio.run(execute(one, ARMS[one.arm], base, lambda taken: None))


def finished(file: Path) -> dict[Run, float]:
    """The runs that a file holds whole, with their CPU seconds."""
    return {one.run: one.last["seconds"] for one in tables.read(file)}


def spread_of(one: spread.Trial, base: Path, teacher: Path | None) -> list[spread.Level]:
    """One trial, in a process of the pool."""
    return asyncio.run(spread.execute(one, base, teacher, lambda taken: None))


if __name__ == "__main__":
    cli()
