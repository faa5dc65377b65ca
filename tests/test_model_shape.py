"""Sizes of models, from their folders alone."""

import json
from pathlib import Path

import pytest
import torch

from sapo_node.model_shape import UnknownShape, folder_here, read_shape
from sapo_node.training.policy import load_policy
from tests.tiny import FAMILIES, Family, make_model, write_model


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
