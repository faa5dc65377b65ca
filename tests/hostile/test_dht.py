"""Attacks on the DHT beyond those of tests/swarm/test_dht.py, which speak to real holders."""

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sapo_node.commands import bootstrap
from sapo_node.swarm import dht, hivemind_light, service
from sapo_node.swarm.dht import BEAM, NEIGHBOURS, SwarmDHT
from sapo_node.swarm.hivemind_light import DHTID, PeerID, RoutingTable, dht_pb2
from sapo_node.swarm.protocol import MAX_RECORD_BYTES, MAX_SHARD_BITS, MAX_SUBKEYS
from sapo_node.swarm.rate_limit import BURST, RateLimit
from sapo_node.swarm.records import ShardSchedule


class Maze:
    """A protocol whose every answer names twenty nodes that nobody has heard of, nearer to the key each time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.asked = 0
        self.node_id = DHTID.generate(source=b"me")
        start = {DHTID.generate(): PeerID(os.urandom(34)) for _ in range(3)}
        self.routing_table = SimpleNamespace(get_nearest_neighbors=lambda *_, **__: list(start.items()))

    async def call_find(self, peer: Any, keys: Sequence[Any]) -> Any:
        self.asked += 1
        await asyncio.sleep(self.seconds)
        near = (1 << 150) // (self.asked + 1)
        return {
            key: ([], {DHTID((int(key) ^ (near + n)) % (1 << 160)): PeerID(os.urandom(34)) for n in range(NEIGHBOURS)})
            for key in keys
        }


def search(maze: Maze) -> float:
    """Seconds of one search of a node that stands in the maze."""
    network: Any = SimpleNamespace(outside=lambda _: False)
    made = SwarmDHT.__new__(SwarmDHT)
    made._network, made._protocol, made._suspended = network, maze, {}  # type: ignore[assignment]
    started = time.monotonic()
    asyncio.run(made._search({DHTID.generate(source=b"key"): {}}))
    return time.monotonic() - started


def test_a_search_led_from_stranger_to_stranger_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hope: poisoned routing, each answer naming nearer nodes that do not exist, keeps a search busy for ever."""
    monkeypatch.setattr(dht, "SEARCH_SECONDS", 0.4)
    maze = Maze(seconds=0.01)
    assert search(maze) < 2.0
    assert maze.asked > BEAM, "it was led on, and not just finished"


def test_neighbours_beyond_a_bucket_are_not_believed() -> None:
    """Hope: one answer names ten thousand nodes, and the search dials them all, or a victim, for the attacker."""
    holder = dht.RecordProtocol.__new__(dht.RecordProtocol)
    holder.network = SimpleNamespace(outside=lambda _: False)  # type: ignore[assignment]
    answer = dht_pb2.FindResult(nearest_peer_ids=[os.urandom(38) for _ in range(10_000)])
    assert len(holder._nearest(answer)) <= NEIGHBOURS
    answer = dht_pb2.FindResult(nearest_peer_ids=[os.urandom(100_000)])
    assert holder._nearest(answer) == {}


def test_a_bootstrap_runs_the_same_checks() -> None:
    """Hope: the nodes that everybody joins by store what others refuse, because they run another DHT."""
    assert "DHTNode" not in hivemind_light.__all__, "hivemind's own storage is nowhere to be had"
    assert service.SwarmDHT is SwarmDHT
    assert bootstrap.SwarmService is service.SwarmService, "a bootstrap is the same service with another role"


def sizes(**records: int) -> list[int]:
    """Records in a shard of each k, by `k3=40`."""
    return [records.get(f"k{k}", 0) for k in range(MAX_SHARD_BITS + 1)]


def test_a_few_records_at_another_k_lead_no_newcomer_away() -> None:
    """Hope: one record at k = 0 is the first thing that a newcomer finds, and it stays there, where nobody else is."""
    for fakes in ({"k0": 1}, {"k0": 15, "k1": 15}, {"k0": 200}, {"k16": 1}, {"k9": 15, "k16": 15}):
        schedule = ShardSchedule()
        schedule.probed(sizes(k3=40, **fakes))
        assert schedule.k == 3, fakes


def test_a_node_that_was_led_away_comes_back() -> None:
    """Hope: who once settled at k = 0 is kept there for ever by a record of the attacker in each epoch."""
    schedule = ShardSchedule()
    schedule.probed(sizes(k0=1))
    while not schedule.due():
        assert schedule.end_of_epoch([1]) == 0
    schedule.probed(sizes(k0=1, k3=40))
    assert schedule.k == 3


def test_many_records_at_a_high_k_split_no_small_swarm() -> None:
    """Hope: keys enough to fill the shards of a larger k draw newcomers there, and the others never read them."""
    newcomer, member = ShardSchedule(), ShardSchedule()
    for schedule, own in ((newcomer, 6), (member, 5)):
        schedule.probed(sizes(k0=own))
        schedule.probed(sizes(k0=own, k6=20))
    assert newcomer.k in member.readable()
    assert member.k in newcomer.readable()
    late = ShardSchedule()
    late.probed(sizes(k0=6, k6=20))
    assert {0, 6} <= set(late.readable()) & set(member.readable()), "wherever it settled"


