"""The sizes of a model, read from its folder without loading it.

`config.json` gives the dimensions, the headers of its safetensors files the number of parameters. Where there are no
weights yet, the dimensions alone tell the number for the usual architectures. Neither torch nor transformers is
imported. A folder may come from a stranger: every number is bounded, and only regular files in it are opened.
"""

import json
import math
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import sapo_node

EMBEDDED: Final = ("demo", "benchmark")
MAX_JSON_BYTES: Final = 64 << 20  # an index of a very large model has a few MB
MAX_SIZE: Final = 1 << 32  # of one dimension; the largest are vocabularies and positions of a few million
MAX_NUMBERS: Final = 1 << 48  # in one tensor: 1 PB
MAX_DIMENSIONS: Final = 16  # of a tensor; models have up to 5
WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
HEADS: Final = ("lm_head.weight", "embed_out.weight")  # output layers as architectures call them
ADAPTER: Final = "adapter_config.json"
TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")

NAMES: Final = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "inner": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocabulary": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions"),
}
"""What families of models call the same dimension in config.json."""

EXPERTS: Final = ("num_local_experts", "num_experts")

GATED: Final = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text"),
    *("phi3", "olmo", "olmo2", "olmo3", "olmoe", "smollm3", "granite", "cohere", "cohere2", "seed_oss"),
)
UNGATED: Final = ("gpt2", "gpt_neox", "gptj", "opt", "phi", "starcoder2", "codegen")
"""`model_type` of the architectures whose parameters follow from their dimensions, by their feed-forward layer."""

TIED: Final = ("gemma", "gemma2", "gemma3_text", "gpt2", "opt", "cohere", "cohere2", "smollm3", "starcoder2")
"""Those of them that tie embeddings and output layer unless config.json says otherwise."""


class UnknownShape(Exception):
    """A model folder whose sizes cannot be read; the text says why."""


class DamagedModel(UnknownShape):
    """A folder that no program could load a model from; the text says what is wrong with which file."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal language model."""

    params: int
    """Tied weights once."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    """Width of the feed-forward layer, of all the experts that one token passes."""

    vocabulary: int
    positions: int
    """Longest sequence; a large number where the model does not say."""

    gated: bool = True
    """Whether the feed-forward layer has a gate, as Llama's has."""

    changes_logits: bool = False
    """Whether something follows the output layer (a scale, a soft cap), so that logits cannot be made in chunks."""

    @property
    def attention(self) -> int:
        """Width of queries, and of keys and values once they are repeated for each head."""
        return self.heads * self.head_dim

    @property
    def kv_numbers(self) -> int:
        """Numbers that one token adds to a key-value cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def scaled(self, factor: float) -> "ModelShape":
        """A model of about `factor` times the parameters, of the same build."""
        side = math.sqrt(factor)
        return replace(self, params=int(self.params * factor), hidden=int(self.hidden * side))


def folder_here(model: str) -> Path | None:
    """The folder of an embedded model, of a path, or of a Hugging Face name in the cache; None: not here yet."""
    if model in EMBEDDED:
        return Path(sapo_node.__file__).parent / "assets" / model
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return None
    if not isinstance(found, str):
        return None
    folder = Path(found).parent
    return folder if _has_weights(folder) else None


def missing(model: str) -> str | None:
    """Why the model called so cannot be loaded, as far as its name and its folder tell; None where nothing is wrong.

    A Hugging Face name is taken to exist.
    """
    path = Path(model).expanduser()
    if model in EMBEDDED:
        return None
    if not path.is_dir():
        if path.is_absolute() or model.startswith((".", "~")):
            return f"there is no folder {path}"
        if re.fullmatch(r"[\w.-]+/[\w.-]+", model):
            return None
        return (
            f"{model!r} is no embedded model ({', '.join(EMBEDDED)}), no folder here, and no Hugging Face name "
            "(owner/model)"
        )
    if not (path / "config.json").is_file():
        return f"{path} is no model folder: it has no config.json"
    if adapter := adapter_beside(path):
        return adapter
    try:
        read_shape(path)
    except DamagedModel as error:
        return str(error)
    except UnknownShape:
        pass  # an architecture of its own
    if not _files(path):
        return f"{path} has no complete {WEIGHTS}; only safetensors are opened, since pickled weights can run code"
    if not any((path / name).is_file() for name in TOKENIZERS):
        return f"{path} has no tokenizer ({TOKENIZERS[0]}); copy it from the model's source"
    return None


def adapter_beside(folder: Path) -> str | None:
    """Why a model folder with an adapter's settings is refused, None where there are none."""
    if not os.path.lexists(folder / ADAPTER):
        return None
    return (
        f"{folder} holds {ADAPTER}: loading it would fetch whatever model that names, and put adapters into it. Merge "
        "the adapter into its model where you trust both, or remove the file if this folder is the whole model"
    )


