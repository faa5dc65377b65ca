"""How a node finds its first neighbours, and finds them again: never a reason to stop.

Policy. All addresses of `candidates.py` are dialled side by side, a few at a time in their order; one that answers is
enough, and none holds up the others: of those that wait, the next is one of the source with the fewest dials in flight,
and there the longest due. A peer that answers is greeted (`hello.py`); the DHT is entered only by one of the
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
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from sapo_node.swarm import protocol
from sapo_node.swarm.addresses import peer_id_of
from sapo_node.swarm.candidates import Candidate, Candidates
from sapo_node.swarm.dht import SwarmDHT
from sapo_node.swarm.hello import Greeter, Verdict
from sapo_node.swarm.p2p import LeadsInside, Network
from sapo_node.swarm.p2pd import NetworkError
from sapo_node.swarm.peers import Found, PeerBook
from sapo_node.swarm.secret import FRESH_SECONDS

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

MAX_UNREACHED: Final = 8
"""Addresses that could not be joined by, listed for people."""

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
    NO_MEMBER = "not a member"
    ITSELF = "this node itself"
    LEADS_INSIDE = "leads inside"
    NOT_TRIED = "not tried"  # p2pd itself pauses after failures, up to five minutes


WRONG_PLACE: Final = (
    Result.OTHER_SWARM,
    Result.OTHER_VERSION,
    Result.NOT_A_NODE,
    Result.NO_MEMBER,
    Result.LEADS_INSIDE,
)
"""Nobody of use is there: asking again soon would change nothing."""

STRANGE: Final = (Found.DNS, Found.RENDEZVOUS, Found.CACHED)
"""Ways by which the address of a peer is chosen by strangers, not by the owner."""


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
        self, now: float, connected: Collection[str], addresses: Mapping[str, str], in_flight: Collection[str] = ()
    ) -> list[str]:
        """Which of `addresses` (each with its source) to dial: not those of `connected` peers, and no more than
        MAX_AT_ONCE together with those `in_flight`. The source with the fewest dials comes first, and there the address
        that is due for the longest time, those never tried before all others: what hangs keeps nobody waiting for ever.
        """
        since = {address: self._attempts.get(address, _Attempt()).due for address in addresses}
        ready = [
            address
            for address in sorted(addresses, key=since.__getitem__)
            if since[address] <= now
            and address not in in_flight
            and peer_id_of(address) != self._own
            and peer_id_of(address) not in connected
        ]
        dials = Counter(addresses.get(address) for address in in_flight)
        chosen: list[str] = []
        while ready and len(in_flight) + len(chosen) < MAX_AT_ONCE:
            address = min(ready, key=lambda one: dials[addresses[one]])
            ready.remove(address)
            chosen.append(address)
            dials[addresses[address]] += 1
        return chosen

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
        self._unreached: dict[str, str] = {}  # by address, why
        self._kept: set[str] = set()
        self._dials: dict[str, asyncio.Task[None]] = {}
        self._entering = asyncio.Lock()
        self._enter_again_at = 0.0
        self._attempts = Attempts(network.peer_id, rng if rng is not None else random.Random())

    @property
    def unreached(self) -> list[str]:
        """Sentences on the owner's addresses that this node could not join by, at most MAX_UNREACHED."""
        return list(self._unreached.values())

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
        self._tell_of_itself(candidates.values())
        sources = {address: candidate.found for address, candidate in candidates.items()}
        for address in self._attempts.due(time.monotonic(), members, sources, self._dials):
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
        addresses = {candidate.address for candidate in candidates}
        for address in [a for a in self._unreached if a not in addresses or peer_id_of(a) in members]:
            del self._unreached[address]

    def _tell_of_itself(self, candidates: Collection[Candidate]) -> None:
        """An address with this node's peer id is fine in a list for all nodes, unless it leads to another node."""
        for candidate in candidates:
            address = candidate.address
            if peer_id_of(address) == self._network.peer_id and not self._network.is_own(address):
                message = (
                    f"{address} ends with this node's own peer id and is not dialled. If another node is meant, ask "
                    "its owner for its address."
                )
                self._report(candidate, Outcome(address, Result.ITSELF, message), lonely=True)

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
            self._report(candidate, outcome, lonely=not in_company)
            if outcome.result is Result.CONNECTED:
                await self._enter_dht([peer_id_of(candidate.address)])
        finally:
            del self._dials[candidate.address]

    def _report(self, candidate: Candidate, outcome: Outcome, lonely: bool) -> None:
        """Note how an attempt ended, and tell the owner what is news to him and he could act on: not that a peer of an
        earlier run, or one that anybody may name, is gone."""
        news = self._attempts.report(candidate.address, outcome.result, time.monotonic(), lonely)
        reached, owned = outcome.result is Result.CONNECTED, candidate.found not in (Found.CACHED, Found.RENDEZVOUS)
        if owned and not reached and outcome.result is not Result.NOT_TRIED:
            self._unreached[candidate.address] = outcome.message
            if len(self._unreached) > MAX_UNREACHED:
                del self._unreached[next(iter(self._unreached))]
        if news and (owned or reached):
            self._tell(outcome)

    async def _dial(self, candidate: Candidate) -> Outcome:
        address = candidate.address
        try:
            peer_id = await self._network.connect(address, strange=candidate.found in STRANGE)
            verdict = await self._greeter.greet(peer_id)
            if verdict is not Verdict.MEMBER:
                await self._network.disconnect(peer_id)
        except LeadsInside:
            message = (
                f"{address} leads into this machine or its network, and the owner did not give it: it is not dialled. "
                "If it is right, add it to swarm.initial_peers."
            )
            return Outcome(address, Result.LEADS_INSIDE, message)
        except NetworkError as error:
            return explain_failure(address, str(error))
        if verdict is Verdict.MEMBER:
            self._book.reached(peer_id, address.rpartition("/p2p/")[0], time.time(), candidate.found)
        return explain_greeting(address, verdict, self._greeter.version_of(peer_id), self._network.private)

    async def _enter_dht(self, peer_ids: list[str]) -> None:
        async with self._entering:  # one newcomer's walk through the shards at a time
            try:
                await self._dht.join(peer_ids)
            except NetworkError as error:  # tried again at the next step: there are no neighbours yet
                log.debug("joining the DHT failed: %s", error)


