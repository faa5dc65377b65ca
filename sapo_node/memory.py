"""What trainer and engine need, as arithmetic: nothing is looked at, nothing is loaded.

The parts follow the code: what the trainer holds (training/trainer.py), the peak of a micro-batch (training/packing.py,
training/logprobs.py), the key-value cache of sampling (inference/sampling.py), and vLLM beside it. Parts of different
phases of the trainer do not exist at the same time, so the largest phase counts. All sizes are upper bounds: every
prompt and completion as long as the settings allow.

Figures are measured on CPUs with float32 (each says how). What concerns GPUs has not been run on one yet: it is the
same arithmetic with assumed overheads, marked as such.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from sapo_node.config import NodeConfig
from sapo_node.model_shape import ModelShape

MIB: Final = 1 << 20
GIB: Final = 1 << 30

Place = Literal["memory", "gpu", "engine gpu"]
"""Main memory; the GPU of the trainer; a GPU that vLLM has for itself."""

Phase = Literal["always", "training", "prompts", "sampling", "saving"]

# The program itself, without a model. Proportional set size (Pss of /proc/PID/smaps_rollup), read while a node on the
# embedded model (0.5 M parameters) trained and sampled on x86-64, rounded up: node 48 MiB, p2pd 61 (idle; 100 to 150
# after much traffic), scorer 94, policy worker 333, vLLM's processes 464 + 457 + 6 + 854, of which 256 its cache. Pages
# of libraries, which the kernel can drop and several nodes share, are about 190 MiB more in a policy worker's resident
# set.
NODE_BYTES: Final = 50 * MIB
P2PD_BYTES: Final = 100 * MIB
SCORER_BYTES: Final = 100 * MIB
POLICY_BYTES: Final = 350 * MIB
VLLM_BYTES: Final = 1530 * MIB
VLLM_PART_BYTES: Final = 600 * MIB  # of that: the worker without its cache; each part of a split model has one
VLLM_WEIGHT_COPIES: Final = 3
"""On a CPU: the weights, their packed form for its kernels, and what loading takes at its peak. With 44 M parameters
its worker peaked at 402 MiB (2.4 x weights) above what it held then, and held 243 MiB beside its cache and program."""

# Assumed, until a GPU has run it: what CUDA's context, libraries and kernels' workspaces take.
CUDA_HOST_BYTES: Final = 2 * GIB  # in main memory, beyond the above, a process that uses a GPU
CUDA_CONTEXT_BYTES: Final = 768 * MIB  # on the GPU, a process
VLLM_GRAPH_BYTES: Final = GIB  # on the GPU: vLLM's captured graphs and workspaces
RESERVE: Final = 0.05  # of a GPU, left to the allocator's fragments
MOST_OF_A_GPU: Final = 0.9  # vLLM's own default, where it has a GPU for itself

# As in the code that is modelled here; tests compare them (importing that code would import torch).
CHUNK_LOGITS: Final = 1 << 24
VERSIONS_AT_ONCE: Final = 2
RESERVE_BYTES: Final = 16 << 20

# Numbers kept for the backward pass, a token and layer: inputs and outputs of both norms and what the residual stream
# holds (6 x hidden); queries as attention sees them, its output and that output reordered (3 x heads x head size), keys
# and values beside (see `repeats`); gate, its activation, the other branch and their product (4 x feed-forward width).
# An activation without a gate that is spelt out in steps (GPT-2's) keeps up to 8.
NORM_COPIES: Final = 6
ATTENTION_COPIES: Final = 3
GATED_COPIES: Final = 4
UNGATED_COPIES: Final = 8
LOGIT_COPIES: Final = 6  # of float32: logits, log-probs, their gradients, and the entropy's steps
DRAW_BYTES: Final = 28  # a logit while a token is drawn: two float32, two float64, and one scaled by the temperature


class Layout(NamedTuple):
    """Who computes where."""

    engine: Literal["vllm", "transformers"]
    trainer_on_gpu: bool = False
    engine_on_gpu: bool = False
    shared_gpu: bool = False
    """Whether vLLM has the trainer's GPU. Otherwise it has GPUs of its own."""

    shm_free: int = 0
    """Bytes free in /dev/shm, through which weights travel to vLLM where there is room."""


class Part(NamedTuple):
    """One part of the need: `size` bytes at `place`, during `phase`."""

    name: str
    how: str
    size: int
    place: Place = "memory"
    phase: Phase = "always"
    of_model: bool = True
    """Whether it grows with the model."""


