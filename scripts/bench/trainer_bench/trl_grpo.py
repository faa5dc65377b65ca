"""TRL's GRPOTrainer, driven by its own `train()`; only the generation is replaced by the bench's completions.

What its loop does between two steps is part of the step: `training_step` (loss, metrics, backward), clipping of the
gradient's norm, the fused AdamW. Runs in an environment of its own.
"""

import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trainer_bench.child import Batch, padded

FOREVER = 1_000_000


class Fed(GRPOTrainer):
    """The trainer without its generation: the batch of the next step is given to it."""

    fed: list[dict[str, torch.Tensor]]  # one entry a micro-batch
    taken = 0

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, torch.Tensor]:
        self.taken += 1
        return self.fed[(self.taken - 1) % len(self.fed)]


class TurnByTurn(TrainerCallback):
    """Holds the training loop between two steps."""

    def __init__(self) -> None:
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.go.acquire()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.done.release()


class TRL:
    """GRPOTrainer at its fastest settings on a CPU. `job["settings"]`: what is varied, `rows` a forward pass."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.folder = job["model"]
        settings = dict(job["settings"])
        self.rows = settings.pop("rows")
        self.pad = AutoTokenizer.from_pretrained(self.folder).pad_token_id or 0
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        sequences = job["sequences"]
        arguments = GRPOConfig(
            output_dir=tempfile.mkdtemp(prefix="trl-"),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=self.rows,
            gradient_accumulation_steps=sequences // self.rows,
            steps_per_generation=sequences // self.rows,
            num_generations=8,
            num_iterations=1,
            max_completion_length=job["max_completion"],
            max_steps=FOREVER,
            learning_rate=job["lr"],
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            weight_decay=0.0,
            max_grad_norm=1.0,
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            loss_type="dapo",  # the mean over all tokens of the batch, as ours
            temperature=1.0,
            report_to="none",
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
            dataloader_num_workers=0,
            dataloader_pin_memory=False,
            **settings,
        )
        self.turns = TurnByTurn()
        prompts = Dataset.from_dict({"prompt": ["x"] * sequences})
        self.trainer = Fed(
            model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=arguments,
            train_dataset=prompts,
            processing_class=AutoTokenizer.from_pretrained(self.folder, padding_side="left"),
            callbacks=[self.turns],
        )
        self.failure: BaseException | None = None
        threading.Thread(target=self._train, daemon=True).start()

    def _train(self) -> None:
        try:
            self.trainer.train()
        except BaseException as error:
            self.failure = error
            self.turns.done.release()  # whoever waits for the step sees the failure
            raise

    def prepare(self, batch: Batch) -> Callable[[], None]:
        """Tensors as `_generate_and_score_completions` makes them: prompts padded left, completions right."""
        whole = self._tensors(batch)
        # As its own split: rows shuffled once, so that a micro-batch holds completions of several groups.
        order = torch.randperm(len(whole["prompt_ids"]))
        total = whole["completion_mask"].sum()
        self.trainer.fed = [
            {name: tensor[rows] for name, tensor in whole.items()} | {"num_items_in_batch": total}
            for rows in order.split(self.rows)
        ]

        def step() -> None:
            self.turns.go.release()
            self.turns.done.acquire()
            if self.failure is not None:
                sys.exit(f"TRL failed: {self.failure}")

        return step

    def _tensors(self, batch: Batch) -> dict[str, torch.Tensor]:
        groups = batch["groups"]
        prompts, prompt_masks = padded([g["prompt"] for g in groups for _ in g["completions"]], self.pad, left=True)
        completions, masks = padded([c for g in groups for c in g["completions"]], self.pad, left=False)
        rewards = torch.tensor([g["rewards"] for g in groups])
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        return {
            "prompt_ids": torch.tensor(prompts),
            "prompt_mask": torch.tensor(prompt_masks),
            "completion_ids": torch.tensor(completions),
            "completion_mask": torch.tensor(masks),
            "advantages": advantages.flatten(),
        }

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> list[float]:
        """What its `_compute_loss` works with, in float32."""
        fresh = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        model = self.trainer.accelerator.unwrap_model(self.trainer.model, keep_torch_compile=False)
        model.load_state_dict(fresh.state_dict())
        whole = self._tensors(batch)
        found = self.trainer._get_per_token_logps_and_entropies(
            self.trainer.model,
            torch.cat([whole["prompt_ids"], whole["completion_ids"]], 1),
            torch.cat([whole["prompt_mask"], whole["completion_mask"]], 1),
            whole["completion_ids"].shape[1],
            batch_size=self.rows,
        )[0]
        values: list[float] = found[whole["completion_mask"].bool()].tolist()
        return values


def load(job: dict[str, Any]) -> TRL:
    """The contender."""
    assert Path(job["model"]).is_dir()
    return TRL(job)
