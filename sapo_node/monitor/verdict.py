"""Did the swarm learn? One sentence from the nodes' own records, by a paired bootstrap over held-out questions.

Every node answers the same held-out questions at its start and at its end, with the same sampling seed. The change of
one question is the mean over the nodes that asked it; the questions are resampled 10,000 times (Efron and Tibshirani,
An Introduction to the Bootstrap, 1993, chapter 13: percentile interval). "Learnt" needs a lower bound above 0 of the
90 % interval. It covers which questions were asked, not another run's randomness: a single run is one run.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from sapo_node.monitor.metrics import EvalRecord, Record, RoundRecord

RESAMPLES = 10_000
SEED = 20_250_913  # fixed: the same records always give the same sentence
INTERVAL = 0.90
CHUNK = 500  # resamples at once: 500 x 3,000 questions are 12 MB of indices


class NodeEvals(Struct, frozen=True):
    """The first and the last evaluation of one node."""

    first: EvalRecord
    last: EvalRecord


class Change(Struct, frozen=True, kw_only=True):
    """How the held-out score (0 to 1) moved, over `questions` questions of `nodes` nodes."""

    start: float
    end: float
    low: float  # bounds of the interval of end - start
    high: float
    questions: int
    nodes: int


class Verdict(Struct, frozen=True, kw_only=True):
    """What the records of a run say."""

    nodes: int  # in the run
    groups_exchanged: int  # taken in from others, over all nodes
    change: Change | None  # None where no node was evaluated before and after training

    @property
    def learnt(self) -> bool:
        """Only with a lower bound strictly above 0: equal evaluations have not learnt."""
        return self.change is not None and self.change.low > 0

    @property
    def sentence(self) -> str:
        """The verdict in one plain sentence."""
        who = "The swarm" if self.nodes > 1 else "The node"
        crossed = f"{_count(self.groups_exchanged, 'group')} crossed the swarm" if self.groups_exchanged else ""
        end = f", and {crossed or 'no group crossed the swarm'}." if self.nodes > 1 or crossed else "."
        if self.change is None:
            return f"{who} cannot be judged: no node was evaluated both before and after training{end}"
        change = self.change
        nodes = _count(change.nodes, "node") if change.nodes == self.nodes else f"{change.nodes} of {self.nodes} nodes"
        numbers = (
            f"({_signed(change.end - change.start)}, 90 % interval {_signed(change.low)} to {_signed(change.high)}, "
            f"{nodes}, {_count(change.questions, 'question')})"
        )
        moved = f"went from {change.start:.3f} to {change.end:.3f}"
        if self.learnt:
            return f"{who} learnt: its held-out score {moved} {numbers}{end}"
        if change.low == change.high == 0:
            moved = f"stayed at {change.end:.3f}"
        chance = ", which may be chance" if change.end > change.start else ""
        return f"{who} did not learn: its held-out score {moved} {numbers}{chance}{end}"


def first_and_last(records: Sequence[Record]) -> NodeEvals | None:
    """A node's evaluations to compare; None with fewer than two, or where no round lies between them."""
    found = [record for record in records if isinstance(record, EvalRecord)]
    if len(found) < 2 or found[0].policy_version == found[-1].policy_version:
        return None
    return NodeEvals(found[0], found[-1])


def groups_exchanged(records: Sequence[Record]) -> int:
    """Groups of others that a node verified and took in, over all its rounds."""
    return sum(record.groups_accepted for record in records if isinstance(record, RoundRecord))


def paired(nodes: Sequence[NodeEvals]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """First and last score of each question, shape (questions,) each, as means over the nodes that asked it.

    Only questions in both evaluations of a node count. Their order is that of (task, hash).
    """
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for node in nodes:
        before = {(score.task, score.sha256): score.score for score in node.first.per_question}
        for score in node.last.per_question:
            if (key := (score.task, score.sha256)) in before:
                pairs[key].append((before[key], score.score))
    means = np.array([np.mean(pairs[key], axis=0) for key in sorted(pairs)], dtype=np.float64).reshape(-1, 2)
    return means[:, 0], means[:, 1]


def bootstrap(
    changes: NDArray[np.float64], *, resamples: int = RESAMPLES, interval: float = INTERVAL, seed: int = SEED
) -> tuple[float, float]:
    """Percentile interval of the mean of `changes`, shape (questions,). Raises ValueError without questions."""
    if not changes.size:
        raise ValueError("no question was asked both at the start and at the end")
    random = np.random.default_rng(seed)
    means = np.empty(resamples)
    for start in range(0, resamples, CHUNK):
        count = min(CHUNK, resamples - start)
        means[start : start + count] = changes[random.integers(0, changes.size, (count, changes.size))].mean(axis=1)
    low, high = np.quantile(means, [(1 - interval) / 2, (1 + interval) / 2])
    return float(low), float(high)


def judge(nodes: Sequence[Sequence[Record]]) -> Verdict:
    """The verdict over the records of each node of a run."""
    exchanged = sum(groups_exchanged(records) for records in nodes)
    comparable = [found for records in nodes if (found := first_and_last(records)) is not None]
    before, after = paired(comparable)
    if not before.size:
        return Verdict(nodes=len(nodes), groups_exchanged=exchanged, change=None)
    low, high = bootstrap(after - before)
    change = Change(
        start=float(before.mean()),
        end=float(after.mean()),
        low=low,
        high=high,
        questions=int(before.size),
        nodes=len(comparable),
    )
    return Verdict(nodes=len(nodes), groups_exchanged=exchanged, change=change)


def _signed(value: float) -> str:
    return f"{round(value, 3) + 0.0:+.3f}"  # + 0.0: never "-0.000"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
