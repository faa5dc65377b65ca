"""The mixture: what is drawn, and that the first few of many draws are as random as few draws."""

import random
from collections import Counter

import pytest

from sapo_node.config import TasksSection
from sapo_node.tasks import mixture


def made() -> mixture.Mixture:
    entries = [{"name": "gcd", "weight": 3.0}, {"name": "lcm"}, {"name": "bf"}, {"name": "chain_sum"}]
    return mixture.load(TasksSection.model_validate({"mixture": entries}))


@pytest.mark.parametrize("count", [4, 16])
def test_the_first_draws_follow_the_weights_however_many_are_drawn(count: int) -> None:
    tasks, rng = made(), random.Random(7)
    first = Counter(position for _ in range(3000) for position in tasks.choose(count, rng)[:4])
    assert first[0] / first.total() == pytest.approx(0.5, abs=0.02)


def test_draws_continue_with_the_generator_that_is_kept() -> None:
    tasks, rng = made(), random.Random(7)
    tasks.choose(5, rng)
    state = rng.getstate()
    following = tasks.choose(5, rng)
    rng.setstate(state)
    assert tasks.choose(5, rng) == following


def test_a_task_that_teaches_is_drawn_more_often_and_none_is_forgotten() -> None:
    tasks, rng = made(), random.Random(7)
    keys = [(entry.spec.name, entry.spec.config_hash) for entry in tasks.entries]
    factors = tasks.factors({keys[0]: (0, 98), keys[1]: (49, 98), keys[2]: (0, 2)})  # nothing is known of the last one
    assert factors == [pytest.approx(0.05), pytest.approx(0.5), pytest.approx(0.25), pytest.approx(0.5)]
    drawn = Counter(tasks.choose(20_000, rng, factors))
    assert drawn[1] / drawn[0] == pytest.approx(0.5 / (3.0 * 0.05), rel=0.1)  # weights count as before


def test_without_evidence_the_weights_decide() -> None:
    tasks = made()
    assert len(set(tasks.factors({}))) == 1
