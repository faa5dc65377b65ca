"""What this node thinks of the peers it met, and whom it remembers across restarts.

Policy. A score is one node's own opinion: it is never sent to anyone and nobody else's is believed. It starts at 0,
rises with what a peer's batches were good for, falls with what no honest node sends, and decays towards 0, so that an
old merit does not protect for ever and an old fault is forgiven. A peer is *shunned* (nothing is fetched from it,
nothing served to it) from the moment its score falls to SHUN_AT until it has decayed to FORGIVE_AT.

What is no peer's fault (a duplicate, a stale batch, a question that another library version asks differently) leaves
the score alone and is only counted. Being unreachable is no fault either; `catalogue.py` backs off from such peers.

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

HALF_LIFE_SECONDS: Final = 1800.0
"""Time in which a score moves half-way back to 0: long against a round, short against a day."""

ACCEPTED: Final = 0.5
USABLE: Final = 0.5
"""Added for an accepted group, and again if it had usable advantage: filler counts half of what can be learned from."""

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
MAX_FILE_BYTES: Final = 1 << 20
"""Bounds of peers.json: enough to find a living peer after a long pause."""


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
    first_seen: float = 0.0
    last_seen: float = 0.0
    addresses: list[str] = msgspec.field(default_factory=list)  # multiaddrs without /p2p, newest first
    found: str = ""  # a `Found`: how this peer was first met since the start; empty for one of an earlier run
    connected: bool = False  # when this was written


class PeerBook:
    """Bounded table of peers with scores. Sets `allow` (if not empty: only these) and `deny` are the owner's word."""

    def __init__(
        self, *, allow: Iterable[str] = (), deny: Iterable[str] = (), known: Iterable[PeerRecord] = ()
    ) -> None:
        self.allow = frozenset(allow)
        self.deny = frozenset(deny)
        fresh = {"found": "", "connected": False}
        self._peers = {record.peer_id: msgspec.structs.replace(record, **fresh) for record in known}

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

    def accepted(self, peer_id: str, groups: int, usable: int, now: float) -> None:
        """`groups` of this peer were verified, `usable` of them with an advantage to learn from."""
        record = self._add(peer_id, ACCEPTED * groups + USABLE * usable, now)
        record.accepted += groups
        record.usable += usable

    def ignored(self, peer_id: str, groups: int, now: float) -> None:
        """`groups` of this peer were of no use here, through nobody's fault."""
        self._record(peer_id, now).ignored += groups

    def rejected(self, peer_id: str, now: float) -> None:
        """This peer sent, under its own key or over its own stream, what no honest node sends."""
        record = self._add(peer_id, REJECTED, now)
        record.rejected += 1
        record.shunned = record.shunned or record.score <= SHUN_AT

    def score(self, peer_id: str, now: float) -> float:
        """Between MIN_SCORE and MAX_SCORE; 0 for strangers."""
        record = self._peers.get(peer_id)
        return 0.0 if record is None else _decayed(record, now)

    def welcome(self, peer_id: str, now: float) -> bool:
        """Whether to talk to this peer at all."""
        if peer_id in self.deny or (self.allow and peer_id not in self.allow):
            return False
        record = self._peers.get(peer_id)
        if record is None or not record.shunned:
            return True
        record.shunned = _decayed(record, now) <= FORGIVE_AT
        return not record.shunned

    def unwelcome(self, now: float) -> set[str]:
        """Ids of those not to talk to, as far as they are known: where `allow` is set, strangers are unwelcome too."""
        return {*self.deny, *(peer_id for peer_id in self._peers if not self.welcome(peer_id, now))}

    def get(self, peer_id: str) -> PeerRecord | None:
        return self._peers.get(peer_id)

    def best(self, now: float, limit: int = MAX_SAVED) -> list[PeerRecord]:
        """Peers worth remembering, the most recently seen first: those with an address and no reason to avoid them."""
        useful = [r for r in self._peers.values() if r.addresses and self.welcome(r.peer_id, now)]
        return sorted(useful, key=lambda r: r.last_seen, reverse=True)[:limit]

    def to_save(self, now: float) -> list[PeerRecord]:
        """The connected ones, with or without an address, and then the `best`; at most MAX_SAVED."""
        connected = [r for r in self._peers.values() if r.connected]
        return [*connected, *(r for r in self.best(now) if not r.connected)][:MAX_SAVED]

    def _add(self, peer_id: str, change: float, now: float) -> PeerRecord:
        record = self._record(peer_id, now)
        record.score = min(MAX_SCORE, max(MIN_SCORE, _decayed(record, now) + change))
        record.scored_at = now
        return record

    def _record(self, peer_id: str, now: float) -> PeerRecord:
        record = self._peers.get(peer_id)
        if record is None:
            if len(self._peers) >= MAX_PEERS:
                self._forget_the_least_telling(now)
            record = PeerRecord(peer_id=peer_id, scored_at=now, first_seen=now, last_seen=now)
            self._peers[peer_id] = record
        return record

    def _forget_the_least_telling(self, now: float) -> None:
        """Make room: a tenth of the table goes, scores nearest to 0 first (a fresh record would read the same)."""
        order = sorted(self._peers.values(), key=lambda r: (abs(_decayed(r, now)), r.last_seen))
        for record in order[: max(1, MAX_PEERS // 10)]:
            del self._peers[record.peer_id]


def _decayed(record: PeerRecord, now: float) -> float:
    # A clock that was set back must not make scores grow.
    return record.score * math.exp2(-max(0.0, now - record.scored_at) / HALF_LIFE_SECONDS)


class _PeersFile(Struct, kw_only=True):
    version: int = 1
    peers: list[PeerRecord] = msgspec.field(default_factory=list)


def save_peers(path: Path, records: Iterable[PeerRecord]) -> None:
    """Replace the file at once: a crash leaves the old one or the new one, never half of one. Raises OSError."""
    data = msgspec.json.format(msgspec.json.encode(_PeersFile(peers=list(records)[:MAX_SAVED])), indent=1)
    durable.replace(path, data)


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
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        return [], f"{path}: the peers of earlier runs are not used: {error}. The file will be written anew."
    for record in content.peers:
        record.addresses = [address for address in record.addresses if is_multiaddr(address)][:MAX_SAVED_ADDRESSES]
    return content.peers[:MAX_SAVED], None
