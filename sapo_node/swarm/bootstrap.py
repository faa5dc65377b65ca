"""How a node finds its first neighbours, and finds them again: never a reason to stop.

Policy. All addresses of `candidates.py` are dialled side by side, a few at a time in their order; one that answers is
enough, and none holds up the others. A peer that answers is greeted (`hello.py`); the DHT is entered only by one of the
own swarm, and others are let go. While the node knows nobody, every address is tried again after a pause that doubles
up to a bound; half to one and a half times, so that a swarm whose first node restarts does not dial it at one instant.
Once the node knows someone, addresses whose peer is not connected are dialled rarely: two halves of a swarm that lost
each other find together again. A node without any address waits to be found.

Who is to be dialled when is decided by `Attempts`, without I/O.
"""

import asyncio
import logging
import random
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from sapo_node.swarm import protocol
from sapo_node.swarm.candidates import Candidate, Candidates
from sapo_node.swarm.dht import SwarmDHT
from sapo_node.swarm.hello import Greeter, Verdict
from sapo_node.swarm.p2p import Network
from sapo_node.swarm.p2pd import NetworkError
from sapo_node.swarm.peers import Found, PeerBook

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS: Final = 1.0
LONELY_PAUSE_SECONDS: Final = 15.0
"""Longest pause while the node knows nobody: how late it may notice that its first peer is back."""

JOINED_PAUSE_SECONDS: Final = 300.0
"""Pause between attempts at a lost peer by a node that has other neighbours, and at one that is none of its swarm."""

CHECK_SECONDS: Final = 1.0
"""Pause between two looks at who is connected: a call to our own p2pd, no traffic."""

ENTER_SECONDS: Final = 3.0
"""Pause between two attempts to enter the DHT through peers that are connected but did not answer there."""

MAX_AT_ONCE: Final = 8
"""Dials in flight. An address that swallows them costs one place for ten seconds."""

MAX_REMEMBERED: Final = 512
"""Addresses whose attempts are remembered; of an older one the next attempt is the first again."""


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
    OTHER_SWARM = "other swarm"
    OTHER_VERSION = "other wire version"
    NOT_A_NODE = "not a node"
    NOT_TRIED = "not tried"  # p2pd itself pauses after failures, up to five minutes


WRONG_PLACE: Final = (Result.OTHER_SWARM, Result.OTHER_VERSION, Result.NOT_A_NODE)
"""Somebody answers who is of no use: asking again soon would change nothing."""


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

    def __init__(self, own_peer_id: str, rng: random.Random) -> None:
        self._own = own_peer_id
        self._rng = rng
        self._attempts: OrderedDict[str, _Attempt] = OrderedDict()

    def due(
        self, now: float, connected: Collection[str], addresses: Sequence[str], in_flight: Collection[str] = ()
    ) -> list[str]:
        """Which of `addresses` to dial, in their order: not those of `connected` peers, and no more than MAX_AT_ONCE
        together with those `in_flight`."""
        chosen = []
        for address in dict.fromkeys(addresses):
            peer_id = peer_id_of(address)
            attempt = self._attempts.get(address, _Attempt())
            if peer_id != self._own and peer_id not in connected and address not in in_flight and attempt.due <= now:
                chosen.append(address)
        return chosen[: max(0, MAX_AT_ONCE - len(in_flight))]

    def report(self, address: str, result: Result, now: float, lonely: bool) -> bool:
        """Note how an attempt ended; True if that is news about this address."""
        attempt = self._attempts.setdefault(address, _Attempt())
        self._attempts.move_to_end(address)
        news = result is not Result.NOT_TRIED and result is not attempt.last
        if news:
            attempt.last = result
        if result is Result.CONNECTED:
            attempt.failures, pause = 0, FIRST_PAUSE_SECONDS
        else:
            pause = min(LONELY_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(attempt.failures, 10))
            attempt.failures += 1
        if not lonely or result in WRONG_PLACE:
            pause = JOINED_PAUSE_SECONDS
        attempt.due = now + pause * self._rng.uniform(0.5, 1.5)
        if len(self._attempts) > MAX_REMEMBERED:
            self._attempts.popitem(last=False)
        return news

    def lost_everyone(self) -> None:
        """The last neighbour is gone: forget the long pauses of a node that had company."""
        for attempt in self._attempts.values():
            attempt.due, attempt.failures = 0.0, 0


