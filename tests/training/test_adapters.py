"""LoRA: what is trained, what leaves the trainer, what a resume needs."""

import builtins
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sapo_node.inference.base import SamplingParams
from sapo_node.inference.tensor_transfer import named_weights
from sapo_node.training import adapters, checkpoint
from sapo_node.training.base import ShareRequest
from sapo_node.training.export import export
from sapo_node.training.policy import Policy, load_policy, make_policy, plain_logprobs
from sapo_node.training.share import Sharer
from sapo_node.training.trainer import Trainer
from sapo_node.workers import Refused
from tests.tiny import FAMILIES, Family, make_model, make_tokenizer, write_model
from tests.training.support import QUESTION, gradient_of, group, sampled, trainer, with_policy

TOKENS = list(range(20, 40))


def lora(family: Family = "llama", **settings: Any) -> Trainer:
    return trainer(family, lora_rank=2, mask_truncated=False, **settings)


def logprobs(policy: Policy) -> torch.Tensor:
    return plain_logprobs(policy, TOKENS[:1], TOKENS[1:])


def moved(one: Trainer, rounds: int = 3) -> Trainer:
    one.optimizer.param_groups[0]["lr"] = 1e-2
    for number in range(rounds):
        one.step([sampled(one, number=number), group(100 + number)])
    return one


def write(one: Trainer, directory: Path) -> Path:
    state = checkpoint.State(policy_version=one.version, model="tiny", extra={})
    return checkpoint.write(directory, state, one.write, keep=9)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_policy_starts_as_its_base_and_adapters_alone_learn(family: Family) -> None:
    start = make_model(family).state_dict()
    one = lora(family)
    assert torch.equal(logprobs(one.policy), logprobs(make_policy("base", make_model(family), make_tokenizer())))
    moved(one)
    assert not torch.equal(logprobs(one.policy), logprobs(make_policy("base", make_model(family), make_tokenizer())))
    kept = {name.replace(".base_layer", ""): value for name, value in one.policy.model.state_dict().items()}
    assert all(torch.equal(kept[name], value) for name, value in start.items())
    assert sum(parameter.numel() for parameter in one.parameters) < 0.3 * one.params
    assert len(one.optimizer.state) == len(one.parameters)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_is_the_whole_model(family: Family, tmp_path: Path) -> None:
    one = moved(lora(family))
    export(write(one, tmp_path), tmp_path / "out")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    policy = make_policy("written", whole, make_tokenizer())
    torch.testing.assert_close(logprobs(policy), logprobs(one.policy), atol=1e-5, rtol=1e-5)
    assert sum(parameter.numel() for parameter in whole.parameters()) == one.params


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_gets_the_whole_model(family: Family, tmp_path: Path) -> None:
    """By files and from memory to memory: names and numbers of the model without adapters."""
    one = moved(lora(family))
    shared = Sharer(one.policy, 16).share(ShareRequest(directory=str(tmp_path), whole=True), one.version)
    engine = load_policy("engine", folder=Path(shared.path or ""))
    found = plain_logprobs(engine, shared.probe.token_ids[:1], shared.probe.token_ids[1:])
    torch.testing.assert_close(found, torch.tensor(shared.probe.logprobs), atol=1e-5, rtol=1e-5)
    sent = dict(named_weights(one.policy.model))
    assert list(sent) == [name for name, _ in engine.model.named_parameters()]
    for name, parameter in engine.model.named_parameters():
        torch.testing.assert_close(sent[name], parameter.detach())


def test_sampler_and_trainer_agree_after_a_step() -> None:
    one = lora(max_staleness=3)
    before = sampled(one)
    moved(one)
    assert one.step([before]).metrics["delta_logprob_local"] > 1e-3
    metrics = one.step([sampled(one)]).metrics
    assert metrics["ratio_mean_local"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["delta_logprob_local"] < 1e-4


def test_writing_does_not_change_the_model(tmp_path: Path) -> None:
    one = moved(lora())
    before = {name: value.clone() for name, value in one.policy.model.state_dict().items()}
    for _ in range(20):
        write(one, tmp_path)
    after = one.policy.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_switching_off_is_the_base_and_ends() -> None:
    one = moved(lora())
    adapted = logprobs(one.policy)
    with adapters.switched_off(one.policy.model):
        assert torch.equal(logprobs(one.policy), logprobs(make_policy("base", make_model(), make_tokenizer())))
    assert torch.equal(logprobs(one.policy), adapted)
    assert all(parameter.requires_grad for parameter in one.parameters)


def test_the_seed_draws_the_adapters_and_nothing_else() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    model = make_model()
    torch.manual_seed(5)
    adapters.attach(model, 2, None, seed=1)
    assert torch.equal(torch.rand(1), expected)
    again, other = make_model(), make_model()
    adapters.attach(again, 2, None, seed=1)
    adapters.attach(other, 2, None, seed=2)
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert torch.equal(model.get_parameter(name), again.get_parameter(name))
    assert not torch.equal(model.get_parameter(name), other.get_parameter(name))


@pytest.mark.parametrize(
    ("written", "read"), [({}, {"lora_rank": 2}), ({"lora_rank": 2}, {}), ({"lora_rank": 2}, {"lora_rank": 3})]
)
def test_another_rank_than_at_the_start_is_refused(written: Any, read: Any, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    saved = write(with_policy(load_policy(str(model)), **written), tmp_path / "checkpoints")
    with pytest.raises(Refused, match=r"another training\.lora_rank"):
        with_policy(load_policy(str(model)), **read).read(saved, 0)


def test_without_peft_it_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *others: Any) -> Any:
        if name == "peft":
            raise ImportError(name)
        return real(name, *others)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(Refused, match=r"pip install 'sapo-node\[lora\]'"):
        lora()


def test_adapters_bear_larger_steps() -> None:
    plain, adapted = (
        Trainer(
            make_policy("tiny", make_model(), make_tokenizer()),
            trainer().training.model_copy(update={"lr": None, "lora_rank": rank}),
            trainer().inference,
        )
        for rank in (0, 2)
    )
    assert adapted.lr == pytest.approx(10 * plain.lr)
    assert adapted.info().params == plain.info().params


def test_adapters_of_a_bfloat16_model_are_float32() -> None:
    one = trainer(dtype=torch.bfloat16, lora_rank=2, mask_truncated=False)
    assert {parameter.dtype for parameter in one.parameters} == {torch.float32}
    moved(one)
    assert one.sample([QUESTION], SamplingParams(n=2, max_tokens=3)).groups[0]
    assert {tensor.dtype for _, tensor in named_weights(one.policy.model)} == {torch.bfloat16}


def test_layers_may_be_computed_again() -> None:
    """Gradient checkpointing with adapters gives the gradient without it, and none to the frozen weights."""
    groups = [group(0), group(1, (0, 1, 0, 0))]
    plain, again = (gradient_of(moved(lora(gradient_checkpointing=on), 1), groups) for on in (False, True))
    assert plain.abs().max() > 1e-3
    torch.testing.assert_close(again, plain, atol=1e-5, rtol=1e-4)
