"""The two loops of a node, on a real pool, with toy sampling and a toy policy."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from sapo_node.config import NodeConfig
from sapo_node.inference.base import EngineStatus
from sapo_node.monitor.metrics import RoundRecord
from sapo_node.monitor.watch import Watch
from sapo_node.rollouts.pool import NewGroup, Pool
from sapo_node.rollouts.sampling import LostVersion, SampledGroups
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
    can_sample = True
    engine = EngineStatus(name="toy", state="ready")

    def __init__(self, seconds: float = 0.0) -> None:
        self.version = 0
        self.seconds = seconds
        self.steps: list[list[TrainGroup]] = []
        self.too_long: set[str] = set()  # whose groups it cannot be trained on

    async def step(self, groups: list[TrainGroup]) -> StepResult:
        await asyncio.sleep(self.seconds)
        self.version += 1
        self.steps.append(groups)
        return StepResult(policy_version=self.version, metrics={"loss": 0.5}, producer_gradients={}, skipped={})

    async def unfit(self, groups: list[TrainGroup]) -> dict[int, str]:
        return {group.group_id: "too long" for group in groups if group.producer in self.too_long}

    async def settled(self) -> None:
        pass

    def check(self) -> None:
        pass

    async def until_it_samples(self) -> None:
        pass


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
    """Take three rounds (or `count`); returns (records, toy sampling, toy policy). `prepare` is given the pool."""
    config = NodeConfig.model_validate(
        {"node": {"max_rounds": more.get("count", 3)}, "training": {"recipe": "paper"} | training}
    )
    pool = await Pool.open(tmp_path / "pool.sqlite", config.rollouts)
    prepare: Callable[[Pool], Awaitable[object]] | None = more.get("prepare")
    if prepare is not None:
        await prepare(pool)
    policy = more.get("policy") or ToyPolicy()
    sampling = (more.get("sampling") or ToySampling)(pool, policy, rewards)
    records: list[RoundRecord] = []

    async def recorded(record: RoundRecord) -> None:
        records.append(record)

    events = RoundEvents(recorded=recorded, network=dict)
    stop = asyncio.Event()
    known = more.get("rounds", {})
    loops = Rounds(config, policy, sampling, pool, random.Random(0), stop, events, **known)  # type: ignore[arg-type]
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


async def crowd(pool: Pool) -> None:
    """Twenty groups of newcomers and two of a peer that is known for long."""
    for producer, indices in (("old", range(2)), ("new-a", range(2, 12)), ("new-b", range(12, 22))):
        groups = [group(1000 + index, MIXED, 0, first=False) for index in indices]
        await pool.add_external(producer, producer.encode().ljust(32), groups, time.time())


def test_rounds_know_whom_they_train_on(tmp_path: Path) -> None:
    training = {"local_groups": 1, "external_groups": 4, "rule": "capped"}
    known = {"standing": lambda peer_id, now: (peer_id, peer_id == "old")}
    records, _, _ = asyncio.run(run_rounds(tmp_path, training, MIXED, count=1, prepare=crowd, rounds=known))
    assert records[0].external_producers["old"] == 2
    assert records[0].external_groups == 4


def test_half_of_j_is_taken_while_the_policy_collapses(tmp_path: Path) -> None:
    watch = Watch()
    watch._collapse.memory.lasts = True
    training = {"local_groups": 1, "external_groups": 4}
    known = {"watch": watch}
    records, sampling, _ = asyncio.run(run_rounds(tmp_path, training, MIXED, count=1, prepare=crowd, rounds=known))
    assert (records[0].external_groups, records[0].shortage) == (2, 0)
    assert sampling.asked[0] == (1, 0)


def test_groups_of_a_task_with_an_alarm_stay_in_the_pool(tmp_path: Path) -> None:
    watch = Watch()
    watch.bars = lambda task, **_: task == "gcd"  # type: ignore[method-assign]
    training = {"local_groups": 1, "external_groups": 4}
    known = {"watch": watch}
    records, _, _ = asyncio.run(run_rounds(tmp_path, training, MIXED, count=1, prepare=crowd, rounds=known))
    assert (records[0].external_groups, records[0].shortage) == (0, 4)


def test_groups_too_long_for_the_policy_are_replaced_and_earn_nothing(tmp_path: Path) -> None:
    """Hope: groups that look usable and have no gradient use up J round after round, so the node trains alone."""
    policy, told = ToyPolicy(), Counter[str]()
    policy.too_long = {"new-a", "new-b"}
    training = {"local_groups": 1, "external_groups": 4}
    known = {"useless": lambda peer_id, groups, now: told.update({peer_id: groups})}
    more = {"count": 1, "prepare": crowd, "rounds": known, "policy": policy}
    records, _, _ = asyncio.run(run_rounds(tmp_path, training, MIXED, **more))
    assert records[0].external_producers == {"old": 2}
    assert told == {"new-a": 10, "new-b": 10}
    assert records[0].local_groups == 3, "what is missing to J is drawn instead"


@pytest.mark.parametrize("on_shortage", ["local", "fewer", "wait"])
def test_more_unfit_groups_than_a_round_looks_at_are_not_trained_on_unseen(tmp_path: Path, on_shortage: str) -> None:
    """Hope: with more of them in stock than a round can go through, the rest takes the places of J all the same."""
    policy, told = ToyPolicy(), Counter[str]()
    policy.too_long = {f"new-{batch}" for batch in range(5)}

    async def flood(pool: Pool) -> None:
        for batch, producer in enumerate(sorted(policy.too_long)):
            groups = [group(1000 + 100 * batch + index, MIXED, 0, first=False) for index in range(32)]
            await pool.add_external(producer, batch.to_bytes(32, "big"), groups, time.time())

    training = {"local_groups": 1, "external_groups": 4, "on_shortage": on_shortage, "shortage_wait_seconds": 0.3}
    known = {"useless": lambda peer_id, groups, now: told.update({peer_id: groups})}
    more = {"count": 6, "prepare": flood, "rounds": known, "policy": policy}
    records, _, _ = asyncio.run(run_rounds(tmp_path, training, MIXED, **more))
    assert all((record.external_groups, record.shortage) == (0, 4) for record in records)
    assert [record.local_groups for record in records] == [5 if on_shortage == "local" else 1] * 6
    assert told.total() == 160


def test_unfit_groups_that_come_one_by_one_do_not_keep_a_waiting_round_from_others(tmp_path: Path) -> None:
    """Hope: a round that waits looks at eight of them, and then at nobody's groups any more."""
    policy, dripping = ToyPolicy(), set[asyncio.Task[None]]()
    policy.too_long = {"hostile"}

    async def drip(pool: Pool) -> None:
        for number in range(2 * rounds.MAX_LOOKS):
            unfit = group(1000 + number, MIXED, 0, first=False)
            await pool.add_external("hostile", number.to_bytes(32, "big"), [unfit], time.time())
            await asyncio.sleep(rounds.WAIT_SECONDS)
        groups = [group(2000 + number, MIXED, 0, first=False) for number in range(4)]
        await pool.add_external("honest", bytes(31) + b"h", groups, time.time())

    async def prepare(pool: Pool) -> None:
        dripping.add(asyncio.create_task(drip(pool)))

    training = {"local_groups": 1, "external_groups": 4, "on_shortage": "wait", "shortage_wait_seconds": 15.0}
    records, _, _ = asyncio.run(run_rounds(tmp_path, training, MIXED, count=1, prepare=prepare, policy=policy))
    assert [(record.external_groups, record.shortage) for record in records] == [(4, 0)]


