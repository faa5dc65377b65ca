"""What hostile peers cost an honest node: CPU a round, memory, crashes, and whether anything false is trained on.

    python scripts/bench/hostile.py                                         # all of it, resumable
    python scripts/bench/hostile.py --kinds work --rounds 6 --repeats 1 --out /tmp/hostile.csv

Four real nodes (`sapo-node start` on loopback, settings of configs/demo.yaml, `training.rule: capped`, one thread each)
train beside four attackers of one kind, and, in a run before or after, beside four processes that are as busy and talk
to nobody: attackers on this machine take the cores of the nodes, which is not what they cost a node. A non-attacker has
loaded what an attacker has, has a p2pd too, and burns as many CPU-seconds a second as the attackers did; which of the
two runs comes first changes from repeat to repeat. The kinds:

    streams   connections and streams that are silent or slow, lies about lengths, listed batches asked for for ever
    hints     floods of hints to nowhere, too large, repeated
    dht       junk, far expiries, foreign subkeys, plain values over dictionaries, questions without number
    work      signed batches: wrong questions, settings at and beyond the bounds, huge completions, planted code, copies
    valid     true groups with an advantage, as many as fit

An attacker is a member of the swarm by our own network code, with its own key and p2pd, one thread, and at most 200
operations a second. Measured: CPU-seconds of a node's processes (node, p2pd, policy worker, scorers) a round; their
memory (PSS) at the end; crashes; and, from the nodes' pools and what attackers wrote down as sent, whether a group was
accepted that its producer did not make, whether questions and rewards trained on are true, and whether planted code
ran. Linux only.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
from hostile_bench import report
from hostile_bench.report import ATTACKERS, BUSY, KINDS, NODES, Result
from hostile_bench.swarm import REPOSITORY, Run, RunFailed

DEFAULT_OUT = REPOSITORY / "docs" / "benchmarks" / "hostile.csv"


def plan(repeats: int, kinds: Sequence[str], rounds: int, done: Sequence[Result]) -> Iterator[tuple[int, str]]:
    """The (repeat, kind) pairs that are not measured yet, all kinds of one repeat before the next repeat."""
    measured = {(pair.attacked.repeat, kind) for kind, found in report.pairs(done, rounds).items() for pair in found}
    return ((n, kind) for n in range(1, repeats + 1) for kind in kinds if (n, kind) not in measured)


def burnt(kind: str, results: Sequence[Result]) -> float | None:
    """CPU-seconds a second of one attacker of a kind in its newest run, None where there is none."""
    found = [one.others_cpu for one in results if one.kind == kind and one.beside == ATTACKERS]
    return found[-1] / NODES if found else None


@contextmanager
def _folder(keep: Path | None) -> Iterator[str]:
    """A new folder for a run, below `keep` if it is to stay."""
    if keep is not None:
        yield tempfile.mkdtemp(prefix="hostile-", dir=keep.absolute())
        return
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        yield folder


def run_pair(repeat: int, kind: str, rounds: int, results: Sequence[Result], keep: Path | None) -> list[Result]:
    """Both runs of a pair. In even repeats the busy run comes first, as busy as the attackers of the repeat before."""
    made: list[Result] = []
    order = [ATTACKERS, BUSY] if repeat % 2 or burnt(kind, results) is None else [BUSY, ATTACKERS]
    for beside in order:
        rate = burnt(kind, [*results, *made]) or 0.0
        started = time.monotonic()
        with _folder(keep) as folder:
            made.append(Run(Path(folder), kind, beside, rounds, rate).measure(repeat))
        one = made[-1]
        click.echo(
            f"{time.strftime('%H:%M:%S')} repeat {repeat}, {kind}, {beside}: {one.cpu_a_round:.3f} CPU s a round, "
            f"{one.pss_mib:.0f} MiB a node, others {one.others_cpu:.2f} CPU s a second, {one.operations} operations "
            f"({one.failed} failed), {one.hostile} of {one.external} groups theirs; {time.monotonic() - started:.0f} s"
        )
    return made


@click.command()
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1))
@click.option("--rounds", default=60, show_default=True, type=click.IntRange(1), help="Measured rounds of each node.")
@click.option("--kinds", default=",".join(KINDS), show_default=True, help="Kinds of attackers, with commas between.")
@click.option("--out", default=DEFAULT_OUT, show_default=True, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--keep", type=click.Path(path_type=Path, file_okay=False, exists=True), help="Keep the runs' folders.")
def main(repeats: int, rounds: int, kinds: str, out: Path, keep: Path | None) -> None:
    """Measure what is missing in --out, then print the table and the goals."""
    chosen = kinds.split(",")
    if unknown := set(chosen) - set(KINDS):
        raise click.BadParameter(
            f"{', '.join(sorted(unknown))}; the kinds are {', '.join(KINDS)}", param_hint="--kinds"
        )
    os.environ["OMP_NUM_THREADS"] = "1"
    for repeat, kind in plan(repeats, chosen, rounds, report.read(out)):
        try:
            made = run_pair(repeat, kind, rounds, report.read(out), keep)
        except RunFailed as error:
            raise click.ClickException(f"repeat {repeat}, {kind}: {error}") from error
        report.append(out, made)
    results = report.read(out)
    click.echo(report.table(results, rounds))
    for line in report.verdicts(results, rounds):
        click.echo(line)


if __name__ == "__main__":
    main()
