"""Sizes of models, from their folders alone."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sapo_node.model_shape import (
    GATED,
    TIED,
    UNGATED,
    DamagedModel,
    UnknownShape,
    folder_here,
    missing,
    read_shape,
)
from sapo_node.training.policy import load_policy
from tests.tiny import FAMILIES, Family, make_model, write_model


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def write_header(folder: Path, header: bytes) -> None:
    """Weights that are a header alone."""
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_are_those_of_the_loaded_model(tmp_path: Path, family: Family) -> None:
    shape = read_shape(write_model(tmp_path, family))
    policy = load_policy(str(tmp_path))
    assert shape.params == policy.params
    assert (shape.hidden, shape.layers, shape.heads) == (32, 2, 4)
    assert shape.vocabulary == policy.model.get_input_embeddings().weight.shape[0]
    assert shape.positions == policy.max_length
    assert shape.gated == (family == "llama")
    cache = policy.model(torch.tensor([[1, 2, 3]]), use_cache=True).past_key_values
    numbers = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert shape.kv_numbers == numbers // 3


def test_the_embedded_models() -> None:
    for name in ("demo", "benchmark"):
        folder = folder_here(name)
        assert folder is not None
        assert 100_000 < read_shape(folder).params < 5_000_000


def test_shards_are_added_up(tmp_path: Path) -> None:
    model = make_model()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert read_shape(tmp_path).params == sum(p.numel() for p in model.parameters())
    next(tmp_path.glob("model-00001-*")).unlink()
    change_config(tmp_path, model_type="odd")
    with pytest.raises(UnknownShape, match="no complete"):
        read_shape(tmp_path)


def test_a_head_that_is_stored_although_tied_counts_once(tmp_path: Path) -> None:
    write_model(tmp_path)
    params = read_shape(tmp_path).params
    from safetensors.torch import load_file, save_file

    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert read_shape(tmp_path).params == params


@pytest.mark.parametrize("kind", [*GATED, *UNGATED])
def test_without_weights_the_dimensions_tell_the_parameters(tmp_path: Path, kind: str) -> None:
    sizes = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8, "vocab_size": 2000}
    config = AutoConfig.for_model(kind, **sizes, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert read_shape(tmp_path).params == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.01)
    assert config.tie_word_embeddings == (kind in TIED), "what a config.json that does not say so means"


HOSTILE_HEADERS = {
    "a text": b'{"w": {"shape": ["a"]}}',
    "infinity": b'{"w": {"shape": [1e400]}}',
    "negative": b'{"w": {"shape": [-1000000000, 10]}}',
    "true": b'{"w": {"shape": [true]}}',
    "huge": b'{"w": {"shape": [281474976710657]}}',
    "huge together": b'{"w": {"shape": [281474976710656, 281474976710656]}}',
    "deep": b'{"w":' + b"[" * 200_000,
    "many dimensions": b'{"w": {"shape": [' + b"281474976710656," * 300_000 + b"1]}}",  # their product takes minutes
}


@pytest.mark.parametrize("header", HOSTILE_HEADERS.values(), ids=HOSTILE_HEADERS)
def test_a_header_that_no_tensors_have_is_damage(tmp_path: Path, header: bytes) -> None:
    write_model(tmp_path)
    write_header(tmp_path, header)
    with pytest.raises(DamagedModel, match=r"model\.safetensors is no safetensors file"):
        read_shape(tmp_path)


@pytest.mark.parametrize("name", ["vocab_size", "num_hidden_layers", "max_position_embeddings"])
def test_a_dimension_beyond_any_model_is_damage(tmp_path: Path, name: str) -> None:
    write_model(tmp_path)
    change_config(tmp_path, **{name: 10**400})
    with pytest.raises(DamagedModel, match=name):
        read_shape(tmp_path)


def test_an_adapter_beside_a_model_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    write_model(tmp_path)
    assert missing(str(tmp_path)) is None
    (tmp_path / "adapter_config.json").symlink_to("nowhere")
    assert "adapter_config.json" in (missing(str(tmp_path)) or "")


def test_settings_nested_too_deeply_are_damage(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(DamagedModel, match="nested too deeply"):
        read_shape(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    write_model(tmp_path)
    if "index" in name:
        (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(DamagedModel, match="no regular file"):
        read_shape(tmp_path)


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/dev/zero", None, ["a"]])
def test_an_index_names_files_beside_it_only(tmp_path: Path, name: Any) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(DamagedModel, match="does not name the weight files beside it"):
        read_shape(folder)


def test_weights_without_numbers_are_damage(tmp_path: Path) -> None:
    write_model(tmp_path)
    write_header(tmp_path, b'{"lm_head.weight": {"shape": [0, 10]}}')
    with pytest.raises(DamagedModel, match="hold no numbers"):
        read_shape(tmp_path)


def test_what_is_missing_is_told_from_the_folder_alone(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    assert missing(str(folder)) is None
    (folder / "tokenizer.json").rename(tmp_path / "away")
    assert "has no tokenizer" in str(missing(str(folder)))
    (folder / "model.safetensors").unlink()
    assert "has no complete model.safetensors" in str(missing(str(folder)))
    (folder / "config.json").write_text("[1]")
    assert "holds no settings" in str(missing(str(folder)))
    (folder / "config.json").unlink()
    assert "no config.json" in str(missing(str(folder)))


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("demo", None),
        ("someone/never-downloaded", None),
        ("./nosuch", "there is no folder nosuch"),
        ("/nosuch", "there is no folder /nosuch"),
        ("nosuch", "'nosuch' is no embedded model"),
        ("a/b/c", "'a/b/c' is no embedded model"),
    ],
)
def test_names_that_stand_for_no_model(name: str, fault: str | None) -> None:
    assert missing(name) is None if fault is None else fault in str(missing(name))


@pytest.mark.parametrize("damage", [b"", b"\xff" * 100, b"\x02\x00\x00\x00\x00\x00\x00\x00[]"])
def test_damaged_files_are_named(tmp_path: Path, damage: bytes) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(damage)
    with pytest.raises(UnknownShape, match=r"model\.safetensors"):
        read_shape(tmp_path)


def test_a_config_without_dimensions(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "odd"}))
    with pytest.raises(UnknownShape, match="usual dimensions"):
        read_shape(tmp_path)


def test_what_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert folder_here("someone/never-downloaded") is None
    assert folder_here("./no-such-folder") is None
    assert folder_here("a/b/c") is None