@dataclass(frozen=True)
class Needs:
    """All parts."""

    parts: tuple[Part, ...]

    def places(self) -> list[Place]:
        """Where something is needed."""
        return list(dict.fromkeys(part.place for part in self.parts))

    def peak(self, place: Place) -> Phase:
        """The phase that needs most there; "always" where there are no phases."""
        phases: list[Phase] = [part.phase for part in self.parts if part.place == place and part.phase != "always"]
        return max(phases, key=lambda phase: self._size(place, phase), default="always")

    def at_peak(self, place: Place) -> list[Part]:
        """The parts that exist there together at the worst moment."""
        peak = self.peak(place)
        return [part for part in self.parts if part.place == place and part.phase in ("always", peak)]

    def total(self, place: Place) -> int:
        """Bytes needed there at the worst moment."""
        return sum(part.size for part in self.at_peak(place))

    def _size(self, place: Place, phase: Phase) -> int:
        return sum(part.size for part in self.parts if (part.place, part.phase) == (place, phase))


def needs(shape: ModelShape, config: NodeConfig, layout: Layout) -> Needs:
    """What a node with these settings needs for a model of this shape."""
    return Needs((*_program(config, layout), *_trainer(shape, config, layout), *_engine(shape, config, layout)))


# ---- parts -----------------------------------------------------------------------------------------------------------


def _program(config: NodeConfig, layout: Layout) -> Iterator[Part]:
    scorers = config.tasks.scorers
    ranks = config.training.devices
    size = NODE_BYTES + scorers * SCORER_BYTES + ranks * POLICY_BYTES + (P2PD_BYTES if config.swarm.enabled else 0)
    yield Part("the program", f"node, network, {scorers} scorer(s), policy worker; measured", size, of_model=False)
    if layout.engine == "vllm":
        size = VLLM_BYTES + (config.inference.tensor_parallel - 1) * VLLM_PART_BYTES
        yield Part("vLLM's processes", "measured", size, of_model=False)
    users = ranks * int(layout.trainer_on_gpu) + int(layout.engine_on_gpu)
    if users:
        yield Part("CUDA in main memory", "assumed", users * CUDA_HOST_BYTES, of_model=False)
    if layout.trainer_on_gpu:
        yield Part("CUDA", "context of the trainer; assumed", CUDA_CONTEXT_BYTES, "gpu", of_model=False)


