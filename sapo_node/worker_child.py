"""The child's side of a worker: answer calls, say what is being done, die with the parent.

Run as `python -m sapo_node.worker_child <module> <parent's pid>`: this file's main arms the child, imports the module
and runs its `main()`, which calls `serve` (handlers run one at a time on the main thread) or `serve_async` (handlers
are coroutines that run side by side on uvloop).

A thread reports every second what the child is doing (`stage`) and a progress counter. It starts in `serve` and not
before: a module that sandboxes itself does so before, so that no thread is left outside the sandbox.

Processes that a worker spawns itself, as vLLM does with its engine core, die with it too: multiprocessing imports this
module in them before anything else, under the name `__mp_main__`.
"""

import asyncio
import ctypes
import importlib
import os
import signal
import socket
import sys
import threading
import time
import typing
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, NoReturn

import msgspec
from msgspec import Raw, Struct

Handler = Callable[[Any], Any]
AsyncHandler = Callable[[Any], Coroutine[Any, Any, Any]]

MAX_FRAME: Final = 1 << 28  # weights never travel here; a larger frame is a bug, not a need
BEAT_SECONDS: Final = 1.0
FD_VARIABLE: Final = "SAPO_WORKER_FD"
IDLE: Final = "idle"
GAVE_UP: Final = "gave up: "  # begins the line by which a child says why it ends


class Refused(Exception):
    """A request that cannot be served, told in a sentence for people. Raised by handlers, and again in the parent."""


class Call(Struct, tag="call"):
    """Asks for a method."""

    id: int
    method: str
    payload: Raw


class Stop(Struct, tag="stop"):
    """Asks the child to end."""


class Ready(Struct, tag="ready"):
    """The child serves."""


class Beat(Struct, tag="beat"):
    """What the child is doing."""

    stage: str
    deadline: float | None
    count: int


class Result(Struct, tag="result"):
    """A call's answer."""

    id: int
    payload: Raw


class Failure(Struct, tag="failure"):
    """A call whose handler raised."""

    id: int
    text: str
    refused: bool


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


def give_up(reason: str) -> NoReturn:
    """End this process at once: it is of no use any more. The parent's error shows the reason."""
    print(f"{GAVE_UP}{reason}", file=sys.stderr, flush=True)
    os._exit(1)


def serve(handlers: Mapping[str, Handler]) -> None:
    """Answer the parent's calls until it says stop or is gone. The child's main thread stays in here."""
    channel = _Channel()
    requests = {name: _request_type(handler) for name, handler in handlers.items()}
    channel.ready()
    while isinstance(message := channel.receive(), Call):
        stage(message.method)
        try:
            request = msgspec.msgpack.decode(message.payload, type=requests[message.method])
            channel.answer(message, handlers[message.method](request))
        except Exception as error:  # noqa: BLE001 - every fault of a handler is the caller's to see, with its place
            channel.send(_failure(message, error))
        stage(IDLE)


async def serve_async(handlers: Mapping[str, AsyncHandler]) -> None:
    """The same with handlers that run side by side, each in a task of its own; they name their stages themselves."""
    channel = _Channel()
    requests = {name: _request_type(handler) for name, handler in handlers.items()}
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[Call | None] = asyncio.Queue()  # bounded by the parent, which waits for answers

    def read() -> None:
        while isinstance(message := channel.receive(), Call):
            loop.call_soon_threadsafe(arrived.put_nowait, message)
        loop.call_soon_threadsafe(arrived.put_nowait, None)

    async def answer(call: Call) -> None:
        try:
            request = msgspec.msgpack.decode(call.payload, type=requests[call.method])
            channel.answer(call, await handlers[call.method](request))
        except asyncio.CancelledError:
            channel.send(Failure(id=call.id, text="it was interrupted", refused=False))
        except Exception as error:  # noqa: BLE001 - every fault of a handler is the caller's to see, with its place
            channel.send(_failure(call, error))

    channel.ready()
    threading.Thread(target=read, name="calls", daemon=True).start()
    running: set[asyncio.Task[None]] = set()
    while (call := await arrived.get()) is not None:
        task = asyncio.create_task(answer(call), name=call.method)
        running.add(task)
        task.add_done_callback(running.discard)


def _failure(call: Call, error: Exception) -> Failure:
    if isinstance(error, Refused):
        return Failure(id=call.id, text=str(error), refused=True)
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else ""
    return Failure(id=call.id, text=f"{type(error).__name__}: {error}{where}", refused=False)


def _request_type(handler: Handler) -> Any:
    hints = typing.get_type_hints(handler)
    hints.pop("return", None)
    if len(hints) != 1:
        raise TypeError(f"a handler takes one annotated request, but {handler} takes {sorted(hints)}")
    return next(iter(hints.values()))


class _Channel:
    """The child's end of the socketpair. Any thread may send; one receives."""

    def __init__(self) -> None:
        self._socket = socket.socket(fileno=int(os.environ[FD_VARIABLE]))
        self._lock = threading.Lock()
        self._decoder = msgspec.msgpack.Decoder(Call | Stop)

    def ready(self) -> None:
        """Say that calls are served from now on, and begin to beat."""
        stage(IDLE)
        self.send(Ready())
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def answer(self, call: Call, value: Any) -> None:
        """Send a call's result. Raises what the encoder raises."""
        self.send(Result(id=call.id, payload=Raw(msgspec.msgpack.encode(value))))

    def send(self, message: Struct) -> None:
        """Send one message whole."""
        data = frame(message)
        with self._lock:
            self._socket.sendall(data)

    def receive(self) -> Call | Stop | None:
        """The next message, or None when the parent has gone."""
        head = self._exactly(4)
        body = None if head is None else self._exactly(int.from_bytes(head, "big"))
        return None if body is None else self._decoder.decode(body)

    def _exactly(self, size: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < size:
            chunk = self._socket.recv(min(1 << 20, size - len(parts)))
            if not chunk:
                return None
            parts += chunk
        return bytes(parts)

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            try:
                self.send(Beat(stage=_Now.stage, deadline=_Now.deadline, count=_Now.count))
            except OSError:
                os._exit(1)  # the node is gone: nobody is left to answer, whatever the main thread is doing


def frame(message: Struct) -> bytes:
    """A message as both sides send it: 4 bytes of length, then msgpack."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME:
        raise ValueError(f"a frame of {len(body)} bytes exceeds the limit of {MAX_FRAME}")
    return len(body).to_bytes(4, "big") + body


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


if __name__ == "__main__":
    # This module runs as __main__ here; the worker's module imports it by name, and that copy holds the state.
    from sapo_node import worker_child

    worker_child.child_main(sys.argv[1], int(sys.argv[2]))
elif __name__ == "__mp_main__":
    die_with_parent(os.getppid())
