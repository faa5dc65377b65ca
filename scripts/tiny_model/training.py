"""Supervised training of the tiny model on (question, answer) pairs, and sampling to see what it then earns."""

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from .problems import Problem, is_right

BATCH = 96
BUCKET = 16  # batches of a stretch that is sorted by length
QUARTERS = 4
IGNORED = -100  # label of positions without loss: prompts and padding


@dataclass(frozen=True)
class Example:
    """Token ids of one prompt and the answer to be learnt, its end-of-sequence token included."""

    prompt: list[int]
    answer: list[int]


def encode_prompt(tokenizer: PreTrainedTokenizerFast, question: str) -> list[int]:
    """Token ids of a question in the chat template, ready to be answered."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer.encode(text, add_special_tokens=False))


def encode_example(tokenizer: PreTrainedTokenizerFast, question: str, answer: str) -> Example:
    """Prompt and answer as they are trained on."""
    ids = tokenizer.encode(answer, add_special_tokens=False)
    return Example(encode_prompt(tokenizer, question), [*ids, tokenizer.eos_token_id])


def _batches(examples: list[Example], rng: random.Random) -> list[list[list[Example]]]:
    """One epoch of batches, each in QUARTERS parts: one from each quarter of the lengths.

    Parts hold examples of similar length, so little is padded; a batch holds all lengths, and with them all tasks.
    """
    order = rng.sample(examples, len(examples))
    batches = []
    for start in range(0, len(order), BATCH * BUCKET):
        bucket = sorted(order[start : start + BATCH * BUCKET], key=lambda e: len(e.prompt) + len(e.answer))
        size = -(-len(bucket) // QUARTERS)
        quarters = [rng.sample(part, len(part)) for i in range(QUARTERS) if (part := bucket[i * size : (i + 1) * size])]
        part = BATCH // QUARTERS
        batches += [[quarter[i : i + part] for quarter in quarters if quarter[i:]] for i in range(0, size, part)]
    return batches


def _tensors(batch: list[Example], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded inputs and labels, both (batch, length). Causal attention never looks at padding on the right."""
    length = max(len(e.prompt) + len(e.answer) for e in batch)
    inputs_BT = torch.full((len(batch), length), pad)
    labels_BT = torch.full((len(batch), length), IGNORED)
    for row, example in enumerate(batch):
        end = len(example.prompt) + len(example.answer)
        inputs_BT[row, :end] = torch.tensor(example.prompt + example.answer)
        labels_BT[row, len(example.prompt) : end] = torch.tensor(example.answer)
    return inputs_BT, labels_BT


def train(
    model: PreTrainedModel, examples: list[Example], *, steps: int, lr: float, pad: int, seed: int, stage: str
) -> None:
    """`steps` AdamW steps on the answers' tokens, the rate rising over 5 % of them and falling to a tenth."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    warmup = max(1, steps // 20)
    schedule: Callable[[int], float] = lambda step: min((step + 1) / warmup, 1 - 0.9 * step / max(1, steps))  # noqa: E731
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    model.train()
    queue: list[list[list[Example]]] = []
    started = time.monotonic()
    for step in range(1, steps + 1):
        if not queue:
            queue = _batches(examples, rng)
        parts = queue.pop()
        tokens = sum(len(example.answer) for part in parts for example in part)
        optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        for part in parts:
            inputs_BT, labels_BT = _tensors(part, pad)
            logits_BTV = model(input_ids=inputs_BT[:, :-1], use_cache=False).logits
            total = F.cross_entropy(
                logits_BTV.flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
            )
            (total / tokens).backward()
            loss += total.item() / tokens
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
        if step % 25 == 0 or step == steps:
            left = (time.monotonic() - started) / step * (steps - step)
            say(f"{stage}: step {step}/{steps}, loss {loss:.3f}, {left:.0f} s left")


@torch.no_grad()
def sample(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, questions: list[str], n: int, seed: int
) -> list[list[str]]:
    """`n` completions (at most 16 tokens, temperature 1) for each question."""
    torch.manual_seed(seed)
    model.eval()
    completions = []
    for start in range(0, len(questions), 32):
        chunk = questions[start : start + 32]
        prompts = [encode_prompt(tokenizer, question) for question in chunk]
        inputs = tokenizer.pad({"input_ids": prompts}, padding=True, padding_side="left", return_tensors="pt")
        output = model.generate(
            **inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=16, num_return_sequences=n
        )
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        completions += [texts[i : i + n] for i in range(0, len(texts), n)]
    return completions


def mean_rewards(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, problems: dict[str, list[Problem]], n: int, seed: int
) -> dict[str, float]:
    """Mean strict reward (0..1) of `n` completions a problem, by task."""
    rewards = {}
    for task, asked in problems.items():
        answers = sample(model, tokenizer, [problem.question for problem in asked], n, seed)
        right = [is_right(p, text) for p, texts in zip(asked, answers, strict=True) for text in texts]
        rewards[task] = sum(right) / len(right)
    return rewards


def say(text: str) -> None:
    """Progress for the person waiting."""
    print(text, file=sys.stderr, flush=True)
