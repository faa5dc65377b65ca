"""Feeds one surface many inputs and judges what each did: which exception, how long, how much memory.

An input that broke something is printed as hex with the seed and number that make it again.
"""

import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Final

MEASURED_EVERY: Final = 32
"""Memory is traced for one input in so many, and for each that is large or the slowest so far: tracing makes everything
some times slower."""

LARGE_BYTES: Final = 64 * 1024
MAX_BROKEN: Final = 20
"""Broken inputs kept; after so many the surface is broken, and more of them say nothing new."""


class Broken(Exception):
    """A property of a surface that did not hold, in words."""


@dataclass(frozen=True, kw_only=True)
class Surface:
    """Something that reads bytes of strangers.

    `make` draws an input; `feed` lets the program read it, and raises one of `refusals` or `Broken`. No input may take
    more than `seconds` of computing or `memory` bytes above what it came with.
    """

    name: str
    reads: str  # what of whom, for people
    make: Callable[[Random], bytes]
    feed: Callable[[bytes], None]
    refusals: tuple[type[BaseException], ...] = ()
    seconds: float = 0.25
    memory: int = 4 << 20


@dataclass
class Report:
    """What became of the inputs of one surface."""

    surface: str
    seed: int
    inputs: int = 0
    taken: int = 0  # read without an exception
    refused: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0  # seconds of computing
    slowest_number: int = 0
    most_memory: int = 0  # bytes, among the inputs measured
    seconds: float = 0.0
    broken: list[str] = field(default_factory=list)

    def line(self) -> str:
        """The report in one line."""
        return (
            f"{self.surface:14} {self.inputs:7} inputs  {self.taken:7} taken  {sum(self.refused.values()):7} refused  "
            f"slowest {1000 * self.slowest:6.1f} ms (#{self.slowest_number})  memory {self.most_memory >> 10:6} KiB  "
            f"{self.seconds:5.1f} s  {'ok' if not self.broken else f'{len(self.broken)} BROKEN'}"
        )


def input_of(surface: Surface, seed: int, number: int) -> bytes:
    """The input of a seed and a number; the same in every run."""
    return surface.make(Random(f"{surface.name}/{seed}/{number}"))


def fuzz(surface: Surface, count: int, seed: int) -> Report:
    """Feed `count` inputs. Never raises for what an input did."""
    report = Report(surface.name, seed)
    began = time.monotonic()
    for number in range(count):
        data = input_of(surface, seed, number)
        report.inputs += 1
        _one(surface, report, number, data)
        if len(report.broken) >= MAX_BROKEN:
            break
    report.seconds = time.monotonic() - began
    return report


def _one(surface: Surface, report: Report, number: int, data: bytes) -> None:
    problem = _fed(surface, report, number, data)
    hard = len(data) >= LARGE_BYTES or report.slowest_number == number
    if problem is None and (hard or number % MEASURED_EVERY == 0):
        problem = _measured(surface, report, data)
    if problem is not None:
        shown = data.hex() if len(data) <= 4096 else f"{data[:2048].hex()}... ({len(data)} bytes)"
        report.broken.append(f"{surface.name} seed {report.seed} number {number}: {problem}\n  input {shown}")


def _fed(surface: Surface, report: Report, number: int, data: bytes) -> str | None:
    """Let the surface read an input; what went wrong, or None."""
    started = time.thread_time()
    try:
        surface.feed(data)
    except surface.refusals as refusal:
        report.refused[type(refusal).__name__] += 1
    except Exception as error:  # noqa: BLE001 - that nothing else comes out is what is tested
        return f"{type(error).__name__}: {str(error)[:300]}"
    else:
        report.taken += 1
    spent = time.thread_time() - started
    if spent > surface.seconds:  # by itself, or because garbage of all that ran before was collected meanwhile?
        spent = min(spent, _again(surface, data))
    if spent > report.slowest:
        report.slowest, report.slowest_number = spent, number
    return f"it took {spent:.2f} s, more than {surface.seconds:g}" if spent > surface.seconds else None


def _again(surface: Surface, data: bytes) -> float:
    """Seconds of computing that an input takes the second time."""
    started = time.thread_time()
    with suppress(*surface.refusals):
        surface.feed(data)
    return time.thread_time() - started


def _measured(surface: Surface, report: Report, data: bytes) -> str | None:
    """Feed an input again while memory is traced."""
    tracemalloc.start()
    try:
        surface.feed(data)
    except surface.refusals:
        pass  # counted in the first run
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    report.most_memory = max(report.most_memory, peak)
    return f"it took {peak} bytes of memory, more than {surface.memory}" if peak > surface.memory else None
