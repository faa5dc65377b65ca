"""Batched sampling with a key-value cache, on the very weights that are being trained.

The prompt of a question is computed once and its cache entries are repeated for its L completions; rows that have
ended leave the batch; only the last position's logits exist. Prompts are padded on the left with exact position ids.
The log-prob of each token is recorded under the distribution it was drawn from (temperature applied, nothing cut off),
which is what the importance ratio divides by.

Names: Q prompts, R rows (completions) still running, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from sapo_node import workers
from sapo_node.rollouts.schema import Finish
from sapo_node.training.logprobs import log_softmax, takes_argument
from sapo_node.training.policy import Policy, agree, plain_logprobs

STEP_SECONDS = 300.0  # longest that one forward pass may take; a large model's first one on a CPU can need minutes

# Ended rows leave when at most this share of the batch still runs: leaving copies the cache, staying costs arithmetic.
LEAVE_BELOW = 0.8


@dataclass
class Drawn:
    """One sampled completion as tokens, the end-of-sequence token included if it stopped."""

    token_ids: list[int]
    logprobs: list[float]
    finish: Finish


class Interrupted(Exception):
    """Sampling ended before its time; what it had drawn is lost."""


class _Interrupt:
    """Set by a signal, looked at between two tokens: a node that stops does not wait for minutes of sampling."""

    wanted = False


def interrupt(number: int, frame: FrameType | None) -> None:
    """Signal handler of the policy worker: the sampling that runs now ends with Interrupted."""
    _Interrupt.wanted = True


@torch.no_grad()
def sample(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    *,
    n: int,
    max_tokens: int,
    temperature: float,
    generator: torch.Generator,
    batch_completions: int,
) -> list[list[Drawn]]:
    """`n` completions of at most `max_tokens` tokens for each prompt, in the prompts' order.

    At most `batch_completions` rows run at once. `generator` lives on the policy's device; the same generator state
    and arguments give the same completions. Raises ValueError for a prompt that leaves the model no position.
    """
    longest = max((len(prompt) for prompt in prompts), default=0)
    if longest >= policy.max_length or not all(prompts):
        raise ValueError(f"prompts must have 1 to {policy.max_length - 1} tokens for this model")
    workers.stage("sampling", deadline=STEP_SECONDS)
    _Interrupt.wanted = False
    drawn: list[list[Drawn]] = [[] for _ in prompts]
    for chunk in _chunks([len(prompt) for prompt in prompts], n, batch_completions):
        rows = _Rows(policy, [prompts[index] for index, _ in chunk], [copies for _, copies in chunk], max_tokens)
        questions = [index for index, copies in chunk for _ in range(copies)]
        for index, one in zip(questions, rows.run(temperature, generator), strict=True):
            drawn[index].append(one)
    return drawn


def _chunks(lengths: Sequence[int], n: int, batch_completions: int) -> Iterator[list[tuple[int, int]]]:
    """(prompt, copies) of the rows that run together: at most `batch_completions`, prompts of similar length."""
    chunk: list[tuple[int, int]] = []
    room = batch_completions
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        missing = n
        while missing:
            copies = min(missing, room)
            chunk.append((index, copies))
            missing, room = missing - copies, room - copies
            # A question is split over two chunks only when it would not fit into one: its prompt is computed twice.
            if room == 0 or (missing == 0 and room < min(n, batch_completions)):
                yield chunk
                chunk, room = [], batch_completions
    if chunk:
        yield chunk


class _Rows:
    """The rows that run together, from prefill to the last end."""

    def __init__(
        self, policy: Policy, prompts: Sequence[Sequence[int]], copies: Sequence[int], max_tokens: int
    ) -> None:
        self._policy = policy
        self._device = policy.device
        self._takes_positions = takes_argument(policy.model, "position_ids")
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        self._width = int(lengths.max())
        source_R = torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor(copies))
        self._length_R = lengths[source_R].to(self._device)
        self._limit_R = (policy.max_length - self._length_R).clamp(max=max_tokens)
        self._padded = bool((lengths != self._width).any())
        mask_QT = torch.arange(self._width) >= (self._width - lengths)[:, None]
        ids = torch.tensor([[0] * (self._width - len(prompt)) + list(prompt) for prompt in prompts])
        output = self._forward(
            ids.to(self._device),
            (mask_QT.cumsum(-1) - 1).clamp(min=0).to(self._device),
            mask_QT.long().to(self._device) if self._padded else None,
            None,
        )
        source_R = source_R.to(self._device)
        self._cache = output.past_key_values
        self._cache.batch_select_indices(source_R)
        self._logits_RV = output.logits[:, -1][source_R]
        self._mask = self._decode_mask(mask_QT.to(self._device)[source_R], int(self._limit_R.max()))

    def run(self, temperature: float, generator: torch.Generator) -> list[Drawn]:
        """Sample until every row has ended; results in the order of the rows."""
        count, steps = len(self._length_R), int(self._limit_R.max())
        tokens = torch.zeros(count, steps, dtype=torch.long, device=self._device)
        logprobs = torch.zeros(count, steps, device=self._device)
        ended_at = self._limit_R.clone()
        stopped = torch.zeros(count, dtype=torch.bool, device=self._device)
        stop_ids = torch.tensor(self._policy.stop_ids, device=self._device)
        row_R = torch.arange(count, device=self._device)
        running_R = torch.ones(count, dtype=torch.bool, device=self._device)
        for step in range(steps):
            token_R, logprob_R = draw(self._logits_RV, temperature, generator)
            tokens[row_R, step] = token_R  # of ended rows too, behind their end
            logprobs[row_R, step] = logprob_R.float()
            stop_R = running_R & (token_R[:, None] == stop_ids).any(-1)
            end_R = stop_R | (running_R & (self._limit_R <= step + 1))
            ended_at[row_R[end_R]] = step + 1
            stopped[row_R[stop_R]] = True
            running_R &= ~end_R
            left = int(running_R.sum())
            if left == 0:
                break
            if left <= LEAVE_BELOW * len(row_R):
                keep = running_R.nonzero().squeeze(-1)
                row_R, token_R, running_R = row_R[keep], token_R[keep], running_R[keep]
                self._select(keep)
            self._advance(token_R, step)
            workers.progress()
            if _Interrupt.wanted:
                raise Interrupted("sampling was interrupted, since the node stops")
        return [
            Drawn(ids[:end], values[:end], "stop" if stop else "length")
            for ids, values, end, stop in zip(
                tokens.tolist(), logprobs.tolist(), ended_at.tolist(), stopped.tolist(), strict=True
            )
        ]

    def _select(self, keep: Tensor) -> None:
        """Let the other rows go."""
        self._cache.batch_select_indices(keep)
        self._length_R, self._limit_R = self._length_R[keep], self._limit_R[keep]
        self._mask = None if self._mask is None else self._mask[keep]

    def _advance(self, token_R: Tensor, step: int) -> None:
        """Feed the tokens just drawn; the logits of what follows them come out."""
        seen = self._width + step + 1
        mask = None if self._mask is None else self._mask[..., :seen]
        # Rows that ended stay for a while; theirs must remain positions that the model has.
        positions = (self._length_R + step).clamp(max=self._policy.max_length - 1)[:, None]
        self._logits_RV = self._forward(token_R[:, None], positions, mask, self._cache).logits[:, -1]

    def _decode_mask(self, prompt_RT: Tensor, steps: int) -> Tensor | None:
        """What a new token sees, for all steps to come: every model takes the two-dimensional one; most take the
        finished additive one too, which saves them its making at each step."""
        if not self._padded:
            return None
        sees = torch.cat([prompt_RT, prompt_RT.new_ones(len(prompt_RT), steps)], dim=1)
        if not self._policy.packed:
            return sees.long()
        dtype = self._policy.dtype
        return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, torch.finfo(dtype).min)[
            :, None, None
        ]

    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Any) -> Any:
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "past_key_values": cache, "use_cache": True}
        if self._takes_positions:
            inputs["position_ids"] = positions
        if takes_argument(self._policy.model, "logits_to_keep"):
            inputs["logits_to_keep"] = 1
        return self._policy.model(**inputs)


def check_sampling(policy: Policy) -> None:
    """Compare recorded log-probs with those of plain forward passes. Raises Refused where the cache changes them."""
    prompts = [[1, 2, 3, 4, 5], [3, 1], [2, 5, 4]]
    generator = torch.Generator(policy.device).manual_seed(0)
    drawn = sample(
        policy, prompts, n=2, max_tokens=5, temperature=1.0, generator=generator, batch_completions=len(prompts) * 2
    )
    for prompt, completions in zip(prompts, drawn, strict=True):
        for one in completions:
            exact = plain_logprobs(policy, prompt, one.token_ids)
            if not agree(torch.tensor(one.logprobs), exact, policy.dtype):
                raise workers.Refused(
                    f"training.model: {policy.name} samples with other log-probs than it trains with (its key-value "
                    "cache or its padding changes them), so it cannot be used"
                )


def draw(logits_RV: Tensor, temperature: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """One token a row and its log-prob, by inverting the cumulative distribution: one random number a row.

    Sums are float64, so that a vocabulary of 10^5 tokens keeps its small probabilities.
    """
    logprobs_RV = log_softmax(logits_RV, temperature)
    cumulative_RV = logprobs_RV.double().exp().cumsum(-1)
    uniform_R1 = torch.rand(len(logits_RV), 1, dtype=torch.float64, device=logits_RV.device, generator=generator)
    token_R1 = torch.searchsorted(cumulative_RV, uniform_R1 * cumulative_RV[:, -1:], right=True)
    token_R1 = token_R1.clamp(max=logits_RV.shape[-1] - 1)
    return token_R1.squeeze(-1), logprobs_RV.gather(-1, token_R1).squeeze(-1)
