"""The trainer as the node sees it: calls to the policy worker. Imports no torch."""

from pathlib import Path
from typing import Any, Final

from sapo_node.inference.base import Nothing
from sapo_node.training.base import (
    LoadRequest,
    ModelInfo,
    Saved,
    SaveRequest,
    ShareRequest,
    StepRequest,
    StepResult,
    TextScore,
    TrainGroup,
    Unfit,
    Weights,
)
from sapo_node.workers import Worker

POLICY_MODULE: Final = "sapo_node.training.policy_worker"

# Bounds of calls that crawl on; a worker that hangs is found much earlier by the deadlines of its stages.
LOAD_SECONDS: Final = 3600.0  # the first load of a named model downloads it
STEP_SECONDS: Final = 3600.0
SAVE_SECONDS: Final = 600.0


class RemoteTrainer:
    """One policy worker. All calls raise `workers.WorkerError` when it failed, `workers.Refused` for people."""

    def __init__(self, worker: Worker) -> None:
        """`worker` runs `POLICY_MODULE` and is started by its owner."""
        self._worker = worker

    async def load(self, request: LoadRequest) -> ModelInfo:
        """Load the model, or continue from `request.resume`."""
        return await self._worker.call("load", request, ModelInfo, deadline=LOAD_SECONDS)

    async def step(self, groups: list[TrainGroup]) -> StepResult:
        """One round's optimiser step."""
        return await self._worker.call("step", StepRequest(groups=groups), StepResult, deadline=STEP_SECONDS)

    async def unfit(self, groups: list[TrainGroup]) -> dict[int, str]:
        """Which groups a step would learn nothing from, and why; by `group_id`."""
        answer = await self._worker.call("unfit", StepRequest(groups=groups), Unfit, deadline=STEP_SECONDS)
        return answer.groups

    async def score_texts(self) -> TextScore:
        """How likely texts that are no task's are to the policy."""
        return await self._worker.call("score_texts", Nothing(), TextScore, deadline=STEP_SECONDS)

    async def save(self, directory: Path, extra: dict[str, Any]) -> Saved:
        """Write a checkpoint into `directory`, with the node's own `extra` state beside the trainer's."""
        request = SaveRequest(directory=str(directory), extra=extra)
        return await self._worker.call("save", request, Saved, deadline=SAVE_SECONDS)

    async def share(self, request: ShareRequest) -> Weights:
        """The newest weights, for an engine in another process."""
        return await self._worker.call("share", request, Weights, deadline=SAVE_SECONDS)

    async def send(self) -> None:
        """Broadcast the weights that `share` described, while the engine receives."""
        await self._worker.call("send", Nothing(), Nothing, deadline=SAVE_SECONDS)
