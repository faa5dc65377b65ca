"""The two loops of a node that learns, joined by the pool.

`sampling_loop` draws batches of groups and may run `max_staleness` batches ahead. `training_loop` takes one batch after
another: it asks the SAPO sampler which own and external groups make the round (`sapo.plan_round`), draws what is
missing, counts the uses durably, and steps. A round is one optimiser step; nobody else's round matters.

Where sampling has an engine of its own and that is down, rounds are taken on what there is: J external groups, and own
ones that are left. A round on nothing is none: no step is taken, the node goes on sampling and sharing (others may wait
for its groups as it does for theirs), and plans again.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from statistics import fmean
from typing import Final, TypeVar

import structlog
from msgspec import Struct, structs

from sapo_node.config import NodeConfig, TrainingSection
from sapo_node.errors import SapoError
from sapo_node.monitor.metrics import RoundRecord
from sapo_node.monitor.watch import Unwatched, Watch
from sapo_node.rollouts.pool import Pool, PoolError
from sapo_node.rollouts.sampling import Clock, LostVersion, NothingToDraw, SampledGroups, Sampling
from sapo_node.tasks.base import TaskRefused
from sapo_node.training.base import StepResult, TrainGroup
from sapo_node.training.sapo import Candidate, RoundPlan, informative, plan_round
from sapo_node.training.supervised import EngineLost, Policy, PolicyLost
from sapo_node.workers import WorkerError

log = structlog.get_logger(__name__)

T = TypeVar("T")

MAX_EXTRA_DRAWS: Final = 8
"""Passes over `need_local` and `resample` in one round. A task that is always or never solved would otherwise be drawn
for ever; the round then goes on with what it has."""

MAX_FAULTS: Final = 10  # in a row, without a round between them; with the pauses below about three minutes
LONGEST_PAUSE_SECONDS: Final = 30.0
EXPIRE_EVERY_ROUNDS: Final = 10
LOOK_SECONDS: Final = 1.0  # between two looks at whether a round can be taken, while there is nothing to train on

NOTHING_DRAWN: Final = SampledGroups(ids=[], rewards_first_drawn=[], tokens=0, seconds=0.0, published=0)
"""Stands for a batch in rounds that are taken while the engine is down."""

WAIT_SECONDS: Final = 0.2  # between two plans under `on_shortage: wait`

MAX_LOOKS: Final = 8
"""Times in a round that groups of others that cannot be trained on are found among the chosen ones and replaced: as
many as it takes to go through a whole stock (`arrivals.STOCK_ROUNDS`) of such groups. Then the round goes on with those
that were looked at. A round that waits has one more for each WAIT_SECONDS."""

Standing = Callable[[str, float], tuple[str, bool]]
"""By peer id and time: whose share a producer's groups are counted for, and whether its work is known for a day."""


FAULTS: Final = (PolicyLost, LostVersion, NothingToDraw, TaskRefused, WorkerError, PoolError)
"""What a batch or a round may fail on without ending the node: a worker that is restarted, a question that cannot be
generated, an epoch whose indices are used up, a disk that is full for a while."""


class Drawn(Struct):
    """What was sampled since the last round: more than its own batch, where some could not be trained on."""

    groups: int = 0
    published: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, batch: SampledGroups) -> None:
        """Count a batch in."""
        self.groups += len(batch.ids)
        self.published += batch.published
        self.tokens += batch.tokens
        self.seconds += batch.seconds


class RoundsFailed(SapoError):
    """Batch after batch or round after round failed."""


class RoundEvents(Struct, frozen=True):
    """What the training loop tells the node, besides records."""

    recorded: Callable[[RoundRecord], Awaitable[None]]  # after each round
    network: Callable[[], dict[str, int]]  # counters of the swarm side, as RoundRecord's fields, since the last call


