"""The greeting: are two nodes of one swarm, and do they understand each other?

A stream of HELLO_PROTOCOL carries 38 bytes each way (`protocol.greeting`): the wire versions that a node reads and a
digest of its swarm's name. Whoever joins by an address greets first and enters the DHT only with a node of its own
swarm and version. So a wrong address is told by name, instead of a swarm in which nothing is ever heard; and nodes of
two swarms do not mix their DHTs. In a private swarm the network derives the protocol's name and seals the greetings, so
only members have anything to compare.
"""

import asyncio
from collections import OrderedDict
from enum import StrEnum
from typing import Final

from sapo_node.swarm import protocol
from sapo_node.swarm.p2p import Network
from sapo_node.swarm.p2pd import NetworkError
from sapo_node.swarm.sealed import PrivateNetwork

HELLO_SECONDS: Final = 5.0
"""For 38 bytes each way: a round trip with much to spare."""

SIZE: Final = len(protocol.greeting(""))

MAX_REMEMBERED: Final = 1024
"""Greeted peers that are remembered; identities are free, so a stranger could fill the memory."""


class Verdict(StrEnum):
    """What a greeting showed."""

    MEMBER = "member"
    OTHER_SWARM = "other swarm"
    OTHER_VERSION = "other wire version"
    STRANGER = "no node"
    KEYLESS = "no member"
    PUBLIC_SWARM = "public swarm"
    SILENT = "silent"


def judge(own: bytes, theirs: bytes) -> Verdict:
    """Compare two greetings of SIZE bytes. The versions come first: those of another may name swarms otherwise."""
    if len(theirs) != SIZE or theirs[:4] != protocol.MAGIC:
        return Verdict.STRANGER
    if theirs[4] > own[5] or theirs[5] < own[4]:
        return Verdict.OTHER_VERSION
    return Verdict.MEMBER if theirs[6:] == own[6:] else Verdict.OTHER_SWARM


class Greeter:
    """Greets and answers greetings over one network; remembers who belongs to the swarm.

    `members` are the peers that greeted as such, `callers` those that greeted first: they joined by this node. Peers of
    another swarm or version are in the network's `foreign`, until they greet again as members.
    """

    def __init__(self, network: Network, swarm: str, own: bytes | None = None) -> None:
        """`own` replaces this node's greeting."""
        self._network = network
        self._own = own if own is not None else protocol.greeting(swarm)
        self._seen: OrderedDict[str, Verdict] = OrderedDict()
        self._versions: dict[str, int] = {}
        self.callers: set[str] = set()

    @property
    def members(self) -> set[str]:
        """Peer ids of the members that were greeted."""
        return {peer_id for peer_id, verdict in self._seen.items() if verdict is Verdict.MEMBER}

    def version_of(self, peer_id: str) -> int:
        """The newest wire version that a peer reads, 0 if it never said."""
        return self._versions.get(peer_id, 0)

    async def start(self) -> None:
        """Answer greetings from now on."""
        await self._network.serve_stream(protocol.HELLO_PROTOCOL, self.serve)

    async def serve(self, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one greeting. Raises TimeoutError, EOFError or OSError when the peer is slow or breaks off."""
        async with asyncio.timeout(HELLO_SECONDS):
            theirs = await reader.readexactly(SIZE)
            writer.write(self._own)
            await writer.drain()
        self.callers.add(peer_id)
        self._note(peer_id, theirs)

    async def greet(self, peer_id: str) -> Verdict:
        """Greet a connected peer. Raises NetworkError if p2pd does not work."""
        try:
            reader, writer = await self._network.open_stream(peer_id, protocol.HELLO_PROTOCOL)
        except NetworkError as error:
            if "protocols not supported" in str(error):  # p2pd's words when the peer does not know this one
                return await self._judge_stranger(peer_id)
            raise
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                writer.write(self._own)
                await writer.drain()
                theirs = await reader.readexactly(SIZE)
        except (OSError, EOFError, TimeoutError):
            return Verdict.SILENT
        finally:
            writer.close()
        return self._note(peer_id, theirs)

    async def _judge_stranger(self, peer_id: str) -> Verdict:
        """What a peer is that does not know this swarm's greeting."""
        if not isinstance(self._network, PrivateNetwork):
            return Verdict.STRANGER
        public = await self._network.has_openly(peer_id, protocol.HELLO_PROTOCOL)
        return Verdict.PUBLIC_SWARM if public else Verdict.KEYLESS

    def _note(self, peer_id: str, theirs: bytes) -> Verdict:
        verdict = judge(self._own, theirs)
        self._seen[peer_id] = verdict
        self._seen.move_to_end(peer_id)
        self._versions[peer_id] = theirs[5]
        self._network.foreign.discard(peer_id)
        if verdict in (Verdict.OTHER_SWARM, Verdict.OTHER_VERSION):
            self._network.foreign.add(peer_id)
        if len(self._seen) > MAX_REMEMBERED:
            oldest, _ = self._seen.popitem(last=False)
            self._network.foreign.discard(oldest)
            self.callers.discard(oldest)
            del self._versions[oldest]
        return verdict
