"""Two processes on one CPU, with gloo, against one process."""

import asyncio
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from pydantic import ValidationError
from safetensors.torch import load_file

from sapo_node.config import TrainingSection
from sapo_node.inference.base import SamplingParams
from sapo_node.inference.transformers import TransformersEngine
from sapo_node.training import parallel
from sapo_node.training.base import LoadRequest, ShareRequest, StepResult, TrainCompletion, TrainGroup
from sapo_node.training.parallel import Followers
from sapo_node.training.remote import RemoteTrainer
from sapo_node.workers import CallFailed, Refused, Worker, WorkerDied
from tests.tiny import write_model
from tests.training.support import drive

STEPS = 6


def request(model: Path, devices: int, resume: str | None = None, **training: Any) -> LoadRequest:
    return LoadRequest(
        training={"model": str(model), "lr": 3e-3, "devices": devices, "device": "cpu"} | training,
        inference={"max_completion_tokens": 16},
        seed=1,
        threads=1,
        resume=resume,
    )


def groups(step: int) -> list[TrainGroup]:
    """Three groups, so that two ranks have unequal shares; every third step has one group, so that one rank idles."""
    texts = ["46", "the answer is 46", f"{step} letters", "what"]
    rewards = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0], [0.0, 1.0, 1.0, 1.0]]
    own = [
        TrainCompletion(text="", finish="stop", token_ids=[9 + step, 40 + place, 0], logprobs=[-5.0, -6.0, -5.5])
        for place in range(4)
    ]
    return [
        TrainGroup(
            group_id=number,
            origin="external" if number else "local",
            producer=f"peer {number}",
            question=f"what is {number} + {step}?",
            completions=[TrainCompletion(text=text, finish="stop") for text in texts] if number else own,
            rewards=reward,
            policy_version=step,
        )
        for number, reward in enumerate(rewards[: 1 if step % 3 == 2 else 3])
    ]


async def steps(trainer: RemoteTrainer, first: int, count: int) -> list[StepResult]:
    return [await trainer.step(groups(step)) for step in range(first, first + count)]


