"""Announcements as DHT records: under which key they lie, which are valid, how many a holder keeps. Pure: no I/O.

A record is a signed announcement under a shard's key and its signer's public key. Anyone may offer one to anyone, so
holders and readers alike accept only what the signed body itself entitles to that place: the DHT sees just the hash of
a key, and this module recomputes it from the body. Whoever replays a record elsewhere or longer than allowed is
refused.
"""

import hashlib
import math
import os
import statistics
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from sapo_node.rollouts import codec
from sapo_node.rollouts.schema import Announcement
from sapo_node.swarm import protocol

MAX_RECORDS: Final = 8192
MAX_RECORDS_OF_SIGNER: Final = 2 * (protocol.MAX_EXPIRY_EPOCHS + protocol.MAX_EPOCHS_AHEAD + 1)
"""What a holder keeps; 8192 records have at most 8 MiB. An honest node writes one record an epoch, two when its shard
changes; without a limit of its own one key could fill all."""

PROBE_EPOCHS: Final = 10
"""Epochs between two looks at every k. Each costs some five searches; a node that was misled is alone until then."""

_MEMO_ENTRIES: Final = 4096
_SWEEP_SECONDS: Final = 5.0


Names = Callable[[str], Sequence[str]]
"""What stands on the wire for a name: itself, or what is derived from the keys of a private swarm."""


def _as_it_is(name: str) -> Sequence[str]:
    return [name]


def record_key(swarm: str, epoch: int, k: int, prefix: int) -> str:
    """The DHT key of a shard."""
    return f"sapo/1/{swarm}/{epoch}/{k}/{prefix}"


def key_id(swarm: str, epoch: int, k: int, prefix: int) -> bytes:
    """The 20 bytes by which the DHT of a public swarm knows that key."""
    (only,) = key_ids(_as_it_is, swarm, epoch, k, prefix)
    return only


def key_ids(names: Names, swarm: str, epoch: int, k: int, prefix: int) -> list[bytes]:
    """The 20 bytes by which the DHT knows that key, for each of the names that stand for it on the wire: sha1 over the
    msgpack form, as hivemind computes it."""
    packed = map(msgspec.msgpack.encode, names(record_key(swarm, epoch, k, prefix)))
    return [hashlib.sha1(one, usedforsecurity=False).digest() for one in packed]


def shard_prefix(public_key: bytes, epoch: int, k: int) -> int:
    """The shard of a node in an epoch: first k bits of sha256(public key, epoch). 0 <= result < 2**k.

    It changes each epoch, so that nobody can keep a shard of choice.
    """
    first = protocol.digest(public_key, epoch.to_bytes(8, "big"))
    return int.from_bytes(first, "big") >> (256 - k)


class Refused(Exception):
    """A record that no holder keeps and no reader believes. The text is fixed, safe to log."""


@dataclass(frozen=True, slots=True)
class Record:
    """One valid record: a signed announcement and how long a holder keeps it (seconds since 1970)."""

    public_key: bytes
    envelope: bytes
    expires_at: float
    announcement: Announcement

    def is_newer_than(self, other: "Record") -> bool:
        """The signer's own count decides, not the expiry, which is not signed: an old record with a later expiry must
        not replace a new one."""
        mine, theirs = self.announcement.seq, other.announcement.seq
        return (mine, self.expires_at) > (theirs, other.expires_at)


