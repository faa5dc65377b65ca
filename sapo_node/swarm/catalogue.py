"""What the swarm offers, as far as this node knows, and what to fetch next. No I/O; times are passed in.

Policy. A round needs J groups, not everybody's batches, so offers are sampled: a peer is drawn uniformly among those
with something unseen (a loud peer is drawn no more often than a quiet one, and peers that have one share together no
more often than one), and of its unseen batches the newest, as fresh groups are worth most. At most one fetch runs from
a peer. A fetch that fails makes its peer wait, twice as long each time; a batch that failed MAX_ATTEMPTS times is given
up, where the peer was busy is no attempt. What was fetched, given up or refused counts as *seen* and is not offered
again. A batch in which nothing could be used is no fault, but its peer rests as after a failure, twice as long each
time until a batch of it is of use: worthless ones cost their sender nothing, and this node a fetch and a verification.

An announcement is a word, and identities are free: what strangers announce must not keep from this node what those
have who kept their word. A peer is *reliable* when it gave something lately and no fetch from it came to nothing
lately. Others share a part of the slots (the caller says when they are taken), those of them that let a fetch come to
nothing wait for the rest, their offers do not end the search for more, and they are forgotten first.
"""

import math
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

from sapo_node.rollouts.schema import Announcement, Listing
from sapo_node.swarm import protocol

Via = Literal["hint", "dht"]

MAX_OFFERING: Final = 2048
"""Peers whose announcements are kept; with 8 listings each a few MB. Beyond it a tenth goes: first those that gave
nothing, and of equals the longest unheard."""

MAX_SEEN: Final = 16_384
"""Content ids remembered as seen: more than MAX_OFFERING peers can list anew within the age limit of a fast round."""

MAX_ATTEMPTS: Final = 3
BACKOFF_SECONDS: Final = 1.0
MAX_BACKOFF_SECONDS: Final = 60.0
"""After a failed fetch its peer rests 1, 2, 4, ... seconds, half to one and a half times, so that all who failed at
the same moment do not come back at the same moment."""

MAX_VAIN_SECONDS: Final = 8.0
"""The longest rest after batches that were of no use here. Longer, and an honest swarm that is still weak, where most
batches hold no group with an advantage, would lose the few that do; shorter, and a key could send some a second."""

DOUBT_SECONDS: Final = 300.0
"""How long a peer whose fetch came to nothing, or was slow, is not reliable. Shorter, and a few peers that give a batch
now and then could hold the slots meant for those that keep their word."""

SLOW_SECONDS: Final = 2.0
FAST_BYTES_PER_SECOND: Final = 512 * 1024
"""A fetch that takes longer than both together is slow. Its peer is served from the other slots, as a home link needs
no more; eight peers that take all the time they may would otherwise leave a tenth of the fetches to everybody else."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One batch to fetch from its publisher. `addresses` are multiaddrs without /p2p."""

    peer_id: str
    public_key: bytes
    addresses: tuple[str, ...]
    listing: Listing
    via: Via
    reliable: bool = True


@dataclass(slots=True)
class _Offer:
    public_key: bytes
    announcement: Announcement
    via: dict[bytes, Via]  # content id -> how this node first heard of it
    heard_at: float
    failures: int = 0
    failed_at: float = 0.0
    rest: float = 0.0  # seconds after `failed_at`
    in_vain: int = 0  # batches in a row that were of no use here
    doubted_at: float = -math.inf  # when a fetch came to nothing, or was slow, last
    attempts: dict[bytes, int] = field(default_factory=dict)


