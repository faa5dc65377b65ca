import itertools
import math
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from sapo_node.inference.base import SamplingParams
from sapo_node.training import checkpoint
from sapo_node.training.base import TrainCompletion, TrainGroup
from sapo_node.training.encoding import MAX_TOKEN_CHARS, PIECE_CHARS
from sapo_node.training.policy import load_policy, make_policy
from sapo_node.training.rows import Row
from sapo_node.training.trainer import Trainer
from tests.tiny import FAMILIES, Family, make_model, make_tokenizer, write_model
from tests.training.support import QUESTION, TEXTS, gradient_of, group, sampled, trainer, with_policy


@torch.no_grad()
def plain_logprobs(model: Any, row: Row) -> torch.Tensor:
    """Of one completion, unpacked."""
    logits = model(input_ids=torch.tensor([row.prompt + row.tokens])).logits[0, len(row.prompt) - 1 : -1]
    return torch.log_softmax(logits, -1)[range(len(row.tokens)), row.tokens]


@torch.no_grad()
def loss_of(one: Trainer, rows: list[Row], start: list[torch.Tensor]) -> float:
    """The loss as the papers write it, a completion at a time.

    `start` are the log-probs before the update: what is held constant, importance weights for example, is of those.
    """
    settings, total = one.training, 0.0
    own = [value for row in rows if row.origin == "local" for value in row.old or []]
    for row, before in zip(rows, start, strict=True):
        if not row.tokens:
            continue
        logprobs, advantage = plain_logprobs(one.policy.model, row), row.advantage
        if settings.external_weighting == "likelihood" and row.origin == "external":
            advantage *= min(1.0, math.exp(float(before.mean()) - sum(own) / len(own)))
        old = before if row.old is None else torch.tensor(row.old, dtype=before.dtype)
        ratio, weight = torch.exp(logprobs - old), torch.exp(before - old)
        if row.old is None:  # the function whose gradient a ratio of 1 has
            worth = advantage * logprobs
        elif settings.objective == "cispo":
            worth = weight.clamp(0.0, 5.0) * advantage * logprobs
        elif settings.importance_cap is not None:
            worth = weight.clamp(max=settings.importance_cap) * advantage * logprobs
        else:
            worth = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        total -= float((row.scale * worth).sum())
        if one.reference is not None:
            gap = plain_logprobs(one.reference._policy.model, row) - logprobs
            total += settings.kl_coef * float((row.scale * (torch.exp(gap) - gap - 1)).sum())
    return total


def shift(one: Trainer, direction: torch.Tensor) -> None:
    """Move all parameters along a direction."""
    for parameter, part in zip(
        one.parameters, direction.split([parameter.numel() for parameter in one.parameters]), strict=True
    ):
        parameter.data += part.view_as(parameter)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        *((family, {}) for family in FAMILIES),
        ("llama", {"objective": "cispo"}),
        ("llama", {"importance_cap": 1.1}),
        ("llama", {"kl_coef": 0.5}),
        ("llama", {"external_weighting": "likelihood"}),
        ("llama", {"objective": "cispo", "kl_coef": 0.1, "external_weighting": "likelihood", "advantage": "mean"}),
    ],
)
def test_gradients_equal_finite_differences_in_float64(family: Family, settings: dict[str, Any]) -> None:
    one = trainer(family, dtype=torch.float64, mask_truncated=False, **settings)
    for module in one.policy.model.modules():
        if isinstance(module, LlamaRMSNorm):  # transformers' own computes in float32, too coarse for differences
            module.forward = partial(
                torch.nn.functional.rms_norm, normalized_shape=(32,), weight=module.weight, eps=1e-6
            )
    groups = [group(0, (1, 0, 0, 1)), group(1, (0, 0, 0, 1), texts=["1 2", "", "34", "how many letters"])]
    off_policy = sampled(one, (1, 0, 0, 0), number=2)
    shifted = [
        msgspec.structs.replace(
            c, logprobs=[value + 0.3 * (-1) ** place for place, value in enumerate(c.logprobs or [])]
        )
        for c in off_policy.completions
    ]
    groups.append(msgspec.structs.replace(off_policy, completions=shifted))
    torch.manual_seed(1)
    if settings.get("kl_coef"):
        shift(one, 0.02 * torch.randn(sum(p.numel() for p in one.parameters), dtype=torch.float64))
    rows, _ = one._rows(groups)
    start = [plain_logprobs(one.policy.model, row) if row.tokens else torch.zeros(0) for row in rows]
    gradient = gradient_of(one, groups)
    for _ in range(3):
        direction = torch.randn_like(gradient)
        shift(one, 1e-6 * direction)
        above = loss_of(one, rows, start)
        shift(one, -2e-6 * direction)
        below = loss_of(one, rows, start)
        shift(one, 1e-6 * direction)
        slope = float(gradient @ direction)  # parts of it cancel, so what may be off is measured by the whole
        assert (above - below) / 2e-6 == pytest.approx(slope, rel=1e-5, abs=1e-6 * float(gradient.norm()))