class RecordValidator:
    """Decides which records are valid in a swarm. Signatures already looked at are remembered by digest."""

    def __init__(self, swarm: str, now: Callable[[], float] = time.time, names: Names = _as_it_is) -> None:
        self.swarm = swarm
        self.now = now
        self._names = names
        self._memo: dict[bytes, Announcement | str] = {}

    def validate(self, key: bytes, public_key: bytes, envelope: bytes, expires_at: float) -> Record:
        """The record offered under `key` (20 bytes) and `public_key` (32 bytes). Raises `Refused` with the reason."""
        if len(key) != 20 or len(public_key) != 32:
            raise Refused("a record lies under a 20-byte key and a 32-byte public key")
        if len(envelope) > protocol.MAX_RECORD_BYTES:
            raise Refused("the record is too large")
        announcement = self._opened(key, public_key, envelope)
        now = self.now()
        if not now < expires_at <= latest_expiry(announcement.epoch):  # also refuses NaN
            raise Refused("the record has expired or would stay too long")
        if announcement.epoch > protocol.epoch_of(now) + protocol.MAX_EPOCHS_AHEAD:
            raise Refused("the record is of an epoch to come")
        return Record(public_key, envelope, expires_at, announcement)

    def _opened(self, key: bytes, public_key: bytes, envelope: bytes) -> Announcement:
        """What does not depend on the time, remembered: checking costs a signature, and copies come from everywhere."""
        name = hashlib.sha256(key + public_key + envelope).digest()
        found = self._memo.get(name)
        if found is None:
            try:
                found = self._open(key, public_key, envelope)
            except (codec.Rejected, Refused) as refusal:
                found = str(refusal)
            if len(self._memo) >= _MEMO_ENTRIES:
                del self._memo[next(iter(self._memo))]  # the oldest
            self._memo[name] = found
        if isinstance(found, str):
            raise Refused(found)
        return found

    def _open(self, key: bytes, public_key: bytes, envelope: bytes) -> Announcement:
        signer, a = codec.open_announcement(envelope, self.swarm)
        if signer != public_key:
            raise Refused("the record is signed by another key than it lies under")
        if not (a.swarm == self.swarm and 0 <= a.k <= protocol.MAX_SHARD_BITS and 0 <= a.epoch < 1 << 62):
            raise Refused("the record's shard is out of range")
        if a.prefix != shard_prefix(public_key, a.epoch, a.k):
            raise Refused("the record is not in its signer's shard")
        if key not in key_ids(self._names, self.swarm, a.epoch, a.k, a.prefix):
            raise Refused("the record was made for another place")
        return a


def latest_expiry(epoch: int) -> float:
    """How long a record of an epoch may live. Follows from the epoch alone, so that holders and readers whose clocks
    differ agree."""
    return float((epoch + 1 + protocol.MAX_EXPIRY_EPOCHS) * protocol.EPOCH_SECONDS)


class RecordStore:
    """The records that this node holds for the swarm; bounded in all, under a key and of a signer.

    Identities are free, so whatever a full store prefers, a stranger could make. First come, first kept would let 256
    new identities fill a shard of the coming epoch before it begins; newest kept would let them erase it. So the store
    prefers by a draw: each signer has a rank, sha256 of a secret of this process and its public key, and the lowest
    ranks stay. Nobody else knows them and each holder draws anew, so a flood takes no more of the places than its share
    of all who wanted one, and at each holder pushes out others.

    Records of `own_key` rank before all others and have no bound: there are only as many as this node announces.
    """

    def __init__(self, own_key: bytes, now: Callable[[], float] = time.time) -> None:
        self.own_key = own_key
        self._now = now
        self._secret = os.urandom(32)
        self._shards: dict[bytes, dict[bytes, Record]] = {}
        self._keys_of: dict[bytes, dict[bytes, None]] = {}  # signer -> where its records lie, the oldest first
        self._ranking: list[tuple[bytes, bytes]] = []  # (rank, signer), sorted
        self._records = 0
        self._swept_at = -math.inf

    def __len__(self) -> int:
        return self._records

    def store(self, key: bytes, record: Record) -> bool:
        """Keep a valid record under a 20-byte key. False if a newer one is here or there is no room for this one."""
        self._sweep()
        old = self._shards.get(key, {}).get(record.public_key)
        if old is not None:
            if not record.is_newer_than(old):
                return False
            self._drop(key, record.public_key)
        elif not self._make_room(key, record.public_key):
            return False
        self._keep(key, record)
        return True

    def get(self, key: bytes) -> list[Record]:
        """The records under a key that have not expired."""
        now = self._now()
        return [record for record in self._shards.get(key, {}).values() if record.expires_at > now]

    def _rank(self, signer: bytes) -> bytes:
        return b"" if signer == self.own_key else hashlib.sha256(self._secret + signer).digest()

    def _make_room(self, key: bytes, signer: bytes) -> bool:
        """Whether there is room for a record of a signer, at the cost of one that ranks after it if need be."""
        if signer != self.own_key and len(self._keys_of.get(signer, ())) >= MAX_RECORDS_OF_SIGNER:
            return False
        rank = self._rank(signer)
        shard = self._shards.get(key, {})
        if len(shard) >= protocol.MAX_SUBKEYS:
            last = max(shard, key=self._rank)
            if self._rank(last) <= rank:
                return False
            self._drop(key, last)
        elif self._records >= MAX_RECORDS:
            last_rank, last = self._ranking[-1]
            if last_rank <= rank:
                return signer == self.own_key
            self._drop(next(iter(self._keys_of[last])), last)
        return True

    def _keep(self, key: bytes, record: Record) -> None:
        signer = record.public_key
        self._shards.setdefault(key, {})[signer] = record
        if signer not in self._keys_of:
            self._keys_of[signer] = {}
            insort(self._ranking, (self._rank(signer), signer))
        self._keys_of[signer][key] = None
        self._records += 1

    def _drop(self, key: bytes, signer: bytes) -> None:
        del self._shards[key][signer]
        if not self._shards[key]:
            del self._shards[key]
        del self._keys_of[signer][key]
        if not self._keys_of[signer]:
            del self._keys_of[signer]
            del self._ranking[bisect_left(self._ranking, (self._rank(signer), signer))]
        self._records -= 1

    def _sweep(self) -> None:
        """Drop what has expired, now and then: also at once when the clock was set back."""
        now = self._now()
        if 0.0 <= now - self._swept_at < _SWEEP_SECONDS:
            return
        self._swept_at = now
        for key, shard in list(self._shards.items()):
            for signer in [signer for signer, record in shard.items() if record.expires_at <= now]:
                self._drop(key, signer)


