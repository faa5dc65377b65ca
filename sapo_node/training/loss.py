"""What the loss of one token is: GRPO's clipped surrogate, CISPO, truncated importance sampling, the KL penalty.

Each objective takes, for the N tokens of a micro-batch, the log-probs under the policy (with gradient), those recorded
while sampling (NaN where they are unknown), the advantages, and the scales that make a weighted mean (`scales.py`).
One update a round makes things simple: the policy before the update is the one that computes the log-probs, so the
ratio of new to recorded log-probs holds all there is to correct, staleness and differences of the engine alike.

Where log-probs are unknown (other nodes' completions) the ratio is 1 by construction: a plain policy gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from sapo_node.config import TrainingSection


@dataclass(frozen=True)
class TokenLoss:
    """The loss of N tokens; `ratio` and `clipped` are detached, for metrics."""

    loss_N: Tensor  # scaled, with gradient: its sum is this micro-batch's share of the loss
    ratio_N: Tensor  # policy over sampler; 1 where the sampler's log-probs are unknown
    clipped_N: Tensor  # bool: tokens whose gradient a bound on the ratio took away or made smaller

    def plus(self, more_N: Tensor) -> "TokenLoss":
        """The same with something added to the loss."""
        return replace(self, loss_N=self.loss_N + more_N)


Objective = Callable[[Tensor, Tensor, Tensor, Tensor], TokenLoss]
"""Log-probs, recorded log-probs, advantages, scales of N tokens (float) to their loss."""


def choose_objective(settings: TrainingSection) -> Objective:
    """The objective that the settings name, with its bounds."""
    low, high = settings.clip
    if settings.objective == "cispo":
        return partial(cispo, clip_low=low, clip_high=high)
    if settings.importance_cap is not None:
        return partial(truncated, clip_low=low, clip_high=high, cap=settings.importance_cap)
    return partial(surrogate, clip_low=low, clip_high=high)


def surrogate(
    logprobs_N: Tensor, recorded_N: Tensor, advantage_N: Tensor, scale_N: Tensor, clip_low: float, clip_high: float
) -> TokenLoss:
    """GRPO's clipped surrogate (arXiv:2402.03300, equation 3, without its KL term) with the two bounds of DAPO
    (arXiv:2503.14476, clip-higher): -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = policy / sampler.

    A token whose ratio is beyond the bound that its advantage pushes it to has no gradient.
    """
    ratio_N = torch.exp(logprobs_N - _known(recorded_N, logprobs_N))
    bounded_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    loss_N = -scale_N * torch.minimum(ratio_N * advantage_N, bounded_N * advantage_N)
    ratio_N = ratio_N.detach()
    too_high_N = (advantage_N > 0) & (ratio_N > 1 + clip_high)
    too_low_N = (advantage_N < 0) & (ratio_N < 1 - clip_low)
    return TokenLoss(loss_N, ratio_N, too_high_N | too_low_N)


def cispo(
    logprobs_N: Tensor, recorded_N: Tensor, advantage_N: Tensor, scale_N: Tensor, clip_low: float, clip_high: float
) -> TokenLoss:
    """CISPO (MiniMax-M1, arXiv:2506.13585, equations 4 and 5): -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log p.

    REINFORCE with clipped importance weights: the weight is a constant (sg: no gradient), so every token has a
    gradient. With clip_low = 1 there is no lower bound, as in the paper. The value of the loss holds log-probs and is
    not comparable with the surrogate's.
    """
    ratio_N = _ratio(logprobs_N, recorded_N)
    weight_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    return TokenLoss(-scale_N * weight_N * advantage_N * logprobs_N, ratio_N, weight_N != ratio_N)


def truncated(
    logprobs_N: Tensor,
    recorded_N: Tensor,
    advantage_N: Tensor,
    scale_N: Tensor,
    clip_low: float,
    clip_high: float,
    cap: float,
) -> TokenLoss:
    """Truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training"): the surrogate against the policy before the update, each token weighted with min(r, cap), r = policy
    before the update / sampler.

    With one update a round the policy before the update is the policy itself, so the surrogate's own ratio is 1 in
    value and its bounds never bind. The gradient is that of CISPO without a lower bound and with the upper one at
    `cap`.
    """
    ratio_N = _ratio(logprobs_N, recorded_N)
    unknown_N = torch.full_like(recorded_N, torch.nan)
    weight_N = scale_N * ratio_N.clamp(max=cap)
    loss_N = surrogate(logprobs_N, unknown_N, advantage_N, weight_N, clip_low, clip_high).loss_N
    return TokenLoss(loss_N, ratio_N, ratio_N > cap)


def kl_penalty(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """Estimate of KL(policy || reference) from tokens of the policy: q/p - log(q/p) - 1, p policy, q reference.

    GRPO's equation 4 (arXiv:2402.03300), the estimator k3 of Schulman ("Approximating KL divergence", 2020): unbiased
    and never negative. The gradient of a token is (1 - q/p) grad log p, as in GRPO's equation 21. On other nodes'
    tokens it estimates no divergence, but is still a penalty that is least where policy and reference agree.
    """
    log_ratio_N = reference_N - logprobs_N
    return torch.exp(log_ratio_N) - log_ratio_N - 1


def likelihood_weights(logprobs_N: Tensor, row_N: Tensor, rows: int, own_mean: float) -> Tensor:
    """Weights of `rows` completions under `training.external_weighting: likelihood`; `row_N` says whose a token is.

    min(1, exp(m - own_mean)) with m the completion's mean log-prob a token and `own_mean` that of the node's own
    completions in this round. A rule of ours, not a correction: importance weights would need the log-probs of the
    producer, which do not travel. It says that texts this policy would hardly write teach it less.
    """
    mean_R = torch.zeros(rows, dtype=logprobs_N.dtype, device=logprobs_N.device)
    mean_R.index_add_(0, row_N, logprobs_N.detach())
    mean_R /= torch.bincount(row_N, minlength=rows)
    return torch.exp(mean_R - own_mean).clamp(max=1.0)


def _ratio(logprobs_N: Tensor, recorded_N: Tensor) -> Tensor:
    """Policy over sampler, detached."""
    return torch.exp(logprobs_N - _known(recorded_N, logprobs_N)).detach()


def _known(recorded_N: Tensor, logprobs_N: Tensor) -> Tensor:
    """Recorded log-probs, the policy's own detached ones where there are none."""
    return torch.where(recorded_N.isnan(), logprobs_N.detach(), recorded_N)