def test_a_group_that_the_worker_does_not_survive_has_one_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hope: one group on which the tokenizer dies is looked at again and again, until the node gives up."""
    monkeypatch.setattr(rounds, "LONGEST_PAUSE_SECONDS", 0.01)

    class Fragile(ToyPolicy):
        lost = 0

        async def unfit(self, groups: list[TrainGroup]) -> dict[int, str]:
            if any(group.producer == "new-b" for group in groups):
                self.lost += 1
                raise PolicyLost("the tokenizer panicked")
            return {}

    async def one_of_three(pool: Pool) -> None:
        for number, producer in enumerate(("new-a", "new-b", "new-c")):
            new = group(1000 + number, MIXED, 0, first=False)
            await pool.add_external(producer, number.to_bytes(32, "big"), [new], time.time())

    training, policy = {"local_groups": 1, "external_groups": 3}, Fragile()
    records, _, _ = asyncio.run(run_rounds(tmp_path, training, MIXED, prepare=one_of_three, policy=policy))
    assert len(records) == 3
    assert policy.lost == 1


def test_own_groups_are_drawn_at_once_for_what_the_rule_will_leave_out(tmp_path: Path) -> None:
    training = {"local_groups": 1, "external_groups": 4, "rule": "capped"}
    same = {"standing": lambda peer_id, now: ("8.8.8.0/24", peer_id == "old")}

    async def few(pool: Pool) -> None:
        groups = [group(1000 + index, MIXED, 0, first=False) for index in range(10)]
        await pool.add_external("new", bytes(32), groups, time.time())
        await pool.add_external("old", bytes(31) + b"1", [group(2000, MIXED, 0, first=False)], time.time())

    records, sampling, _ = asyncio.run(run_rounds(tmp_path, training, MIXED, count=1, prepare=few, rounds=same))
    assert (records[0].external_groups, records[0].shortage) == (3, 1)
    assert sampling.asked[0] == (1, 1)


# -- an engine of its own ----------------------------------------------------------------------------------------------


class PairedToy(ToyPolicy):
    """A policy whose engine gets the weights of a step some time after it, and may be down."""

    takes_turns = False

    def __init__(self, step_seconds: float = 0.02, sync_seconds: float = 0.05) -> None:
        super().__init__(step_seconds)
        self.sync_seconds = sync_seconds
        self.engine_version = 0
        self.up = asyncio.Event()
        self.up.set()
        self._following: asyncio.Task[None] | None = None

    @property
    def can_sample(self) -> bool:  # type: ignore[override]
        return self.up.is_set()

    async def until_it_samples(self) -> None:
        await self.up.wait()

    async def step(self, groups: list[TrainGroup]) -> StepResult:
        result = await super().step(groups)
        if self._following is not None:
            await self._following
        self._following = asyncio.create_task(self._follow(self.version))
        return result

    async def _follow(self, version: int) -> None:
        await asyncio.sleep(self.sync_seconds)
        self.engine_version = version

    async def settled(self) -> None:
        if self._following is not None:
            await asyncio.wait({self._following})


class PairedSampling(ToySampling):
    """Samples for a while, with the weights that the engine has at its beginning."""

    seconds = 0.03
    policy: PairedToy

    def __init__(self, pool: Pool, policy: PairedToy, rewards: list[float]) -> None:
        super().__init__(pool, policy, rewards)
        self.behind: list[int] = []  # at the beginning of each batch: steps whose weights the engine has not

    async def draw(self, first: int, extra: int) -> SampledGroups:
        version = self.policy.engine_version
        self.behind.append(self.policy.version - version)
        await asyncio.sleep(self.seconds)
        if not self.policy.can_sample:
            raise PolicyLost("the engine died")
        groups = []
        for i in range(first + extra):
            self._index += 1
            groups.append(group(self._index, self.rewards, version, first=i < first))
        ids = await self.pool.add_local("me", groups, time.time())
        return SampledGroups(ids=ids, rewards_first_drawn=[0.5] * first, tokens=4, seconds=self.seconds, published=0)


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("slow", ["step", "sync", "sampling"])
def test_no_group_is_staler_than_the_bound_whatever_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int, slow: str
) -> None:
    training = {"local_groups": 1, "external_groups": 0, "max_staleness": staleness}
    seconds = {name: 0.12 if name == slow else 0.01 for name in ("step", "sync", "sampling")}
    monkeypatch.setattr(PairedSampling, "seconds", seconds["sampling"])

    async def body() -> Any:
        policy = PairedToy(seconds["step"], seconds["sync"])
        return await run_rounds(tmp_path, training, MIXED, policy=policy, sampling=PairedSampling, count=8)

    records, sampling, _ = asyncio.run(body())
    assert [record.local_groups for record in records] == [1] * 8  # none was sampled in vain
    found = [record.staleness_max for record in records]
    assert max(found) <= staleness
    if slow == "step":
        assert found[-1] == staleness  # sampling does run ahead as far as it may
    if staleness == 0:
        assert set(sampling.behind) == {0}


def test_a_batch_begins_only_when_the_weights_of_the_step_before_are_in_place(tmp_path: Path) -> None:
    training = {"local_groups": 1, "external_groups": 0, "max_staleness": 0}

    async def body() -> Any:
        policy = PairedToy(step_seconds=0.0, sync_seconds=0.3)
        return await run_rounds(tmp_path, training, MIXED, policy=policy, sampling=PairedSampling)

    started = time.monotonic()
    _, sampling, _ = asyncio.run(body())
    assert time.monotonic() - started > 2 * 0.3
    assert sampling.behind == [0, 0, 0]


def externals(count: int) -> Callable[[Pool], Awaitable[object]]:
    """Puts that many usable groups of others into the pool."""

    async def prepare(pool: Pool) -> None:
        for number in range(count):
            new = group(100 + number, MIXED, 0, first=True)
            await pool.add_external(f"peer {number}", number.to_bytes(32, "big"), [new], time.time())

    return prepare


class DownAtFirst(PairedToy):
    """The engine is up after the third step."""

    async def step(self, groups: list[TrainGroup]) -> StepResult:
        result = await super().step(groups)
        if self.version == 3:
            self.up.set()
        return result


async def rounds_with_engine_down(tmp_path: Path, policy: PairedToy, external: int, count: int) -> Any:
    policy.up.clear()
    training = {"local_groups": 1, "external_groups": 1, "max_staleness": 1, "on_shortage": "fewer"}
    more = {"policy": policy, "sampling": PairedSampling, "count": count, "prepare": externals(external)}
    return await run_rounds(tmp_path, training, MIXED, **more)


def test_while_the_engine_is_down_rounds_are_taken_on_groups_of_others_and_on_own_ones_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "LOOK_SECONDS", 0.05)
    records, _, policy = asyncio.run(rounds_with_engine_down(tmp_path, DownAtFirst(), external=3, count=8))
    assert [(r.local_groups, r.external_groups) for r in records[:3]] == [(0, 1)] * 3
    assert [r.local_groups for r in records[3:]] == [1] * 5
    assert all(record.reward_first_drawn is None for record in records[:3])
    assert max(record.staleness_max for record in records[3:]) <= 1
    assert policy.version == 8


def test_without_engine_and_without_groups_of_others_no_round_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "LOOK_SECONDS", 0.05)

    async def body() -> Any:
        policy = PairedToy()
        asyncio.get_running_loop().call_later(0.6, policy.up.set)
        return await rounds_with_engine_down(tmp_path, policy, external=0, count=3)

    started = time.time()
    records, _, _ = asyncio.run(body())
    assert records[0].time - started >= 0.6
    assert [record.local_groups for record in records] == [1] * 3


def test_a_stock_that_cannot_be_trained_on_makes_no_rounds_while_the_engine_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hope: rounds on nothing use up the owner's rounds, and make own groups too old before they are trained on."""
    monkeypatch.setattr(rounds, "LOOK_SECONDS", 0.02)
    policy = DownAtFirst()
    policy.too_long = {"unfit"}

    async def feed(pool: Pool) -> None:
        for number in range(40):
            new = group(1000 + number, MIXED, 0, first=True)
            await pool.add_external("unfit", number.to_bytes(32, "big"), [new], time.time())
            await asyncio.sleep(0.02)
        await externals(3)(pool)

    async def body() -> Any:
        async def begin(pool: Pool) -> None:
            feeding.append(asyncio.create_task(feed(pool)))

        feeding: list[asyncio.Task[None]] = []
        policy.up.clear()
        training = {"local_groups": 1, "external_groups": 1, "max_staleness": 1, "on_shortage": "fewer"}
        more = {"policy": policy, "sampling": PairedSampling, "count": 4, "prepare": begin}
        return await run_rounds(tmp_path, training, MIXED, **more)

    records, _, _ = asyncio.run(body())
    assert [(r.local_groups, r.external_groups) for r in records[:3]] == [(0, 1)] * 3
    assert all(policy.steps)


