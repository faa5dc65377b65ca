"""The trainer: groups in, one optimiser step, metrics out.

One round is

1. encode: own completions keep the tokens they were sampled as; others' are encoded with our template and tokenizer;
2. advantages of each group, from the rewards this node computed (both `rows.py`);
3. weights of all tokens in one weighted mean (streams, masks, negative external ones), known before any forward pass
   (`scales.py`);
4. micro-batches of packed groups: log-probs, the loss of each token (`loss.py`), backward; gradients add up;
5. clip the gradient's norm, one AdamW step, version + 1.

What is simpler here than elsewhere, on purpose:

- One update a round, on all of the batch. The clip then binds only where sampling and training differ.
- Groups and completions without advantage cost no forward pass, unless there is a KL penalty. They count in the mean
  (step 3).
- A round in which nothing has an advantage leaves weights and optimizer as they are, without weight decay and without
  Adam's momentum; the version still counts it, since the round took place.
- Dropout is off, so that the sampler's log-probs and ours are of the same function.
- No learning-rate schedule: a node has no planned end.

An external completion has no old log-probs of ours, so its ratio is 1: a plain policy gradient with the swarm's
samples. A local one's are those recorded while sampling.
"""

import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sapo_node import workers
from sapo_node.config import InferenceSection, TrainingSection
from sapo_node.inference.base import Sampled, SampledBatch, SamplingParams
from sapo_node.inference.sampling import sample
from sapo_node.model_shape import EMBEDDED
from sapo_node.training import adapters, rows, state
from sapo_node.training.base import ModelInfo, Origin, StepResult, TrainGroup
from sapo_node.training.logprobs import Chosen, token_logprobs
from sapo_node.training.loss import choose_objective, kl_penalty, likelihood_weights
from sapo_node.training.optimizers import make_optimizer
from sapo_node.training.packing import Packed, Piece, micro_batches, pack, pad, split
from sapo_node.training.policy import (
    LARGE_LR,
    LARGE_PARAMS,
    Policy,
    checkpoint_layers,
    default_lr,
    public_name,
    singles,
)
from sapo_node.training.reference import Reference
from sapo_node.training.rows import Row
from sapo_node.training.step_metrics import Measured

MICRO_BATCH_SECONDS = 600.0  # longest forward and backward pass; 16,384 tokens of a large model on a CPU need minutes

LORA_LR_FACTOR: Final = 10
"""Adapters bear about ten times the learning rate of a full fine-tune (Schulman, "LoRA without regret", 2025)."""

ORIGIN: Final = "origin"
"""Key of the reference's fingerprint in a checkpoint."""


