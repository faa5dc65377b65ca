"""What arrives over the network beside envelopes: streams, DHT calls and their answers, hints, addresses."""

import asyncio
import functools
import random
import sys
from random import Random
from types import SimpleNamespace
from typing import Any, Final

from google.protobuf.message import DecodeError
from msgspec.msgpack import Ext

from sapo_node.config import SwarmSection
from sapo_node.rollouts import codec
from sapo_node.rollouts.schema import Listing
from sapo_node.swarm import addresses as multiaddrs
from sapo_node.swarm import dht, fetch, hello, p2p, protocol
from sapo_node.swarm.exchange import Exchange
from sapo_node.swarm.fetch import FetchFailed, FetchServer, Shelf
from sapo_node.swarm.hello import Greeter
from sapo_node.swarm.hivemind_light import DHTID, DHTProtocol, PeerID, dht_pb2, p2pd_pb2
from sapo_node.swarm.p2pd import encode_multiaddr
from sapo_node.swarm.peers import PeerBook
from sapo_node.swarm.rate_limit import RateLimit
from sapo_node.swarm.records import RecordStore, RecordValidator, key_id

from . import values
from .mutate import hostile, mutate, packed, random_bytes, tokens, twist
from .run import Broken, Surface


class _Sink:
    """The writing end of a stream to a peer that takes everything."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes) -> None:
        self.data += data

    async def drain(self) -> None:
        pass

    def close(self) -> None:
        pass


def _stream(data: bytes) -> tuple[asyncio.StreamReader, Any]:
    """A stream on which a peer sent `data` and closed its end."""
    reader = asyncio.StreamReader(loop=values.LOOP)
    reader.feed_data(data)
    reader.feed_eof()
    return reader, _Sink()


# Streams

_ENVELOPE: Final = codec.encode_batch(values.batch(Random(1)), values.ME)
_LISTING: Final = Listing(_ENVELOPE.content_id, len(_ENVELOPE.data), 1, values.NOW)
_ANSWER: Final = b"\0" + len(_ENVELOPE.data).to_bytes(4, "big") + _ENVELOPE.data


def _make_request(rng: Random) -> bytes:
    if rng.random() < 0.3:
        return _ENVELOPE.content_id + random_bytes(rng)
    return mutate(rng, _ENVELOPE.content_id) if rng.random() < 0.5 else random_bytes(rng, 100)


def _read_request(data: bytes) -> None:
    shelf = Shelf(1e12)
    shelf.put(_ENVELOPE, 1, values.NOW, values.NOW)
    reader, sink = _stream(data)
    server = FetchServer(shelf, lambda _: True, lambda *_: None)
    values.LOOP.run_until_complete(server.serve("peer", reader, sink))
    if bytes(sink.data) not in (_ANSWER, b"\x01\0\0\0\0"):
        raise Broken("a request was answered with something else than the batch or that it is gone")


def _make_answer(rng: Random) -> bytes:
    if rng.random() < 0.1:
        return _ANSWER + random_bytes(rng)
    return mutate(rng, _ANSWER) if rng.random() < 0.7 else random_bytes(rng, 3000)


def _read_answer(data: bytes) -> None:
    reader, sink = _stream(data)
    found = values.LOOP.run_until_complete(fetch.ask(reader, sink, _LISTING))
    if codec.content_id_of(found) != _LISTING.content_id:
        raise Broken("bytes with another digest than announced were taken")


_GREETING: Final = protocol.greeting(values.SWARM)
_greeted: Any = SimpleNamespace(foreign=set())


def _make_greeting(rng: Random) -> bytes:
    if rng.random() < 0.5:
        return mutate(rng, rng.choice((_GREETING, protocol.greeting("other"), protocol.greeting(values.SWARM, 0, 255))))
    return random_bytes(rng, 100)


_greeter: Final = Greeter(_greeted, values.SWARM)


def _read_greeting(data: bytes) -> None:
    reader, sink = _stream(data)
    peer = data[-4:].hex()
    values.LOOP.run_until_complete(_greeter.serve(peer, reader, sink))
    if bytes(sink.data) != _GREETING:
        raise Broken("a greeting was answered with something else than ours")
    if (peer in _greeter.members) != (data[:4] == _GREETING[:4] and data[6:38] == _GREETING[6:] and _meets(data)):
        raise Broken("a stranger passed for a member, or a member for a stranger")
    if len(_greeter._seen) > hello.MAX_REMEMBERED or len(_greeted.foreign) > hello.MAX_REMEMBERED:
        raise Broken("the memory of greetings has no end")


def _meets(theirs: bytes) -> bool:
    return theirs[4] <= protocol.PROTO <= theirs[5]


# The DHT

_REMOTE: Final = PeerID.from_base58(values.OTHER.peer_id)
_CONTEXT: Final = SimpleNamespace(remote_id=_REMOTE)
_KEY: Final = key_id(values.SWARM, values.EPOCH, 0, 0)


def _holder() -> Any:
    """The DHT's side of a node without a network."""
    made = dht.RecordProtocol.__new__(dht.RecordProtocol)
    made.network = SimpleNamespace(outside=lambda _: False)  # type: ignore[assignment]
    made.records = RecordStore(values.ME.public_key, lambda: values.NOW)
    made.validator = RecordValidator(values.SWARM, lambda: values.NOW)
    made.node_id = DHTID.generate(source=b"me")
    made.routing_table = RoutingTable(made.node_id, 20, 5)
    made.node_info = dht_pb2.NodeInfo(node_id=made.node_id.to_bytes())
    made.wait_timeout = 1.0
    made._tasks = set()
    made.rate = RateLimit(scale=1 << 40)  # the fuzzer calls as often as it likes
    return made


