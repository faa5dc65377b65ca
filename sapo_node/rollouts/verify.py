"""Verification on arrival: which groups of a stranger's batch this node may train on, and with which rewards.

`codec.py` has already settled form, size and signature. Here every group is held against what this node computes
itself: the seed from the sender's key, the question and the truth from the coordinates, the rewards from the texts.
Nothing of the sender's judgement is used; there is none on the wire.

Three outcomes. *accept*: into the pool. *ignore*: of no use here, and no fault that could be told from bad luck
(duplicate, stale, another library version). *reject*: no honest node sends this, so the sender's score falls.

Work is bounded. First come the checks that cost nothing, for the whole batch; one reject there and nothing of the batch
is judged. What is left goes to the scorers one group after another, within one deadline, and the first group that costs
a scorer is the last one of its batch. Otherwise a few kilobytes of answers that are slow to judge would stop a node. A
batch has a budget of computing as well, and a smaller one for questions that come to nothing. Who uses them up is not
blamed: how long a question takes depends on this machine, and what comes to nothing may be an honest peer's whose
library differs, which is for the quarantine to hear.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Final, Literal, Protocol

from msgspec import Struct

from sapo_node.config import TrainingSection
from sapo_node.rollouts.codec import Opened
from sapo_node.rollouts.pool import NewGroup, drawn_at
from sapo_node.rollouts.quarantine import Quarantine
from sapo_node.rollouts.schema import Batch, Group, TaskRef
from sapo_node.swarm.protocol import MAX_COMPLETIONS, MAX_EPOCHS_AHEAD, epoch_of, question_seed
from sapo_node.tasks import catalog, verifiers
from sapo_node.tasks.base import Judged, TaskRefused, TaskSpec, config_hash, is_eval_question
from sapo_node.tasks.mixture import Mixture
from sapo_node.tasks.scoring import CostlyGroup, EvalSeeds
from sapo_node.training.base import TrainCompletion
from sapo_node.training.sapo import informative, teaches
from sapo_node.workers import WorkerError

BATCH_SECONDS: Final = 20.0
"""After which no further group of a batch is begun. The one in progress is judged to its end: to break it off would
cost the scorer that is at it, and its sender nothing."""

MOST_BATCH_SECONDS: Final = 3
"""Of these, after which it is broken off all the same. Far longer than it takes an answer to hang two scorers that no
timer can end (5 s each, and a restart), so that its sender is blamed."""

MAX_QUESTION_BYTES: Final = 32 * 1024
"""Longer questions are ignored whatever the scorers allow: no prompt holds them."""

BATCH_CPU_SECONDS: Final = 6.0
"""Of a scorer's computing, after which what is left of a batch is out of time: other peers wait behind it. The slowest
task that is usual (countdown) takes 50 to 70 ms a group here, so some 2 s for a batch of 32 groups."""

VAIN_CPU_SECONDS: Final = 3.0
"""Of these, on questions that came to nothing, after which what is left of a batch is out of time too. Honest senders
waste none unless their library differs; then a batch of 32 groups of the slowest task that is usual (countdown) takes
1.6 to 2.3 s here, and all of this on a machine half as fast."""

MAX_NOT_GENERATED: Final = 3
"""So many questions of a batch that cannot be generated are too costly as well: their sender cannot have asked them."""

Outcome = Literal["accept", "ignore", "reject"]


class Reason(StrEnum):
    """Why a group was treated as it was. Fixed words: what a sender wrote never reaches a log through them."""

    ACCEPTED = "accepted"

    OWN = "own"  # our own batch, come back
    UNKNOWN_TASK = "unknown task"  # not offered here, or not in the mixture, or a data set that this node does not have
    OTHER_VERSION = "other version"  # of reasoning-gym, or of a data set of this name
    STALE = "stale"
    SKEWED = "from the future"
    EVALUATION = "evaluation question"
    LICENCE = "licence not accepted"  # of the sender's model, by this node's owner
    ALARM = "reward hack alarm"  # of the task, while it lasts: `monitor/alarms.py`
    QUARANTINE = "task in quarantine"  # trusted peers compute other questions than this node: `quarantine.py`
    DUPLICATE = "duplicate"
    BESIDE_REJECTED = "beside a rejected group"
    NOT_GENERATED = "question could not be generated"
    OTHER_QUESTION = "other question"  # same coordinates, another hash: library versions differ
    LONG_QUESTION = "question too long"
    UNSCORED = "scorer failed"
    LATE = "out of time"

    WRONG_HASH = "configuration differs from its hash"
    OUT_OF_BOUNDS = "configuration out of bounds"
    COSTLY = "too costly to judge"  # an answer, or the question, took a scorer's whole time or memory, or there is none

    @property
    def outcome(self) -> Outcome:
        """What the reason means for the group and, if it is a reject, for its sender."""
        if self is Reason.ACCEPTED:
            return "accept"
        return "reject" if self in (Reason.WRONG_HASH, Reason.OUT_OF_BOUNDS, Reason.COSTLY) else "ignore"


class Judge(Protocol):
    """What is needed of the scorer pool."""

    async def judge(self, spec: TaskSpec, seed: int, texts: list[str], *, strict: bool) -> Judged:
        """Regenerate a question and score answers to it. Raises TaskRefused or WorkerError.

        A strict job raises CostlyGroup at the first fault that the group itself caused.
        """
        ...

    async def judge_row(
        self, question: str, answer: str, verifier: verifiers.Verifier, texts: list[str], *, strict: bool
    ) -> Judged:
        """Score answers to a row of a data set. Raises WorkerError, and CostlyGroup as above."""
        ...


class Known(Protocol):
    """What is needed of the pool."""

    async def known(self, producer: str, groups: Sequence[Group]) -> list[bool]:
        """For each of a peer's groups, whether its coordinates, or lately its question, were added before."""
        ...


