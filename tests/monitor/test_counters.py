"""The swarm's numbers of a round."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

from sapo_node.monitor.counters import SwarmCounters


def test_counters_are_of_the_time_since_the_last_round_and_levels_as_they_are() -> None:
    swarm: Any = SimpleNamespace(stats=SimpleNamespace(bytes_in=10, bytes_out=5), peers=3)
    arrivals: Any = SimpleNamespace(counts=Counter(accept=2))
    counters = SwarmCounters(swarm, arrivals)
    first = counters()
    assert (first["bytes_in"], first["bytes_out"], first["groups_accepted"], first["peers"]) == (10, 5, 2, 3)
    swarm.stats = SimpleNamespace(bytes_in=4, bytes_out=9)  # the first began anew
    arrivals.counts.update(accept=1, reject=1)
    second = counters()
    assert (second["bytes_in"], second["bytes_out"]) == (4, 4)
    assert (second["groups_accepted"], second["groups_ignored"], second["groups_rejected"]) == (1, 0, 1)
