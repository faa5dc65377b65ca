"""The statistics of the experiments, against plain formulas and against truth that is known."""

import math
import random
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "scripts" / "bench"))

from selection import simulate
from simulation.stats import FLOOR, area, cut, paired_ratio, reached


def test_the_area_is_the_mean_height_whatever_the_spacing() -> None:
    assert area([(0, 0.0), (20, 0.2)]) == pytest.approx(0.1)
    assert area([(0, 0.0), (10, 0.1), (20, 0.2), (40, 0.4)]) == pytest.approx(0.2)


def test_a_level_is_reached_between_two_points_or_not_at_all() -> None:
    curve = [(0, 0.0), (20, 0.1), (40, 0.3)]
    assert reached(curve, 0.2) == pytest.approx(30)
    assert reached(curve, 0.0) == 0
    assert reached(curve, 0.31) is None


def test_a_curve_is_cut_between_two_points() -> None:
    curve = [(0, 0.0), (10, 0.1), (30, 0.3)]
    assert cut(curve, 20) == [(0, 0.0), (10, 0.1), (20, pytest.approx(0.2))]
    assert cut(curve, 10) == curve[:2]
    assert cut(curve, 40) == curve


def test_pairs_are_matched_by_base_and_seed_and_others_left_out() -> None:
    first = {("a", 0): 0.2, ("a", 1): 0.4, ("b", 0): 0.9}
    second = {("a", 0): 0.1, ("a", 1): 0.2, ("b", 1): 0.1}
    found = paired_ratio(first, second)
    assert (found.pairs, found.wins) == (2, 2)
    assert found.estimate == found.low == found.high == pytest.approx(2.0)


def test_one_pair_has_no_interval() -> None:
    with pytest.raises(ValueError, match="an interval needs two"):
        paired_ratio({("a", 0): 0.2}, {("a", 0): 0.1})


def test_a_swarm_that_never_was_right_counts_as_the_floor() -> None:
    found = paired_ratio({("a", 0): 0.0, ("a", 1): 0.0}, {("a", 0): 2 * FLOOR, ("a", 1): 2 * FLOOR})
    assert found.estimate == pytest.approx(0.5)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng, truth, covered = random.Random(0), 1.3, 0
    for _ in range(2000):
        shared = [rng.gauss(0, 1) for _ in range(8)]  # what both arms of a pair have in common
        second = {("a", i): math.exp(x) for i, x in enumerate(shared)}
        first = {key: value * truth * math.exp(rng.gauss(0, 0.3)) for key, value in second.items()}
        found = paired_ratio(first, second, floor=1e-9)
        covered += found.low <= truth <= found.high
    assert 0.88 < covered / 2000 < 0.92


def test_selection_alone_lifts_the_reward_as_the_formula_says() -> None:
    rate, completions = 0.1, 8
    found = simulate(rate, 4, 4, nodes=64, completions=completions, rounds=20_000, rng=np.random.default_rng(0))
    mixed = 1 - (1 - rate) ** completions - rate**completions
    of_usable = (rate - rate**completions) / mixed  # mean reward of a group that has an advantage
    assert found.external_used == pytest.approx(4, abs=0.01)
    assert found.after_selection == pytest.approx((rate + of_usable) / 2, rel=0.02)
    assert found.first_drawn == pytest.approx(rate, rel=0.02)


def test_with_few_peers_the_supply_runs_out() -> None:
    found = simulate(0.02, 4, 4, nodes=2, completions=8, rounds=2_000, rng=np.random.default_rng(0))
    assert found.external_used < 1
