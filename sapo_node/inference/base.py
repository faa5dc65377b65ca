"""What every inference engine offers, whatever runs the model; and what the node tells an engine of its own process."""

from typing import Any, Final, Protocol

from msgspec import Struct

from sapo_node.rollouts.schema import Finish


class SamplingParams(Struct, frozen=True, kw_only=True):
    """How completions are drawn. top_p and top_k are absent on purpose: they would bias the importance ratio."""

    n: int  # completions a question (L)
    max_tokens: int
    temperature: float = 1.0
    seed: int | None = None  # None: the engine's own stream of random numbers, which a checkpoint continues


class Sampled(Struct, frozen=True, kw_only=True):
    """One sampled completion, with what training needs to know of its sampling."""

    text: str  # decoded without special tokens
    finish: Finish
    token_ids: list[int]  # the end-of-sequence token included when finish is "stop"
    logprobs: list[float]  # of each token under the sampling distribution, same length as token_ids
    policy_versions: list[int]  # under which its tokens were sampled, oldest first; two where weights came in between


class SampledBatch(Struct, frozen=True, kw_only=True):
    """The groups sampled by one call, in the order of its questions."""

    groups: list[list[Sampled]]
    policy_version: int  # the oldest under which a token of them was sampled
    seconds: float


class InferenceEngine(Protocol):
    """Answers questions with the newest policy it was given. Implementations live in processes of their own.

    What all of them promise: groups in the order of the questions, `params.n` completions in each; an empty group where
    the prompt is too long; `token_ids` ends with the end-of-sequence token if, and only if, `finish` is "stop"; the
    log-probs are of the distribution that was drawn from, the whole of it.
    """

    @property
    def version(self) -> int:
        """Optimiser steps of the policy so far; no sampled version is above it."""
        ...

    @property
    def restarts(self) -> int:
        """How often the policy went back to a checkpoint: what was sampled before is of steps that are lost."""
        ...

    async def sample(self, questions: list[str], params: SamplingParams) -> SampledBatch:
        """Draw `params.n` completions for each question. Raises `workers.WorkerError` when the engine failed."""
        ...


READY: Final = "ready"  # stage of an engine that waits for questions


class Probe(Struct, frozen=True, kw_only=True):
    """A fixed prompt with the trainer's log-probs of its tokens, by which weights are compared across processes."""

    token_ids: list[int]
    logprobs: list[float]  # of token_ids[1:], at temperature 1


class StartRequest(Struct, frozen=True, kw_only=True):
    """Asks the inference worker for an engine on a model folder (config, tokenizer, safetensors)."""

    folder: str
    policy_version: int
    probe: Probe
    inference: dict[str, Any]  # the settings, as plain values
    dtype: str
    stop_ids: list[int]  # tokens that end a completion, as the trainer has them
    max_length: int  # positions that the model knows
    seed: int | None = None
    gpu_memory_share: float | None = None


class SyncRequest(Struct, frozen=True, kw_only=True):
    """Asks the inference worker to take new weights, from a folder or from GPU memory."""

    policy_version: int
    probe: Probe
    path: str | None = None
    transfer: dict[str, Any] | None = None


class Synced(Struct, frozen=True, kw_only=True):
    """Weights that are in place."""

    difference: float  # mean absolute difference of the probe's log-probs from the trainer's
    stall_seconds: float  # for which sampling stood still
    seconds: float


class Nothing(Struct, frozen=True, kw_only=True):
    """A request, or a result, without content."""


class EngineStatus(Struct, frozen=True, kw_only=True):
    """How an engine is, for `status` and for records."""

    name: str  # vllm or transformers
    state: str  # what it is doing, or why it does not
    restarts: int = 0
    sync_faults: int = 0  # exchanges of weights that failed or did not give the trainer's log-probs
    stall_seconds: float | None = None  # for which sampling last stood still for new weights
