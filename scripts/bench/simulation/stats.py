"""What the results say: areas under curves, and ratios of arms in pairs of one seed and base.

The unit is a swarm: its nodes train on each other's groups, so they are no independent repetitions.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev

from scipy import stats

Curve = Sequence[tuple[float, float]]  # (x, y), x rising
Key = tuple[str, int]  # base with its weights, seed

FLOOR = 0.5 / (56 * 4 * 8)
"""Half of the smallest mean that one evaluation can show (56 questions x 4 samples x 8 nodes): a swarm that never gave
a right answer has an area of nothing, whose logarithm does not exist."""


def area(curve: Curve) -> float:
    """Mean height of a curve over its span (trapezoids): the area under it, divided by its length."""
    if len(curve) < 2:
        raise ValueError("a curve needs two points")
    total = sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in pairwise(curve))
    return total / (curve[-1][0] - curve[0][0])


def reached(curve: Curve, level: float) -> float | None:
    """Where a curve first reaches `level`, between two points by a straight line; None if it does not."""
    for (x0, y0), (x1, y1) in pairwise(curve):
        if y0 >= level:
            return x0
        if y1 >= level:
            return x0 + (x1 - x0) * (level - y0) / (y1 - y0)
    return None


def cut(curve: Curve, end: float) -> Curve:
    """A curve up to `end`, its last point there by a straight line; the whole one where it ends before."""
    kept = [(x, y) for x, y in curve if x <= end]
    if len(kept) < len(curve) and kept and kept[-1][0] < end:
        (x0, y0), (x1, y1) = curve[len(kept) - 1], curve[len(kept)]
        kept.append((end, y0 + (y1 - y0) * (end - x0) / (x1 - x0)))
    return kept


@dataclass(frozen=True)
class Ratio:
    """How many times the one arm's figure is the other's: a geometric mean over pairs, with its interval."""

    estimate: float
    low: float
    high: float
    pairs: int
    wins: int  # pairs in which the first arm was ahead

    def __str__(self) -> str:
        return f"{self.estimate:.2f} ({self.low:.2f} to {self.high:.2f}; {self.wins} of {self.pairs} ahead)"


def paired_ratio(
    first: Mapping[Key, float], second: Mapping[Key, float], confidence: float = 0.9, floor: float = FLOOR
) -> Ratio:
    """The ratio of two arms over the pairs that both have, by Student's t on logarithms; two-sided interval.

    The percentile bootstrap would be too narrow at such numbers of pairs: at n = 10 it covers 83 % for a nominal 90 %.
    Raises ValueError with fewer than two pairs.
    """
    common = sorted(first.keys() & second.keys())
    if len(common) < 2:
        raise ValueError(f"{len(common)} pairs; an interval needs two")
    logs = [math.log(max(first[key], floor) / max(second[key], floor)) for key in common]
    mean, n = fmean(logs), len(logs)
    half = float(stats.t.ppf((1 + confidence) / 2, n - 1)) * stdev(logs) / math.sqrt(n)
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), n, sum(value > 0 for value in logs))


@dataclass(frozen=True)
class Interval:
    """A difference of means, and where it may lie."""

    estimate: float
    low: float
    high: float


def interval(first: Sequence[float], second: Sequence[float], confidence: float = 0.9) -> Interval:
    """How far the mean of `first` is above that of `second`, where nothing is paired and the variances may differ:
    Welch's two-sided interval. Raises ValueError with fewer than two values of either."""
    if min(len(first), len(second)) < 2:
        raise ValueError("an interval needs two values of each")
    found = stats.ttest_ind(first, second, equal_var=False)
    low, high = found.confidence_interval(confidence)
    return Interval(fmean(first) - fmean(second), float(low), float(high))
