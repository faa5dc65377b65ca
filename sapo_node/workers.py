"""Supervised child processes: spawn, typed calls, heartbeats, the reason of a death, no orphans.

A worker is `python -m sapo_node.workers <module>`: this file's main arms the child (it dies with its parent), imports
the module and runs its `main()`, which calls `serve` with a table of handlers. Parent and child exchange frames over a
socketpair: 4 bytes of length, then one msgpack struct. Handlers run one at a time on the child's main thread.

A thread in the child reports every second what the child is doing (`stage`) and a progress counter. A child whose
counter stands still for longer than its stage allows is stuck and is killed, although its heartbeat still beats; so is
one that owes an answer and does not beat at all (stopped, or its interpreter lock is never let go). That thread starts
in `serve` and not before: a module that sandboxes itself does so before calling `serve`, so that no
thread is left outside the sandbox.
"""

import asyncio
import contextlib
import ctypes
import importlib
import os
import signal
import socket
import sys
import threading
import time
import typing
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct

T = TypeVar("T")
Handler = Callable[[Any], Any]

MAX_FRAME = 1 << 28  # weights never travel here; a larger frame is a bug, not a need
BEAT_SECONDS = 1.0
# A heart may miss beats while native code holds the interpreter lock: the import of a large library from a slow disk, a
# tokenizer or a GPU being set up, each seconds long. Tensor work lets the lock go, and so does the writing of weights
# (by safetensors since 0.8).
SILENCE_SECONDS = 30.0
RING_LINES = 100  # last lines of a child's output that an error shows
MAX_LINE = 2000  # bytes kept of one such line
MAX_WAITING = 256  # calls that may wait for their turn; more means that the caller does not wait for answers
FD_VARIABLE = "SAPO_WORKER_FD"
IDLE = "idle"


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


class Refused(Exception):
    """A request that cannot be served, told in a sentence for people. Raised by handlers, and again in the parent."""


class _Call(Struct, tag="call"):
    id: int
    method: str
    payload: Raw


class _Stop(Struct, tag="stop"):
    pass


class _Ready(Struct, tag="ready"):
    pass


class _Beat(Struct, tag="beat"):
    stage: str
    deadline: float | None
    count: int


class _Result(Struct, tag="result"):
    id: int
    payload: Raw


class _Failure(Struct, tag="failure"):
    id: int
    text: str
    refused: bool


# ---- the child's side ------------------------------------------------------------------------------------------------


class _Now:
    """What this process is doing; plain attributes, written by the main thread, read by the heartbeat thread."""

    stage = "starting"
    deadline: float | None = None
    count = 0


def stage(name: str, *, deadline: float | None = None) -> None:
    """Name what this worker does from now on; `deadline` is the longest time (seconds) without `progress`."""
    _Now.stage, _Now.deadline = name, deadline
    _Now.count += 1


def progress() -> None:
    """Say that the current stage moved on."""
    _Now.count += 1


def serve(handlers: Mapping[str, Handler]) -> None:
    """Answer the parent's calls until it says stop or is gone. The child's main thread stays in here."""
    channel = socket.socket(fileno=int(os.environ[FD_VARIABLE]))
    lock = threading.Lock()
    requests = {name: _request_type(handler) for name, handler in handlers.items()}
    decoder = msgspec.msgpack.Decoder(_Call | _Stop)
    stage(IDLE)
    _send(channel, lock, _Ready())
    threading.Thread(target=_beat, args=(channel, lock), name="heartbeat", daemon=True).start()
    while (frame := _receive(channel)) is not None:
        message = decoder.decode(frame)
        if isinstance(message, _Stop):
            return
        stage(message.method)
        _send(channel, lock, _answer(handlers, requests, message))
        stage(IDLE)


def _answer(handlers: Mapping[str, Handler], requests: Mapping[str, Any], call: _Call) -> _Result | _Failure:
    try:
        request = msgspec.msgpack.decode(call.payload, type=requests[call.method])
        value = handlers[call.method](request)
        return _Result(id=call.id, payload=Raw(msgspec.msgpack.encode(value)))
    except Refused as error:
        return _Failure(id=call.id, text=str(error), refused=True)
    except Exception as error:  # noqa: BLE001 - every fault of a handler is the caller's to see, with its place
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else ""
        return _Failure(id=call.id, text=f"{type(error).__name__}: {error}{where}", refused=False)


