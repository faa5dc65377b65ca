"""Attackers of the network: floods of streams, of hints, and of what does not belong into the DHT.

Each maker prepares its attack and returns one operation; the process repeats it as fast as it may. Kinds of operations
take turns at random. All addresses that are dialled or named are 127.0.0.1's.
"""

import asyncio
import contextlib
import os
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from hostile_bench.member import Member
from sapo_node.rollouts import codec
from sapo_node.rollouts.schema import Listing
from sapo_node.swarm import protocol
from sapo_node.swarm.hivemind_light import DHTID, dht_pb2, p2pd_pb2
from sapo_node.swarm.p2p import MAX_HINT_BYTES
from sapo_node.swarm.records import key_id

if TYPE_CHECKING:
    from hostile_bench.attacker import Job, Operation

HELD: Final = 128  # connections and streams that an attacker holds open; the oldest goes for a new one
NOWHERE: Final = [f"/ip4/127.0.0.1/tcp/{port}" for port in range(1, 9)]  # where nobody listens
HUGE_HINT_BYTES: Final = 256 * 1024
CALL_SECONDS: Final = 3.0
HUNDRED_YEARS: Final = 100 * 365 * 86400.0


def somewhere() -> Listing:
    """A batch that does not exist."""
    return Listing(os.urandom(32), random.randrange(200, protocol.MAX_ENVELOPE_BYTES), 32, time.time())


class Held:
    """Writers that are held open, within bounds."""

    def __init__(self) -> None:
        self.writers: deque[asyncio.StreamWriter] = deque()

    def hold(self, writer: asyncio.StreamWriter) -> None:
        """Keep one more."""
        self.writers.append(writer)
        while len(self.writers) > HELD:
            self.writers.popleft().close()


async def collect(member: Member, heard: deque[bytes]) -> None:
    """Keep the newest hints of others."""
    async with contextlib.aclosing(member.network.subscribe(protocol.hint_topic(member.swarm))) as hints:
        async for _, data in hints:
            heard.append(data)


async def streams(job: "Job", member: Member, tasks: asyncio.TaskGroup) -> "Operation":
    """Connections and streams that say nothing or too slowly, requests without end, and fetches answered by lies."""
    held = Held()
    heard: deque[bytes] = deque(maxlen=16)
    tasks.create_task(collect(member, heard))
    member.answer = lie

    async def connection() -> None:
        _, _, host, _, port, *_ = random.choice(member.nodes).split("/")
        assert host == "127.0.0.1"
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(os.urandom(random.choice((0, 1, 64, 4096))))
        held.hold(writer)

    async def silent() -> None:
        name = random.choice((protocol.FETCH_PROTOCOL, protocol.HELLO_PROTOCOL))
        _, writer = await member.network.open_stream(random.choice(member.victims), name)
        writer.write(os.urandom(random.randrange(32)))  # less than a request
        held.hold(writer)

    async def drip() -> None:
        if held.writers:  # a byte now and then, so that a pause alone does not end a stream
            random.choice(held.writers).write(b"\0")

    async def greet() -> None:
        reader, writer = await member.network.open_stream(random.choice(member.victims), protocol.HELLO_PROTOCOL)
        writer.write(os.urandom(38) * 100)
        await read_and_close(reader, writer)

    async def ask() -> None:
        victim, wanted = random.choice(member.victims), os.urandom(32)
        if heard and random.random() < 0.9:  # of a batch that is listed, again and again
            key, announced = codec.open_announcement(random.choice(heard), member.swarm)
            victim = next((one for one in member.victims if _is(one, key)), victim)
            wanted = announced.batches[0].content_id if announced.batches else wanted
        reader, writer = await member.network.open_stream(victim, protocol.FETCH_PROTOCOL)
        writer.write(wanted)
        await read_and_close(reader, writer)

    async def bait() -> None:
        await member.announce([somewhere() for _ in range(3)])

    weighted: list[Callable[[], Awaitable[None]]] = [connection, silent, silent, drip, greet, ask, ask, ask, bait]
    return lambda: random.choice(weighted)()


def _is(peer_id: str, public_key: bytes) -> bool:
    from sapo_node.identity import peer_id_from_public_key

    return peer_id == peer_id_from_public_key(public_key)


