"""The KL penalty and the policy it compares with."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sapo_node.training import checkpoint
from sapo_node.training.base import LoadRequest, SaveRequest, StepRequest
from sapo_node.training.policy_worker import PolicyWorker
from sapo_node.training.trainer import Trainer
from sapo_node.workers import Refused
from tests.tiny import write_model
from tests.training.support import gradient_of, group, sampled, trainer


def test_there_is_no_second_copy_without_a_penalty() -> None:
    assert trainer().reference is None


def test_at_the_start_nothing_differs() -> None:
    metrics = trainer(kl_coef=0.1, mask_truncated=False).step([group(0)]).metrics
    assert metrics["kl_external"] == pytest.approx(0.0, abs=1e-6)
    assert "kl_local" not in metrics


def test_what_has_moved_is_pulled_back() -> None:
    """Groups without advantage, so that the penalty is all there is."""
    one = trainer(kl_coef=1.0, mask_truncated=False)
    start = [parameter.detach().clone() for parameter in one.parameters]
    for parameter in one.parameters:
        parameter.data += 0.02 * torch.randn_like(parameter)
    equal = group(0, (1, 1, 1, 1))
    first = one.step([equal]).metrics["kl_external"]
    for _ in range(30):
        last = one.step([equal]).metrics["kl_external"]
    assert 0 < last < 0.5 * first
    assert any(not torch.equal(old, new) for old, new in zip(start, one.parameters, strict=True))


def test_the_reference_does_not_move_and_has_no_gradient() -> None:
    one = trainer(kl_coef=0.1)
    assert one.reference is not None
    before = {name: tensor.clone() for name, tensor in one.reference._policy.model.state_dict().items()}
    one.step([group(0)])
    after = one.reference._policy.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(parameter.requires_grad for parameter in one.reference._policy.model.parameters())


def test_a_tiny_coefficient_is_no_penalty() -> None:
    groups = [group(0), group(1, (0, 1, 0, 0))]
    with_penalty, without = (gradient_of(trainer(**kl), groups) for kl in ({"kl_coef": 1e-12}, {}))
    torch.testing.assert_close(with_penalty, without, atol=1e-6, rtol=1e-4)


def loaded(model: Path, resume: Path | None = None, **training: Any) -> tuple[PolicyWorker, Trainer]:
    """A worker with a model, in this process."""
    worker = PolicyWorker()
    settings = {"model": str(model), "lr": 1e-2, "device": "cpu", "mask_truncated": False, **training}
    request = LoadRequest(
        training=settings,
        inference={"max_completion_tokens": 8},
        seed=1,
        resume=None if resume is None else str(resume),
    )
    worker.load(request)
    return worker, worker._trainer


def stepped(worker: PolicyWorker, one: Trainer, rounds: int) -> None:
    for number in range(rounds):
        worker.step(StepRequest(groups=[sampled(one, number=number), group(100 + number)]))


@pytest.mark.parametrize("settings", [{"kl_coef": 0.1}, {"lora_rank": 2}, {"lora_rank": 2, "kl_coef": 0.1}])
def test_a_resume_is_bitwise_and_keeps_what_the_node_started_from(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = write_model(tmp_path / "model")
    straight, one = loaded(model, **settings)
    stepped(straight, one, 2)
    saved = Path(straight.save(SaveRequest(directory=str(tmp_path / "checkpoints"))).path)
    stepped(straight, one, 2)
    resumed, other = loaded(model, saved, **settings)
    assert other.version == checkpoint.read_state(saved).policy_version == 2
    stepped(resumed, other, 2)
    for name, parameter in one.policy.model.named_parameters():
        assert torch.equal(other.policy.model.get_parameter(name), parameter), name
    metrics = [each.step([sampled(each)]).metrics for each in (one, other)]
    if "kl_coef" in settings:
        assert metrics[0]["kl_local"] == metrics[1]["kl_local"] > 1e-4


@pytest.mark.parametrize("settings", [{"kl_coef": 0.1}, {"lora_rank": 2}])
def test_another_model_than_at_the_start_is_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = write_model(tmp_path / "model")
    worker, _ = loaded(model, **settings)
    saved = Path(worker.save(SaveRequest(directory=str(tmp_path / "checkpoints"))).path)
    write_model(model, scale=0.2)
    with pytest.raises(Refused, match="began with another model"):
        loaded(model, saved, **settings)


def test_a_penalty_can_be_asked_for_later(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    worker, one = loaded(model)
    stepped(worker, one, 2)
    saved = Path(worker.save(SaveRequest(directory=str(tmp_path / "checkpoints"))).path)
    _, later = loaded(model, saved, kl_coef=0.1)
    assert later.step([group(0)]).metrics["kl_external"] > 1e-4
