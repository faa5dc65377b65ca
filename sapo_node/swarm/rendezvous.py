"""Meeting without any address: through the public DHT of libp2p, as IPFS runs it.

The swarm's name gives a content id. A node says in that DHT that it has this content (*provides* it) and asks who else
does; whoever it finds is dialled like any other candidate. The DHT stores who said so, with the address: whoever knows
or guesses the name can read which machines are in the swarm. So it is off unless the owner asks for it.

The node is a guest there: it asks (dht client) and serves nobody, provides rarely, and p2pd closes connections to that
network first when there are too many. What is found was written by strangers: bounded here, and only dialled.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Final

from sapo_node.swarm import dnsaddr
from sapo_node.swarm.addresses import in_turn, peer_id_of, reach
from sapo_node.swarm.bootstrap import Attempts, Result
from sapo_node.swarm.dnsaddr import Lookup, LookupFailed
from sapo_node.swarm.p2p import Network
from sapo_node.swarm.p2pd import NetworkError
from sapo_node.swarm.protocol import content_cid, rendezvous_name

log = logging.getLogger(__name__)

CHECK_SECONDS: Final = 2.0
ENTRANCES: Final = 2
"""Entrances to hold: each one leads everywhere."""

PROVIDE_SECONDS: Final = 3600.0
"""Between two announcements. The DHT forgets them after a day or two, and where a provider is reachable sooner."""

FIND_SECONDS: Final = 600.0
LONELY_FIND_SECONDS: Final = 20.0
"""Between two searches by a node that knows others, and at first by one that does not; doubled up to the other."""

RETRY_SECONDS: Final = 15.0
"""After a failed announcement; doubled up to PROVIDE_SECONDS."""

CALL_SECONDS: Final = 60.0
"""An announcement in the public network takes half a minute at times."""

MAX_FOUND: Final = 20
MAX_ADDRESSES_EACH: Final = 4
"""Of a peer found: its outside address, a second one by IPv6, and two in a network that both may be in."""

MAX_ENTRANCES: Final = 32


class Schedule:
    """When to announce and when to search; times come from one monotonic clock."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._provide_at = self._find_at = 0.0
        self._provide_pause, self._find_pause = RETRY_SECONDS, LONELY_FIND_SECONDS

    def provide_due(self, now: float) -> bool:
        """Whether to announce now."""
        return now >= self._provide_at

    def find_due(self, now: float) -> bool:
        """Whether to search now."""
        return now >= self._find_at

    def provided(self, now: float, well: bool) -> None:
        """An announcement ended."""
        pause = PROVIDE_SECONDS if well else self._provide_pause
        self._provide_pause = RETRY_SECONDS if well else min(PROVIDE_SECONDS, 2 * self._provide_pause)
        self._provide_at = now + pause * self._rng.uniform(0.8, 1.2)

    def searched(self, now: float, lonely: bool) -> None:
        """A search ended."""
        pause = self._find_pause if lonely else FIND_SECONDS
        self._find_pause = min(FIND_SECONDS, 2 * self._find_pause) if lonely else LONELY_FIND_SECONDS
        self._find_at = now + pause * self._rng.uniform(0.8, 1.2)

    def lost_everyone(self) -> None:
        """Search at once."""
        self._find_at, self._find_pause = 0.0, LONELY_FIND_SECONDS


class Rendezvous:
    """Announces this node at the rendezvous of its swarm and looks who else is there. `run()` until cancelled."""

    def __init__(
        self,
        network: Network,
        swarm: str,
        entrances: Sequence[str],
        met: Callable[[list[str]], None],
        lonely: Callable[[], bool],
        lookup: Lookup = dnsaddr.lookup,
        rng: random.Random | None = None,
    ) -> None:
        """`entrances` are multiaddrs of peers in the public DHT; `met` gets the addresses found, each ending with
        /p2p/<peer id>; `lonely` tells whether the node knows nobody of its swarm."""
        self.provided = 0
        self._network = network
        self._cids = [content_cid(name) for name in network.names(rendezvous_name(swarm))]
        self._entrances = list(entrances)
        self._met = met
        self._lonely = lonely
        self._lookup = lookup
        rng = rng if rng is not None else random.Random()
        self._rng = rng
        self._attempts = Attempts(network.peer_id, rng)
        self._failed: dict[str, str] = {}  # entrances, and why the newest attempt at each led nowhere
        self._told = False
        self._schedule = Schedule(rng)
        self._held: set[str] = {peer_id_of(address) for address in entrances} - {""}  # peer ids of entrances

    async def run(self) -> None:
        """Hold entrances, announce, search. What fails is tried again."""
        was_lonely = True
        while True:
            lonely = self._lonely()
            if lonely and not was_lonely:
                self._schedule.lost_everyone()
            was_lonely = lonely
            if await self._enter():
                await self._provide()
                await self._find(lonely)
            await asyncio.sleep(CHECK_SECONDS)

    async def _enter(self) -> bool:
        """Whether the node is connected to the public DHT; dials entrances if need be."""
        try:
            connected = set(await self._network.peers())
        except NetworkError as error:
            log.debug("cannot list peers: %s", error)
            return False
        missing = ENTRANCES - len(self._held & connected)
        addresses = self._rng.sample(self._entrances, len(self._entrances)) if missing > 0 else []
        due = self._attempts.due(time.monotonic(), connected, dict.fromkeys(addresses, ""))[: max(0, missing)]
        reached = await asyncio.gather(*map(self._dial, due))
        inside = any(reached) or bool(self._held & connected)
        shut = not inside and len(self._failed) == len(set(self._entrances))
        if shut and not self._told:
            reason = next(iter(self._failed.values()))
            log.warning("swarm.rendezvous: no entrance answers (%s); all are tried again in a while.", reason)
        self._told = shut
        return inside

    async def _dial(self, address: str) -> bool:
        """Dial one entrance, by any of the addresses that its name stands for."""
        named = address.startswith("/dnsaddr/")
        try:
            given = await dnsaddr.resolve(address, self._lookup) if named else [address]
        except LookupFailed as failure:
            self._failed[address] = f"{address} cannot be resolved: {failure}"
            given = []
        for one in given[:MAX_ENTRANCES]:
            try:
                self._held.add(await self._network.connect(one, strange=named))
            except NetworkError as error:
                self._failed[address] = str(error)
                continue
            self._failed.pop(address, None)
            self._attempts.report(address, Result.CONNECTED, time.monotonic(), lonely=True)
            return True
        self._attempts.report(address, Result.UNREACHABLE, time.monotonic(), lonely=True)
        return False

    async def _provide(self) -> None:
        if not self._schedule.provide_due(time.monotonic()):
            return
        try:
            await self._network.provide(self._cids[0], CALL_SECONDS)
            self.provided += 1
            well = True
        except NetworkError as error:
            log.debug("announcing at the rendezvous failed: %s", error)
            well = False
        self._schedule.provided(time.monotonic(), well)

    async def _find(self, lonely: bool) -> None:
        if not self._schedule.find_due(time.monotonic()):
            return
        found: list[tuple[str, list[str]]] = []
        for cid in self._cids:
            try:
                found += await self._network.find_providers(cid, MAX_FOUND, CALL_SECONDS)
            except NetworkError as error:
                log.debug("searching at the rendezvous failed: %s", error)
        self._schedule.searched(time.monotonic(), lonely)
        if found:
            nearest_last = ((peer, sorted(given, key=reach)[:MAX_ADDRESSES_EACH]) for peer, given in found)
            self._met(in_turn([f"{address}/p2p/{peer}" for address in given] for peer, given in nearest_last))
