"""What this node thinks of the peers it met, and whom it remembers across restarts.

Policy. A score is one node's own opinion: it is never sent to anyone and nobody else's is believed. It starts at 0,
rises with what a peer's batches were good for, falls with what no honest node sends, and decays towards 0, so that an
old merit does not protect for ever and an old fault is forgiven. A peer is *shunned* (nothing is fetched from it,
nothing served to it) from the moment its score falls to SHUN_AT until it has decayed to FORGIVE_AT.

What is no peer's fault (a duplicate, a stale batch, a question that another library version asks differently) leaves
the score alone and is only counted. Being unreachable is no fault either; `catalogue.py` backs off from such peers.

The owner's word comes before any score, and of his words a denial before an allowance: `deny` and `allow` are the
settings', `denied` is what was said by command (`denials.py`).

A peer is *aged* when it worked for a day, its usable groups in several hours of it: identities are free, work is not.
Under the rule `capped` of the sampler half of J comes from aged peers; `standing` tells who is, and for whose share a
peer counts.

Everything here is computed from the times passed in; only `load_peers` and `save_peers` touch the disk.
"""

import math
from collections.abc import Collection, Iterable
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from sapo_node import durable
from sapo_node.swarm.addresses import is_multiaddr
from sapo_node.swarm.sources import RELAY, network_of

HALF_LIFE_SECONDS: Final = 1800.0
"""Time in which a score moves half-way back to 0: long against a round, short against a day."""

USABLE: Final = 1.0
"""Added for an accepted group that can be learned from. Others earn nothing: they cost nothing to make."""

KNOWN_AT: Final = 3.0
"""Score from which a peer is no stranger: it is served and fetched from also while strangers flood this node. Four
usable groups of the last ten minutes, less what they decay by; higher, and in a weak swarm, whose groups rarely have an
advantage, nobody would be known."""

REJECTED: Final = -30.0
"""Added for an envelope or group that no honest node sends. Four in a row shun a newcomer."""

MIN_SCORE, MAX_SCORE = -200.0, 60.0
"""Merit is capped so that a well-known peer that turns bad is shunned after six faults; blame is capped so that every
peer is forgiven within two half-lives."""

SHUN_AT: Final = -100.0
FORGIVE_AT: Final = -50.0

MAX_PEERS: Final = 4096
"""Peers with a score. Identities are free, so without a bound a stranger could fill the memory."""

MAX_SAVED: Final = 256
MAX_SAVED_ADDRESSES: Final = 8
MAX_FILE_BYTES: Final = 2 << 20
"""Bounds of peers.json: enough to find a living peer after a long pause. A full record has at most 5 kB."""

MAX_SAVED_AGED: Final = 128
MAX_SAVED_BLAMED: Final = 64
"""Places in it for aged peers, and for shunned and denied ones, before all others: a crowd of new ids must not make a
node forget whom it knows."""

AGED_SECONDS: Final = 24 * 3600.0
"""Between the first and the newest accepted group of an aged peer."""

AGED_HOURS: Final = 6
"""Different hours in which an aged peer's groups were usable: two groups a day apart are no day of work. In a swarm so
large that a node hears a peer less often than this nobody has an age, and the rules that ask for it are not applied."""

ABOUT_SECONDS: Final = 300.0
"""A peer seen within this time may still have groups to give: none is trained on that is older."""

FEW_RELAYS: Final = 3
"""With fewer relays than this, who is behind one counts by himself: in a young swarm nearly everybody may be. A relay
counts for a day from the last usable group that came through it: a stranger must not add to them for nothing."""

RECOUNT_SECONDS: Final = 60.0
"""How long the count of relays is kept."""

BEHIND_SECONDS: Final = 3600.0
"""How long times have to be behind the latest one until that is taken for a mistake. Shorter, and a clock that is set
back for a moment would let a history begin earlier than it did."""

MAX_REASONS: Final = 40
OTHER: Final = "other"
"""Reasons counted for a peer; there are fewer, so this only bounds what a file may hold."""


BY_SETTINGS: Final = "the settings"


class Found(StrEnum):
    """How a node came to know a peer."""

    INITIAL = "initial peer"
    FILE = "peers file"
    PUBLIC = "public list"
    DNS = "dns"
    RENDEZVOUS = "rendezvous"
    CACHED = "met before"
    DHT = "the DHT"
    INBOUND = "it dialled us"


