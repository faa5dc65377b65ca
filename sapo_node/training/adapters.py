"""Low-rank adapters on all linear layers (LoRA, arXiv:2106.09685): W x + (alpha / rank) B A x, W frozen.

peft puts them into the model in place, so the model stays of its class and every path through it stays as it is. What
leaves the trainer (checkpoints, exports, weights for vLLM) is the model with the adapters added in, computed anew each
time from the frozen weights: nothing is ever merged in place, so the base does not drift by rounding.

The output layer and the embeddings have no adapters. B starts at zero, so the policy starts as its base. Dropout is 0:
the importance ratio compares the same function twice.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sapo_node.workers import Refused

_BASE = ".base_layer"  # how peft calls what it wraps
_ADAPTER = ".lora_"
_NAME = "default"  # peft's name of an only adapter


def attach(model: nn.Module, rank: int, alpha: float | None, seed: int) -> None:
    """Freeze a model and give all its linear layers adapters; `seed` draws A, the start of B is 0.

    Raises Refused without peft, and for a model without a layer that peft can adapt.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise Refused("training.lora_rank needs peft: pip install 'sapo-node[lora]', or set it to 0") from error
    transposed = any(isinstance(module, Conv1D) for module in model.modules())  # GPT-2's
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        target_modules="all-linear",
        fan_in_fan_out=transposed,
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(config, model)
    except ValueError as error:
        raise Refused(f"training.lora_rank: this model cannot have adapters: {error}") from error
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype == torch.bfloat16:  # whose 8 bits round away small steps
            parameter.data = parameter.data.float()
    model.eval()


def attached(model: nn.Module) -> bool:
    """Whether the model has adapters."""
    return any(True for _ in _layers(model))


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """The model without its adapters, for passes that need no gradient."""
    layers = [module for _, module in _layers(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The model's parameters under the names that they have without adapters, these added in; tied ones once."""
    layers = dict(_layers(model))
    for name, parameter in model.named_parameters(remove_duplicate=True):
        if _ADAPTER in name:
            continue
        tensor = parameter.detach()
        layer, found, rest = name.rpartition(f"{_BASE}.")
        if found and rest == "weight":
            delta = layers[layer].get_delta_weight(_NAME).detach()
            tensor = (tensor.to(delta.dtype) + delta).to(tensor.dtype)
        yield name.replace(_BASE, ""), tensor


def save_model(model: Any, folder: Path) -> None:
    """Write a Hugging Face model folder of the whole model, with the adapters added in."""
    if not attached(model):
        model.save_pretrained(folder)
        return
    whole = {name.replace(_BASE, ""): value for name, value in model.state_dict().items() if _ADAPTER not in name}
    model.save_pretrained(folder, state_dict=whole | dict(weights(model)))


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """The adapters themselves by their parameters' names; empty without any."""
    return {name: parameter.detach() for name, parameter in model.named_parameters() if _ADAPTER in name}


def restore(model: nn.Module, saved: Mapping[str, Tensor], source: Path) -> None:
    """Take adapters from what `tensors` gave. Raises Refused where the settings are not those it was written with."""
    own = tensors(model)
    if {name: tensor.shape for name, tensor in own.items()} != {name: tensor.shape for name, tensor in saved.items()}:
        raise Refused(
            f"{source} was written with another training.lora_rank; set it as it was, or start a new node from the "
            "model that `sapo-node export` makes of it"
        )
    for name, tensor in own.items():
        tensor.copy_(saved[name])


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers that have adapters. Told by what they can do: peft may not be installed."""
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "get_delta_weight"))