class Full:
    """A store in which a full shard of the largest records lies under every key."""

    def get(self, key: bytes) -> list[Any]:
        return [
            SimpleNamespace(public_key=n.to_bytes(32, "big"), envelope=bytes(MAX_RECORD_BYTES), expires_at=time.time())
            for n in range(MAX_SUBKEYS)
        ]

    def store(self, key: bytes, record: Any) -> bool:
        return True


class Validator:
    """Counts the records that are looked at, each at the price of a signature check."""

    checked = 0

    def validate(self, *record: Any) -> None:
        self.checked += 1


def holder(known: Sequence[str] = ()) -> Any:
    """The answering side of a node without a network."""
    made: Any = dht.RecordProtocol.__new__(dht.RecordProtocol)
    made.network = SimpleNamespace(outside=lambda _: False)
    made.records, made.validator = Full(), Validator()
    made.routing_table = SimpleNamespace(get_nearest_neighbors=lambda *_, **__: [])
    made.node_info = dht_pb2.NodeInfo(node_id=bytes(20))
    made.rate = RateLimit(lambda peer_id: peer_id if peer_id in known else "", dht.RATE_SCALE)
    return made


def caller(number: int) -> Any:
    return SimpleNamespace(remote_id=PeerID(b"\0\x24\x08\x01\x12\x20" + number.to_bytes(32, "big")))


async def find(made: Any, number: int, keys: list[bytes]) -> int:
    """Bytes of the answer to one caller, 0 for a refusal."""
    try:
        return int((await made.rpc_find(dht_pb2.FindRequest(keys=keys), caller(number))).ByteSize())
    except PermissionError:
        return 0


def test_keys_that_call_once_each_do_not_fill_the_memory() -> None:
    """Hope: every new key that was heard once is remembered for ever, and every look at the table gets slower."""
    made = holder()
    made.node_id = DHTID.generate(source=b"me")
    made.routing_table = RoutingTable(made.node_id, NEIGHBOURS, 5)
    asked: list[Any] = []
    made.spawn = lambda ping: (asked.append(ping), ping.close())
    sizes = []
    for number in range(6000):
        peer = caller(number).remote_id
        made._saw(peer, dht.node_id_of(peer).to_bytes())
        if number % 7 == 0 and (oldest := next(iter(made.routing_table.uid_to_peer_id.values()), None)):
            made._missed(oldest, "it is gone")
        sizes.append(len(made.routing_table.uid_to_peer_id))
    buckets = made.routing_table.buckets
    assert asked, "full buckets were met"
    assert max(sizes) <= 2 * NEIGHBOURS * len(buckets) < 2000
    assert sum(len(bucket.nodes_requested_for_ping) for bucket in buckets) <= NEIGHBOURS * len(buckets)
    assert len(made.routing_table.peer_id_to_uid) == sizes[-1]


def test_the_same_key_several_times_in_a_call_is_refused() -> None:
    """Hope: one full key, eight times in a request of 176 bytes, is answered with 1.7 MiB."""
    with pytest.raises(ValueError, match="each of them once"):
        asyncio.run(find(holder(), 1, [bytes(20)] * 8))


def test_searching_without_a_pause_is_slowed_to_a_megabyte_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hope: calls that cost their sender nothing take the holder's link and its loop."""
    keys = [n.to_bytes(20, "big") for n in range(8)]

    async def flood(callers: int, seconds: int) -> int:
        made, received = holder(), 0
        for tick in range(seconds * 10):
            monkeypatch.setattr(time, "monotonic", lambda tick=tick: tick * 0.1)
            received += sum([await find(made, n, keys) for n in range(callers)])
        return received

    one = asyncio.run(flood(1, 30)) / 30
    assert one < 2 << 20
    assert asyncio.run(flood(100, 2)) < 64 << 20, "of a hundred identities, with their burst"


def test_searches_of_many_identities_keep_no_known_peer_out() -> None:
    """Hope: five thousand calls under fresh keys use up what a node answers, and its swarm finds nothing there."""
    peer = caller(1).remote_id.to_base58()

    async def body() -> None:
        made = holder([peer])
        refused = [await find(made, n, [bytes(20)]) == 0 for n in range(1000, 6000)]
        assert refused[-1]
        assert await find(made, 1, [bytes(20)])

    asyncio.run(body())


def test_storing_forged_records_without_a_pause_costs_few_signature_checks() -> None:
    """Hope: eight forged records a call, call after call, keep the holder's processor busy with signatures."""

    async def body() -> int:
        made = holder()
        value = msgspec.msgpack.encode(bytes(100))
        request = dht_pb2.StoreRequest(
            keys=[bytes(20)] * 8,
            subkeys=[msgspec.msgpack.encode(bytes(32))] * 8,
            values=[value] * 8,
            expiration_time=[1.0] * 8,
        )
        for _ in range(500):
            with suppress(PermissionError):
                await made.rpc_store(request, caller(1))
        return int(made.validator.checked)

    assert 8 <= asyncio.run(body()) <= 2 * dht.RATE_SCALE * BURST
