"""genrl's GRPO trainer (gensyn-genrl), its own `step`. Runs in an environment of its own.

Only what surrounds the trainer is replaced: the state of the game hands out the bench's questions and completions, and
the tokenizer is one that finds the bench's token ids in the text, so that every contender has the same tokens. It pads
as genrl's does, on the left, completions too.
"""

import tempfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from genrl.trainer.grpo_trainer import GRPOLanguageTrainerModule, GRPOTrainerConfig
from transformers import AutoModelForCausalLM, BatchEncoding

from trainer_bench.child import Batch, padded


class Ids:
    """A tokenizer of texts that are lists of token ids already: "5 9 200"."""

    pad_token_id, bos_token_id, eos_token_id = 0, None, 1

    def apply_chat_template(self, prompt: str, **_: Any) -> str:
        """The prompts of the bench have their template."""
        return prompt

    def __call__(self, text: list[str], **_: Any) -> BatchEncoding:
        """Padded on the left."""
        ids, masks = padded([[int(word) for word in one.split()] for one in text], self.pad_token_id, left=True)
        return BatchEncoding({"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(masks)})


class Game:
    """State of the game and data manager in one: one stage, one agent, a node a question."""

    def __init__(self, batch: Batch) -> None:
        self.groups = batch["groups"]

    def get_stage_state(self, stage: int) -> list[dict[str, str]]:
        """The questions."""
        return [{"prompt": _text(group["prompt"])} for group in self.groups]

    def prepare_input(self, inputs: list[dict[str, str]], stage: int) -> tuple[list[dict[str, str]], list[Any]]:
        """As they are, with where each belongs: agent, question, node."""
        return inputs, [(0, number, 0) for number in range(len(inputs))]

    def get_stage_actions(self, stage: int) -> dict[int, dict[int, list[list[str]]]]:
        """The completions."""
        return {0: {n: [[_text(c) for c in group["completions"]]] for n, group in enumerate(self.groups)}}

    def rewards(self) -> list[Any]:
        """Of the only stage."""
        return [{0: {n: [group["rewards"]] for n, group in enumerate(self.groups)}}]


class GenRL:
    """`job["settings"]` goes into genrl's configuration; nothing set is its default."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.folder = job["model"]
        config = GRPOTrainerConfig(
            num_generations=8, learning_rate=job["lr"], max_new_tokens=job["max_completion"], **job["settings"]
        )
        self.trainer = GRPOLanguageTrainerModule(
            [self._model()], config, processing_class=Ids(), log_dir=tempfile.mkdtemp(prefix="genrl-")
        )

    def _model(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)

    def prepare(self, batch: Batch) -> Callable[[], None]:
        """Its `train` for one stage."""
        game = Game(batch)
        rewards = game.rewards()

        def step() -> None:
            self.trainer.train(SimpleNamespace(stage=1, **_methods(game)), game, rewards)

        return step

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> list[float]:
        """What its loss works with."""
        groups = batch["groups"]
        tokenizer = Ids()
        prompts = tokenizer([_text(g["prompt"]) for g in groups for _ in g["completions"]])
        completions = tokenizer([_text(c) for g in groups for c in g["completions"]])
        found = self.trainer._get_per_token_logps(
            self._model(),
            torch.cat([prompts.input_ids, completions.input_ids], 1),
            torch.cat([prompts.attention_mask, completions.attention_mask], 1).float(),
            completions.input_ids.shape[1],
        )
        values: list[float] = found[completions.attention_mask.bool()].tolist()
        return values


def _methods(game: Game) -> dict[str, Callable[..., Any]]:
    return {"get_stage_state": game.get_stage_state, "get_stage_actions": game.get_stage_actions}


def _text(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def load(job: dict[str, Any]) -> GenRL:
    """The contender."""
    return GenRL(job)