class Catalogue:
    """Announcements of others, one a peer, and the record of what was seen."""

    def __init__(
        self,
        own_peer_id: str,
        max_age_seconds: float,
        welcome: Callable[[str, float], bool],
        rng: random.Random,
        share: Callable[[str], str] = str,
        gave: Callable[[str, float], bool] = lambda peer_id, now: True,
    ) -> None:
        """`welcome(peer_id, now)` tells whether to fetch from a peer at all; peers with the same `share` are drawn as
        one; `gave(peer_id, now)` whether it gave something lately."""
        self._own = own_peer_id
        self._max_age = max_age_seconds
        self._welcome = welcome
        self._rng = rng
        self._share = share
        self._gave = gave
        self._offers: OrderedDict[str, _Offer] = OrderedDict()
        self._busy: set[str] = set()  # outlives a forgotten offer: still one fetch a peer when it comes back
        self._seen: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    def add(self, peer_id: str, public_key: bytes, announcement: Announcement, via: Via, now: float) -> bool:
        """Take note of a verified announcement. False if it is our own, stale, from the future or not news."""
        epoch = protocol.epoch_of(now)
        oldest = protocol.epoch_of(now - self._max_age)
        if peer_id == self._own or not oldest <= announcement.epoch <= epoch + protocol.MAX_EPOCHS_AHEAD:
            return False
        offer = self._offers.get(peer_id)
        if offer is None:
            offer = _Offer(public_key, announcement, {}, now)
            self._offers[peer_id] = offer
        elif (announcement.epoch, announcement.seq) <= (offer.announcement.epoch, offer.announcement.seq):
            return False
        offer.announcement, offer.heard_at = announcement, now
        offer.via = {b.content_id: offer.via.get(b.content_id, via) for b in announcement.batches}
        offer.attempts = {content_id: n for content_id, n in offer.attempts.items() if content_id in offer.via}
        self._offers.move_to_end(peer_id)
        self._forget(now)
        return True

    def available(self, now: float) -> int:
        """Groups that could be fetched now from reliable peers."""
        offers = self._offers.items()
        free = [name for name, offer in offers if self._reliable(name, offer, now) and self._free(name, offer, now)]
        return sum(listing.groups for peer_id in free for listing in self._unseen(peer_id, now))

    def take(
        self, now: float, *, only_reliable: bool = False, without: Callable[[str], bool] = lambda peer_id: False
    ) -> Wanted | None:
        """Choose what to fetch next and mark its peer busy; None if there is nothing, or only from peers `without`
        which to go on now. Report back by one of `fetched`, `failed`."""
        lots: dict[bool, dict[str, list[str]]] = {False: {}, True: {}}  # whether in doubt -> share -> peers
        for peer_id, offer in self._offers.items():
            may = self._free(peer_id, offer, now) and not without(peer_id)
            if may and (not only_reliable or self._reliable(peer_id, offer, now)):
                lots[_in_doubt(offer, now)].setdefault(self._share(peer_id), []).append(peer_id)
        for some in lots.values():
            for lot in self._rng.sample(list(some.values()), len(some)):
                for peer_id in self._rng.sample(lot, len(lot)):
                    if unseen := self._unseen(peer_id, now):
                        self._busy.add(peer_id)
                        return self._wanted(peer_id, max(unseen, key=lambda b: b.created_at), now)
        return None

    def _wanted(self, peer_id: str, listing: Listing, now: float) -> Wanted:
        offer = self._offers[peer_id]
        addresses, via = tuple(offer.announcement.addresses), offer.via[listing.content_id]
        return Wanted(peer_id, offer.public_key, addresses, listing, via, self._reliable(peer_id, offer, now))

    def fetched(self, wanted: Wanted, seconds: float, now: float) -> None:
        """The batch arrived, after so long; what it was worth is told by `judged`."""
        self._busy.discard(wanted.peer_id)
        self._see(wanted.peer_id, wanted.listing.content_id)
        if offer := self._offers.get(wanted.peer_id):
            offer.failures = 0
            if seconds > SLOW_SECONDS + wanted.listing.size / FAST_BYTES_PER_SECOND:
                offer.doubted_at = now

    def failed(self, wanted: Wanted, now: float, *, give_up: bool = False, busy: bool = False) -> None:
        """The fetch brought nothing: let the peer rest; `give_up` if asking for this batch again is useless, `busy` if
        the peer said at once that it should be asked later."""
        self._busy.discard(wanted.peer_id)
        content_id = wanted.listing.content_id
        offer = self._offers.get(wanted.peer_id)
        if offer is None:
            return
        self._let_rest(offer, offer.failures, MAX_BACKOFF_SECONDS, now)
        again, offer.failures = offer.failures > 0, offer.failures + 1
        if busy:
            return
        if again or not give_up:  # a node that has just started again lists what it no longer has, but once
            offer.doubted_at = now
        offer.attempts[content_id] = offer.attempts.get(content_id, 0) + 1
        if give_up or offer.attempts[content_id] >= MAX_ATTEMPTS:
            self._see(wanted.peer_id, content_id)

    def judged(self, peer_id: str, useful: bool, now: float) -> None:
        """A batch that was fetched from this peer was verified: whether anything in it could be used here."""
        offer = self._offers.get(peer_id)
        if offer is None:
            return
        if useful:
            offer.in_vain = 0
        else:
            self._let_rest(offer, offer.in_vain, MAX_VAIN_SECONDS, now)
            offer.in_vain += 1

    def _let_rest(self, offer: _Offer, times: int, longest: float, now: float) -> None:
        """After something failed that had failed so many times in a row before."""
        pause = min(longest, BACKOFF_SECONDS * 2.0 ** min(times, 10))
        offer.failed_at, offer.rest = now, pause * self._rng.uniform(0.5, 1.5)

    def peers(self, now: float) -> list[str]:
        """Peer ids with a fresh announcement."""
        self._forget(now)
        return list(self._offers)

    def heard(self, now: float) -> dict[str, float]:
        """When the newest announcement of each of those peers came."""
        return {peer_id: self._offers[peer_id].heard_at for peer_id in self.peers(now)}

    def _free(self, peer_id: str, offer: _Offer, now: float) -> bool:
        rests = 0.0 <= now - offer.failed_at < offer.rest  # a clock that was set back ends the rest
        return peer_id not in self._busy and not rests and self._welcome(peer_id, now)

    def _reliable(self, peer_id: str, offer: _Offer, now: float) -> bool:
        return not _in_doubt(offer, now) and self._gave(peer_id, now)

    def _unseen(self, peer_id: str, now: float) -> list[Listing]:
        fresh = (b for b in self._offers[peer_id].announcement.batches if now - b.created_at <= self._max_age)
        return [b for b in fresh if (peer_id, b.content_id) not in self._seen]

    def _see(self, peer_id: str, content_id: bytes) -> None:
        # With the peer, or one that lists another's batch and fails to serve it would hide it from us.
        self._seen[peer_id, content_id] = None
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)

    def _forget(self, now: float) -> None:
        """Drop peers not heard for the age limit, and a tenth of them beyond the bound."""
        while self._offers:
            peer_id, offer = next(iter(self._offers.items()))
            # By the distance, or after a clock was set back they would stay for as long as it was set.
            if abs(now - offer.heard_at) <= self._max_age:
                break
            del self._offers[peer_id]
        if len(self._offers) > MAX_OFFERING:  # many at once, as looking at all of them takes a moment
            for peer_id in sorted(self._offers, key=lambda name: self._gave(name, now))[: MAX_OFFERING // 10]:
                del self._offers[peer_id]


def _in_doubt(offer: _Offer, now: float) -> bool:
    """By the distance: a clock that was set back must not lengthen it."""
    return abs(now - offer.doubted_at) <= DOUBT_SECONDS