class Tally(Struct, kw_only=True):
    """What a peer did for one reason, in groups or batches, and what it earned or cost."""

    count: int = 0
    points: float = 0.0  # as of `last`; they decay like the score, which is their bounded sum
    last: float = 0.0


class PeerRecord(Struct, kw_only=True):
    """One peer as this node knows it. Times in seconds since 1970."""

    peer_id: str
    score: float = 0.0
    scored_at: float = 0.0
    shunned: bool = False
    accepted: int = 0
    usable: int = 0
    ignored: int = 0
    rejected: int = 0
    reasons: dict[str, Tally] = msgspec.field(default_factory=dict)
    first_accepted: float = 0.0  # 0 for never, or not since it was shunned
    last_accepted: float = 0.0
    hours: int = 0  # different ones in which a group of it was usable, since `first_accepted`
    last_hour: int = 0  # the newest of them, in hours since 1970
    first_seen: float = 0.0
    last_seen: float = 0.0
    addresses: list[str] = msgspec.field(default_factory=list)  # multiaddrs without /p2p, newest first
    found: str = ""  # a `Found`: how this peer was first met since the start; empty for one of an earlier run
    connected: bool = False  # when this was written
    reached_at: str = ""  # the far end of the connection over which it was last asked for something, a multiaddr
    denied: str = ""  # by what, when this was written; the settings only: commands have their own file

    @property
    def history_seconds(self) -> float:
        """Time between its first and its newest accepted group."""
        return max(0.0, self.last_accepted - self.first_accepted) if self.first_accepted else 0.0

    @property
    def worked_a_day(self) -> bool:
        """Whether its accepted groups lie a day apart, with usable ones in AGED_HOURS different hours."""
        return self.history_seconds >= AGED_SECONDS and self.hours >= AGED_HOURS


