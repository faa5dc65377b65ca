"""Tiny random models and tokenizers for tests, made in memory or as a folder; nothing is downloaded."""

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

Family = Literal["llama", "gpt2", "gpt_neox"]
FAMILIES: tuple[Family, ...] = ("llama", "gpt2", "gpt_neox")

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ message.content }}\n{% else %}"
    "<|user|>{{ message.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(template: str | None = TEMPLATE) -> Any:
    """A byte-level BPE tokenizer with a few merges, four control tokens and, unless None, a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>", "<|user|>", "<|assistant|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["what is 12 + 34? the answer is 46", "how many letters are in this word"], trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        extra_special_tokens=["<|user|>", "<|assistant|>"],
    )
    wrapped.chat_template = template
    return wrapped


def make_model(family: Family = "llama", *, vocabulary: int = 300, seed: int = 0, scale: float = 0.3) -> Any:
    """A random model in eval mode. `scale` is large enough that a wrong mask or position shows in the log-probs."""
    torch.manual_seed(seed)
    common = {"vocab_size": vocabulary, "initializer_range": scale, "bos_token_id": None, "eos_token_id": 0}
    if family == "llama":
        config = LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            **common,
        )
        return LlamaForCausalLM(config).eval()
    if family == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=256, **common)).eval()
    config = GPTNeoXConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        **common,
    )
    return GPTNeoXForCausalLM(config).eval()


def write_model(folder: Path, family: Family = "llama", *, template: str | None = TEMPLATE, scale: float = 0.3) -> Path:
    """A model folder as one would download it; returns `folder`."""
    tokenizer = make_tokenizer(template)
    make_model(family, vocabulary=len(tokenizer), scale=scale).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
