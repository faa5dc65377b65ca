"""Supervised child processes: spawn, typed calls, heartbeats, the reason of a death, no orphans.

A worker is `python -m sapo_node.worker_child <module>`; its side is `worker_child.py`. Parent and child exchange frames
over a socketpair: 4 bytes of length, then one msgpack struct.

A child whose progress counter stands still for longer than its stage allows is stuck and is killed, although its
heartbeat still beats; so is one that owes an answer and does not beat at all (stopped, or its interpreter lock is never
let go).
"""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
from collections import deque
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct

from sapo_node import scratch
from sapo_node.worker_child import (
    BEAT_SECONDS,
    FD_VARIABLE,
    GAVE_UP,
    IDLE,
    MAX_FRAME,
    Beat,
    Call,
    Failure,
    Ready,
    Refused,
    Result,
    Stop,
    die_with_parent,
    frame,
    give_up,
    progress,
    serve,
    serve_async,
    stage,
)

__all__ = [
    "CallFailed",
    "CallTimeout",
    "Refused",
    "Worker",
    "WorkerDied",
    "WorkerError",
    "WorkerStuck",
    "die_with_parent",
    "give_up",
    "progress",
    "serve",
    "serve_async",
    "stage",
]

T = TypeVar("T")

# A heart may miss beats while native code holds the interpreter lock: the import of a large library from a slow disk, a
# tokenizer or a GPU being set up, each seconds long. Tensor work lets the lock go, and so does the writing of weights
# (by safetensors since 0.8).
SILENCE_SECONDS = 30.0
RING_LINES = 400  # last lines kept of a child's output; vLLM spends more than a hundred on one traceback
MAX_LINE = 2000  # bytes kept of one such line
LINGER_SECONDS = 5.0  # for what a killed child leaves to clean up
# Else Python looks for modules in the folder that the node was started in before it looks anywhere else: a file there
# with the name of a library's module would be run. Inherited by what the worker spawns.
_SAFE_PATH = {"PYTHONSAFEPATH": "1"}
MAX_WAITING = 256  # calls that may wait for their turn; more means that the caller does not wait for answers


class WorkerError(Exception):
    """The worker itself failed. The message names it, what it was doing, and its last words."""


class WorkerDied(WorkerError):
    """The process ended."""


class WorkerStuck(WorkerError):
    """The process made no progress within the deadline of its stage, or did not beat, and was killed."""


class CallTimeout(WorkerError):
    """The call was not answered in time, and the worker was killed."""


class CallFailed(WorkerError):
    """The handler raised; the worker lives."""


