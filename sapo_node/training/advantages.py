"""Rewards of one group to advantages: how much better each completion was than its siblings."""

from collections.abc import Sequence
from typing import Literal

# Rewards closer together than this are equal: dividing by a spread of rounding noise would make a signal of nothing.
MIN_SPREAD = 1e-6


def advantages(rewards: Sequence[float], kind: Literal["std", "mean"] = "std") -> list[float]:
    """Advantage of each of a group's L rewards, in their order.

    `std` divides the distance from the group's mean by its standard deviation over the L rewards (GRPO,
    arXiv:2402.03300); `mean` does not (Dr.GRPO, arXiv:2503.20783). A group whose rewards are all equal gets zeros. The
    reward of a completion is one number, so all its tokens share the advantage. Raises ValueError without rewards.
    """
    if not rewards:
        raise ValueError("a group without rewards has no advantages")
    if max(rewards) - min(rewards) < MIN_SPREAD:
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if kind == "mean":
        return centred
    std = (sum(value * value for value in centred) / len(centred)) ** 0.5
    return [value / std for value in centred]
