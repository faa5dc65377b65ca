"""One batch of sampling, with a real pool and mixture, and toy scorers and engine."""

import asyncio
import hashlib
import random
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from sapo_node.config import NodeConfig
from sapo_node.identity import Identity
from sapo_node.inference.base import Sampled, SampledBatch, SamplingParams
from sapo_node.monitor.watch import Watch
from sapo_node.rollouts.pool import Pool
from sapo_node.rollouts.sampling import LostVersion, Sampling
from sapo_node.rollouts.schema import Group
from sapo_node.swarm.protocol import MAX_TEXT_BYTES
from sapo_node.tasks import mixture
from sapo_node.tasks.base import Judged, Question
from sapo_node.training.base import TrainGroup


class ToyEngine:
    """Answers with completions of one or two versions."""

    version = 6
    restarts = 0

    async def sample(self, questions: list[str], params: SamplingParams) -> SampledBatch:
        one, two = (
            Sampled(text="1", finish="stop", token_ids=[5, 1], logprobs=[-1.0, -0.5], policy_versions=versions)
            for versions in ([6], [5, 6])
        )
        return SampledBatch(groups=[[one, one], [two, one]][: len(questions)], policy_version=5, seconds=0.1)

    def lose_line(self) -> None:
        """The policy goes back to a checkpoint, and has taken as many steps again by the time somebody looks."""
        self.restarts += 1


class ToyScorers:
    def __init__(self) -> None:
        self.judging: Any = lambda: None  # called when answers are judged

    async def questions(self, wanted: list[Any]) -> list[Question]:
        return [Question(text=f"question {seed}", sha256=b"\xff" + bytes(31)) for _, seed in wanted]

    async def judge(self, spec: Any, seed: int, texts: list[str]) -> Judged:
        await asyncio.sleep(0)
        self.judging()
        question = Question(text=f"question {seed}", sha256=hashlib.sha256(str(seed).encode()).digest())
        return Judged(question=question, rewards=[1.0, 0.0])


class Setting:
    def __init__(self, tmp_path: Path) -> None:
        self.config = NodeConfig.model_validate({})
        self.path = tmp_path / "pool.sqlite"
        self.identity = Identity.create(tmp_path / "identity.key")
        self.engine, self.scorers = ToyEngine(), ToyScorers()
        self.published: list[Group] = []
        self.watch: Watch | None = None

    async def draw(self) -> list[TrainGroup]:
        """What a draw of two groups leaves in the pool for a step."""
        self.pool = await Pool.open(self.path, self.config.rollouts)
        try:
            sampling = Sampling(
                self.config,
                self.identity,
                mixture.load(self.config.tasks),
                self.scorers,  # type: ignore[arg-type]
                self.engine,
                self.pool,
                random.Random(0),
                self.publish,
                watch=self.watch,
            )
            drawn = await sampling.draw(2, 0)
            return await self.pool.consume(drawn.ids, 1)
        finally:
            self.stats = await self.pool.stats()
            await self.pool.close()

    async def publish(self, groups: list[Group]) -> None:
        self.published += groups


def test_a_group_is_as_old_as_its_oldest_token_and_keeps_each_completions_versions(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    groups = asyncio.run(setting.draw())
    assert [group.policy_version for group in groups] == [6, 5]
    assert [[one.policy_versions for one in group.completions] for group in groups] == [[[6], [6]], [[5, 6], [6]]]
    assert [group.policy_version for group in setting.published] == [6, 5]


def test_a_batch_whose_steps_were_lost_while_it_was_judged_reaches_neither_pool_nor_swarm(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    setting.scorers.judging = setting.engine.lose_line
    with pytest.raises(LostVersion, match="steps that were lost"):
        asyncio.run(setting.draw())
    assert setting.stats.local == 0
    assert setting.published == []


def test_an_answer_that_is_too_long_for_the_wire_keeps_its_own_group_back_and_no_other(tmp_path: Path) -> None:
    class Rambling(ToyEngine):
        async def sample(self, questions: list[str], params: SamplingParams) -> SampledBatch:
            batch = await super().sample(questions, params)
            batch.groups[1][0] = structs.replace(batch.groups[1][0], text="ü" * (MAX_TEXT_BYTES // 2 + 1))
            return batch

    setting = Setting(tmp_path)
    setting.engine = Rambling()
    assert len(asyncio.run(setting.draw())) == 2
    assert [[one.text for one in group.completions] for group in setting.published] == [["1", "1"]]


def test_own_groups_are_seen_by_the_alarms_and_not_shared_while_the_policy_drifts(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    setting.watch = Watch()
    setting.watch._drift.memory.lasts = True
    assert len(asyncio.run(setting.draw())) == 2
    assert setting.published == []
    assert setting.watch._sums.groups == 2
    setting.watch._drift.memory.lasts = False
    asyncio.run(setting.draw())
    assert len(setting.published) == 2
