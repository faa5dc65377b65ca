"""Which task a node asks next: its mixture of tasks with weights, and the seeds that follow from its key."""

import random
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from msgspec import Struct

from sapo_node.config import TasksSection
from sapo_node.tasks import catalog, dataset
from sapo_node.tasks.base import TaskSpec
from sapo_node.tasks.verifiers import Verifier


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
        self._cumulative = list(accumulate(entry.weight for entry in entries))

    def choose(self, count: int, rng: random.Random) -> list[int]:
        """Positions of `count` independent draws, in their order: any first few of them are a random choice too."""
        return rng.choices(range(len(self.entries)), cum_weights=self._cumulative, k=count)


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