class PeerBook:
    """Bounded table of peers with scores. Sets `allow` (if not empty: only these) and `deny` are the owner's settings,
    `denied` his commands. `enough_aged`, `enough_new` and `full` say which peers' groups are not wanted now."""

    def __init__(
        self, *, allow: Iterable[str] = (), deny: Iterable[str] = (), known: Iterable[PeerRecord] = ()
    ) -> None:
        self.allow = frozenset(allow)
        self.deny = frozenset(deny)
        self.denied: frozenset[str] = frozenset()
        self.purge_until: dict[str, float] = {}  # groups of these, received by then, are to leave the pool
        self.fair = False  # whether the sampler's rule tells shares and aged peers apart
        self.enough_aged = self.enough_new = False
        self.full: frozenset[str] = frozenset()  # shares whose part of the stock is full
        fresh: dict[str, object] = {"found": "", "connected": False, "denied": ""}
        self._peers = {record.peer_id: msgspec.structs.replace(record, **fresh) for record in known}
        times = (at for r in self._peers.values() for at in (r.last_seen, r.scored_at, r.last_accepted))
        self._latest = max(times, default=0.0)  # of all times ever passed in
        self._behind_since = math.inf  # the earliest time passed in since they are behind that
        self._relays: set[str] = set()  # networks of relays in use, as counted
        self._counted_at = -math.inf  # by `_latest`

    def __len__(self) -> int:
        return len(self._peers)

    def saw(self, peer_id: str, addresses: Iterable[str], now: float, found: Found = Found.DHT) -> None:
        """Remember that a peer is there and where; `addresses` replace what was known unless empty."""
        record = self._record(peer_id, now)
        record.last_seen = max(record.last_seen, now)
        if record.found in ("", Found.DHT):  # who dialled whom tells more than that others know it too
            record.found = found
        if given := list(addresses)[:MAX_SAVED_ADDRESSES]:
            record.addresses = given

    def reached(self, peer_id: str, address: str, now: float, found: Found) -> None:
        """Remember an address (without /p2p) that was dialled with success: it is the first to try next time."""
        self.saw(peer_id, (), now, found)
        record = self._record(peer_id, now)
        record.addresses = [address, *(a for a in record.addresses if a != address)][:MAX_SAVED_ADDRESSES]

    def set_connected(self, peer_ids: Collection[str], callers: Collection[str], now: float) -> None:
        """Exactly these members of the swarm are connected now; `callers` are those that joined by this node."""
        for peer_id in peer_ids:
            self.saw(peer_id, (), now, Found.INBOUND if peer_id in callers else Found.DHT)
        for record in self._peers.values():
            record.connected = record.peer_id in peer_ids

    def connected(self) -> set[str]:
        """Ids of the connected peers."""
        return {record.peer_id for record in self._peers.values() if record.connected}

    def there(self, peer_id: str, heard_at: float) -> bool | None:
        """Whether a peer whose newest announcement came at `heard_at` is still there: True while it is connected, False
        if it was so after that announcement and is no longer, None if nobody can tell."""
        record = self._peers.get(peer_id)
        if record is not None and record.connected:
            return True
        return False if record is not None and record.last_seen > heard_at else None

    def counts(self) -> dict[str, int]:
        """How many of the connected peers were found which way."""
        ways = [record.found for record in self._peers.values() if record.connected]
        return {way: ways.count(way) for way in Found if way in ways}

    def came_from(self, peer_id: str, address: str) -> None:
        """This peer, if it is known, was reached over a connection whose far end is `address`, as p2pd tells it."""
        record = self._peers.get(peer_id)
        if record is not None and address != record.reached_at:
            record.reached_at, self._counted_at = address, -math.inf

    def accepted(self, peer_id: str, groups: int, usable: int, now: float) -> None:
        """`groups` of this peer were verified, `usable` of them with an advantage to learn from."""
        record = self._add(peer_id, "accepted", groups, 0.0, now)
        if usable:
            self._add(peer_id, "usable", usable, USABLE * usable, now)
            if (hour := int(now // 3600)) != record.last_hour:  # also where a clock was ahead for a while
                record.hours, record.last_hour = record.hours + 1, hour
        record.accepted += groups
        record.usable += usable
        # By a clock that was set back nobody's history may begin earlier; one that was ahead for a while is set right.
        if not 0.0 < record.first_accepted <= self._latest:
            record.first_accepted = self._latest
        record.last_accepted = min(max(record.last_accepted, now), self._latest)

    def useless(self, peer_id: str, groups: int, now: float) -> None:
        """`groups` of this peer that counted as usable could not be trained on here after all: their merit is gone. No
        fault of it: another tokenizer, or other settings, find them short enough."""
        merit = max(0.0, self.score(peer_id, now))
        record = self._add(peer_id, "ignored: cannot be trained on", groups, -min(USABLE * groups, merit), now)
        record.ignored += groups
        record.usable = max(0, record.usable - groups)
        if not record.usable:
            record.hours = record.last_hour = 0

    def ignored(self, peer_id: str, groups: int, now: float, reason: str = OTHER) -> None:
        """`groups` of this peer were of no use here, through nobody's fault."""
        record = self._record(peer_id, now)
        record.ignored += groups
        _count(record, f"ignored: {reason}", groups, 0.0, now)

    def rejected(self, peer_id: str, now: float, reason: str = "not what was announced") -> None:
        """This peer sent, under its own key or over its own stream, what no honest node sends."""
        record = self._add(peer_id, f"rejected: {reason}", 1, REJECTED, now)
        record.rejected += 1
        if record.score <= SHUN_AT:
            record.shunned = True
            record.first_accepted = record.last_accepted = 0.0  # trust is to be earned anew
            record.hours = record.last_hour = 0

    def score(self, peer_id: str, now: float) -> float:
        """Between MIN_SCORE and MAX_SCORE; 0 for strangers."""
        record = self._peers.get(peer_id)
        return 0.0 if record is None else decayed(record.score, record.scored_at, now)

    def may(self, peer_id: str) -> bool:
        """Whether the owner lets this node talk to a peer."""
        return peer_id not in self.denied and self._may_by_settings(peer_id)

    def _may_by_settings(self, peer_id: str) -> bool:
        return peer_id not in self.deny and (not self.allow or peer_id in self.allow)

    def welcome(self, peer_id: str, now: float) -> bool:
        """Whether to talk to this peer at all."""
        if not self.may(peer_id):
            return False
        record = self._peers.get(peer_id)
        if record is None or not record.shunned:
            return True
        record.shunned = decayed(record.score, record.scored_at, now) <= FORGIVE_AT
        return not record.shunned

    def wanted(self, peer_id: str, now: float) -> bool:
        """Whether to fetch from this peer now."""
        enough = self.enough_aged if self.aged(peer_id, now) else self.enough_new
        return not enough and self.share(peer_id) not in self.full and self.welcome(peer_id, now)

    def aged(self, peer_id: str, now: float) -> bool:
        """Whether this peer worked for a day (`worked_a_day`). What a clock ahead of its time accepted counts later."""
        record = self._peers.get(peer_id)
        return record is not None and _is_aged(record, now)

    def aged_about(self, now: float) -> bool:
        """Whether there is an aged peer that may have groups to give."""
        return any(
            _is_aged(record, now) and self.welcome(record.peer_id, now)
            for record in self._peers.values()
            if record.connected or now - max(record.last_seen, record.last_accepted) <= ABOUT_SECONDS
        )

    def share(self, peer_id: str) -> str:
        """What a peer counts for: its network, the relay that it shares with others where there are several, or
        itself."""
        network = self.network(peer_id)
        return peer_id if network.startswith(RELAY) and len(self._relays_in_use()) < FEW_RELAYS else network

    def network(self, peer_id: str) -> str:
        """By what a peer is reached: its network, its relay however few there are, or itself. Who has to be told from
        others for sure is counted by this."""
        record = self._peers.get(peer_id)
        return (network_of(record.reached_at) if record is not None else "") or peer_id

    def lot(self, peer_id: str) -> str:
        """What is drawn when the next fetch is chosen: a share under `fair`, else a peer."""
        return self.share(peer_id) if self.fair else peer_id

    def standing(self, peer_id: str, now: float) -> tuple[str, bool]:
        """Its share and whether it is aged: what the sampler asks about a producer."""
        return self.share(peer_id), self.aged(peer_id, now)

    def _relays_in_use(self) -> set[str]:
        if self._latest - self._counted_at > RECOUNT_SECONDS:
            lately = self._latest - AGED_SECONDS
            worked = (r for r in self._peers.values() if r.usable and r.reached_at and r.last_accepted >= lately)
            self._relays = {network for r in worked if (network := network_of(r.reached_at)).startswith(RELAY)}
            self._counted_at = self._latest
        return self._relays

    def get(self, peer_id: str) -> PeerRecord | None:
        return self._peers.get(peer_id)

    def best(self, now: float, limit: int = MAX_SAVED) -> list[PeerRecord]:
        """Peers worth remembering, with an address and no reason to avoid them. Half of the places are for those that
        gave usable groups, aged ones first: anybody can be the last to announce itself. Then the most recently seen."""
        useful = [r for r in self._peers.values() if r.addresses and self.welcome(r.peer_id, now)]
        useful.sort(key=lambda r: r.last_seen, reverse=True)
        proven = sorted((r for r in useful if r.usable), key=lambda r: not _is_aged(r, now))[: limit // 2]
        return list({r.peer_id: r for r in [*proven, *useful]}.values())[:limit]

    def to_save(self, now: float) -> list[PeerRecord]:
        """At most MAX_SAVED: aged peers and those to avoid in their places, the proven half of the `best`, the
        connected ones, with or without an address (being connected is free), and then the rest of the best."""
        records = list(self._peers.values())
        for record in records:
            record.denied = "" if self._may_by_settings(record.peer_id) else BY_SETTINGS
        aged = sorted((r for r in records if _is_aged(r, now)), key=lambda r: r.last_accepted, reverse=True)
        told = self.deny | self.denied
        blamed = [r for r in records if r.peer_id in told or not self.welcome(r.peer_id, now)]
        blamed.sort(key=lambda r: (r.peer_id not in told, not r.shunned, -r.last_seen))
        best = self.best(now)
        proven = [r for r in best if r.usable]
        chosen = [*aged[:MAX_SAVED_AGED], *blamed[:MAX_SAVED_BLAMED], *proven, *(r for r in records if r.connected)]
        return list({r.peer_id: r for r in [*chosen, *best]}.values())[:MAX_SAVED]

    def _add(self, peer_id: str, reason: str, count: int, change: float, now: float) -> PeerRecord:
        record = self._record(peer_id, now)
        _count(record, reason, count, change, now)
        record.score = min(MAX_SCORE, max(MIN_SCORE, decayed(record.score, record.scored_at, now) + change))
        record.scored_at = now
        return record

    def _tick(self, now: float) -> None:
        """Keep the latest time. A clock that has been behind it for an hour is right, and was ahead before."""
        if now >= self._latest:
            self._latest, self._behind_since = now, math.inf
        elif now - self._behind_since >= BEHIND_SECONDS:
            self._latest, self._behind_since, self._counted_at = now, math.inf, -math.inf
        else:
            self._behind_since = min(self._behind_since, now)

    def _record(self, peer_id: str, now: float) -> PeerRecord:
        self._tick(now)
        record = self._peers.get(peer_id)
        if record is None:
            if len(self._peers) >= MAX_PEERS:
                self._forget_the_least_telling(now)
            record = PeerRecord(peer_id=peer_id, scored_at=now, first_seen=now, last_seen=now)
            self._peers[peer_id] = record
        return record

    def _forget_the_least_telling(self, now: float) -> None:
        """Make room: a tenth of the table goes. Aged peers stay longest, then those that gave usable groups, in more
        hours before fewer, then shunned ones (bad records are cheap); of equals those go first whose score is nearest
        to 0 (a fresh record would read the same)."""

        def worth(record: PeerRecord) -> tuple[bool, int, bool, float, float]:
            score = decayed(record.score, record.scored_at, now)
            return _is_aged(record, now), record.hours, record.shunned, abs(score), record.last_seen

        for record in sorted(self._peers.values(), key=worth)[: max(1, MAX_PEERS // 10)]:
            del self._peers[record.peer_id]
        self._counted_at = -math.inf

    def gave(self, peer_id: str, now: float) -> bool:
        """Whether this peer gave usable groups lately: an identity is free, groups that teach nothing are, and one that
        does is cheap enough that it must not count for ever."""
        return self.score(peer_id, now) >= KNOWN_AT

    def known_as(self, peer_id: str, now: float) -> str:
        """The network of a peer that gave usable groups lately; empty for a stranger."""
        return self.network(peer_id) if self.gave(peer_id, now) else ""


def decayed(points: float, since: float, now: float) -> float:
    """What is left of `points` that were counted at `since`. A clock that was set back must not make them grow."""
    return points * math.exp2(-max(0.0, now - since) / HALF_LIFE_SECONDS)


def forgiven_at(record: PeerRecord) -> float:
    """When a shunned peer's score will have decayed to FORGIVE_AT, in seconds since 1970, if nothing comes to it."""
    return record.scored_at + HALF_LIFE_SECONDS * math.log2(max(1.0, record.score / FORGIVE_AT))


def _is_aged(record: PeerRecord, now: float) -> bool:
    return record.worked_a_day and min(now, record.last_accepted) - record.first_accepted >= AGED_SECONDS


def _count(record: PeerRecord, reason: str, count: int, points: float, now: float) -> None:
    key = reason if reason in record.reasons or len(record.reasons) < MAX_REASONS else OTHER
    tally = record.reasons.setdefault(key, Tally())
    tally.count += count
    tally.points = decayed(tally.points, tally.last, now) + points
    tally.last = now


class _PeersFile(Struct, kw_only=True):
    version: int = 1
    peers: list[PeerRecord] = msgspec.field(default_factory=list)


async def save_peers(path: Path, records: Iterable[PeerRecord]) -> None:
    """Replace the file at once: a crash leaves the old one or the new one, never half of one. Raises OSError."""
    # Encoded before the loop goes on: records change.
    data = msgspec.json.format(msgspec.json.encode(_PeersFile(peers=list(records)[:MAX_SAVED])), indent=1)
    await durable.replace_aside(path, data)


def load_peers(path: Path) -> tuple[list[PeerRecord], str | None]:
    """Peers of an earlier run, and a sentence for the log if the file could not be used (a cache may be lost)."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"it is larger than {MAX_FILE_BYTES} bytes")
        content = msgspec.json.decode(path.read_bytes(), type=_PeersFile)
        if content.version != 1:
            raise ValueError(f"it has version {content.version}, this program reads version 1")
    except FileNotFoundError:
        return [], None
    except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors, but for deep nesting
        return [], f"{path}: the peers of earlier runs are not used: {error}. The file will be written anew."
    for record in content.peers:
        record.addresses = [address for address in record.addresses if is_multiaddr(address)][:MAX_SAVED_ADDRESSES]
        record.reached_at = record.reached_at if is_multiaddr(record.reached_at) else ""
        record.reasons = dict(list(record.reasons.items())[:MAX_REASONS])
    return content.peers[:MAX_SAVED], None
