"""vLLM as the node keeps it: new weights in flight, faults of every process, nothing left behind.

A start takes half a minute, so the tests share three engines that start side by side, and what must restart them is
done to all three at once: a fixture does it and keeps what it saw, the tests look at that.

- `tied`: the embedded model;
- `untied`: the same with an output layer of its own;
- `forgetful`: the embedded model, by a worker whose engine does not pack the tied output layer again.
"""

import asyncio
import contextlib
import copy
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from sapo_node.inference.base import READY, SampledBatch, SamplingParams
from sapo_node.inference.vllm import MODULE, TOLERANCE, EngineDown, VLLMEngine
from sapo_node.workers import WorkerError
from tests.harness import REPOSITORY, wait_gone
from tests.inference.support import (
    CLOSE,
    QUESTIONS,
    SHORT,
    Loop,
    Source,
    errors,
    exact,
    family,
    needs_vllm,
    settings,
    shared_memory,
    until_up,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), needs_vllm]

DEMO = REPOSITORY / "sapo_node" / "assets" / "demo"
START_SECONDS = 300.0  # three at once on two busy cores
LONG = SamplingParams(n=24, max_tokens=190)  # seconds of sampling, so that an exchange falls into it
NAMES = ("tied", "untied", "forgetful")
PAD = 1  # place of the padding token among the special ones: sampled next to never, so completions grow long


@dataclass
class One:
    """An engine and the trainer's side of it."""

    source: Source
    engine: VLLMEngine
    keeping: asyncio.Task[None] | None = None

    async def start(self, stop_ids: list[int]) -> None:
        await self.engine.launch()
        await self.engine.start(self.source.info(stop_ids))
        self.keeping = asyncio.create_task(self.engine.keep_up())

    async def close(self) -> None:
        if self.keeping is not None:
            self.keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.keeping
        await self.engine.close()

    def pid(self, name: str) -> int:
        """Of the one process of the engine that is called so."""
        (pid,) = [pid for pid, found in family(self.engine.pid or 0).items() if found.startswith(name)]
        return pid


@dataclass
class Rig:
    """Everything that runs."""

    loop: Loop
    ones: dict[str, One]
    node: subprocess.Popen[str]

    def __getitem__(self, name: str) -> One:
        return self.ones[name]


@dataclass
class Seen:
    """What a fixture saw of one engine around a fault."""

    faults_before: int = 0
    restarts_before: int = 0
    family: set[int] = field(default_factory=set)  # processes of the life that ended
    shared: set[Path] = field(default_factory=set)
    sampling: object = None  # how a call ended that ran meanwhile
    was_up: bool = True  # right after the fault
    state: str = ""


def untied_model(folder: Path) -> str:
    """The embedded model with a random output layer of its own."""
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(DEMO, tie_word_embeddings=False)
    model = LlamaForCausalLM(config)
    missing = model.load_state_dict(load_file(DEMO / "model.safetensors"), strict=False).missing_keys
    assert missing == ["lm_head.weight"]
    model.lm_head.weight.data.normal_(std=0.1)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("vllm")
    models = {"tied": "demo", "untied": untied_model(folder / "model"), "forgetful": "demo"}
    modules = {"tied": MODULE, "untied": MODULE, "forgetful": "tests.inference.forgetful_worker"}
    node = subprocess.Popen(
        [sys.executable, "-m", "tests.inference.lonely_node", str(folder / "node")], stdout=subprocess.PIPE, text=True
    )
    ones, loop = {}, Loop()
    for name in NAMES:
        source = Source(models[name], folder / name)
        config = settings(folder / f"{name}-data", inference={"engine": "vllm"})
        ones[name] = One(source, VLLMEngine(config, source.share, module=modules[name]))
    stop_ids = [ones["tied"].source.policy.tokenizer.all_special_ids[PAD]]

    async def start() -> None:
        async with asyncio.TaskGroup() as group:
            for one in ones.values():
                group.create_task(one.start(stop_ids))

    async def close() -> None:
        await asyncio.gather(*(one.close() for one in ones.values()))

    try:
        loop.run(start(), START_SECONDS)
        yield Rig(loop, ones, node)
    finally:
        loop.run(close())
        loop.close()
        node.kill()
        node.wait(10)
        assert node.stdout is not None
        node.stdout.close()


def check(one: One, batch: SampledBatch) -> None:
    """Every log-prob is that of the trainer's weights, as they are now, and every token says so."""
    assert errors(one.source.policy, QUESTIONS, batch.groups).max() < CLOSE
    assert {tuple(sampled.policy_versions) for group in batch.groups for sampled in group} == {(one.source.version,)}


async def wait_down(one: One) -> None:
    while one.engine.up:
        await asyncio.sleep(0.05)


