"""The paper's controlled experiment at our scale: swarms in one process, arm against arm, seed by seed.

    python scripts/bench/sapo.py plan                 # the stages, what is done, how long the rest takes
    python scripts/bench/sapo.py run lr --workers 2   # take what is missing of a stage
    python scripts/bench/sapo.py report               # tables and plots from the results

A run that was interrupted is taken again from its start; finished ones stay. Results are docs/benchmarks/sapo/*.csv,
one line an evaluation. What is compared, on which seeds, and how it is judged is in `simulation/stages.py`, and was
committed before the seeds of the confirmation were run.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a run has one thread

import asyncio
import csv
import multiprocessing
import statistics
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

import click
from simulation import report as tables
from simulation.arms import ARMS, REPOSITORY
from simulation.stages import BASES, REFERENCES, STAGES
from simulation.swarm import COLUMNS, Point, Run, execute, row

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


@cli.command()
@click.argument("stage", type=click.Choice(sorted(STAGES)))
@click.option("--workers", default=2, show_default=True, help="Runs at once.")
@click.option("--bases", type=click.Path(path_type=Path), default=REPOSITORY / "build" / "bench" / "bases")
@click.pass_obj
def run(results: Path, stage: str, workers: int, bases: Path) -> None:
    """Take the runs of STAGE that are missing."""
    file = results / f"{stage}.csv"
    done = finished(file)
    todo = [one for one in STAGES[stage] if one not in done]
    folders = {base: bases / base for base in {one.base for one in todo}}
    for base, folder in folders.items():
        if not folder.is_dir():
            raise click.ClickException(f"{folder} is missing; make it: {BASES[base]} --out {folder}")
    began, taken = time.monotonic(), 0
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        waiting: set[Future[tuple[Run, list[Point]]]] = {pool.submit(take, one, folders[one.base]) for one in todo}
        while waiting:
            ended, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in ended:
                one, points = future.result()
                append(file, one, points)
                taken += 1
                minutes = (time.monotonic() - began) / 60
                click.echo(
                    f"{taken} of {len(todo)}: {one.arm}, {one.base}, seed {one.seed}, lr {one.lr:g}: held-out "
                    f"{points[0].held_out:.3f} -> {points[-1].last:.3f}; {minutes:.0f} min, about "
                    f"{minutes / taken * len(waiting):.0f} more"
                )


@cli.command()
@click.pass_obj
def report(results: Path) -> None:
    """Print each stage's tables, and draw its curves beside its results."""
    for stage in STAGES:
        found = tables.read(results / f"{stage}.csv")
        if not found:
            continue
        click.echo(f"\n## {stage}\n")
        if len({one.run.lr for one in found}) > 1:
            click.echo(tables.rates(found) + "\n")
            continue  # arms at different rates are no arms to compare
        click.echo(tables.comparison(found, REFERENCES))
        tables.draw(found, list(tables.by_arm(found)), results / f"{stage}.png")


def take(one: Run, base: Path) -> tuple[Run, list[Point]]:
    """One run, in a process of the pool."""
    return one, asyncio.run(execute(one, ARMS[one.arm], base, lambda taken: None))


def finished(file: Path) -> dict[Run, float]:
    """The runs that a file holds whole, with their CPU seconds."""
    return {one.run: one.last["seconds"] for one in tables.read(file)}


def append(file: Path, one: Run, points: list[Point]) -> None:
    """Add a whole run in one write."""
    new = not file.exists()
    with file.open("a", newline="") as handle:
        writer = csv.DictWriter(handle, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerows(row(one, point) for point in points)


if __name__ == "__main__":
    cli()