@pytest.mark.parametrize("on_shortage", ["fewer", "wait"])
def test_who_trains_on_others_alone_samples_and_shares_until_there_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_shortage: str
) -> None:
    """Two such nodes wait for each other's groups: neither may stop sampling, and neither takes rounds on nothing."""
    monkeypatch.setattr(rounds, "LOOK_SECONDS", 0.05)
    seen: list[str] = []
    unused: list[int] = []

    class Peered(ToySampling):
        """The other node's first group comes after this node's fifth batch."""

        async def draw(self, first: int, extra: int) -> SampledGroups:
            seen.append(loops.waiting)
            unused.append(len(await self.pool.local_candidates(time.time(), 0, 0)))
            if len(self.asked) >= 5:
                await externals(3)(self.pool)
            return await super().draw(first, extra)

    class Kept(Rounds):
        def __init__(self, *given: Any, **more: Any) -> None:
            nonlocal loops
            super().__init__(*given, **more)
            loops = self

    loops: Any = None
    monkeypatch.setitem(globals(), "Rounds", Kept)
    training = {"local_groups": 0, "external_groups": 3, "on_shortage": on_shortage, "shortage_wait_seconds": 0.05}
    records, _, policy = asyncio.run(run_rounds(tmp_path, training, MIXED, sampling=Peered, count=1))
    assert [record.round for record in records] == [1]
    assert policy.version == 1
    assert all(policy.steps)
    assert records[0].groups_drawn >= 5, "what was sampled since the last round, in all"
    assert records[0].tokens_sampled == 4 * records[0].groups_drawn
    assert max(unused) <= 2, "groups that had their turn do not pile up"
    assert (seen[0], loops.waiting) == ("", "")
    assert "training.local_groups is 0" in seen[-1]


