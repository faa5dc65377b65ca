"""A policy whose completions come from an engine of its own: vLLM samples while the trainer steps.

To the node it is a `Policy` like any other. A step ends in the trainer; the new weights then follow to the engine while
the next step may already run, and `settled` waits for them. How far sampling may lag behind is bounded twice: the loops
of a node start a batch only when the weights of `max_staleness` steps before are in place (training/rounds.py), and the
pool gives out no group whose oldest token is staler (rollouts/pool.py), whatever was restarted in between.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from sapo_node.config import NodeConfig
from sapo_node.errors import SapoError
from sapo_node.fit import gpu_memory_share
from sapo_node.inference.base import EngineStatus, SampledBatch, SamplingParams
from sapo_node.inference.vllm import FAULTS, WATCH_SECONDS, EngineDown, NoWeights, VLLMEngine
from sapo_node.inference.weights import WeightsFolder
from sapo_node.machine import look
from sapo_node.training.base import ModelInfo, ShareRequest, StepResult, TrainGroup, Weights
from sapo_node.training.rounds import until
from sapo_node.training.supervised import EngineLost, Policy, PolicyFailed, PolicyLost
from sapo_node.workers import CallFailed, WorkerError

log = structlog.get_logger(__name__)


class PairedPolicy(Policy):
    """A trainer and a vLLM engine."""

    takes_turns = False
    engine_name = "vllm"

    def __init__(
        self,
        config: NodeConfig,
        checkpoints: Path | None,
        on_restart: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """As `Policy`."""
        super().__init__(config, checkpoints, self._came_back)
        self._then = on_restart
        self._engine_process = VLLMEngine(config, self._share, self._send)
        self._folder: WeightsFolder | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._following: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()

    async def start(self) -> ModelInfo:
        """Load the model, and start vLLM on it. Raises Refused, PolicyFailed or SapoError."""
        engine, before = self._engine_process, await asyncio.to_thread(look)
        telling = asyncio.create_task(engine.tell_stages(), name="vllm: tell")
        self._tasks.append(telling)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(engine.launch(), name="vllm")
                load = group.create_task(super().start(), name="policy")
        except BaseExceptionGroup as errors:
            error = _first(errors)
            if isinstance(error, WorkerError):
                raise PolicyFailed(f"vLLM cannot be started: {error}") from errors
            raise error from errors
        info, settings = load.result(), self._config
        self._folder = WeightsFolder.prepare(settings.inference.weights_dir, settings.node.data_dir, info.weight_bytes)
        engine.gpu_memory_share = await asyncio.to_thread(gpu_memory_share, settings, before)
        try:
            await engine.start(info)
        except FAULTS as error:
            raise PolicyFailed(f"vLLM cannot be started: {error}") from error
        self._tasks.append(asyncio.create_task(engine.keep_up(), name="vllm: keep up"))
        return info

    async def sample(self, questions: list[str], params: SamplingParams) -> SampledBatch:
        """Draw completions. Raises EngineLost when the engine does not run, and PolicyLost when this call failed or the
        policy went back meanwhile."""
        life = self.restarts
        try:
            batch = await self._engine_process.sample(questions, params)
        except CallFailed as error:
            raise PolicyLost(str(error)) from error
        except (WorkerError, EngineDown) as error:
            raise EngineLost(str(error)) from error
        if self.restarts != life:
            raise PolicyLost("the policy went back to a checkpoint while this batch was sampled")
        return batch

    async def step(self, groups: list[TrainGroup]) -> StepResult:
        """One optimiser step; its weights are then on their way to the engine."""
        self.check()
        result = await super().step(groups)
        before = self._following
        if before is not None:  # one exchange at a time: the engine is never further behind. But a stop does not wait
            await until(self._ending, asyncio.shield(before))
        self._following = asyncio.create_task(self._follow(before), name="vllm: follow")
        if self._config.inference.weight_transfer == "nccl":
            await self.settled()  # the weights leave from where the next step would change them
        return result

    async def _follow(self, before: asyncio.Task[None] | None) -> None:
        """Exchange weights, after the exchange before is over."""
        if before is not None:
            await before
        await self._engine_process.follow()

    def check(self) -> None:
        """Raise what ended a task of the supervision, if one ended."""
        for task in (*self._tasks, self._following):
            if task is not None and task.done() and not task.cancelled():
                task.result()

    async def settled(self) -> None:
        """Wait until the engine has the newest weights, or is down."""
        if self._following is not None:
            await asyncio.wait({self._following})  # not awaited itself: a waiter that gives up must not cancel it

    @property
    def can_sample(self) -> bool:
        """Whether the engine runs."""
        return self._engine_process.up

    async def until_it_samples(self) -> None:
        """Wait until the engine runs. Raises what `check` raises."""
        while not self._engine_process.up:
            self.check()
            await asyncio.sleep(WATCH_SECONDS)

    @property
    def engine(self) -> EngineStatus:
        """How vLLM is."""
        engine = self._engine_process
        return EngineStatus(
            name="vllm",
            state=engine.state,
            restarts=engine.restarts,
            sync_faults=engine.sync_faults,
            stall_seconds=engine.stall_seconds,
        )

    @property
    def engine_pid(self) -> int | None:
        """Process id of the inference worker."""
        return self._engine_process.pid

    def interrupt(self) -> None:
        """End the sampling that runs now: its calls fail. From now on a step does not wait for the engine."""
        self._ending.set()
        self._tasks.append(asyncio.create_task(self._engine_process.interrupt(), name="vllm: interrupt"))

    async def close(self, grace: float = 5.0) -> None:
        """End both processes and remove the weights between them."""
        tasks = [*self._tasks, *([self._following] if self._following else [])]
        for task in tasks:
            task.cancel()
        try:
            for task in tasks:
                try:
                    await task  # a fault of ours in there is raised, after the processes have ended
                except asyncio.CancelledError:
                    pass
                except SapoError as error:
                    log.error("vLLM was no longer kept up", reason=str(error))
        finally:
            await self._engine_process.close()
            await super().close(grace)
            if self._folder is not None:
                self._folder.remove()

    async def _share(self, whole: bool) -> Weights:
        assert self._folder is not None, "made when the policy was loaded"
        try:
            settings = self._config.inference
            request = ShareRequest(
                directory=str(self._folder.path),
                whole=whole,
                transfer=settings.weight_transfer,
                receivers=settings.tensor_parallel,
            )
            weights = await self.share(request)
            self._folder.keep_only(weights.path)
        except (PolicyLost, CallFailed, OSError) as error:
            raise NoWeights(f"the trainer's weights could not be had: {error}") from error
        return weights

    async def _send(self) -> None:
        try:
            await self.send()
        except (PolicyLost, CallFailed) as error:
            raise NoWeights(f"the trainer's weights could not be sent: {error}") from error

    async def _came_back(self) -> None:
        """The trainer went back to a checkpoint: what vLLM has, and what it is sampling, are of steps that are lost."""
        await self._engine_process.end("the policy went back to a checkpoint")
        if self._then is not None:
            await self._then()


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
