"""Log-probs of chosen tokens without the tensor of all logits.

The vocabulary is the widest thing in a small model's forward pass. Hidden states are picked at the N positions that
predict something, and the output layer runs over them in chunks which are computed again in the backward pass, so
memory holds one chunk of logits instead of batch x sequence x vocabulary.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from sapo_node.training import attention
from sapo_node.training.packing import Packed

# Logits alive at once. 2^24 floats are 64 MiB: small beside any model whose vocabulary fills it.
CHUNK_LOGITS = 1 << 24

Chosen = tuple[Tensor, Tensor]  # log-prob and entropy of N tokens


def token_logprobs(
    model: nn.Module, packed: Packed, temperature: float, split_head: bool = True, chunk_logits: int = CHUNK_LOGITS
) -> Chosen:
    """Log-probs (with gradient) and entropies (without) of the N tokens of `packed`, both float32 or wider, N.

    Logits are divided by `temperature` first: the distribution that was sampled from. With `split_head` the output
    layer is applied to the model's hidden states in chunks; models that do more to their logits than that layer (a
    scale, a soft cap) need `split_head=False`, which holds all logits of the micro-batch. Layers for which gradient
    checkpointing was enabled keep nothing but their input for the backward pass.
    """
    with _checkpointed_layers(model):
        return _forward(model, packed, temperature, split_head, chunk_logits)


def _forward(model: nn.Module, packed: Packed, temperature: float, split_head: bool, chunk_logits: int) -> Chosen:
    inputs: dict[str, Any] = {"input_ids": packed.input_ids_RT, "attention_mask": packed.mask_RT}
    if packed.groups is not None:
        inputs |= attention.inputs(packed.groups, packed.input_ids_RT)
    if takes_argument(model, "position_ids"):
        inputs["position_ids"] = packed.position_ids_RT
    if not split_head:
        logits_ND = model(**inputs, use_cache=False).logits[packed.row_N, packed.column_N]
        return _choose(logits_ND, packed.target_N, temperature)
    hidden_RTD = model.base_model(**inputs, use_cache=False).last_hidden_state  # type: ignore[operator]
    hidden_ND = hidden_RTD[packed.row_N, packed.column_N]
    head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
    return chunked(head, hidden_ND, packed.target_N, temperature, chunk_logits)


@contextmanager
def _checkpointed_layers(model: nn.Module) -> Iterator[None]:
    """Let the layers checkpoint, which transformers does in training mode only.

    Only the layers' own flag is set, for as long as a forward pass takes: what lies inside them keeps its dropout off,
    and sampling keeps its cache.
    """
    layers = [
        module
        for module in (model.modules() if torch.is_grad_enabled() else ())
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing
    ]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


def chunked(
    head: Callable[[Tensor], Tensor], hidden_ND: Tensor, target_N: Tensor, temperature: float, chunk_logits: int
) -> Chosen:
    """`head` over N hidden states, `chunk_logits` logits at a time; recomputed in backward when there are several."""
    vocabulary: int = head.weight.shape[0]  # type: ignore[attr-defined]
    size = max(1, chunk_logits // vocabulary)
    if hidden_ND.shape[0] <= size:
        return _choose(head(hidden_ND), target_N, temperature)

    def one(hidden_nD: Tensor, target_n: Tensor) -> Chosen:
        return _choose(head(hidden_nD), target_n, temperature)

    parts = [
        checkpoint(one, hidden_nD, target_n, use_reentrant=False, preserve_rng_state=False)  # nothing random inside
        for hidden_nD, target_n in zip(torch.split(hidden_ND, size), torch.split(target_N, size), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Log-probs over the last dimension at a temperature, in float32 or wider. Sampling and training share it."""
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return torch.log_softmax(logits / temperature if temperature != 1.0 else logits, dim=-1)


def takes_argument(model: nn.Module, name: str) -> bool:
    """Whether the forward pass of a model's class knows an argument."""
    return name in _arguments(type(model).forward)


@lru_cache(maxsize=64)  # asked at every forward pass; a process has one model class, tests a few
def _arguments(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _choose(logits_NV: Tensor, target_N: Tensor, temperature: float) -> Chosen:
    logprobs_NV = log_softmax(logits_NV, temperature)
    with torch.no_grad():
        # Impossible tokens (log-prob -inf) add nothing; without the clamp they would add 0 x inf.
        entropy_N = -(logprobs_NV.exp() * logprobs_NV.clamp(min=-1e4)).sum(-1)
    return logprobs_NV.gather(-1, target_N[:, None]).squeeze(-1), entropy_N
