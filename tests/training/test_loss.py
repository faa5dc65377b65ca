import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sapo_node.config import TrainingSection
from sapo_node.training.loss import (
    Objective,
    choose_objective,
    cispo,
    kl_penalty,
    likelihood_weights,
    surrogate,
    truncated,
)

# Log-probs under the policy and under the sampler, advantages and scales of tokens inside and outside of all bounds.
OWN = [-1.0, -1.0, -2.0, -0.1, -3.0, -0.5, -0.2]
RECORDED = [-1.0, -2.0, -1.0, -0.2, -1.0, -1.2, -3.0]
ADVANTAGE = [1.0, 2.0, -1.0, -0.5, 1.5, -1.0, 0.7]
SCALE = [0.1, 0.2, 0.1, 0.3, 0.1, 0.1, 0.25]


def tokens(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    own, recorded, advantage, scale = (torch.tensor(v, dtype=dtype) for v in (OWN, RECORDED, ADVANTAGE, SCALE))
    return own.requires_grad_(), recorded, advantage, scale


def naive_surrogate(new: float, before: float, value: float, low: float, high: float) -> float:
    """The clipped surrogate as written in the papers, one token at a time."""
    ratio = math.exp(new - before)
    bounded = min(max(ratio, 1 - low), 1 + high)
    return -min(ratio * value, bounded * value)


def naive_weight(at: int, low: float, high: float) -> float:
    """The clipped importance weight, a constant."""
    return min(max(math.exp(OWN[at] - RECORDED[at]), low), high)


def differences(value: Callable[[Tensor], float], at: Tensor, step: float = 1e-6) -> list[float]:
    """The gradient of a function of N numbers by central differences."""
    found = []
    for index in range(at.numel()):
        move = torch.zeros_like(at)
        move[index] = step
        found.append((value(at + move) - value(at - move)) / (2 * step))
    return found


def gradient(objective: Objective) -> list[float]:
    own, *others = tokens()
    objective(own, *others).loss_N.sum().backward()  # type: ignore[arg-type]
    assert own.grad is not None
    grad: list[float] = own.grad.tolist()
    return grad


def test_surrogate_equals_the_formula() -> None:
    result = surrogate(*tokens(), 0.2, 0.28)
    expected = [
        scale * naive_surrogate(new, before, value, 0.2, 0.28)
        for new, before, value, scale in zip(OWN, RECORDED, ADVANTAGE, SCALE, strict=True)
    ]
    assert result.loss_N.tolist() == pytest.approx(expected)


def test_the_gradient_of_the_surrogate_is_that_of_the_formula() -> None:
    def formula(own: Tensor) -> float:
        zipped = zip(own.tolist(), RECORDED, ADVANTAGE, SCALE, strict=True)
        return sum(scale * naive_surrogate(new, before, value, 0.2, 0.28) for new, before, value, scale in zipped)

    expected = differences(formula, tokens()[0].detach())
    found = gradient(lambda *of: surrogate(*of, clip_low=0.2, clip_high=0.28))
    assert found == pytest.approx(expected, abs=1e-8)
    assert 0.0 in found, "one is clipped"


def test_cispo_is_reinforce_with_clipped_weights() -> None:
    own, recorded, advantage, scale = tokens()
    weights = [naive_weight(at, 0.5, 3.0) for at in range(len(OWN))]

    def formula(at: Tensor) -> float:
        zipped = zip(at.tolist(), weights, ADVANTAGE, SCALE, strict=True)
        return sum(-scale * weight * value * new for new, weight, value, scale in zipped)

    result = cispo(own, recorded, advantage, scale, clip_low=0.5, clip_high=2.0)
    assert float(result.loss_N.detach().sum()) == pytest.approx(formula(own.detach()))
    expected = differences(formula, own.detach())
    assert gradient(lambda *of: cispo(*of, clip_low=0.5, clip_high=2.0)) == pytest.approx(expected, abs=1e-8)
    assert result.clipped_N.tolist() == [not 0.5 < math.exp(a - b) < 3 for a, b in zip(OWN, RECORDED, strict=True)]


def test_every_token_has_a_gradient_under_cispo() -> None:
    assert 0.0 not in gradient(lambda *of: cispo(*of, clip_low=1.0, clip_high=0.28))


def test_truncation_weighs_the_policy_gradient() -> None:
    """REINFORCE with min(ratio, cap), one token at a time."""
    found = gradient(lambda *of: truncated(*of, clip_low=0.2, clip_high=0.28, cap=2.0))
    expected = [-SCALE[at] * naive_weight(at, 0.0, 2.0) * ADVANTAGE[at] for at in range(len(OWN))]
    assert found == pytest.approx(expected)


def test_truncation_is_cispo_without_a_lower_bound() -> None:
    found = gradient(lambda *of: truncated(*of, clip_low=0.2, clip_high=0.28, cap=2.0))
    assert found == pytest.approx(gradient(lambda *of: cispo(*of, clip_low=1.0, clip_high=1.0)))


def test_truncation_reports_what_it_cut() -> None:
    result = truncated(*tokens(), clip_low=0.2, clip_high=0.28, cap=2.0)
    assert result.clipped_N.tolist() == [math.exp(a - b) > 2 for a, b in zip(OWN, RECORDED, strict=True)]
    assert result.ratio_N.tolist() == pytest.approx([math.exp(a - b) for a, b in zip(OWN, RECORDED, strict=True)])


def test_all_objectives_agree_where_sampler_and_policy_do() -> None:
    """Fresh tokens of an exact engine: each is the plain policy gradient."""
    own, _, advantage, scale = tokens()
    for settings in ({}, {"objective": "cispo"}, {"importance_cap": 2.0}):
        objective = choose_objective(TrainingSection.model_validate(settings))
        own.grad = None
        objective(own, own.detach(), advantage, scale).loss_N.sum().backward()
        torch.testing.assert_close(own.grad, -scale * advantage)


@pytest.mark.parametrize("settings", [{}, {"objective": "cispo"}, {"importance_cap": 2.0}])
def test_unknown_logprobs_make_the_ratio_one_and_keep_the_gradient(settings: dict[str, object]) -> None:
    own, recorded, advantage, scale = tokens()
    result = choose_objective(TrainingSection.model_validate(settings))(
        own, torch.full_like(recorded, torch.nan), advantage, scale
    )
    result.loss_N.sum().backward()
    assert result.ratio_N.tolist() == [1.0] * len(OWN)
    assert not result.clipped_N.any()
    torch.testing.assert_close(own.grad, -scale * advantage)


def test_the_settings_choose_objective_and_bounds() -> None:
    def clipped(**settings: object) -> list[bool]:
        objective = choose_objective(TrainingSection.model_validate(settings))
        own = torch.log(torch.tensor([1.27, 1.29, 0.81, 0.79, 4.9, 5.1, 0.01]))
        sign = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, 1.0, 1.0])
        found: list[bool] = objective(own, torch.zeros(7), sign, torch.ones(7)).clipped_N.tolist()
        return found

    assert clipped() == [False, True, False, True, True, True, False]
    assert clipped(clip_high=9.0) == [False, False, False, True, False, False, False]
    assert clipped(objective="cispo") == [False, False, False, False, False, True, False]
    assert clipped(objective="cispo", clip_high=0.28) == [False, True, False, False, True, True, False]
    assert clipped(importance_cap=5.0) == [False, False, False, False, False, True, False]