class Bootstrap:
    """Keeps a node in its swarm. `run()` until cancelled; `state` at any time."""

    def __init__(
        self,
        network: Network,
        dht: SwarmDHT,
        greeter: Greeter,
        candidates: Candidates,
        book: PeerBook,
        tell: Callable[[Outcome], None],
        rng: random.Random | None = None,
    ) -> None:
        """`tell` is called once for each outcome that is news: an address that was reached, or no longer can be."""
        self.state = JoinState.JOINING
        self._network = network
        self._dht = dht
        self._greeter = greeter
        self._candidates = candidates
        self._book = book
        self._tell = tell
        self._kept: set[str] = set()
        self._dials: dict[str, asyncio.Task[None]] = {}
        self._entering = asyncio.Lock()
        self._enter_again_at = 0.0
        self._attempts = Attempts(network.peer_id, rng if rng is not None else random.Random())

    async def run(self) -> None:
        """Join, notice when everyone is gone, and join again. Raises only what is not the network's fault."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._step(tasks)
                await asyncio.sleep(CHECK_SECONDS)

    async def _step(self, tasks: asyncio.TaskGroup) -> None:
        connected = await self._connected()
        members = connected & (self._greeter.members | self._dht.members())
        if not members and self.state is JoinState.JOINED:
            self._attempts.lost_everyone()
            self.state = JoinState.JOINING
        candidates = {c.address: c for c in self._candidates.current(lonely=not members)}
        self._note(members, candidates.values())
        for address in self._attempts.due(time.monotonic(), members, list(candidates), self._dials):
            self._dials[address] = tasks.create_task(self._try(candidates[address], bool(members)), name="dial")
        if members and not self._dht.neighbours() and time.monotonic() >= self._enter_again_at:
            self._enter_again_at = time.monotonic() + ENTER_SECONDS
            await self._enter_dht(sorted(members))
        await self._keep(members)
        if members:
            self.state = JoinState.JOINED
        elif not self._dials:
            self.state = JoinState.ALONE

    def _note(self, members: Collection[str], candidates: Collection[Candidate]) -> None:
        """Tell the book who is connected. A peer that dialled us first may still be one that we look for."""
        now = time.time()
        for candidate in candidates:
            if (peer_id := peer_id_of(candidate.address)) in members:
                self._book.saw(peer_id, (), now, candidate.found)
        self._book.set_connected(members, self._greeter.callers, now)

    async def _connected(self) -> set[str]:
        try:
            return set(await self._network.peers())
        except NetworkError as error:
            log.debug("cannot list peers: %s", error)
            return set()

    async def _keep(self, members: Collection[str]) -> None:
        """Have p2pd keep the connections to members before others."""
        self._kept &= set(members)
        try:
            for peer_id in [m for m in members if m not in self._kept]:
                await self._network.keep(peer_id)
                self._kept.add(peer_id)
        except NetworkError as error:
            log.debug("cannot tell p2pd whom to keep: %s", error)

    async def _try(self, candidate: Candidate, in_company: bool) -> None:
        try:
            outcome = await self._dial(candidate)
            news = self._attempts.report(candidate.address, outcome.result, time.monotonic(), lonely=not in_company)
            # That a peer of an earlier run, or one that anybody may name, is gone is nothing an owner could act on.
            owned = candidate.found not in (Found.CACHED, Found.RENDEZVOUS)
            if news and (owned or outcome.result is Result.CONNECTED):
                self._tell(outcome)
            if outcome.result is Result.CONNECTED:
                await self._enter_dht([peer_id_of(candidate.address)])
        finally:
            del self._dials[candidate.address]

    async def _dial(self, candidate: Candidate) -> Outcome:
        address = candidate.address
        try:
            peer_id = await self._network.connect(address)
            verdict = await self._greeter.greet(peer_id)
            if verdict is not Verdict.MEMBER:
                await self._network.disconnect(peer_id)
        except NetworkError as error:
            return explain_failure(address, str(error))
        if verdict is Verdict.MEMBER:
            self._book.reached(peer_id, address.rpartition("/p2p/")[0], time.time(), candidate.found)
        return explain_greeting(address, verdict, self._greeter.version_of(peer_id))

    async def _enter_dht(self, peer_ids: list[str]) -> None:
        async with self._entering:  # one newcomer's walk through the shards at a time
            try:
                await self._dht.join(peer_ids)
            except NetworkError as error:  # tried again at the next step: there are no neighbours yet
                log.debug("joining the DHT failed: %s", error)


def peer_id_of(address: str) -> str:
    """The peer id at the end of a multiaddr; empty if it has none."""
    return address.rpartition("/p2p/")[2] if "/p2p/" in address else ""


def explain_greeting(address: str, verdict: Verdict, version: int) -> Outcome:
    """What a greeting means for the owner of the node; `version` is the wire version that the other speaks."""
    if verdict is Verdict.MEMBER:
        return Outcome(address, Result.CONNECTED, f"connected to {address}")
    if verdict is Verdict.OTHER_SWARM:
        message = (
            f"{address} belongs to another swarm. Compare swarm.name with its owner's, or take the address of a node "
            "of this swarm."
        )
        return Outcome(address, Result.OTHER_SWARM, message)
    if verdict is Verdict.OTHER_VERSION:
        older = "this node" if version > protocol.PROTO else "that node"
        message = (
            f"{address} speaks wire version {version}, and this node {protocol.PROTO}: they do not understand each "
            f"other. Update {older}."
        )
        return Outcome(address, Result.OTHER_VERSION, message)
    if verdict is Verdict.STRANGER:
        message = f"{address} answers, but is no sapo-node. Ask its owner for the address of a node of this swarm."
        return Outcome(address, Result.NOT_A_NODE, message)
    message = f"{address} takes connections but says nothing (no greeting); it is tried again in a while."
    return Outcome(address, Result.UNREACHABLE, message)


def explain_failure(address: str, reason: str) -> Outcome:
    """What a failed dial means for the owner of the node; `reason` is p2pd's wording, which names every address it
    knows of that peer."""
    ours = re.search(rf"\[{re.escape(address.rpartition('/p2p/')[0])}\] (.*?)(?: \* |$)", reason)
    why = ours[1] if ours else reason.rpartition(": ")[2]
    if "peer id mismatch" in why:
        other = re.search(r"remote key matches (\w+)", why)
        message = (
            f"{address} answers, but with another key than the peer id at its end"
            f"{f' (its own is {other[1]})' if other else ''}: it was set up anew, or another node took its place. Ask "
            "its owner for the present address."
        )
        return Outcome(address, Result.WRONG_PEER_ID, message)
    if "dial backoff" in why:
        return Outcome(address, Result.NOT_TRIED, f"{address} failed a moment ago and is tried again in a while.")
    return Outcome(address, Result.UNREACHABLE, f"{address} does not answer ({why}); it is tried again in a while.")