async def read_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Wait for the first bytes of an answer."""
    try:
        async with asyncio.timeout(CALL_SECONDS):
            await reader.read(65536)
    finally:
        writer.close()


async def lie(content_id: bytes, writer: asyncio.StreamWriter) -> None:
    """Answer a fetch as no honest node does."""
    match random.randrange(4):
        case 0:  # four gigabytes, in words
            writer.write(b"\0\xff\xff\xff\xff" + os.urandom(1024))
        case 1:  # another length than announced, and no end
            writer.write(b"\0" + (300).to_bytes(4, "big"))
            for _ in range(256):
                writer.write(os.urandom(65536))
                await writer.drain()
        case 2:  # a byte a second
            for _ in range(30):
                writer.write(b"\0")
                await writer.drain()
                await asyncio.sleep(1.0)
        case _:  # half an answer, then silence
            writer.write(b"\0\0")
            await asyncio.sleep(30.0)
    await writer.drain()


async def hints(job: "Job", member: Member, tasks: asyncio.TaskGroup) -> "Operation":
    """Hints to nowhere, too large, made of noise, and others' hints repeated."""
    heard: deque[bytes] = deque(maxlen=64)
    tasks.create_task(collect(member, heard))
    topic = protocol.hint_topic(member.swarm)

    async def nowhere() -> None:
        made = member.announcement([somewhere() for _ in range(3)], random.sample(NOWHERE, 4))
        await member.network.publish(topic, codec.encode_announcement(made, member.identity))

    async def oversized() -> None:
        request = p2pd_pb2.PSRequest(type=p2pd_pb2.PSRequest.PUBLISH, topic=topic, data=os.urandom(HUGE_HINT_BYTES))
        await member.network._ask("publish", CALL_SECONDS, type=p2pd_pb2.Request.PUBSUB, pubsub=request)

    async def noise() -> None:
        await member.network.publish(topic, os.urandom(random.randrange(1, MAX_HINT_BYTES)))

    async def replay() -> None:
        await member.network.publish(topic, random.choice(heard) if heard else b"nothing heard yet")

    async def one() -> None:
        await random.choices((nowhere, noise, replay, oversized), (10, 5, 10, 1))[0]()

    return one


async def dht(job: "Job", member: Member, tasks: asyncio.TaskGroup) -> "Operation":
    """Records that no holder should keep, and questions without number, by hivemind's own calls."""

    def key(ahead: int = 0) -> bytes:
        return key_id(member.swarm, protocol.epoch_of(time.time()) + ahead, 0, 0)

    def good() -> bytes:
        made = member.announcement([somewhere()])
        return msgspec.msgpack.encode(codec.encode_announcement(made, member.identity))

    own = msgspec.msgpack.encode(member.identity.public_key)
    nested = msgspec.msgpack.encode(msgspec.msgpack.Ext(0x40, bytes(900)))

    async def store(keys: list[bytes], subkeys: list[bytes], values: list[bytes], expiry: float) -> None:
        stub = await member.stub(random.choice(member.victims))
        request = dht_pb2.StoreRequest(
            keys=keys,
            subkeys=subkeys,
            values=values,
            expiration_time=[expiry] * len(keys),
            in_cache=[False] * len(keys),
            peer=dht_pb2.NodeInfo(node_id=member.dht._protocol.node_id.to_bytes()),
        )
        await asyncio.wait_for(stub.rpc_store(request), CALL_SECONDS)

    async def junk() -> None:
        await store([os.urandom(20)] * 8, [own] * 8, [os.urandom(900)] * 8, time.time() + 60.0)

    async def huge() -> None:
        await store([key()], [own], [os.urandom(500_000)], time.time() + 60.0)

    async def far_expiry() -> None:
        await store([key()], [own], [good()], time.time() + HUNDRED_YEARS)

    async def foreign_subkey() -> None:
        await store([key()] * 4, [msgspec.msgpack.encode(os.urandom(32)) for _ in range(4)], [good()] * 4, _soon())

    async def plain_value() -> None:
        await store([key()], [b""], [good()], _soon() + 100.0)

    async def text_subkey() -> None:
        await store([key()], [msgspec.msgpack.encode("subkey")], [nested], _soon())

    async def other_epoch() -> None:
        await store([key(-1), key(1), key(9)], [own] * 3, [good()] * 3, _soon())

    async def many_keys() -> None:
        await store([os.urandom(20)] * 1000, [own] * 1000, [b"\xc4\0"] * 1000, _soon())

    async def find() -> None:
        stub = await member.stub(random.choice(member.victims))
        keys = [key(), *(DHTID.generate().to_bytes() for _ in range(7))]
        await asyncio.wait_for(stub.rpc_find(dht_pb2.FindRequest(keys=keys)), CALL_SECONDS)

    weighted: list[Callable[[], Awaitable[Any]]] = [junk, huge, far_expiry, foreign_subkey, plain_value]
    weighted += [text_subkey, other_epoch, many_keys, find, find]

    async def one() -> None:
        await random.choice(weighted)()

    return one


def _soon() -> float:
    return time.time() + 2 * protocol.EPOCH_SECONDS


KINDS: Final = {"streams": streams, "hints": hints, "dht": dht}
