"""The network of one node: a p2pd child (libp2p in Go) and the few things the node asks of it.

hivemind's `P2P` is attached to p2pd for the DHT's calls. Everything else (connecting, raw streams, gossip) is a short
exchange on p2pd's control socket and goes past hivemind, whose readers have no bounds and whose calls hang for ever
once p2pd is gone. Every call here has a deadline and ends at once when p2pd dies; both surface as `NetworkError` naming
the call.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import base58

from sapo_node.identity import Identity
from sapo_node.swarm import addresses as multiaddrs
from sapo_node.swarm import dnsaddr, places
from sapo_node.swarm.hivemind_light import P2P, Multiaddr, P2PDaemonError, P2PHandlerError, p2pd_pb2
from sapo_node.swarm.p2pd import (
    MAX_CONTROL_BYTES,
    Daemon,
    NetworkError,
    PortInUse,
    check_port_is_free,
    decode_multiaddr,
    encode_multiaddr,
    exchange,
    peer_bytes,
    read_message,
)
from sapo_node.swarm.places import Incoming, RequestReader

__all__ = ["LeadsInside", "Network", "NetworkError", "PortInUse", "StreamHandler"]

log = logging.getLogger(__name__)
T = TypeVar("T")
StreamHandler = Callable[[str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

CALL_SECONDS: Final = 5.0
"""Deadline of a call that p2pd answers by itself; it takes milliseconds."""
DIAL_SECONDS: Final = 10.0
"""Deadline of a call in which p2pd reaches another machine."""
STREAM_SECONDS: Final = 60.0
"""Longest life of an incoming stream: a peer that reads slowly must not hold a place for ever."""
MAX_DIALLED_ADDRESSES: Final = 8
"""Of the addresses a stranger announces, so many are tried."""
MAX_PROVIDER_ADDRESSES: Final = 32
"""Of a stranger's addresses in the public DHT, so many are looked at to find those."""
MAX_HINT_BYTES: Final = 16 * 1024
MAX_QUEUED_HINTS: Final = 256
"""Gossip is a hint that may be lost: larger messages are dropped, and a slow reader loses the oldest."""

KEEP_WEIGHT: Final = 1000
"""p2pd gives a peer of its own DHT's routing table 5 points; nodes of the swarm are worth more."""
MAX_PROVIDER_BYTES: Final = 64 * 1024
"""One provider with its addresses, which strangers wrote."""


class LeadsInside(NetworkError):
    """A stranger's address leads where this node follows no stranger."""