RoutingTable: Final = sys.modules[DHTProtocol.__module__].RoutingTable
_dht_holder: Final = _holder()


@functools.cache
def _announced() -> list[bytes]:
    """Valid announcements to offer; signing each anew would take most of the time."""
    return [codec.encode_announcement(values.announcement(Random(n)), values.ME) for n in range(32)]


def _item(rng: Random) -> tuple[bytes, bytes, bytes, float]:
    """(key, subkey, value, expiry) of one record, valid or with one part that is not."""
    envelope = rng.choice(_announced())
    key, subkey, value = _KEY, packed(values.ME.public_key), packed(envelope)
    expiry = rng.choice((values.NOW + 60, values.NOW - 1, float("nan"), float("inf"), 1e300))
    kind = rng.randrange(8)
    if kind == 0:
        key = rng.choice((b"", bytes(20), bytes(21), random_bytes(rng, 100)))
    elif kind == 1:
        subkey = rng.choice((b"", packed(None), tokens(rng), packed(hostile(rng)), packed("x" * 32)))
    elif kind == 2:
        value = rng.choice((tokens(rng), packed(hostile(rng)), packed(bytes(5000)), mutate(rng, value)))
    elif kind == 3:
        value = packed(mutate(rng, envelope))
    return key, subkey, value, expiry


def _make_call(rng: Random) -> bytes:
    which = rng.choice(("ping", "store", "find"))
    info = dht_pb2.NodeInfo(
        node_id=rng.choice((b"", bytes(20), random_bytes(rng, 60), dht.node_id_of(_REMOTE).to_bytes()))
    )
    if which == "ping":
        call = dht_pb2.PingRequest(peer=info, validate=False)
    elif which == "find":
        keys = [rng.choice((_KEY, rng.randbytes(20), random_bytes(rng, 60))) for _ in range(rng.choice((0, 1, 8, 9)))]
        call = dht_pb2.FindRequest(keys=keys, peer=info)
    else:
        items = [_item(rng) for _ in range(rng.choice((1, 1, 8, 9)))]
        keys, subkeys, contents, expiries = (list(part) for part in zip(*items, strict=True))
        if rng.random() < 0.1:
            subkeys = subkeys[1:]
        call = dht_pb2.StoreRequest(keys=keys, subkeys=subkeys, values=contents, expiration_time=expiries, peer=info)
    data = call.SerializeToString()
    return which[:1].encode() + (mutate(rng, data) if rng.random() < 0.3 else data)


_CALLS: Final = {
    b"p": (dht_pb2.PingRequest, "rpc_ping"),
    b"s": (dht_pb2.StoreRequest, "rpc_store"),
    b"f": (dht_pb2.FindRequest, "rpc_find"),
}


def _read_call(data: bytes) -> None:
    kind, handler = _CALLS[data[:1]]
    request = kind.FromString(data[1:])
    if getattr(request, "validate", False):
        return  # it would ask back over the network

    async def call() -> Any:
        answer = await getattr(_dht_holder, handler)(request, _CONTEXT)
        await asyncio.sleep(0)  # what the call left behind is done too
        return answer

    answer = values.LOOP.run_until_complete(call())
    if len(answer.SerializeToString()) > 4 << 20:
        raise Broken("an answer is larger than hivemind carries")
    if set(_dht_holder.records._keys_of) - {values.ME.public_key}:
        raise Broken("a record lies under a key that did not sign it")


def _make_found(rng: Random) -> bytes:
    item = _item(rng)
    record = [values.ME.public_key, item[2], item[3]]
    body: Any = [float("inf"), values.NOW, [record, [rng.randbytes(32), packed(b"junk"), values.NOW + 60]]]
    if rng.random() < 0.5:
        body = twist(rng, body)
    content = packed(Ext(rng.choice((0x50, 0x50, 0x50, 0x40, 1)), packed(body)))
    if rng.random() < 0.3:
        content = rng.choice((tokens(rng), mutate(rng, content), packed(hostile(rng))))
    result = dht_pb2.FindResult(
        type=rng.choice((0, 1, 2, 2, 2)),
        value=content,
        expiration_time=values.NOW,
        nearest_node_ids=[random_bytes(rng, 40) for _ in range(rng.choice((0, 2, 30)))],
        nearest_peer_ids=[random_bytes(rng, 100) for _ in range(rng.choice((0, 2, 30)))],
    )
    info = dht_pb2.NodeInfo(node_id=random_bytes(rng, 40))
    data: bytes = dht_pb2.FindResponse(results=[result] * rng.choice((0, 1, 1, 1, 2)), peer=info).SerializeToString()
    return mutate(rng, data) if rng.random() < 0.3 else data


