"""Environments of the other trainers, and model folders, made once in a cache folder.

Each environment is a virtual environment of this Python with pinned packages; the project's own is never touched. A
folder is complete when its stamp says what went into it.
"""

import json
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

import click
import smollm2

import sapo_node

COMMON = ("torch==2.13.0", "transformers==5.19.0", "accelerate==1.15.0")
PACKAGES = {
    "trl": ("trl==1.16.0", *COMMON),
    "genrl": ("gensyn-genrl==0.3.0", *COMMON),
}
INSTALL_SECONDS = 1800.0  # torch alone is hundreds of megabytes

# Random weights in the shape of Qwen2, with a vocabulary of its size: where chunked logits count.
MAKE_RANDOM = """
import sys, torch
from transformers import Qwen2Config, Qwen2ForCausalLM
torch.manual_seed(0)
hidden, layers, heads, inner = map(int, sys.argv[2:])
Qwen2ForCausalLM(Qwen2Config(vocab_size=151936, hidden_size=hidden, num_hidden_layers=layers, intermediate_size=inner,
    num_attention_heads=heads, num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
    eos_token_id=1, pad_token_id=0, bos_token_id=None)).save_pretrained(sys.argv[1])
"""
RANDOM_SHAPES = {"random-0.1b": (448, 12, 14, 2432), "random-0.5b": (896, 24, 14, 4864)}
MODELS = ("benchmark", "smollm2", *RANDOM_SHAPES)


def default_cache() -> Path:
    """Where environments and models are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sapo-node-bench"


def python_of(cache: Path, name: str) -> Path:
    """The Python of an environment, made now if it is not there or holds other versions."""
    folder, packages = cache / name, PACKAGES[name]
    stamp = folder / "packages.json"
    python = folder / "bin" / "python"
    if stamp.exists() and json.loads(stamp.read_text()) == list(packages):
        return python
    click.echo(f"installing {', '.join(packages)} into {folder}", err=True)
    venv.create(folder, clear=True, with_pip=True)
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    subprocess.run(command, check=True, timeout=INSTALL_SECONDS)
    stamp.write_text(json.dumps(packages))
    return python


def model_folder(cache: Path, name: str) -> Path:
    """A model's folder in safetensors with a tokenizer, made now if it is not there."""
    embedded = Path(sapo_node.__file__).parent / "assets" / "benchmark"
    if name == "benchmark":
        return embedded
    if name == "smollm2":
        return smollm2.model_folder(cache)
    folder = cache / "models" / name
    if (folder / "complete").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    click.echo(f"making {folder}", err=True)
    _run([sys.executable, "-c", MAKE_RANDOM, folder, *map(str, RANDOM_SHAPES[name])])
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / file).write_bytes((embedded / file).read_bytes())  # any smaller vocabulary will do
    (folder / "complete").touch()
    return folder


def _run(command: Sequence[str | Path]) -> None:
    subprocess.run(command, check=True, timeout=INSTALL_SECONDS)