class ShardSchedule:
    """Which k this node announces under. A state machine: somebody else reads shards and tells it how full they were.

    A newcomer looks at a shard of every k (`probed`) and takes the largest k whose shard is as full as one of its size
    should be; in a swarm too small for that, the fullest. From then on `k` follows the swarm's size, by at most one bit
    an epoch (`end_of_epoch`). With `forced_k` it never moves.

    Records cost nothing, so a few may lie at any k. They must not lead a node away from the others for good: it looks
    at every k again each PROBE_EPOCHS, goes up to where more are, and reads wherever anything lies.
    """

    def __init__(self, forced_k: int | None = None) -> None:
        if forced_k is not None and not 0 <= forced_k <= protocol.MAX_SHARD_BITS:
            raise ValueError(f"k is between 0 and {protocol.MAX_SHARD_BITS}, not {forced_k}")
        self.k = forced_k or 0
        self._forced = forced_k is not None
        self._occupied: set[int] = set()  # values of k at which the last probe found anything
        self._epochs = 0  # since the last probe
        self.new = not self._forced  # no probe has found anything yet

    def readable(self) -> list[int]:
        """Values of k under which other nodes may be announcing: those that differ from ours by one, and those at
        which there was something lately."""
        near = {self.k - 1, self.k, self.k + 1}
        return sorted(k for k in near | self._occupied if 0 <= k <= protocol.MAX_SHARD_BITS)

    def due(self) -> bool:
        """Whether it is time to look at every k again."""
        return not self._forced and self._epochs >= PROBE_EPOCHS

    def probed(self, sizes: Sequence[int]) -> None:
        """Tell how many records of others a shard of each k held, from k = 0 on. If all were empty, this node is the
        first, or still alone."""
        if self._forced:
            return
        self._epochs = 0
        self._occupied = {k for k, records in enumerate(sizes) if records}
        full = max((k for k, records in enumerate(sizes) if records >= protocol.SHARD_MERGE_BELOW), default=0)
        if self.new and self._occupied:
            self.k, self.new = full or max(range(len(sizes)), key=sizes.__getitem__), False
        elif full > self.k + 1:  # one bit is what `end_of_epoch` sees better, and so is the way down
            self.k = full

    def end_of_epoch(self, shards: Sequence[int]) -> int:
        """Adapt k to the numbers of records that shards of this k held in the epoch that ended; return the new k.

        No shard read, no evidence: k stays.
        """
        self._epochs += 1
        if shards and not self._forced:
            median = statistics.median(shards)
            if median > protocol.SHARD_SPLIT_ABOVE:
                self.k = min(self.k + 1, protocol.MAX_SHARD_BITS)
            elif median < protocol.SHARD_MERGE_BELOW:
                self.k = max(self.k - 1, 0)
        return self.k
