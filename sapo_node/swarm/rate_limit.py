"""How often peers may ask: for each of them, and for all together, since identities are free.

The limit for all would be a switch by which a few dozen free identities silence everybody. So it is asked only for what
costs something (what that is, the caller says), and it has two halves, one for strangers and one for peers that gave
something lately. Each may use what the other leaves. Neither can use up the other's: strangers cannot silence those
whose groups this node takes, nor these a newcomer. To give something costs little, addresses do not come as easily, so
of the known half the peers of one network have a part together.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

BURST: Final = 16
REFILL_PER_SECOND: Final = 4.0
"""Requests a peer may make at once, and from then on. An honest one fetches each listed batch (8) once."""

NETWORK: Final = 2
"""So many times as much the known peers of one network have of the known half; beyond it they count as strangers."""

TOTAL_BURST: Final = 256
TOTAL_REFILL_PER_SECOND: Final = 64.0
"""The same for all peers together: identities are free, so a limit for each is none. Many times what a node's own
batches are worth to an honest swarm, and a bound for a link and for checking signatures."""

LENT: Final = 0.5
"""Part of a half's burst that the other half may use. At 1 it could hold it at nothing."""

MAX_BUCKETS: Final = 1024
"""Peers, and networks, whose rate is remembered; the least recently heard is forgotten."""


def nobody(peer_id: str) -> str:
    """Every peer is a stranger."""
    return ""


@dataclass(slots=True)
class _Bucket:
    """Requests that are left, of `burst` at most; `per_second` come back. A new one is full."""

    burst: float
    per_second: float
    tokens: float = 0.0
    since: float | None = None

    def left(self, now: float) -> float:
        if self.since is None:
            return self.burst
        return min(self.burst, self.tokens + (now - self.since) * self.per_second)

    def pay(self, tokens: float, now: float) -> None:
        self.tokens, self.since = self.left(now) - tokens, now


class RateLimit:
    """Token buckets, `scale` times as large as the constants above say. `known_as` gives the network of a peer that
    gave something lately, and nothing for a stranger. Times are of a monotonic clock."""

    def __init__(self, known_as: Callable[[str], str] = nobody, scale: int = 1) -> None:
        self._known_as = known_as
        self._scale = scale
        self._peers: OrderedDict[str, _Bucket] = OrderedDict()
        self._networks: OrderedDict[str, _Bucket] = OrderedDict()
        half = scale / 2
        self._known, self._strangers = (
            _Bucket(TOTAL_BURST * half, TOTAL_REFILL_PER_SECOND * half) for _ in ("known", "strangers")
        )

    def take(self, peer_id: str, now: float) -> bool:
        """Whether this peer may ask now for something that costs this node."""
        # What a peer asks beyond its own share takes nothing from the others'.
        paying = self._paying(peer_id, now)
        if not paying or not self.take_own(peer_id, now):
            return False
        for bucket in paying:
            bucket.pay(1.0, now)
        return True

    def take_own(self, peer_id: str, now: float) -> bool:
        """Whether this peer may ask now for something that costs next to nothing, so that none of it keeps others
        out."""
        bucket = self._of(self._peers, peer_id, 1)
        if granted := bucket.left(now) >= 1.0:
            bucket.pay(1.0, now)
        return granted

    def owe(self, peer_id: str, tokens: float, now: float) -> None:
        """What was granted to this peer cost so much more than one request: it waits until that is paid."""
        self._of(self._peers, peer_id, 1).pay(tokens, now)
        network = self._known_as(peer_id)
        (self._known if network else self._strangers).pay(tokens, now)
        if network:
            self._of(self._networks, network, NETWORK).pay(tokens, now)

    def _paying(self, peer_id: str, now: float) -> list[_Bucket]:
        """What of the total a request of this peer is paid from; nothing if there is too little left."""
        network = self._known_as(peer_id)
        if network and (part := self._of(self._networks, network, NETWORK)).left(now) >= 1.0:
            half = self._half(self._known, self._strangers, now)
            return [half, part] if half else []
        half = self._half(self._strangers, self._known, now)
        return [half] if half else []

    def _half(self, own: _Bucket, other: _Bucket, now: float) -> _Bucket | None:
        if own.left(now) >= 1.0:
            return own
        lends = other.left(now) >= other.burst * (1 - LENT) + 1.0 and own.left(now) >= 0.0  # nothing to who owes
        return other if lends else None

    def _of(self, table: OrderedDict[str, _Bucket], name: str, times: int) -> _Bucket:
        if (bucket := table.get(name)) is None:
            scale = self._scale * times
            bucket = table[name] = _Bucket(BURST * scale, REFILL_PER_SECOND * scale)
            if len(table) > MAX_BUCKETS:
                table.popitem(last=False)
        table.move_to_end(name)
        return bucket
