"""The swarm's DHT: hivemind's Kademlia in this event loop, carrying our records and nothing else.

hivemind brings the routing table, the search for the nodes nearest to a key, and the messages on the wire. What is
stored and what is believed is decided here, because its `DHTNode` has storage without bounds, a decoder that recurses
on what strangers send, discards a whole reply for one bad record, and hangs on one hostile holder. So: remote bytes are
decoded by type, never recursively; holders take single records only (no plain values, no dictionaries); a reader merges
the valid records of all nearest holders and, at its deadline, returns those it has.

Records live minutes and are rewritten in each epoch, so holders do not hand them on to nodes that join, and nothing is
cached along the way.
"""

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec

from sapo_node.swarm import routing
from sapo_node.swarm.hivemind_light import (
    DHTID,
    DHTProtocol,
    MSGPackSerializer,
    P2PContext,
    PeerID,
    dht_pb2,
    traverse_dht,
)
from sapo_node.swarm.p2p import Network, NetworkError
from sapo_node.swarm.protocol import MAX_RECORD_BYTES, MAX_SHARD_BITS, MAX_SUBKEYS, epoch_of
from sapo_node.swarm.rate_limit import RateLimit
from sapo_node.swarm.records import (
    Record,
    RecordStore,
    RecordValidator,
    Refused,
    ShardSchedule,
    key_ids,
    record_key,
    shard_prefix,
)

__all__ = ["ShardSchedule", "SwarmDHT", "record_key", "shard_prefix"]

log = logging.getLogger(__name__)

REPLICAS: Final = 5
"""Holders of a record: the nodes nearest to its key."""
BEAM: Final = 2 * REPLICAS
"""Nodes that a search asks at least; more than hold a record, since some may be gone or hostile."""
NEIGHBOURS: Final = 20
"""Nodes in one bucket of the routing table, hence believed from one reply."""
RPC_SECONDS: Final = 3.0
SEARCH_SECONDS: Final = 6.0
"""Deadline of a search; typically it takes tens of milliseconds. What was found until then is used."""
OPERATION_SECONDS: Final = SEARCH_SECONDS + RPC_SECONDS + 1.0
"""Deadline of an announcement or a reading, beyond which something is wrong with p2pd."""
MAX_FOUND: Final = 4 * MAX_SUBKEYS
"""Records believed from one search. Honest holders have at most MAX_SUBKEYS under a key, the same ones mostly."""
SUSPEND_SECONDS: Final = 5.0
"""How long a node that did not answer is left out. Constant: a bootstrap that comes back must be found soon."""
MAX_KEYS_A_CALL: Final = 8
MAX_RECORDS_A_CALL: Final = 8
"""Keys asked for and records stored in one remote call: an answer stays below hivemind's 4 MiB, and a signature check
below a millisecond."""
RATE_SCALE: Final = 4
"""Calls of a peer, and of all, beside requests for batches: a node of a small swarm makes about five a second to each
other one, and some forty at once when it joins. Whom this node refuses, it is left out by for SUSPEND_SECONDS."""
BYTES_A_TOKEN: Final = 64 * 1024
"""An answer counts as one call more for each so many bytes: honest shards fit into one, full ones have four."""
_DICTIONARY_CODE: Final = 0x50  # hivemind's extension type of a value with subkeys
_MAX_DICTIONARY_BYTES: Final = MAX_SUBKEYS * (MAX_RECORD_BYTES + 64)

_Items = list[tuple[bytes, bytes, float]]
_dictionary_decoder = msgspec.msgpack.Decoder(tuple[float, float, _Items])
_extension_decoder = msgspec.msgpack.Decoder(msgspec.msgpack.Ext)


class StrictSerializer(MSGPackSerializer):  # type: ignore[misc]
    """hivemind's serializer whose decoder takes byte strings only: the one thing a subkey or a value of ours is.

    hivemind's own decoder recurses into extension types; a value of a kilobyte overflows the stack of the process.
    """

    @classmethod
    def loads(cls, buf: bytes) -> bytes:
        """The byte string in `buf`. Raises ValueError for anything else."""
        if len(buf) > MAX_RECORD_BYTES + 8:
            raise ValueError("a DHT value is too large")
        return msgspec.msgpack.decode(buf, type=bytes)


def encode_dictionary(records: Iterable[Record]) -> bytes:
    """Records as a reply carries them: hivemind's form of a dictionary (no size limit, latest expiry, items)."""
    items = [(r.public_key, StrictSerializer.dumps(r.envelope), r.expires_at) for r in records]
    latest = max((item[2] for item in items), default=0.0)
    body = msgspec.msgpack.encode((float("inf"), latest, items))
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(_DICTIONARY_CODE, body))


