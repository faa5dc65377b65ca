"""What the measurements say: medians, ratios to our own, a table and a file."""

import csv
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

MIB = 1 << 20
COLUMNS = (
    *("model", "questions", "shape", "contender", "repetition", "seconds", "cpu_seconds", "flat_cpu_seconds"),
    *("peak_bytes", "left_bytes", "error_mean", "error_max", "failed"),
)


@dataclass
class Measured:
    """One contender on one workload; a value a repetition."""

    name: str
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    flat_cpu_seconds: list[float] = field(default_factory=list)
    peak_bytes: float = 0.0
    left_bytes: float = 0.0
    error_mean: float = 0.0
    error_max: float = 0.0
    failed: str = ""  # why nothing was measured; empty: it was

    def add(self, cost: dict[str, float], warm_up: bool) -> None:
        """Count a step. A warm-up counts for memory alone: it allocates the optimizer's state."""
        self.peak_bytes = max(self.peak_bytes, cost["peak_bytes"])
        self.left_bytes = cost["left_bytes"]
        if not warm_up:
            self.seconds.append(cost["seconds"])
            self.cpu_seconds.append(cost["cpu_seconds"])

    def compare(self, found: Sequence[float], exact: Sequence[float]) -> None:
        """Take the error of log-probs."""
        errors = [abs(a - b) for a, b in zip(found, exact, strict=True)]
        self.error_mean, self.error_max = statistics.fmean(errors), max(errors)


@dataclass(frozen=True)
class Ratio:
    """How many times as much another needs: the median over repetitions, and the smallest and largest one."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def ratio(other: Sequence[float], own: Sequence[float]) -> Ratio:
    """Ratio repetition by repetition: a repetition's runs are neighbours in time, so that both were disturbed alike."""
    ratios = [a / b for a, b in zip(other, own, strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


def fastest(measured: Sequence[Measured], prefix: str) -> Measured:
    """The fastest of a library's configurations, by CPU time. Raises ValueError where none was measured."""
    return min(
        (one for one in measured if one.name.startswith(prefix) and not one.failed),
        key=lambda one: statistics.median(one.cpu_seconds),
    )


def table(measured: Sequence[Measured]) -> str:
    """One row a contender; the first one is ours."""
    ours = measured[0]
    lines = [
        "contender             step s   CPU s   times ours, CPU s    wall  some flat  peak MiB  left MiB  "
        "logp error mean     max"
    ]
    for one in measured:
        if one.failed:
            lines.append(f"{one.name:<20} {one.failed}")
            continue
        flat = ratio(one.flat_cpu_seconds, ours.flat_cpu_seconds).median if one.flat_cpu_seconds else float("nan")
        lines.append(
            f"{one.name:<20} {statistics.median(one.seconds):7.3f} {statistics.median(one.cpu_seconds):7.3f}"
            f"   {ratio(one.cpu_seconds, ours.cpu_seconds)!s:<18} {ratio(one.seconds, ours.seconds).median:6.2f}"
            f" {flat:10.2f} {one.peak_bytes / MIB:9.0f} {one.left_bytes / MIB:9.0f}"
            f"          {one.error_mean:.1e} {one.error_max:.1e}"
        )
    return "\n".join(lines)


def goals(measured: Sequence[Measured]) -> list[str]:
    """Each goal with what was found."""
    ours, lines = measured[0], []
    for prefix, what, times in (
        ("genrl minibatch", "genrl at equal minibatch", 5.0),
        ("trl", "TRL at its fastest", 1.5),
    ):
        try:
            other = fastest(measured, prefix)
        except ValueError:
            lines.append(f"left out {what}: not measured, see above")
            continue
        found = (
            (f"{what}, at least {times:g} times our time", ratio(other.cpu_seconds, ours.cpu_seconds).median, times),
            (f"{what}, at least twice our memory", other.peak_bytes / ours.peak_bytes, 2.0),
        )
        lines += [f"{'reached' if value >= goal else 'MISSED '}  {what}: {value:.2f}" for what, value, goal in found]
    right = ours.error_max <= 1e-4
    return [*lines, f"{'reached' if right else 'MISSED '}  our largest error at most 1e-4: {ours.error_max:.1e}"]


def write(path: Path, workloads: Sequence[tuple[dict[str, object], Sequence[Measured]]]) -> None:
    """All raw values: JSON, or CSV with one line a repetition."""
    if path.suffix == ".json":
        path.write_text(
            json.dumps([{"workload": what, "measured": [asdict(m) for m in measured]} for what, measured in workloads])
        )
        return
    with path.open("w", newline="") as file:
        out = csv.DictWriter(file, COLUMNS)
        out.writeheader()
        for what, measured in workloads:
            for one in measured:
                if one.failed:
                    names = {name: what[name] for name in ("model", "questions", "shape")}
                    out.writerow(names | {"contender": one.name, "failed": one.failed})
                for number, (wall, cpu) in enumerate(zip(one.seconds, one.cpu_seconds, strict=True)):
                    out.writerow(
                        {
                            "model": what["model"],
                            "questions": what["questions"],
                            "shape": what["shape"],
                            "contender": one.name,
                            "repetition": number,
                            "seconds": wall,
                            "cpu_seconds": cpu,
                            "flat_cpu_seconds": one.flat_cpu_seconds[number] if one.flat_cpu_seconds else "",
                            "peak_bytes": int(one.peak_bytes),
                            "left_bytes": int(one.left_bytes),
                            "error_mean": one.error_mean,
                            "error_max": one.error_max,
                        }
                    )
