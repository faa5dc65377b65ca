"""How much each completion weighs in the loss, before any forward pass.

The loss of a training batch is one weighted mean, so the weight of every token is known before any forward pass:
completions without advantage need none, and micro-batches simply add up. What a token's loss is: `loss.py`.
Names: C completions in the whole training batch.
"""

from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import Literal, TypeVar

from sapo_node.training.base import Origin

T = TypeVar("T")

LossMean = Literal["token", "sequence", "fixed"]
NegativeRule = Literal["keep", "drop", "downweight"]

DOWNWEIGHT = 0.5  # of completions with negative advantage under `downweight`


def completion_weight(
    advantage: float,
    truncated: bool,
    *,
    negative: NegativeRule = "keep",
    mask_truncated: bool = True,
) -> float:
    """Weight of one completion in its stream's weighted mean; 0 leaves it out of the sum and of the count.

    `negative` is the stream's rule for completions that are worse than their group.

    A completion with zero advantage keeps its weight: it adds nothing to the sum but counts in the mean.
    """
    if truncated and mask_truncated:
        return 0.0
    if advantage < 0 and negative != "keep":
        return DOWNWEIGHT if negative == "downweight" else 0.0
    return 1.0


def stream_shares(groups: Mapping[Origin, float], weights: Mapping[Origin, float]) -> dict[Origin, float]:
    """What each stream's mean counts in the loss: its weight times its number of groups, over the sum of both.

    Each stream is averaged by itself first. In one mean over all tokens a peer with long or many completions would
    drown the node's own groups: I and J count groups, so groups share the loss.
    """
    total = sum(weights[origin] * count for origin, count in groups.items())
    return {origin: weights[origin] * count / total if total else 0.0 for origin, count in groups.items()}


def median_factors(pulls: Mapping[T, float]) -> dict[T, float]:
    """What weights are multiplied with so that nobody pulls harder than usual (`training.external_balance`).

    `pulls` says how hard each pulls. Who pulls harder than the median of those that pull at all (the lower one of two)
    is brought down to it. With sources, whose pull is the sum of weight x |advantage| x tokens over their completions:
    as long as more than half of them are honest, theirs is the median, and a minority can neither raise it beyond what
    one of them does nor have more of a step than its number. With answers, whose pull is the weight of the
    groups that teach them: what few peers repeat is one answer among many. A rule of ours.
    """
    usual = median_low([pull for pull in pulls.values() if pull] or [0.0])
    return {key: min(1.0, usual / pull) if pull else 1.0 for key, pull in pulls.items()}


def token_scales(weights: Sequence[float], lengths: Sequence[int], mean: LossMean, fixed_length: int) -> list[float]:
    """What a token's loss is multiplied with, for each of the C completions; the products sum up to the loss.

    `token`: mean over all tokens. `sequence`: mean over a completion's tokens, then over completions (GRPO as first
    published). `fixed`: mean over completions of sums divided by `fixed_length`, so that length cannot buy a smaller
    penalty (Dr.GRPO, arXiv:2503.20783). Completions without tokens get 0.
    """
    if mean == "token":
        total = sum(weight * length for weight, length in zip(weights, lengths, strict=True))
        return [weight / total if weight and length else 0.0 for weight, length in zip(weights, lengths, strict=True)]
    total = sum(weight for weight, length in zip(weights, lengths, strict=True) if length)
    return [
        weight / total / (length if mean == "sequence" else fixed_length) if weight and length else 0.0
        for weight, length in zip(weights, lengths, strict=True)
    ]
