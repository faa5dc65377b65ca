"""From results to tables and pictures."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean

import csv_files

from .stages import Claim
from .stats import Curve, Key, Ratio, area, cut, paired_ratio, reached
from .swarm import Run, Weights

LEVELS = (0.1, 0.2, 0.3)


@dataclass(frozen=True)
class Result:
    """One finished run: its evaluations as the CSV has them, as numbers."""

    run: Run
    began: Weights
    points: list[dict[str, float]]

    def curve(self, x: str = "round", y: str = "held_out") -> Curve:
        """Evaluations as (x, y)."""
        return [(point[x], point[y]) for point in self.points]

    @property
    def area(self) -> float:
        """Mean held-out pass@1 over the run: the primary measure."""
        return area(self.curve())

    @property
    def area_any(self) -> float:
        """The same of the share of questions with a right answer among four."""
        return area(self.curve(y="held_out_any"))

    @property
    def last(self) -> dict[str, float]:
        """The last evaluation."""
        return self.points[-1]

    @property
    def key(self) -> Key:
        """What a pair has in common."""
        return f"{self.run.base} {self.began.weights}", self.run.seed


def read(file: Path) -> list[Result]:
    """The finished runs of a results file, in its order; none where there is none."""
    points: dict[tuple[Run, Weights], list[dict[str, float]]] = defaultdict(list)
    names = [one.name for kind in (Run, Weights) for one in fields(kind)]
    for line in csv_files.read(file):
        numbers = {key: float(value) for key, value in line.items() if key not in names and value}
        points[csv_files.typed(line, Run), csv_files.typed(line, Weights)].append(numbers)
    return [Result(run, began, found) for (run, began), found in points.items() if "last" in found[-1]]


def begun_elsewhere(results: Sequence[Result], runs: Sequence[Run], here: Mapping[str, Weights]) -> list[Result]:
    """Finished runs on other weights than `here` (by base), of seeds that lack a run on theirs: they pair with nothing
    that is still to come."""
    done: dict[Key, set[Run]] = defaultdict(set)
    for one in results:
        done[one.key].add(one.run)
    wanted: dict[tuple[str, int], set[Run]] = defaultdict(set)
    for run in runs:
        wanted[run.base, run.seed].add(run)
    return [
        one for one in results if one.began != here[one.run.base] and done[one.key] < wanted[one.run.base, one.run.seed]
    ]


def by_arm(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Results by arm, in order of appearance."""
    found: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        found[result.run.arm].append(result)
    return dict(found)


def ratio(
    first: Sequence[Result], second: Sequence[Result], measure: str = "area", confidence: float = 0.9
) -> Ratio | None:
    """How many times the one arm's measure is the other's; None where fewer than two pairs are there."""
    values: list[Mapping[Key, float]] = [{one.key: getattr(one, measure) for one in arm} for arm in (first, second)]
    try:
        return paired_ratio(*values, confidence=confidence)
    except ValueError:
        return None


