"""What the node asks of the trainer: groups in, one optimiser step, metrics out."""

from typing import Literal

from msgspec import Struct

from sapo_node.rollouts.schema import Finish

Origin = Literal["local", "external"]


class TrainCompletion(Struct, frozen=True, kw_only=True):
    """One completion. External ones carry text only; the trainer re-encodes them with its own tokenizer."""

    text: str
    finish: Finish
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None  # under the engine that sampled it; None: take the trainer's own as old ones


class TrainGroup(Struct, frozen=True, kw_only=True):
    """A group with rewards that this node computed."""

    group_id: int  # the pool's row
    origin: Origin
    producer: str  # peer id
    question: str
    completions: list[TrainCompletion]
    rewards: list[float]
    policy_version: int  # of its sampler; comparable with ours for local groups only


class StepResult(Struct, frozen=True, kw_only=True):
    """One round's step. Keys of `metrics` are documented in docs/operations.md (a test compares)."""

    policy_version: int  # after the step
    metrics: dict[str, float]
    producer_gradients: dict[str, float]  # gradient norm of each producer's groups; empty unless asked for
    skipped: dict[int, str]  # group_id -> why it could not be trained on (prompt too long, ...)


class ModelInfo(Struct, frozen=True, kw_only=True):
    """The loaded policy."""

    name: str
    params: int
    licence: str
    tokenizer_sha256: bytes
    lr: float
    device: str
    notes: list[str]  # what its owner should be told once, for example a missing chat template
