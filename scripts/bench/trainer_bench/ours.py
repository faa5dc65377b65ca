"""Our trainer, as a node runs it: `Trainer.step` on groups with recorded log-probs. Runs in the project's environment.

The step includes encoding the questions, advantages, packing and all metrics.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sapo_node.config import InferenceSection, TrainingSection
from sapo_node.training.base import TrainCompletion, TrainGroup
from sapo_node.training.logprobs import token_logprobs
from sapo_node.training.packing import Piece, micro_batches, pack
from sapo_node.training.policy import load_policy
from sapo_node.training.trainer import Trainer
from trainer_bench.child import Batch


class Ours:
    """The real trainer at its default settings, but for the learning rate."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.folder = Path(job["model"])
        training = TrainingSection.model_validate(
            {"model": str(self.folder), "lr": job["lr"], **job.get("settings", {})}
        )
        inference = InferenceSection(max_prompt_tokens=job["max_prompt"], max_completion_tokens=job["max_completion"])
        self.trainer = Trainer(load_policy(str(self.folder), device="cpu"), training, inference, seed=0)

    def prepare(self, batch: Batch) -> Callable[[], None]:
        """Groups as the node would hand them over."""
        groups = [
            TrainGroup(
                group_id=number,
                origin="local",
                producer="bench",
                question=group["question"],
                completions=[
                    TrainCompletion(text="", finish="stop", token_ids=tokens, logprobs=logprobs)
                    for tokens, logprobs in zip(group["completions"], group["logprobs"], strict=True)
                ],
                rewards=group["rewards"],
                policy_version=self.trainer.version,
            )
            for number, group in enumerate(batch["groups"])
        ]

        def step() -> None:
            result = self.trainer.step(groups)
            assert not result.skipped, result.skipped

        return step

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> list[float]:
        """Packed and chunked, as in the loss."""
        policy = load_policy(str(self.folder), device="cpu")
        found: dict[int, list[float]] = {}
        pieces = [
            Piece(
                group["prompt"],
                group["completions"],
                [8 * number + index for index in range(len(group["completions"]))],
            )
            for number, group in enumerate(batch["groups"])
        ]
        for pieces_of_one in micro_batches(pieces, self.trainer.training.micro_batch_tokens, packed=True):
            values = token_logprobs(policy.model, pack(pieces_of_one, policy.device, policy.dtype), 1.0)[0].tolist()
            for piece in pieces_of_one:
                for key, tokens in zip(piece.keys, piece.completions, strict=True):
                    found[key], values = values[: len(tokens)], values[len(tokens) :]
        return [value for key in sorted(found) for value in found[key]]


def load(job: dict[str, Any]) -> Ours:
    """The contender."""
    return Ours(job)
