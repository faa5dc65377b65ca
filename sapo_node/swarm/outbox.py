"""Own groups on their way out, gathered into batches.

An announcement is rewritten at most every few seconds and lists only a few batches. A node with a small model takes
several rounds in that time; one batch a round would push the earlier ones out of the announcement before anyone read
them. So groups wait for the next announcement, together, and leave at once when none was written for a while.
"""

from typing import Final

from sapo_node.rollouts.schema import Group
from sapo_node.swarm.protocol import MAX_GROUPS

MAX_BATCH_TEXT: Final = 900 * 1024
"""Bytes of completions in one batch: fits into an envelope even where the text cannot be compressed."""

MAX_WAITING: Final = 4 * MAX_GROUPS
"""Groups that wait at most; the oldest go first. More in one interval than an announcement can list is of no use."""


class Outbox:
    """Groups that wait for the next batch. Pure; times are seconds of one monotonic clock."""

    def __init__(self, interval: float) -> None:
        """`interval` is the shortest time between two announcements."""
        self._interval = interval
        self._waiting: list[Group] = []
        self._left_at = float("-inf")
        self.dropped = 0

    def put(self, groups: list[Group]) -> None:
        """Let groups wait."""
        self._waiting += groups
        surplus = max(0, len(self._waiting) - MAX_WAITING)
        self.dropped += surplus
        del self._waiting[:surplus]

    def take(self, now: float) -> list[list[Group]]:
        """The batches to publish now: none before the interval is over, then all that waits."""
        if not self._waiting or now - self._left_at < self._interval:
            return []
        self._left_at = now
        waiting, self._waiting = self._waiting, []
        return pack(waiting)


def pack(groups: list[Group]) -> list[list[Group]]:
    """Groups in batches within the limits of the wire, in their order. A group beyond them stands alone."""
    batches: list[list[Group]] = []
    room = 0
    for group in groups:
        size = sum(len(completion.text.encode()) for completion in group.completions)
        if not batches or len(batches[-1]) == MAX_GROUPS or size > room:
            batches.append([])
            room = MAX_BATCH_TEXT
        batches[-1].append(group)
        room -= size
    return batches
