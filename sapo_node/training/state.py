"""The trainer's tensors on disk: the optimizer's moments and the random stream, in safetensors and never in pickles."""

from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

FILE: Final = "trainer.safetensors"
GENERATOR: Final = "generator"
MOMENTS: Final = ("step", "exp_avg", "exp_avg_sq")


def write(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> None:
    """Write `trainer.safetensors`; moments are named after their parameters."""
    tensors = {GENERATOR: generator.get_state()}
    for name, parameter in model.named_parameters():
        for moment in MOMENTS if parameter in optimizer.state else ():
            tensors[f"{moment}.{name}"] = optimizer.state[parameter][moment].contiguous()
    save_file(tensors, folder / FILE)


def read(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> None:
    """Continue from `trainer.safetensors`. Raises ValueError when it belongs to another model."""
    tensors = load_file(folder / FILE)
    generator.set_state(tensors.pop(GENERATOR))
    optimizer.state.clear()
    for name, parameter in model.named_parameters():
        if f"step.{name}" not in tensors:  # no step had been taken yet
            continue
        moments: dict[str, Tensor] = {moment: tensors.pop(f"{moment}.{name}") for moment in MOMENTS}
        if moments["exp_avg"].shape != parameter.shape:
            raise ValueError(f"{folder / FILE} is of another model: {name} has another shape")
        optimizer.state[parameter] = {moment: tensor.to(parameter.device) for moment, tensor in moments.items()}
    if tensors:
        raise ValueError(f"{folder / FILE} is of another model: it knows {sorted(tensors)[0]}")
