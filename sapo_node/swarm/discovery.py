"""When to announce and where to look: the decisions of discovery, without I/O."""

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


USELESS_HINTS: Final = 300
USELESS_SHARE: Final = 0.8
FLOOD_SECONDS: Final = 10.0
"""So many hints without news in this time, and so large a part of all, are a flood. Each message costs p2pd a signature
check and is passed on before this node sees it: the way to pay no more for them is not to subscribe. A large honest
swarm stays below: of what it sends beyond this node's rate the rest is news."""

QUIET_SECONDS: Final = 30.0
MAX_QUIET_SECONDS: Final = 120.0
"""How long a node does without hints after a flood: the first time, and at most, doubling while each time is soon
followed by the next flood. Until then announcements come by the DHT, some seconds later. Longer would be cheaper, and
make it cheap to keep everybody from hearing hints."""


class HintFlood:
    """Whether hints are worth what they cost. `tick` comes from a monotonic clock."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._useless = self._news = 0
        self._since = -math.inf  # of the window in which they are counted
        self._quiet = QUIET_SECONDS
        self._back = -math.inf  # since when there are hints again

    def heard(self, news: bool, tick: float) -> bool:
        """One more hint; returns whether they are a flood by now."""
        if tick - self._since >= FLOOD_SECONDS:
            self._useless, self._news, self._since = 0, 0, tick
        self._useless += not news
        self._news += news
        return not news and self._useless >= max(USELESS_HINTS, USELESS_SHARE * (self._useless + self._news))

    def quiet(self, tick: float) -> float:
        """A flood: seconds to do without hints, a tenth more or less, so that not all nodes are back at once."""
        soon = tick - self._back < 2 * self._quiet
        self._quiet = min(MAX_QUIET_SECONDS, 2 * self._quiet) if soon else QUIET_SECONDS
        pause = self._quiet * self._rng.uniform(0.9, 1.1)
        self._back = tick + pause
        self._useless = self._news = 0
        return pause


class AnnouncePlan:
    """When the announcement is written next: after a publish, at most every REWRITE_SECONDS, and in each new epoch
    while a batch is young enough to be listed.

    `now` is the time of day, which tells the epoch and may be set at any moment; `tick` comes from a monotonic clock.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._dirty = False
        self._last_tick = -math.inf
        self._expiry = -math.inf
        self._epoch: int | None = None  # in which it was written last
        self._delay = 0.0

    def published(self) -> None:
        """There is a batch that no announcement lists yet."""
        self._dirty = True

    def pause(self, fresh: bool, now: float, tick: float) -> float:
        """Seconds until the next is to be written, `inf` if none is; `fresh`: whether there is a batch to list."""
        if not fresh:
            return math.inf
        return max(0.0, self._last_tick + REWRITE_SECONDS - tick, 0.0 if self._dirty else self._until_new_epoch(now))

    def _until_new_epoch(self, now: float) -> float:
        if self._epoch is None:
            return math.inf
        if protocol.epoch_of(now) < self._epoch:  # the clock was set back: this epoch has no announcement of ours
            return 0.0
        return (self._epoch + 1) * protocol.EPOCH_SECONDS + self._delay - now

    def started(self, now: float, tick: float) -> float:
        """Writing begins: what is published from here on needs another announcement. Returns when the record expires:
        strictly later than any before, or holders would refuse it."""
        self._dirty = False
        self._last_tick = tick
        self._epoch = protocol.epoch_of(now)
        # Not everyone at the same instant; readers look at the previous epoch too.
        self._delay = self._rng.uniform(0.0, REWRITE_SECONDS)
        later = max(now + RECORD_SECONDS, self._expiry + 0.01)
        self._expiry = min(later, latest_expiry(self._epoch))  # binds only after a clock was set far back
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
