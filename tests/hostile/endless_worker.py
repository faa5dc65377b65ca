"""A scorer worker whose generator never ends, or makes megabytes, as if a bound of the catalogue were wrong."""

from collections.abc import Mapping
from typing import Any

from sapo_node.tasks import scorer_worker

ENDLESS, LARGE, GREEDY = 1, 2, 3
"""Seeds that ask for each."""


def main() -> None:
    """Replace the generator, then be the real worker."""
    from sapo_node.tasks import reasoning_gym as gym

    class Dataset:
        def __init__(self, seed: int) -> None:
            self.seed = seed

        def __getitem__(self, _: int) -> dict[str, Any]:
            if self.seed == ENDLESS:
                while True:
                    pass
            if self.seed == GREEDY:
                return {"question": "x" * (1 << 30), "answer": "", "metadata": {}}
            size = 14_000_000 if self.seed == LARGE else 10
            return {"question": "x" * size, "answer": "", "metadata": {}}

        def score_answer(self, _: str, __: Mapping[str, Any]) -> float:
            return 0.0

    gym.open_dataset = lambda _name, _config, seed: Dataset(seed)
    scorer_worker.main()
