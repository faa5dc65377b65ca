"""A member of the swarm that an attacker is: its own p2pd, a place in the DHT, batches on a shelf, announcements."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

from sapo_node.identity import Identity
from sapo_node.rollouts import codec
from sapo_node.rollouts.schema import Announcement, Listing
from sapo_node.swarm import protocol
from sapo_node.swarm.dht import SwarmDHT
from sapo_node.swarm.fetch import Status
from sapo_node.swarm.hello import Greeter
from sapo_node.swarm.p2p import Network
from sapo_node.swarm.p2pd import NetworkError
from sapo_node.swarm.records import latest_expiry, shard_prefix

JOIN_SECONDS: Final = 60.0
MAX_SHELF: Final = 64
STORE_SECONDS: Final = 3.0  # between two announcements in the DHT; hints go out with each

Answer = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


class Member:
    """`await Member.start(...)`; `answer` is what serves a fetch, by default the shelf."""

    def __init__(self, network: Network, dht: SwarmDHT, identity: Identity, swarm: str, nodes: Sequence[str]) -> None:
        self.network, self.dht, self.identity, self.swarm = network, dht, identity, swarm
        self.nodes = list(nodes)
        self.victims = [address.rpartition("/p2p/")[2] for address in nodes]
        self.answer: Answer = self._from_shelf
        self.addresses: list[str] = []
        self.fetched = 0
        self._shelf: OrderedDict[bytes, tuple[bytes, Listing]] = OrderedDict()
        self._seq = 0
        self._stored_at = 0.0

    @classmethod
    async def start(cls, folder: Path, swarm: str, nodes: Sequence[str], listen: Sequence[str]) -> "Member":
        """Join the swarm by the first node, as a node does. Raises NetworkError when that does not work in time."""
        identity = Identity.load_or_create(folder / "identity.key")
        network = await Network.start(identity, work_dir=folder / "run", listen=listen)
        dht = await SwarmDHT.start(network, swarm)
        self = cls(network, dht, identity, swarm, nodes)
        greeter = Greeter(network, swarm)
        await greeter.start()
        await network.serve_stream(protocol.FETCH_PROTOCOL, self._serve)
        deadline = time.monotonic() + JOIN_SECONDS
        while not await dht.join(nodes[:1]):
            if time.monotonic() > deadline:
                raise NetworkError(f"no way in by {nodes[0]}")
            await asyncio.sleep(0.5)
        for address in nodes:
            await greeter.greet(await network.connect(address))
        self.addresses = [one for one in await network.addresses() if one.startswith("/ip4/127.0.0.1/")]
        return self

    async def close(self) -> None:
        """Leave."""
        await self.dht.close()
        await self.network.close()

    def shelve(self, envelope: bytes, groups: int) -> Listing:
        """Offer the bytes of a batch, whatever they are."""
        content_id = codec.content_id_of(envelope)
        listing = Listing(content_id, len(envelope), groups, time.time())
        self._shelf[content_id] = envelope, listing
        while len(self._shelf) > MAX_SHELF:
            self._shelf.popitem(last=False)
        return listing

    def newest(self) -> list[Listing]:
        """What an honest node would announce of the shelf."""
        return [listing for _, listing in list(self._shelf.values())[-protocol.MAX_LISTINGS :]]

    def announcement(self, batches: Sequence[Listing], addresses: Sequence[str] | None = None) -> Announcement:
        """A new announcement of this epoch, unsigned."""
        now = time.time()
        epoch, k = protocol.epoch_of(now), self.dht.schedule.k
        self._seq = max(self._seq + 1, int(now * 1000))
        return Announcement(
            proto=protocol.PROTO,
            swarm=self.swarm,
            epoch=epoch,
            k=k,
            prefix=shard_prefix(self.identity.public_key, epoch, k),
            seq=self._seq,
            created_at=now,
            version="",
            roles=["trainer"],
            addresses=list(self.addresses if addresses is None else addresses),
            batches=list(batches),
        )

    async def announce(self, batches: Sequence[Listing], addresses: Sequence[str] | None = None) -> None:
        """Push an announcement as a hint, and write it to the DHT now and then."""
        made = self.announcement(batches, addresses)
        data = codec.encode_announcement(made, self.identity)
        await self.network.publish(protocol.hint_topic(self.swarm), data)
        if time.monotonic() - self._stored_at > STORE_SECONDS:
            self._stored_at = time.monotonic()
            await self.dht.announce(data, made.epoch, made.k, made.prefix, latest_expiry(made.epoch) - 1.0)

    async def stub(self, peer_id: str) -> Any:
        """hivemind's handle for DHT calls to a peer, past all that our own client checks."""
        from sapo_node.swarm.hivemind_light import PeerID

        return self.dht._protocol.get_stub(PeerID.from_base58(peer_id))

    async def _serve(self, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        content_id = await reader.readexactly(32)
        self.fetched += 1
        await self.answer(content_id, writer)

    async def _from_shelf(self, content_id: bytes, writer: asyncio.StreamWriter) -> None:
        data = self._shelf.get(content_id, (b"",))[0]
        writer.write(bytes([Status.OK if data else Status.GONE]) + len(data).to_bytes(4, "big") + data)
        await writer.drain()