# -- weights in flight -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_after_an_exchange_of_all_weights_the_engine_computes_what_the_trainer_does(rig: Rig, name: str) -> None:
    one = rig[name]

    async def scenario() -> SampledBatch:
        await one.engine.follow()
        assert (one.engine.up, one.engine.version) == (True, one.source.version)
        return await one.engine.sample(QUESTIONS, SHORT)

    for _ in range(2):
        old = copy.deepcopy(one.source.policy)
        one.source.perturb()
        batch = rig.loop.run(scenario())
        check(one, batch)
        assert errors(old, QUESTIONS, batch.groups).mean() > 10 * CLOSE
    assert one.engine.sync_faults == 0
    assert 0 < (one.engine.stall_seconds or 0) < 30


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_weights_that_arrive_during_sampling_interrupt_no_completion(rig: Rig, name: str) -> None:
    one = rig[name]
    old = copy.deepcopy(one.source.policy)
    before = one.source.version

    async def scenario() -> SampledBatch:
        call = asyncio.create_task(one.engine.sample(QUESTIONS, LONG))
        await asyncio.sleep(1.0)
        one.source.perturb()
        await one.engine.follow()
        assert not call.done()
        return await call

    batch = rig.loop.run(scenario())
    assert batch.policy_version == before
    mixed = 0
    for question, group in zip(QUESTIONS, batch.groups, strict=True):
        for sampled in group:
            assert set(sampled.policy_versions) <= {before, before + 1}
            assert sampled.policy_versions == sorted(sampled.policy_versions)
            recorded = torch.tensor(sampled.logprobs)
            fits_old = (exact(old, question, sampled) - recorded).abs() < CLOSE
            fits_new = (exact(one.source.policy, question, sampled) - recorded).abs() < CLOSE
            switch = int(
                fits_old.long().cumprod(0).sum()
            )  # tokens before the first that the old weights do not explain
            assert fits_new[switch:].all(), f"tokens {switch}.. fit neither version"
            assert (switch > 0) == (before in sampled.policy_versions)
            assert (switch < len(recorded)) == (before + 1 in sampled.policy_versions)
            mixed += 0 < switch < len(recorded)
    assert mixed > 0
    assert one.engine.sync_faults == 0


def test_an_engine_that_waits_says_that_it_is_ready(rig: Rig) -> None:
    async def scenario() -> str:
        await rig["tied"].engine.sample(QUESTIONS, SHORT)
        await asyncio.sleep(1.5)
        return rig["tied"].engine.state

    assert rig.loop.run(scenario()) == READY


# -- exchanges that fail -----------------------------------------------------------------------------------------------


def drop_layers(folder: Path) -> None:
    """A file without the upper layers: what reads it changes half of the model."""
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in tensors.items() if ".layers.2." not in name}, folder / "model.safetensors"
    )


def damage(folder: Path) -> None:
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)


@pytest.fixture(scope="module")
def bad_syncs(rig: Rig) -> dict[str, Seen]:
    """A different fault in the exchange of each engine, while it samples; all are back at the end."""

    async def fail(one: One, spoil: Callable[[Path], None] | None) -> Seen:
        seen = Seen(one.engine.sync_faults, one.engine.restarts, set(family(one.engine.pid or 0)))
        call = asyncio.create_task(one.engine.sample(QUESTIONS, LONG))
        await asyncio.sleep(0.5)
        one.source.spoil = spoil
        one.source.perturb()
        await one.engine.follow()
        one.source.spoil = None
        seen.was_up, seen.state = one.engine.up, one.engine.state
        (seen.sampling,) = await asyncio.gather(call, return_exceptions=True)
        await until_up(one.engine)
        return seen

    async def scenario() -> list[Seen]:
        spoilers = {"tied": drop_layers, "untied": damage, "forgetful": None}
        return await asyncio.gather(*(fail(rig[name], spoilers[name]) for name in NAMES))

    return dict(zip(NAMES, rig.loop.run(scenario(), START_SECONDS), strict=True))


REASONS = {"tied": "log-probs differ from the trainer's", "untied": "SafetensorError", "forgetful": "log-probs differ"}


@pytest.mark.parametrize("name", NAMES)
def test_a_failed_exchange_ends_the_engine_with_its_reason(bad_syncs: dict[str, Seen], name: str) -> None:
    seen = bad_syncs[name]
    assert not seen.was_up
    assert "new weights did not reach vLLM" in seen.state
    assert REASONS[name] in seen.state


@pytest.mark.parametrize("name", NAMES)
def test_nothing_that_was_sampled_around_a_failed_exchange_comes_back(bad_syncs: dict[str, Seen], name: str) -> None:
    assert isinstance(bad_syncs[name].sampling, WorkerError | EngineDown)