def decode_dictionary(data: bytes) -> _Items:
    """(public key, packed envelope, expiry) of each item in a reply, unchecked. Raises ValueError.

    Decoded by type: nesting other than this is an error, not a recursion.
    """
    if len(data) > _MAX_DICTIONARY_BYTES:
        raise ValueError("a DHT dictionary is too large")
    extension = _extension_decoder.decode(data)
    if extension.code != _DICTIONARY_CODE:
        raise ValueError("not a DHT dictionary")
    return _dictionary_decoder.decode(extension.data)[2][:MAX_SUBKEYS]


def node_id_of(peer_id: Any) -> Any:
    """The place of a peer in the key space. It follows from the peer id, so one peer has one place, and the same one
    after a restart."""
    return DHTID.generate(source=peer_id.to_bytes())


class RecordProtocol(DHTProtocol):  # type: ignore[misc]
    """hivemind's remote calls, with our storage, our checks and bounds on what one call may ask."""

    serializer = StrictSerializer
    network: Network
    records: RecordStore
    validator: RecordValidator
    rate: RateLimit
    _tasks: set[asyncio.Task[Any]]

    @classmethod
    async def start(
        cls, network: Network, records: RecordStore, validator: RecordValidator, *, serve: bool
    ) -> "RecordProtocol":
        """The protocol on a network's p2pd. `serve`: answer others' calls and be found by them."""
        node_id = node_id_of(network.calls.peer_id)
        self: RecordProtocol = await cls.create(
            network.calls, node_id, NEIGHBOURS, 5, REPLICAS, RPC_SECONDS, client_mode=True
        )
        self.network, self.records, self.validator, self._tasks = network, records, validator, set()
        self.rate = RateLimit(lambda peer_id: network.known_as(peer_id), RATE_SCALE)
        if serve:  # only now: what the handlers use is there
            self.client_mode = False
            self.node_info = dht_pb2.NodeInfo(node_id=node_id.to_bytes())
            await self.add_p2p_handlers(self.p2p)
        return self

    @classmethod
    def _get_handle_name(cls, namespace: str | None, method_name: str) -> str:
        return f"DHTProtocol.{method_name}"  # the name on the wire, not this class's

    async def shutdown(self) -> None:
        """Stop answering."""
        for task in self._tasks:
            task.cancel()
        await super().shutdown()

    # Answering

    async def rpc_ping(self, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
        """Answer a ping; the caller joins the routing table."""
        self._admit(request.peer, context.remote_id)
        return await super().rpc_ping(request, context)

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        """Keep the records offered, as far as they are valid and there is room."""
        self._admit(request.peer, context.remote_id)
        if len(request.keys) > MAX_RECORDS_A_CALL:
            raise ValueError(f"at most {MAX_RECORDS_A_CALL} records in a call")
        self._owe(context.remote_id, len(request.keys) - 1)  # each may cost a signature check
        offered = zip(request.keys, request.subkeys, request.values, request.expiration_time, strict=True)
        return dht_pb2.StoreResponse(store_ok=[self._keep(*item) for item in offered], peer=self.node_info)

    def _keep(self, key: bytes, subkey: bytes, packed: bytes, expires_at: float) -> bool:
        try:
            return self.records.store(key, self._check(key, self.serializer.loads(subkey), packed, expires_at))
        except (
            Refused,
            ValueError,
        ) as refusal:  # ValueError: a plain value, a dictionary, or a subkey that is no bytes
            log.debug("refused a record: %s", refusal)
            return False

    def _check(self, key: bytes, public_key: bytes, packed: bytes, expires_at: float) -> Record:
        """A record as it came over the wire, checked. Raises `Refused`, or ValueError for a value that is no bytes."""
        return self.validator.validate(key, public_key, self.serializer.loads(packed), expires_at)

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        """Return the records held under each key, and the nodes known to be near it."""
        self._admit(request.peer, context.remote_id)
        if len(request.keys) > MAX_KEYS_A_CALL or len(set(request.keys)) < len(request.keys):
            raise ValueError(f"at most {MAX_KEYS_A_CALL} keys in a call, each of them once")
        caller = node_id_of(context.remote_id)
        results = [self._result(DHTID.from_bytes(key), caller) for key in request.keys]
        self._owe(context.remote_id, sum(len(result.value) for result in results) // BYTES_A_TOKEN)
        return dht_pb2.FindResponse(results=results, peer=self.node_info)

    def _owe(self, peer_id: Any, calls: int) -> None:
        """A call that was answered counts as so many more."""
        if calls > 0:
            self.rate.owe(peer_id.to_base58(), calls, time.monotonic())

    def _result(self, key: Any, caller: Any) -> Any:
        result = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)
        if held := self.records.get(key.to_bytes()):
            result.type = dht_pb2.FOUND_DICTIONARY
            result.value = encode_dictionary(held)
            result.expiration_time = max(record.expires_at for record in held)
        for node_id, peer_id in self.routing_table.get_nearest_neighbors(key, k=NEIGHBOURS, exclude=caller):
            result.nearest_node_ids.append(node_id.to_bytes())
            result.nearest_peer_ids.append(peer_id.to_bytes())
        return result

    def _admit(self, claimed: Any, peer_id: Any) -> None:
        """Refuse a denied caller and one that calls too often; let one that serves (it names its node id) join the
        routing table."""
        name = peer_id.to_base58()
        if self.network.outside(name):
            raise PermissionError("denied")
        if not self.rate.take(name, time.monotonic()):
            raise PermissionError("too many calls")
        if claimed.node_id:
            self._saw(peer_id, claimed.node_id)

    def _saw(self, peer_id: Any, claimed: bytes) -> None:
        node_id = node_id_of(peer_id)
        if claimed != node_id.to_bytes() or node_id == self.node_id:
            return  # not a node of ours, or one that wants another place than its own
        stale = self.routing_table.add_or_update_node(node_id, peer_id)
        routing.trim(self.routing_table, node_id)
        if stale is not None:  # the bucket is full: does its oldest node still live? If not, the new one replaces it
            self.spawn(self.call_ping(stale[1]))

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Let work go on beside; it ends with the protocol."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Asking

    async def update_routing_table(self, node_id: Any, peer_id: Any, responded: bool = True) -> None:
        """Called by hivemind after each call of ours. Unlike its own, it hands no records to a new node."""
        if not responded:
            self._missed(peer_id, "it did not respond")
        elif node_id is not None:
            self._saw(peer_id, node_id.to_bytes())

    def _missed(self, peer_id: Any, reason: object) -> None:
        log.debug("no answer from %s: %r", peer_id, reason)
        if (node_id := node_id_of(peer_id)) in self.routing_table:
            del self.routing_table[node_id]

    async def call_ping(self, peer: Any, validate: bool = False, strict: bool = True) -> Any:
        """Ask a peer for its node id, which joins the routing table. None if it did not answer, or not sensibly."""
        request = dht_pb2.PingRequest(peer=self.node_info, validate=validate)
        try:
            response = await self.get_stub(peer).rpc_ping(request, timeout=self.wait_timeout)
            node_id = DHTID.from_bytes(response.peer.node_id) if response.peer.node_id else None
        except Exception as error:  # noqa: BLE001  as in call_find
            self._missed(peer, error)
            return None
        await self.update_routing_table(node_id, peer)
        return node_id

    async def call_find(
        self, peer: Any, keys: Collection[Any]
    ) -> dict[Any, tuple[list[Record], dict[Any, Any]]] | None:
        """Ask a peer for keys: for each, its valid records and the nodes (node id -> peer id) it thinks are near.

        None if it did not answer, or not sensibly.
        """
        request = dht_pb2.FindRequest(keys=[key.to_bytes() for key in keys], peer=self.node_info)
        try:
            response = await self.get_stub(peer).rpc_find(request, timeout=self.wait_timeout)
            answers = zip(keys, response.results, strict=True)
            found = {key: (await self._believe(key, answer), self._nearest(answer)) for key, answer in answers}
        except Exception as error:  # noqa: BLE001  whatever a peer's answer raises in hivemind: it did not answer well
            self._missed(peer, error)
            return None
        self._saw(peer, response.peer.node_id)
        return found

    async def _believe(self, key: Any, answer: Any) -> list[Record]:
        """The valid records of an answer; others are left out, not held against the rest."""
        if answer.type != dht_pb2.FOUND_DICTIONARY:
            return []
        records = []
        for i, (public_key, packed, expires_at) in enumerate(decode_dictionary(answer.value)):
            with suppress(Refused, ValueError):
                records.append(self._check(key.to_bytes(), public_key, packed, expires_at))
            if i % 32 == 31:
                await asyncio.sleep(0)  # signatures take time, others want the event loop
        return records

    def _nearest(self, answer: Any) -> dict[Any, Any]:
        peers = [PeerID(raw) for raw in answer.nearest_peer_ids[:NEIGHBOURS] if len(raw) <= 64]
        return {node_id_of(peer): peer for peer in peers if not self.network.outside(peer.to_base58())}


class SwarmDHT:
    """This node's part of the DHT. `await SwarmDHT.start(...)`; `close()` before the network's.

    `schedule.k` is the number of shard bits to announce under; it follows the swarm's size by what `join` and `read`
    see.
    """

    def __init__(self, network: Network, swarm: str, protocol: RecordProtocol, schedule: ShardSchedule) -> None:
        self.schedule = schedule
        self._network = network
        self._swarm = swarm
        self._protocol = protocol
        self._now = protocol.validator.now
        self._suspended: dict[Any, float] = {}
        self._epoch = epoch_of(self._now())
        self._seen_shards: dict[int, int] = {}

    @classmethod
    async def start(
        cls,
        network: Network,
        swarm: str,
        initial_peers: Sequence[str] = (),
        *,
        store_for_others: bool = True,
        forced_k: int | None = None,
        now: Callable[[], float] = time.time,
    ) -> "SwarmDHT":
        """Take part in the DHT over `network`. Initial peers that do not answer are no error: `join` later.

        `store_for_others=False` only asks and announces, for nodes that cannot be reached.
        """
        records, validator = RecordStore(network.public_key, now), RecordValidator(swarm, now, network.names)
        starting = RecordProtocol.start(network, records, validator, serve=store_for_others)
        protocol = await network.guard("start the DHT", starting, OPERATION_SECONDS)
        self = cls(network, swarm, protocol, ShardSchedule(forced_k))
        if initial_peers:
            await self.join(initial_peers)
        return self

    async def close(self) -> None:
        """Leave the DHT."""
        with suppress(NetworkError):  # p2pd is gone already, and with it our place in the DHT
            await self._network.guard("leave the DHT", self._protocol.shutdown(), RPC_SECONDS)

    def neighbours(self) -> int:
        """Nodes in the routing table."""
        return len(self._protocol.routing_table.uid_to_peer_id)

    def members(self) -> set[str]:
        """Peer ids of the nodes in the routing table."""
        return {peer_id.to_base58() for peer_id in self._protocol.routing_table.uid_to_peer_id.values()}

    async def join(self, peers: Sequence[str]) -> int:
        """Enter the DHT through peers: multiaddrs ending with /p2p/<id>, or ids of peers already connected.

        Returns how many of them answered; none is no error. Raises `NetworkError` only if p2pd does not work.
        """
        answers = await asyncio.gather(*map(self._meet, peers))
        if any(answers):
            own = self._protocol.node_id
            await self._network.guard("enter the DHT", self._search({own: {}}), OPERATION_SECONDS)
            if self.schedule.new:
                await self._probe_shards()
        return sum(answers)

    async def _meet(self, peer: str) -> bool:
        try:
            peer_id = PeerID.from_base58(await self._network.connect(peer) if "/" in peer else peer)
        except (NetworkError, ValueError) as error:
            log.debug("cannot join by %s: %s", peer, error)
            return False
        self._suspended.pop(peer_id, None)
        ping = self._protocol.call_ping(peer_id)
        return await self._network.guard(f"ping {peer_id}", ping, RPC_SECONDS + 1) is not None

    async def announce(self, envelope: bytes, epoch: int, k: int, prefix: int, expires_at: float) -> bool:
        """Write this node's signed announcement to its shard, until `expires_at` (seconds since 1970).

        True if another node holds it now; alone, if this node does. The announcement's `seq`, or with the same `seq`
        the expiry, must be higher than before. Raises ValueError for an announcement that nobody would take.
        """
        key = key_ids(self._network.names, self._swarm, epoch, k, prefix)[0]
        try:
            record = self._protocol.validator.validate(key, self._network.public_key, envelope, expires_at)
        except Refused as refusal:
            raise ValueError(
                f"this announcement is not valid under epoch {epoch}, k {k}, prefix {prefix}: {refusal}"
            ) from None
        here = self._protocol.records.store(key, record)
        what = "announce to the DHT"
        return await self._network.guard(what, self._spread(DHTID.from_bytes(key), record, here), OPERATION_SECONDS)

    async def _spread(self, key: Any, record: Record, here: bool) -> bool:
        holders = (await self._search({key: {}}))[:REPLICAS]
        if not holders:
            return here
        packed = StrictSerializer.dumps(record.envelope)
        calls = (self._protocol.call_store(h, [key], [packed], record.expires_at, [record.public_key]) for h in holders)
        return any(list(answer or ()) == [True] for answer in await asyncio.gather(*calls))

    async def read(self, epoch: int, k: int, prefix: int) -> list[bytes]:
        """The signed announcements in a shard, each valid; those that were found until the deadline."""
        (records,) = await self._read([(epoch, k, prefix)])
        self._note_shard(epoch, k, prefix, len(records))
        return [record.envelope for record in records]

    async def _read(self, shards: Sequence[tuple[int, int, int]]) -> list[list[Record]]:
        """The records in each of several shards, found in one search."""
        keys = [list(map(DHTID.from_bytes, key_ids(self._network.names, self._swarm, *shard))) for shard in shards]
        found: dict[Any, dict[bytes, Record]] = {
            key: {r.public_key: r for r in self._protocol.records.get(key.to_bytes())}
            for these in keys
            for key in these
        }
        await self._network.guard("read the DHT", self._search(found), OPERATION_SECONDS)
        for first, *others in keys:  # others: while a private swarm changes its key
            for other in others:
                _merge(found[first], found[other].values())
        return [list(found[first].values()) for first, *_ in keys]

    async def _search(self, found: dict[Any, dict[bytes, Record]]) -> list[Any]:
        """Ask the nodes nearest to each key of `found`, nearer and nearer ones, and add the records they hold.

        Returns the peer ids of those that answered, the nearest to the first key first.
        """
        protocol, keys = self._protocol, list(found)
        known: dict[Any, Any] = {}
        for key in keys:
            known.update(protocol.routing_table.get_nearest_neighbors(key, NEIGHBOURS, exclude=protocol.node_id))
        answered: dict[Any, Any] = {}

        async def ask(node_id: Any, queries: Collection[Any]) -> dict[Any, tuple[Sequence[Any], bool]]:
            peer = known[node_id]
            suspended = self._suspended.get(peer, -math.inf) > time.monotonic()
            left_out = suspended or self._network.outside(peer.to_base58())
            answer = None if left_out else await protocol.call_find(peer, queries)
            if answer is None:
                if not left_out:
                    self._suspend(peer)
                return dict.fromkeys(queries, ((), False))
            answered[node_id] = peer
            for key, (records, nearest) in answer.items():
                _merge(found[key], records)
                nearest.pop(protocol.node_id, None)
                known.update(nearest)
            return {key: (tuple(nearest), False) for key, (_, nearest) in answer.items()}

        with suppress(TimeoutError):
            async with asyncio.timeout(SEARCH_SECONDS):
                visited = {key: {protocol.node_id} for key in keys}
                await traverse_dht(keys, list(known), BEAM, 4, MAX_KEYS_A_CALL, ask, visited_nodes=visited)
        return [answered[node_id] for node_id in sorted(answered, key=keys[0].xor_distance)]

    def _suspend(self, peer: Any) -> None:
        now = time.monotonic()  # a pause: setting the clock must not lengthen it
        self._suspended = {p: until for p, until in self._suspended.items() if until > now}
        self._suspended[peer] = now + SUSPEND_SECONDS

    # Which shard

    async def _probe_shards(self) -> None:
        """Look at a shard of each k in this epoch and the last, a random one, which nobody could prepare for this node;
        see `ShardSchedule`."""
        epoch, own = epoch_of(self._now()), self._network.public_key
        sizes = []
        for first in range(0, MAX_SHARD_BITS + 1, MAX_KEYS_A_CALL // 2):
            ks = range(first, min(first + MAX_KEYS_A_CALL // 2, MAX_SHARD_BITS + 1))
            shards = [(e, k, prefix) for k in ks for prefix in [secrets.randbelow(1 << k)] for e in (epoch, epoch - 1)]
            read = [sum(record.public_key != own for record in records) for records in await self._read(shards)]
            sizes += [max(now, before) for now, before in zip(read[::2], read[1::2], strict=True)]
        self.schedule.probed(sizes)

    async def _probe_again(self) -> None:
        try:
            await self._probe_shards()
        except NetworkError as error:
            log.debug("looking at every k failed: %s", error)

    def _note_shard(self, epoch: int, k: int, prefix: int, records: int) -> None:
        """Adapt k once an epoch, by the shards of the epoch before it (that one is complete) read meanwhile."""
        now = epoch_of(self._now())
        if now != self._epoch:
            self.schedule.end_of_epoch(list(self._seen_shards.values()))
            self._epoch, self._seen_shards = now, {}
            if self.schedule.due():
                self._protocol.spawn(self._probe_again())
        if (epoch, k) == (now - 1, self.schedule.k):
            self._seen_shards[prefix] = records


def _merge(found: dict[bytes, Record], records: Iterable[Record]) -> None:
    for record in records:
        old = found.get(record.public_key)
        if record.is_newer_than(old) if old is not None else len(found) < MAX_FOUND:
            found[record.public_key] = record
