"""SIGTERM and Ctrl-C for a process that lives long, from its first moment on.

A handler that raises is no help while a program begins: Python drops what is raised in the middle of a weak
reference's callback or a `__del__`, both common in imports, and a supervisor asks only once. So SIGTERM waits in the
kernel until the event loop listens.
"""

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Let SIGTERM wait until `listen`, or until the block ends. Ctrl-C still interrupts: who pressed it can do so
    again."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def listen(loop: "AbstractEventLoop", stop: Callable[[], object]) -> None:
    """Have the running loop call `stop` for every SIGTERM and SIGINT, also for a SIGTERM that came before."""
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