def curve(results: list[StepResult]) -> list[list[float]]:
    names = ("loss", "grad_norm", "entropy", "logprob_local", "ratio_mean_local", "tokens_trained")
    return [
        [*(result.metrics[name] for name in names), *(norm for _, norm in sorted(result.producer_gradients.items()))]
        for result in results
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_have_the_curve_of_one_and_its_checkpoints(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    found: dict[str, list[list[float]]] = {}
    saved: dict[int, Path] = {}
    settings = {"micro_batch_tokens": 40, "producer_gradients": True}

    async def scenario(worker: Worker) -> None:
        trainer = RemoteTrainer(worker)
        for devices in (1, 2):
            await trainer.load(request(model, devices, **settings))
            found[f"start {devices}"] = curve(await steps(trainer, 0, STEPS))
            saved[devices] = Path((await trainer.save(tmp_path / str(devices), {})).path)
            found[f"go on {devices}"] = curve(await steps(trainer, STEPS, STEPS))
        for devices, other in ((2, 1), (1, 2)):
            await trainer.load(request(model, devices, str(saved[other]), **settings))
            found[f"resume {devices}"] = curve(await steps(trainer, STEPS, STEPS))

    drive(scenario)
    assert len({row[0] for row in found["start 1"]}) == STEPS  # it moves at all
    for name, expected in (
        ("start 2", "start 1"),
        ("go on 2", "go on 1"),
        ("resume 2", "go on 1"),
        ("resume 1", "go on 1"),
    ):
        for row, right in zip(found[name], found[expected], strict=True):
            assert row == pytest.approx(right, rel=1e-4, abs=1e-4), name
    for file in ("model.safetensors", "trainer.safetensors"):
        one, two = (load_file(saved[devices] / file) for devices in (1, 2))
        assert one.keys() == two.keys()
        assert {name: tensor.shape for name, tensor in one.items()} == {n: tensor.shape for n, tensor in two.items()}
        for name, tensor in one.items():
            if tensor.is_floating_point():
                assert float((tensor - two[name]).abs().max()) < 1e-4, name


@pytest.mark.parametrize(
    ("lost", "told"), [(True, "rank 1 is gone"), (False, "rank 0 failed in 'step': OSError: reset")]
)
def test_a_broken_connection_is_put_down_to_the_rank_that_was_lost(
    lost: bool, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 may see its connection break before anybody sees that the other process ended."""

    class Other:
        async def call(self, *_: Any, **__: Any) -> None:
            await asyncio.sleep(0.2 if lost else 1.5)
            if lost:
                raise WorkerDied("rank 1 is gone")

        async def stop(self) -> None:
            pass

    def give_up(reason: str) -> None:
        if threading.current_thread() is threading.main_thread():
            raise SystemExit(reason)

    monkeypatch.setattr(parallel.workers, "give_up", give_up)
    monkeypatch.setattr(parallel, "LOST_SECONDS", 10.0 if lost else 0.2)
    followers: Any = Followers(1)
    followers._workers = [Other()]
    with pytest.raises(SystemExit, match=re.escape(told)), followers.follow("step", None, 5.0):
        raise OSError("reset")
    followers.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dead", [signal.SIGKILL, signal.SIGSTOP])
def test_rank_0_samples_and_shares_whole_weights_and_ends_with_a_lost_rank(
    tmp_path: Path, dead: signal.Signals
) -> None:
    model = write_model(tmp_path / "model")
    params = SamplingParams(n=3, max_tokens=6)

    async def scenario(worker: Worker) -> None:
        trainer, engine = RemoteTrainer(worker), TransformersEngine(worker)
        await trainer.load(request(model, 1))
        await steps(trainer, 0, 1)
        expected = await engine.sample(["what is 1 + 1?"], params)
        info = await trainer.load(request(model, 2))
        assert any("training.devices on a CPU" in note for note in info.notes)
        await steps(trainer, 0, 1)
        assert [c.token_ids for c in (await engine.sample(["what is 1 + 1?"], params)).groups[0]] == [
            c.token_ids for c in expected.groups[0]
        ]
        shared = await trainer.share(ShareRequest(directory=str(tmp_path), whole=True))
        assert shared.path is not None
        assert (await trainer.load(request(Path(shared.path), 1))).params == info.params
        again = await trainer.share(ShareRequest(directory=str(tmp_path / "model"), whole=True))
        assert again.probe.logprobs == pytest.approx(shared.probe.logprobs, abs=1e-5)

        await trainer.load(request(model, 2))
        assert worker.pid is not None
        (rank,) = psutil.Process(worker.pid).children()
        rank.send_signal(dead)
        with pytest.raises(WorkerDied, match=r"gave up.*rank 1|ended with exit code 1.*rank 1"):
            await trainer.step(groups(0))
        rank.wait(timeout=10)

    drive(scenario)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_bad_gradient_and_a_damaged_checkpoint_are_told_and_the_worker_lives_on(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")

    async def scenario(worker: Worker) -> None:
        trainer = RemoteTrainer(worker)
        await trainer.load(request(model, 2, advantage="mean"))
        wild = [msgspec.structs.replace(one, rewards=[1e30, 0.0, 0.0, -1e30]) for one in groups(0)]
        with pytest.raises(CallFailed, match="not finite"):
            await trainer.step(wild)
        assert worker.alive
        saved = await trainer.save(tmp_path / "checkpoints", {})
        assert saved.policy_version == 0

        (Path(saved.path) / "trainer.safetensors").write_bytes(b"")
        with pytest.raises(Refused, match="is damaged"):
            await trainer.load(request(model, 2, saved.path))
        assert worker.alive

    drive(scenario)


@pytest.mark.slow
def test_ranks_die_with_the_worker(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")

    async def scenario(worker: Worker) -> None:
        await RemoteTrainer(worker).load(request(model, 2))
        assert worker.pid is not None
        (rank,) = psutil.Process(worker.pid).children()
        os.kill(worker.pid, signal.SIGKILL)
        rank.wait(timeout=10)

    drive(scenario)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"lora_rank": 8}, "lora_rank"),
        ({"kl_coef": 0.1}, "kl_coef"),
        ({"optimizer": "adamw8bit"}, "optimizer"),
        ({"device": "cpu", "dtype": "bfloat16"}, "dtype"),
    ],
)
def test_what_cannot_be_split_is_refused(other: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        TrainingSection.model_validate({"devices": 2, **other})
