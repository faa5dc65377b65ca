"""A swarm in one process, round by round, and what is measured on it.

Rounds go in step. In each, every node draws its groups and signs them as a batch; every batch reaches the other nodes
that still want groups, in a random order; then every node takes its step.
"""

import contextlib
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from sapo_node.evaluate import HeldOut, HeldOutQuestion
from sapo_node.monitor.watch import Watch
from sapo_node.rollouts.codec import Opened
from sapo_node.rollouts.pool import Pool
from sapo_node.rollouts.verify import Verifier
from sapo_node.tasks import mixture
from sapo_node.training.trainer import Trainer

from .arms import Arm
from .node import Clock, LocalScorers, Node, SupervisedExternals, number
from .poison import Poisoner

EVAL_EVERY = 20  # rounds
EVAL_QUESTIONS, EVAL_SAMPLES = 8, 4  # a task (56 in all), completions a question
LAST_QUESTIONS, LAST_SAMPLES = 32, 8  # at the end: 224 questions
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # where the pools lie: they are synced at every write


@dataclass(frozen=True)
class Run:
    """One run: an arm on a base with a seed. Its fields name it in the results."""

    stage: str
    arm: str
    base: str  # folder of the model
    seed: int
    lr: float
    rounds: int  # of the arm's horizon; some arms take a multiple


@dataclass(frozen=True)
class Weights:
    """What a run began with. Machines of another kind make other weights of a base from the same command and seed."""

    weights: str  # of the sha256 of the base's, eight hexadecimal digits; empty for results from before it was kept

    @classmethod
    def of(cls, folder: Path) -> "Weights":
        """Those in a base's folder."""
        return cls(sha256((folder / "model.safetensors").read_bytes()).hexdigest()[:8])


@dataclass(frozen=True)
class Point:
    """Means over the nodes at one evaluation; what is counted is counted since the evaluation before.

    `held_out` is pass@1 over 56 questions x 4; `held_out_any` the share of questions with a right answer among those
    samples. At the end `last` and `last_any` are the same over 224 x 8, so `last_any` is pass@8.
    """

    round: int
    held_out: float
    held_out_any: float
    lowest: float  # pass@1 of the worst node
    highest: float
    reward_first: float  # mean over rounds and nodes: groups that were drawn first
    reward_after: float  # mean over the training sets: after selection
    informative: float  # groups with an advantage in a training set
    external: float  # groups of others in a training set
    completions: int  # sampled by the whole swarm since the start
    tokens: int
    seconds: float  # CPU time since the start, evaluations left out
    last: float | None = None
    last_any: float | None = None


class Swarm:
    """The nodes of one run."""

    def __init__(
        self, arm: Arm, seed: int, nodes: list[Node], poisoners: list[Poisoner], clock: Clock, verifier: Verifier
    ) -> None:
        """Use `swarm`."""
        self.arm, self.seed, self.nodes, self.poisoners = arm, seed, nodes, poisoners
        self._clock = clock
        self._verifier = verifier  # for `own_past`
        self._own: dict[int, Opened] = {}
        self.records = 0
        self.sums = dict.fromkeys(("reward_first", "reward_after", "informative", "external"), 0.0)

    async def round(self, number_: int) -> None:
        """One round of all nodes."""
        self._clock.begin(number_)
        for node in self.nodes:
            await node.arrivals.count_stock()
        batches = [await node.draw(number_) for node in self.nodes]
        batches += [poisoner.draw(number_) for poisoner in self.poisoners]
        await (self._return_own(batches) if self.arm.own_past else self._deliver(batches, number_))
        for node in self.nodes:
            record = await node.take()
            self.records += 1
            self.sums["reward_first"] += record.reward_first_drawn or 0.0
            self.sums["reward_after"] += record.reward_after_selection or 0.0
            self.sums["informative"] += record.informative_groups
            self.sums["external"] += record.external_groups

    async def _deliver(self, batches: Sequence[Opened | None], number_: int) -> None:
        """Every batch to every other node that wants groups."""
        for node in self.nodes:
            others = [batch for batch in batches if batch and batch.batch.peer_id != node.identity.peer_id]
            random.Random(number("deliver", self.seed, node.index, number_)).shuffle(others)
            for batch in others:
                if node.arrivals.want() > 0:
                    await node.receive(batch)

    async def _return_own(self, batches: Sequence[Opened | None]) -> None:
        """Each node's batch of the round before comes back to it, as if it were another's."""
        for node, batch in zip(self.nodes, batches, strict=True):
            if (earlier := self._own.get(node.index)) is not None:
                verified = await self._verifier.verify(earlier, self._clock())
                await node.pool.add_external("own past", verified.content_id, verified.groups, self._clock())
            if batch is not None:
                self._own[node.index] = batch


