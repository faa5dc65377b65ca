"""Which task a node asks next: its mixture of tasks with weights, and the seeds that follow from its key."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from sapo_node.config import TasksSection
from sapo_node.tasks import catalog, dataset
from sapo_node.tasks.base import TaskSpec
from sapo_node.tasks.verifiers import Verifier

LEAST_SHARE: Final = 0.1
"""Of the largest factor, what the smallest is: a task that nobody can do yet would else hardly be asked again."""

Yields = Mapping[tuple[str, bytes], tuple[int, int]]
"""By a task's name and the hash of its settings: recent groups with an advantage, and all recent groups."""


class Entry(Struct, frozen=True, kw_only=True):
    """One task of the mixture, ready to be drawn."""

    spec: TaskSpec
    weight: float
    share: bool  # whether its groups may be published
    verifier: Verifier = "exact"  # of a data set
    rows: dataset.Dataset | None = None  # of a data set


class Mixture:
    """The node's tasks. Weighted draws with replacement, by the generator that the caller keeps and checkpoints."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = list(entries)
        self._weights = [entry.weight for entry in entries]

    def choose(self, count: int, rng: random.Random, factors: Sequence[float] | None = None) -> list[int]:
        """Positions of `count` independent draws, in their order: any first few of them are a random choice too.

        `factors` multiply the entries' weights.
        """
        weights = self._weights if factors is None else [w * f for w, f in zip(self._weights, factors, strict=True)]
        return rng.choices(range(len(self.entries)), weights, k=count)

    def factors(self, yields: Yields) -> list[float]:
        """How often each entry is drawn, times its weight, so that more groups have an advantage (`curriculum: yield`).

        The share of recent groups that have one, as the mean of a beta distribution that begins at one of two: a task
        of which nothing is known is tried, and one that taught nothing lately is tried again now and then.
        """
        found = [yields.get((entry.spec.name, entry.spec.config_hash), (0, 0)) for entry in self.entries]
        shares = [(taught + 1) / (groups + 2) for taught, groups in found]
        return [max(share, LEAST_SHARE * max(shares)) for share in shares]


def load(settings: TasksSection) -> Mixture:
    """The mixture of a config. Raises TaskRefused for a task that is not offered so, DatasetError for a broken file."""
    entries = []
    for task in settings.mixture:
        if task.source == "reasoning_gym":
            catalog.validate(task.name, task.config)
            spec = TaskSpec(
                source="reasoning_gym", name=task.name, version=catalog.library_version(), config=dict(task.config)
            )
            entries.append(Entry(spec=spec, weight=task.weight, share=True))
        else:
            rows = dataset.load(Path(str(task.path)), task.verifier)
            spec = TaskSpec(source="dataset", name=task.name, version=rows.version, config={})
            entry = Entry(spec=spec, weight=task.weight, share=task.share, verifier=task.verifier, rows=rows)
            entries.append(entry)
    return Mixture(entries)
