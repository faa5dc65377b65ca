"""The trainer: groups in, one optimiser step, metrics out.

One round is

1. encode: own completions keep the tokens they were sampled as; others' are encoded with our template and tokenizer;
2. advantages of each group, from the rewards this node computed;
3. weights of all tokens in one weighted mean (streams, masks, negative external ones), known before any forward pass;
4. micro-batches of packed groups: log-probs, clipped surrogate, backward; gradients add up;
5. clip the gradient's norm, one AdamW step, version + 1.

What is simpler here than elsewhere, on purpose:

- One update a round, on all of the batch. The clip then binds only where sampling and training differ.
- No reference model and no KL term.
- Groups and completions without advantage cost no forward pass. They count in the mean (step 3).
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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sapo_node import workers
from sapo_node.config import InferenceSection, TrainingSection
from sapo_node.inference.base import Sampled, SampledBatch, SamplingParams
from sapo_node.inference.sampling import sample
from sapo_node.training import state
from sapo_node.training.advantages import advantages
from sapo_node.training.base import ModelInfo, Origin, StepResult, TrainGroup
from sapo_node.training.encoding import Untrainable
from sapo_node.training.logprobs import token_logprobs
from sapo_node.training.loss import completion_weight, stream_shares, surrogate, token_scales
from sapo_node.training.packing import MAX_PACKED_TOKENS, Piece, micro_batches, pack, pad, split
from sapo_node.training.policy import EMBEDDED, LARGE_LR, LARGE_PARAMS, Policy, default_lr, public_name, singles

MICRO_BATCH_SECONDS = 600.0  # longest forward and backward pass; 16,384 tokens of a large model on a CPU need minutes

# Another tokenizer may need more tokens for a text; beyond this an external completion counts as cut by length.
EXTERNAL_LENGTH = 2

# Characters a token stands for at most, as far as a text is read; runs of blanks in large vocabularies come near.
MAX_TOKEN_CHARS = 64


@dataclass
class Row:
    """One completion as the loss sees it."""

    origin: Origin
    producer: str
    group_id: int
    prompt: list[int]
    tokens: list[int]
    old: list[float] | None  # log-probs under the sampler; None: unknown
    advantage: float
    truncated: bool
    weight: float = 0.0
    scale: float = 0.0  # of each token, so that the scaled losses sum up to the loss

    @property
    def trained(self) -> bool:
        """Whether it has a gradient, and so needs a forward pass."""
        return self.advantage != 0.0 and self.scale != 0.0


@dataclass
class Sums:
    """Metrics of the trained tokens of one stream, summed over micro-batches."""

    loss: float = 0.0
    tokens: int = 0
    clipped: float = 0.0
    ratio: float = 0.0
    entropy: float = 0.0
    logprob: float = 0.0
    delta: float = 0.0
    known: int = 0  # tokens with recorded log-probs

    def add(self, values: Sequence[float]) -> None:
        """Add one micro-batch's sums, in the order of the fields."""
        loss, tokens, clipped, ratio, entropy, logprob, delta, known = values
        self.loss += loss
        self.tokens += int(tokens)
        self.clipped += clipped
        self.ratio += ratio
        self.entropy += entropy
        self.logprob += logprob
        self.delta += delta
        self.known += int(known)


@dataclass
class Gradients:
    """Norms of parts of the gradient, before clipping; empty unless asked for."""

    producers: dict[str, float] = field(default_factory=dict)
    streams: dict[Origin, float] = field(default_factory=dict)


