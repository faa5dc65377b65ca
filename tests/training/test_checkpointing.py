"""Gradient checkpointing: the same numbers from less memory, and nothing else changes."""

import pytest
import torch

from sapo_node.inference.sampling import check_sampling
from sapo_node.training.logprobs import token_logprobs
from sapo_node.training.packing import Piece, pack
from sapo_node.training.policy import Policy, checkpoint_layers, make_policy
from tests.tiny import FAMILIES, Family, make_model, make_tokenizer

PIECES = [
    Piece([5, 9, 200, 31, 77], [[8, 3, 0], [44], [120, 121, 122, 123, 0]], [0, 1, 2]),
    Piece([17, 18], [[90, 91, 0], [60, 61, 62, 63, 64, 65]], [3, 4]),
]


def make(family: Family, checkpointed: bool) -> Policy:
    policy = make_policy(family, make_model(family), make_tokenizer())
    if checkpointed:
        checkpoint_layers(policy)
    return policy


def kept_numbers(policy: Policy) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """Log-probs, gradients, and how many numbers were kept for the backward pass."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs, _ = token_logprobs(policy.model, pack(PIECES, policy.device, policy.dtype), 1.0)
    size = sum(kept.values()) - sum(p.untyped_storage().nbytes() for p in policy.model.parameters())
    logprobs.square().sum().backward()  # type: ignore[no-untyped-call]
    return logprobs.detach(), [p.grad for p in policy.model.parameters()], size


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointed_layers_give_the_same_gradients_and_keep_less(family: Family) -> None:
    logprobs, gradients, size = kept_numbers(make(family, checkpointed=False))
    same, same_gradients, less = kept_numbers(make(family, checkpointed=True))
    assert torch.equal(logprobs, same)
    for one, other in zip(gradients, same_gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    assert less < 0.7 * size


def test_no_layer_is_left_in_training_mode() -> None:
    policy = make("gpt2", checkpointed=True)
    token_logprobs(policy.model, pack(PIECES, policy.device, policy.dtype), 1.0)
    assert not any(module.training for module in policy.model.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_keeps_its_cache(family: Family) -> None:
    check_sampling(make(family, checkpointed=True))
