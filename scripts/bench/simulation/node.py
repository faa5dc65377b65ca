"""One node of a swarm in one process: the product's sampler, trainer, verification and pool, without a network.

A round is one epoch (30 s) long by the swarm's own clock. So the questions of a node follow from (seed, node, round,
place) whatever else an arm does: two arms with one seed ask the same questions, and begin to sample in each round from
the same random number.
"""

import asyncio
import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sapo_node.config import NodeConfig
from sapo_node.identity import Identity
from sapo_node.inference.base import EngineStatus, SampledBatch, SamplingParams
from sapo_node.monitor.metrics import RoundRecord
from sapo_node.monitor.watch import Watch
from sapo_node.rollouts.arrivals import Arrivals
from sapo_node.rollouts.codec import Opened
from sapo_node.rollouts.pool import Pool
from sapo_node.rollouts.sampling import SampledGroups, Sampling
from sapo_node.rollouts.schema import Group
from sapo_node.swarm.exchange import Received
from sapo_node.swarm.peers import PeerBook
from sapo_node.swarm.protocol import EPOCH_SECONDS
from sapo_node.tasks import mixture
from sapo_node.tasks import reasoning_gym as gym
from sapo_node.tasks.base import Judged, Question, TaskRefused, TaskSpec, answer_digest, question_sha256
from sapo_node.tasks.scoring import ScorerPool
from sapo_node.training import rows
from sapo_node.training.base import StepResult, TextScore, TrainGroup
from sapo_node.training.drift import score_texts
from sapo_node.training.policy import load_policy
from sapo_node.training.rounds import RoundEvents, Rounds
from sapo_node.training.trainer import Trainer

from .batches import signed

FIRST_EPOCH = 60_000_000  # any; questions follow from it
KEPT_VERDICTS = 20_000  # groups whose rewards are remembered: each is judged by several nodes within a few rounds


def number(*parts: object) -> int:
    """63 bits that follow from the parts: the seed of everything random."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


class Clock:
    """The swarm's time, in seconds since 1970."""

    def __init__(self) -> None:
        self.now = float(FIRST_EPOCH * EPOCH_SECONDS)

    def __call__(self) -> float:
        return self.now

    def begin(self, round: int) -> None:
        """Go to the first second of a round's epoch."""
        self.now = (FIRST_EPOCH + round) * EPOCH_SECONDS + 1.0


class LocalScorers(ScorerPool):
    """The scorers' work in this process, without a sandbox: these answers come from our own models, and the tasks are
    ones whose scorers evaluate nothing. Verdicts are remembered, since rewards do not depend on who judges."""

    def __init__(self, config: NodeConfig) -> None:
        super().__init__(0, config.tasks.answer_seconds, config.tasks.answer_form)
        self._verdicts: dict[object, Judged] = {}

    async def questions(self, wanted: Sequence[tuple[TaskSpec, int]]) -> list[Question | TaskRefused]:
        """As the pool's."""
        found: list[Question | TaskRefused] = []
        for spec, seed in wanted:
            try:
                text = gym.item(spec.name, spec.config, seed)["question"]
            except TaskRefused as error:
                found.append(error)
            else:
                found.append(Question(text=text, sha256=question_sha256(text)))
        return found

    async def judge(self, spec: TaskSpec, seed: int, texts: list[str], *, strict: bool = False) -> Judged:
        """As the pool's."""
        key = (spec.name, spec.config_hash, seed, tuple(texts))
        if (known := self._verdicts.get(key)) is not None:
            return known
        dataset = gym.open_dataset(spec.name, spec.config, seed)
        made = gym.entry(dataset, spec.name, seed)
        rewards = [gym.reward(dataset, spec.name, made, text, self._form) for text in texts]
        question = Question(text=made["question"], sha256=question_sha256(made["question"]))
        judged = Judged(question=question, rewards=rewards, truth=answer_digest(gym.plain_truth(spec.name, made)))
        if len(self._verdicts) >= KEPT_VERDICTS:
            self._verdicts.clear()
        self._verdicts[key] = judged
        return judged


class SupervisedExternals(Trainer):
    """Takes others' right answers as targets of plain supervised training: each counts one, whatever the rest of its
    group was, and wrong ones are left out (which needs `external_negative: drop`)."""

    def _rows(self, groups: Sequence[TrainGroup]) -> tuple[list[rows.Row], dict[int, str]]:
        batch, skipped = super()._rows(groups)
        for row in batch:
            if row.origin == "external" and row.advantage > 0:
                row.advantage = 1.0
        rows.weigh(batch, self.training, self.inference.max_completion_tokens)
        return batch, skipped