class Verified(Struct, frozen=True, kw_only=True):
    """What became of a batch."""

    producer: str  # peer id
    content_id: bytes
    reasons: list[Reason]  # one a group, in the batch's order
    groups: list[NewGroup]  # the accepted ones, for `Pool.add_external`
    quarantined: list[str] = []  # tasks whose quarantine this batch began

    @property
    def outcome(self) -> Outcome:
        """Of the batch: reject if anything in it is, accept if anything in it is."""
        outcomes = {reason.outcome for reason in self.reasons}
        return "reject" if "reject" in outcomes else "accept" if "accept" in outcomes else "ignore"

    @property
    def counts(self) -> Counter[Outcome]:
        """Groups by outcome."""
        return Counter(reason.outcome for reason in self.reasons)

    @property
    def usable(self) -> int:
        """Accepted groups that can move the policy: what a peer's score rises with."""
        return sum(group.teaches and informative(group.rewards) for group in self.groups)


class _Spent(Struct):
    """What a batch has cost so far, in seconds of a scorer's computing."""

    cpu: float = 0.0
    vain: float = 0.0  # of these, on questions that came to nothing
    not_generated: int = 0

    def add(self, cpu: float, reason: Reason | None = None) -> None:
        """One more group was judged, or came to nothing for this reason."""
        self.cpu += cpu
        self.vain += cpu if reason else 0.0
        self.not_generated += reason is Reason.NOT_GENERATED

    @property
    def used_up(self) -> bool:
        """Whether nothing is left for a further group."""
        return self.cpu > BATCH_CPU_SECONDS or self.vain > VAIN_CPU_SECONDS

    @property
    def impossible(self) -> bool:
        """Whether its sender cannot have asked what it says it asked."""
        return self.not_generated >= MAX_NOT_GENERATED