class Trainer:
    """A policy that samples and learns, its optimizer, its random numbers, its version."""

    def __init__(
        self,
        policy: Policy,
        training: TrainingSection,
        inference: InferenceSection,
        seed: int | None = None,
        origin: Policy | None = None,
        trained: nn.Module | None = None,
    ) -> None:
        """`seed` starts the sampling noise; None takes the system's randomness.

        `origin` is the policy that the node started from, where `policy` is no longer that; the KL penalty needs it.
        `trained` holds the parameters that are trained, where they are not those of `policy.model` (`parallel.py`).
        With `training.lora_rank` the policy gets adapters here, so it must be the one the node started from. Raises
        Refused for settings that cannot work here, told for people.
        """
        seed = secrets.randbits(63) if seed is None else seed
        self.policy = policy
        self.training = training
        self.inference = inference
        self.version = 0
        self.params = policy.params
        lr = default_lr(self.params) * (LORA_LR_FACTOR if training.lora_rank else 1)
        self.lr = lr if training.lr is None else training.lr
        if training.gradient_checkpointing:
            checkpoint_layers(policy)
        if training.lora_rank:
            adapters.attach(policy.model, training.lora_rank, training.lora_alpha, seed)
        self.reference: Reference | None = None
        if training.kl_coef or training.lora_rank:
            self.reference = Reference.of(policy) if origin is None else Reference(origin)
        self.objective = choose_objective(training)
        self.trained: nn.Module = policy.model if trained is None else trained
        self.parameters = [parameter for parameter in self.trained.parameters() if parameter.requires_grad]
        self.optimizer = make_optimizer(self.parameters, training, self.lr)
        self.generator = torch.Generator(policy.device)
        self.generator.manual_seed(seed)
        self.max_prompt = min(inference.max_prompt_tokens, policy.max_length - 1)

    def info(self) -> ModelInfo:
        """What the node tells its owner, and others, about the policy."""
        notes = list(self.policy.notes)
        if self.params > LARGE_PARAMS and self.lr > LARGE_LR and not self.training.lora_rank:
            notes.append(
                f"training.lr is {self.lr:g}; a full fine-tune of {self.params / 1e6:.0f} M parameters seldom "
                f"survives more than {LARGE_LR:g}"
            )
        embedded = self.training.model in EMBEDDED
        return ModelInfo(
            name=public_name(self.training.model),
            params=self.params,
            licence="apache-2.0" if embedded and self.training.licence == "unknown" else self.training.licence,
            tokenizer_sha256=self.policy.tokenizer_sha256,
            lr=self.lr,
            device=str(self.policy.device),
            notes=notes,
            policy_version=self.version,
            stop_ids=list(self.policy.stop_ids),
            max_length=self.policy.max_length,
            weight_bytes=sum(p.numel() * p.element_size() for p in self.policy.model.parameters()),
        )

    # ---- sampling ----------------------------------------------------------------------------------------------------

    def sample(self, questions: Sequence[str], params: SamplingParams) -> SampledBatch:
        """Completions of each question by the newest weights; a question whose prompt is too long gets none.

        With `params.seed` the trainer's own stream of random numbers is not touched.
        """
        started = time.monotonic()
        generator = self.generator
        if params.seed is not None:
            generator = torch.Generator(self.policy.device).manual_seed(params.seed)
        prompts = [self.policy.encoder.prompt(question) for question in questions]
        fitting = [index for index, prompt in enumerate(prompts) if len(prompt) <= self.max_prompt]
        drawn = sample(
            self.policy,
            [prompts[index] for index in fitting],
            n=params.n,
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            generator=generator,
            batch_completions=self.inference.batch_completions,
        )
        groups: list[list[Sampled]] = [[] for _ in questions]
        for index, completions in zip(fitting, drawn, strict=True):
            texts = self.policy.encoder.decode([one.token_ids for one in completions])
            groups[index] = [
                Sampled(
                    text=text,
                    finish=one.finish,
                    token_ids=one.token_ids,
                    logprobs=one.logprobs,
                    policy_versions=[self.version],
                )
                for text, one in zip(texts, completions, strict=True)
            ]
        return SampledBatch(groups=groups, policy_version=self.version, seconds=time.monotonic() - started)

    # ---- one round ---------------------------------------------------------------------------------------------------

    def step(self, groups: Sequence[TrainGroup]) -> StepResult:
        """Train on one round's groups; the version rises by one whatever they hold."""
        started = time.monotonic()
        batch, skipped = self._rows(groups)
        self.optimizer.zero_grad(set_to_none=True)
        measured = self._backward(batch)
        norm = 0.0
        if any(row.trained for row in batch):
            norm = _number(torch.nn.utils.clip_grad_norm_(self.parameters, self.training.max_grad_norm))
            if norm != norm or norm == float("inf"):
                raise ArithmeticError("the gradient is not finite; the step was not taken. Lower training.lr")
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.version += 1
        metrics = measured.metrics(
            batch, kl=self.training.kl_coef > 0, likelihood=self.training.external_weighting == "likelihood"
        )
        metrics |= {"grad_norm": norm, "step_seconds": time.monotonic() - started}
        return StepResult(
            policy_version=self.version, metrics=metrics, producer_gradients=measured.producers, skipped=skipped
        )

    def unfit(self, groups: Sequence[TrainGroup]) -> dict[int, str]:
        """Which of these groups `step` would learn nothing from, and why; by `group_id`."""
        return rows.unfit(*self._rows(groups))

    def _rows(self, groups: Sequence[TrainGroup]) -> tuple[list[Row], dict[int, str]]:
        """All completions of the groups that can be trained on, weighed, and why the other groups cannot."""
        batch, skipped = rows.encode(
            groups, self.policy, self.training, self.inference, version=self.version, max_prompt=self.max_prompt
        )
        rows.weigh(batch, self.training, self.inference.max_completion_tokens)
        return batch, skipped

    def _backward(self, batch: Sequence[Row]) -> Measured:
        """Leave the gradient of all rows in the parameters; measure its parts if asked to."""
        measured = Measured()
        own_mean = rows.own_mean_logprob(batch) if self.training.external_weighting == "likelihood" else None
        trained = [row for row in batch if row.trained]
        if not self.training.producer_gradients:
            self._accumulate(trained, own_mean, measured)
            return measured
        measured.producers = {row.producer: 0.0 for row in batch}
        total = [torch.zeros_like(parameter) for parameter in self.parameters]
        # External producers first: what they add up to is then there to be measured before the local part joins.
        origins: tuple[Origin, ...] = ("external", "local")
        for origin in origins:
            part: list[Tensor] = []
            for producer in measured.producers:
                mine = [row for row in trained if (row.origin, row.producer) == (origin, producer)]
                if mine:
                    self.optimizer.zero_grad(set_to_none=True)
                    self._accumulate(mine, own_mean, measured)
                    part = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
                    measured.producers[producer] = _norm(part)
                    torch._foreach_add_(total, part)
            measured.streams[origin] = _norm(total if origin == "external" else part)
        for parameter, gradient in zip(self.parameters, total, strict=True):
            parameter.grad = gradient
        return measured

    def _accumulate(self, trained: Sequence[Row], own_mean: float | None, measured: Measured) -> None:
        """Forward and backward of these rows, in micro-batches."""
        for batch, share in self._micro_batches(trained):
            workers.stage("training", deadline=MICRO_BATCH_SECONDS)
            keys = [key for piece in batch for key in piece.keys]
            inputs = (
                pack(batch, self.policy.device, self.policy.dtype)
                if self.policy.packed
                else pad(batch, self.policy.device)
            )
            reference_N = None
            if self.reference is not None and self.training.kl_coef:
                reference_N = self.reference.logprobs(inputs, self.inference.temperature)
            logprobs_N, entropy_N = self._logprobs(inputs)
            sums = measured if share else Measured()
            loss = self._loss([trained[key] for key in keys], logprobs_N, entropy_N, reference_N, own_mean, sums)
            (share * loss).backward()  # type: ignore[no-untyped-call]
            workers.progress()

    def _logprobs(self, inputs: Packed) -> Chosen:
        """The policy's log-probs, with gradient."""
        return token_logprobs(self.policy.model, inputs, self.inference.temperature, self.policy.split_head)

    def _micro_batches(self, trained: Sequence[Row]) -> list[tuple[list[Piece], float]]:
        """What goes through the model together, and what its loss is multiplied with; 0: it is not measured either."""
        pieces, limit = list(self._pieces(trained)), self.training.micro_batch_tokens
        return [(batch, 1.0) for batch in micro_batches(pieces, limit, packed=self.policy.packed)]

    def _pieces(self, trained: Sequence[Row]) -> Iterable[Piece]:
        groups: dict[tuple[str, int], list[int]] = defaultdict(list)
        for key, row in enumerate(trained):
            groups[row.producer, row.group_id].append(key)
        for keys in groups.values():
            whole = Piece(trained[keys[0]].prompt, [trained[key].tokens for key in keys], keys)
            if self.policy.packed:
                yield from split(whole, self.training.micro_batch_tokens)
            else:
                yield from singles(whole)

    def _loss(
        self,
        batch: Sequence[Row],
        logprobs_N: Tensor,
        entropy_N: Tensor,
        reference_N: Tensor | None,
        own_mean: float | None,
        measured: Measured,
    ) -> Tensor:
        """This micro-batch's share of the loss; its metrics go into `measured`."""
        lengths = torch.tensor([len(row.tokens) for row in batch])
        table = torch.tensor([[row.advantage, row.scale, float(row.origin == "local")] for row in batch])
        advantage_N, scale_N, local_N = torch.repeat_interleave(table, lengths, dim=0).to(logprobs_N).unbind(-1)
        unknown = float("nan")
        recorded_N = torch.tensor(
            [value for row in batch for value in (row.old or [unknown] * len(row.tokens))],
            dtype=logprobs_N.dtype,
            device=logprobs_N.device,
        )
        weight_N = None
        if own_mean is not None:
            row_N = torch.repeat_interleave(torch.arange(len(batch)), lengths).to(logprobs_N.device)
            weight_N = likelihood_weights(logprobs_N, row_N, len(batch), own_mean)[row_N]
            weight_N = torch.where(local_N == 1, 1.0, weight_N)
            advantage_N = advantage_N * weight_N
        result = self.objective(logprobs_N, recorded_N, advantage_N, scale_N)
        kl_N = None
        if reference_N is not None:
            kl_N = kl_penalty(logprobs_N, reference_N)
            result = result.plus(self.training.kl_coef * scale_N * kl_N)
        measured.add(result, logprobs_N, recorded_N, entropy_N, kl_N, weight_N, local_N)
        return result.loss_N.sum()

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def write(self, folder: Path) -> None:
        """Write a Hugging Face model folder and the trainer's tensors into an existing folder."""
        self._write(folder, state.moments(self.trained, self.optimizer))

    @contextmanager
    def whole(self) -> Iterator[None]:
        """While all of the weights are in `policy.model`; here they always are."""
        yield

    def close(self) -> None:
        """Let go of what other processes do for it; here none does."""

    def _write(self, folder: Path, moments: dict[str, Tensor]) -> None:
        workers.stage("checkpoint", deadline=MICRO_BATCH_SECONDS)
        adapters.save_model(self.policy.model, folder)
        self.policy.tokenizer.save_pretrained(folder)
        extra = adapters.tensors(self.policy.model)
        if self.reference is not None:
            extra[ORIGIN] = self.reference.fingerprint
        state.write(folder, moments, self.generator, extra)

    def read(self, folder: Path, version: int) -> None:
        """Take optimizer, random numbers and adapters from a checkpoint; other weights were loaded with the policy.

        Raises OSError, SafetensorError or ValueError for a damaged one, Refused for one of other settings.
        """
        saved = state.load(folder)
        origin = saved.extra.pop(ORIGIN, None)
        adapters.restore(self.policy.model, saved.extra, folder)
        if origin is not None and self.reference is not None and not self.reference.is_that_of(origin):
            raise workers.Refused(
                f"{folder} began with another model than training.model ({self.training.model}) is now; set it to the "
                "one that this node started from"
            )
        state.restore(saved, self.trained, self.optimizer, self.generator)
        self.version = version


Make = Callable[[Policy, TrainingSection, InferenceSection, int | None, Policy | None], Trainer]
"""Builds a trainer on a policy just loaded: settings, seed, and the policy that the node started from, as above."""


def _norm(tensors: Sequence[Tensor]) -> float:
    return _number(torch.nn.utils.get_total_norm(tensors)) if tensors else 0.0


def _number(tensor: Tensor) -> float:
    """Also of a tensor whose parts several devices hold."""
    return float(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
