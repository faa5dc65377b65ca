"""The settings of the training step, and the recipes: sets of settings that were measured together."""

from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from sapo_node.config_section import Fraction, Positive, Seconds, Section

WIDE: Final[dict[str, dict[str, Any]]] = {
    "training": {
        "external_groups": 12,
        "rule": "capped",
        "strategy": "coverage",
        "local_zero_advantage": "refill",
        "external_negative": "drop",
        "on_shortage": "fewer",
        "kl_coef": 0.02,
    },
    "rollouts": {"max_external_uses": 2},
}
"""The rule that learnt most a step on models like the embedded ones (docs/benchmarks.md), by section."""


class TrainingSection(Section):
    """Who learns. I and J are the paper's names."""

    model: str = "demo"
    """`demo` or `benchmark` (embedded, tiny), a folder, or a Hugging Face name of a causal language model."""

    recipe: Literal["auto", "paper", "wide"] = "auto"
    """What settings are that nobody gave. paper: the defaults. wide: what this page says of single settings under
    `recipe: wide` (`kl_coef` stays 0 with more than one device); found and confirmed on models like the embedded ones.
    auto: wide for those in a swarm, else paper."""

    local_groups: Annotated[int, Field(ge=0)] = 4
    """I: own groups in a training batch."""

    external_groups: Annotated[int, Field(ge=0)] = 4
    """J: groups of others in a training batch."""

    rule: Literal["paper", "capped"] = "paper"
    """How external groups are chosen. paper: uniform over those with non-zero advantage. capped: with a share cap a
    network, half of J for peers known for a day, and dedupe by question; for swarms that anyone may join."""

    strategy: Literal["uniform", "learnability", "coverage", "novelty"] = "uniform"
    """Weight of a usable external group under `capped`: equal, p(1-p), evenly over tasks, or that times the share of
    own answers to the task that are wrong."""

    local_zero_advantage: Literal["keep", "refill", "resample"] = "keep"
    """Own groups whose rewards are all equal: keep them (paper), replace by external ones, or sample others."""

    external_zero_advantage: Literal["drop", "keep"] = "drop"
    """External groups whose rewards are all equal: not chosen (paper), or chosen like any other. They teach nothing;
    keeping them shows what the paper's filter is worth."""

    external_negative: Literal["keep", "drop", "downweight"] = "keep"
    """External completions with negative advantage: keep (paper), leave out of the loss, or half their weight."""

    local_negative: Literal["keep", "drop", "downweight"] = "keep"
    """The same for own completions. Only the right answers teach under `drop`."""

    on_shortage: Literal["local", "fewer", "wait"] = "local"
    """When the swarm has fewer than J usable groups: draw more own ones, train on fewer, or wait (bounded)."""

    shortage_wait_seconds: Seconds = 10.0
    """Longest wait under `on_shortage: wait`."""

    max_staleness: Annotated[int, Field(ge=0)] | None = None
    """Policy versions that sampling may lag behind training: vLLM samples while the trainer steps. Own groups staler
    than this are not trained on. Empty: 1 with vLLM, else 0."""

    lr: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Learning rate. Empty: 3e-4 for models of at most 10 million parameters, 1e-6 for larger ones; ten times that for
    adapters (`lora_rank`)."""

    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """adamw8bit: moments in 8 bits, a quarter of their memory in float32. Needs a GPU and the extra `gpu`."""

    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Adam's decay rates."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's weight decay."""

    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this norm."""

    objective: Literal["grpo", "cispo"] = "grpo"
    """grpo: the clipped surrogate; clipped tokens have no gradient. cispo: every token has one, weighted with its
    clipped ratio (MiniMax-M1)."""

    clip_low: Fraction | None = None
    """The importance ratio is clipped below 1 - clip_low. Empty: 0.2; 1 (no lower bound) under `objective: cispo`."""

    clip_high: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """The importance ratio is clipped above 1 + clip_high. Empty: 0.28; 4 under `objective: cispo`."""

    importance_cap: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Truncated importance sampling under `objective: grpo`: own tokens weigh min(ratio, cap), and none is clipped.
    Empty: off, the ratio is in the clipped surrogate."""

    kl_coef: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weight of the KL penalty against the weights that the node started from. 0: none, and no second copy of them."""

    external_weighting: Literal["uniform", "likelihood"] = "uniform"
    """likelihood: external completions that are less likely to this policy than its own are weigh less, by how much
    less likely a token is on average."""

    external_balance: Literal["groups", "sources", "answers"] = "groups"
    """sources: no peer (or network, see `rule`) pulls harder in a step than the median one, however many groups of it
    are in the batch and however long they are. answers: that, and groups with one right answer weigh together no more
    than those with the median one."""

    lora_rank: Annotated[int, Field(ge=0, le=1024)] = 0
    """Rank of low-rank adapters (LoRA) on all linear layers; the model's own weights stay as they are. 0: all weights
    are trained. Needs the extra `lora`."""

    lora_alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Adapters are scaled by lora_alpha / lora_rank. Empty: twice the rank."""

    advantage: Literal["std", "mean"] = "std"
    """Advantages: rewards minus the group's mean, divided by its standard deviation (GRPO) or not (Dr.GRPO)."""

    loss_mean: Literal["token", "sequence", "fixed"] = "token"
    """What the loss is averaged over: all tokens, each completion and then completions, or a fixed length (Dr.GRPO)."""

    mask_truncated: bool = True
    """Leave completions that were cut by length out of the loss."""

    local_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the local stream in the loss."""

    external_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the external stream in the loss."""

    micro_batch_tokens: Positive = 16_384
    """Tokens (prompts once, completions behind them) in one forward pass."""

    gradient_checkpointing: bool = False
    """Keep only each layer's input for the backward pass and compute the rest again: results stay the same, a step
    takes about a third longer, activations need a fraction of the memory."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and arithmetic."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the trainer runs. auto: cuda where there is one."""

    devices: Annotated[int, Field(ge=1, le=64)] = 1
    """GPUs of this machine that the model is trained on together (FSDP2): each holds its part of weights, gradients
    and optimizer. See docs/operations.md."""

    producer_gradients: bool = False
    """Record the gradient norm of each producer's groups; costs two more copies of the gradients in memory."""

    checkpoint_every: Positive = 50
    """Rounds between checkpoints; one is also written when the node drains."""

    keep_checkpoints: Positive = 2
    """Newest checkpoints kept."""

    licence: str = "unknown"
    """Licence of the model, named in every batch. The embedded models are apache-2.0."""

    @property
    def clip(self) -> tuple[float, float]:
        """`clip_low` and `clip_high`, with the defaults of the objective.

        CISPO's authors tune the upper bound alone, and do not print it. Weights of at most 5 are of the size that "The
        Art of Scaling Reinforcement Learning Compute" (arXiv:2510.13786) uses.
        """
        low, high = (0.2, 0.28) if self.objective == "grpo" else (1.0, 4.0)
        return (
            low if self.clip_low is None else self.clip_low,
            high if self.clip_high is None else self.clip_high,
        )

    @property
    def staleness(self) -> int:
        """`max_staleness`, with the default of an engine that takes turns with the trainer."""
        return self.max_staleness or 0

    @model_validator(mode="after")
    def _corrects_once(self) -> "TrainingSection":
        if self.importance_cap is not None and self.objective == "cispo":
            raise ValueError(
                "importance_cap belongs to objective: grpo; cispo bounds the weights by itself, at 1 + clip_high"
            )
        return self

    @model_validator(mode="after")
    def _can_be_split(self) -> "TrainingSection":
        if self.devices == 1:
            return self
        if self.lora_rank:
            raise ValueError("devices > 1 trains all weights; set lora_rank to 0, or devices to 1: adapters fit one")
        if self.kl_coef:
            raise ValueError("devices > 1 has no place for the reference model; set kl_coef to 0, or devices to 1")
        if self.optimizer != "adamw":
            raise ValueError("devices > 1 splits the moments of optimizer: adamw only; set it so, or devices to 1")
        if self.gradient_checkpointing:
            raise ValueError("devices > 1 has not been tried with gradient_checkpointing; set it to false")
        if self.device == "cpu" and self.dtype == "bfloat16":
            raise ValueError("devices > 1 on a CPU is for float32; set dtype to float32, or devices to 1")
        return self

    @model_validator(mode="after")
    def _trains_on_something(self) -> "TrainingSection":
        if self.local_groups + self.external_groups == 0:
            raise ValueError("local_groups + external_groups (I + J) must be > 0, or there is nothing to train on")
        return self
