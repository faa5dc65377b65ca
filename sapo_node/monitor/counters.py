"""RoundRecord's fields on the swarm: what was counted between two rounds, and what is so now."""

from sapo_node.rollouts.arrivals import Arrivals
from sapo_node.swarm.service import SwarmService


class SwarmCounters:
    """Reads the counters of a node's swarm side, once a round."""

    def __init__(self, swarm: SwarmService, arrivals: Arrivals) -> None:
        self._swarm, self._arrivals = swarm, arrivals
        self._last: dict[str, int] = {}

    def __call__(self) -> dict[str, int]:
        """Levels as they are, counters since the last call. A counter that began anew counts from 0, never below."""
        stats, counts = self._swarm.stats, self._arrivals.counts
        now = {
            "bytes_in": stats.bytes_in,
            "bytes_out": stats.bytes_out,
            "groups_accepted": counts["accept"],
            "groups_ignored": counts["ignore"],
            "groups_rejected": counts["reject"],
        }
        before = {name: self._last.get(name, 0) for name in now}
        since = {name: value - before[name] if value >= before[name] else value for name, value in now.items()}
        self._last = now
        return {**since, "peers": self._swarm.peers}