@pytest.mark.parametrize("mean", ["token", "sequence", "fixed"])
def test_packed_plain_and_tiny_micro_batches_have_one_gradient(mean: str) -> None:
    groups = [group(0), group(1, (0, 1, 1, 1)), group(2, (1, 1, 1, 1))]
    one = trainer(loss_mean=mean)
    expected = gradient_of(one, groups)
    one.policy.packed = False
    plain = gradient_of(one, groups)
    small = gradient_of(trainer(loss_mean=mean, micro_batch_tokens=1), groups)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(plain, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(small, expected, atol=1e-5, rtol=1e-4)


def test_the_end_token_is_trained() -> None:
    """Two answers alike but for their end: rewarding the one that stopped makes stopping likelier."""
    one = trainer(mask_truncated=False)
    stopped = TrainCompletion(text="46", finish="stop")
    ran_on = TrainCompletion(text="46", finish="length")
    pair = msgspec.structs.replace(group(0, (1, 0)), completions=[stopped, ran_on])

    @torch.no_grad()
    def stop_logprob() -> float:
        ids = one.policy.encoder.prompt(QUESTION) + one.policy.encoder.completion("46", "length")
        logits = one.policy.model(input_ids=torch.tensor([ids])).logits[0, -1]
        return float(torch.log_softmax(logits, -1)[one.policy.stop_ids[0]])

    before = stop_logprob()
    for _ in range(3):
        one.step([pair])
    assert stop_logprob() > before + 0.05


def test_truncated_completions_are_masked_and_counted() -> None:
    one = trainer()
    result = one.step([group(0, finish="length")])
    assert result.metrics["tokens_trained"] == 0
    assert result.metrics["tokens_masked"] == sum(len(one.policy.encoder.completion(text, "length")) for text in TEXTS)
    assert result.metrics["grad_norm"] == 0


def test_groups_without_advantage_cost_no_forward_and_no_step() -> None:
    one = trainer(weight_decay=0.1)
    before = [parameter.clone() for parameter in one.parameters]
    one.policy.model.forward = one.policy.model.base_model.forward = _never
    result = one.step([group(0, (1, 1, 1, 1)), group(1, (0, 0, 0, 0))])
    assert result.policy_version == 1
    assert all(torch.equal(old, new) for old, new in zip(before, one.parameters, strict=True))


def _never(*arguments: object, **others: object) -> None:
    raise AssertionError("the model was called")


def test_groups_without_advantage_stay_in_the_mean() -> None:
    one = trainer()
    alone = gradient_of(one, [group(0)])
    diluted = gradient_of(one, [group(0), group(1, (1, 1, 1, 1))])
    torch.testing.assert_close(diluted, alone / 2, atol=1e-7, rtol=1e-4)


def test_own_completions_keep_their_tokens_and_ratios_are_one_while_fresh() -> None:
    one = trainer(mask_truncated=False)
    metrics = one.step([sampled(one)]).metrics
    assert metrics["ratio_mean_local"] == pytest.approx(1.0, abs=1e-4)
    assert 0 <= metrics["delta_logprob_local"] < 1e-4
    assert "delta_logprob_external" not in metrics
    assert metrics["entropy"] > 0


def test_stale_own_groups_show_in_the_ratio_when_they_are_allowed() -> None:
    one = trainer(max_staleness=1, mask_truncated=False)
    old = sampled(one)
    one.step([group(0)])
    assert one.step([old]).metrics["delta_logprob_local"] > 1e-3


def test_own_groups_that_are_too_stale_are_skipped_with_the_reason() -> None:
    one = trainer()
    old = sampled(one, number=7)
    one.step([])
    result = one.step([old])
    assert "sampled 1 policy versions ago" in result.skipped[7]
    assert result.metrics["tokens_trained"] == 0


def test_prompts_that_are_too_long_are_skipped_with_the_reason() -> None:
    one = trainer()
    one.max_prompt = 3
    assert "its prompt has" in one.step([group(5)]).skipped[5]


def test_groups_that_only_the_tokenizer_shows_to_be_useless_are_told_before_a_step() -> None:
    """Hope: a question too long for the prompt, or answers that say "stop" and are cut when they are encoded."""
    one = trainer()
    long = "x y " * 5000
    groups = [
        group(0),
        group(1, texts=[long] * 4),
        group(2, (1, 0, 0, 0), texts=[long, "47", "48", ""]),
        group(3, (1, 0, 0, 0), texts=["46", long, long, long]),
        group(4, (0, 0, 0, 0)),
    ]
    assert one.unfit(groups) == dict.fromkeys((1, 2), "its better completions are too long or were cut")
    assert one.version == 0
    one.max_prompt = 3
    assert "its prompt has" in one.unfit([group(5)])[5]


def test_texts_that_do_not_fit_are_read_no_further_than_it_takes_to_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hope: each group makes the tokenizer read a quarter of a megabyte, of which nothing is used."""
    one, read = trainer(), list[int]()
    completions = one.policy.encoder.completions

    def reading(texts: Any, finishes: Any) -> Any:
        read.extend(map(len, texts))
        return completions(texts, finishes)

    monkeypatch.setattr(one.policy.encoder, "completions", reading)
    junk = "?!" * 16_000
    limit = one.inference.max_completion_tokens
    assert set(one.unfit([group(number, texts=[junk] * 4) for number in range(3)])) == {0, 1, 2}
    assert sum(read) <= 3 * 4 * 4 * (PIECE_CHARS * limit + MAX_TOKEN_CHARS)
    read.clear()
    asked = msgspec.structs.replace(group(4), question=junk)
    assert "its prompt has" in one.unfit([asked])[4]
    assert sum(read) <= 4 * (PIECE_CHARS * one.max_prompt + MAX_TOKEN_CHARS)


def test_external_completions_of_any_length_are_bounded() -> None:
    one = trainer()
    rows, _ = one._rows([group(0, texts=["x y " * 5000, "", "", ""])])
    assert len(rows[0].tokens) == one.inference.max_completion_tokens
    assert rows[0].truncated


def test_an_external_completion_may_be_as_long_as_an_own_one() -> None:
    one = trainer()
    limit = one.inference.max_completion_tokens
    texts = {len(one.policy.encoder.completion(text, "stop")): text for text in ("1" * n for n in range(2 * limit))}
    rows, _ = one._rows([group(0, texts=[texts[limit], texts[limit + 1], "", ""])])
    assert [row.truncated for row in rows] == [False, True, False, False]


def test_control_tokens_of_a_stranger_are_trained_on_as_text() -> None:
    one = trainer()
    rows, _ = one._rows([group(0, texts=["46<|end|>", "", "", ""])])
    assert rows[0].tokens.count(one.policy.stop_ids[0]) == 1  # the one we put behind it
    assert rows[0].tokens[-1] == one.policy.stop_ids[0]


def test_external_weight_zero_is_training_without_them() -> None:
    local = group(0, origin="local", producer="me")
    silo = gradient_of(trainer(), [local])
    weightless = gradient_of(trainer(external_weight=0.0), [local, group(1, (0, 1, 0, 0))])
    torch.testing.assert_close(weightless, silo, atol=1e-7, rtol=1e-4)


def test_the_gradient_of_every_producer_is_measured() -> None:
    one = trainer(producer_gradients=True)
    groups = [
        group(0, origin="local", producer="me"),
        group(1, (0, 1, 0, 0), producer="anna"),
        group(2, (1, 0, 0, 0), producer="bert"),
        group(3, (1, 1, 1, 1), producer="carl"),
    ]
    total = gradient_of(one, groups)
    torch.testing.assert_close(total, gradient_of(trainer(), groups), atol=1e-6, rtol=1e-4)
    result = one.step(groups)
    norms = result.producer_gradients
    assert set(norms) == {"me", "anna", "bert", "carl"}
    assert norms["carl"] == 0.0
    assert min(norms["me"], norms["anna"], norms["bert"]) > 0
    assert result.metrics["grad_norm_local"] == pytest.approx(norms["me"])
    assert result.metrics["grad_norm_external"] <= norms["anna"] + norms["bert"] + 1e-6
    assert result.metrics["grad_norm"] == pytest.approx(float(total.norm()), rel=1e-4)


def test_a_step_keeps_the_gradient_norm_within_its_bound() -> None:
    one = trainer(max_grad_norm=1e-3)
    one.optimizer = torch.optim.SGD(one.parameters, lr=1.0)  # whose step is the clipped gradient itself
    before = torch.cat([parameter.detach().flatten().clone() for parameter in one.parameters])
    norm = one.step([group(0)]).metrics["grad_norm"]
    after = torch.cat([parameter.detach().flatten() for parameter in one.parameters])
    assert norm > 1e-3
    assert float((after - before).norm()) == pytest.approx(1e-3, rel=1e-2)


def test_broken_weights_stop_the_step() -> None:
    one = trainer()
    with torch.no_grad():
        one.parameters[0].fill_(float("nan"))
    with pytest.raises(ArithmeticError, match="not finite"):
        one.step([group(0)])


def test_evaluation_does_not_disturb_the_stream() -> None:
    one, other = trainer(), trainer()
    first = one.sample([QUESTION], SamplingParams(n=4, max_tokens=6, seed=11))
    again = one.sample([QUESTION], SamplingParams(n=4, max_tokens=6, seed=11))
    assert first.groups == again.groups
    params = SamplingParams(n=4, max_tokens=6)
    assert one.sample([QUESTION], params).groups == other.sample([QUESTION], params).groups


def test_questions_that_do_not_fit_get_an_empty_group() -> None:
    one = trainer()
    batch = one.sample([QUESTION, "word " * 400], SamplingParams(n=2, max_tokens=3))
    assert [len(completions) for completions in batch.groups] == [2, 0]


def test_it_learns_a_trivial_reward() -> None:
    """Reward: the completion holds an `e`. Nothing but the reward says so."""
    one = with_policy(make_policy("llama", make_model(scale=0.05), make_tokenizer()))
    one.optimizer.param_groups[0]["lr"] = 1e-2
    means = []
    for _ in range(25):
        batch = one.sample([QUESTION] * 4, SamplingParams(n=16, max_tokens=6))
        groups, rewards = [], []
        for number, completions in enumerate(batch.groups):
            values = [float("e" in c.text) for c in completions]
            rewards += values
            groups.append(
                TrainGroup(
                    group_id=number,
                    origin="local",
                    producer="me",
                    question=QUESTION,
                    completions=[
                        TrainCompletion(text=c.text, finish="stop", token_ids=c.token_ids, logprobs=c.logprobs)
                        for c in completions
                    ],
                    rewards=values,
                    policy_version=batch.policy_version,
                )
            )
        one.step(groups)
        means.append(sum(rewards) / len(rewards))
    assert sum(means[:3]) / 3 < 0.4
    assert sum(means[-3:]) / 3 > 0.8


def _rounds(one: Trainer, count: int) -> None:
    for number in range(count):
        one.step([sampled(one, number=0), group(1, ((0, 1, 0, 0), (1, 0, 0, 1))[number % 2])])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_resumed_run_is_bitwise_the_run_that_was_not_interrupted(tmp_path: Path, family: Family) -> None:
    folder = write_model(tmp_path / "model", family)
    straight = with_policy(load_policy(str(folder)), mask_truncated=False)
    _rounds(straight, 4)
    _rounds(straight, 2)

    first = with_policy(load_policy(str(folder)), mask_truncated=False)
    _rounds(first, 4)
    state = checkpoint.State(policy_version=first.version, model=str(folder), extra={})
    saved = checkpoint.write(tmp_path / "checkpoints", state, first.write, keep=2)
    second = with_policy(load_policy(str(folder), folder=saved), mask_truncated=False)
    second.read(saved, checkpoint.read_state(saved).policy_version)
    _rounds(second, 2)

    assert second.version == straight.version == 6
    for one, other in itertools.zip_longest(second.parameters, straight.parameters):
        assert torch.equal(one, other)
    params = SamplingParams(n=3, max_tokens=5)
    assert second.sample([QUESTION], params).groups == straight.sample([QUESTION], params).groups


def test_stale_tokens_beyond_the_cap_are_counted() -> None:
    one = trainer(importance_cap=1.5, mask_truncated=False)
    own = sampled(one)
    unlikely = [
        msgspec.structs.replace(c, logprobs=[value - 1.0 for value in c.logprobs or []]) for c in own.completions
    ]
    metrics = one.step([msgspec.structs.replace(own, completions=unlikely), group(1)]).metrics
    assert metrics["ratio_mean_local"] == pytest.approx(math.e, rel=1e-3)
    assert metrics["clip_fraction_local"] == 1.0
    assert metrics["ratio_mean_external"] == 1.0
    assert metrics["clip_fraction_external"] == 0.0


def test_the_entropy_of_both_streams_is_measured() -> None:
    metrics = trainer(mask_truncated=False).step([group(0), group(1, origin="local", producer="me")]).metrics
    assert metrics["entropy_local"] == pytest.approx(metrics["entropy_external"], rel=1e-4)  # the same texts
    assert metrics["entropy"] == pytest.approx(metrics["entropy_local"], rel=1e-4)


def test_unlikely_external_completions_weigh_less() -> None:
    one = trainer(external_weighting="likelihood", mask_truncated=False)
    metrics = one.step([sampled(one), group(1)]).metrics
    assert 0 < metrics["likelihood_weight"] < 0.9  # texts that this random model would never write
    assert "likelihood_weight" not in trainer().step([group(1)]).metrics


def test_without_own_completions_there_is_nothing_to_compare_with() -> None:
    groups = [group(0), group(1, (0, 1, 0, 0))]
    weighted = gradient_of(trainer(external_weighting="likelihood"), groups)
    torch.testing.assert_close(weighted, gradient_of(trainer(), groups))


def test_a_large_learning_rate_is_warned_about_for_large_models_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trainer().info().notes == []
    monkeypatch.setattr("sapo_node.training.trainer.LARGE_PARAMS", 100)
    assert any("seldom survives" in note for note in trainer().info().notes)


def test_long_external_groups_do_not_drown_the_local_ones() -> None:
    one = trainer(producer_gradients=True)
    own = [group(index, (1, 0, 0, 1)) for index in range(2)]
    quiet = msgspec.structs.replace(group(2, (1, 0, 0, 1)), origin="external", producer="other")
    long = "how many letters are in this word " * 8
    loud = msgspec.structs.replace(
        group(3, (1, 0) * 16, texts=[f"{long}{i}" for i in range(32)]), origin="external", producer="other"
    )
    local = {
        name: one._backward(rows).streams["local"]
        for name, rows in (("quiet", weighed(one, [*own, quiet])), ("loud", weighed(one, [*own, loud])))
    }
    assert local["loud"] == pytest.approx(local["quiet"], rel=1e-3)


def weighed(one: Trainer, groups: list[TrainGroup]) -> list[Row]:
    rows, skipped = one._rows(groups)
    assert not skipped
    return rows


def test_a_megabyte_of_text_is_cut_before_it_is_encoded() -> None:
    one = trainer()
    texts = ["1" * 200_000, "2"]
    big = msgspec.structs.replace(group(0, (1, 0), texts=texts), origin="external", producer="other")
    seen: list[int] = []
    encode = one.policy.encoder.completions

    def watched(given: list[str], finishes: list[str]) -> list[list[int]]:
        seen.extend(map(len, given))
        return encode(given, finishes)  # type: ignore[arg-type]

    one.policy.encoder.completions = watched  # type: ignore[method-assign, assignment]
    rows = weighed(one, [big])
    assert max(seen) <= 200_000 // 10
    assert [row.truncated for row in rows] == [True, False]
