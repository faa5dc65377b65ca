"""vLLM as the node sees it: one inference worker that is kept running, apart from everything else of the node.

The worker (`vllm_worker.py`) may die, hang or run out of memory; its weights may turn out not to be the trainer's. The
cure is always the same: the process is ended and another one starts, after a pause that grows with each failure in a
row, on the weights that the trainer has by then. Half-updated weights are never sampled from: an exchange that failed,
or whose log-probs differ from the trainer's, is such a failure. Meanwhile `up` is False, and the node goes on without.
"""

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from sapo_node.config import InferenceSection, NodeConfig
from sapo_node.inference.base import (
    READY,
    Nothing,
    SampledBatch,
    SamplingParams,
    StartRequest,
    Synced,
    SyncRequest,
)
from sapo_node.machine import find_vllm
from sapo_node.scratch import socket_folder
from sapo_node.training.base import ModelInfo, SampleRequest, Weights
from sapo_node.worker_child import IDLE
from sapo_node.workers import Refused, Worker, WorkerDied, WorkerError

log = structlog.get_logger(__name__)

MODULE: Final = "sapo_node.inference.vllm_worker"
IMPORT_SECONDS: Final = 300.0  # of vllm, on a cold disk with several nodes starting at once
CALLS_AT_ONCE: Final = 8  # a batch, an evaluation, an exchange of weights, an interrupt
SAMPLE_SECONDS: Final = 3600.0  # bounds a call that crawls on; one that hangs is found by the deadline of its stage
SYNC_SECONDS: Final = 600.0
START_SECONDS: Final = 7200.0  # likewise: its stages have the deadline inference.start_seconds
FIRST_PAUSE_SECONDS: Final = 1.0
LONGEST_PAUSE_SECONDS: Final = 60.0
WATCH_SECONDS: Final = 0.5

TOLERANCE: Final = {"float32": 1e-3, "bfloat16": 0.1}
"""Mean difference of log-probs that other kernels explain. An importance ratio is then off by a tenth of a per cent in
float32; a forgotten layer, or weights of another step, are above it as soon as they matter."""

LOST_PROCESS: Final = re.compile(r"Worker proc (\S+) died unexpectedly \(exit code: (?:-(\d+)|None)\)")
"""How vLLM logs that one of the processes that hold the model was killed. It may look before the code is known."""

Share = Callable[[bool], Awaitable[Weights]]
Send = Callable[[], Awaitable[None]]


class EngineDown(Exception):
    """The engine does not run at this moment; it is being started again."""


class NoWeights(Exception):
    """The trainer cannot give its weights now."""


class WeightsDiffer(Exception):
    """The engine computes other log-probs than the trainer does."""


FAULTS: Final = (WorkerError, Refused, NoWeights, WeightsDiffer, OSError)
"""What ends one life of the engine, and not the node's."""


