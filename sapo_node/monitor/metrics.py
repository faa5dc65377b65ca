"""What a node records of itself: one record a round, one a held-out evaluation, one a notable event.

The node writes them to history.jsonl (`history.py`); the live table, the plot, the verdict and `status --json` read
them. A number that could not be measured, or is not finite, is null: nothing here is ever made up to fill a gap.
Counts named "since the last round" sum up over a run, restarts included.
"""

from collections import defaultdict
from collections.abc import Sequence

from msgspec import Struct, field

HASH_PREFIX = 16  # hex digits of a question's sha256 kept in an evaluation: 64 bits, ample for some hundred questions


class RoundRecord(Struct, frozen=True, kw_only=True, tag_field="kind", tag="round"):
    """One optimiser step of this node and what went into it."""

    round: int
    """Number of the round, from 1; rounds before a restart count."""

    time: float
    """When the step ended, in seconds since 1970."""

    policy_version: int
    """Optimiser steps the policy has taken, this one included."""

    reward_first_drawn: float | None = None
    """Mean reward (0 to 1) of the groups the node drew FIRST, before any filter, refill or resampling. The only reward
    that says how good the policy is."""

    reward_after_selection: float | None = None
    """Mean reward over the training set. It rises by selection alone, also where nothing is learnt: never a claim."""

    groups_drawn: int = 0
    """Groups this node sampled since the last round (B of them, and more where it resampled, or where
    there was nothing to train on meanwhile)."""

    groups_published: int = 0
    """Own groups published since the last round (S of them)."""

    local_groups: int = 0
    """Own groups in the training set; above I where they filled a shortage."""

    external_groups: int = 0
    """Groups of others in the training set; at most J."""

    informative_groups: int = 0
    """Groups of the training set whose rewards are not all equal: only these move the policy."""

    shortage: int = 0
    """How many usable external groups were missing to J."""

    external_producers: dict[str, int] = {}
    """Groups in the training set by the peer that sampled them."""

    staleness_local: float | None = None
    """Mean number of policy versions between sampling and training of the own groups."""

    staleness_max: int | None = None
    """Most policy versions between the sampling of a token and training on it, over the own groups; `max_staleness`
    bounds it."""

    mixed_completions: int = 0
    """Own completions in the training set during whose sampling new weights arrived."""

    wait_seconds: float | None = None
    """How long the trainer had nothing to do since the last round, because own groups were still being sampled, or
    there was nothing to train on."""

    sync_stall_seconds: float | None = None
    """How long sampling stood still for the newest exchange of weights; null where the engine shares the trainer's."""

    age_external_seconds: float | None = None
    """Mean age of the external groups when they were trained on, by their senders' clocks."""

    delta_logprob_local: float | None = None
    """Mean |log-prob at sampling - log-prob in the trainer| a token of the own groups. Near 0 where the engine
    computes as the trainer does; it grows with staleness."""

    grad_norm: float | None = None
    """Norm of the gradient before it is scaled down to `max_grad_norm`."""

    grad_norm_local: float | None = None
    """Norm of the part of the gradient that comes from own groups."""

    grad_norm_external: float | None = None
    """Norm of the part of the gradient that comes from others' groups."""

    producer_gradients: dict[str, float] = {}
    """Gradient norm of each producer's groups; empty unless `training.producer_gradients` is set."""

    loss: float | None = None
    """Value of the loss. Its size says little: the advantages of a group sum to zero."""

    tokens_sampled: int = 0
    """Tokens sampled since the last round."""

    tokens_per_second: float | None = None
    """Tokens sampled a second of sampling."""

    sample_seconds: float | None = None
    """Seconds spent sampling since the last round."""

    step_seconds: float | None = None
    """Seconds of the optimiser step, forward and backward passes included."""

    round_seconds: float | None = None
    """Seconds from the end of the last step to the end of this one."""

    bytes_in: int = 0
    """Bytes of batches received since the last round; the DHT's and gossip's own traffic comes on top."""

    bytes_out: int = 0
    """Bytes of batches sent since the last round; the DHT's and gossip's own traffic comes on top."""

    peers: int = 0
    """Peers of this swarm that were heard of within the last epochs."""

    groups_accepted: int = 0
    """External groups verified and taken into the pool since the last round."""

    groups_ignored: int = 0
    """External groups left aside since the last round without blame: duplicate, stale, unknown task, ..."""

    groups_rejected: int = 0
    """External groups refused since the last round because no honest node sends them. Forged, malformed and
    oversized envelopes are refused before their groups are counted."""

    entropy_sampled: float | None = None
    """Mean of -log-prob (nats) over the tokens that this node sampled since the last round: an estimate of the
    policy's entropy that needs no group with an advantage. Falling to 0 means collapse."""

    any_right: float | None = None
    """Share of the own groups since the last round with any right answer: pass@L."""

    repeated: float | None = None
    """Share of the own completions since the last round whose text an own completion before had."""

    text_logprob: float | None = None
    """Mean log-prob (nats) a token of 64 fixed texts of no task; measured in some rounds only."""

    trainer: dict[str, float] = {}
    """Further metrics of the trainer, by the names in docs/operations.md."""


