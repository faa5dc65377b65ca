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
