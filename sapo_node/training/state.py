"""The trainer's tensors on disk, in safetensors and never in pickles.

They are the optimizer's moments, the random stream, and what else a resume needs.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from sapo_node.workers import Refused

FILE: Final = "trainer.safetensors"
GENERATOR: Final = "generator"
EXTRA: Final = "extra."
FIRST_MOMENTS: Final = ("exp_avg", "state1")  # as torch and bitsandbytes call them; of their parameter's shape


class Saved(NamedTuple):
    """What `trainer.safetensors` holds."""

    folder: Path
    extra: dict[str, Tensor]
    tensors: dict[str, Tensor]


def moments(
    model: nn.Module, optimizer: torch.optim.Optimizer, whole: Callable[[Tensor], Tensor] = Tensor.contiguous
) -> dict[str, Tensor]:
    """The optimizer's state, named after its parameters; `whole` is applied to each of its tensors."""
    return {
        f"{key}.{name}": whole(torch.as_tensor(value))
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def write(folder: Path, moments: Mapping[str, Tensor], generator: torch.Generator, extra: Mapping[str, Tensor]) -> None:
    """Write `trainer.safetensors`. `extra` is the trainer's own."""
    tensors = {GENERATOR: generator.get_state(), **moments}
    tensors |= {f"{EXTRA}{key}": value.contiguous() for key, value in extra.items()}
    save_file(_apart(tensors), folder / FILE)


def load(folder: Path) -> Saved:
    """Read `trainer.safetensors`. Raises OSError or SafetensorError."""
    tensors = load_file(folder / FILE)
    extra = {key.removeprefix(EXTRA): tensors.pop(key) for key in list(tensors) if key.startswith(EXTRA)}
    return Saved(folder, extra, tensors)


def restore(saved: Saved, model: nn.Module, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> None:
    """Continue from what was read. Raises ValueError when it belongs to another model, Refused for other settings."""
    file = saved.folder / FILE
    moments: dict[str, dict[str, Tensor | int]] = {}
    for key, tensor in saved.tensors.items():
        if key == GENERATOR:
            generator.set_state(tensor)
            continue
        moment, _, name = key.partition(".")
        whole = tensor.ndim == 0 and tensor.dtype == torch.int64  # bitsandbytes' step is a plain number
        moments.setdefault(name, {})[moment] = int(tensor) if whole else tensor
    kind = FIRST_MOMENTS[0] if isinstance(optimizer, torch.optim.AdamW) else FIRST_MOMENTS[1]
    optimizer.state.clear()
    for name, parameter in model.named_parameters():
        own = moments.pop(name, None)
        if own is None:  # no step had been taken yet
            continue
        if kind not in own and any(other in own for other in FIRST_MOMENTS):
            raise Refused(f"{saved.folder} was written with another training.optimizer; set it as it was")
        first = own[kind]
        if not isinstance(first, Tensor) or first.shape != parameter.shape:
            raise ValueError(f"{file} is of another model: {name} has another shape")
        optimizer.state[parameter] = {
            moment: _beside(parameter, value) if isinstance(value, Tensor) else value for moment, value in own.items()
        }
    if moments:
        raise ValueError(f"{file} is of another model: it knows {sorted(moments)[0]}")


def _beside(parameter: Tensor, value: Tensor) -> Tensor:
    """A moment where its parameter is, cut as it is where several devices have a part of it."""
    value = value.to(parameter.device)
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same, each with memory of its own, as safetensors wants it: bitsandbytes shares its tables."""
    seen: set[int] = set()
    apart = {}
    for key, tensor in tensors.items():
        shared = tensor.data_ptr() in seen
        seen.add(tensor.data_ptr())
        apart[key] = tensor.clone() if shared else tensor
    return apart