def _trainer(shape: ModelShape, config: NodeConfig, layout: Layout) -> Iterator[Part]:
    place: Place = "gpu" if layout.trainer_on_gpu else "memory"
    width = _width(config)
    settings, weights = config.training, shape.params * width
    of = f"{_count(shape.params)} parameters x {width} bytes"
    over = settings.devices if layout.trainer_on_gpu else 1  # ranks on a CPU share its memory
    yield Part("weights", of + _split(over), weights // over, place)
    if settings.devices > 1:
        yield from _gathered(shape, config, layout, place)
    trained, learnt = shape.params, weights
    if settings.lora_rank:
        trained = adapter_numbers(shape, settings.lora_rank)
        learnt = 4 * trained  # adapters are float32 whatever the weights are
        of = f"{_count(trained)} numbers of adapters x 4 bytes (training.lora_rank)"
        yield Part("adapters", of, learnt, place)
        # A layer's own output stays until the adapter's is added to it. Half of the activations is what was measured.
        beside = training_tokens(config, shape) * activation_bytes(shape, width, repeats(config)) // 2
        yield Part("outputs of adapters", "beside those of their layers", beside, place, "training")
        yield Part("weights with adapters", "for a checkpoint or vLLM", weights, place, "saving")
    elif settings.kl_coef:
        yield Part("reference", "a second copy of the weights (training.kl_coef)", weights, place)
    moments = 2 * (trained if settings.optimizer == "adamw8bit" else learnt)
    yield Part("optimizer", "two moments a parameter" + _split(over), moments // over, place)
    copies = 3 if settings.producer_gradients else 1
    why = f" x {copies} (training.producer_gradients)" if copies > 1 else ""
    yield Part("gradients", of + why + _split(over), copies * learnt // over, place, "training")
    tokens = training_tokens(config, shape) * (settings.devices // over)
    kept = (checkpointed_bytes if settings.gradient_checkpointing else activation_bytes)(shape, width, repeats(config))
    yield Part(
        "activations",
        f"{tokens} tokens x {_count(kept)}B (training.micro_batch_tokens)",
        tokens * kept,
        place,
        "training",
    )
    logits = tokens * shape.vocabulary
    if not shape.changes_logits:
        logits = min(logits, max(CHUNK_LOGITS, shape.vocabulary))
    size = logits * 4 * LOGIT_COPIES + shape.vocabulary * shape.hidden * width
    yield Part("output layer", "logits of one chunk, its gradient", size, place, "training")
    if layout.engine == "transformers":
        yield from _sampling(shape, config, place)
    if layout.trainer_on_gpu:  # weights are loaded there first; checkpoints pass through
        how = "moments of a checkpoint" if over == 1 else "each rank loads all of them first"
        yield Part("weights on their way", how, max(over * weights, moments))
    if layout.trainer_on_gpu and layout.shared_gpu and config.inference.weight_transfer == "ipc":
        yield Part("weights for vLLM", "a copy on the GPU (ipc)", weights, "gpu")


def _gathered(shape: ModelShape, config: NodeConfig, layout: Layout, place: Place) -> Iterator[Part]:
    """What a device of several holds of the others' weights; on a CPU all ranks' copies are in one memory."""
    width, copies = _width(config), 1 if layout.trainer_on_gpu else config.training.devices
    weights = copies * shape.params * width
    phases: tuple[Phase, ...] = ("sampling", "prompts", "saving") if layout.engine == "transformers" else ("saving",)
    for phase in phases:
        yield Part("whole weights", "gathered for it (training.devices)", weights, place, phase)
    ends = shape.vocabulary * shape.hidden  # embeddings and output layer, if they are one; else both count as a block
    used = ends + 2 * (max(0, shape.params - ends) // shape.layers)
    yield Part("weights in use", "output layer and two blocks", copies * used * width, place, "training")


def _split(over: int) -> str:
    return f", split over {over}" if over > 1 else ""


def _sampling(shape: ModelShape, config: NodeConfig, place: Place) -> Iterator[Part]:
    """The transformers engine, beside the weights."""
    settings, width = config.inference, _width(config)
    rows = settings.batch_completions
    prompt, completion = (
        min(tokens, shape.positions - 1) for tokens in (settings.max_prompt_tokens, settings.max_completion_tokens)
    )
    length = prompt + completion  # also beyond the positions: short prompts are padded to the longest
    kv = shape.kv_numbers * width
    cache = rows * length * kv
    yield Part(
        "key-value cache",
        f"{rows} completions x {length} tokens x {_count(kv)}B (inference.batch_completions)",
        cache + cache // shape.layers,  # a layer's is copied while it grows
        place,
        "sampling",
    )
    drawing = f"{rows} x {shape.vocabulary} logits x {DRAW_BYTES} bytes"
    yield Part("drawing tokens", drawing, rows * shape.vocabulary * DRAW_BYTES, place, "sampling")
    prompts = prompt * rows  # one completion a question, as in an evaluation
    one = (3 * shape.inner + 3 * shape.hidden + shape.attention) * width + kv
    yield Part("reading prompts", f"{prompts} tokens x {_count(one)}B", prompts * one, place, "prompts")


def _engine(shape: ModelShape, config: NodeConfig, layout: Layout) -> Iterator[Part]:
    """VLLM, beside the trainer at all times."""
    if layout.engine != "vllm":
        return
    width = _width(config)
    weights = shape.params * width
    if config.inference.weights_dir is None and VERSIONS_AT_ONCE * weights + RESERVE_BYTES <= layout.shm_free:
        how = f"{VERSIONS_AT_ONCE} x weights in /dev/shm, on their way to vLLM"
        yield Part("weights in files", how, VERSIONS_AT_ONCE * weights)
    if not layout.engine_on_gpu:
        how = f"{VLLM_WEIGHT_COPIES} x weights: as loaded, as packed, while loading"
        yield Part("vLLM: weights", how, VLLM_WEIGHT_COPIES * weights)
        settings = config.inference
        parts = settings.tensor_parallel
        how = "inference.kv_cache_gib" + (f" x {parts} (inference.tensor_parallel)" if parts > 1 else "")
        yield Part("vLLM: key-value cache", how, int(parts * settings.kv_cache_gib * GIB), of_model=False)
        yield Part("vLLM: buffers", "logits of its rows", vllm_buffer_bytes(shape, config))
        return
    place: Place = "gpu" if layout.shared_gpu else "engine gpu"
    over = f", split over {config.inference.tensor_parallel}" if config.inference.tensor_parallel > 1 else ""
    parallel = config.inference.tensor_parallel
    yield Part("vLLM: weights", f"a second copy{over}", weights // parallel, place)
    rows = batch_rows(config)
    how = f"at least one batch: {rows} completions x {sequence_tokens(config, shape)} tokens"
    yield Part("vLLM: key-value cache", how, least_kv_bytes(shape, config) // parallel, place)
    size = CUDA_CONTEXT_BYTES + VLLM_GRAPH_BYTES + vllm_buffer_bytes(shape, config)
    yield Part("vLLM: buffers", "CUDA, graphs and logits; assumed", size, place)


# ---- sizes -----------------------------------------------------------------------------------------------------------


def repeats(config: NodeConfig) -> float:
    """Keys that attention sees for each key of a packed group: all completions have the prompt's before their own."""
    count, prompt = config.rollouts.completions_per_task, config.inference.max_prompt_tokens
    own = config.inference.max_completion_tokens
    return count * (prompt + own) / (prompt + count * own)


def activation_bytes(shape: ModelShape, width: int, repeats: float) -> int:
    """Bytes kept for the backward pass a token, with one layer's worth of gradients passing through."""
    return (shape.layers + 1) * _layer_bytes(shape, width, repeats)


def checkpointed_bytes(shape: ModelShape, width: int, repeats: float) -> int:
    """The same with `training.gradient_checkpointing`: inputs of all layers; one of them computed again, its gradients.

    What lies before and behind the layers (embeddings, the last norm, hidden states for the output layer) counts as
    another layer.
    """
    return shape.layers * shape.hidden * width + 3 * _layer_bytes(shape, width, repeats)


def _layer_bytes(shape: ModelShape, width: int, repeats: float) -> int:
    inner = (GATED_COPIES if shape.gated else UNGATED_COPIES) * shape.inner
    norms = NORM_COPIES * shape.hidden * 4  # norms compute in float32 whatever the weights are
    attention = (ATTENTION_COPIES + 2 * repeats) * shape.attention
    return norms + (math.ceil(attention) + inner) * width


def adapter_numbers(shape: ModelShape, rank: int) -> int:
    """Numbers in low-rank adapters of all linear layers but the output layer (training/adapters.py); at most."""
    keys = shape.kv_heads * shape.head_dim
    attention = 2 * (shape.hidden + shape.attention) + 2 * (shape.hidden + keys)
    forward = (3 if shape.gated else 2) * (shape.hidden + shape.inner)
    return rank * shape.layers * (attention + forward)


def training_tokens(config: NodeConfig, shape: ModelShape) -> int:
    """Tokens of the largest micro-batch: the setting, one whole completion, or all of a round where that is less."""
    settings = config.training
    most = max(settings.micro_batch_tokens, sequence_tokens(config, shape))
    if settings.external_groups and config.swarm.enabled:
        return most  # others' groups have as many completions as they like
    length = config.inference.max_completion_tokens * config.rollouts.completions_per_task
    return min(most, settings.local_groups * (config.inference.max_prompt_tokens + length))


def sequence_tokens(config: NodeConfig, shape: ModelShape) -> int:
    """Longest prompt with its completion."""
    return min(config.inference.max_prompt_tokens + config.inference.max_completion_tokens, shape.positions)


def batch_rows(config: NodeConfig) -> int:
    """Completions of one batch that run together."""
    return min(config.inference.batch_completions, config.tasks_per_round * config.rollouts.completions_per_task)


def least_kv_bytes(shape: ModelShape, config: NodeConfig) -> int:
    """Key-value cache of one batch."""
    return batch_rows(config) * sequence_tokens(config, shape) * shape.kv_numbers * _width(config)


def sequence_kv_bytes(shape: ModelShape, config: NodeConfig) -> int:
    """Key-value cache of one completion with its prompt, below which vLLM does not start."""
    return sequence_tokens(config, shape) * shape.kv_numbers * _width(config)


def vllm_buffer_bytes(shape: ModelShape, config: NodeConfig) -> int:
    """Logits of all rows, their log-probs and a copy of those."""
    return 3 * 4 * config.inference.batch_completions * shape.vocabulary


def gpu_share(shape: ModelShape, config: NodeConfig, layout: Layout, total: int, free: int) -> tuple[float, float]:
    """The share of a GPU that vLLM may take, and the least it needs, for `gpu_memory_utilization`.

    `total` bytes, of which `free` are free before trainer and engine start. On a shared GPU the trainer's peak and a
    reserve are left out. The first is below the second where it cannot work. Not run on a GPU yet.
    """
    all_needs = needs(shape, config, layout)
    place: Place = "gpu" if layout.shared_gpu else "engine gpu"
    engine = sum(part.size for part in all_needs.at_peak(place) if part.name.startswith("vLLM"))
    trainer = all_needs.total(place) - engine
    share = (free - trainer - RESERVE * total) / total
    return min(MOST_OF_A_GPU, int(share * 1000) / 1000), engine / total


def _width(config: NodeConfig) -> int:
    return 2 if config.training.dtype == "bfloat16" else 4


def _count(number: float) -> str:
    """As in 494 M, 12 k."""
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor:
            digits = 1 if number < 10 * factor else 0
            return f"{number / factor:.{digits}f} {unit}"
    return f"{number:.0f} "
