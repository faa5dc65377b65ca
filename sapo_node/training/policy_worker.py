"""The policy worker: a process with one model that samples and learns in turns, so a completion has one version."""

import signal
import time
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError

from sapo_node import workers
from sapo_node.config import InferenceSection, TrainingSection
from sapo_node.fit import refuse_before_loading
from sapo_node.inference.base import Nothing, SampledBatch
from sapo_node.inference.sampling import check_sampling, interrupt
from sapo_node.training import checkpoint
from sapo_node.training.base import (
    LoadRequest,
    ModelInfo,
    SampleRequest,
    Saved,
    SaveRequest,
    ShareRequest,
    StepRequest,
    StepResult,
    TextScore,
    Unfit,
    Weights,
)
from sapo_node.training.drift import score_texts
from sapo_node.training.policy import choose_device, find_folder, load_policy, refuse_slow_bfloat16
from sapo_node.training.share import Sharer
from sapo_node.training.trainer import Make, Trainer


class PolicyWorker:
    """The handlers, and the trainer they work on."""

    def __init__(self) -> None:
        self._loaded: Trainer | None = None
        self._sharer: Sharer | None = None

    def load(self, request: LoadRequest) -> ModelInfo:
        """Load a model, or a checkpoint of it. Raises Refused, told for people."""
        if self._loaded is not None:
            self._loaded.close()
        self._loaded = self._sharer = None
        training = TrainingSection.model_validate(request.training)
        if training.devices > 1:
            from sapo_node.training import parallel  # torch's FSDP costs a second to import

            self._loaded = parallel.lead(request, training, load_trainer)
        else:
            self._loaded = load_trainer(request, Trainer)
        return self._loaded.info()

    def sample(self, request: SampleRequest) -> SampledBatch:
        """Completions by the newest weights."""
        return self._trainer.sample(request.questions, request.params)

    def step(self, request: StepRequest) -> StepResult:
        """One round's optimiser step."""
        return self._trainer.step(request.groups)

    def unfit(self, request: StepRequest) -> Unfit:
        """Which groups a step would learn nothing from."""
        return Unfit(groups=self._trainer.unfit(request.groups))

    def share(self, request: ShareRequest) -> Weights:
        """The newest weights, for an engine in another process. A disk that refuses raises."""
        if self._sharer is None:
            self._sharer = Sharer(self._trainer.policy, self._trainer.max_prompt)
        with self._trainer.whole():
            return self._sharer.share(request, self._trainer.version)

    def send(self, request: Nothing) -> Nothing:
        """Broadcast the weights that `share` described."""
        if self._sharer is not None:
            with self._trainer.whole():
                self._sharer.send()
        return Nothing()

    def score_texts(self, request: Nothing) -> TextScore:
        """How likely texts that are no task's are to the newest weights."""
        with self._trainer.whole():
            return score_texts(self._trainer.policy)

    def save(self, request: SaveRequest) -> Saved:
        """Write a checkpoint. A disk that refuses raises; the older checkpoints are then untouched."""
        started, trainer = time.monotonic(), self._trainer
        state = checkpoint.State(policy_version=trainer.version, model=trainer.training.model, extra=request.extra)
        path = checkpoint.write(Path(request.directory), state, trainer.write, trainer.training.keep_checkpoints)
        return Saved(path=str(path), policy_version=trainer.version, seconds=time.monotonic() - started)

    @property
    def _trainer(self) -> Trainer:
        if self._loaded is None:
            raise workers.Refused("no model is loaded yet")
        return self._loaded


def load_trainer(request: LoadRequest, make: Make) -> Trainer:
    """Load a model or a checkpoint of it, have `make` build a trainer on it, and let that go on where it ended.

    Raises Refused, told for people.
    """
    training = TrainingSection.model_validate(request.training)
    inference = InferenceSection.model_validate(request.inference)
    if request.threads:
        torch.set_num_threads(request.threads)
    folder = None if request.resume is None else Path(request.resume)
    try:
        version = 0 if folder is None else checkpoint.read_state(folder).policy_version
    except checkpoint.CheckpointError as error:
        raise workers.Refused(str(error)) from error
    # Adapters are added to the model that the node started from, also after a restart.
    source = find_folder(training.model) if folder is None or training.lora_rank else folder
    if request.check_memory:  # here too: the model may just have been downloaded
        refuse_before_loading(source, training, inference)
    if training.dtype == "bfloat16":
        refuse_slow_bfloat16(choose_device(training.device))
    load = partial(
        load_policy,
        training.model,
        device=training.device if training.devices == 1 else "cpu",  # ranks put their parts onto GPUs themselves
        dtype=training.dtype,
        system_prompt=inference.system_prompt,
    )
    policy = load(folder=source)
    check_sampling(policy)
    origin = None
    if training.kl_coef and source == folder:  # the KL penalty's reference does not move with the checkpoints
        origin = load(folder=find_folder(training.model))
    trainer = make(policy, training, inference, request.seed, origin)
    if folder is not None:
        try:
            trainer.read(folder, version)
        except torch.OutOfMemoryError:
            raise  # a RuntimeError too, and no fault of the checkpoint
        except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
            raise workers.Refused(
                f"{folder} is damaged ({error}); remove it to go on from an older checkpoint"
            ) from error
    return trainer


def main() -> None:
    """Serve until the node is gone."""
    worker = PolicyWorker()
    signal.signal(signal.SIGUSR1, interrupt)
    handlers = (
        worker.load,
        worker.sample,
        worker.step,
        worker.unfit,
        worker.score_texts,
        worker.share,
        worker.send,
        worker.save,
    )
    workers.serve({handler.__name__: handler for handler in handlers})


if __name__ == "__main__":
    main()
