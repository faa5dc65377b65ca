"""The engine that samples beside the trainer, in the policy worker, on the trainer's own weights.

This is the node's side and imports no torch; the sampling itself is `sampling.py`.
"""

from sapo_node.inference.base import SampledBatch, SamplingParams
from sapo_node.training.base import SampleRequest
from sapo_node.workers import Worker

# A call that takes longer is a fault of the machine: the worker itself is killed much earlier when one forward pass
# hangs (`sampling.STEP_SECONDS`), so this only bounds a call that crawls on.
SAMPLE_SECONDS = 3600.0


class TransformersEngine:
    """`InferenceEngine` over a loaded policy worker, which takes sampling and steps in turns."""

    def __init__(self, worker: Worker) -> None:
        """`worker` runs `sapo_node.training.policy_worker` and has loaded its model."""
        self._worker = worker

    async def sample(self, questions: list[str], params: SamplingParams) -> SampledBatch:
        """Draw `params.n` completions for each question; a question whose prompt is too long gets an empty group.

        Raises `workers.WorkerError` when the worker failed.
        """
        request = SampleRequest(questions=questions, params=params)
        return await self._worker.call("sample", request, SampledBatch, deadline=SAMPLE_SECONDS)
