"""The policy worker as the node uses it: one engine and one trainer that come back after a fault.

A worker that died, hung or ran out of memory is started again with a growing pause and continues from the newest
checkpoint; the call that met the fault raises `PolicyLost`, and its caller goes on with the next batch or round. Only
MAX_FAULTS in a row without a completed step mean that it is no use: then `PolicyFailed` takes the node down with the
reason. A process that could not load its model is ended at once: it is alive, but there is no policy in it.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog

from sapo_node.config import NodeConfig
from sapo_node.errors import SapoError
from sapo_node.inference.base import EngineStatus, SampledBatch, SamplingParams
from sapo_node.inference.transformers import TransformersEngine
from sapo_node.training import checkpoint
from sapo_node.training.base import (
    LoadRequest,
    ModelInfo,
    Saved,
    ShareRequest,
    StepResult,
    TextScore,
    TrainGroup,
    Weights,
)
from sapo_node.training.remote import POLICY_MODULE, RemoteTrainer
from sapo_node.workers import CallFailed, Refused, Worker, WorkerError

log = structlog.get_logger(__name__)

T = TypeVar("T")

MAX_FAULTS: Final = 5
FIRST_PAUSE_SECONDS: Final = 1.0
LONGEST_PAUSE_SECONDS: Final = 60.0
IMPORT_SECONDS: Final = 180.0  # torch and transformers on a cold disk with four nodes starting at once


class PolicyLost(Exception):
    """This call met a fault of the worker; the next one finds it restarted."""


class EngineLost(PolicyLost):
    """The engine that samples, where it is a process of its own, met a fault; it is started again without end."""


class PolicyFailed(SapoError):
    """The worker cannot be brought back."""


class Policy:
    """The policy of one node. `version` counts the optimiser steps it has taken."""

    takes_turns: bool = True  # sampling and stepping share one queue, so a batch has exactly one version
    engine_name = "transformers"
    checks_memory = False  # whether the model is to be trained, and so must fit into this machine's memory

    def __init__(
        self, config: NodeConfig, checkpoints: Path | None, on_restart: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """`checkpoints` is the folder to resume from and to save into; None: neither.

        `on_restart` is awaited each time the worker came back, before any call goes on: `version` may be lower than it
        was, and what was sampled by the steps that are lost must be forgotten before the count reaches them again. It
        must not call this policy; what it raises, the call that found the worker gone raises.
        """
        self._config = config
        self._checkpoints = checkpoints
        self._on_restart = on_restart
        self._worker = Worker("policy", POLICY_MODULE, start_seconds=IMPORT_SECONDS)
        self._trainer = RemoteTrainer(self._worker)
        self._engine = TransformersEngine(self._worker)
        self._starting = asyncio.Lock()
        self._loaded = False
        self._faults = 0  # in a row
        self._lost = -1  # the last of the `restarts` whose end was counted as a fault; several calls may meet one end
        self.info: ModelInfo | None = None
        self.version = 0
        self.restarts = 0

    @property
    def alive(self) -> bool:
        """Whether the worker runs with a model, so that a call needs no restart."""
        return self._loaded and self._worker.alive

    @property
    def pid(self) -> int | None:
        """Process id of the worker."""
        return self._worker.pid

    async def start(self) -> ModelInfo:
        """Load the model, from the newest checkpoint where there is one. Raises Refused or PolicyFailed."""
        try:
            return await self._load()
        except (WorkerError, OSError) as error:
            raise PolicyFailed(f"the policy cannot be loaded: {error}") from error

    async def sample(self, questions: list[str], params: SamplingParams) -> SampledBatch:
        """Draw completions. Raises PolicyLost or PolicyFailed."""
        return await self._guarded(lambda: self._engine.sample(questions, params))

    async def step(self, groups: list[TrainGroup]) -> StepResult:
        """One optimiser step. Raises PolicyLost or PolicyFailed."""
        result = await self._guarded(lambda: self._trainer.step(groups))
        self.version = result.policy_version
        self._faults = 0
        return result

    async def unfit(self, groups: list[TrainGroup]) -> dict[int, str]:
        """Which groups a step would learn nothing from, and why. Raises PolicyLost or PolicyFailed."""
        return await self._guarded(lambda: self._trainer.unfit(groups))

    async def score_texts(self) -> TextScore:
        """How likely texts that are no task's are to the policy. Raises PolicyLost or PolicyFailed."""
        return await self._guarded(self._trainer.score_texts)

    async def save(self, extra: dict[str, Any]) -> Saved:
        """Write a checkpoint. Raises PolicyLost, PolicyFailed, or CallFailed when the disk refuses."""
        folder = self._checkpoints
        if folder is None:
            raise ValueError("this policy was made without a folder for checkpoints")
        return await self._guarded(lambda: self._trainer.save(folder, extra))

    async def share(self, request: ShareRequest) -> Weights:
        """The newest weights for an engine elsewhere. Raises PolicyLost, PolicyFailed, or CallFailed (the disk)."""
        return await self._guarded(lambda: self._trainer.share(request))

    async def send(self) -> None:
        """Broadcast the weights that `share` described. Raises PolicyLost, PolicyFailed, or CallFailed."""
        await self._guarded(self._trainer.send)

    # What follows is different where sampling has an engine of its own (`inference/paired.py`).

    def check(self) -> None:
        """Raise what ended the supervision of an engine, after which nothing would start it again."""

    @property
    def can_sample(self) -> bool:
        """Whether asking for completions makes sense now."""
        return True

    async def until_it_samples(self) -> None:
        """Wait until `can_sample`."""

    async def settled(self) -> None:
        """Wait until completions are sampled by the newest version."""

    @property
    def engine(self) -> EngineStatus:
        """How the engine that samples is."""
        return EngineStatus(name=self.engine_name, state=self._worker.stage, restarts=self.restarts)

    def interrupt(self) -> None:
        """End the sampling that runs now, if any: its call fails. Steps and checkpoints go on undisturbed."""
        pid = self._worker.pid
        if self._loaded and self._worker.alive and pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it died just now, which its call will say
                os.kill(pid, signal.SIGUSR1)

    async def close(self, grace: float = 5.0) -> None:
        """End the worker."""
        await self._worker.stop(grace)

    async def _guarded(self, call: Callable[[], Awaitable[T]]) -> T:
        await self._revive()
        life = self.restarts
        try:
            return await call()
        except CallFailed:
            raise  # the worker lives: a fault of the request or of ours, which a restart would only hide
        except (Refused, WorkerError) as error:
            if isinstance(error, Refused):  # settings are refused by `load` only, so the worker lost what that gave it
                await self._end()
            if life > self._lost:
                self._lost = life
                self._count_fault(error)
            raise PolicyLost(f"the policy worker was lost: {error}") from error

    async def _revive(self) -> None:
        """Start the worker again if it is gone; others that call meanwhile wait for it.

        A refusal counts as a fault like any other: the same settings were good before, so it may well be the moment
        (memory, disk) that is not.
        """
        async with self._starting:
            while not (self._loaded and self._worker.alive):
                pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** max(0, self._faults - 1))
                await asyncio.sleep(pause)
                try:
                    info = await self._load()
                except (Refused, WorkerError, OSError) as error:
                    self._count_fault(error)
                    continue
                self.restarts += 1
                log.warning("the policy worker is back", continues_from_version=info.policy_version)
                if self._on_restart is not None:
                    await self._on_restart()

    def _count_fault(self, error: Exception) -> None:
        self._faults += 1
        log.error("the policy worker failed", reason=str(error), faults_in_a_row=self._faults)
        if self._faults >= MAX_FAULTS:
            raise PolicyFailed(f"the policy worker failed {self._faults} times in a row: {error}") from error

    async def _load(self) -> ModelInfo:
        """Start the worker and load. Raises Refused, WorkerError or OSError; then no process is left."""
        self._loaded = False
        try:
            await self._worker.start()
            newest = checkpoint.latest(self._checkpoints) if self._checkpoints else None
            request = LoadRequest(
                training=self._config.training.model_dump(mode="json"),
                inference=self._config.inference.model_dump(mode="json"),
                seed=self._config.node.seed,
                threads=self._config.node.threads,
                resume=str(newest) if newest else None,
                check_memory=self.checks_memory,
            )
            self.info = await self._trainer.load(request)
        except BaseException:  # also when cancelled: a worker without a model is of no use to anyone
            await self._end()
            raise
        self._loaded = True
        self.version = self.info.policy_version
        return self.info

    async def _end(self) -> None:
        self._loaded = False
        await self._worker.stop(grace=0)
