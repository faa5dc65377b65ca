"""How a node finds its first neighbours, and finds them again: never a reason to stop.

Policy. The configured initial peers and the peers of earlier runs are dialled side by side; one that answers is
enough. While the node knows nobody, every address is tried again after a pause that doubles up to a bound; half to one
and a half times, so that a swarm whose first node restarts does not dial it at one instant. Once the node knows
someone, only initial peers that are not connected are dialled, rarely: two halves of a swarm that lost each other find
together again. A node without any address waits to be found.

Who is to be dialled when is decided by `Attempts`, without I/O.
"""

import asyncio
import logging
import random
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from sapo_node.swarm.dht import SwarmDHT
from sapo_node.swarm.p2p import Network
from sapo_node.swarm.p2pd import NetworkError
from sapo_node.swarm.peers import PeerBook

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS: Final = 1.0
LONELY_PAUSE_SECONDS: Final = 15.0
"""Longest pause while the node knows nobody: how late it may notice that its first peer is back."""

JOINED_PAUSE_SECONDS: Final = 300.0
"""Pause between attempts at a lost initial peer by a node that has other neighbours."""

CHECK_SECONDS: Final = 1.0
"""Pause between two looks at who is connected: a call to our own p2pd, no traffic."""

ENTER_SECONDS: Final = 3.0
"""Pause between two attempts to enter the DHT through peers that are connected but did not answer there."""

MAX_CACHED: Final = 16
"""Peers of earlier runs that are tried, the most recently seen first. More would be a burst of dials."""

MAX_AT_ONCE: Final = 8


class JoinState(StrEnum):
    """Where a node stands with its swarm."""

    JOINING = "joining"
    JOINED = "joined"
    ALONE = "alone"


