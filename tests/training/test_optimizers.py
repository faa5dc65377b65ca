from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sapo_node.config import TrainingSection
from sapo_node.training import state
from sapo_node.training.optimizers import make_optimizer
from sapo_node.workers import Refused


def test_the_default_is_adamw_with_the_settings() -> None:
    parameter = nn.Parameter(torch.tensor([1.0]))
    optimizer = make_optimizer([parameter], TrainingSection(betas=(0.5, 0.6), weight_decay=0.1), lr=0.01)
    parameter.grad = torch.tensor([2.0])
    optimizer.step()
    # by hand: decay, then a step of lr x m / (1 - 0.5) / sqrt(v / (1 - 0.6)) = lr in the gradient's direction
    assert float(parameter.detach()) == pytest.approx(1.0 * (1 - 0.01 * 0.1) - 0.01, abs=1e-6)


def test_8_bits_are_refused_on_a_cpu_with_the_reason() -> None:
    with pytest.raises(Refused, match="trains on a CPU"):
        make_optimizer([nn.Parameter(torch.zeros(2))], TrainingSection(optimizer="adamw8bit"), lr=0.01)


def stepped(model: nn.Linear, optimizer: torch.optim.Optimizer, rounds: int) -> None:
    draw = torch.Generator().manual_seed(0)
    for _ in range(rounds):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 128, generator=draw)).square().sum()
        loss.backward()
        optimizer.step()


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(128, 64)


def test_moments_in_8_bits_survive_a_resume(tmp_path: Path) -> None:
    """With the library itself where it is installed: this version of it also runs on CPUs."""
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is for GPUs: pip install 'sapo-node[gpu]'")
    model, generator = linear(), torch.Generator()
    optimizer: Any = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-2)
    stepped(model, optimizer, 3)
    state.write(tmp_path, state.moments(model, optimizer), generator, {})
    other = linear()
    other.load_state_dict(model.state_dict())
    resumed: Any = bitsandbytes.optim.AdamW8bit(other.parameters(), lr=1e-2)
    state.restore(state.load(tmp_path), other, resumed, generator)
    stepped(model, optimizer, 3)
    stepped(other, resumed, 3)
    assert torch.equal(model.weight, other.weight)


def test_moments_of_another_optimizer_are_refused(tmp_path: Path) -> None:
    model, generator = linear(), torch.Generator()
    optimizer = make_optimizer(list(model.parameters()), TrainingSection(), lr=0.01)
    stepped(model, optimizer, 1)
    state.write(tmp_path, state.moments(model, optimizer), generator, {})
    other = torch.optim.SGD(model.parameters())
    with pytest.raises(Refused, match=r"another training\.optimizer"):
        state.restore(state.load(tmp_path), model, other, generator)
