"""Who is trained on when identities cost nothing: a node among honest peers and many more ids of one party.

    python scripts/bench/sybils.py

Every peer, honest or not, sends valid work: informative groups, as many as it is asked for. What differs is how many
ids there are, whether their networks do, and whose work has been known for a day. The node fetches as `arrivals.py` and
`catalogue.py` do (a share is drawn, then a peer of it) into a stock of STOCK_ROUNDS rounds, and trains on what
`sapo.plan_round` chooses. The last columns are the honest part of the external groups it trained on, the mean and the
worst of all windows of 50 rounds, and the external groups a round, of J. Nothing here is random but the draws: no
model, no network, some seconds.

A claim is made for aged honest peers only. A fresh swarm, in which nobody is known, and sybils with the patience to
work for a day, are shown for what they are.
"""

import csv
import random
from dataclasses import dataclass
from pathlib import Path

import click

from sapo_node.config import RolloutsSection, TrainingSection
from sapo_node.rollouts.arrivals import STOCK_ROUNDS
from sapo_node.training.sapo import Candidate, plan_round

REPOSITORY = Path(__file__).resolve().parent.parent.parent
BATCH = 4  # groups of one fetch
WINDOW = 50  # rounds


@dataclass(frozen=True)
class Peer:
    """One id in the swarm."""

    name: str
    honest: bool
    source: str  # whose share it has
    aged: bool


@dataclass(frozen=True)
class Case:
    """A swarm as one node meets it."""

    title: str
    honest: int
    sybils: int
    networks: int  # over which the sybils are spread
    honest_aged: bool
    sybils_aged: bool = False
    rule: str = "capped"

    def peers(self) -> list[Peer]:
        """Everybody; honest peers have a network each."""
        good = [Peer(f"honest-{i}", True, f"home-{i}", self.honest_aged) for i in range(self.honest)]
        bad = [Peer(f"sybil-{i}", False, f"net-{i % self.networks}", self.sybils_aged) for i in range(self.sybils)]
        return good + bad


CASES = (
    Case("rule paper", 4, 40, 40, True, rule="paper"),
    Case("honest aged, sybils on networks of their own", 4, 40, 40, True),
    Case("honest aged, sybils on networks of their own", 4, 400, 400, True),
    Case("one honest peer aged", 1, 400, 400, True),
    Case("fresh swarm, sybils on networks of their own", 4, 40, 40, False),
    Case("fresh swarm, sybils on networks of their own", 4, 400, 400, False),
    Case("fresh swarm, sybils on one network", 4, 400, 1, False),
    Case("all aged, sybils on networks of their own", 4, 40, 40, True, True),
    Case("all aged, sybils on networks of their own", 4, 400, 400, True, True),
    Case("all aged, sybils on one network", 4, 400, 1, True, True),
)


class Stock:
    """The usable groups that the node holds, and what it fetches."""

    def __init__(self, case: Case, wanted: int, rng: random.Random) -> None:
        self._capped = case.rule == "capped"
        self._target = STOCK_ROUNDS * wanted
        self._rng = rng
        self._peers = case.peers()
        self._next = 0
        self.of: dict[int, Peer] = {}  # whose a group is
        self.groups: dict[int, Candidate] = {}

    def fill(self) -> None:
        """Fetch until nothing is wanted. With aged peers about, each half of the stock is filled for itself."""
        if not (self._capped and any(peer.aged for peer in self._peers)):
            self._fetch(self._peers, self._target - len(self.groups))
            return
        half = self._target // 2
        for aged, part in ((True, self._target - half), (False, half)):
            held = sum(candidate.aged == aged for candidate in self.groups.values())
            self._fetch([peer for peer in self._peers if peer.aged == aged], part - held)

    def _fetch(self, peers: list[Peer], missing: int) -> None:
        shares: dict[str, list[Peer]] = {}
        for peer in peers:
            shares.setdefault(peer.source if self._capped else peer.name, []).append(peer)
        drawn = list(shares.values())
        for _ in range(0, missing if peers else 0, BATCH):
            peer = self._rng.choice(self._rng.choice(drawn))
            for _ in range(BATCH):
                self._add(peer)

    def _add(self, peer: Peer) -> None:
        self._next += 1
        self.of[self._next] = peer
        self.groups[self._next] = Candidate(
            group_id=self._next,
            producer=peer.name,
            task="any",
            question_sha256=self._next.to_bytes(32, "big"),
            rewards=(1.0, 0.0),
            age_seconds=1.0,
            source=peer.source,
            aged=peer.aged,
        )


def simulate(case: Case, rounds: int, wanted: int, rng: random.Random) -> tuple[float, float, float]:
    """Honest part of what was trained on: mean, and worst window; then external groups a round."""
    training = TrainingSection(rule=case.rule, external_groups=wanted, local_groups=wanted, on_shortage="fewer")  # type: ignore[arg-type]
    stock = Stock(case, wanted, rng)
    honest, trained = [], []
    for _ in range(rounds):
        stock.fill()
        plan = plan_round(training, RolloutsSection(), [], list(stock.groups.values()), rng)
        honest.append(sum(stock.of[i].honest for i in plan.external_ids))
        trained.append(len(plan.external_ids))
        for i in plan.external_ids:
            del stock.groups[i]
    windows = [sum(honest[i : i + WINDOW]) / max(1, sum(trained[i : i + WINDOW])) for i in range(rounds - WINDOW + 1)]
    return sum(honest) / sum(trained), min(windows), sum(trained) / rounds


@click.command()
@click.option("--rounds", type=click.IntRange(min=WINDOW), default=500, show_default=True)
@click.option("--external", "wanted", type=click.IntRange(min=1), default=4, show_default=True, help="J.")
@click.option("--seed", default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Also write the table to a CSV file.")
def main(rounds: int, wanted: int, seed: int, out: Path | None) -> None:
    """Print who is trained on in each case."""
    rows = []
    for case in CASES:
        mean, worst, trained = simulate(case, rounds, wanted, random.Random(seed))
        rows.append((case.title, case.honest, case.sybils, f"{mean:.2f}", f"{worst:.2f}", f"{trained:.2f}"))
    head = ("case", "honest", "sybils", "honest part", "worst", "groups a round")
    for row in (head, *rows):
        click.echo("{:<46} {:>6} {:>6} {:>12} {:>6} {:>15}".format(*row))
    if out is not None:
        with out.open("w", newline="") as handle:
            csv.writer(handle).writerows([head, *rows])


if __name__ == "__main__":
    main()