def read_shape(folder: Path) -> ModelShape:
    """The sizes of the model in `folder`. Raises UnknownShape; where files are broken, DamagedModel."""
    config = read_json(folder / "config.json")
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, dict) else config
    sizes = {key: _size(config, names) for key, names in NAMES.items()}
    hidden, layers, heads, vocabulary = (sizes[key] for key in ("hidden", "layers", "heads", "vocabulary"))
    head_dim = sizes["head_dim"] or hidden // max(1, heads)
    if not (hidden and layers and heads and vocabulary and head_dim):
        raise UnknownShape(f"{folder / 'config.json'} does not tell the usual dimensions")
    kind = str(config.get("model_type"))
    tied = bool(config.get("tie_word_embeddings", kind in TIED))
    shape = ModelShape(
        params=0,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=sizes["kv_heads"] or heads,
        head_dim=head_dim,
        inner=_inner(config, sizes["inner"] or 4 * hidden),
        vocabulary=vocabulary,
        positions=sizes["positions"] or 1 << 30,
        gated=kind in GATED,
        changes_logits=any(
            config.get(key) not in (None, 0, 1) for key in ("final_logit_softcapping", "logit_scale", "logits_scaling")
        ),
    )
    counts = _parameters(folder)
    if not counts and kind not in (*GATED, *UNGATED):
        raise UnknownShape(
            f"{folder} has no complete {WEIGHTS}, and of {kind!r} config.json alone does not tell enough"
        )
    if not counts:
        return replace(shape, params=_computed(shape, config, tied))
    params = sum(counts.values())
    if tied:
        params -= sum(counts.get(name, 0) for name in HEADS)  # stored twice, held once
    if params <= 0:
        raise DamagedModel(f"the weights in {folder} hold no numbers")
    return replace(shape, params=params, gated=any("gate" in name for name in counts))


def _computed(shape: ModelShape, config: Mapping[str, Any], tied: bool) -> int:
    """Parameters that follow from the dimensions: all matrices. Norms and biases are less than a hundredth."""
    experts = _size(config, EXPERTS)
    width = (_size(config, ("moe_intermediate_size",)) if experts else 0) or _size(config, NAMES["inner"])
    forward = (3 if shape.gated else 2) * shape.hidden * (width or 4 * shape.hidden) * max(1, experts)
    attention = 2 * shape.hidden * (shape.attention + shape.kv_heads * shape.head_dim)
    rows = shape.vocabulary * (1 if tied else 2)
    if config.get("model_type") in ("gpt2", "opt"):  # positions are learned
        rows += shape.positions
    return shape.layers * (forward + attention + experts * shape.hidden) + rows * shape.hidden


def _inner(config: Mapping[str, Any], width: int) -> int:
    """Feed-forward width that one token passes: of a mixture of experts, those that are chosen for it."""
    experts, each = _size(config, ("num_experts_per_tok",)), _size(config, ("moe_intermediate_size",))
    return max(width, each * experts) if experts and each else width * max(1, experts)


def _size(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """The first of these that is a positive number; 0 where none is. Raises DamagedModel for one beyond any model."""
    for name in names:
        value = config.get(name)
        if type(value) is int and value > 0:
            if value > MAX_SIZE:
                raise DamagedModel(f"the {name} in config.json is beyond that of any model (2^32)")
            return value
    return 0


def _parameters(folder: Path) -> dict[str, int]:
    """Numbers in each tensor, by its name, from the headers alone; empty without complete weights."""
    counts: dict[str, int] = {}
    for file in _files(folder):
        try:
            counts |= {
                name: _numbers(entry["shape"]) for name, entry in _header(file).items() if name != "__metadata__"
            }
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error) as error:
            raise DamagedModel(f"{file} is no safetensors file: {error or type(error).__name__}") from error
    return counts


def _numbers(shape: Any) -> int:
    """How many numbers a tensor of this shape has. Raises ValueError for what is no shape."""
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:  # their product would take longer than its square
        raise ValueError("a tensor's shape is not made of sizes, or of too many")
    if any(type(size) is not int or not 0 <= size <= MAX_NUMBERS for size in shape):
        raise ValueError("a tensor's shape is not made of sizes")
    count = math.prod(shape)
    if count > MAX_NUMBERS:
        raise ValueError("a tensor is larger than any computer's memory")
    return count


def _header(file: Path) -> dict[str, Any]:
    """The header of a safetensors file: its length in 8 bytes, then JSON.

    The library would give the same, but imports numpy, whose threads and 11 MB the node can do without.
    """
    if not file.is_file():  # to open a pipe would wait for ever
        raise ValueError("it is no regular file")
    with open(file, "rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > MAX_JSON_BYTES:
            raise ValueError(f"its header claims {length} bytes")
        header: dict[str, Any] = json.loads(stream.read(length))
    return header


def _has_weights(folder: Path) -> bool:
    try:
        return bool(_files(folder))
    except DamagedModel:
        return True  # they are there; reading them says what is wrong


def _files(folder: Path) -> list[Path]:
    """The weight files; none where one of them is missing. Raises DamagedModel for an index of something else."""
    files = [folder / WEIGHTS]
    if not os.path.lexists(files[0]):
        file = folder / INDEX
        if not os.path.lexists(file):
            return []
        index = read_json(file).get("weight_map")
        names = list(index.values()) if isinstance(index, dict) else []
        if not names or any(not isinstance(name, str) or name != Path(name).name for name in names):
            raise DamagedModel(f"{file} does not name the weight files beside it")
        files = [folder / name for name in sorted(set(names))]
    return files if all(map(os.path.exists, files)) else []


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file, of which MAX_JSON_BYTES are read. Raises DamagedModel."""
    try:
        if not file.is_file():
            raise DamagedModel(f"{file} is missing, or no regular file")
        with open(file, "rb") as stream:
            value = json.loads(stream.read(MAX_JSON_BYTES))
    except RecursionError as error:
        raise DamagedModel(f"{file} cannot be read: it is nested too deeply") from error
    except (OSError, ValueError) as error:
        raise DamagedModel(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise DamagedModel(f"{file} holds no settings")
    return value