def rates(results: Sequence[Result]) -> str:
    """Markdown: mean area by arm and learning rate, with the number of seeds."""
    cells: dict[tuple[str, float], list[float]] = defaultdict(list)
    for result in results:
        cells[result.run.arm, result.run.lr].append(result.area)
    columns = sorted({lr for _, lr in cells})
    lines = ["| arm | " + " | ".join(f"lr {lr:g}" for lr in columns) + " |", "|---" * (1 + len(columns)) + "|"]
    for arm in dict.fromkeys(arm for arm, _ in cells):
        best = max((lr for lr in columns if (arm, lr) in cells), key=lambda lr: fmean(cells[arm, lr]))
        row = []
        for lr in columns:
            found = cells.get((arm, lr))
            text = f"{fmean(found):.3f} ({len(found)})" if found else ""
            row.append(f"**{text}**" if lr == best else text)
        lines.append(f"| {arm} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def comparison(results: Sequence[Result], references: Sequence[str]) -> str:
    """Markdown: every arm with its measures, and its ratio to each of the references."""
    arms = by_arm(results)
    heads = ["arm", "runs", "area", "area, any of 4", "pass@1 at the end", "pass@8", "completions a round"]
    heads += [f"area / {reference}" for reference in references]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for arm, found in arms.items():
        cells = [
            arm,
            str(len(found)),
            f"{fmean(one.area for one in found):.3f}",
            f"{fmean(one.area_any for one in found):.3f}",
            f"{fmean(one.last['last'] for one in found):.3f}",
            f"{fmean(one.last['last_any'] for one in found):.3f}",
            f"{fmean(one.last['completions'] / one.last['round'] for one in found):.0f}",
            *("" if arm == one else str(ratio(found, arms.get(one, [])) or "") for one in references),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def equal_cost(results: Sequence[Result], pairs: Iterable[tuple[str, str]]) -> str:
    """Markdown: ratios of arms in which the curves of a pair end where the cheaper run has spent all of its CPU
    seconds: what each had learnt for the same computing."""
    arms = by_arm(results)
    lines = ["| at equal CPU seconds | ratio of areas |", "|---|---|"]
    for names in pairs:
        first, second = ({one.key: one for one in arms.get(name, [])} for name in names)
        areas: tuple[dict[Key, float], dict[Key, float]] = ({}, {})
        for key in first.keys() & second.keys():
            both = first[key], second[key]
            spent = min(one.last["seconds"] for one in both)
            for one, found in zip(both, areas, strict=True):
                found[key] = area(cut(one.curve("seconds"), spent))
        if len(areas[0]) > 1:
            lines.append(f"| {names[0]} over {names[1]} | {paired_ratio(*areas)} |")
    return "\n".join(lines)


def by_base(results: Sequence[Result], starts: Sequence[Result]) -> str:
    """Markdown: a line a base: where it starts, what both plain arms make of it, and what was to be expected.

    `starts` are runs with a learning rate of 0: their first rewards say what a base can do, their training sets how
    many groups have an advantage. Beside that count stands what the start score alone lets expect, as if all tasks were
    alike: (I f + min(J, (N - 1) I f)) to (I + J) f, with f = 1 - p^L - (1 - p)^L, I = J = 4, N = L = 8.
    """
    heads = ["base", "right at the start", "area 8/0", "area 4/4", "4/4 over 8/0"]
    heads += ["groups with an advantage at the start: 8/0, 4/4", "4/4 over 8/0", "from the start score"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    scores = {one.run.base: one.last["reward_first"] for one in starts}
    for base, p in sorted(scores.items(), key=lambda item: item[1]):
        arms = by_arm([one for one in results if one.run.base == base])
        still = by_arm([one for one in starts if one.run.base == base])
        if not {"8/0", "4/4"} <= arms.keys() & still.keys():
            continue
        alone, shared = (fmean(one.last["informative"] for one in still[arm]) for arm in ("8/0", "4/4"))
        f = 1 - p**8 - (1 - p) ** 8
        expected = (4 * f + min(4, 7 * 4 * f)) / (8 * f) if f else float("nan")
        areas = [f"{fmean(one.area for one in arms[arm]):.3f}" for arm in ("8/0", "4/4")]
        cells = [base, f"{p:.3f}", *areas, str(ratio(arms["4/4"], arms["8/0"]) or "")]
        cells += [f"{alone:.1f}, {shared:.1f}", f"{shared / alone:.2f}" if alone else "", f"{expected:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def costs(results: Sequence[Result]) -> str:
    """Markdown: what each arm spent until it reached each level, as means over the runs that did: rounds, completions
    of the whole swarm, CPU seconds of the whole swarm (evaluations left out)."""
    heads = ["arm", *(f"to {level:g}: reached by, rounds, completions, CPU s" for level in LEVELS)]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for arm, found in by_arm(results).items():
        lines.append("| " + " | ".join([arm, *(_cost(found, level) for level in LEVELS)]) + " |")
    return "\n".join(lines)


def _cost(results: Sequence[Result], level: float) -> str:
    """One cell of `costs`. A run that never got there is censored: it is counted, and is in no mean."""
    spent = []
    for measure in ("round", "completions", "seconds"):
        at = [reached(one.curve(measure), level) for one in results]
        there = [value for value in at if value is not None]
        spent.append(f"{fmean(there):,.0f}" if there else "-")
    return f"{len(there)} of {len(results)}, " + ", ".join(spent) if there else f"0 of {len(results)}"


def claims(results: Sequence[Result], claimed: Sequence[Claim]) -> str:
    """Markdown: each claim with the ratio found, and whether its goal is reached; beside it the lower bound of an
    interval that is wide enough for all claims together (Bonferroni), and the ratio on each base."""
    arms = by_arm(results)
    lines = ["| | ratio of areas | goal | | lower bound, all together | by base |", "|---|---|---|---|---|---|"]
    for one in claimed:
        first, second = arms.get(one.first, []), arms.get(one.second, [])
        found, together = ratio(first, second), ratio(first, second, confidence=1 - 0.1 / len(claimed))
        goal = (f"estimate at least {one.estimate:g}, " if one.estimate else "") + f"lower bound above {one.low:g}"
        held = found is not None and found.low > one.low and found.estimate >= one.estimate
        told = "not run yet" if found is None else "reached" if held else "**not reached**"
        bases = sorted({result.run.base for result in first})
        by_base = [ratio([one for one in first if one.run.base == base], second) for base in bases]
        cells = [
            f"{one.text}: {one.first} over {one.second}",
            str(found or ""),
            goal,
            told,
            f"{together.low:.2f}" if together else "",
            ", ".join(f"{part.estimate:.2f}" for part in by_base if part),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(results: Sequence[Result], arms: Sequence[str], path: Path, x: str = "round", title: str = "") -> None:
    """A picture: mean curve of each arm over its runs, with the range of half of them."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    found = by_arm(results)
    for arm in arms:
        curves = [np.array(one.curve(x)) for one in found.get(arm, [])]
        if not curves:
            continue
        across = np.mean([curve[:, 0] for curve in curves], axis=0)
        heights = np.array([curve[:, 1] for curve in curves])
        (line,) = axes.plot(across, heights.mean(0), label=f"{arm} ({len(curves)} swarms)")
        low, high = np.quantile(heights, (0.25, 0.75), axis=0)
        axes.fill_between(across, low, high, color=line.get_color(), alpha=0.15)
    axes.set_xlabel({"round": "rounds (optimiser steps of a node)", "completions": "completions of the swarm"}[x])
    axes.set_ylabel("held-out pass@1")
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
