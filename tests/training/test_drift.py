"""How likely fixed texts are to the policy."""

import math

import pytest
import torch

from sapo_node.training.drift import MAX_TOKENS, TEXTS, score_texts
from sapo_node.training.policy import make_policy, plain_logprobs
from tests.tiny import make_model, make_tokenizer


def test_the_texts_are_sixty_four_plain_sentences() -> None:
    assert len(set(TEXTS)) == 64
    assert all(text.isascii() and text.endswith(".") and not any(c.isdigit() for c in text) for text in TEXTS)


def test_the_score_is_the_mean_of_plain_forward_passes() -> None:
    policy = make_policy("tiny", make_model(scale=0.3), make_tokenizer())
    exact = []
    for text in TEXTS:
        ids = policy.tokenizer.encode(text, add_special_tokens=False)[:MAX_TOKENS]
        if len(ids) > 1:
            exact.append(plain_logprobs(policy, ids[:1], ids[1:]))
    found = score_texts(policy)
    every = torch.cat(exact)
    assert found.tokens == len(every)
    assert found.mean_logprob == pytest.approx(float(every.mean()), abs=1e-4)
    assert found.chance == pytest.approx(-math.log(len(policy.tokenizer)))


def test_a_spoilt_model_scores_lower() -> None:
    policy = make_policy("tiny", make_model(scale=0.3), make_tokenizer())
    before = score_texts(policy).mean_logprob
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(4.0)
    assert score_texts(policy).mean_logprob < before - 1.0
