"""When to announce and where to look: the decisions of discovery, without I/O. Times are seconds since 1970."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sapo_node.swarm import protocol
from sapo_node.swarm.records import latest_expiry

REWRITE_SECONDS: Final = 3.0
"""Shortest time between two announcements: each costs the DHT some 30 messages."""

RECORD_SECONDS: Final = 3.0 * protocol.EPOCH_SECONDS
"""How long a record lives. It is rewritten in each epoch, so it need not outlive the epochs that readers open."""

RECENT_EPOCHS: Final = 2
"""Epochs that are read. Nodes rewrite their announcement in each epoch, so older ones hold nothing more."""


class AnnouncePlan:
    """When the announcement is written next: after a publish, at most every REWRITE_SECONDS, and in each new epoch
    while a batch is young enough to be listed."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._dirty = False
        self._last = -math.inf
        self._expiry = -math.inf
        self._new_epoch_at = math.inf

    def published(self) -> None:
        """There is a batch that no announcement lists yet."""
        self._dirty = True

    def due(self, fresh: bool) -> float:
        """When to write next, `inf` if not at all; `fresh`: whether there is a batch to list."""
        if not fresh:
            return math.inf
        return max(self._last + REWRITE_SECONDS, -math.inf if self._dirty else self._new_epoch_at)

    def started(self, now: float) -> float:
        """Writing begins: what is published from here on needs another announcement. Returns when the record expires:
        strictly later than any before, or holders would refuse it."""
        self._dirty = False
        self._last = now
        next_epoch = (protocol.epoch_of(now) + 1) * protocol.EPOCH_SECONDS
        # Not everyone at the same instant; readers look at the previous epoch too.
        self._new_epoch_at = next_epoch + self._rng.uniform(0.0, REWRITE_SECONDS)
        later = max(now + RECORD_SECONDS, self._expiry + 0.01)
        self._expiry = min(later, latest_expiry(protocol.epoch_of(now)))  # binds only after a clock was set far back
        return self._expiry

    def failed(self) -> None:
        """The DHT did not take it: try again after REWRITE_SECONDS."""
        self._dirty = True


@dataclass(frozen=True, slots=True)
class Shard:
    """One place in the DHT where announcements lie."""

    epoch: int
    k: int
    prefix: int


def choose_shards(epoch: int, k: int, readable: Sequence[int], rng: random.Random) -> list[Shard]:
    """What to read in one look: a random shard of each recent epoch at this node's `k`, and one at another of the
    `readable` values of k, since others may have split earlier or later."""
    recent = [max(0, epoch - age) for age in range(RECENT_EPOCHS)]
    chosen = [(e, k) for e in recent]
    if others := [other for other in readable if other != k]:
        chosen.append((rng.choice(recent), rng.choice(others)))
    return [Shard(e, bits, rng.randrange(1 << bits)) for e, bits in chosen]
