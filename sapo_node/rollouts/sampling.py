"""The sampling side of a node: draw tasks, let the policy answer, score, put the groups into the pool, publish some.

One call of `Sampling.draw` is one batch of B tasks (the paper's Algorithm 1), with further groups where the
swarm cannot fill J. Whoever calls it decides when; see `training/rounds.py` for the pace.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from statistics import fmean

import structlog
from msgspec import Struct

from sapo_node.config import NodeConfig
from sapo_node.identity import Identity
from sapo_node.inference.base import InferenceEngine, Sampled, SampledBatch, SamplingParams
from sapo_node.monitor.watch import Unwatched, Watch
from sapo_node.rollouts.pool import NewGroup, Pool
from sapo_node.rollouts.schema import Completion, Group, TaskRef
from sapo_node.swarm.protocol import MAX_TEXT_BYTES, epoch_of, question_seed
from sapo_node.tasks.base import Judged, Question, TaskRefused, TaskSpec, is_eval_question
from sapo_node.tasks.mixture import Entry, Mixture
from sapo_node.tasks.scoring import ScorerPool
from sapo_node.training.base import TrainCompletion

log = structlog.get_logger(__name__)

MAX_DRAW_TRIES = 64  # passes over the mixture for one batch; about one question in ten is withheld for evaluation

Publish = Callable[[list[Group]], Awaitable[None]]
Clock = Callable[[], float]


class Drawn(Struct, frozen=True, kw_only=True):
    """A question with its coordinates."""

    entry: Entry
    ref: TaskRef
    seed: int
    question: Question


class SampledGroups(Struct, frozen=True, kw_only=True):
    """What one batch of sampling brought."""

    ids: list[int]  # rows of the pool
    rewards_first_drawn: list[float]  # mean reward of each group that was drawn first; empty for extra groups
    tokens: int
    seconds: float
    published: int


class NothingToDraw(Exception):
    """The mixture gave no question that may be trained on; the message says why."""


class LostVersion(Exception):
    """The policy went back to a checkpoint after this batch was sampled."""


class Sampling:
    """Draws groups for one node."""

    def __init__(
        self,
        config: NodeConfig,
        identity: Identity,
        mixture: Mixture,
        scorers: ScorerPool,
        engine: InferenceEngine,
        pool: Pool,
        rng: random.Random,
        publish: Publish | None,
        clock: Clock = time.time,
        watch: Watch | None = None,
    ) -> None:
        """`publish` is None for a node without a swarm. `clock` tells seconds since 1970: questions follow from it.
        `watch` sees every group, and says whether they may be shared."""
        self._config = config
        self._identity = identity
        self._mixture = mixture
        self._scorers = scorers
        self._engine = engine
        self._pool = pool
        self._rng = rng
        self._publish = publish
        self._clock = clock
        self._watch = watch or Unwatched()

    async def draw(self, first: int, extra: int) -> SampledGroups:
        """Draw and sample `first` groups that count as first-drawn, and `extra` ones that fill a shortage.

        Raises NothingToDraw, LostVersion, and whatever the engine, the scorers or the pool raise.
        """
        drawn = await self._questions(first + extra)
        params = SamplingParams(
            n=self._config.rollouts.completions_per_task,
            max_tokens=self._config.inference.max_completion_tokens,
            temperature=self._config.inference.temperature,
        )
        batch = await self._engine.sample([one.question.text for one in drawn], params)
        sampled_at, line = self._clock(), self._engine.restarts
        drawn, first, batch = _answered(drawn, first, batch)
        judged = await asyncio.gather(
            *(self._judge(one, group) for one, group in zip(drawn, batch.groups, strict=True))
        )
        kept = [i for i, one in enumerate(judged) if one is not None]
        drawn, first, batch = _only(kept, drawn, first, batch)
        verdicts = [one for one in judged if one is not None]
        groups = [
            _pool_group(one, group, verdict, sampled_at, batch, first_drawn=index < first)
            for index, (one, group, verdict) in enumerate(zip(drawn, batch.groups, verdicts, strict=True))
        ]
        if self._engine.restarts != line:  # while it was judged; from here on the pool's own order forgets it
            raise LostVersion(f"a batch of version {batch.policy_version} is of steps that were lost; it is dropped")
        ids = await self._pool.add_local(self._identity.peer_id, groups, sampled_at)
        self._watch.own(groups)
        published = await self._share(drawn, first, batch, sampled_at)
        return SampledGroups(
            ids=ids,
            rewards_first_drawn=[fmean(verdict.rewards) for verdict in verdicts[:first]],
            tokens=sum(len(one.token_ids) for group in batch.groups for one in group),
            seconds=batch.seconds,
            published=published,
        )

    async def _judge(self, one: Drawn, group: list[Sampled]) -> Judged | None:
        """The group's rewards; None where the question, generated a moment ago, cannot be generated again in time."""
        try:
            return await judge(self._scorers, one.entry, one.seed, [sampled.text for sampled in group])
        except TaskRefused as error:
            log.warning("a group could not be judged and is left out", task=one.entry.spec.name, reason=str(error))
            return None

    async def _questions(self, count: int) -> list[Drawn]:
        """`count` questions of this moment's epoch that evaluation does not withhold."""
        drawn: list[Drawn] = []
        for _ in range(MAX_DRAW_TRIES):
            epoch = epoch_of(self._clock())
            drawn += await self._ask(epoch, await self._coordinates(epoch, count - len(drawn)))
            if len(drawn) >= count:
                return drawn[:count]
        raise NothingToDraw(
            f"the task mixture gave {len(drawn)} of {count} questions in {MAX_DRAW_TRIES} tries: its question spaces "
            "may be almost wholly held out for evaluation, or this 30 s epoch's indices are used up"
        )

    async def _coordinates(self, epoch: int, count: int) -> list[tuple[Entry, int]]:
        """Tasks drawn from the mixture, in order of the draw, each with a fresh index; fewer where none is left."""
        factors = None
        if self._config.tasks.curriculum == "yield":
            factors = self._mixture.factors(await self._pool.yields(self._clock()))
        chosen = self._mixture.choose(count, self._rng, factors)
        fresh = {
            entry: iter(await self._pool.reserve_indices(self._mixture.entries[entry].spec, epoch, times))
            for entry, times in Counter(chosen).items()
        }
        found = [(self._mixture.entries[entry], next(fresh[entry], None)) for entry in chosen]
        return [(entry, index) for entry, index in found if index is not None]

    async def _ask(self, epoch: int, coordinates: list[tuple[Entry, int]]) -> list[Drawn]:
        """The questions at these coordinates that may be trained on."""
        swarm, key = self._config.swarm.name, self._identity.public_key
        seeds = [
            question_seed(swarm, key, epoch, entry.spec.name, entry.spec.config_hash, index)
            for entry, index in coordinates
        ]
        generated = await self._scorers.questions(
            [(entry.spec, seed) for (entry, _), seed in zip(coordinates, seeds, strict=True) if entry.rows is None]
        )
        answers = iter(generated)
        drawn = []
        for (entry, index), seed in zip(coordinates, seeds, strict=True):
            question = next(answers) if entry.rows is None else entry.rows.row(seed).asked()
            if isinstance(question, TaskRefused):
                log.warning("a question could not be generated", task=entry.spec.name, reason=str(question))
            elif not is_eval_question(question.sha256):
                ref = _ref(entry.spec, epoch, index)
                drawn.append(Drawn(entry=entry, ref=ref, seed=seed, question=question))
        return drawn

    async def _share(self, drawn: list[Drawn], first: int, batch: SampledBatch, sampled_at: float) -> int:
        """Publish S of the groups that were drawn first, or all that was drawn where S is not set; how many."""
        if self._publish is None or not self._watch.shares:
            return 0
        wanted = self._config.rollouts.shared_per_round
        shareable = [i for i, one in enumerate(drawn) if one.entry.share and (wanted is None or i < first)]
        # One that is too long for the wire would keep the whole batch from leaving.
        shareable = [i for i in shareable if all(len(one.text.encode()) <= MAX_TEXT_BYTES for one in batch.groups[i])]
        if wanted is not None and wanted < len(shareable):
            shareable = self._rng.sample(shareable, wanted)
        groups = [_wire_group(drawn[i], batch.groups[i], sampled_at, batch) for i in shareable]
        if groups:
            await self._publish(groups)
        return len(groups)