def _request_type(handler: Handler) -> Any:
    hints = typing.get_type_hints(handler)
    hints.pop("return", None)
    if len(hints) != 1:
        raise TypeError(f"a handler takes one annotated request, but {handler} takes {sorted(hints)}")
    return next(iter(hints.values()))


def _beat(channel: socket.socket, lock: threading.Lock) -> None:
    while True:
        time.sleep(BEAT_SECONDS)
        try:
            _send(channel, lock, _Beat(stage=_Now.stage, deadline=_Now.deadline, count=_Now.count))
        except OSError:
            os._exit(1)  # the node is gone: nobody is left to answer, whatever the main thread is doing


def _send(channel: socket.socket, lock: threading.Lock, message: Struct) -> None:
    frame = _frame(message)
    with lock:
        channel.sendall(frame)


def _frame(message: Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME:
        raise ValueError(f"a frame of {len(body)} bytes exceeds the limit of {MAX_FRAME}")
    return len(body).to_bytes(4, "big") + body


def _receive(channel: socket.socket) -> bytes | None:
    """The next frame, or None when the parent has gone."""
    head = _receive_exactly(channel, 4)
    return None if head is None else _receive_exactly(channel, int.from_bytes(head, "big"))


def _receive_exactly(channel: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        chunk = channel.recv(min(1 << 20, size - len(parts)))
        if not chunk:
            return None
        parts += chunk
    return bytes(parts)


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the thread that spawned it ends. A no-op where the kernel cannot."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def child_main(module: str, parent: int) -> None:
    """Entry of a worker process."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the node decides when we end, whoever else asks us to
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    importlib.import_module(module).main()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)  # what is worth keeping is on disk; taking torch apart would keep a stopping node waiting for seconds


# ---- the parent's side -----------------------------------------------------------------------------------------------


class Worker:
    """One child process. Not restarted by itself: after a `WorkerError` other than `CallFailed`, `start` it again.

    It must serve within `start_seconds`, and is killed when it is silent for `silence_seconds` while a call waits.
    """

    def __init__(
        self,
        name: str,
        module: str,
        *,
        env: Mapping[str, str] | None = None,
        start_seconds: float = 60.0,
        silence_seconds: float = SILENCE_SECONDS,
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
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._next_id = 0
        self._pending: tuple[int, asyncio.Future[Raw]] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._lines: deque[str] = deque(maxlen=RING_LINES)
        self._beat = _Beat(stage="starting", deadline=None, count=-1)
        self._still = self._silent = 0.0  # seconds without progress, and without a message; counted by `_watch`
        self._fault: WorkerError | None = None

    @property
    def alive(self) -> bool:
        """Whether the process runs and nothing is known to be wrong with it."""
        return self._process is not None and self._process.returncode is None and self._fault is None

    @property
    def pid(self) -> int | None:
        """Process id, or None before the first start."""
        return None if self._process is None else self._process.pid

    @property
    def last_lines(self) -> list[str]:
        """The newest lines the child wrote to its output."""
        return list(self._lines)

    async def start(self) -> None:
        """Spawn the process and wait until it serves. Raises WorkerError when it does not within `start_seconds`."""
        await self._reap()
        ours, theirs = socket.socketpair()
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "sapo_node.workers",
                self._module,
                str(os.getpid()),
                env={**self._env, FD_VARIABLE: str(theirs.fileno())},
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
        self._fault, self.stage = None, "starting"
        self._beat, self._still, self._silent = _Beat(stage="starting", deadline=None, count=-1), 0.0, 0.0
        ours.setblocking(False)
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._ready = asyncio.get_running_loop().create_future()
        self._tasks = [
            asyncio.create_task(self._read_frames(reader), name=f"{self.name}: frames"),
            asyncio.create_task(self._read_lines(), name=f"{self.name}: output"),
            asyncio.create_task(self._watch(), name=f"{self.name}: watch"),
        ]
        try:
            async with asyncio.timeout(self._start_seconds):
                await self._ready
        except TimeoutError:
            fault = WorkerStuck(f"the {self.name} worker did not start within {self._start_seconds:.0f} s")
            await self._kill(fault)
            raise fault from None
        except asyncio.CancelledError:
            await self._kill(WorkerDied(f"the start of the {self.name} worker was cancelled"))
            raise

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
        answer: asyncio.Future[Raw] = asyncio.get_running_loop().create_future()
        self._pending = (self._next_id, answer)
        try:
            async with asyncio.timeout(deadline):
                self._writer.write(_frame(_Call(id=self._next_id, method=method, payload=payload)))
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
            self._pending = None

    async def stop(self, grace: float = 5.0) -> None:
        """Ask the process to end; kill it when it has not within `grace` seconds. An open call raises WorkerDied."""
        if self._process is not None and self._writer is not None and self._process.returncode is None:
            with contextlib.suppress(ConnectionError):
                self._writer.write(_frame(_Stop()))
                self._writer.write_eof()
            try:
                async with asyncio.timeout(grace):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
        await self._reap()
        self._lose(WorkerDied(f"the {self.name} worker was stopped"))

    async def _kill(self, fault: WorkerError) -> None:
        self._lose(fault)
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        await self._reap()

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

    def _lose(self, fault: WorkerError) -> None:
        """Remember the first fault and hand it to whoever waits."""
        self._fault = self._fault or fault
        waiting: list[asyncio.Future[Any] | None] = [self._ready, self._pending[1] if self._pending else None]
        for future in waiting:
            if future is not None and not future.done():
                future.set_exception(self._fault)
                future.exception()  # seen: a start that was cancelled leaves nobody to retrieve it

    async def _read_frames(self, reader: asyncio.StreamReader) -> None:
        decoder = msgspec.msgpack.Decoder(_Ready | _Beat | _Result | _Failure)
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(4), "big")
                if size > MAX_FRAME:
                    await self._kill(WorkerDied(f"the {self.name} worker sent a frame of {size} bytes"))
                    return
                self._handle(decoder.decode(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            await self._tell_death()
        except msgspec.DecodeError as error:
            await self._kill(WorkerDied(f"the {self.name} worker sent a damaged frame ({error})"))

    def _handle(self, message: _Ready | _Beat | _Result | _Failure) -> None:
        self._silent = 0.0
        if isinstance(message, _Beat):
            if message.count != self._beat.count:
                self._still = 0.0
            self._beat, self.stage = message, message.stage
        elif isinstance(message, _Ready):
            self.stage = IDLE
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(None)
        elif self._pending is not None and self._pending[0] == message.id and not self._pending[1].done():
            answer, self.stage = self._pending[1], IDLE
            if isinstance(message, _Result):
                answer.set_result(message.payload)
            elif message.refused:
                answer.set_exception(Refused(message.text))
            else:
                answer.set_exception(CallFailed(f"the {self.name} worker failed: {message.text}"))

    async def _tell_death(self) -> None:
        """The channel closed: the process has ended or is about to; find out how, with its last words."""
        assert self._process is not None
        try:
            async with asyncio.timeout(2.0):
                code = await self._process.wait()
        except TimeoutError:
            self._process.kill()
            code = await self._process.wait()
        await asyncio.sleep(0.05)  # let the last lines arrive
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        words = "".join(f"\n  {line}" for line in list(self._lines)[-12:])
        self._lose(WorkerDied(f"the {self.name} worker {how} in stage '{self.stage}'{words}"))

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
            if self._pending is None:
                continue
            limit, text = self._beat.deadline, ""
            if self._silent > self._silence_seconds:
                text = f"does not beat: nothing was heard of it for {self._silent:.0f} s, last in stage '{self.stage}'"
            elif limit is not None and self._still > limit + 2 * BEAT_SECONDS:
                text = f"made no progress in stage '{self._beat.stage}' for {self._still:.0f} s"
            if text:
                await self._kill(WorkerStuck(f"the {self.name} worker {text}"))
                return


if __name__ == "__main__":
    # This module runs as __main__ here; the worker's module imports it by name, and that copy holds the state.
    from sapo_node import workers

    workers.child_main(sys.argv[1], int(sys.argv[2]))
