"""One optimiser step by our trainer, by TRL's GRPOTrainer and by genrl's GRPO trainer: time, memory, exactness.

    python scripts/bench/trainer.py                 # the embedded model
    python scripts/bench/trainer.py --all           # also SmolLM2-135M and a random model with 152 k tokens

Everyone does the same step: 64 sequences (8 groups of 8 completions), the same weights in float32, the same tokens, one
CPU thread. Each contender is a process of its own; in each repetition all take one step in turn, so that whatever else
the machine does meets all of them, and ratios are taken repetition by repetition. Memory is the peak of the resident
size above what was resident before the first step. Errors of the log-probs are against a float64 forward pass without
batch and padding.

TRL and genrl live in virtual environments that this script makes in a cache folder (a few minutes and 3 GB, once); the
settings they run with are in `contenders` below, why they are the fastest in docs/benchmarks.md.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from trainer_bench import environments, report, workload
from trainer_bench.report import Measured

from sapo_node.machine import find_memory

LR = 1e-6  # weights stay what they were, so all repetitions do the same work


@dataclass(frozen=True)
class Entry:
    """A library, in one configuration."""

    name: str
    library: str
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Workload:
    """A model, with the completions' lengths (`full` or `mixed`, at most `longest`) and how often to measure."""

    model: str
    questions: str  # of which shipped configuration
    shape: str
    longest: int
    repeats: int
    trl_rows: tuple[int, ...]
    alone: bool = False  # a contender's process ends after its turn: the memory does not hold all of them


EMBEDDED = (
    Workload("benchmark", "node", "mixed", 64, 10, (64, 16)),
    Workload("benchmark", "paper", "mixed", 64, 10, (64, 16)),
)
LARGE = (
    Workload("smollm2", "node", "mixed", 24, 2, (16,), alone=True),
    Workload("random-0.1b", "node", "mixed", 24, 2, (16,), alone=True),
)


def contenders(rows: Sequence[int], warm: bool = True) -> list[Entry]:
    """Who takes part; ours first. `rows`: sequences a forward pass that TRL is tried with.

    The first of these is also tried with `torch_compile`, which needs a C++ compiler, and a warm-up to compile in; that
    is for lengths that are the same in all steps here, as they are not in training.
    """
    compiled = rows[:1] if warm and shutil.which("c++") else ()
    return [
        Entry("ours", "ours", {"micro_batch_tokens": 2048}),  # as configs/demo.yaml sets it for embedded models
        *(Entry(f"trl {number} rows", "trl", {"rows": number}) for number in rows),
        *(Entry(f"trl {number} rows compiled", "trl", {"rows": number, "torch_compile": True}) for number in compiled),
        Entry("genrl minibatch 64", "genrl", {"minibatch_size": 64, "enable_gradient_checkpointing": False}),
        Entry("genrl defaults", "genrl"),
    ]


class OutOfMemory(click.ClickException):
    """A contender needs more memory than there is; the message is for the table."""


