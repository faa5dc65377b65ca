import pytest
import torch

from sapo_node.training.logprobs import chunked, token_logprobs
from sapo_node.training.packing import Piece, micro_batches, pack, pad, split
from sapo_node.training.policy import make_policy, plain_logprobs, singles
from tests.tiny import FAMILIES, Family, make_model, make_tokenizer

PIECES = [
    Piece([5, 9, 200, 31, 77], [[8, 3, 0], [44], [120, 121, 122, 123, 0], [8, 3, 7]], [0, 1, 2, 3]),
    Piece([17, 18], [[90, 91, 0], [60, 61, 62, 63, 64, 65, 66, 67, 68]], [4, 5]),
    Piece([7, 7, 7, 7, 7, 7, 7, 7, 7], [[250, 0]], [6]),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("packed", [True, False])
def test_batched_logprobs_equal_those_of_plain_forward_passes(family: Family, packed: bool) -> None:
    policy = make_policy(family, make_model(family), make_tokenizer())
    plain = [one for piece in PIECES for one in singles(piece)]
    inputs = pack(PIECES, policy.device, policy.dtype) if packed else pad(plain, policy.device)
    found, _ = token_logprobs(policy.model, inputs, 1.0)
    exact = torch.cat([plain_logprobs(policy, one.prompt, one.completions[0]) for one in plain])
    assert policy.packed
    assert (found - exact).abs().max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_that_is_not_seen_would_be_noticed(family: Family) -> None:
    """The comparison above can fail: these models do look at what the mask lets through."""
    policy = make_policy(family, make_model(family), make_tokenizer())
    changed = plain_logprobs(policy, [5, 9, 201, 31, 77], PIECES[0].completions[2])
    exact = plain_logprobs(policy, PIECES[0].prompt, PIECES[0].completions[2])
    assert (changed - exact).abs().max() > 1e-2


def test_chunks_give_the_same_values_and_gradients_in_float64() -> None:
    head = torch.nn.Linear(6, 11, bias=False, dtype=torch.float64)
    hidden = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    target = torch.arange(9)
    whole, entropy = chunked(head, hidden, target, 0.7, 1 << 20)
    expected = torch.autograd.grad(whole.square().sum(), [hidden, head.weight])
    parts, entropy_of_parts = chunked(head, hidden, target, 0.7, 2 * 11)  # two tokens a chunk, the last one short
    found = torch.autograd.grad(parts.square().sum(), [hidden, head.weight])
    for one, other in zip((parts, entropy_of_parts, *found), (whole, entropy, *expected), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


def test_logprobs_and_entropy_are_those_of_the_tempered_distribution() -> None:
    head = torch.nn.Linear(4, 5, bias=False)
    hidden = torch.randn(3, 4)
    logprobs, entropy = chunked(head, hidden, torch.tensor([0, 4, 2]), 0.5, 1 << 20)
    distribution = torch.distributions.Categorical(logits=head(hidden) / 0.5)
    torch.testing.assert_close(logprobs, distribution.log_prob(torch.tensor([0, 4, 2])))
    torch.testing.assert_close(entropy, distribution.entropy())


def test_a_wide_group_is_split_with_its_prompt_repeated() -> None:
    piece = Piece([1] * 10, [[2] * 6] * 4, [0, 1, 2, 3])
    parts = list(split(piece, 20))
    assert [part.keys for part in parts] == [[0, 1], [2, 3]]
    assert all(part.width <= 20 and part.prompt == piece.prompt for part in parts)


def test_a_completion_longer_than_the_budget_still_comes() -> None:
    parts = list(split(Piece([1] * 3, [[2] * 50, [2] * 2], [0, 1]), 10))
    assert [part.keys for part in parts] == [[0], [1]]


def test_micro_batches_stay_within_their_budget_and_lose_nothing() -> None:
    pieces = [Piece([1] * (3 + index % 17), [[2] * 4], [index]) for index in range(40)]
    for packed in (False, True):
        batches = micro_batches(pieces, 64, packed=packed)
        assert sorted(key for batch in batches for piece in batch for key in piece.keys) == list(range(40))
        assert all(sum(piece.width for piece in batch) <= 64 for batch in batches)
        if not packed:
            assert all(len(batch) * max(piece.width for piece in batch) <= 64 for batch in batches)
        assert len(batches) < 15  # they are filled


def test_packing_computes_a_prompt_once_and_pads_nothing() -> None:
    inputs = pack(PIECES, torch.device("cpu"), torch.float32)
    assert inputs.input_ids_RT.shape == (1, (5 + 2 + 0 + 4 + 2) + (2 + 2 + 8) + (9 + 1))
    assert inputs.position_ids_RT[0, :13].tolist() == [0, 1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 5, 6]