class DiesOnce(PairedSampling):
    """The engine dies during the second batch and is back a moment later."""

    died = False

    async def draw(self, first: int, extra: int) -> SampledGroups:
        if self.policy.version >= 1 and not self.died:
            self.died = True
            self.policy.up.clear()
            asyncio.get_running_loop().call_later(0.3, self.policy.up.set)
        return await super().draw(first, extra)


def test_an_engine_that_dies_during_a_batch_costs_that_batch_only(tmp_path: Path) -> None:
    training = {"local_groups": 1, "external_groups": 0, "max_staleness": 0}

    async def body() -> Any:
        return await run_rounds(tmp_path, training, MIXED, policy=PairedToy(), sampling=DiesOnce, count=4)

    records, sampling, _ = asyncio.run(body())
    assert sampling.died
    assert [(record.local_groups, record.staleness_max) for record in records] == [(1, 0)] * 4


class LosesLine(PairedSampling):
    """Every second batch turns out to be of steps that were lost."""

    calls = 0

    async def draw(self, first: int, extra: int) -> SampledGroups:
        self.calls += 1
        if self.calls % 2:
            raise LostVersion("it is of steps that were lost")
        return await super().draw(first, extra)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_batch_of_a_lost_line_is_drawn_again_and_gives_its_place_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    monkeypatch.setattr(rounds, "LONGEST_PAUSE_SECONDS", 0.01)
    training = {"local_groups": 1, "external_groups": 0, "max_staleness": staleness}

    async def body() -> Any:
        return await run_rounds(tmp_path, training, MIXED, policy=PairedToy(), sampling=LosesLine, count=6)

    records, _, _ = asyncio.run(body())
    assert [record.local_groups for record in records] == [1] * 6
    assert max(record.staleness_max for record in records) <= staleness


def test_completions_of_several_versions_are_counted(tmp_path: Path) -> None:
    class Mixed(PairedSampling):
        async def draw(self, first: int, extra: int) -> SampledGroups:
            new = group(1 + len(self.asked), MIXED, self.policy.engine_version, first=True)
            self.asked.append((first, extra))
            two, one = new.completions
            new = structs.replace(new, completions=[structs.replace(two, policy_versions=[0, 1]), one])
            ids = await self.pool.add_local("me", [new], time.time())
            return SampledGroups(ids=ids, rewards_first_drawn=[0.5], tokens=4, seconds=0.1, published=0)

    training = {"local_groups": 1, "external_groups": 0, "max_staleness": 1}

    async def body() -> Any:
        return await run_rounds(tmp_path, training, MIXED, policy=PairedToy(), sampling=Mixed)

    records, _, _ = asyncio.run(body())
    assert [record.mixed_completions for record in records] == [1, 1, 1]


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