class Child:
    """A contender's process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, command: str = "") -> Any:
        """Its answer to a command; without one, what it says when it is ready."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if command:
            print(command, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise click.ClickException("a contender ended; its output says why")
        return json.loads(line)


@contextmanager
def child(python: Path, entry: Entry, job: Path, log: Path) -> Iterator[Child]:
    """Start a contender; it ends with the block."""
    here = str(Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": here, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if entry.library == "ours":
        environment["PYTHONPATH"] = os.pathsep.join([here, str(Path(here).parents[1])])
    command = [python, "-m", "trainer_bench.child", entry.library, job]
    most = find_memory()[1] * 9 // 10  # so that it fails by itself, and nobody else is killed
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            text=True,
            preexec_fn=partial(limit_memory, most),
        )
    try:
        one = Child(process)
        try:
            one.ask()
            yield one
        except click.ClickException as error:
            told = log.read_text()[-4000:]
            if any(text in told for text in ("can't allocate memory", "MemoryError")):
                raise OutOfMemory(f"needs more than the {most / (1 << 30):.0f} GiB that are free here") from error
            raise click.ClickException(f"{entry.name}: {error.message}\n{told}") from error
    finally:
        process.kill()
        process.wait()


def measure(what: Workload, cache: Path, flat_groups: int, entries: Sequence[Entry]) -> list[Measured]:
    """All contenders on one workload, in turns."""
    folder = environments.model_folder(cache, what.model)
    batches, exact = workload.make(folder, what.questions, what.shape, what.longest, flat_groups)
    sizes = workload.describe(batches["all"])
    click.echo(f"\n{what.model}, questions of {what.questions}.yaml, completions {what.shape} <= {what.longest} tokens")
    click.echo(json.dumps(sizes))
    measured = [Measured(entry.name) for entry in entries]
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        starts = []
        for number, entry in enumerate(entries):
            job = Path(scratch) / f"{number}.json"
            job.write_text(
                json.dumps(
                    {
                        "model": str(folder),
                        "settings": entry.settings,
                        "threads": 1,
                        "lr": LR,
                        "sequences": sizes["sequences"],
                        "max_prompt": sizes["prompt_tokens"][1],
                        "max_completion": what.longest,
                        "batches": batches,
                    }
                )
            )
            python = Path(sys.executable) if entry.library == "ours" else environments.python_of(cache, entry.library)
            starts.append(partial(child, python, entry, job, Path(scratch) / f"{number}.log"))
        if what.alone:
            for _ in range(what.repeats):
                for start, into in zip(starts, measured, strict=True):
                    if not into.failed:
                        by_itself(start, into, flat_groups, batches, exact)
            return measured
        pairs = [(stack.enter_context(start()), into) for start, into in zip(starts, measured, strict=True)]
        turns(pairs, what.repeats, 1, flat_groups)
        for one, into in pairs:
            into.compare(workload.compared(batches["all"], one.ask("logprobs all")), exact)
    return measured


def by_itself(
    start: Callable[[], AbstractContextManager[Child]],
    into: Measured,
    flat_groups: int,
    batches: dict[str, Any],
    exact: Sequence[float],
) -> None:
    """One repetition of a contender whose process ends after it."""
    try:
        with start() as one:
            turns([(one, into)], 1, 0, flat_groups)
            if not into.error_max:
                into.compare(workload.compared(batches["all"], one.ask("logprobs all")), exact)
    except OutOfMemory as error:
        into.failed = str(error)
    click.echo(f"{into.name}: {into.failed or f'{into.cpu_seconds[-1]:.1f} CPU s'}", err=True)


def limit_memory(most: int) -> None:
    """Let this process fail beyond so many bytes."""
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def turns(pairs: Sequence[tuple[Child, Measured]], repeats: int, warm_ups: int, flat_groups: int) -> None:
    """Everyone's steps, in turn. A large model's first step counts: what a warm-up costs there is small beside it."""
    for repetition in range(repeats + warm_ups):
        for one, into in pairs:
            into.add(one.ask("step all"), warm_up=repetition < warm_ups)
    for _ in range(repeats if flat_groups else 0):
        for one, into in pairs:
            into.flat_cpu_seconds.append(one.ask("step flat")["cpu_seconds"])


@click.command()
@click.option("--all", "everything", is_flag=True, help="Also SmolLM2-135M and a random model with a large vocabulary.")
@click.option("--model", "models", multiple=True, type=click.Choice(environments.MODELS), help="Only these.")
@click.option("--repeats", type=int, help="Repetitions instead of each workload's own.")
@click.option("--flat-groups", default=3, show_default=True, help="Groups without advantage in the second batch.")
@click.option("--envs", type=click.Path(path_type=Path), default=environments.default_cache, help="The cache folder.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Raw values: a .csv or .json file.")
def main(
    everything: bool, models: tuple[str, ...], repeats: int | None, flat_groups: int, envs: Path, out: Path | None
) -> None:
    """Measure, and print a table a workload."""
    known = (*EMBEDDED, *LARGE, Workload("random-0.5b", "node", "mixed", 24, 1, (16,), alone=True))
    chosen = [one for one in known if one.model in models] if models else [*EMBEDDED, *(LARGE if everything else ())]
    results = []
    for what in chosen:
        if repeats:
            what = replace(what, repeats=repeats)
        measured = measure(what, envs, flat_groups, contenders(what.trl_rows, warm=not what.alone))
        click.echo(report.table(measured))
        for line in report.goals(measured):
            click.echo(line)
        results.append((asdict(what), measured))
    if out:
        report.write(out, results)


if __name__ == "__main__":
    main()
