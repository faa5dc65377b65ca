"""Sampling speed and the cost of new weights: our engine, `transformers.generate`, vLLM, and vLLM while training.

    python scripts/bench/inference.py --model demo --questions 8 --samples 8

All draw the same questions (two ReasoningGYM tasks) from the whole distribution at temperature 1, with the same limit
of new tokens; only tokens up to a completion's end count. The trainer and what runs in its process have one CPU thread;
vLLM takes the threads it wants. Wall time is what a user waits; CPU time is shown beside it, because on a shared
machine only it compares.

"vllm + training" samples while a trainer steps without a pause on groups sampled before, and every step's weights go to
vLLM: the worst case for both. Then a real node without a swarm takes rounds (`sapo-node start`), and its own records
tell for how long sampling stood still for an exchange of weights, how stale tokens were, and for how much of the time
the trainer had nothing to do. `--no-vllm` leaves all that out.
"""

import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import reasoning_gym
import torch

from sapo_node.config import NodeConfig
from sapo_node.inference.base import SampledBatch, SamplingParams
from sapo_node.inference.paired import PairedPolicy
from sapo_node.inference.sampling import sample
from sapo_node.monitor import history
from sapo_node.training.base import TrainCompletion, TrainGroup
from sapo_node.training.policy import Policy, load_policy

TASKS = ("basic_arithmetic", "base_conversion")
REPOSITORY = Path(__file__).parent.parent.parent
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Speed:
    """Useful tokens a second of wall time and of CPU time, one value a repetition."""

    name: str
    wall: list[float]
    cpu: list[float]

    def line(self) -> str:
        """One row of the table."""
        wall, cpu = statistics.median(self.wall), statistics.median(self.cpu)
        return f"{self.name:<16} {wall:7.0f} tokens/s  {cpu:7.0f} tokens per CPU second"


@click.command()
@click.option("--model", default="demo", show_default=True, help="An embedded model, a folder or a hub name.")
@click.option("--questions", default=8, show_default=True)
@click.option("--samples", default=8, show_default=True, help="Completions a question.")
@click.option("--max-tokens", default=24, show_default=True)
@click.option("--repeats", default=40, show_default=True)
@click.option("--rounds", default=60, show_default=True, help="Rounds of the real node.")
@click.option("--own-groups", default=4, show_default=True, help="I of the real node.")
@click.option("--vllm/--no-vllm", default=True, show_default=True)
def main(
    model: str, questions: int, samples: int, max_tokens: int, repeats: int, rounds: int, own_groups: int, vllm: bool
) -> None:
    """Measure, and print a table."""
    torch.set_num_threads(1)
    pick = random.Random(0)
    asked = [
        str(reasoning_gym.create_dataset(pick.choice(TASKS), size=1, seed=seed)[0]["question"])
        for seed in range(questions)
    ]
    params = SamplingParams(n=samples, max_tokens=max_tokens)
    click.echo(f"{model}: {questions} questions x {samples} completions of at most {max_tokens} tokens")
    speeds = in_process(model, asked, params, repeats)
    for speed in speeds:
        click.echo(speed.line())
    ratio = statistics.median(speeds[0].cpu) / statistics.median(speeds[1].cpu)
    click.echo(f"ours against generate: {ratio:.2f} times by CPU time")
    if vllm:
        asyncio.run(with_vllm(model, asked, params, repeats))
        real_node(model, rounds, own_groups)


# ---- in this process -------------------------------------------------------------------------------------------------