def test_the_penalty_is_the_divergence_on_average() -> None:
    """Over a whole distribution, so that the mean is exact."""
    torch.manual_seed(0)
    policy, reference = (torch.log_softmax(torch.randn(50, dtype=torch.float64), -1) for _ in range(2))
    estimate = (policy.exp() * kl_penalty(policy, reference)).sum()
    exact = sum(math.exp(p) * (p - q) for p, q in zip(policy.tolist(), reference.tolist(), strict=True))
    assert float(estimate) == pytest.approx(exact)
    assert (kl_penalty(policy, reference) > 0).all()
    assert kl_penalty(policy, policy).abs().max() == 0


def test_the_gradient_of_the_penalty_is_that_of_the_paper() -> None:
    own, reference, *_ = tokens()
    kl_penalty(own, reference).sum().backward()

    def formula(at: Tensor) -> float:
        return sum(math.exp(q - p) - (q - p) - 1 for p, q in zip(at.tolist(), RECORDED, strict=True))

    assert own.grad is not None
    assert own.grad.tolist() == pytest.approx(differences(formula, own.detach()), abs=1e-6)
    # equation 21 of GRPO: the coefficient of grad log p that is added to the advantage is beta (q / p - 1)
    assert own.grad.tolist() == pytest.approx([1 - math.exp(q - p) for p, q in zip(OWN, RECORDED, strict=True)])


def test_likelihood_weights_compare_completions_with_the_own_mean() -> None:
    logprobs = torch.tensor([-1.0, -3.0, -0.5, -0.5, -0.5, -4.0], requires_grad=True)
    rows = torch.tensor([0, 0, 1, 1, 1, 2])
    weights = likelihood_weights(logprobs, rows, 3, own_mean=-1.5)
    assert weights.tolist() == pytest.approx([math.exp(-2.0 + 1.5), 1.0, math.exp(-4.0 + 1.5)])
    assert not weights.requires_grad


def test_the_clip_takes_the_gradient_of_exactly_the_tokens_it_reports() -> None:
    old = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    own = (old + torch.tensor([0.3, 0.2, -0.3, -0.3])).requires_grad_()
    advantage = torch.tensor([1.0, 1.0, -1.0, 1.0])  # above 1.28; inside; below 0.8; below 0.8 but worth raising
    result = surrogate(own, old, advantage, torch.ones(4), 0.2, 0.28)
    result.loss_N.sum().backward()
    assert result.clipped_N.tolist() == [True, False, True, False]
    assert own.grad is not None
    assert (own.grad == 0).tolist() == [True, False, True, False]
