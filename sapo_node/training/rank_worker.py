"""A further rank of a policy on several devices: a process that follows the policy worker; see `parallel.py`."""

import contextlib
import os
from dataclasses import replace

from sapo_node import workers
from sapo_node.config import InferenceSection, TrainingSection
from sapo_node.inference.base import Nothing
from sapo_node.training import parallel
from sapo_node.training.base import StepRequest
from sapo_node.training.parallel import Join, ShardedTrainer
from sapo_node.training.policy import Policy
from sapo_node.training.policy_worker import load_trainer


class RankWorker:
    """The handlers. Each is one collective part of what rank 0 does."""

    def __init__(self) -> None:
        self._rank, self._size = int(os.environ[parallel.RANK]), int(os.environ[parallel.SIZE])
        self._loaded: ShardedTrainer | None = None

    def join(self, request: Join) -> Nothing:
        """Load the model and keep this rank's part of it."""

        def make(
            policy: Policy,
            training: TrainingSection,
            inference: InferenceSection,
            seed: int | None,
            origin: Policy | None,
        ) -> ShardedTrainer:
            team = parallel.join(self._rank, self._size, request.store, parallel.check(training))
            same = replace(policy, packed=request.packed, split_head=request.split_head)
            return ShardedTrainer(team, same, training, inference, seed)

        trainer = load_trainer(request.load, make)
        assert isinstance(trainer, ShardedTrainer)
        self._loaded = trainer
        return Nothing()

    def step(self, request: StepRequest) -> Nothing:
        """This rank's part of a step."""
        with contextlib.suppress(ArithmeticError):  # rank 0 found the same, and tells
            self._trainer.step(request.groups)
        return Nothing()

    def gather(self, request: Nothing) -> Nothing:
        """Help rank 0 to the whole weights."""
        self._trainer.gather()
        self._trainer.scatter()
        return Nothing()

    def moments(self, request: Nothing) -> Nothing:
        """Help rank 0 to the whole optimizer state."""
        self._trainer.moments()
        return Nothing()

    @property
    def _trainer(self) -> ShardedTrainer:
        if self._loaded is None:
            raise workers.Refused("this rank has not joined yet")
        return self._loaded


def main() -> None:
    """Serve until rank 0 is gone."""
    worker = RankWorker()
    handlers = (worker.join, worker.step, worker.gather, worker.moments)
    workers.serve({handler.__name__: handler for handler in handlers})


if __name__ == "__main__":
    main()
