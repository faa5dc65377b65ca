"""Settings that cannot work on this machine or with this model, however much memory there is.

Each would otherwise end the node half a minute after its start, in the words of a library. What `config.json` and the
machine tell is enough to know before anything is loaded; whether all of it fits into memory is `fit.py`.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sapo_node.config import NodeConfig
from sapo_node.machine import Machine
from sapo_node.memory import Layout
from sapo_node.model_shape import ModelShape


def machine_problems(config: NodeConfig, layout: Layout, machine: Machine) -> Iterator[str]:
    """What this machine cannot do, a sentence for each setting."""
    training, inference = config.training, config.inference
    if training.device == "cuda" and not machine.trains_on_gpu and not machine.notes:  # else torch is to decide
        why = "there is no GPU here" if not machine.gpus else "torch is a build without CUDA here"
        yield f"training.device is cuda, but {why}; set it to cpu or auto"
    if layout.trainer_on_gpu and training.devices > len(machine.gpus):
        yield f"training.devices is {training.devices}, but there are {len(machine.gpus)} GPU(s) here; set it lower"
    if training.optimizer == "adamw8bit" and not layout.trainer_on_gpu and not machine.notes:
        yield "training.optimizer is adamw8bit, which is for GPUs, and this node trains on a CPU; set it to adamw"
    if layout.engine != "vllm":
        return
    if not layout.engine_on_gpu:
        if inference.weight_transfer != "files":
            yield (
                f"inference.weight_transfer is {inference.weight_transfer}, which is for GPUs, and vLLM runs on a CPU "
                "here; set it to files"
            )
        if inference.gpu_memory_share is not None:
            yield (
                "inference.gpu_memory_share is set, but vLLM runs on a CPU here; leave it out: inference.kv_cache_gib "
                "is what its cache takes"
            )
    if inference.weights_dir is not None and (fault := _unusable(inference.weights_dir)):
        yield f"inference.weights_dir: {inference.weights_dir} cannot be used: {fault}; choose another folder"


def model_problems(shape: ModelShape, config: NodeConfig, layout: Layout) -> Iterator[str]:
    """What this model cannot do, a sentence for each setting."""
    inference = config.inference
    if inference.max_completion_tokens > shape.positions:
        yield (
            f"inference.max_completion_tokens is {inference.max_completion_tokens}, but {config.training.model} has "
            f"positions for {shape.positions} tokens, prompt and completion together; set it lower"
        )
    parts = inference.tensor_parallel
    if layout.engine == "vllm" and not _divides(parts, shape):
        fitting = [str(count) for count in range(1, min(shape.heads, 64) + 1) if _divides(count, shape)]
        yield (
            f"inference.tensor_parallel is {parts}, but {config.training.model} (attention heads: {shape.heads}, "
            f"of keys and values: {shape.kv_heads}, feed-forward width: {shape.inner}) cannot be split so; possible: "
            f"{', '.join(fitting)}"
        )


def remarks(shape: ModelShape, config: NodeConfig, layout: Layout) -> Iterator[str]:
    """What works otherwise than the settings read."""
    inference = config.inference
    if inference.max_prompt_tokens + inference.max_completion_tokens > shape.positions:
        room = shape.positions - inference.max_completion_tokens
        yield (
            f"the model has {shape.positions} positions: behind prompts of more than {room} tokens completions end "
            f"before inference.max_completion_tokens ({inference.max_completion_tokens})"
        )
    if layout.engine != "vllm":
        names = ("weight_transfer", "gpu_memory_share", "weights_dir", "tensor_parallel")
        unused = [name for name in names if getattr(inference, name) != type(inference).model_fields[name].default]
        if unused:
            yield f"without vLLM these have no effect: {', '.join(f'inference.{name}' for name in unused)}"


def _divides(parts: int, shape: ModelShape) -> bool:
    """Whether vLLM can split every layer: heads evenly; heads of keys and values evenly, or each in several copies."""
    heads, kv_heads = shape.heads, shape.kv_heads
    return heads % parts == 0 and (kv_heads % parts == 0 or parts % kv_heads == 0) and shape.inner % parts == 0


def _unusable(folder: Path) -> str | None:
    """Why a folder cannot be made or written. Tried beside it, not looked up: permissions alone do not tell."""
    there = next(part for part in (folder, *folder.absolute().parents) if os.path.lexists(part))
    try:
        os.rmdir(tempfile.mkdtemp(dir=there))
    except OSError as error:
        return f"{there}: {error.strerror}"
    return None
