"""How much a swarm seems to gain that learns nothing: the reward of a training set after selection.

    python scripts/bench/selection.py

Every node answers with the same success rate p for ever. Each round it trains on I own groups and on J groups of others
of which those without advantage were dropped. If reward is averaged over that training set, groups that survive the
filter raise it: at small p a group that has an advantage has more right answers than the average one. Nothing was
learnt. The reward of the groups that a node drew first does not move.

The supply is simulated too: with few nodes or a small p there are fewer than J usable groups, and the set is smaller.
"""

import csv
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import click
import numpy as np

REPOSITORY = Path(__file__).resolve().parent.parent.parent
RATES = (0.02, 0.03, 0.045, 0.07, 0.1, 0.15, 0.2, 0.3)
MIXES = ((6, 2), (4, 4), (2, 6))


@dataclass(frozen=True)
class Inflation:
    """What the training sets of one mix show."""

    success_rate: float
    local: int  # I
    external: int  # J
    first_drawn: float  # mean reward of the groups drawn first: the success rate, up to noise
    after_selection: float  # mean reward of the training sets
    seeming_gain: float  # of after_selection over first_drawn, 0.5 is +50 %
    external_used: float  # mean number of external groups in a set, at most J


def simulate(
    rate: float, local: int, external: int, *, nodes: int, completions: int, rounds: int, rng: np.random.Generator
) -> Inflation:
    """`rounds` rounds of one node whose `nodes - 1` peers each offer `local` new groups a round.

    A group's reward is the mean of `completions` independent answers that are right with probability `rate`.
    """
    own = rng.binomial(completions, rate, (rounds, local)) / completions
    offered = rng.binomial(completions, rate, (rounds, (nodes - 1) * local)) / completions
    order = rng.random(offered.shape)
    order[(offered == 0) | (offered == 1)] = 2.0  # behind all that have an advantage
    usable = np.take_along_axis(offered, np.argsort(order, axis=1), axis=1)[:, :external]
    used = np.minimum(np.sum(order < 2.0, axis=1), external)
    taken = np.where(np.arange(usable.shape[1]) < used[:, None], usable, 0.0)
    after = (own.sum(1) + taken.sum(1)) / (local + used)
    first = float(own.mean())
    return Inflation(
        rate, local, external, first, float(after.mean()), float(after.mean() / first - 1), float(used.mean())
    )


@click.command()
@click.option("--nodes", default=8, show_default=True)
@click.option("--completions", default=8, show_default=True, help="L, completions of a group.")
@click.option("--rounds", default=100_000, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=REPOSITORY / "docs" / "benchmarks" / "selection.csv")
def main(nodes: int, completions: int, rounds: int, seed: int, out: Path) -> None:
    """Write the table and print it."""
    rng = np.random.default_rng(seed)
    found = [
        simulate(rate, local, external, nodes=nodes, completions=completions, rounds=rounds, rng=rng)
        for rate in RATES
        for local, external in MIXES
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow([one.name for one in fields(Inflation)])
        writer.writerows([f"{value:.4g}" for value in astuple(one)] for one in found)
    click.echo("success rate   " + "   ".join(f"{local}/{external}" for local, external in MIXES))
    for rate in RATES:
        gains = [one.seeming_gain for one in found if one.success_rate == rate]
        click.echo(f"{rate:<12g} " + " ".join(f"{gain:+6.0%}" for gain in gains))


if __name__ == "__main__":
    main()
