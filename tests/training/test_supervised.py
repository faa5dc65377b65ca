"""The supervised policy: real worker processes that are killed, stopped, or cannot load."""

import asyncio
import errno
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sapo_node import workers
from sapo_node.config import NodeConfig
from sapo_node.inference.base import SampledBatch, SamplingParams
from sapo_node.training import supervised
from sapo_node.training.base import (
    LoadRequest,
    ModelInfo,
    SampleRequest,
    StepRequest,
    StepResult,
    TrainCompletion,
    TrainGroup,
)
from sapo_node.training.supervised import MAX_FAULTS, Policy, PolicyFailed, PolicyLost

FAULTS = "SAPO_TEST_FAULTS"  # names a file that holds what goes wrong in the next calls, in order, one word a line
SHORT = SamplingParams(n=2, max_tokens=4)
LONG = SamplingParams(n=64, max_tokens=200)


def next_fault() -> None:
    file = Path(os.environ[FAULTS])
    first, *rest = file.read_text().split() or ["none"]
    file.write_text("\n".join(rest))
    if first == "disk":
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    if first == "refuse":
        raise workers.Refused("the weather is bad")


class ToyWorker:
    """The policy worker without a model, for what is about processes only: it starts in no time."""

    def __init__(self) -> None:
        self.loaded = False

    def load(self, request: LoadRequest) -> ModelInfo:
        next_fault()
        self.loaded = True
        return ModelInfo(name="toy", params=1, licence="", tokenizer_sha256=bytes(32), lr=0.0, device="cpu", notes=[])

    def sample(self, request: SampleRequest) -> SampledBatch:
        if not self.loaded:
            raise workers.Refused("no model is loaded yet")
        next_fault()
        if request.questions == ["die"]:
            os._exit(9)
        return SampledBatch(policy_version=0, groups=[], seconds=0.0)

    def step(self, request: StepRequest) -> StepResult:
        return StepResult(policy_version=1, metrics={}, producer_gradients={}, skipped={})


