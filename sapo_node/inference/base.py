"""What every inference engine offers, whatever runs the model."""

from typing import Protocol

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


class SampledBatch(Struct, frozen=True, kw_only=True):
    """The groups sampled by one call, in the order of its questions, all by one policy version."""

    groups: list[list[Sampled]]
    policy_version: int
    seconds: float


class InferenceEngine(Protocol):
    """Answers questions with the newest policy it was given. Implementations live in processes of their own."""

    async def sample(self, questions: list[str], params: SamplingParams) -> SampledBatch:
        """Draw `params.n` completions for each question. Raises `workers.WorkerError` when the engine failed."""
        ...