class Trainer:
    """A policy that samples and learns, its optimizer, its random numbers, its version."""

    def __init__(
        self, policy: Policy, training: TrainingSection, inference: InferenceSection, seed: int | None = None
    ) -> None:
        """`seed` starts the sampling noise; None takes the system's randomness."""
        self.policy = policy
        self.training = training
        self.inference = inference
        self.version = 0
        self.lr = default_lr(policy.params) if training.lr is None else training.lr
        self.parameters = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=self.lr, betas=training.betas, weight_decay=training.weight_decay, fused=True
        )
        self.generator = torch.Generator(policy.device)
        self.generator.manual_seed(secrets.randbits(63) if seed is None else seed)
        self.max_prompt = min(inference.max_prompt_tokens, policy.max_length - 1)

    def info(self) -> ModelInfo:
        """What the node tells its owner, and others, about the policy."""
        notes = list(self.policy.notes)
        if self.policy.params > LARGE_PARAMS and self.lr > LARGE_LR:
            notes.append(
                f"training.lr is {self.lr:g}; a full fine-tune of {self.policy.params / 1e6:.0f} M parameters seldom "
                f"survives more than {LARGE_LR:g}"
            )
        embedded = self.training.model in EMBEDDED
        return ModelInfo(
            name=public_name(self.training.model),
            params=self.policy.params,
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
        rows, skipped = self._rows(groups)
        self._weigh(rows)
        sums: dict[Origin, Sums] = {"local": Sums(), "external": Sums()}
        self.optimizer.zero_grad(set_to_none=True)
        gradients = self._backward(rows, sums)
        norm = 0.0
        if any(row.trained for row in rows):
            norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.training.max_grad_norm))
            if norm != norm or norm == float("inf"):
                raise ArithmeticError("the gradient is not finite; the step was not taken. Lower training.lr")
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.version += 1
        metrics = _metrics(rows, sums, gradients) | {"grad_norm": norm, "step_seconds": time.monotonic() - started}
        return StepResult(
            policy_version=self.version, metrics=metrics, producer_gradients=gradients.producers, skipped=skipped
        )

    def _rows(self, groups: Sequence[TrainGroup]) -> tuple[list[Row], dict[int, str]]:
        """All completions of the groups that can be trained on, and why the other groups cannot."""
        rows: list[Row] = []
        skipped: dict[int, str] = {}
        for group in groups:
            try:
                rows += self._encode(group)
            except Untrainable as error:
                skipped[group.group_id] = str(error)
        return rows, skipped

    def _encode(self, group: TrainGroup) -> list[Row]:
        """A group as rows. Raises Untrainable."""
        if len(group.completions) != len(group.rewards) or not group.rewards:
            raise Untrainable(f"{len(group.completions)} completions but {len(group.rewards)} rewards")
        age = self.version - group.policy_version
        if group.origin == "local" and age > self.training.staleness:
            limit = self.training.staleness
            raise Untrainable(f"sampled {age} policy versions ago; training.max_staleness is {limit}")
        prompt = self.policy.encoder.prompt(group.question)
        if len(prompt) > self.max_prompt:
            raise Untrainable(f"its prompt has {len(prompt)} tokens; at most {self.max_prompt} are taken")
        values = advantages(group.rewards, self.training.advantage)
        room = self.policy.max_length - len(prompt)
        external_limit = min(room, EXTERNAL_LENGTH * self.inference.max_completion_tokens)
        textual = [one for one in group.completions if one.token_ids is None]
        # Cut before encoding: a stranger's megabyte of text would cost seconds and be cut afterwards.
        texts = [one.text[: MAX_TOKEN_CHARS * external_limit] for one in textual]
        encoded = iter(self.policy.encoder.completions(texts, [one.finish for one in textual]))
        rows = []
        for completion, advantage in zip(group.completions, values, strict=True):
            tokens, limit = completion.token_ids, room
            if tokens is None:
                tokens, limit = next(encoded), external_limit
            cut = len(tokens) > limit or (
                completion.token_ids is None and len(completion.text) > MAX_TOKEN_CHARS * external_limit
            )
            rows.append(
                Row(
                    origin=group.origin,
                    producer=group.producer,
                    group_id=group.group_id,
                    prompt=prompt,
                    tokens=tokens[:limit],
                    old=None if completion.logprobs is None else completion.logprobs[:limit],
                    advantage=advantage,
                    truncated=cut or completion.finish == "length",
                )
            )
        return rows

    def _weigh(self, rows: Sequence[Row]) -> None:
        """Set every row's weight and scale."""
        settings = self.training
        streams: dict[Origin, list[Row]] = {"local": [], "external": []}
        for row in rows:
            row.weight = completion_weight(
                row.origin,
                row.advantage,
                row.truncated,
                external_negative=settings.external_negative,
                mask_truncated=settings.mask_truncated,
            )
            streams[row.origin].append(row)
        shares = stream_shares(
            {origin: len({row.group_id for row in stream}) for origin, stream in streams.items()},
            {"local": settings.local_weight, "external": settings.external_weight},
        )
        for origin, stream in streams.items():
            scales = token_scales(
                [row.weight for row in stream],
                [len(row.tokens) for row in stream],
                settings.loss_mean,
                self.inference.max_completion_tokens,
            )
            for row, scale in zip(stream, scales, strict=True):
                row.scale = shares[origin] * scale

    def _backward(self, rows: Sequence[Row], sums: dict[Origin, Sums]) -> Gradients:
        """Leave the gradient of all rows in the parameters; measure its parts if asked to."""
        trained = [row for row in rows if row.trained]
        if not self.training.producer_gradients:
            self._accumulate(trained, sums)
            return Gradients()
        norms = {row.producer: 0.0 for row in rows}
        streams: dict[Origin, float] = {}
        total = [torch.zeros_like(parameter) for parameter in self.parameters]
        # External producers first: what they add up to is then there to be measured before the local part joins.
        for origin in ("external", "local"):
            part: list[Tensor] = []
            for producer in norms:
                mine = [row for row in trained if (row.origin, row.producer) == (origin, producer)]
                if mine:
                    part = self._gradient(mine, sums)
                    norms[producer] = _norm(part)
                    torch._foreach_add_(total, part)
            streams[origin] = _norm(total if origin == "external" else part)
        for parameter, gradient in zip(self.parameters, total, strict=True):
            parameter.grad = gradient
        return Gradients(norms, streams)

    def _gradient(self, rows: Sequence[Row], sums: dict[Origin, Sums]) -> list[Tensor]:
        """The gradient of these rows alone."""
        self.optimizer.zero_grad(set_to_none=True)
        self._accumulate(rows, sums)
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]

    def _accumulate(self, rows: Sequence[Row], sums: dict[Origin, Sums]) -> None:
        """Forward and backward of these rows, in micro-batches."""
        for batch in micro_batches(list(self._pieces(rows)), self.training.micro_batch_tokens):
            workers.stage("training", deadline=MICRO_BATCH_SECONDS)
            keys = [key for piece in batch for key in piece.keys]
            inputs = (
                pack(batch, self.policy.device, self.policy.dtype)
                if self.policy.packed
                else pad(batch, self.policy.device)
            )
            logprobs_N, entropy_N = token_logprobs(
                self.policy.model, inputs, self.inference.temperature, self.policy.split_head
            )
            self._loss([rows[key] for key in keys], logprobs_N, entropy_N, sums).backward()  # type: ignore[no-untyped-call]
            workers.progress()

    def _pieces(self, rows: Sequence[Row]) -> Iterable[Piece]:
        groups: dict[tuple[str, int], list[int]] = defaultdict(list)
        for key, row in enumerate(rows):
            groups[row.producer, row.group_id].append(key)
        for keys in groups.values():
            whole = Piece(rows[keys[0]].prompt, [rows[key].tokens for key in keys], keys)
            if self.policy.packed:
                yield from split(whole, min(MAX_PACKED_TOKENS, self.training.micro_batch_tokens))
            else:
                yield from singles(whole)

    def _loss(self, rows: Sequence[Row], logprobs_N: Tensor, entropy_N: Tensor, sums: dict[Origin, Sums]) -> Tensor:
        """This micro-batch's share of the loss; its metrics go into `sums`."""
        unknown = float("nan")
        lengths = torch.tensor([len(row.tokens) for row in rows])
        table = torch.tensor([[row.advantage, row.scale, float(row.origin == "local")] for row in rows])
        advantage_N, scale_N, local_N = torch.repeat_interleave(table, lengths, dim=0).to(logprobs_N).unbind(-1)
        old_N = torch.tensor(
            [value for row in rows for value in (row.old or [unknown] * len(row.tokens))],
            dtype=logprobs_N.dtype,
            device=logprobs_N.device,
        )
        result = surrogate(logprobs_N, old_N, advantage_N, scale_N, self.training.clip_low, self.training.clip_high)
        delta_N = (logprobs_N.detach() - old_N).abs()
        parts = torch.stack(
            [
                result.loss_N.detach(),
                torch.ones_like(local_N),
                result.clipped_N.to(local_N),
                result.ratio_N,
                entropy_N,
                logprobs_N.detach(),
                delta_N.nan_to_num(0.0),
                (~old_N.isnan()).to(local_N),
            ]
        )
        sums["local"].add((parts * local_N).sum(-1).tolist())
        sums["external"].add((parts * (1 - local_N)).sum(-1).tolist())
        return result.loss_N.sum()

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def write(self, folder: Path) -> None:
        """Write a Hugging Face model folder and the trainer's tensors into an existing folder."""
        workers.stage("checkpoint", deadline=MICRO_BATCH_SECONDS)
        self.policy.model.save_pretrained(folder)
        self.policy.tokenizer.save_pretrained(folder)
        state.write(folder, self.policy.model, self.optimizer, self.generator)

    def read(self, folder: Path, version: int) -> None:
        """Take optimizer and random numbers from a checkpoint; the weights were loaded with the policy."""
        state.read(folder, self.policy.model, self.optimizer, self.generator)
        self.version = version


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm(tensors)) if tensors else 0.0