def in_process(model: str, asked: Sequence[str], params: SamplingParams, repeats: int) -> list[Speed]:
    """Our sampling and `generate`, in turns on one set of weights."""
    policy = load_policy(model)
    prompts = [policy.encoder.prompt(question) for question in asked]
    generator = torch.Generator(policy.device).manual_seed(0)

    def own() -> int:
        drawn = sample(
            policy,
            prompts,
            n=params.n,
            max_tokens=params.max_tokens,
            temperature=1.0,
            generator=generator,
            batch_completions=len(prompts) * params.n,
        )
        return sum(len(one.token_ids) for completions in drawn for one in completions)

    engines: dict[str, Callable[[], int]] = {
        "ours": own,
        "generate": lambda: generate(policy, prompts, params.n, params.max_tokens),
    }
    speeds = {name: Speed(name, [], []) for name in engines}
    for repeat in range(repeats + 1):
        for name, engine in engines.items():
            wall, cpu = time.perf_counter(), time.process_time()
            tokens = engine()
            if repeat:  # the first run warms up
                speeds[name].wall.append(tokens / (time.perf_counter() - wall))
                speeds[name].cpu.append(tokens / (time.process_time() - cpu))
    return list(speeds.values())


def generate(policy: Policy, prompts: list[list[int]], samples: int, max_tokens: int) -> int:
    """`transformers.generate` on left-padded prompts; returns the number of useful tokens."""
    width = max(map(len, prompts))
    pad = policy.stop_ids[0]
    rows = [prompt for prompt in prompts for _ in range(samples)]
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=policy.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=policy.device)
    output = policy.model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_tokens,
        eos_token_id=list(policy.stop_ids),
        pad_token_id=pad,
    )
    ended = torch.isin(output[:, width:], torch.tensor(policy.stop_ids, device=policy.device)).long()
    before_end = ended.cumsum(-1) - ended == 0  # the end token itself is useful, what follows is padding
    return int(before_end.sum())


# ---- with vLLM -------------------------------------------------------------------------------------------------------


async def with_vllm(model: str, asked: Sequence[str], params: SamplingParams, repeats: int) -> None:
    """vLLM alone, then while a trainer steps; memory of both."""
    with tempfile.TemporaryDirectory() as folder:
        config = NodeConfig.model_validate(
            {
                "node": {"data_dir": folder, "threads": 1},
                "inference": {
                    "engine": "vllm",
                    "max_prompt_tokens": 128,
                    "max_completion_tokens": params.max_tokens,
                    "kv_cache_gib": 0.25,
                },
                "training": {"model": model, "max_staleness": 1},
            }
        )
        policy = PairedPolicy(config, Path(folder) / "checkpoints")
        try:
            started = time.monotonic()
            await policy.start()
            click.echo(f"vLLM was up after {time.monotonic() - started:.0f} s")
            await measure_vllm(policy, asked, params, repeats)
        finally:
            await policy.close()


async def measure_vllm(policy: PairedPolicy, asked: Sequence[str], params: SamplingParams, repeats: int) -> None:
    """Speeds and memory of a pair that is up."""
    alone, _ = await sample_often(policy, "vllm", asked, params, repeats)
    click.echo(alone.line())
    batch = await policy.sample(list(asked), params)
    groups = [train_group(question, batch, index) for index, question in enumerate(asked)]
    stop = asyncio.Event()
    training = asyncio.create_task(train_without_pause(policy, groups, stop))
    both, versions = await sample_often(policy, "vllm + training", asked, params, repeats)
    stop.set()
    steps, seconds, stalls = await training
    click.echo(both.line() + f"; {steps / seconds:.1f} steps/s, {versions} policy versions seen")
    click.echo(f"sampling stood still for an exchange of weights: {quantiles(stalls)}")
    trainer, engine = policy.pid, policy.engine_pid
    assert trainer is not None
    assert engine is not None
    click.echo(f"memory (PSS): trainer {mebibytes(trainer):.0f} MiB, vLLM's processes {mebibytes(engine):.0f} MiB")


async def sample_often(
    policy: PairedPolicy, name: str, asked: Sequence[str], params: SamplingParams, repeats: int
) -> tuple[Speed, int]:
    """Speed of repeated sampling, and how many policy versions it saw. CPU time is that of vLLM's processes."""
    speed, versions = Speed(name, [], []), set()
    engine = policy.engine_pid
    assert engine is not None
    for repeat in range(repeats + 1):
        wall, cpu = time.perf_counter(), cpu_seconds(engine)
        batch = await policy.sample(list(asked), params)
        tokens = sum(len(one.token_ids) for group in batch.groups for one in group)
        versions |= {version for group in batch.groups for one in group for version in one.policy_versions}
        if repeat:
            speed.wall.append(tokens / (time.perf_counter() - wall))
            speed.cpu.append(tokens / max(1 / TICKS, cpu_seconds(engine) - cpu))
    return speed, len(versions)