class Rounds:
    """The rounds of one node."""

    def __init__(
        self,
        config: NodeConfig,
        policy: Policy,
        sampling: Sampling,
        pool: Pool,
        rng: random.Random,
        stop: asyncio.Event,
        events: RoundEvents,
        clock: Clock = time.time,
        standing: Standing | None = None,
        watch: Watch | None = None,
        useless: Callable[[str, int, float], None] | None = None,
    ) -> None:
        """`clock` tells seconds since 1970, as groups are dated. Without `standing` every producer is a newcomer that
        counts by itself. `watch` says how much is taken of others, and what not. `useless` is told whose groups, and
        how many, cannot be trained on."""
        self._config = config
        self._policy = policy
        self._sampling = sampling
        self._pool = pool
        self._rng = rng
        self._stop = stop
        self._events = events
        self._clock = clock
        self._standing = standing
        self._useless = useless or (lambda producer, groups, now: None)
        self._watch = watch or Unwatched()
        ahead = 1 + config.training.staleness
        self._room = asyncio.Semaphore(ahead)
        self._drawn: asyncio.Queue[SampledGroups] = asyncio.Queue(maxsize=ahead)
        self._last_end = time.monotonic()
        self._faults = 0  # in a row
        self.waiting = ""  # a sentence for people on why no round is taken now
        self._since = Drawn()
        self._waited = 0.0  # seconds for which the trainer had nothing to do since the last round
        self._settling: asyncio.Task[None] | None = None
        self._attempts = 0  # rounds begun by this process; unlike versions it never goes back

    @property
    def _training(self) -> TrainingSection:
        """The settings of a round, with J as an alarm may leave it."""
        return self._watch.limit(self._config.training)

    async def sampling_loop(self) -> None:
        """Draw batches until the node stops."""
        while not self._stop.is_set():
            if await until(self._stop, self._room.acquire()) is None:
                return
            await until(self._stop, self._policy.until_it_samples())
            try:
                batch = await self.draw()
            except EngineLost as error:  # not counted: the engine comes back when it can, with a pause that grows
                self._room.release()
                if not self._stop.is_set():
                    log.warning("a batch could not be sampled", reason=str(error))
                continue
            except FAULTS as error:
                self._room.release()
                await self._bear("a batch could not be sampled", error)
                continue
            self._drawn.put_nowait(batch)  # never full: the semaphore counts what is in it

    async def draw(self) -> SampledGroups:
        """Sample the next batch."""
        return await self._sampling.draw(self._config.tasks_per_round, await self._expected_shortage())

    async def training_loop(self) -> None:
        """Take rounds until the node stops or has taken `node.max_rounds`."""
        limit = self._config.node.max_rounds
        while not self._stop.is_set() and (limit == 0 or self._policy.version < limit):
            began = time.monotonic()
            batch = await until(self._stop, self._next_batch())
            if batch is None:
                break
            self._waited += time.monotonic() - began
            try:
                await self.take(batch)
            except FAULTS as error:
                await self._bear("a round could not be taken", error)
        self.waiting = ""
        self._stop.set()

    async def _bear(self, what: str, error: Exception) -> None:
        """Log a fault and pause, longer each time in a row. Raises RoundsFailed when it does not pass."""
        if self._stop.is_set():
            return  # the stop interrupts what is being sampled
        self._faults += 1
        log.warning(what, reason=str(error), in_a_row=self._faults)
        if self._faults >= MAX_FAULTS:
            raise RoundsFailed(f"{what}, {self._faults} times in a row: {error}") from error
        await until(self._stop, asyncio.sleep(min(LONGEST_PAUSE_SECONDS, 2.0 ** (self._faults - 1))))

    async def _next_batch(self) -> SampledGroups:
        """The next batch that was drawn. While the engine is down: NOTHING_DRAWN, once there are J groups of others."""
        while True:
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    return await self._drawn.get()
            except TimeoutError:
                self._policy.check()
                wanted = self._training.external_groups
                if not self._policy.can_sample and wanted and await self._usable_external() >= wanted:
                    return NOTHING_DRAWN

    async def take(self, batch: SampledGroups) -> None:
        """One round that begins with this batch; where there is nothing to train on, a pause and no round."""
        released = batch is NOTHING_DRAWN  # which took no room
        try:
            batch, plan, chosen = await self._plan(batch)
            self._since.add(batch)
            self._attempts += 1
            counts_for = {candidate.group_id: candidate.counts_for for candidate in chosen}
            taken = await self._pool.consume([*plan.local_ids, *plan.external_ids], self._attempts)
            groups = [structs.replace(group, source=counts_for[group.group_id]) for group in taken]
            if plan.discarded_ids:
                await self._pool.discard(plan.discarded_ids)
            if not groups:
                await self._let_pass(batch)
                return
            if self._policy.takes_turns:
                # The next batch's questions are drawn while this step runs; its completions wait for the new version.
                self._room.release()
                released = True
            version = self._policy.version
            result = await self._policy.step(groups)
            if not released:
                released = True
                await self._release_when_settled()
        finally:
            if not released:
                self._room.release()
        self._faults = 0
        self.waiting = ""
        record = self._record(batch, plan, chosen, groups, version, result)
        await self._events.recorded(record)
        if record.round % EXPIRE_EVERY_ROUNDS == 0:
            await self._pool.expire(self._clock(), self._policy.version, self._config.training.staleness)

    async def _let_pass(self, batch: SampledGroups) -> None:
        """Wait a little for something to train on. The batch had its turn: without steps its groups would never be too
        old, and in the end fill the pool."""
        if not self.waiting:
            own = "no own ones" if self._training.local_groups else "training.local_groups is 0"
            self.waiting = f"there is nothing to train on: no usable groups of others are here, and {own}"
            log.warning("no round is taken until there is something to train on", reason=self.waiting)
        await self._pool.consume(batch.ids, self._attempts)
        began = time.monotonic()
        await until(self._stop, asyncio.sleep(LOOK_SECONDS))
        self._waited += time.monotonic() - began

    async def _release_when_settled(self) -> None:
        """Let the next batch be sampled once the engine has this step's weights; the next step need not wait for that,
        unless sampling may not run ahead at all."""

        async def settle() -> None:
            try:
                await self._policy.settled()
            finally:
                self._room.release()

        if self._settling is not None:
            await until(self._stop, asyncio.shield(self._settling))
        self._settling = asyncio.create_task(settle(), name="settle")
        if self._config.training.staleness == 0:
            await until(self._stop, asyncio.shield(self._settling))

    async def _plan(self, batch: SampledGroups) -> tuple[SampledGroups, RoundPlan, list[Candidate]]:
        """The round's plan, after drawing (or waiting for) what it says is missing; within bounds."""
        give_up = time.monotonic() + self._config.training.shortage_wait_seconds
        draws = looks = 0
        fit: set[int] = set()  # groups of others that were looked at; no other is trained on
        while True:
            training = self._training
            now = self._clock()
            local = await self._pool.local_candidates(now, self._policy.version, training.staleness)
            external = [c for c in await self._external(now) if looks < MAX_LOOKS or c.group_id in fit]
            # Only this strategy asks for them.
            own = await self._pool.own_rewards(now) if training.strategy == "novelty" else {}
            plan = plan_round(training, self._config.rollouts, local, external, self._rng, own)
            if not fit.issuperset(plan.external_ids):
                unfit = await self._drop_unfit([i for i in plan.external_ids if i not in fit], now)
                fit.update(i for i in plan.external_ids if i not in unfit)
                if unfit:
                    looks += 1
                    continue
            missing = plan.need_local + plan.resample
            if missing and draws < MAX_EXTRA_DRAWS and self._policy.can_sample and not self._stop.is_set():
                began = time.monotonic()
                batch = _with_extra(batch, await self._sampling.draw(0, missing))
                self._waited += time.monotonic() - began
                draws += 1
            elif plan.wait and time.monotonic() < give_up and not self._stop.is_set():
                await until(self._stop, asyncio.sleep(WAIT_SECONDS))
                looks = max(0, looks - 1)  # what arrives meanwhile is looked at too
            else:
                return batch, plan, [*local, *external]

    async def _drop_unfit(self, ids: list[int], now: float) -> set[int]:
        """Remove, and return, those of these groups of others that only the policy's tokenizer shows to be too long.
        Before their use counts, so that others take their places. One that the worker does not survive may be any of
        them, so all are removed: as in a step, none has more than one try."""
        groups = await self._pool.look(ids)
        try:
            unfit = await self._policy.unfit(groups)
        except (PolicyLost, WorkerError, SapoError):
            await self._pool.discard(ids)
            raise
        if not unfit:
            return set()
        # Whoever likes can send such groups all day: their sender's account tells of them, not the log.
        log.debug("groups of others cannot be trained on and are left out", reasons=sorted(set(unfit.values())))
        await self._pool.discard(list(unfit))
        for producer, count in Counter(group.producer for group in groups if group.group_id in unfit).items():
            self._useless(producer, count, now)
        return set(unfit)

    async def _expected_shortage(self) -> int:
        """Own groups to draw at once with the next batch, where the pool cannot fill J: one call instead of two."""
        training = self._training
        if training.on_shortage != "local" or not training.external_groups:
            return 0
        external = await self._external(self._clock())
        return plan_round(training, self._config.rollouts, [], external, random.Random(0)).shortage

    async def _external(self, now: float) -> list[Candidate]:
        """Groups of others to choose from, with what is known of their producers."""
        idle = self._training.external_zero_advantage == "keep"
        stock = await self._pool.external_candidates(now, idle=idle)
        if self._standing is not None:
            standing = {producer: self._standing(producer, now) for producer in {c.producer for c in stock}}
            stock = [
                structs.replace(c, source=source, aged=aged)
                for c, (source, aged) in ((c, standing[c.producer]) for c in stock)
            ]
        return [c for c in stock if not self._watch.bars(c.task, share=c.counts_for)]

    async def _usable_external(self) -> int:
        external = await self._external(self._clock())
        return sum(informative(candidate.rewards) for candidate in external)

    def _record(
        self,
        batch: SampledGroups,
        plan: RoundPlan,
        candidates: list[Candidate],
        groups: list[TrainGroup],
        version: int,
        result: StepResult,
    ) -> RoundRecord:
        if result.skipped:
            log.warning("groups could not be trained on", reasons=sorted(set(result.skipped.values())))
        by_id = {candidate.group_id: candidate for candidate in candidates}
        groups = [group for group in groups if group.group_id not in result.skipped]
        local = [group for group in groups if group.origin == "local"]
        external = [group for group in groups if group.origin == "external"]
        producers: dict[str, int] = {}
        for group in external:
            producers[group.producer] = producers.get(group.producer, 0) + 1
        now = time.monotonic()
        seconds, self._last_end = now - self._last_end, now
        waited, self._waited = self._waited, 0.0
        drawn, self._since = self._since, Drawn()
        metrics = dict(result.metrics)
        return RoundRecord(
            round=result.policy_version,
            time=self._clock(),
            policy_version=result.policy_version,
            reward_first_drawn=mean(batch.rewards_first_drawn),
            reward_after_selection=mean([reward for group in groups for reward in group.rewards]),
            groups_drawn=drawn.groups,
            groups_published=drawn.published,
            local_groups=len(local),
            external_groups=len(external),
            informative_groups=sum(informative(group.rewards) for group in groups),
            shortage=max(plan.shortage, self._training.external_groups - len(external)),
            external_producers=producers,
            staleness_local=mean([version - group.policy_version for group in local]),
            staleness_max=max((version - group.policy_version for group in local), default=None),
            mixed_completions=sum(len(one.policy_versions) > 1 for group in local for one in group.completions),
            wait_seconds=waited,
            sync_stall_seconds=self._policy.engine.stall_seconds,
            age_external_seconds=mean([by_id[group.group_id].age_seconds for group in external]),
            producer_gradients=result.producer_gradients,
            tokens_sampled=drawn.tokens,
            tokens_per_second=drawn.tokens / drawn.seconds if drawn.seconds > 0 else None,
            sample_seconds=drawn.seconds,
            step_seconds=metrics.pop("step_seconds", None),
            round_seconds=seconds,
            loss=metrics.pop("loss", None),
            grad_norm=metrics.pop("grad_norm", None),
            grad_norm_local=metrics.pop("grad_norm_local", None),
            grad_norm_external=metrics.pop("grad_norm_external", None),
            delta_logprob_local=metrics.pop("delta_logprob_local", None),
            trainer=metrics,
            **self._events.network(),
        )


def _with_extra(batch: SampledGroups, extra: SampledGroups) -> SampledGroups:
    """`batch` with a later draw added; rewards stay those of the groups drawn first."""
    return SampledGroups(
        ids=[*batch.ids, *extra.ids],
        rewards_first_drawn=batch.rewards_first_drawn,
        tokens=batch.tokens + extra.tokens,
        seconds=batch.seconds + extra.seconds,
        published=batch.published + extra.published,
    )


def mean(values: list[float]) -> float | None:
    """Arithmetic mean, or None of nothing."""
    return fmean(values) if values else None


async def until(stop: asyncio.Event, wanted: Awaitable[T]) -> T | None:
    """The result of `wanted`, or None when `stop` is set before; `wanted` is then cancelled and over."""
    task = asyncio.ensure_future(wanted)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        for pending in (task, stopping):
            if not pending.done():
                pending.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await pending