@contextlib.asynccontextmanager
async def swarm(
    arm: Arm, base: Path, seed: int, lr: float, teacher: Path | None = None, *, watched: bool = False
) -> AsyncIterator[tuple[Swarm, HeldOut, LocalScorers]]:
    """A swarm at its start, and the held-out questions. All nodes begin as `base`, but the first one as `teacher`.
    Those that are `watched` have alarms, and act on them."""
    config = arm.config(base, lr)
    clock, scorers = Clock(), LocalScorers(config)
    tasks = mixture.load(config.tasks)
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY)))
        nodes = []
        for index in range(arm.nodes):
            pool = await Pool.open(folder / f"{index}.sqlite", config.rollouts)
            stack.push_async_callback(pool.close)
            start = base.parent / arm.second_base if arm.second_base and index % 2 else base
            start = teacher if teacher is not None and index == 0 else start
            own = arm.config(base, lr, index)
            trainer = SupervisedExternals if arm.supervised else Trainer
            watch = Watch(config.tasks.eval_every, clock=clock) if watched else None
            nodes.append(Node(index, seed, own, start, pool, scorers, clock, watch, trainer))
        held = await HeldOut.prepare(config, tasks, scorers, LAST_QUESTIONS)
        verifier = Verifier(
            swarm=config.swarm.name,
            public_key=bytes(32),  # nobody's
            accept=config.tasks.accept,
            mixture=tasks,
            max_age_seconds=config.rollouts.max_age_seconds,
            judge=scorers,
            known=nodes[0].pool,
        )
        poisoners = [Poisoner(index, seed, config, clock, arm.poison) for index in range(arm.poisoners)]
        yield Swarm(arm, seed, nodes, poisoners, clock, verifier), held, scorers


async def execute(run: Run, arm: Arm, base: Path, told: Callable[[int], None]) -> list[Point]:
    """Take a run from start to end. `told` hears of every round that ended."""
    torch.set_num_threads(1)
    async with swarm(arm, base, run.seed, run.lr) as (made, held, scorers):
        few = HeldOut(held.config, _first_of_each(held, EVAL_QUESTIONS), held.left_out)
        points, spent, rounds = [], 0.0, run.rounds * arm.longer
        for number_ in range(rounds + 1):
            if number_ % EVAL_EVERY == 0 or number_ == rounds:
                points.append(await _measure(made, few, held if number_ == rounds else None, scorers, number_, spent))
            if number_ < rounds:
                began = time.process_time()
                await made.round(number_)
                spent += time.process_time() - began
                told(number_ + 1)
        return points


async def _measure(
    made: Swarm, few: HeldOut, last: HeldOut | None, scorers: LocalScorers, number_: int, seconds: float
) -> Point:
    scores, anys, ends, end_anys = [], [], [], []
    for node in made.nodes:
        engine: Any = node.policy
        record = await few.score(engine, scorers, round=number_, samples=EVAL_SAMPLES)
        scores.append(record.mean)
        anys.append(fmean(one.score > 0 for one in record.per_question))
        if last is not None:
            record = await last.score(engine, scorers, round=number_, samples=LAST_SAMPLES)
            ends.append(record.mean)
            end_anys.append(fmean(one.score > 0 for one in record.per_question))
    taken, made.records = max(1, made.records), 0
    sums, made.sums = made.sums, dict.fromkeys(made.sums, 0.0)
    return Point(
        round=number_,
        held_out=fmean(scores),
        held_out_any=fmean(anys),
        lowest=min(scores),
        highest=max(scores),
        **{name: total / taken for name, total in sums.items()},
        completions=sum(node.policy.completions for node in made.nodes),
        tokens=sum(node.policy.tokens for node in made.nodes),
        seconds=seconds,
        last=fmean(ends) if ends else None,
        last_any=fmean(end_anys) if end_anys else None,
    )


def _first_of_each(held: HeldOut, count: int) -> list[HeldOutQuestion]:
    """The first questions of each task."""
    taken: Counter[str] = Counter()
    found = []
    for one in held.questions:
        taken[one.entry.spec.name] += 1
        if taken[one.entry.spec.name] <= count:
            found.append(one)
    return found