async def judge(scorers: ScorerPool, entry: Entry, seed: int, texts: list[str]) -> Judged:
    """Strict rewards of answers to the question of a seed."""
    if entry.rows is None:
        return await scorers.judge(entry.spec, seed, texts)
    row = entry.rows.row(seed)
    return await scorers.judge_row(row.question, row.answer, entry.verifier, texts)


def _answered(drawn: list[Drawn], first: int, batch: SampledBatch) -> tuple[list[Drawn], int, SampledBatch]:
    """Without the questions that the engine left unanswered because their prompt is too long."""
    kept = [i for i, group in enumerate(batch.groups) if group]
    if len(kept) == len(drawn):
        return drawn, first, batch
    left_out = sorted({one.entry.spec.name for one, group in zip(drawn, batch.groups, strict=True) if not group})
    log.warning("prompts beyond inference.max_prompt_tokens were left out", tasks=left_out)
    if not kept:
        raise NothingToDraw(f"every prompt of {', '.join(left_out)} exceeds inference.max_prompt_tokens; raise it")
    return _only(kept, drawn, first, batch)


def _only(
    kept: list[int], drawn: list[Drawn], first: int, batch: SampledBatch
) -> tuple[list[Drawn], int, SampledBatch]:
    """Those questions and their groups alone, and how many of the first ones are among them."""
    groups = [batch.groups[i] for i in kept]
    rest = SampledBatch(groups=groups, policy_version=batch.policy_version, seconds=batch.seconds)
    return [drawn[i] for i in kept], sum(i < first for i in kept), rest


