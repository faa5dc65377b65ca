"""Received batches that wait for the one who reads them, bounded in number and in memory.

A kilobyte on the wire can be 16 MiB here, so a bound in number alone is none. What does not fit pushes out: for its
memory the largest, so that a few bloated batches cannot push out many usual ones, and for its number the oldest.
"""

import asyncio
from typing import Final, Generic, Protocol, TypeVar

MAX_WAITING: Final = 64
MAX_WAITING_BYTES: Final = 64 << 20
"""In memory. Room for all MAX_WAITING batches where they are of a usual size (32 groups of 8 completions of 4 kB)."""


class Batch(Protocol):
    """What is needed of a received batch."""

    @property
    def memory(self) -> int:
        """Bytes that it takes here."""
        ...


T = TypeVar("T", bound=Batch)


class Waiting(Generic[T]):
    """A queue for one reader."""

    def __init__(self) -> None:
        self._batches: list[T] = []
        self._arrived = asyncio.Event()

    def put(self, batch: T) -> list[T]:
        """Add a batch; returns those that are pushed out for it, itself among them if it is the largest."""
        self._batches.append(batch)
        dropped = []
        while sum(one.memory for one in self._batches) > MAX_WAITING_BYTES:
            largest = max(range(len(self._batches)), key=lambda at: self._batches[at].memory)
            dropped.append(self._batches.pop(largest))
        if len(self._batches) > MAX_WAITING:
            dropped.append(self._batches.pop(0))
        self._arrived.set()
        return dropped

    async def get(self) -> T:
        """The oldest, once there is one."""
        while not self._batches:
            self._arrived.clear()
            await self._arrived.wait()
        return self._batches.pop(0)
