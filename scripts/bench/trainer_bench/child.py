"""One contender in a process of its own: it takes steps when told to, and says what each cost.

    python -m trainer_bench.child NAME JOB.json

runs in the contender's own environment, so this module knows nothing but the standard library and torch. Commands come
as lines on stdin, answers go as JSON lines to stdout; whatever the libraries print goes to stderr.
"""

import ctypes
import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Batch = dict[str, Any]
"""`groups`, each with `question`, `prompt` (token ids), `completions` (token ids each), `rewards`, `logprobs`."""

MODULES = {"ours": "ours", "trl": "trl_grpo", "genrl": "genrl_grpo"}


class Contender(Protocol):
    """A trainer of some library, on a loaded model."""

    def prepare(self, batch: Batch) -> Callable[[], None]:
        """Everything that may be done before the clock starts; the answer takes one optimiser step on the batch."""

    def logprobs(self, batch: Batch) -> list[float]:
        """Log-probs of all completions' tokens as the trainer's loss sees them, under the model's first weights."""


@dataclass
class Meter:
    """Costs of steps. `base` is what was resident before the first one."""

    base: int = 0

    def measure(self, step: Callable[[], None]) -> dict[str, float]:
        """Wall and CPU seconds of a step, its peak, and what it left, in bytes above `base`."""
        gc.collect()
        if not self.base:
            self.base = status_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        peak, left = status_bytes("VmHWM") - self.base, status_bytes("VmRSS") - self.base
        return {"seconds": wall, "cpu_seconds": cpu, "peak_bytes": peak, "left_bytes": left}


def status_bytes(field: str) -> int:
    """VmRSS (resident) or VmHWM (its peak) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def padded(rows: Sequence[Sequence[int]], fill: int, left: bool) -> tuple[list[list[int]], list[list[int]]]:
    """Rows of one width, and their masks of ones and zeros."""
    width = max(map(len, rows))
    ids, masks = [], []
    for row in rows:
        blank = [fill] * (width - len(row))
        ids.append([*blank, *row] if left else [*row, *blank])
        zeros, ones = [0] * len(blank), [1] * len(row)
        masks.append(zeros + ones if left else ones + zeros)
    return ids, masks


def serve(contender: Contender, batches: dict[str, Batch]) -> None:
    """Answer commands until stdin ends: `step BATCH`, `logprobs BATCH`."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    meter = Meter()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command, batch = line.split()
        if command == "step":
            answer: Any = meter.measure(contender.prepare(batches[batch]))
        else:
            answer = contender.logprobs(batches[batch])
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    """Load the contender and serve."""
    name, job = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: no orphan when the bench is stopped
    import torch

    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    module = importlib.import_module(f"trainer_bench.{MODULES[name]}")
    serve(module.load(job), job["batches"])


if __name__ == "__main__":
    main()
