"""Who has a place among the incoming streams, and who makes room when there is none left. No I/O but ending a stream.

Each protocol has places of its own, so that nobody who fetches keeps others from greeting. Of a peer there are a few at
a time; beyond that it comes again. When all are taken, those that did not ask for anything yet make room, strangers'
and the oldest first; then those of strangers that have had the time in which most answers are long read. Peers that are
`known` need not wait for that, and keep their places once they asked.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

MAX_STREAMS: Final = 64
MAX_STREAMS_PER_PEER: Final = 4
"""Incoming streams of one protocol at the same time. One too many of a peer is closed unanswered."""

FAIR_SECONDS: Final = 5.0
"""After this time the stream of a stranger that has asked makes room when there is need. A stream may last much longer
(a slow link, a large batch), but who asks and does not read must not keep out the others for so long."""


class RequestReader(asyncio.StreamReader):
    """A reader that knows whether something was asked: whether a read came to its end since `asked` was unset."""

    asked = False

    async def readexactly(self, n: int) -> bytes:
        data = await super().readexactly(n)
        self.asked = True
        return data


@dataclass(slots=True)
class Incoming:
    """One stream that a peer opened."""

    reader: RequestReader
    writer: asyncio.StreamWriter
    peer_id: str = ""  # until p2pd has named it
    protocol: str = ""
    since: float = 0.0  # of the loop's clock


Streams = dict["asyncio.Task[Any]", Incoming]
"""By the task that serves it, the oldest first."""


def unnamed(streams: Streams) -> int:
    """How many streams have no place yet."""
    return sum(not stream.peer_id for stream in streams.values())


def has_place(streams: Streams, peer_id: str, protocol: str, now: float, known: Callable[[str], bool]) -> bool:
    """Whether a new stream of this peer may be served; ends another's if need be."""
    named = [(task, s) for task, s in streams.items() if s.peer_id and s.protocol == protocol]
    if sum(stream.peer_id == peer_id for _, stream in named) >= MAX_STREAMS_PER_PEER:
        return False
    if len(named) < MAX_STREAMS:
        return True
    patience = 0.0 if known(peer_id) else FAIR_SECONDS
    idle = [one for one in named if not one[1].reader.asked]
    idle.sort(key=lambda one: known(one[1].peer_id))  # a request may be under way; of equals the oldest stays first
    slow = [one for one in named if now - one[1].since >= patience and not known(one[1].peer_id)]
    if not (ending := [*idle, *slow]):
        return False
    task, stream = ending[0]
    del streams[task]
    stream.writer.transport.abort()  # its handler meets the end of the stream
    return True
