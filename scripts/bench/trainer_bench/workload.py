"""The batches that every contender trains on, and the exact log-probs of their tokens. In the project's environment.

Questions are those of the node's default tasks, which are short, or of the paper's tasks with their generators' default
settings. Completions are tokens drawn from the model itself at temperature 1, going on behind an end token, so that
their lengths are those asked for: a batch does not get easier because a model likes to stop. Rewards are made up: half
of a group's completions are right, so nothing can be skipped; in a flat group all are wrong, so its advantages are
zero.
"""

import random
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
import yaml

from sapo_node.training.policy import Policy, load_policy, plain_logprobs
from trainer_bench.child import Batch

GROUPS, COMPLETIONS = 8, 8
CONFIGS = Path(__file__).parents[3] / "configs"
LONGEST_PROMPT = 256  # tokens; half of what the embedded model knows
SHARE_OF_EXACT = 8  # every n-th completion is compared with the exact value; float64 is slow


def lengths(shape: str, longest: int, draw: random.Random) -> list[int]:
    """Lengths of one group's completions. full: all the longest; mixed: evenly from a quarter of it up."""
    if shape == "full":
        return [longest] * COMPLETIONS
    return [draw.randint(max(1, longest // 4), longest) for _ in range(COMPLETIONS)]


def rewards(flat: bool) -> list[float]:
    """Of one group."""
    return [0.0 if flat else float(index % 2) for index in range(COMPLETIONS)]


def questions(config: str, policy: Policy) -> list[str]:
    """One for each of the first eight tasks of a shipped configuration that ask short enough questions."""
    found = []
    for task in yaml.safe_load((CONFIGS / f"{config}.yaml").read_text())["tasks"]["mixture"]:
        made = reasoning_gym.create_dataset(task["name"], size=1, seed=7, **task.get("config", {}))
        question = str(made[0]["question"])
        if len(policy.encoder.prompt(question)) <= LONGEST_PROMPT:
            found.append(question)
    if len(found) < GROUPS:
        raise ValueError(f"only {len(found)} tasks of configs/{config}.yaml ask questions of {LONGEST_PROMPT} tokens")
    return found[:GROUPS]


def make(folder: Path, config: str, shape: str, longest: int, flat_groups: int) -> tuple[dict[str, Batch], list[float]]:
    """Two batches that differ in their rewards only, `all` and `flat`, and exact log-probs (see `exact`)."""
    torch.set_num_threads(1)
    policy = load_policy(str(folder), device="cpu")
    torch.manual_seed(0)
    draw = random.Random(0)
    drawn = []
    for question in questions(config, policy):
        prompt = policy.encoder.prompt(question)
        completions = [
            tokens[:length]
            for tokens, length in zip(_sample(policy, prompt, longest), lengths(shape, longest, draw), strict=True)
        ]
        logprobs = [_logprobs(policy, prompt, tokens) for tokens in completions]
        drawn.append({"question": question, "prompt": prompt, "completions": completions, "logprobs": logprobs})
    batches: dict[str, Batch] = {
        name: {"groups": [{**group, "rewards": rewards(number < flat)} for number, group in enumerate(drawn)]}
        for name, flat in (("all", 0), ("flat", flat_groups))
    }
    policy.model.double()
    return batches, exact(policy, batches["all"])


def _sample(policy: Policy, prompt: list[int], length: int) -> list[list[int]]:
    """Completions of exactly `length` tokens."""
    rows = policy.model.generate(
        input_ids=torch.tensor([prompt] * COMPLETIONS),
        attention_mask=torch.ones(COMPLETIONS, len(prompt), dtype=torch.long),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_new_tokens=length,
        max_new_tokens=length,
        pad_token_id=policy.stop_ids[0],
    )
    tokens: list[list[int]] = rows[:, len(prompt) :].tolist()
    return tokens


def _logprobs(policy: Policy, prompt: list[int], tokens: list[int]) -> list[float]:
    values: list[float] = plain_logprobs(policy, prompt, tokens).tolist()
    return values


def exact(policy: Policy, batch: Batch) -> list[float]:
    """Log-probs in float64, unbatched and unpadded, of every `SHARE_OF_EXACT`-th completion."""
    return [
        value
        for prompt, tokens in list(sequences(batch))[::SHARE_OF_EXACT]
        for value in _logprobs(policy, prompt, tokens)
    ]


def compared(batch: Batch, values: list[float]) -> list[float]:
    """Of the log-probs of all completions, those that `exact` has."""
    found, start = [], 0
    for number, (_, tokens) in enumerate(sequences(batch)):
        if number % SHARE_OF_EXACT == 0:
            found += values[start : start + len(tokens)]
        start += len(tokens)
    return found


def sequences(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """Prompt and completion of each sequence."""
    return [(group["prompt"], tokens) for group in batch["groups"] for tokens in group["completions"]]


def describe(batch: Batch) -> dict[str, Any]:
    """Sizes of a batch."""
    rows = sequences(batch)
    fed = [len(prompt) + len(tokens) for prompt, tokens in rows]
    return {
        "sequences": len(rows),
        "prompt_tokens": [min(len(p) for p, _ in rows), max(len(p) for p, _ in rows)],
        "completion_tokens": sum(len(t) for _, t in rows),
        "tokens": sum(fed),
        "tokens_padded": len(rows) * (max(len(p) for p, _ in rows) + max(len(t) for _, t in rows)),
        "tokens_packed": sum(len(g["prompt"]) + sum(map(len, g["completions"])) for g in batch["groups"]),
    }
