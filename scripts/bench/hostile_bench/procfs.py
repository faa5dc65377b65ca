"""CPU time and memory of processes and all below them, from /proc (Linux). Parsing is apart from reading."""

import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """One line of /proc/<pid>/stat."""

    pid: int
    parent: int
    begun: int  # clock ticks since boot; with `pid` it names a process for good
    cpu_seconds: float  # user and system time, that of ended children which it waited for included


def parse_stat(text: str) -> Process:
    """A process from /proc/<pid>/stat. Its name, in parentheses, may hold spaces and parentheses of its own."""
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    ticks = sum(int(field) for field in fields[11:15])
    return Process(int(head.split(maxsplit=1)[0]), int(fields[1]), int(fields[19]), ticks / TICKS)


def parse_pss(text: str) -> float:
    """MiB of proportional set size in /proc/<pid>/smaps_rollup. Raises ValueError without such a line."""
    for line in text.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise ValueError("no Pss line")


def below(processes: Mapping[int, Process], root: int) -> list[Process]:
    """`root` and all below it, as far as they are there."""
    children: dict[int, list[int]] = {}
    for one in processes.values():
        children.setdefault(one.parent, []).append(one.pid)
    found = [root] if root in processes else []
    for pid in found:
        found += children.get(pid, [])
    return [processes[pid] for pid in found]


def at(times: Sequence[float], values: Sequence[float], when: float) -> float:
    """The value at a moment between samples, linearly; beyond them the first or the last. `times` rise."""
    right = bisect_left(times, when)
    if right == 0:
        return values[0]
    if right == len(times):
        return values[-1]
    begin, end = times[right - 1], times[right]
    return values[right - 1] + (values[right] - values[right - 1]) * (when - begin) / (end - begin)


def look() -> dict[int, Process]:
    """All processes now, by id."""
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                one = parse_stat(Path(entry.path, "stat").read_text())
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended meanwhile
            found[one.pid] = one
    return found


def command(pid: int) -> str:
    """The command line of a process, "" where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def pss_mib(pids: Sequence[int]) -> float:
    """Proportional set size of some processes together; those that have ended count nothing."""
    total = 0.0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += parse_pss(text) if text else 0.0  # a zombie's is empty
    return total