async def train_without_pause(
    policy: PairedPolicy, groups: list[TrainGroup], stop: asyncio.Event
) -> tuple[int, float, list[float]]:
    """Steps taken, seconds, and the stall of each exchange of weights."""
    started, steps, stalls = time.perf_counter(), 0, []
    while not stop.is_set():
        await policy.step([fresh(group, policy.version) for group in groups])
        await policy.settled()
        steps += 1
        if (stall := policy.engine.stall_seconds) is not None:
            stalls.append(stall)
    return steps, time.perf_counter() - started, stalls


def train_group(question: str, batch: SampledBatch, index: int) -> TrainGroup:
    """A group with made-up rewards, half of them right, so that every completion has a gradient."""
    completions = [
        TrainCompletion(text=one.text, finish=one.finish, token_ids=one.token_ids, logprobs=one.logprobs)
        for one in batch.groups[index]
    ]
    return TrainGroup(
        group_id=index,
        origin="local",
        producer="bench",
        question=question,
        completions=completions,
        rewards=[float(i % 2) for i in range(len(completions))],
        policy_version=batch.policy_version,
    )


def fresh(group: TrainGroup, version: int) -> TrainGroup:
    """The group as if it had just been sampled: the bench repeats it, and the trainer refuses stale ones."""
    return TrainGroup(**{name: getattr(group, name) for name in group.__struct_fields__} | {"policy_version": version})


# ---- a real node -----------------------------------------------------------------------------------------------------


def real_node(model: str, rounds: int, own_groups: int) -> None:
    """Rounds of `sapo-node start` with vLLM and without a swarm; what its records say."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "node.data_dir": folder,
            "node.max_rounds": rounds,
            "swarm.enabled": "false",
            "tasks.eval_every": 0,
            "training.model": model,
            "training.local_groups": own_groups,
            "training.external_groups": 0,
        }
        sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        config = REPOSITORY / "configs" / "vllm-cpu.yaml"
        command = [sys.executable, "-m", "sapo_node", "start", "--config", str(config), *sets]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=1800)
        records = history.rounds(history.read(Path(folder) / history.FILE_NAME))[2:]  # the first ones warm up
    stalls = [one.sync_stall_seconds for one in records if one.sync_stall_seconds is not None]
    waited = sum(one.wait_seconds or 0.0 for one in records) / sum(one.round_seconds or 0.0 for one in records)
    stalest = max(one.staleness_max or 0 for one in records)
    click.echo(f"a real node, {len(records)} rounds of {own_groups} own groups and no others:")
    click.echo(f"  sampling stood still for an exchange of weights: {quantiles(stalls)}")
    click.echo(f"  stalest token: {stalest} policy versions, of at most 1; the trainer waited {waited:.0%} of the time")
    mixed = sum(one.mixed_completions for one in records)
    median = statistics.median(one.round_seconds or 0.0 for one in records)
    click.echo(f"  completions sampled under two versions: {mixed}; median round {median:.2f} s")


def quantiles(seconds: Sequence[float]) -> str:
    """p50 and p95 of a sample."""
    ordered = sorted(seconds)
    if not ordered:
        return "no exchange took place"
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return f"p50 {statistics.median(ordered):.3f} s, p95 {p95:.3f} s ({len(ordered)} exchanges)"


# ---- processes -------------------------------------------------------------------------------------------------------


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            found += [int(child) for child in task.read_text().split()]
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and those below it."""
    ticks = 0
    for one in tree(pid):
        fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS


def mebibytes(pid: int) -> float:
    """Proportional set size of a process and those below it."""
    total = 0
    for one in tree(pid):
        for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1])
    return total / 1024


if __name__ == "__main__":
    main()