class LocalPolicy:
    """A trainer in this process, as `Rounds`, `Sampling` and `HeldOut` use a policy worker."""

    takes_turns = True
    can_sample = True
    restarts = 0
    engine = EngineStatus(name="transformers", state="ready")

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.completions = 0
        self.tokens = 0

    @property
    def version(self) -> int:
        """Optimiser steps taken."""
        return self.trainer.version

    async def sample(self, questions: list[str], params: SamplingParams) -> SampledBatch:
        """Completions; those of evaluations (which have a seed) are not counted."""
        batch = self.trainer.sample(questions, params)
        if params.seed is None:
            self.completions += sum(len(group) for group in batch.groups)
            self.tokens += sum(len(one.token_ids) for group in batch.groups for one in group)
        return batch

    async def step(self, groups: list[TrainGroup]) -> StepResult:
        """One optimiser step."""
        return self.trainer.step(groups)

    async def unfit(self, groups: list[TrainGroup]) -> dict[int, str]:
        """Which groups a step would learn nothing from."""
        return self.trainer.unfit(groups)

    async def score_texts(self) -> TextScore:
        """How likely texts that are no task's are to it."""
        return score_texts(self.trainer.policy)

    async def settled(self) -> None:
        """There is nothing to wait for."""

    async def until_it_samples(self) -> None:
        """It always does."""


class Node:
    """One node of the swarm."""

    def __init__(
        self,
        index: int,
        seed: int,
        config: NodeConfig,
        base: Path,
        pool: Pool,
        scorers: LocalScorers,
        clock: Clock,
        watch: Watch | None = None,
        trainer: type[Trainer] = Trainer,
    ) -> None:
        """`base` is the model's folder. All nodes share scorers and clock. Without a `watch` no alarm acts."""
        self.index, self.seed = index, seed
        self.pool, self.watch = pool, watch
        self._clock = clock
        self._swarm = config.swarm.name
        key = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest())
        self.identity = Identity(Path("unused"), key)
        policy_ = load_policy("bench", folder=base, device="cpu")
        self.policy = LocalPolicy(trainer(policy_, config.training, config.inference))
        self._draw_rng, self._choose_rng = random.Random(), random.Random()
        self._outgoing: list[Group] = []
        self._drawn: SampledGroups | None = None
        self.record: RoundRecord | None = None
        policy: Any = self.policy  # which `Sampling` and `Rounds` take for a policy worker
        tasks = mixture.load(config.tasks)
        base_ = (config, self.identity, tasks, scorers)
        sampling = Sampling(*base_, policy, pool, self._draw_rng, self._publish, clock, watch)
        self.arrivals = Arrivals(*base_, pool, PeerBook(), clock, watch)
        events = RoundEvents(recorded=self._note, network=dict)
        stop = asyncio.Event()
        self._rounds = Rounds(config, policy, sampling, pool, self._choose_rng, stop, events, clock, watch=watch)

    async def draw(self, round: int) -> Opened | None:
        """Sample this round's groups; the batch of those it shares, as others receive it."""
        self._draw_rng.seed(number("draw", self.seed, self.index, round))
        self._choose_rng.seed(number("choose", self.seed, self.index, round))
        self.policy.trainer.generator.manual_seed(number("sample", self.seed, self.index, round))
        self._outgoing.clear()
        self._drawn = await self._rounds.draw()
        if not self._outgoing:
            return None
        return signed(self.identity, self._swarm, list(self._outgoing), round, self._clock())

    async def receive(self, opened: Opened) -> None:
        """Take over a batch of another node."""
        await self.arrivals.take(Received(opened=opened, size=0, peer_id=opened.batch.peer_id, via="dht", seconds=0.0))

    async def take(self) -> RoundRecord:
        """The round's step."""
        assert self._drawn is not None
        await self._rounds.take(self._drawn)
        assert self.record is not None
        return self.record

    async def _publish(self, groups: list[Group]) -> None:
        self._outgoing += groups

    async def _note(self, record: RoundRecord) -> None:
        self.record = record if self.watch is None else await self.watch.close(record, self.policy)
