"""How often peers may ask: for each of them, and for all together, since identities are free.

The limit for all would be a switch by which a few dozen free identities silence everybody. So it is asked only for what
costs something (what that is, the caller says), and strangers may use no more than its upper half: peers whose groups
this node accepted are heard while others flood it.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

BURST: Final = 16
REFILL_PER_SECOND: Final = 4.0
"""Requests a peer may make at once, and from then on. An honest one fetches each listed batch (8) once."""

TOTAL_BURST: Final = 256
TOTAL_REFILL_PER_SECOND: Final = 64.0
"""The same for all peers together: identities are free, so a limit for each is none. Many times what a node's own
batches are worth to an honest swarm, and a bound for a link and for checking signatures."""

KEPT_FOR_KNOWN: Final = 0.5
"""Part of TOTAL_BURST that strangers leave alone. At 0 they could hold the rest at nothing."""

MAX_BUCKETS: Final = 1024
"""Peers whose rate is remembered; the least recently heard is forgotten."""


def nobody(peer_id: str) -> bool:
    """Every peer is a stranger."""
    return False


class RateLimit:
    """Token buckets, one for each peer (`burst` requests at once, `per_second` from then on) and one for all, `scale`
    times as large as the constants above say. `known` tells who is no stranger. Times are of a monotonic clock."""

    def __init__(self, known: Callable[[str], bool] = nobody, scale: int = 1) -> None:
        self._known = known
        self._scale = scale
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # peer id -> tokens, at what time
        self._total: tuple[float, float] | None = None

    def take(self, peer_id: str, now: float) -> bool:
        """Whether this peer may ask now for something that costs this node."""
        # What a peer asks beyond its own share takes nothing from the others'.
        if not self._affords(peer_id, now) or not self.take_own(peer_id, now):
            return False
        self._total = (self._left(now) - 1.0, now)
        return True

    def take_own(self, peer_id: str, now: float) -> bool:
        """Whether this peer may ask now for something that costs next to nothing, so that none of it keeps others
        out."""
        tokens = self._own(peer_id, now)
        self._set_own(peer_id, tokens - 1.0 if tokens >= 1.0 else tokens, now)
        return tokens >= 1.0

    def owe(self, peer_id: str, tokens: float, now: float) -> None:
        """What was granted to this peer cost so much more than one request: it waits until that is paid."""
        self._set_own(peer_id, self._own(peer_id, now) - tokens, now)
        self._total = (self._left(now) - tokens, now)

    def _affords(self, peer_id: str, now: float) -> bool:
        kept = 0.0 if self._known(peer_id) else KEPT_FOR_KNOWN * TOTAL_BURST * self._scale
        return self._left(now) >= kept + 1.0

    def _own(self, peer_id: str, now: float) -> float:
        return _refilled(self._buckets.get(peer_id), now, BURST * self._scale, REFILL_PER_SECOND * self._scale)

    def _set_own(self, peer_id: str, tokens: float, now: float) -> None:
        self._buckets[peer_id] = (tokens, now)
        self._buckets.move_to_end(peer_id)
        if len(self._buckets) > MAX_BUCKETS:
            self._buckets.popitem(last=False)

    def _left(self, now: float) -> float:
        return _refilled(self._total, now, TOTAL_BURST * self._scale, TOTAL_REFILL_PER_SECOND * self._scale)


def _refilled(bucket: tuple[float, float] | None, now: float, burst: int, per_second: float) -> float:
    """Tokens in a bucket now; an unknown one is full."""
    if bucket is None:
        return float(burst)
    tokens, since = bucket
    return min(float(burst), tokens + (now - since) * per_second)