class VLLMEngine:
    """`InferenceEngine` over an inference worker. `launch`, then `keep_up` as a task for as long as it is needed."""

    def __init__(
        self,
        config: NodeConfig,
        share: Share,
        send: Send | None = None,
        module: str = MODULE,
    ) -> None:
        """`share` gives the trainer's newest weights; its argument is whether an engine starts from them. `send` is
        awaited while the engine receives, where they are broadcast. Both may raise NoWeights. `module` is what the
        worker runs.
        """
        self._config = config
        self._share = share
        self._send = send
        self.gpu_memory_share: float | None = None  # of its GPU; set before `start`
        self._worker = Worker(
            "inference",
            module,
            env=environment(config.inference, config.training.devices),
            start_seconds=IMPORT_SECONDS,
            calls_at_once=CALLS_AT_ONCE,
        )
        self._info: ModelInfo | None = None
        self._up = asyncio.Event()
        self._turn = asyncio.Lock()  # of exchanging weights
        self._failures = 0  # in a row
        self._life = 0  # counts the ends of the engine: what began in another life has nothing to say in this one
        self._reason = ""
        self._pause_until: float | None = None
        self.version = -1  # of the weights it has
        self.restarts = 0
        self.sync_faults = 0
        self.stall_seconds: float | None = None  # of the last exchange of weights

    @property
    def up(self) -> bool:
        """Whether it can sample now."""
        return self._up.is_set() and self._worker.alive

    @property
    def state(self) -> str:
        """What it is doing, for people."""
        if self.up:
            return READY if self._worker.stage == IDLE else self._worker.stage
        if self._pause_until is not None:
            seconds = max(0.0, self._pause_until - asyncio.get_running_loop().time())
            return f"starts again in {seconds:.0f} s; {self._reason}"
        return f"{self._worker.stage}; {self._reason}" if self._reason else self._worker.stage

    @property
    def pid(self) -> int | None:
        """Process id of the worker."""
        return self._worker.pid

    async def tell_stages(self) -> None:
        """Log what it does until it is up: a start takes a minute, and a large model's much longer."""
        told = ""
        while not self.up:
            if self._worker.stage != told:
                told = self._worker.stage
                log.info("vLLM", stage=told)
            await asyncio.sleep(WATCH_SECONDS)

    async def launch(self) -> None:
        """Start the process, which imports vLLM, before there are weights. Raises WorkerError."""
        await self._worker.start()

    async def start(self, info: ModelInfo) -> None:
        """Start the engine on the trainer's weights. Raises WorkerError, Refused, WeightsDiffer or NoWeights."""
        self._info = info
        if not self._worker.alive:
            await self._worker.start()
        weights = await self._share(True)
        assert weights.path is not None
        started = await self._worker.call("start", self._start_request(info, weights), Synced, deadline=START_SECONDS)
        self._judge(started)
        self.version = weights.policy_version
        async with self._turn:  # the trainer may have moved on meanwhile
            await self._exchange(await self._share(False))
            self._up.set()
        self._reason = ""

    def _start_request(self, info: ModelInfo, weights: Weights) -> StartRequest:
        assert weights.path is not None
        return StartRequest(
            folder=weights.path,
            policy_version=weights.policy_version,
            probe=weights.probe,
            inference=self._config.inference.model_dump(mode="json"),
            dtype=self._config.training.dtype,
            stop_ids=info.stop_ids,
            max_length=info.max_length,
            seed=self._config.node.seed,
            gpu_memory_share=self.gpu_memory_share,
        )

    async def sample(self, questions: list[str], params: SamplingParams) -> SampledBatch:
        """Draw completions. Raises EngineDown, or WorkerError when the engine failed meanwhile.

        A batch that ends during an exchange of weights is held back by the worker until that is over; where the weights
        then turn out to be wrong, the batch is lost with the engine.
        """
        if not self.up:
            raise EngineDown(f"vLLM does not run: {self.state}")
        life = self._life
        request = SampleRequest(questions=questions, params=params)
        batch = await self._worker.call("sample", request, SampledBatch, deadline=SAMPLE_SECONDS)
        if life != self._life:
            raise EngineDown(f"what vLLM had sampled is dropped: {self._reason}")
        return batch

    async def follow(self) -> None:
        """Give it the trainer's newest weights, if it runs. A failure is logged and mended by `keep_up`."""
        async with self._turn:
            if not self.up:
                return
            life = self._life
            try:
                weights = await self._share(False)
                if life == self._life:
                    await self._exchange(weights)
                    self._failures = 0  # not at the start: an engine that starts well may still fail at its first task
            except FAULTS as error:
                if life == self._life:
                    self.sync_faults += not isinstance(error, WorkerDied)  # that is no fault of the weights
                    await self.end(f"new weights did not reach vLLM: {error}")

    async def interrupt(self) -> None:
        """End the sampling that runs now: its calls fail."""
        if self.up:
            with contextlib.suppress(WorkerError):  # it ended by itself, and its sampling with it
                await self._worker.call("interrupt", Nothing(), Nothing, deadline=10.0)

    async def keep_up(self) -> None:
        """Start the engine again whenever it is gone, for ever."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if self.up:
                continue
            if self._up.is_set():  # it ended by itself
                if self._worker.fault is None:
                    continue  # its last words are being collected
                await self.end(str(self._worker.fault))
            await self._pause()
            telling = asyncio.create_task(self.tell_stages(), name="vllm: tell")
            try:
                assert self._info is not None
                await self.start(self._info)
                self.restarts += 1
                log.warning("vLLM is back", restarts=self.restarts, policy_version=self.version)
            except FAULTS as error:
                if isinstance(error, WeightsDiffer):
                    self.sync_faults += 1
                await self.end(str(error))
            finally:
                telling.cancel()

    async def _pause(self) -> None:
        seconds = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** max(0, self._failures - 1))
        self._pause_until = asyncio.get_running_loop().time() + seconds
        await asyncio.sleep(seconds)
        self._pause_until = None

    async def end(self, reason: str) -> None:
        """End the process for a fault; `keep_up` starts another."""
        self._up.clear()
        self._life += 1
        self._failures += 1
        self._reason = summary(reason, self._worker.last_lines)
        reason = "\n".join([self._reason, *reason.splitlines()[1:]])
        log.error("vLLM is started again; training goes on with what there is", reason=reason, in_a_row=self._failures)
        await self._worker.stop(grace=0)

    async def close(self) -> None:
        """End the process."""
        self._up.clear()
        await self._worker.stop(grace=0)  # it keeps nothing

    async def _exchange(self, weights: Weights) -> None:
        if weights.policy_version == self.version:
            return
        request = SyncRequest(
            policy_version=weights.policy_version, probe=weights.probe, path=weights.path, transfer=weights.transfer
        )
        exchange = self._worker.call("sync", request, Synced, deadline=SYNC_SECONDS)
        if weights.transfer is not None and self._send is not None:
            synced, _ = await asyncio.gather(exchange, self._send())
        else:
            synced = await exchange
        self._judge(synced)
        self.version = weights.policy_version
        self.stall_seconds = synced.stall_seconds

    def _judge(self, synced: Synced) -> None:
        settings = self._config
        limit = settings.inference.sync_tolerance or TOLERANCE[settings.training.dtype]
        if not synced.difference <= limit:  # NaN is above every limit
            raise WeightsDiffer(
                f"after an exchange of weights vLLM's log-probs differ from the trainer's by {synced.difference:.2g} "
                f"on average, where at most {limit:g} is explained by other arithmetic (inference.sync_tolerance)"
            )


def summary(reason: str, output: list[str]) -> str:
    """A reason in one line. How a process below the engine's core ended, only vLLM's own output tells."""
    first = reason.partition("\n")[0]
    for line in output:
        if found := LOST_PROCESS.search(line):
            how = f"was killed by {signal.Signals(int(found[2])).name}" if found[2] else "is gone, as after a SIGKILL"
            return f"{first}; {found[1]} {how}"
    return first


def environment(settings: InferenceSection, trainers: int = 1) -> dict[str, str]:
    """Environment of the inference worker: quiet, offline, on loopback only, with GPUs of its own where it broadcasts.

    OMP_NUM_THREADS is taken out: with it set to 1, vLLM on a CPU was seen not to start. Its threads are not bound to
    cores unless the variable says so: several nodes on one machine would all be bound to the same ones. Unbound threads
    that wait for each other by spinning would take the cores from one another and from the trainer: beside other work
    sampling was seen to fall to a twentieth, so they sleep. Its processes talk through sockets in TMPDIR, or elsewhere
    where that path is too long. Raises SapoError where no path is short enough.
    """
    values = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    values.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    values.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if settings.weight_transfer == "nccl":  # the trainer has the first GPUs; not run on GPUs yet
        end = trainers + settings.tensor_parallel
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(end)))
        values["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[trainers:end])
    if "VLLM_RPC_BASE_PATH" not in values and (sockets := socket_folder()):
        values["VLLM_RPC_BASE_PATH"] = str(sockets)
    if find_vllm() == "vllm-cpu":
        values["TORCHDYNAMO_DISABLE"] = "1"  # else it compiles a few functions at its start, which needs a C++ compiler
    return values | {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_HOST_IP": "127.0.0.1",  # its processes talk to each other over TCP
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",  # the model is a folder here
    }
