import math

import pytest
import torch

from sapo_node.training.loss import completion_weight, stream_shares, surrogate, token_scales


def naive(own: list[float], old: list[float], advantage: list[float], low: float, high: float) -> list[float]:
    """The clipped surrogate as written in the papers, one token at a time."""
    losses = []
    for new, before, value in zip(own, old, advantage, strict=True):
        ratio = math.exp(new - before)
        bounded = min(max(ratio, 1 - low), 1 + high)
        losses.append(-min(ratio * value, bounded * value))
    return losses


def test_surrogate_equals_the_formula() -> None:
    own, old = [-1.0, -1.0, -2.0, -0.1, -3.0], [-1.0, -2.0, -1.0, -0.2, -1.0]
    advantage = [1.0, 2.0, -1.0, -0.5, 1.5]
    result = surrogate(*map(torch.tensor, (own, old, advantage, [1.0] * 5)), 0.2, 0.28)
    assert result.loss_N.tolist() == pytest.approx(naive(own, old, advantage, 0.2, 0.28))


def test_the_clip_takes_the_gradient_of_exactly_the_tokens_it_reports() -> None:
    old = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    own = (old + torch.tensor([0.3, 0.2, -0.3, -0.3])).requires_grad_()
    advantage = torch.tensor([1.0, 1.0, -1.0, 1.0])  # above 1.28; inside; below 0.8; below 0.8 but worth raising
    result = surrogate(own, old, advantage, torch.ones(4), 0.2, 0.28)
    result.loss_N.sum().backward()
    assert result.clipped_N.tolist() == [True, False, True, False]
    assert own.grad is not None
    assert (own.grad == 0).tolist() == [True, False, True, False]


def test_unknown_old_logprobs_make_the_ratio_one_and_keep_the_gradient() -> None:
    own = torch.tensor([-1.5, -0.5], requires_grad=True)
    result = surrogate(own, torch.full((2,), torch.nan), torch.tensor([2.0, -1.0]), torch.ones(2), 0.2, 0.28)
    result.loss_N.sum().backward()
    assert result.ratio_N.tolist() == [1.0, 1.0]
    assert own.grad is not None
    assert own.grad.tolist() == [-2.0, 1.0]


@pytest.mark.parametrize(
    ("mean", "expected"),
    [
        # completions of 2, 4 and 3 tokens with weights 1, 0.5 and 0
        ("token", [1 / 4, 0.5 / 4, 0.0]),
        ("sequence", [1 / 1.5 / 2, 0.5 / 1.5 / 4, 0.0]),
        ("fixed", [1 / 1.5 / 10, 0.5 / 1.5 / 10, 0.0]),
    ],
)
def test_scales_make_weighted_means(mean: str, expected: list[float]) -> None:
    scales = token_scales([1.0, 0.5, 0.0], [2, 4, 3], mean, 10)  # type: ignore[arg-type]
    # token: (1 x) 1 / (1 x 2 + 0.5 x 4)
    assert scales == pytest.approx(expected)


def test_nothing_to_train_on_divides_by_nothing() -> None:
    for mean in ("token", "sequence", "fixed"):
        assert token_scales([0.0, 1.0], [3, 0], mean, 8) == [0.0, 0.0]  # type: ignore[arg-type]


def test_streams_share_the_loss_by_groups_and_weights() -> None:
    even = {"local": 1.0, "external": 1.0}
    assert stream_shares({"local": 4, "external": 4}, even) == {"local": 0.5, "external": 0.5}  # type: ignore[arg-type]
    assert stream_shares({"local": 6, "external": 2}, even)["external"] == 0.25  # type: ignore[arg-type]
    assert stream_shares({"local": 4, "external": 0}, even) == {"local": 1.0, "external": 0.0}  # type: ignore[arg-type]
    doubled = {"local": 1.0, "external": 2.0}
    assert stream_shares({"local": 4, "external": 4}, doubled)["external"] == pytest.approx(2 / 3)  # type: ignore[arg-type]
    assert stream_shares({"local": 0, "external": 0}, even) == {"local": 0.0, "external": 0.0}  # type: ignore[arg-type]


def test_weights_follow_the_masks() -> None:
    assert completion_weight("local", -1.0, False, external_negative="drop") == 1.0
    assert completion_weight("external", -1.0, False) == 1.0
    assert completion_weight("external", -1.0, False, external_negative="drop") == 0.0
    assert completion_weight("external", -1.0, False, external_negative="downweight") == 0.5
    assert completion_weight("external", 0.0, False, external_negative="drop") == 1.0
    assert completion_weight("local", 1.0, True) == 0.0
    assert completion_weight("local", 1.0, True, mask_truncated=False) == 1.0
