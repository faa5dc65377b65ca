"""The sizes of a model, read from its folder without loading it.

`config.json` gives the dimensions, the headers of its safetensors files the number of parameters. Neither torch nor
transformers is imported.
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import sapo_node

EMBEDDED: Final = ("demo", "benchmark")
MAX_JSON_BYTES: Final = 64 << 20  # an index of a very large model has a few MB
WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
HEADS: Final = ("lm_head.weight", "embed_out.weight")  # output layers as architectures call them

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


class UnknownShape(Exception):
    """A model folder whose sizes cannot be read; the text says why."""


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
    if not isinstance(found, str) or not _files(Path(found).parent):
        return None
    return Path(found).parent


def read_shape(folder: Path) -> ModelShape:
    """The sizes of the model in `folder`. Raises UnknownShape."""
    config = _json(folder / "config.json")
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, dict) else config
    counts = _parameters(folder)
    sizes = {key: _size(config, names) for key, names in NAMES.items()}
    hidden, layers, heads, vocabulary = (sizes[key] for key in ("hidden", "layers", "heads", "vocabulary"))
    if not (hidden and layers and heads and vocabulary):
        raise UnknownShape(f"{folder / 'config.json'} does not tell the usual dimensions")
    params = sum(counts.values())
    if config.get("tie_word_embeddings") and any(name in counts for name in HEADS):
        params -= vocabulary * hidden  # stored twice, held once
    return ModelShape(
        params=params,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=sizes["kv_heads"] or heads,
        head_dim=sizes["head_dim"] or hidden // heads,
        inner=_inner(config, sizes["inner"] or 4 * hidden),
        vocabulary=vocabulary,
        positions=sizes["positions"] or 1 << 30,
        gated=any("gate" in name for name in counts),
        changes_logits=any(
            config.get(key) not in (None, 0, 1) for key in ("final_logit_softcapping", "logit_scale", "logits_scaling")
        ),
    )


def _inner(config: Mapping[str, Any], width: int) -> int:
    """Feed-forward width that one token passes: of a mixture of experts, those that are chosen for it."""
    experts, each = _size(config, ("num_experts_per_tok",)), _size(config, ("moe_intermediate_size",))
    return max(width, each * experts) if experts and each else width * max(1, experts)


def _size(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """The first of these that is a positive number; 0 where none is."""
    values = (config.get(name) for name in names)
    return next((value for value in values if type(value) is int and value > 0), 0)


def _parameters(folder: Path) -> dict[str, int]:
    """Numbers in each tensor, by its name, from the headers alone."""
    files = _files(folder)
    if not files:
        raise UnknownShape(f"{folder} has no complete {WEIGHTS}")
    counts: dict[str, int] = {}
    for file in files:
        try:
            counts |= {
                name: math.prod(entry["shape"]) for name, entry in _header(file).items() if name != "__metadata__"
            }
        except (OSError, ValueError, TypeError, KeyError, AttributeError, struct.error) as error:
            raise UnknownShape(f"{file} is no safetensors file: {error}") from error
    return counts


def _header(file: Path) -> dict[str, Any]:
    """The header of a safetensors file: its length in 8 bytes, then JSON.

    The library would give the same, but imports numpy, whose threads and 11 MB the node can do without.
    """
    with open(file, "rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > MAX_JSON_BYTES:
            raise ValueError(f"its header claims {length} bytes")
        header: dict[str, Any] = json.loads(stream.read(length))
    return header


def _files(folder: Path) -> list[Path]:
    """The weight files; none where one of them is missing."""
    files = [folder / WEIGHTS]
    if not files[0].exists():
        try:
            index = _json(folder / INDEX).get("weight_map")
        except UnknownShape:
            return []
        names = {name for name in index.values() if isinstance(name, str)} if isinstance(index, dict) else set()
        files = [folder / name for name in sorted(names)]
    return files if all(file.exists() for file in files) else []


def _json(file: Path) -> dict[str, Any]:
    try:
        with open(file, "rb") as stream:
            value = json.loads(stream.read(MAX_JSON_BYTES))
    except (OSError, ValueError) as error:
        raise UnknownShape(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise UnknownShape(f"{file} holds no settings")
    return value