class Network:
    """One p2pd and this node's place in the network. `await Network.start(...)`, and `close()` in the end.

    `peer_id` and `public_key` are this node's; `p2p` is hivemind's handle for the DHT; peers that are `denied` get no
    answer on streams, gossip or DHT, peers in `foreign` (of another swarm) none in the DHT; those that are known
    (`known_as` names their networks) come before strangers where there is not enough for all. Of `private` swarms:
    `sealed.py`.
    """

    private = False

    def __init__(self, identity: Identity, daemon: Daemon) -> None:
        self.peer_id = identity.peer_id
        self.public_key = identity.public_key
        self.p2p: Any = None
        self.denied: Callable[[str], bool] = lambda peer_id: False
        self.known_as: Callable[[str], str] = lambda peer_id: ""
        self.foreign: set[str] = set()
        self.reached: Callable[[str, str], object] = lambda peer_id, far_end: None  # told of each stream opened
        self.daemon = daemon
        self._streams_path = daemon.folder / "streams.sock"
        self._handlers: dict[str, StreamHandler] = {}
        self._streams: places.Streams = {}
        self._server: asyncio.Server | None = None
        self._dead = asyncio.create_task(daemon.ended())
        self._closed = False
        self._own: list[str] = []  # by which this node is reached
        self._listens: list[str] = []

    @classmethod
    async def start(
        cls,
        identity: Identity,
        *,
        work_dir: Path,
        listen: Sequence[str] = ("/ip4/0.0.0.0/tcp/0",),
        announce: Sequence[str] = (),
        nat_port_map: bool = False,
        pubsub: bool = True,
        relay_service: bool = False,
        max_connections: int = 256,
        dht_client: bool = False,
        cores: int = 0,
    ) -> "Network":
        """Start p2pd. `listen` and `announce` are multiaddrs. Of more than `max_connections` p2pd closes, about once a
        minute, the least useful down to three quarters (see `keep`). `dht_client`: ask libp2p's own DHT, but do not
        serve it: for nodes that meet the public one. `cores`: p2pd runs on at most so many at a time (0: all).

        Raises `PortInUse` for a taken port and `NetworkError` with p2pd's own words for everything else that keeps it
        from starting.
        """
        for address in listen:
            check_port_is_free(address)
        switches = {"natPortMap": nat_port_map, "pubsub": pubsub, "relayService": relay_service}
        flags = [
            f"-id={identity.path.absolute()}",
            f"-hostAddrs={','.join(listen)}",
            *([f"-announceAddrs={','.join(announce)}"] if announce else []),
            *(f"-{name}={int(on)}" for name, on in switches.items()),
            "-dhtClient=1" if dht_client else "-dhtServer=1",
            f"-connHi={max_connections}",
            f"-connLo={max_connections * 3 // 4}",
            *("-connManager=1", "-connGrace=30s", "-autonat=1", "-relay=1", "-tls=1"),
            "-idleTimeout=30s",  # ends a p2pd whose node died before the death signal was set
        ]
        self = cls(identity, await Daemon.start(work_dir, flags, cores))
        self._listens = multiaddrs.listened(listen, announced=bool(announce))
        try:
            await self._attach(identity)
            await self.addresses()
        except BaseException:
            await self.close()
            raise
        return self

    async def _attach(self, identity: Identity) -> None:
        """Give hivemind its connection to p2pd, and count that connection's end as p2pd's."""
        control = Multiaddr(f"/unix{self.daemon.control_path}")
        self.p2p = await self.guard("attach to p2pd", P2P.replicate(control), CALL_SECONDS)
        found = self.p2p.peer_id.to_base58()
        if found != self.peer_id:
            raise NetworkError(f"p2pd calls itself {found}, but {identity.path} is {self.peer_id}")
        for task in (self.p2p._client.control._read_task, self.p2p._client.control._write_task):
            task.add_done_callback(
                lambda ended: ended.cancelled() or ended.exception()
            )  # told by `_watch`, not by asyncio
        self._dead = asyncio.create_task(self._watch(self._dead))

    async def _watch(self, process: asyncio.Task[str]) -> str:
        """Return why there is no working p2pd any more.

        hivemind may lose its connection while p2pd lives (a reply that meets a call cancelled in the same instant ends
        its reader) and then hangs in silence; that is no better than a dead p2pd.
        """
        control = self.p2p._client.control
        waiting: set[asyncio.Task[Any]] = {process, control._read_task, control._write_task}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({process}, timeout=0.5)  # the connection falls just before the process is seen to end
        if process.done():
            return process.result()
        process.cancel()
        return "the network was closed" if self._closed else "hivemind lost its connection to p2pd"

    async def close(self) -> None:
        """End streams, subscriptions and p2pd, and remove its sockets. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._server is not None:
            self._server.close()
        for task in self._streams:
            task.cancel()
        if self._streams:
            await asyncio.wait(self._streams, timeout=CALL_SECONDS)
        if self.p2p is not None:
            await self.p2p.shutdown()
        await self.daemon.stop()
        await self._dead

    async def wait_dead(self) -> str:
        """Wait until p2pd has died (or this network was closed) and return why, in words for people."""
        return await asyncio.shield(self._dead)

    async def guard(self, what: str, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """Await `work`, but at most `seconds` and only while p2pd lives. Raises `NetworkError` naming `what`."""
        if self._closed:
            work.close()
            raise NetworkError(f"{what}: the network is closed")
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task, self._dead}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=1.0)  # let it close what it had opened
            reason = self._dead.result() if self._dead.done() else f"no answer within {seconds:g} s"
            raise NetworkError(f"{what}: {reason}")
        try:
            return task.result()
        except (P2PDaemonError, P2PHandlerError, OSError, EOFError, TimeoutError) as error:
            if isinstance(error, OSError | EOFError):  # its socket falls just before p2pd is seen to end
                await asyncio.wait({self._dead}, timeout=1.0)
            reason = self._dead.result() if self._dead.done() else " ".join(str(error).split()) or type(error).__name__
            raise NetworkError(f"{what}: {reason}") from error

    def names(self, name: str) -> list[str]:
        """What stands on the wire for a protocol, topic or DHT key; this node itself uses the first."""
        return [name]

    @property
    def calls(self) -> Any:
        """By which the DHT calls and is called."""
        return self.p2p

    # Asking p2pd

    async def _ask(self, what: str, seconds: float, **fields: Any) -> Any:
        """One request to p2pd and its answer, under a deadline."""

        async def ask() -> Any:
            response, _, writer = await exchange(self.daemon.control_path, p2pd_pb2.Request(**fields))
            writer.close()
            return response

        return await self.guard(what, ask(), seconds)

    async def addresses(self) -> list[str]:
        """Multiaddrs at which others can reach this node, as far as p2pd knows, without /p2p."""
        response = await self._ask("ask p2pd for its addresses", CALL_SECONDS, type=p2pd_pb2.Request.IDENTIFY)
        found = [decode_multiaddr(address) for address in response.identify.addrs]
        self._own = [address for address in found if multiaddrs.is_multiaddr(address)]
        return list(self._own)

    def is_own(self, address: str) -> bool:
        """Whether an address, with or without /p2p, is one by which this node is reached."""
        return address.partition("/p2p/")[0] in self._own

    async def peers(self) -> list[str]:
        """Ids of the peers that this node is connected to."""
        response = await self._ask("list peers", CALL_SECONDS, type=p2pd_pb2.Request.LIST_PEERS)
        return sorted({base58.b58encode(peer.id).decode() for peer in response.peers})

    async def connect(self, multiaddr: str, *, strange: bool = False) -> str:
        """Dial an address that ends with /p2p/<peer id>; return that id. `strange`: a stranger chose the address.
        Raises `LeadsInside` for one of those that is not followed."""
        address, found, peer_id = multiaddr.rpartition("/p2p/")
        if not found:
            raise NetworkError(f"connect to {multiaddr}: the address of a peer ends with /p2p/<its peer id>")
        given = [address] if address else []
        if strange and not (given := await self._followed(given)):
            raise LeadsInside(f"connect to {multiaddr}: it leads inside, and a stranger chose it")
        await self._dial(f"connect to {multiaddr}", peer_id, given)
        return peer_id

    async def _followed(self, addresses: Sequence[str]) -> list[str]:
        """What to dial of the addresses that a stranger chose (`addresses.py`). Names are resolved here, and dialled by
        number: p2pd would follow them anywhere."""
        allowed = multiaddrs.followed([*self._own, *self._listens])
        given = addresses[:MAX_DIALLED_ADDRESSES]
        meant = await asyncio.gather(*map(dnsaddr.numeric, given))
        if given and not any(meant):
            raise NetworkError(f"dial {given[0]}: no good addresses")
        return [one for found in meant for one in found if multiaddrs.reach(one) in allowed and "/dns" not in one]

    async def _dial(self, what: str, peer_id: str, addresses: Sequence[str]) -> None:
        try:
            encoded = [encode_multiaddr(address) for address in addresses[:MAX_DIALLED_ADDRESSES]]
            connect = p2pd_pb2.ConnectRequest(peer=peer_bytes(peer_id), addrs=encoded, timeout=int(DIAL_SECONDS))
        except ValueError as error:
            raise NetworkError(f"{what}: {error}") from error
        # p2pd gets the deadline; one second more for its answer.
        await self._ask(what, DIAL_SECONDS + 1, type=p2pd_pb2.Request.CONNECT, connect=connect)

    def outside(self, peer_id: str) -> bool:
        """Whether a peer has no place in this swarm's DHT."""
        return self.denied(peer_id) or peer_id in self.foreign

    async def keep(self, peer_id: str) -> None:
        """Ask p2pd to close other connections before this peer's when there are too many."""
        tag = p2pd_pb2.ConnManagerRequest(
            type=p2pd_pb2.ConnManagerRequest.TAG_PEER, peer=peer_bytes(peer_id), tag="swarm", weight=KEEP_WEIGHT
        )
        await self._ask(f"keep {peer_id}", CALL_SECONDS, type=p2pd_pb2.Request.CONNMANAGER, connManager=tag)

    # The public DHT of libp2p, which is another one than the swarm's

    async def provide(self, cid: bytes, seconds: float) -> None:
        """Tell libp2p's DHT that this node has the content `cid` (binary). Its address becomes public there."""
        request = p2pd_pb2.DHTRequest(type=p2pd_pb2.DHTRequest.PROVIDE, cid=cid, timeout=int(seconds))
        await self._ask("provide to libp2p's DHT", seconds + 1, type=p2pd_pb2.Request.DHT, dht=request)

    async def find_providers(self, cid: bytes, count: int, seconds: float) -> list[tuple[str, list[str]]]:
        """At most `count` providers of a content: peer id and at most MAX_DIALLED_ADDRESSES multiaddrs without /p2p."""
        find = p2pd_pb2.DHTRequest.FIND_PROVIDERS
        request = p2pd_pb2.DHTRequest(type=find, cid=cid, count=count, timeout=int(seconds))  # seconds, whole ones

        async def ask() -> list[Any]:
            _, reader, writer = await exchange(
                self.daemon.control_path, p2pd_pb2.Request(type=p2pd_pb2.Request.DHT, dht=request)
            )
            found: list[Any] = []
            try:
                while len(found) < count:
                    answer = p2pd_pb2.DHTResponse.FromString(await read_message(reader, MAX_PROVIDER_BYTES))
                    if answer.type == p2pd_pb2.DHTResponse.END:
                        break
                    found.append(answer.peer)
            finally:
                writer.close()
            return found

        peers = await self.guard("find providers in libp2p's DHT", ask(), seconds + 1)
        return [(base58.b58encode(peer.id).decode(), _addresses(peer.addrs)) for peer in peers]

    async def disconnect(self, peer_id: str) -> None:
        """Close all connections to a peer. It may come again: see `denied`."""
        request = p2pd_pb2.DisconnectRequest(peer=peer_bytes(peer_id))
        kind = p2pd_pb2.Request.DISCONNECT
        await self._ask(f"disconnect {peer_id}", CALL_SECONDS, type=kind, disconnect=request)

    # Raw streams

    async def open_stream(
        self, peer_id: str, protocol: str, addresses: Sequence[str] = ()
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A binary stream to a peer's `serve_stream` handler. The caller frames, bounds and closes it.

        `addresses` (without /p2p), which a stranger chose, are dialled first; without them p2pd uses what it knows and
        asks its neighbours.
        """
        what = f"open {protocol} to {peer_id}"
        if given := await self._followed(addresses):
            await self._dial(what, peer_id, given)
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_OPEN,
            streamOpen=p2pd_pb2.StreamOpenRequest(
                peer=peer_bytes(peer_id), proto=[protocol], timeout=int(DIAL_SECONDS)
            ),
        )
        opening = exchange(self.daemon.control_path, request)
        response, reader, writer = await self.guard(what, opening, DIAL_SECONDS + 1)
        for far_end in _addresses([response.streamInfo.addr]):
            self.reached(peer_id, far_end)
        return reader, writer

    async def serve_stream(self, protocol: str, handler: StreamHandler) -> None:
        """Let peers open `protocol`: `handler(peer_id, reader, writer)` runs for each stream, bounded in number and
        time, and the stream is closed when it returns. Trouble with one stream ends only that stream. A handler gets
        its request by `reader.readexactly`: until that returned, the stream may have to make room for another."""
        if self._server is None:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(
                lambda: asyncio.StreamReaderProtocol(RequestReader(loop=loop), self._incoming), str(self._streams_path)
            )
        self._handlers[protocol] = handler
        request = p2pd_pb2.StreamHandlerRequest(
            addr=Multiaddr(f"/unix{self._streams_path}").to_bytes(), proto=[protocol], balanced=False
        )
        kind = p2pd_pb2.Request.STREAM_HANDLER
        await self._ask(f"serve {protocol}", CALL_SECONDS, type=kind, streamHandler=request)

    async def _incoming(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        assert isinstance(reader, RequestReader)
        peer_id, ended_well = "", False
        try:
            # p2pd names a stream's peer at once; until then it has no place.
            if places.unnamed(self._streams) >= places.MAX_STREAMS:
                return
            self._streams[task] = stream = Incoming(reader, writer)
            async with asyncio.timeout(CALL_SECONDS):
                info = p2pd_pb2.StreamInfo.FromString(await read_message(reader, 4096))
            peer_id = base58.b58encode(info.peer).decode()
            handler = self._handlers.get(info.proto)
            now = asyncio.get_running_loop().time()
            if handler is None or self.denied(peer_id):
                return
            if not places.has_place(self._streams, peer_id, info.proto, now, self.known_as):
                return
            stream.peer_id, stream.protocol, stream.since, reader.asked = peer_id, info.proto, now, False
            async with asyncio.timeout(STREAM_SECONDS):
                await handler(peer_id, reader, writer)
            ended_well = True
        except asyncio.CancelledError:
            if not self._closed:
                raise
            # By `close`: asyncio's server would report a cancelled task as an error.
        except (OSError, EOFError, TimeoutError) as error:
            log.debug("stream of %s ended: %r", peer_id, error)
        except Exception:  # a handler's fault, here told, must not take the other streams with it
            log.exception("a stream handler failed on a stream of %s", peer_id)
        finally:
            self._streams.pop(task, None)
            if ended_well:
                writer.close()  # sends what is still buffered
            else:
                writer.transport.abort()

    # Gossip

    async def publish(self, topic: str, data: bytes) -> None:
        """Push a hint of at most `MAX_HINT_BYTES` to the subscribers of `topic`; it may be lost."""
        if len(data) > MAX_HINT_BYTES:
            raise ValueError(f"a hint has at most {MAX_HINT_BYTES} bytes, not {len(data)}")
        request = p2pd_pb2.PSRequest(type=p2pd_pb2.PSRequest.PUBLISH, topic=topic, data=data)
        await self._ask(f"publish to {topic}", CALL_SECONDS, type=p2pd_pb2.Request.PUBSUB, pubsub=request)

    async def subscribe(self, *topics: str) -> AsyncGenerator[tuple[str, bytes], None]:
        """Hints of others on `topics`, as (sender's peer id, data). Signed by the sender and checked by p2pd. One that
        is too large, or a denied peer's, comes as empty: it has cost something all the same.

        At most `MAX_QUEUED_HINTS` wait; then the oldest is dropped. Raises `NetworkError` when p2pd is gone.
        """
        what = f"subscribe to {' and '.join(topics)}"
        waiting: deque[tuple[str, bytes]] = deque(maxlen=MAX_QUEUED_HINTS)
        arrived = asyncio.Event()
        pumps: dict[asyncio.Task[str], asyncio.StreamWriter] = {}
        try:
            for topic in topics:
                request = p2pd_pb2.PSRequest(type=p2pd_pb2.PSRequest.SUBSCRIBE, topic=topic)
                message = p2pd_pb2.Request(type=p2pd_pb2.Request.PUBSUB, pubsub=request)
                _, reader, writer = await self.guard(what, exchange(self.daemon.control_path, message), CALL_SECONDS)
                pumps[asyncio.create_task(self._pump(reader, waiting, arrived))] = writer
            while True:
                while waiting:
                    yield waiting.popleft()
                arrived.clear()
                for ended in filter(asyncio.Task.done, pumps):
                    raise NetworkError(f"{what}: {ended.result()}")
                await arrived.wait()
        finally:
            for pump, writer in pumps.items():
                pump.cancel()
                writer.close()

    async def _pump(
        self, reader: asyncio.StreamReader, waiting: deque[tuple[str, bytes]], arrived: asyncio.Event
    ) -> str:
        """Move hints from p2pd into the queue; return why there will be no more."""
        try:
            while True:
                message = p2pd_pb2.PSMessage.FromString(await read_message(reader, MAX_CONTROL_BYTES))
                sender = base58.b58encode(getattr(message, "from")).decode()
                if sender != self.peer_id:
                    fits = len(message.data) <= MAX_HINT_BYTES and not self.denied(sender)
                    waiting.append((sender, message.data if fits else b""))
                    arrived.set()
        except (OSError, EOFError) as error:
            return f"p2pd ended the subscription ({type(error).__name__})"
        finally:
            arrived.set()


def _addresses(encoded: Sequence[bytes]) -> list[str]:
    """The multiaddrs among what strangers call their addresses, those that lead farthest first, bounded."""
    found = []
    for data in encoded[:MAX_PROVIDER_ADDRESSES]:
        try:
            found.append(decode_multiaddr(data))
        except Exception as error:  # noqa: BLE001  hivemind's parser raises whatever its codecs meet
            log.debug("not an address: %r", error)
    return sorted(filter(multiaddrs.is_multiaddr, found), key=multiaddrs.reach)[:MAX_DIALLED_ADDRESSES]