def _ref(spec: TaskSpec, epoch: int, index: int) -> TaskRef:
    return TaskRef(
        source=spec.source,
        version=spec.version,
        name=spec.name,
        config_hash=spec.config_hash,
        config=spec.config,
        epoch=epoch,
        index=index,
    )


def _pool_group(
    one: Drawn, group: list[Sampled], verdict: Judged, sampled_at: float, batch: SampledBatch, *, first_drawn: bool
) -> NewGroup:
    completions = [
        TrainCompletion(
            text=s.text,
            finish=s.finish,
            token_ids=s.token_ids,
            logprobs=s.logprobs,
            policy_versions=s.policy_versions,
        )
        for s in group
    ]
    return NewGroup(
        task=one.ref,
        question=one.question.text,
        question_sha256=one.question.sha256,
        completions=completions,
        rewards=verdict.rewards,
        sampled_at=sampled_at,
        policy_version=oldest(group, batch),
        first_drawn=first_drawn,
        truth=verdict.truth,
    )


def _wire_group(one: Drawn, group: list[Sampled], sampled_at: float, batch: SampledBatch) -> Group:
    return Group(
        task=one.ref,
        question_sha256=one.question.sha256,
        completions=[Completion(text=s.text, finish=s.finish, n_tokens=len(s.token_ids)) for s in group],
        sampled_at=sampled_at,
        policy_version=oldest(group, batch),
    )


def oldest(group: list[Sampled], batch: SampledBatch) -> int:
    """The oldest policy version under which a token of the group was sampled: what its staleness is counted from."""
    return min((version for one in group for version in one.policy_versions), default=batch.policy_version)