class Verifier:
    """Checks batches against one node's settings and data sets."""

    def __init__(
        self,
        *,
        swarm: str,
        public_key: bytes,
        accept: Literal["offered", "mixture"],
        mixture: Mixture,
        max_age_seconds: float,
        judge: Judge,
        known: Known,
        quarantine: Quarantine | None = None,
        batch_seconds: float = BATCH_SECONDS,
        max_completions: int = MAX_COMPLETIONS,
        barred: Callable[[str, bytes, str], bool] = lambda task, settings, producer: False,
        training: TrainingSection | None = None,
    ) -> None:
        """`max_completions` of a group are judged and kept, the first ones: a larger group than this node's own costs
        more and would weigh more. Without a `quarantine` no task is ever switched off by what peers say; groups of
        tasks that are `barred`, by name, hash of settings and producer, are ignored. What a group can teach is told by
        `training`, the defaults without it."""
        self._swarm, self._public_key = swarm, public_key
        self._max_age = max_age_seconds
        self._judge, self._known, self._quarantine = judge, known, quarantine
        self._batch_seconds = batch_seconds
        self._max_completions = max_completions
        self._barred = barred
        self._training = training or TrainingSection()
        mixed = {entry.spec.name for entry in mixture.entries if entry.rows is None}
        self._generated = set(catalog.OFFERED) if accept == "offered" else mixed
        self._mixed = [entry.spec for entry in mixture.entries if entry.rows is None]
        self._eval_seeds: dict[str, EvalSeeds] = {}  # by task, made when the first group of it comes
        self._datasets = {(e.spec.name, e.spec.version): e for e in mixture.entries if e.rows is not None}

    async def verify(self, opened: Opened, now: float) -> Verified:
        """Check a batch that `codec.open_batch` opened; `now` is in seconds since 1970.

        Never raises for what a sender did. Raises PoolError when the pool fails.
        """
        batch = opened.batch
        await self._know_eval_seeds(batch)
        reasons = [self._first_look(opened, group, now) for group in batch.groups]
        if any(reason and reason.outcome == "reject" for reason in reasons):
            reasons = [reason or Reason.BESIDE_REJECTED for reason in reasons]
        if not all(reasons):
            known = await self._known.known(batch.peer_id, batch.groups)
            reasons = [
                reason or (Reason.DUPLICATE if old else None) for reason, old in zip(reasons, known, strict=True)
            ]

        accepted: list[NewGroup] = []
        spent, clock = _Spent(), asyncio.get_running_loop().time
        end = clock() + self._batch_seconds
        try:
            async with asyncio.timeout(MOST_BATCH_SECONDS * self._batch_seconds):
                for i, group in enumerate(batch.groups):
                    if reasons[i] is None and any(group.question_sha256 == one.question_sha256 for one in accepted):
                        reasons[i] = Reason.DUPLICATE  # one question under many coordinates
                    elif reasons[i] is None and not spent.used_up and clock() < end:
                        judged = await self._judged(opened, group, spent)
                        judged = Reason.COSTLY if spent.impossible else judged
                        reasons[i] = judged if isinstance(judged, Reason) else Reason.ACCEPTED
                        if isinstance(judged, NewGroup):
                            accepted.append(judged)
                        if judged in (Reason.COSTLY, Reason.UNSCORED):
                            rest = Reason.BESIDE_REJECTED if judged is Reason.COSTLY else Reason.UNSCORED
                            reasons = [reason or rest for reason in reasons]
                            break
        except TimeoutError:
            pass  # what has no reason yet is out of time
        if Reason.COSTLY in reasons:
            accepted = []
            reasons = [Reason.BESIDE_REJECTED if reason is Reason.ACCEPTED else reason for reason in reasons]
        settled = [reason or Reason.LATE for reason in reasons]
        return Verified(
            producer=batch.peer_id,
            content_id=opened.content_id,
            reasons=settled,
            groups=accepted,
            quarantined=self._compared(batch, settled, now),
        )

    def _compared(self, batch: Batch, reasons: list[Reason], now: float) -> list[str]:
        """Tell the quarantine with whom this node agrees; returns the tasks that it switches off for that."""
        began: list[str] = []
        for group, reason in zip(batch.groups, reasons, strict=True):
            if self._quarantine is None or group.task.source == "dataset":
                continue  # rows differ with the file, and its digest is their version
            if reason is Reason.ACCEPTED:
                self._quarantine.agreed(group.task.name, batch.peer_id, now)
            elif reason is Reason.OTHER_QUESTION and self._quarantine.disagreed(group.task.name, batch.peer_id, now):
                began.append(group.task.name)
        return began

    def _first_look(self, opened: Opened, group: Group, now: float) -> Reason | None:
        """Everything that needs no scorer, the cheapest first; None if the group is worth judging."""
        task = group.task
        if opened.public_key == self._public_key:
            return Reason.OWN
        if config_hash(task.config) != task.config_hash:
            return Reason.WRONG_HASH
        if reason := self._unacceptable(task):
            return reason
        if task.epoch > epoch_of(now) + MAX_EPOCHS_AHEAD:
            return Reason.SKEWED
        if now - drawn_at(task, group.sampled_at) > self._max_age:
            return Reason.STALE
        if is_eval_question(group.question_sha256):  # the claim is enough: a false one fails against ours later
            return Reason.EVALUATION
        if self._has_eval_seed(opened.public_key, task):
            return Reason.EVALUATION
        if self._barred(task.name, task.config_hash, opened.batch.peer_id):
            return Reason.ALARM
        if self._quarantine and self._quarantine.bars(task.name, opened.batch.peer_id, now):
            return Reason.QUARANTINE
        return None

    def _unacceptable(self, task: TaskRef) -> Reason | None:
        """Whether this node takes this task, in this version and configuration."""
        if task.source == "dataset":
            if (task.name, task.version) in self._datasets:
                return Reason.OUT_OF_BOUNDS if task.config else None
            return Reason.OTHER_VERSION if any(task.name == name for name, _ in self._datasets) else Reason.UNKNOWN_TASK
        if task.name not in self._generated:
            return Reason.UNKNOWN_TASK
        if task.version != catalog.library_version():
            return Reason.OTHER_VERSION
        try:
            catalog.validate(task.name, task.config)
        except TaskRefused:  # its text quotes the sender
            return Reason.OUT_OF_BOUNDS
        return None

    async def _know_eval_seeds(self, batch: Batch) -> None:
        """Compute the seeds that `_has_eval_seed` asks for, once a task: 24 ms of hashing a task and setting, so not in
        the event loop, where a batch of all tasks would stop everything for most of a second."""
        names = {group.task.name for group in batch.groups if group.task.source != "dataset"} & self._generated
        for name in sorted(names - set(self._eval_seeds)):
            plain = TaskSpec(source="reasoning_gym", name=name, version=catalog.library_version(), config={})
            specs = {spec.config_hash: spec for spec in [plain, *self._mixed] if spec.name == name}
            self._eval_seeds[name] = await asyncio.to_thread(EvalSeeds, list(specs.values()))

    def _has_eval_seed(self, public_key: bytes, task: TaskRef) -> bool:
        """Whether coordinates lead to a seed that evaluation may look at, with this node's settings of the task or with
        none. Seeds are short enough to be searched for, and with settings that change how a question is written, such
        a seed asks an evaluation question in other words."""
        if task.source == "dataset":
            return False  # rows to evaluate with have no seed
        return _seed(self._swarm, public_key, task) in self._eval_seeds[task.name]

    async def _judged(self, opened: Opened, group: Group, spent: _Spent) -> NewGroup | Reason:
        """Regenerate and score in one call; the group for the pool, or why not."""
        task = group.task
        completions = group.completions[: self._max_completions]
        seed = _seed(self._swarm, opened.public_key, task)
        try:
            judged = await self._score(task, seed, [completion.text for completion in completions])
        except TaskRefused as error:
            spent.add(error.cpu, Reason.NOT_GENERATED)
            return Reason.NOT_GENERATED
        except CostlyGroup:
            return Reason.COSTLY
        except WorkerError:
            return Reason.UNSCORED
        if judged.question.sha256 != group.question_sha256:
            spent.add(judged.cpu, Reason.OTHER_QUESTION)
            return Reason.OTHER_QUESTION
        spent.add(judged.cpu)
        if len(judged.question.text.encode()) > MAX_QUESTION_BYTES:
            return Reason.LONG_QUESTION
        return NewGroup(
            task=task,
            question=judged.question.text,
            question_sha256=judged.question.sha256,
            completions=[TrainCompletion(text=c.text, finish=c.finish) for c in completions],
            rewards=judged.rewards,
            sampled_at=group.sampled_at,
            policy_version=group.policy_version,
            first_drawn=False,
            truth=judged.truth,
            teaches=teaches(judged.rewards, [c.finish == "length" for c in completions], self._training),
        )

    async def _score(self, task: TaskRef, seed: int, texts: list[str]) -> Judged:
        entry = self._datasets.get((task.name, task.version))
        if task.source == "dataset" and entry and entry.rows:
            row = entry.rows.row(seed)
            return await self._judge.judge_row(row.question, row.answer, entry.verifier, texts, strict=True)
        spec = TaskSpec(source=task.source, name=task.name, version=task.version, config=task.config)
        return await self._judge.judge(spec, seed, texts, strict=True)


def _seed(swarm: str, public_key: bytes, task: TaskRef) -> int:
    return question_seed(swarm, public_key, task.epoch, task.name, task.config_hash, task.index)
