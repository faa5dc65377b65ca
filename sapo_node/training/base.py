"""What the node asks of the trainer: groups in, one optimiser step, metrics out."""

from typing import Any, Literal

from msgspec import Struct

from sapo_node.inference.base import Probe, SamplingParams
from sapo_node.rollouts.schema import Finish

Origin = Literal["local", "external"]


class TrainCompletion(Struct, frozen=True, kw_only=True):
    """One completion. External ones carry text only; the trainer re-encodes them with its own tokenizer."""

    text: str
    finish: Finish
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None  # under the engine that sampled it; None: take the trainer's own as old ones
    policy_versions: list[int] = []  # of ours, under which its tokens were sampled, oldest first; empty: external


class TrainGroup(Struct, frozen=True, kw_only=True):
    """A group with rewards that this node computed."""

    group_id: int  # the pool's row
    origin: Origin
    producer: str  # peer id
    question: str
    completions: list[TrainCompletion]
    rewards: list[float]
    policy_version: int  # oldest of its sampler's versions; comparable with ours for local groups only
    source: str = ""  # what the producer counts for, see `Candidate.counts_for`; empty: itself


class StepResult(Struct, frozen=True, kw_only=True):
    """One round's step. Keys of `metrics` are documented in docs/operations.md (a test compares)."""

    policy_version: int  # after the step
    metrics: dict[str, float]
    producer_gradients: dict[str, float]  # gradient norm of each producer's groups; empty unless asked for
    skipped: dict[int, str]  # group_id -> why it could not be trained on (prompt too long, ...)


class Unfit(Struct, frozen=True, kw_only=True):
    """Which groups a step would learn nothing from."""

    groups: dict[int, str]  # group_id -> why


class ModelInfo(Struct, frozen=True, kw_only=True):
    """The loaded policy."""

    name: str
    params: int
    licence: str
    tokenizer_sha256: bytes
    lr: float
    device: str
    notes: list[str]  # what its owner should be told once, for example a missing chat template
    policy_version: int = 0  # optimiser steps it has taken; > 0 after a resume
    stop_ids: list[int] = []  # tokens that end a completion
    max_length: int = 0  # positions that the model knows
    weight_bytes: int = 0


class TextScore(Struct, frozen=True, kw_only=True):
    """How likely the fixed texts of `training/drift.py` are to the policy."""

    mean_logprob: float  # nats a token; 0 where the tokenizer leaves nothing to predict
    chance: float  # the same if all tokens were equally likely
    tokens: int


class LoadRequest(Struct, frozen=True, kw_only=True):
    """Asks the policy worker for a model. Sections are plain values, as `Section.model_dump(mode="json")` gives."""

    training: dict[str, Any]
    inference: dict[str, Any]
    seed: int | None = None  # of the sampling noise; None: from the system's randomness. Ignored when resuming
    threads: int = 0  # CPU threads; 0 lets torch choose
    resume: str | None = None  # checkpoint folder to continue from
    check_memory: bool = False  # refuse a model that cannot be trained in this machine's memory


class SampleRequest(Struct, frozen=True, kw_only=True):
    """Asks for `params.n` completions of each question."""

    questions: list[str]
    params: SamplingParams


class StepRequest(Struct, frozen=True, kw_only=True):
    """Asks for one round's optimiser step on these groups."""

    groups: list[TrainGroup]


class SaveRequest(Struct, frozen=True, kw_only=True):
    """Asks for a checkpoint `<directory>/step-<version>`; older ones beyond `training.keep_checkpoints` go."""

    directory: str
    extra: dict[str, Any] = {}  # the node's own state, plain JSON values; `checkpoint.read_state` gives it back


class Saved(Struct, frozen=True, kw_only=True):
    """A checkpoint that is on disk."""

    path: str
    policy_version: int
    seconds: float


class ShareRequest(Struct, frozen=True, kw_only=True):
    """Asks for the newest weights, for an engine in another process."""

    directory: str
    """They go into a new folder in here."""

    whole: bool
    """Whether the engine starts from it: config and tokenizer beside the weights."""

    transfer: Literal["files", "ipc", "nccl"] = "files"
    """Other than files: a description of the tensors goes into `Weights.transfer` instead; see `tensor_transfer`."""

    receivers: int = 1
    """Processes of the engine that receive the tensors."""


class Weights(Struct, frozen=True, kw_only=True):
    """The weights of one version, on their way to an engine."""

    policy_version: int
    probe: Probe
    path: str | None = None
    transfer: dict[str, Any] | None = None
    seconds: float