class QuestionScore(Struct, frozen=True, array_like=True):
    """Mean score of one held-out question; three values a line, since an evaluation holds hundreds."""

    task: str
    sha256: str  # its first HASH_PREFIX hex digits
    score: float  # mean over the samples, 0 to 1


class EvalRecord(Struct, frozen=True, kw_only=True, tag_field="kind", tag="eval"):
    """One evaluation on the held-out questions, always the same ones with the same sampling seed."""

    round: int
    """Rounds taken before this evaluation; 0 is the start."""

    time: float
    """When it ended, in seconds since 1970."""

    policy_version: int
    """Optimiser steps of the policy that was evaluated."""

    mean: float
    """Mean score over all questions, 0 to 1."""

    scores: dict[str, float]
    """Mean score of each task."""

    questions: int
    """Held-out questions asked."""

    samples: int
    """Completions a question."""

    per_question: list[QuestionScore]
    """Every question with its score, so that two evaluations can be compared in pairs."""

    left_out: list[str] = []
    """Tasks of the mixture with too few distinct held-out questions to report."""

    seconds: float | None = None
    """How long the evaluation took."""


class EventRecord(Struct, frozen=True, kw_only=True, tag_field="kind", tag="event"):
    """Something worth remembering that is no round: started, resumed, joined, alone, checkpoint, stopped, ..."""

    event: str
    """Short name of the event."""

    time: float
    """When, in seconds since 1970."""

    round: int = 0
    """Rounds taken by then."""

    text: str = ""
    """What a person should know about it."""

    values: dict[str, int | float | str] = field(default_factory=dict)
    """Further values."""


Record = RoundRecord | EvalRecord | EventRecord


def eval_record(
    scores: Sequence[QuestionScore],
    *,
    round: int,
    time: float,
    policy_version: int,
    samples: int,
    left_out: Sequence[str] = (),
    seconds: float | None = None,
) -> EvalRecord:
    """An evaluation from the mean score of each question; `mean` weighs questions, not tasks, equally.

    Raises ValueError without questions: an empty evaluation has no score.
    """
    if not scores:
        raise ValueError("an evaluation needs at least one held-out question")
    tasks: dict[str, list[float]] = defaultdict(list)
    for score in scores:
        tasks[score.task].append(score.score)
    return EvalRecord(
        round=round,
        time=time,
        policy_version=policy_version,
        mean=sum(score.score for score in scores) / len(scores),
        scores={task: sum(values) / len(values) for task, values in sorted(tasks.items())},
        questions=len(scores),
        samples=samples,
        per_question=list(scores),
        left_out=list(left_out),
        seconds=seconds,
    )
