"""Groups to rows: one completion each as the loss sees it, with its tokens, advantage and weight.

Own completions keep the tokens they were sampled as. Others' arrive as text and are encoded with our template and
tokenizer; a group for which that cannot be done is left out, with the reason.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from sapo_node.config import InferenceSection, TrainingSection
from sapo_node.tasks.base import answer_digest, extract_answer
from sapo_node.training.advantages import advantages
from sapo_node.training.base import Origin, TrainGroup
from sapo_node.training.encoding import Untrainable
from sapo_node.training.policy import Policy
from sapo_node.training.scales import (
    LossMean,
    NegativeRule,
    completion_weight,
    median_factors,
    stream_shares,
    token_scales,
)


@dataclass
class Row:
    """One completion as the loss sees it."""

    origin: Origin
    producer: str
    source: str
    group_id: int
    prompt: list[int]
    tokens: list[int]
    old: list[float] | None  # log-probs under the sampler; None: unknown
    advantage: float
    truncated: bool
    answer: bytes = b""  # its digest; known where answers are balanced
    weight: float = 0.0
    scale: float = 0.0  # of each token, so that the scaled losses sum up to the loss
    trained: bool = False  # whether it has a gradient, and so needs a forward pass


def encode(
    groups: Sequence[TrainGroup],
    policy: Policy,
    training: TrainingSection,
    inference: InferenceSection,
    *,
    version: int,
    max_prompt: int,
) -> tuple[list[Row], dict[int, str]]:
    """All completions of the groups that can be trained on, and why the other groups cannot (by `group_id`)."""
    rows: list[Row] = []
    skipped: dict[int, str] = {}
    for group in groups:
        try:
            if len(group.completions) != len(group.rewards) or not group.rewards:
                raise Untrainable(f"{len(group.completions)} completions but {len(group.rewards)} rewards")
            age = version - group.policy_version
            if group.origin == "local" and age > training.staleness:
                limit = training.staleness
                raise Untrainable(f"sampled {age} policy versions ago; training.max_staleness is {limit}")
            if policy.encoder.beginning(group.question, max_prompt) is not None:
                raise Untrainable(f"its prompt has far more than {max_prompt} tokens, which are taken at most")
            prompt = policy.encoder.prompt(group.question)
            if len(prompt) > max_prompt:
                raise Untrainable(f"its prompt has {len(prompt)} tokens; at most {max_prompt} are taken")
            rows += _encode(group, prompt, policy, training, inference)
        except Untrainable as error:
            skipped[group.group_id] = str(error)
    return rows, skipped


def _encode(
    group: TrainGroup, prompt: list[int], policy: Policy, training: TrainingSection, inference: InferenceSection
) -> list[Row]:
    """A group as rows. Raises Untrainable."""
    values = advantages(group.rewards, training.advantage)
    room = policy.max_length - len(prompt)
    # As if this node had sampled it: a text that it could never finish would only teach it to be cut off.
    external_limit = min(room, inference.max_completion_tokens)
    textual = [one for one in group.completions if one.token_ids is None]
    encoded = iter(
        policy.encoder.at_most(external_limit, [one.text for one in textual], [one.finish for one in textual])
    )
    by_answer = training.external_balance == "answers" and group.origin == "external"
    rows = []
    for completion, advantage in zip(group.completions, values, strict=True):
        own = completion.token_ids
        tokens, cut = next(encoded) if own is None else (own[:room], len(own) > room)
        rows.append(
            Row(
                origin=group.origin,
                producer=group.producer,
                source=group.source or group.producer,
                group_id=group.group_id,
                prompt=prompt,
                tokens=tokens,
                old=None if completion.logprobs is None else completion.logprobs[: len(tokens)],
                advantage=advantage,
                truncated=cut or completion.finish == "length",
                answer=answer_digest(extract_answer(completion.text)) if by_answer else b"",
            )
        )
    return rows


def weigh(rows: Sequence[Row], settings: TrainingSection, fixed_length: int) -> None:
    """Set every row's weight and scale, and whether it is trained on."""
    streams: dict[Origin, list[Row]] = {"local": [], "external": []}
    negative: dict[Origin, NegativeRule] = {"local": settings.local_negative, "external": settings.external_negative}
    for row in rows:
        row.weight = completion_weight(
            row.advantage, row.truncated, negative=negative[row.origin], mask_truncated=settings.mask_truncated
        )
        streams[row.origin].append(row)
    counts = {origin: float(len({row.group_id for row in stream})) for origin, stream in streams.items()}
    if settings.external_balance != "groups":
        pull = _pull(streams["external"], settings.loss_mean)
        _balance_sources(streams["external"], settings.loss_mean)
        if settings.external_balance == "answers":
            _balance_answers(streams["external"])
        counts["external"] *= _pull(streams["external"], settings.loss_mean) / (pull or 1.0)
    shares = stream_shares(counts, {"local": settings.local_weight, "external": settings.external_weight})
    for origin, stream in streams.items():
        scales = token_scales(
            [row.weight for row in stream], [len(row.tokens) for row in stream], settings.loss_mean, fixed_length
        )
        for row, scale in zip(stream, scales, strict=True):
            row.scale = shares[origin] * scale
            row.trained = row.scale != 0.0 and (row.advantage != 0.0 or settings.kl_coef > 0)


def _pull(rows: Sequence[Row], mean: LossMean) -> float:
    """How hard rows pull together."""
    return sum(row.weight * abs(row.advantage) * (1 if mean == "sequence" else len(row.tokens)) for row in rows)


def _balance_answers(stream: Sequence[Row]) -> None:
    """Lower the weights of groups with the same best answer, where they weigh together more than those with the median
    one."""
    best: dict[int, Row] = {}  # by group: the first of its best rows
    for row in stream:
        known = best.get(row.group_id)
        if row.weight and row.advantage > (known.advantage if known else 0.0):
            best[row.group_id] = row
    weights: dict[bytes, float] = defaultdict(float)
    for row in best.values():
        weights[row.answer] += row.weight
    factors = median_factors(weights)
    for row in stream:
        if row.group_id in best:
            row.weight *= factors[best[row.group_id].answer]


def _balance_sources(stream: Sequence[Row], mean: LossMean) -> None:
    """Lower the weights of rows whose source pulls harder than the median one."""
    sources: dict[str, list[Row]] = defaultdict(list)
    for row in stream:
        sources[row.source].append(row)
    factors = median_factors({source: _pull(rows, mean) for source, rows in sources.items()})
    for row in stream:
        row.weight *= factors[row.source]


def unfit(rows: Sequence[Row], skipped: dict[int, str]) -> dict[int, str]:
    """Of encoded and weighed groups of others, those that cannot be trained on, and why (by `group_id`): the `skipped`
    ones, and those whose better completions the loss leaves out. The others alone would only push the policy away from
    texts, to where nobody says."""
    differing = {row.group_id for row in rows if row.advantage}
    leading = {row.group_id for row in rows if row.advantage > 0 and row.weight and row.tokens}
    return skipped | dict.fromkeys(sorted(differing - leading), "its better completions are too long or were cut")


def own_mean_logprob(rows: Sequence[Row]) -> float | None:
    """Mean log-prob a token of the own completions, as recorded while sampling; None where none is known."""
    known = [value for row in rows if row.origin == "local" and row.old for value in row.old]
    return sum(known) / len(known) if known else None