def _metrics(rows: Sequence[Row], sums: dict[Origin, Sums], gradients: Gradients) -> dict[str, float]:
    """Plain numbers of one round; docs/operations.md explains each."""
    tokens = sum(one.tokens for one in sums.values())
    metrics: dict[str, Any] = {
        "loss": sums["local"].loss + sums["external"].loss,
        "tokens_trained": tokens,
        "tokens_masked": sum(len(row.tokens) for row in rows if row.weight == 0.0),
    }
    if tokens:
        metrics["entropy"] = sum(one.entropy for one in sums.values()) / tokens
    for origin, one in sums.items():
        metrics[f"loss_{origin}"] = one.loss
        if one.tokens:
            metrics[f"clip_fraction_{origin}"] = one.clipped / one.tokens
            metrics[f"logprob_{origin}"] = one.logprob / one.tokens
            if origin == "local":  # an external one is 1 by construction
                metrics["ratio_mean_local"] = one.ratio / one.tokens
        if one.known and origin == "local":  # others' recorded log-probs do not travel
            metrics["delta_logprob_local"] = one.delta / one.known
        if origin in gradients.streams:
            metrics[f"grad_norm_{origin}"] = gradients.streams[origin]
    if all(one.tokens for one in sums.values()):
        # Producers' own log-probs do not travel, so their distance is seen in how much less likely their text is to us.
        metrics["delta_logprob_producers"] = metrics["logprob_local"] - metrics["logprob_external"]
    return {key: float(value) for key, value in metrics.items()}
