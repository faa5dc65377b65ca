"""The two loops of a node, on a real pool, with toy sampling and a toy policy."""

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import pytest

from sapo_node.config import NodeConfig
from sapo_node.monitor.metrics import RoundRecord
from sapo_node.rollouts.pool import NewGroup, Pool
from sapo_node.rollouts.sampling import SampledGroups
from sapo_node.rollouts.schema import TaskRef
from sapo_node.swarm.protocol import epoch_of
from sapo_node.training import rounds
from sapo_node.training.base import StepResult, TrainCompletion, TrainGroup
from sapo_node.training.rounds import RoundEvents, Rounds, RoundsFailed, until
from sapo_node.training.supervised import PolicyLost

NOTHING, MIXED = [0.0, 0.0], [0.0, 1.0]


def group(index: int, rewards: list[float], version: int, *, first: bool) -> NewGroup:
    now = time.time()
    ref = TaskRef(
        source="reasoning_gym",
        version="1",
        name="gcd",
        config_hash=bytes(32),
        config={},
        epoch=epoch_of(now),
        index=index,
    )
    completions = [TrainCompletion(text=str(i), finish="stop", token_ids=[1], logprobs=[-1.0]) for i in range(2)]
    return NewGroup(
        task=ref,
        question=f"question {index}",
        question_sha256=index.to_bytes(32, "big"),
        completions=completions,
        rewards=rewards,
        sampled_at=now,
        policy_version=version,
        first_drawn=first,
    )


class ToyPolicy:
    takes_turns = True

    def __init__(self, seconds: float = 0.0) -> None:
        self.version = 0
        self.seconds = seconds
        self.steps: list[list[TrainGroup]] = []

    async def step(self, groups: list[TrainGroup]) -> StepResult:
        await asyncio.sleep(self.seconds)
        self.version += 1
        self.steps.append(groups)
        return StepResult(policy_version=self.version, metrics={"loss": 0.5}, producer_gradients={}, skipped={})


class ToySampling:
    """Every group gets the same rewards; what was asked for is remembered."""

    def __init__(self, pool: Pool, policy: ToyPolicy, rewards: list[float]) -> None:
        self.pool, self.policy, self.rewards = pool, policy, rewards
        self.asked: list[tuple[int, int]] = []
        self.ahead: list[int] = []
        self._index = 0

    async def draw(self, first: int, extra: int) -> SampledGroups:
        self.asked.append((first, extra))
        if first:
            self.ahead.append(sum(one[0] > 0 for one in self.asked) - len(self.policy.steps))
        groups = []
        for i in range(first + extra):
            self._index += 1
            rewards = self.rewards if i < first else [1.0, 0.0]
            groups.append(group(self._index, rewards, self.policy.version, first=i < first))
        ids = await self.pool.add_local("me", groups, time.time())
        return SampledGroups(
            ids=ids, rewards_first_drawn=[sum(self.rewards) / 2] * first, tokens=4, seconds=0.1, published=0
        )


async def run_rounds(tmp_path: Path, training: dict[str, Any], rewards: list[float], **more: Any) -> Any:
    """Take three rounds; returns (records, toy sampling, toy policy)."""
    config = NodeConfig.model_validate({"node": {"max_rounds": 3}, "training": training})
    pool = await Pool.open(tmp_path / "pool.sqlite", config.rollouts)
    policy = more.get("policy") or ToyPolicy()
    sampling = (more.get("sampling") or ToySampling)(pool, policy, rewards)
    records: list[RoundRecord] = []

    async def recorded(record: RoundRecord) -> None:
        records.append(record)

    events = RoundEvents(recorded=recorded, network=dict)
    stop = asyncio.Event()
    loops = Rounds(config, policy, sampling, pool, random.Random(0), stop, events)  # type: ignore[arg-type]
    try:
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            drawing = tasks.create_task(loops.sampling_loop())
            await loops.training_loop()
            drawing.cancel()
    finally:
        await pool.close()
    return records, sampling, policy


def test_a_node_alone_draws_what_is_missing_to_j_and_says_so(tmp_path: Path) -> None:
    records, sampling, policy = asyncio.run(run_rounds(tmp_path, {"local_groups": 2, "external_groups": 3}, MIXED))
    assert [record.round for record in records] == [1, 2, 3]
    assert sampling.asked[0] == (2, 3)
    assert all(len(groups) == 5 for groups in policy.steps)
    assert all((r.local_groups, r.external_groups, r.shortage) == (5, 0, 3) for r in records)


def test_the_reward_of_a_round_is_that_of_the_groups_drawn_first(tmp_path: Path) -> None:
    training = {"local_groups": 2, "external_groups": 2}
    records, _, _ = asyncio.run(run_rounds(tmp_path, training, NOTHING))
    assert all(record.reward_first_drawn == 0.0 for record in records)
    assert all(record.reward_after_selection == 0.25 for record in records)
    assert all(record.informative_groups == 2 for record in records)


class AlwaysNothing(ToySampling):
    async def draw(self, first: int, extra: int) -> SampledGroups:
        return await super().draw(first + extra, 0)


def test_resampling_ends_although_no_draw_ever_has_an_advantage(tmp_path: Path) -> None:
    training = {"local_groups": 2, "external_groups": 0, "local_zero_advantage": "resample"}
    records, sampling, policy = asyncio.run(run_rounds(tmp_path, training, NOTHING, sampling=AlwaysNothing))
    assert len(records) == 3
    per_round = len(sampling.asked) / 3
    assert per_round <= 1 + rounds.MAX_EXTRA_DRAWS + 1
    assert all(len(groups) == 2 for groups in policy.steps)


def test_waiting_for_the_swarm_is_bounded(tmp_path: Path) -> None:
    training = {
        "local_groups": 1,
        "external_groups": 1,
        "on_shortage": "wait",
        "shortage_wait_seconds": 0.3,
    }
    started = time.monotonic()
    records, _, _ = asyncio.run(run_rounds(tmp_path, training, MIXED))
    assert 0.9 <= time.monotonic() - started < 10
    assert all((record.local_groups, record.shortage) == (1, 1) for record in records)


@pytest.mark.parametrize("staleness", [0, 2])
def test_sampling_runs_ahead_by_the_bound_and_no_further(tmp_path: Path, staleness: int) -> None:
    training = {"local_groups": 1, "external_groups": 0, "max_staleness": staleness}
    policy = ToyPolicy(seconds=0.2)
    policy.takes_turns = False  # type: ignore[misc]
    _, sampling, _ = asyncio.run(run_rounds(tmp_path, training, MIXED, policy=policy))
    assert max(sampling.ahead) == 1 + staleness


class Broken(ToySampling):
    async def draw(self, first: int, extra: int) -> SampledGroups:
        raise PolicyLost("it is gone")


def test_faults_without_end_end_the_node_with_their_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "LONGEST_PAUSE_SECONDS", 0.01)
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(run_rounds(tmp_path, {}, MIXED, sampling=Broken))
    (fault,) = caught.value.exceptions
    assert isinstance(fault, RoundsFailed)
    assert "10 times in a row: it is gone" in str(fault)


def test_until_gives_the_result_or_none_and_cancels_what_it_waited_for() -> None:
    async def body() -> None:
        stop = asyncio.Event()
        assert await until(stop, asyncio.sleep(0.01, "done")) == "done"
        ended = asyncio.Event()

        async def endless() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()

        asyncio.get_running_loop().call_later(0.05, stop.set)
        assert await until(stop, endless()) is None
        assert ended.is_set()

    asyncio.run(body())