def explain_greeting(address: str, verdict: Verdict, version: int, private: bool) -> Outcome:
    """What a greeting means for the owner of the node; `version` is the wire version that the other speaks, `private`
    whether this node's swarm has a key."""
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
        message = (
            f"{address} answers, but is no sapo-node, or one of a private swarm (then this node needs its "
            "swarm.secret_file). Ask its owner for the address of a node of this swarm."
        )
        return Outcome(address, Result.NOT_A_NODE, message)
    if verdict is Verdict.KEYLESS:
        message = (
            f"{address} answers, but not as a member of this private swarm: its key (swarm.secret_file) or swarm.name "
            "differs, or it is no sapo-node. Compare both with its owner's."
        )
        return Outcome(address, Result.NO_MEMBER, message)
    if verdict is Verdict.PUBLIC_SWARM:
        message = (
            f"{address} is a node of a swarm without a key, and this node's is private. Give it this swarm's "
            "swarm.secret_file, or take the address of a node that has it."
        )
        return Outcome(address, Result.OTHER_SWARM, message)
    if private:
        message = (
            f"{address} has this swarm's key but does not take this node's proof: their clocks differ by more than "
            f"{FRESH_SECONDS:g} s (compare `date -u` on both machines), or it hangs. It is tried again in a while."
        )
        return Outcome(address, Result.UNREACHABLE, message)
    message = f"{address} takes connections but says nothing (no greeting): it hangs. It is tried again in a while."
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
    what = f"does not answer ({why})"
    if "failed to negotiate security protocol" in why:  # after a connection that was taken
        what = (
            "takes connections but says nothing: it hangs, or another program listens there"
            if "deadline exceeded" in why
            else f"takes connections but does not speak libp2p ({why.rpartition(': ')[2]}): another program listens "
            "there, or a proxy whose node is down"
        )
    elif address.startswith("/dns") and "no good addresses" in why:
        what = "does not answer (its name has no DNS entry, or no name server answers)"
    return Outcome(address, Result.UNREACHABLE, f"{address} {what}. It is tried again in a while.")
