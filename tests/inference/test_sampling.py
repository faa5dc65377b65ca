import itertools
from collections import Counter

import pytest
import torch

from sapo_node.inference.sampling import Drawn, _chunks, check_sampling, draw, sample
from sapo_node.training.policy import Policy, make_policy, plain_logprobs
from tests.tiny import FAMILIES, Family, make_model, make_tokenizer

PROMPTS = [[5, 9, 200, 31, 77, 12, 13], [17, 18], [60, 61, 62]]


def policy(family: Family = "llama", *, scale: float = 0.3, stop_ids: tuple[int, ...] = tuple(range(40))) -> Policy:
    """Forty of three hundred tokens end a completion, so that rows end at different times."""
    made = make_policy(family, make_model(family, scale=scale), make_tokenizer())
    made.stop_ids = stop_ids
    return made


def run(one: Policy, *, seed: int = 0, n: int = 6, batch: int = 64, max_tokens: int = 9) -> list[list[Drawn]]:
    generator = torch.Generator().manual_seed(seed)
    return sample(
        one, PROMPTS, n=n, max_tokens=max_tokens, temperature=1.0, generator=generator, batch_completions=batch
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("packed", [True, False])  # the additive mask, or the two-dimensional one
def test_recorded_logprobs_equal_those_of_plain_forward_passes(family: Family, packed: bool) -> None:
    one = policy(family)
    one.packed = packed
    drawn = run(one)
    for prompt, completions in zip(PROMPTS, drawn, strict=True):
        for completion in completions:
            exact = plain_logprobs(one, prompt, completion.token_ids)
            assert (exact - torch.tensor(completion.logprobs)).abs().max() < 1e-4
    assert len({len(c.token_ids) for cs in drawn for c in cs}) > 2  # rows did end at different times


def test_completions_end_with_the_end_token_or_at_the_limit() -> None:
    one = policy()
    finishes = Counter()
    for completion in itertools.chain(*run(one, n=20)):
        finishes[completion.finish] += 1
        *before, last = completion.token_ids
        assert not set(before) & set(one.stop_ids)
        assert (last in one.stop_ids) == (completion.finish == "stop")
        assert completion.finish == "stop" or len(completion.token_ids) == 9
        assert len(completion.logprobs) == len(completion.token_ids)
    assert min(finishes["stop"], finishes["length"]) > 0


def test_the_same_seed_gives_the_same_completions() -> None:
    one = policy()
    assert run(one, seed=3) == run(one, seed=3)
    assert run(one, seed=3) != run(one, seed=4)


@pytest.mark.parametrize("batch", [1, 4, 7])
def test_small_batches_give_every_prompt_its_completions(batch: int) -> None:
    drawn = run(policy(), batch=batch)
    assert [len(completions) for completions in drawn] == [6, 6, 6]


def test_chunks_keep_within_the_limit_and_split_no_question_that_fits() -> None:
    chunks = list(_chunks([9, 3, 5, 4, 8], n=4, batch_completions=10))
    assert [sum(copies for _, copies in chunk) for chunk in chunks] == [8, 8, 4]
    assert [index for chunk in chunks for index, _ in chunk] == [1, 3, 2, 4, 0]  # similar lengths together
    assert list(_chunks([1], n=5, batch_completions=2)) == [[(0, 2)], [(0, 2)], [(0, 1)]]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_end_of_the_models_positions_ends_a_completion(family: Family) -> None:
    one = policy(family, stop_ids=(-1,))
    prompts = [[7] * 250, [8] * 10]
    generator = torch.Generator().manual_seed(0)
    near, far = sample(one, prompts, n=2, max_tokens=30, temperature=1.0, generator=generator, batch_completions=8)
    assert {(len(c.token_ids), c.finish) for c in near} == {(6, "length")}
    assert {(len(c.token_ids), c.finish) for c in far} == {(30, "length")}


def test_a_prompt_without_room_is_an_error() -> None:
    with pytest.raises(ValueError, match="1 to 255 tokens"):
        sample(
            policy(), [[1] * 256], n=1, max_tokens=1, temperature=1.0, generator=torch.Generator(), batch_completions=1
        )


def test_no_prompts_no_completions() -> None:
    assert (
        sample(policy(), [], n=2, max_tokens=3, temperature=1.0, generator=torch.Generator(), batch_completions=4) == []
    )


def test_draws_follow_the_tempered_distribution() -> None:
    logits = torch.tensor([2.0, 0.0, 1.0, -torch.inf]).expand(20_000, 4)
    tokens, logprobs = draw(logits, 0.5, torch.Generator().manual_seed(0))
    expected = torch.softmax(torch.tensor([2.0, 0.0, 1.0, -torch.inf]) / 0.5, -1)
    shares = torch.bincount(tokens, minlength=4) / len(tokens)
    assert (shares - expected).abs().max() < 0.01
    assert shares[3] == 0
    torch.testing.assert_close(logprobs, expected.log()[tokens])


@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_leaves_no_trace_in_the_model(family: Family) -> None:
    one = policy(family)
    before = {name: value.clone() for name, value in one.model.state_dict().items()}
    run(one)
    assert all(torch.equal(value, before[name]) for name, value in one.model.state_dict().items())
    assert all(parameter.grad is None for parameter in one.model.parameters())


def test_a_model_whose_cache_changes_its_logprobs_is_refused() -> None:
    from sapo_node.workers import Refused

    one = policy(scale=0.5)
    forward = one.model.forward
    one.model.forward = lambda *a, past_key_values=None, **k: forward(  # forgets where a cached token stands
        *a,
        past_key_values=past_key_values,
        **(k | ({"position_ids": k["position_ids"] * 0} if past_key_values else {})),
    )
    with pytest.raises(Refused, match="samples with other log-probs"):
        check_sampling(one)
