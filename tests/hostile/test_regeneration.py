"""Attacks by coordinates: settings with which a generator takes long or makes much. Generators run in real scorers."""

import asyncio
import itertools
import math
import time
from random import Random
from typing import Any

import pytest

from sapo_node.rollouts.codec import _check_task
from sapo_node.swarm.protocol import MAX_CONFIG_LIST, MAX_CONFIG_TEXT, MAX_INTEGER
from sapo_node.tasks.base import Question, TaskRefused
from sapo_node.tasks.catalog import (
    MAX_LIST,
    MAX_QUESTION_BYTES,
    OFFERED,
    Choice,
    Field,
    Flag,
    Int,
    Real,
    Several,
    validate,
)
from sapo_node.tasks.scoring import ScorerPool
from tests.rollouts.test_verify import task_ref
from tests.tasks.specs import spec

QUESTION_SECONDS = 1.0  # of computing, on a busy machine too
RANDOM_SETTINGS = 12  # for each task


def ends(field: Field) -> list[Any]:
    """The extreme values of a field."""
    if isinstance(field, Int | Real):
        return [field.low, field.high]
    if isinstance(field, Flag):
        return [False, True]
    if isinstance(field, Choice):
        return list(field.words)
    return [[field.default[0]], list(field.default), [field.default[-1]] * MAX_LIST]


def allowed(name: str, config: dict[str, Any]) -> bool:
    try:
        validate(name, config)
    except TaskRefused:
        return False
    return True


def corners(name: str) -> list[dict[str, Any]]:
    """Settings at the ends of all their ranges: for each task, up to 40 of the combinations that are allowed."""
    fields = OFFERED[name].fields
    everything = itertools.islice(itertools.product(*map(ends, fields.values())), 200_000)
    found = [config for values in everything if allowed(name, config := dict(zip(fields, values, strict=True)))]
    return found if len(found) <= 40 else [found[0], found[-1], *Random(name).sample(found, 38)]


def between(name: str, rng: Random) -> dict[str, Any]:
    """Some settings within their ranges that are allowed together."""

    def value(field: Field) -> Any:
        if isinstance(field, Int):
            return rng.randint(field.low, field.high)
        if isinstance(field, Real):
            return rng.uniform(field.low, field.high)
        return rng.choice(ends(field))

    for _ in range(1000):
        config = {key: value(field) for key, field in OFFERED[name].fields.items() if rng.random() < 0.7}
        if allowed(name, config):
            return config
    return {}


@pytest.mark.parametrize("name", OFFERED)
def test_no_setting_of_any_task_is_without_bounds(name: str) -> None:
    """Hope: one parameter of one task was forgotten, and takes 10^9."""
    for key, field in OFFERED[name].fields.items():
        if isinstance(field, Int | Real):
            assert math.isfinite(field.low), key
            assert max(abs(field.low), abs(field.high)) <= MAX_INTEGER, f"{key}: the wire carries no larger numbers"
            assert field.low <= field.default <= field.high, key
        elif isinstance(field, Several):
            assert 0 < len(field.default) <= MAX_LIST <= MAX_CONFIG_LIST, key
            assert all(len(word) <= MAX_CONFIG_TEXT for word in field.default), key
    assert corners(name), "and its extremes can be asked for"
    for config in corners(name)[:3]:
        _check_task(task_ref(name=name, config=config))  # raises what the wire does not carry


@pytest.mark.parametrize("value", [10**9, -1, 1e308, float("nan"), True, "9" * 200, [], [3] * 33, None, {"a": 1}])
def test_no_setting_takes_what_is_no_value_of_its_range(value: Any) -> None:
    """Hope: a type that a bound does not compare with slips by it, as true and NaN like to."""
    for name, task in OFFERED.items():
        for key, field in task.fields.items():
            if isinstance(field, Int | Real) and value == 10**9 and field.high >= 10**9:
                continue
            if isinstance(field, Int | Real) and value == -1 and field.low <= -1:
                continue
            if isinstance(field, Flag) and value is True:
                continue
            with pytest.raises(TaskRefused):
                validate(name, {key: value})


def test_settings_of_the_library_that_are_not_declared_are_refused() -> None:
    """Hope: seed, size or a file name, which every generator has, is passed on to it."""
    for name in OFFERED:
        for key in ("seed", "size", "data_file", "weights", "__class__", "", "min_n\0", "_config"):
            if key not in OFFERED[name].fields:
                with pytest.raises(TaskRefused, match="cannot be set"):
                    validate(name, {key: 1})


@pytest.fixture(scope="module")
def walk() -> dict[str, tuple[float, int, str]]:
    """The slowest question of each task, its size and its settings, from a walk over extremes and what lies between."""
    rng = Random(5)

    async def walked() -> dict[str, tuple[float, int, str]]:
        pool = ScorerPool(1, 10.0)
        await pool.start()
        worst: dict[str, tuple[float, int, str]] = {}
        try:
            for name in OFFERED:
                for config in [*corners(name), *(between(name, rng) for _ in range(RANDOM_SETTINGS))]:
                    started = time.perf_counter()
                    found = await pool.questions([(spec(name, **config), rng.randrange(1 << 31)) for _ in range(2)])
                    seconds = (time.perf_counter() - started) / 2
                    size = max((len(one.text.encode()) for one in found if isinstance(one, Question)), default=0)
                    slowest, largest, _ = worst.get(name, (0.0, 0, ""))
                    if seconds > slowest or size > largest:
                        worst[name] = max(seconds, slowest), max(size, largest), str(config)
            assert pool.faults == 0, pool.last_fault
        finally:
            await pool.close()
        return worst

    return asyncio.run(walked())


@pytest.mark.slow
def test_questions_at_all_extremes_take_no_time(walk: dict[str, tuple[float, int, str]]) -> None:
    """Hope: some corner of some task, each setting within its range, takes seconds to generate."""
    slowest = sorted(((seconds, name, config) for name, (seconds, _, config) in walk.items()), reverse=True)
    print("\n".join(f"{seconds:7.3f} s  {name}  {config}" for seconds, name, config in slowest[:5]))
    assert set(walk) == set(OFFERED)
    assert slowest[0][0] < QUESTION_SECONDS, slowest[0]


@pytest.mark.slow
def test_questions_at_all_extremes_are_short(walk: dict[str, tuple[float, int, str]]) -> None:
    """Hope: some corner makes a question of megabytes that everybody hashes, keeps and prompts with."""
    largest = max((size, name, config) for name, (_, size, config) in walk.items())
    print(largest)
    assert largest[0] < MAX_QUESTION_BYTES // 2, largest
