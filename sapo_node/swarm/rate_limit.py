"""How often peers may ask: for each of them, and for all together, since identities are free."""

from collections import OrderedDict
from typing import Final

BURST: Final = 16
REFILL_PER_SECOND: Final = 4.0
"""Requests a peer may make at once, and from then on. An honest one fetches each listed batch (8) once."""

TOTAL_BURST: Final = 256
TOTAL_REFILL_PER_SECOND: Final = 64.0
"""The same for all peers together: identities are free, so a limit for each is none. Many times what a node's own
batches are worth to an honest swarm, and a bound for a link and for checking signatures."""

MAX_BUCKETS: Final = 1024
"""Peers whose rate is remembered; the least recently heard is forgotten."""


class RateLimit:
    """Token buckets, one for each peer (BURST requests at once, REFILL_PER_SECOND from then on) and one for all."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # peer id -> tokens, at what time
        self._total: tuple[float, float] | None = None

    def take(self, peer_id: str, now: float) -> bool:
        """Whether this peer may ask now; `now` from a monotonic clock."""
        own = _refilled(self._buckets.pop(peer_id, None), now, BURST, REFILL_PER_SECOND)
        total = _refilled(self._total, now, TOTAL_BURST, TOTAL_REFILL_PER_SECOND)
        # What a peer asks beyond its own share takes nothing from the others'.
        cost = 1.0 if own >= 1.0 and total >= 1.0 else 0.0
        self._buckets[peer_id], self._total = (own - cost, now), (total - cost, now)
        if len(self._buckets) > MAX_BUCKETS:
            self._buckets.popitem(last=False)
        return cost > 0


def _refilled(bucket: tuple[float, float] | None, now: float, burst: int, per_second: float) -> float:
    """Tokens in a bucket now; an unknown one is full."""
    if bucket is None:
        return float(burst)
    tokens, since = bucket
    return min(float(burst), tokens + (now - since) * per_second)