def _read_found(data: bytes) -> None:
    response = dht_pb2.FindResponse.FromString(data)
    key = DHTID.from_bytes(_KEY)

    async def rpc_find(*_: Any, **__: Any) -> Any:
        return response

    _dht_holder.get_stub = lambda _: SimpleNamespace(rpc_find=rpc_find)
    found = values.LOOP.run_until_complete(_dht_holder.call_find(_REMOTE, [key]))
    if found is None:
        return
    records, nearest = found[key]
    if any(record.public_key != values.ME.public_key for record in records) or len(nearest) > dht.NEIGHBOURS:
        raise Broken("a forged record or too many neighbours were believed")


# Hints and addresses


def _exchange() -> Exchange:
    network: Any = SimpleNamespace()
    where: Any = SimpleNamespace(schedule=None)
    return Exchange(
        network,
        where,
        values.ME,
        values.SWARM,
        SwarmSection(name=values.SWARM),
        max_age_seconds=1e12,
        seq_start=0,
        want=lambda: 0,
        book=PeerBook(),
        rng=random.Random(1),
    )


_hearing: Final = _exchange()


class _NoLimit:
    """A rate limit would let through sixteen inputs."""

    def take(self, peer_id: str, now: float) -> bool:
        return True


_hearing._hint_rate = _NoLimit()  # type: ignore[assignment]


@functools.cache
def _hinted() -> list[bytes]:
    return [codec.encode_announcement(values.announcement(Random(n), values.OTHER), values.OTHER) for n in range(32)]


def _make_hint(rng: Random) -> bytes:
    valid = rng.choice(_hinted())
    if rng.random() < 0.4:
        changed = packed(twist(rng, values.plain(values.announcement(rng, values.OTHER))))
        try:
            return codec._seal(b"A", changed, values.SWARM, values.OTHER).data
        except codec.Rejected:
            return changed
    return mutate(rng, valid, valid) if rng.random() < 0.8 else random_bytes(rng, 20_000)


def _read_hint(data: bytes) -> None:
    sender = values.OTHER.peer_id if data[-1:] < b"\xf0" else values.ME.peer_id
    _hearing._take_hint(sender, data)
    if set(_hearing._catalogue._offers) - {values.OTHER.peer_id}:
        raise Broken("a hint was believed of somebody else")


_ADDRESSES: Final = ("/ip4/192.0.2.7/tcp/4001", "/ip6/2001:db8::1/udp/4001/quic-v1", "/dns4/example.org/tcp/1")


def _make_provider(rng: Random) -> bytes:
    encoded = [encode_multiaddr(rng.choice(_ADDRESSES)) for _ in range(rng.choice((0, 1, 2, 3)))]
    encoded = [mutate(rng, one) if rng.random() < 0.5 else one for one in encoded]
    encoded += [random_bytes(rng, 60) for _ in range(rng.randrange(3))]
    peer = p2pd_pb2.PeerInfo(id=random_bytes(rng, 60), addrs=encoded)
    data: bytes = p2pd_pb2.DHTResponse(type=p2pd_pb2.DHTResponse.VALUE, peer=peer).SerializeToString()
    return mutate(rng, data) if rng.random() < 0.3 else data


def _read_provider(data: bytes) -> None:
    found = p2p._addresses(p2pd_pb2.DHTResponse.FromString(data).peer.addrs)
    if len(found) > p2p.MAX_DIALLED_ADDRESSES or not all(map(multiaddrs.is_multiaddr, found)):
        raise Broken("something that is no address, or too many of them, would be dialled")
    for address in found:
        multiaddrs.reach(address)


SURFACES: Final = (
    Surface(
        name="fetch-request",
        reads="the request on a fetch stream",
        make=_make_request,
        feed=_read_request,
        refusals=(EOFError,),
    ),
    Surface(
        name="fetch-answer",
        reads="a publisher's answer on a fetch stream",
        make=_make_answer,
        feed=_read_answer,
        refusals=(FetchFailed,),
    ),
    Surface(
        name="greeting",
        reads="the greeting on a stream",
        make=_make_greeting,
        feed=_read_greeting,
        refusals=(EOFError,),
    ),
    Surface(
        name="dht-call",
        reads="a ping, store or find of a stranger",
        make=_make_call,
        feed=_read_call,
        refusals=(DecodeError, ValueError, AssertionError),  # hivemind sends them back to the caller
    ),
    Surface(
        name="dht-answer",
        reads="a holder's answer to a search",
        make=_make_found,
        feed=_read_found,
        refusals=(DecodeError,),  # by hivemind, before this node sees the answer
    ),
    Surface(name="hint", reads="a gossip message", make=_make_hint, feed=_read_hint),
    Surface(
        name="provider",
        reads="a provider's addresses in libp2p's DHT",
        make=_make_provider,
        feed=_read_provider,
        refusals=(DecodeError,),  # p2pd writes this frame, a stranger the addresses in it
    ),
)
