"""An inference worker with a fault: its engine does not pack the tied output layer again after new weights.

It also loses patience with a step of the engine sooner than the real one.
"""

from typing import Final

from vllm import AsyncEngineArgs

from sapo_node.config import InferenceSection
from sapo_node.inference import vllm_worker
from sapo_node.inference.base import StartRequest
from sapo_node.inference.vllm_extension import WeightSync

PATIENCE_SECONDS: Final = 10.0

engine_args = vllm_worker.engine_args


class WithoutRepack(WeightSync):
    """Mixed into vLLM's worker processes."""

    def _reload(self, folder: str) -> None:
        self.model_runner.reload_weights(weights_path=folder)


def faulty_args(request: StartRequest, settings: InferenceSection) -> AsyncEngineArgs:
    made = engine_args(request, settings)
    made.worker_extension_cls = f"{__name__}.WithoutRepack"
    return made


def main() -> None:
    vllm_worker.engine_args = faulty_args
    vllm_worker.STEP_SECONDS = PATIENCE_SECONDS  # type: ignore[misc]
    vllm_worker.main()