class Result(StrEnum):
    """How an attempt at one address ended."""

    CONNECTED = "connected"
    UNREACHABLE = "unreachable"
    WRONG_PEER_ID = "wrong peer id"
    NOT_TRIED = "not tried"  # p2pd itself pauses after failures, up to five minutes


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an address, in words for people."""

    address: str
    result: Result
    message: str


@dataclass(slots=True)
class _Attempt:
    due: float = 0.0
    failures: int = 0
    last: Result | None = None


class Attempts:
    """Which addresses to dial now. Addresses end with /p2p/<peer id>; times come from one monotonic clock."""

    def __init__(self, own_peer_id: str, initial: Sequence[str], rng: random.Random) -> None:
        self._own = own_peer_id
        self._initial = list(dict.fromkeys(initial))
        self._rng = rng
        self._attempts: dict[str, _Attempt] = {}

    def due(self, now: float, connected: Iterable[str], cached: Iterable[str]) -> list[str]:
        """At most MAX_AT_ONCE addresses to dial side by side; `cached` only while nobody is connected."""
        known = {self._own, *connected}
        lonely = len(known) == 1
        candidates = [*self._initial, *(list(cached)[:MAX_CACHED] if lonely else [])]
        chosen = []
        for address in dict.fromkeys(candidates):
            attempt = self._attempts.get(address, _Attempt())
            if peer_id_of(address) not in known and attempt.due <= now:
                chosen.append(address)
        return chosen[:MAX_AT_ONCE]

    def report(self, address: str, result: Result, now: float, lonely: bool) -> bool:
        """Note how an attempt ended; True if that is news about this address."""
        attempt = self._attempts.setdefault(address, _Attempt())
        news = result is not Result.NOT_TRIED and result is not attempt.last
        if news:
            attempt.last = result
        if result is Result.CONNECTED:
            attempt.failures, pause = 0, FIRST_PAUSE_SECONDS
        else:
            pause = min(LONELY_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(attempt.failures, 10))
            attempt.failures += 1
        if not lonely:
            pause = JOINED_PAUSE_SECONDS
        attempt.due = now + pause * self._rng.uniform(0.5, 1.5)
        self._trim()
        return news

    def lost_everyone(self) -> None:
        """The last neighbour is gone: forget the long pauses of a node that had company."""
        for attempt in self._attempts.values():
            attempt.due, attempt.failures = 0.0, 0

    def _trim(self) -> None:
        # Cached addresses come and go over months; only the newest attempts matter.
        while len(self._attempts) > len(self._initial) + 4 * MAX_CACHED:
            del self._attempts[next(a for a in self._attempts if a not in self._initial)]


class Bootstrap:
    """Keeps a node in its swarm. `run()` until cancelled; `state` at any time."""

    def __init__(
        self,
        network: Network,
        dht: SwarmDHT,
        initial_peers: Sequence[str],
        book: PeerBook,
        tell: Callable[[Outcome], None],
        rng: random.Random | None = None,
    ) -> None:
        """`tell` is called once for each outcome that is news: an address that was reached, or no longer can be."""
        self.state = JoinState.JOINING
        self._network = network
        self._dht = dht
        self._book = book
        self._tell = tell
        self._initial_peers = frozenset(initial_peers)
        self._enter_again_at = 0.0
        self._attempts = Attempts(network.peer_id, initial_peers, rng if rng is not None else random.Random())

    async def run(self) -> None:
        """Join, notice when everyone is gone, and join again. Raises only what is not the network's fault."""
        while True:
            await self._step()
            await asyncio.sleep(CHECK_SECONDS)

    async def _step(self) -> None:
        connected = await self._connected()
        if not connected and self.state is JoinState.JOINED:
            self._attempts.lost_everyone()
            self.state = JoinState.JOINING
        due = self._attempts.due(time.monotonic(), connected, self._cached())
        outcomes = await asyncio.gather(*(self._dial(address) for address in due))
        for outcome in outcomes:
            news = self._attempts.report(outcome.address, outcome.result, time.monotonic(), lonely=not connected)
            # That a peer of an earlier run is gone is nothing an owner could act on.
            if news and (outcome.address in self._initial_peers or outcome.result is Result.CONNECTED):
                self._tell(outcome)
        reached = {peer_id_of(o.address) for o in outcomes if o.result is Result.CONNECTED}
        everyone = reached.union(connected)
        if reached or (everyone and not self._dht.neighbours() and time.monotonic() >= self._enter_again_at):
            self._enter_again_at = time.monotonic() + ENTER_SECONDS
            await self._enter_dht(sorted(everyone))
        self.state = JoinState.JOINED if everyone else JoinState.ALONE

    async def _connected(self) -> list[str]:
        try:
            return await self._network.peers()
        except NetworkError as error:
            log.debug("cannot list peers: %s", error)
            return []

    def _cached(self) -> list[str]:
        """One address a peer of those seen before."""
        return [f"{r.addresses[0]}/p2p/{r.peer_id}" for r in self._book.best(time.time(), MAX_CACHED)]

    async def _dial(self, address: str) -> Outcome:
        try:
            await self._network.connect(address)
        except NetworkError as error:
            return explain_failure(address, str(error))
        return Outcome(address, Result.CONNECTED, f"connected to {address}")

    async def _enter_dht(self, peer_ids: list[str]) -> None:
        try:
            await self._dht.join(peer_ids)
        except NetworkError as error:  # tried again at the next step: there are no neighbours yet
            log.debug("joining the DHT failed: %s", error)


def peer_id_of(address: str) -> str:
    """The peer id at the end of a multiaddr; empty if it has none."""
    return address.rpartition("/p2p/")[2] if "/p2p/" in address else ""


def explain_failure(address: str, reason: str) -> Outcome:
    """What a failed dial means for the owner of the node; `reason` is p2pd's wording, which names every address it
    knows of that peer."""
    ours = re.search(rf"\[{re.escape(address.rpartition('/p2p/')[0])}\] (.*?)(?: \* |$)", reason)
    why = ours[1] if ours else reason.rpartition(": ")[2]
    if "peer id mismatch" in why:
        message = (
            f"{address} answers, but with another key than the peer id at its end: it was set up anew, or another node "
            "took its place. Ask its owner for the present address."
        )
        return Outcome(address, Result.WRONG_PEER_ID, message)
    if "dial backoff" in why:
        return Outcome(address, Result.NOT_TRIED, f"{address} failed a moment ago and is tried again in a while.")
    return Outcome(address, Result.UNREACHABLE, f"{address} does not answer ({why}); it is tried again in a while.")
