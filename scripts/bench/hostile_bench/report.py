"""Results of the runs: one line each in a CSV file, a table of pairs, and which goals were reached."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Final

import csv_files

KINDS: Final = ("streams", "hints", "dht", "work", "valid")
NODES: Final = 4  # honest ones, and as many others
ATTACKERS: Final = "attackers"
BUSY: Final = "busy"

MOST_COST: Final = 1.1  # CPU-seconds a round beside attackers, times those beside busy non-attackers
MOST_MIB: Final = 20.0  # of memory a node beyond that beside busy non-attackers; less is reached


@dataclass(frozen=True)
class Result:
    """One run: four honest nodes beside four others. Counts are of the whole run, all honest nodes together."""

    repeat: int
    kind: str
    beside: str  # ATTACKERS, or BUSY: as busy, but they talk to nobody
    rounds: int  # measured, a node
    seconds: float  # of the measured time
    cpu_a_round: float  # CPU-seconds of a node's processes; the next four are its parts
    cpu_node: float
    cpu_p2pd: float
    cpu_policy: float
    cpu_scorer: float
    pss_mib: float  # of a node's processes, mean of the nodes, at the end
    others_cpu: float  # CPU-seconds a second of the others, all together
    operations: int  # of the attackers
    failed: int  # of these operations: refused, cut off or timed out
    crashes: int  # of nodes, p2pd and policy workers; a node that crashed is left out of CPU and memory
    scorer_restarts: int  # a scorer that an answer took down is replaced by design
    external: int  # groups of others that were taken into pools
    hostile: int  # of these, by attackers: properly made, judged like anybody's
    forged: int  # of these, not what their producer made and signed, or not to be accepted
    unproven: int  # of these, by honest nodes whose own copy was gone before it was seen
    trained: int  # groups of others that were trained on, all of them judged again afterwards
    wrong_tokens: int  # trained on with another question or another reward than the second judgement says
    executed: int  # marks left by code that was planted in answers


_HEADINGS: Final = (
    "attackers",
    "pairs",
    "CPU s a round, busy",
    "ratio",
    "CPU ms a round more: node, p2pd, policy, scorers",
    "of a core, a node",
    "CPU s of all nodes for one of the attackers'",
    "MiB a node more",
    "crashes",
    "scorer restarts",
    "operations a run",
    "of them failed",
    "groups of theirs accepted",
    "forged",
    "groups trained on, all",
    "tokens on a wrong truth",
    "code executed",
)

COLUMNS: Final = [field.name for field in fields(Result)]


@dataclass(frozen=True)
class Pair:
    """The two runs of one kind in one repeat."""

    attacked: Result
    busy: Result

    @property
    def cost(self) -> float:
        """Ratio of CPU-seconds a round."""
        return self.attacked.cpu_a_round / self.busy.cpu_a_round

    @property
    def cores(self) -> float:
        """CPU-seconds a second that the attackers cost a node."""
        more = self.attacked.cpu_a_round - self.busy.cpu_a_round
        return more * self.attacked.rounds / self.attacked.seconds

    @property
    def leverage(self) -> float:
        """CPU-seconds that the attackers cost all nodes, for one of their own."""
        return self.cores * NODES / self.attacked.others_cpu

    @property
    def mib(self) -> float:
        """Memory a node that the attackers cost."""
        return self.attacked.pss_mib - self.busy.pss_mib


def pairs(results: Sequence[Result], rounds: int) -> dict[str, list[Pair]]:
    """The complete pairs of so many rounds by kind, by repeat."""
    found = {(one.kind, one.repeat, one.beside): one for one in results if one.rounds == rounds}
    made: dict[str, list[Pair]] = {}
    for (kind, repeat, beside), one in sorted(found.items()):
        if beside == ATTACKERS and (busy := found.get((kind, repeat, BUSY))):
            made.setdefault(kind, []).append(Pair(one, busy))
    return {kind: made[kind] for kind in KINDS if kind in made}


def table(results: Sequence[Result], rounds: int) -> str:
    """Markdown: a row a kind. Ratios and differences are medians over the pairs, with the smallest and largest."""
    head = f"| {' | '.join(_HEADINGS)} |"
    lines = [head, "|" + "---|" * len(_HEADINGS)]
    for kind, found in pairs(results, rounds).items():
        attacked = [pair.attacked for pair in found]
        busy = median(pair.busy.cpu_a_round for pair in found)
        cells = [
            kind,
            str(len(found)),
            f"{busy:.2f}",
            _spread([pair.cost for pair in found], "{:.2f}"),
            ", ".join(f"{_more(found, part):+.0f}" for part in ("cpu_node", "cpu_p2pd", "cpu_policy", "cpu_scorer")),
            _spread([pair.cores for pair in found], "{:.0%}"),
            _spread([pair.leverage for pair in found], "{:.1f}"),
            _spread([pair.mib for pair in found], "{:+.1f}"),
            str(sum(one.crashes for one in attacked)),
            str(sum(one.scorer_restarts for one in attacked)),
            f"{median(one.operations for one in attacked):.0f}",
            f"{sum(one.failed for one in attacked) / max(1, sum(one.operations for one in attacked)):.0%}",
            str(sum(one.hostile for one in attacked)),
            str(sum(one.forged for one in attacked)),
            str(sum(one.trained for one in attacked)),
            str(sum(one.wrong_tokens for one in attacked)),
            str(sum(one.executed for one in attacked)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _more(found: Sequence[Pair], part: str) -> float:
    """Median of what the attackers cost in one part of a node, in milliseconds."""
    return 1000 * median(float(getattr(pair.attacked, part) - getattr(pair.busy, part)) for pair in found)


def _spread(values: Sequence[float], form: str) -> str:
    middle, low, high = (form.format(value) for value in (median(values), min(values), max(values)))
    return middle if len(values) == 1 else f"{middle} ({low}, {high})"


def verdicts(results: Sequence[Result], rounds: int) -> list[str]:
    """A line a goal and kind, beginning with "reached" or "not reached"; a goal is that of the median."""
    lines = []
    for kind, found in pairs(results, rounds).items():
        cost, mib = median(pair.cost for pair in found), median(pair.mib for pair in found)
        lines.append(_goal(cost <= MOST_COST, f"{kind}: {cost:.2f} times the CPU a round, at most {MOST_COST}"))
        lines.append(_goal(mib < MOST_MIB, f"{kind}: {mib:+.1f} MiB a node, less than {MOST_MIB:+g}"))
        for name, what in (
            ("crashes", "crashes"),
            ("forged", "forged groups accepted"),
            ("wrong_tokens", "tokens trained on a wrong truth"),
            ("executed", "code executed"),
        ):
            count = sum(int(getattr(pair.attacked, name)) for pair in found)
            lines.append(_goal(count == 0, f"{kind}: {count} {what}, 0"))
    return lines


def _goal(reached: bool, what: str) -> str:
    return f"{'reached' if reached else 'not reached'}: {what}"


def append(file: Path, results: Sequence[Result]) -> None:
    """Add runs to a results file, which is made with its head where it is missing."""
    csv_files.append(file, map(csv_files.row, results))


def read(file: Path) -> list[Result]:
    """Runs of a results file; none where there is none."""
    return [csv_files.typed(line, Result) for line in csv_files.read(file)]
