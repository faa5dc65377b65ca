"""A trainer on a tiny model, and groups for it."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

import torch

from sapo_node.config import InferenceSection, TrainingSection
from sapo_node.inference.base import SamplingParams
from sapo_node.training.base import Origin, TrainCompletion, TrainGroup
from sapo_node.training.policy import Policy, make_policy
from sapo_node.training.remote import POLICY_MODULE
from sapo_node.training.trainer import Trainer
from sapo_node.workers import Worker
from tests.tiny import Family, make_model, make_tokenizer

QUESTION = "what is 12 + 34?"
TEXTS = ["46", "the answer is 46", "47", ""]


def drive(scenario: Callable[[Worker], Awaitable[None]]) -> None:
    """Run a scenario on a policy worker, a process of its own."""

    async def main() -> None:
        worker = Worker("policy", POLICY_MODULE, env={**os.environ, "OMP_NUM_THREADS": "1"})
        await worker.start()
        try:
            await scenario(worker)
        finally:
            await worker.stop()

    asyncio.run(main())


def trainer(
    family: Family = "llama", *, scale: float = 0.3, dtype: torch.dtype = torch.float32, **settings: Any
) -> Trainer:
    policy = make_policy(family, make_model(family, scale=scale).to(dtype), make_tokenizer())
    return with_policy(policy, **settings)


def with_policy(policy: Policy, **settings: Any) -> Trainer:
    return Trainer(policy, TrainingSection(lr=1e-3, **settings), InferenceSection(max_completion_tokens=16), seed=0)


def group(
    number: int = 0,
    rewards: tuple[float, ...] = (1, 0, 0, 1),
    *,
    origin: Origin = "external",
    producer: str = "peer",
    texts: list[str] = TEXTS,
    finish: Any = "stop",
) -> TrainGroup:
    completions = [TrainCompletion(text=text, finish=finish) for text in texts]
    return TrainGroup(
        group_id=number,
        origin=origin,
        producer=producer,
        question=QUESTION,
        completions=completions,
        rewards=list(rewards),
        policy_version=0,
    )


def sampled(one: Trainer, rewards: tuple[float, ...] = (1, 0, 0, 0), number: int = 0) -> TrainGroup:
    batch = one.sample([QUESTION], SamplingParams(n=len(rewards), max_tokens=8))
    return TrainGroup(
        group_id=number,
        origin="local",
        producer="me",
        question=QUESTION,
        completions=[
            TrainCompletion(text=c.text, finish=c.finish, token_ids=c.token_ids, logprobs=c.logprobs)
            for c in batch.groups[0]
        ],
        rewards=list(rewards),
        policy_version=batch.policy_version,
    )


def gradient_of(one: Trainer, groups: list[TrainGroup]) -> torch.Tensor:
    """The gradient a step would take, without taking it."""
    rows, _ = one._rows(groups)
    one.optimizer.zero_grad()
    one._backward(rows)
    return torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in one.parameters])