def main() -> None:
    toy = ToyWorker()
    workers.serve({"load": toy.load, "sample": toy.sample, "step": toy.step})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "FIRST_PAUSE_SECONDS", 0.05)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Makes the worker a toy one; call it with the faults to come."""
    file = tmp_path / "faults"
    file.write_text("")
    monkeypatch.setattr(supervised, "POLICY_MODULE", __name__)
    monkeypatch.setenv(FAULTS, str(file))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    return lambda *words: file.write_text("\n".join(words))


def drive(policy: Policy, scenario: Awaitable[None]) -> None:
    async def body() -> None:
        try:
            async with asyncio.timeout(100):
                await scenario
        finally:
            await policy.close(grace=1)

    asyncio.run(body())


def make(model: Path, checkpoints: Path | None = None, **more: Any) -> Policy:
    config = NodeConfig.model_validate(
        {
            "node": {"seed": 1, "threads": 1},
            "training": {"model": str(model)},
            "inference": {"max_completion_tokens": 256},
        }
    )
    return Policy(config, checkpoints, **more)


def group_of(batch: SampledBatch) -> TrainGroup:
    completions = [
        TrainCompletion(text=one.text, finish=one.finish, token_ids=one.token_ids, logprobs=one.logprobs)
        for one in batch.groups[0]
    ]
    return TrainGroup(
        group_id=1,
        origin="local",
        producer="me",
        question="what is 1 + 1?",
        completions=completions,
        rewards=[1.0, 0.0],
        policy_version=batch.policy_version,
    )


async def begin_long_call(policy: Policy) -> asyncio.Task[SampledBatch]:
    call = asyncio.create_task(policy.sample([f"what is {i} + 1?" for i in range(8)], LONG))
    await asyncio.sleep(0.2)
    assert not call.done()
    assert policy.pid is not None
    return call


@pytest.mark.slow
def test_after_a_kill_9_while_sampling_the_next_call_continues_from_the_newest_checkpoint(tmp_path: Path) -> None:
    from tests.tiny import write_model  # torch; not for the toy worker's process

    told: list[int] = []

    async def on_restart() -> None:
        told.append(policy.version)

    async def scenario() -> None:
        assert (await policy.start()).policy_version == 0
        for save in (True, False):
            await policy.step([group_of(await policy.sample(["what is 1 + 1?"], SHORT))])
            if save:
                await policy.save({})
        assert policy.version == 2

        call = await begin_long_call(policy)
        os.kill(policy.pid or 0, signal.SIGKILL)
        with pytest.raises(PolicyLost, match="SIGKILL"):
            await call
        assert told == []

        batch = await policy.sample(["what is 1 + 1?"], SHORT)
        assert (batch.policy_version, policy.version, policy.restarts, told) == (1, 1, 1, [1])
        assert (await policy.step([group_of(batch)])).policy_version == 2
        assert told == [1]

    policy = make(write_model(tmp_path / "model"), tmp_path / "checkpoints", on_restart=on_restart)
    drive(policy, scenario())


@pytest.mark.slow
def test_a_stopped_policy_worker_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.tiny import write_model

    async def scenario() -> None:
        await policy.start()
        call = await begin_long_call(policy)
        os.kill(policy.pid or 0, signal.SIGSTOP)
        async with asyncio.timeout(20):
            with pytest.raises(PolicyLost, match="does not beat"):
                await call
        assert len((await policy.sample(["what is 1 + 1?"], SHORT)).groups) == 1

    monkeypatch.setattr(supervised, "Worker", partial(workers.Worker, silence_seconds=5))
    policy = make(write_model(tmp_path / "model"))
    drive(policy, scenario())


@pytest.mark.slow
def test_a_load_that_fails_once_after_a_restart_is_tried_again(tmp_path: Path, faults: Callable[..., None]) -> None:
    async def scenario() -> None:
        await policy.start()
        with pytest.raises(PolicyLost, match="exit code 9"):
            await policy.sample(["die"], SHORT)
        faults("disk", "refuse")
        await policy.sample([], SHORT)
        assert policy.restarts == 1

    policy = make(tmp_path)
    drive(policy, scenario())


@pytest.mark.slow
def test_loads_that_keep_failing_end_with_the_reason(tmp_path: Path, faults: Callable[..., None]) -> None:
    async def scenario() -> None:
        await policy.start()
        with pytest.raises(PolicyLost):
            await policy.sample(["die"], SHORT)
        faults(*["disk"] * (MAX_FAULTS - 1))
        with pytest.raises(PolicyFailed, match=rf"{MAX_FAULTS} times in a row.*Input/output error"):
            await policy.sample([], SHORT)

    policy = make(tmp_path)
    drive(policy, scenario())


@pytest.mark.slow
def test_deaths_in_a_row_end_with_the_reason_and_a_step_begins_a_new_row(
    tmp_path: Path, faults: Callable[..., None]
) -> None:
    async def die(times: int) -> None:
        for _ in range(times):
            with pytest.raises(PolicyLost, match="exit code 9"):
                await policy.sample(["die"], SHORT)

    async def scenario() -> None:
        await policy.start()
        await die(MAX_FAULTS - 1)
        await policy.step([])
        await die(MAX_FAULTS - 1)
        with pytest.raises(PolicyFailed, match=rf"(?s){MAX_FAULTS} times in a row.*exit code 9"):
            await policy.sample(["die"], SHORT)

    policy = make(tmp_path)
    drive(policy, scenario())


@pytest.mark.slow
def test_one_death_met_by_many_calls_is_one_fault(tmp_path: Path, faults: Callable[..., None]) -> None:
    async def scenario() -> None:
        await policy.start()
        calls = [policy.sample(["die"], SHORT), *(policy.sample([], SHORT) for _ in range(2 * MAX_FAULTS))]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(result) for result in results} == {PolicyLost}
        await policy.sample([], SHORT)

    policy = make(tmp_path)
    drive(policy, scenario())


@pytest.mark.slow
def test_a_refused_call_costs_the_worker_but_not_the_node(tmp_path: Path, faults: Callable[..., None]) -> None:
    async def scenario() -> None:
        await policy.start()
        faults("refuse")
        with pytest.raises(PolicyLost, match="the weather is bad"):
            await policy.sample([], SHORT)
        await policy.sample([], SHORT)
        assert policy.restarts == 1

    policy = make(tmp_path)
    drive(policy, scenario())


def test_a_handler_that_raises_costs_nothing(tmp_path: Path, faults: Callable[..., None]) -> None:
    async def scenario() -> None:
        await policy.start()
        faults("disk")
        with pytest.raises(workers.CallFailed, match="Input/output error"):
            await policy.sample([], SHORT)
        await policy.sample([], SHORT)
        assert policy.restarts == 0

    policy = make(tmp_path)
    drive(policy, scenario())


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [("disk", PolicyFailed, "cannot be loaded: .*Input/output"), ("refuse", workers.Refused, "weather")],
)
def test_a_first_load_that_fails_leaves_no_process(
    tmp_path: Path, faults: Callable[..., None], fault: str, error: type[Exception], text: str
) -> None:
    async def scenario() -> None:
        faults(fault)
        with pytest.raises(error, match=text):
            await policy.start()
        assert policy.pid is not None
        assert not Path(f"/proc/{policy.pid}").exists()

    policy = make(tmp_path)
    drive(policy, scenario())


@pytest.mark.slow
def test_an_error_of_on_restart_reaches_the_caller(tmp_path: Path, faults: Callable[..., None]) -> None:
    async def on_restart() -> None:
        raise RuntimeError("the pool is gone")

    async def scenario() -> None:
        await policy.start()
        with pytest.raises(PolicyLost):
            await policy.sample(["die"], SHORT)
        with pytest.raises(RuntimeError, match="the pool is gone"):
            await policy.sample([], SHORT)

    policy = make(tmp_path, on_restart=on_restart)
    drive(policy, scenario())
