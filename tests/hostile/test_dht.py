"""Attacks on the DHT beyond those of tests/swarm/test_dht.py, which speak to real holders."""

import asyncio
import os
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from sapo_node.commands import bootstrap
from sapo_node.swarm import dht, hivemind_light, service
from sapo_node.swarm.dht import BEAM, NEIGHBOURS, SwarmDHT
from sapo_node.swarm.hivemind_light import DHTID, PeerID, dht_pb2
from sapo_node.swarm.protocol import MAX_SHARD_BITS
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
