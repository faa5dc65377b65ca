"""Attacks on the scorers beyond those of tests/tasks/test_sandbox.py, test_scoring.py and test_questions.py."""

import asyncio
from collections.abc import Iterator

import pytest

from sapo_node.tasks.base import TaskRefused
from sapo_node.tasks.scoring import MAX_FAULTS, CostlyGroup, ScorerPool
from sapo_node.workers import WorkerError
from tests.hostile import endless_worker
from tests.tasks.specs import spec

pytestmark = pytest.mark.slow  # workers that import reasoning_gym, and are lost and started again
GCD = spec("gcd")


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def hijacked(loop: asyncio.Runner) -> Iterator[ScorerPool]:
    pool = ScorerPool(1, 2.0, module="tests.hostile.hijacked_worker")
    loop.run(pool.start())
    yield pool
    loop.run(pool.close())


@pytest.fixture(scope="module")
def endless(loop: asyncio.Runner) -> Iterator[ScorerPool]:
    pool = ScorerPool(1, 1.0, module="tests.hostile.endless_worker")
    loop.run(pool.start())
    yield pool
    loop.run(pool.close())


@pytest.mark.parametrize("forged", ["none", "too many", "huge", "nan", "texts", "negative", "digest", "hours"])
def test_a_hijacked_scorer_cannot_forge_rewards_that_are_none(
    loop: asyncio.Runner, hijacked: ScorerPool, forged: str
) -> None:
    """Hope: an answer that broke out of the filters sends rewards of 1e300, NaN or too many, and the node trains on
    them, falls over, or asks for ever."""
    with pytest.raises(WorkerError, match="does not fit what it was asked"):
        loop.run(hijacked.judge(GCD, 5, [forged, forged], strict=True))


@pytest.mark.parametrize("seed", [0, 1])
def test_a_hijacked_scorer_cannot_hold_a_draw_for_ever(loop: asyncio.Runner, hijacked: ScorerPool, seed: int) -> None:
    """Hope: an empty answer to a request for questions is asked again without end."""
    before = hijacked.faults
    [found] = loop.run(hijacked.questions([(GCD, seed)]))
    assert isinstance(found, TaskRefused)
    assert hijacked.faults - before <= MAX_FAULTS


@pytest.mark.parametrize("seed", [endless_worker.ENDLESS, endless_worker.GREEDY])
def test_a_generator_that_never_ends_or_eats_memory_is_its_senders_fault(
    loop: asyncio.Runner, endless: ScorerPool, seed: int
) -> None:
    """Hope: coordinates within all bounds for which a generator loops or fills the memory stop the receiver."""
    with pytest.raises(CostlyGroup):
        loop.run(endless.judge(GCD, seed, ["1", "2"], strict=True))


def test_a_question_of_megabytes_is_refused(loop: asyncio.Runner, endless: ScorerPool) -> None:
    """Hope: a question of 14 MB is generated, hashed, kept and shown to the model by everyone."""
    with pytest.raises(TaskRefused, match="14000000 bytes, more than 16384"):
        loop.run(endless.judge(GCD, endless_worker.LARGE, ["1", "2"], strict=True))