class Worker:
    """One child process. Not restarted by itself: after a `WorkerError` other than `CallFailed`, `start` it again.

    It must serve within `start_seconds`, and is killed when it is silent for `silence_seconds` while a call waits. More
    than one of `calls_at_once` is for children that `serve_async`.
    """

    def __init__(
        self,
        name: str,
        module: str,
        *,
        env: Mapping[str, str] | None = None,
        start_seconds: float = 60.0,
        silence_seconds: float = SILENCE_SECONDS,
        calls_at_once: int = 1,
    ) -> None:
        self.name = name
        self.stage = "not started"
        self._module = module
        self._env = dict(os.environ if env is None else env)
        self._start_seconds = start_seconds
        self._silence_seconds = silence_seconds
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._turn = asyncio.Semaphore(calls_at_once)
        self._waiting = 0
        self._next_id = 0
        self._pending: dict[int, asyncio.Future[Raw]] = {}
        self._ready: asyncio.Future[None] | None = None
        self._lines: deque[str] = deque(maxlen=RING_LINES)
        self._beat = Beat(stage="starting", deadline=None, count=-1)
        self._still = self._silent = 0.0  # seconds without progress, and without a message; counted by `_watch`
        self._fault: WorkerError | None = None
        self._changing = asyncio.Lock()  # held while a process begins or ends: the next begins when the last is gone
        self._stopping = False
        self._stops_wanted = 0  # stops that run or wait for their turn: a start that is under way gives up for them
        self._output_name = f"{name}: output"
        self._folder: str | None = None  # of the process's temporary files, which it cannot remove when it is killed

    @property
    def alive(self) -> bool:
        """Whether the process runs and nothing is known to be wrong with it."""
        running = self._process is not None and self._process.returncode is None
        return running and self._fault is None and not self._stopping

    @property
    def pid(self) -> int | None:
        """Process id, or None before the first start."""
        return None if self._process is None else self._process.pid

    @property
    def fault(self) -> WorkerError | None:
        """What is known to be wrong with it."""
        return self._fault

    @property
    def last_lines(self) -> list[str]:
        """The newest lines the child wrote to its output."""
        return list(self._lines)

    async def start(self) -> None:
        """Spawn the process and wait until it serves. Raises WorkerError when it does not within `start_seconds`."""
        async with self._changing:
            await self._start()

    async def _start(self) -> None:
        await self._reap()
        try:
            ours = await self._spawn()
        except OSError as error:  # no room on the disk or in memory, no descriptor or process left: it may pass
            raise WorkerDied(f"the {self.name} worker could not be started: {error}") from error
        self._fault, self._stopping, self.stage = None, False, "starting"
        self._lines.clear()
        self._beat, self._still, self._silent = Beat(stage="starting", deadline=None, count=-1), 0.0, 0.0
        self._ready = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._start_seconds):
                await self._connect(ours)
                await self._ready
        except TimeoutError:
            fault = WorkerStuck(f"the {self.name} worker did not start within {self._start_seconds:.0f} s")
            self._lose(fault)
            await self._end()
            raise fault from None
        except BaseException:
            self._lose(WorkerDied(f"the start of the {self.name} worker was cancelled"))
            await self._end()
            raise

    async def _spawn(self) -> socket.socket:
        """Make the process and return our end of its socket. Raises OSError."""
        self._folder = scratch.new_folder("worker-")
        ours, theirs = socket.socketpair()
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "sapo_node.worker_child",
                self._module,
                str(os.getpid()),
                env={**self._env, FD_VARIABLE: str(theirs.fileno()), "TMPDIR": self._folder, **_SAFE_PATH},
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # a signal to the node's group would end a child that does not ignore it yet
                limit=1 << 16,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return ours

    async def _connect(self, ours: socket.socket) -> None:
        """Begin to hear the process."""
        self._tasks = [asyncio.create_task(self._read_lines(), name=self._output_name)]
        if self._stops_wanted:  # while it was spawned
            raise WorkerDied(f"the {self.name} worker was stopped")
        ours.setblocking(False)
        try:
            reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        self._tasks += [
            asyncio.create_task(self._read_frames(reader), name=f"{self.name}: frames"),
            asyncio.create_task(self._watch(), name=f"{self.name}: watch"),
        ]

    async def call(self, method: str, request: Struct, result: type[T], *, deadline: float) -> T:
        """One call; others wait for their turn, and `deadline` (seconds) begins with it.

        Raises Refused (told for people), CallFailed (the handler raised), or another WorkerError when the worker is
        lost; then it must be started again.
        """
        if self._waiting >= MAX_WAITING:
            raise CallFailed(f"{MAX_WAITING} calls already wait for the {self.name} worker")
        self._waiting += 1
        try:
            async with self._turn:
                payload = await self._exchange(method, Raw(msgspec.msgpack.encode(request)), deadline)
        finally:
            self._waiting -= 1
        return msgspec.msgpack.decode(payload, type=result)

    async def _exchange(self, method: str, payload: Raw, deadline: float) -> Raw:
        if not self.alive or self._writer is None:
            raise self._fault or WorkerDied(f"the {self.name} worker is not running")
        self._next_id += 1
        number = self._next_id
        answer: asyncio.Future[Raw] = asyncio.get_running_loop().create_future()
        self._pending[number] = answer
        try:
            async with asyncio.timeout(deadline):
                self._writer.write(frame(Call(id=number, method=method, payload=payload)))
                self.stage = method  # until a beat says more
                with contextlib.suppress(ConnectionError):  # its death is told through `answer`, with the reason
                    await self._writer.drain()
                return await answer
        except TimeoutError:
            doing = f" while in stage '{self.stage}'" if self.stage not in (method, IDLE) else ""
            fault = CallTimeout(f"the {self.name} worker did not answer '{method}' within {deadline:.0f} s{doing}")
            await self._kill(fault)
            raise fault from None
        except asyncio.CancelledError:
            # The child is still busy with it; its late answer has an id that nobody waits for any more.
            raise
        finally:
            self._pending.pop(number, None)

    async def stop(self, grace: float = 5.0) -> None:
        """Ask the process to end; kill it when it has not within `grace` seconds. An open call raises WorkerDied, and
        so does a start that is under way."""
        self._stops_wanted += 1
        if self._ready is not None and not self._ready.done():
            self._lose(WorkerDied(f"the {self.name} worker was stopped"))  # the start ends, and lets go of the lock
        try:
            async with self._changing:
                self._stopping = True
                if self._process is not None and self._process.returncode is None:
                    if self._writer is not None:
                        await self._ask_to_end(self._writer, grace)
                    await self._kill_family()
                await self._reap()
                self._lose(WorkerDied(f"the {self.name} worker was stopped"))
        finally:
            self._stops_wanted -= 1

    async def _ask_to_end(self, writer: asyncio.StreamWriter, grace: float) -> None:
        assert self._process is not None
        with contextlib.suppress(ConnectionError):
            writer.write(frame(Stop()))
            writer.write_eof()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await self._process.wait()

    async def _kill(self, fault: WorkerError) -> None:
        """End a process for a fault, unless it is replaced already."""
        process = self._process
        self._lose(fault)
        async with self._changing:
            if self._process is process:
                await self._end()

    async def _end(self) -> None:
        if self._process is not None and self._process.returncode is None:
            await self._kill_family()
        await self._reap()

    async def _kill_family(self) -> None:
        """Kill the process, if it runs, and see that those it has spawned are gone: all of them hold its output open.

        They die with it by themselves, save multiprocessing's resource tracker, which removes the shared memory of the
        dead and then ends. What still runs after LINGER_SECONDS is killed.
        """
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        output = {task for task in self._tasks if task.get_name() == self._output_name}
        if output:
            _, open_still = await asyncio.wait(output, timeout=LINGER_SECONDS)
            if open_still:  # so its group still has a member, and no other process can have got its number
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)  # it leads a session of its own

    async def _reap(self) -> None:
        """Collect what is left of the last process, if any."""
        if self._process is not None:
            await self._process.wait()
        me = asyncio.current_task()
        rest = [task for task in self._tasks if task is not me]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        self._tasks = []
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)  # what stays goes with the node's own temporary folder
            self._folder = None

    def _lose(self, fault: WorkerError) -> None:
        """Remember the first fault and hand it to whoever waits."""
        self._fault = self._fault or fault
        waiting: list[asyncio.Future[Any] | None] = [self._ready, *self._pending.values()]
        for future in waiting:
            if future is not None and not future.done():
                future.set_exception(self._fault)
                future.exception()  # seen: a start that was cancelled leaves nobody to retrieve it

    async def _read_frames(self, reader: asyncio.StreamReader) -> None:
        decoder = msgspec.msgpack.Decoder(Ready | Beat | Result | Failure)
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(4), "big")
                if size > MAX_FRAME:
                    await self._kill(WorkerDied(f"the {self.name} worker sent a frame of {size} bytes"))
                    return
                self._handle(decoder.decode(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            await self._tell_death()
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            await self._kill(WorkerDied(f"the {self.name} worker sent a damaged frame ({error})"))

    def _handle(self, message: Ready | Beat | Result | Failure) -> None:
        self._silent = 0.0
        if isinstance(message, Beat):
            if message.count != self._beat.count:
                self._still = 0.0
            self._beat, self.stage = message, message.stage
        elif isinstance(message, Ready):
            self.stage = IDLE
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(None)
        elif (answer := self._pending.get(message.id)) is not None and not answer.done():
            if len(self._pending) == 1:
                self.stage = IDLE
            if isinstance(message, Result):
                answer.set_result(message.payload)
            elif message.refused:
                answer.set_exception(Refused(message.text))
            else:
                answer.set_exception(CallFailed(f"the {self.name} worker failed: {message.text}"))

    async def _tell_death(self) -> None:
        """The channel closed: the process has ended or is about to; find out how, with its last words."""
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await self._process.wait()
        await self._kill_family()
        code = await self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        told = next((line.removeprefix(GAVE_UP) for line in self._lines if line.startswith(GAVE_UP)), "")
        reason = f": {told}" if told else ""
        words = "".join(f"\n  {line}" for line in list(self._lines)[-12:])
        self._lose(WorkerDied(f"the {self.name} worker {how} in stage '{self.stage}'{reason}{words}"))

    async def _read_lines(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        output = self._process.stdout
        while True:
            try:
                line = await output.readline()
            except ValueError:  # a line beyond the reader's limit; what was read so far is dropped by asyncio
                continue
            if not line:
                return
            self._lines.append(line[:MAX_LINE].decode(errors="replace").rstrip())

    async def _watch(self) -> None:
        """Kill a child that stands still for longer than its stage allows, or that does not beat, while a call waits.

        Time is counted in turns of this loop: when the node itself stood still (Ctrl-Z), its children's beats are yet
        to be read.
        """
        while True:
            await asyncio.sleep(BEAT_SECONDS / 2)
            self._still += BEAT_SECONDS / 2
            self._silent += BEAT_SECONDS / 2
            if not self._pending:
                continue
            limit, text = self._beat.deadline, ""
            if self._silent > self._silence_seconds:
                text = f"does not beat: nothing was heard of it for {self._silent:.0f} s, last in stage '{self.stage}'"
            elif limit is not None and self._still > limit + 2 * BEAT_SECONDS:
                text = f"made no progress in stage '{self._beat.stage}' for {self._still:.0f} s"
            if text:
                await self._kill(WorkerStuck(f"the {self.name} worker {text}"))
                return