@pytest.mark.parametrize("name", NAMES)
def test_after_a_failed_exchange_the_engine_is_back_on_the_trainers_weights(
    rig: Rig, bad_syncs: dict[str, Seen], name: str
) -> None:
    one, seen = rig[name], bad_syncs[name]
    assert one.engine.restarts == seen.restarts_before + 1
    assert one.engine.sync_faults == seen.faults_before + 1
    assert one.engine.version == one.source.version
    check(one, rig.loop.run(one.engine.sample(QUESTIONS, SHORT)))


def test_the_difference_that_a_forgotten_output_layer_makes_is_far_above_the_tolerance(
    bad_syncs: dict[str, Seen],
) -> None:
    words = bad_syncs["forgetful"].state.split()
    difference = float(words[words.index("by") + 1])
    assert difference > 10 * TOLERANCE["float32"]


# -- processes that die ------------------------------------------------------------------------------------------------

VICTIMS = {"tied": "", "untied": "VLLM::EngineCor", "forgetful": "VLLM::Worker"}


@pytest.fixture(scope="module")
def kills(rig: Rig, bad_syncs: dict[str, Seen]) -> dict[str, Seen]:
    """kill -9 of another process of each engine while it samples; all are back at the end."""

    async def fail(one: One, victim: str) -> Seen:
        everyone = set(family(one.engine.pid or 0))
        seen = Seen(one.engine.sync_faults, one.engine.restarts, everyone, shared_memory(everyone))
        call = asyncio.create_task(one.engine.sample(QUESTIONS, LONG))
        await asyncio.sleep(0.5)
        os.kill(one.pid(victim) if victim else one.engine.pid or 0, signal.SIGKILL)
        (seen.sampling,) = await asyncio.gather(call, return_exceptions=True)
        await wait_down(one)
        await asyncio.sleep(0.8)  # `keep_up` looks twice a second
        seen.was_up, seen.state = one.engine.up, one.engine.state
        await until_up(one.engine)
        return seen

    async def scenario() -> list[Seen]:
        return await asyncio.gather(*(fail(rig[name], VICTIMS[name]) for name in NAMES))

    return dict(zip(NAMES, rig.loop.run(scenario(), START_SECONDS), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_kill_9_of_any_process_of_the_engine_is_told_and_mended(rig: Rig, kills: dict[str, Seen], name: str) -> None:
    one, seen = rig[name], kills[name]
    assert isinstance(seen.sampling, WorkerError)
    assert not seen.was_up
    assert "SIGKILL" in seen.state
    assert one.engine.restarts == seen.restarts_before + 1
    assert one.engine.sync_faults == seen.faults_before
    check(one, rig.loop.run(one.engine.sample(QUESTIONS, SHORT)))


@pytest.mark.parametrize("name", NAMES)
def test_kill_9_leaves_neither_processes_nor_shared_memory(kills: dict[str, Seen], name: str) -> None:
    assert len(kills[name].family) >= 4  # worker, resource tracker, engine core, vLLM's worker
    assert kills[name].shared
    assert wait_gone(kills[name].family) == set()
    assert [path for path in kills[name].shared if path.exists()] == []


def test_an_engine_that_hangs_is_ended_by_the_deadline_of_its_stage(rig: Rig, kills: dict[str, Seen]) -> None:
    one = rig["forgetful"]
    everyone = set(family(one.engine.pid or 0))

    async def scenario() -> None:
        call = asyncio.create_task(one.engine.sample(QUESTIONS, LONG))
        await asyncio.sleep(0.5)
        os.kill(one.pid("VLLM::EngineCor"), signal.SIGSTOP)
        async with asyncio.timeout(40):
            with pytest.raises(WorkerError, match="made no progress in stage 'sampling'"):
                await call
        assert not one.engine.up
        with pytest.raises(EngineDown, match="vLLM does not run"):
            await one.engine.sample(QUESTIONS, SHORT)

    rig.loop.run(scenario())
    assert wait_gone(everyone) == set()


def test_kill_9_of_the_node_takes_all_of_its_processes_with_it(rig: Rig) -> None:
    assert rig.node.stdout is not None
    assert select.select([rig.node.stdout], [], [], 100)[0], "the node did not start"
    while (line := rig.node.stdout.readline()) != "up\n":
        assert line, "the node ended before it was up"
    everyone = family(rig.node.pid)
    shared = shared_memory(set(everyone))
    assert {"VLLM::EngineCor", "VLLM::Worker"} <= set(everyone.values())
    rig.node.kill()
    assert wait_gone(set(everyone)) == set()
    assert [path for path in shared if path.exists()] == []


def test_close_leaves_neither_processes_nor_shared_memory(rig: Rig) -> None:
    one = rig["untied"]
    everyone = set(family(one.engine.pid or 0))
    shared = shared_memory(everyone)
    rig.loop.run(one.close())
    assert wait_gone(everyone) == set()
    assert [path for path in shared if path.exists()] == []
