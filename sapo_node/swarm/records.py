"""Announcements as DHT records: under which key they lie, which are valid, how many a holder keeps. Pure: no I/O.

A record is a signed announcement under a shard's key and its signer's public key. Anyone may offer one to anyone, so
holders and readers alike accept only what the signed body itself entitles to that place: the DHT sees just the hash of
a key, and this module recomputes it from the body. Whoever replays a record elsewhere or longer than allowed is
refused.
"""

import hashlib
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from sapo_node.rollouts import codec
from sapo_node.rollouts.schema import Announcement
from sapo_node.swarm import protocol

MAX_KEYS: Final = 4096
MAX_BYTES: Final = 8 * 1024 * 1024
MAX_RECORDS_OF_SIGNER: Final = 2 * (protocol.MAX_EXPIRY_EPOCHS + protocol.MAX_EPOCHS_AHEAD + 1)
"""What a holder keeps. Beyond that new records are refused; valid ones are never pushed out, or a flood could erase a
swarm. An honest node writes one record an epoch, two when its shard changes; without a limit one key could fill all."""

_MEMO_ENTRIES: Final = 4096
_SWEEP_SECONDS: Final = 5.0


def record_key(swarm: str, epoch: int, k: int, prefix: int) -> str:
    """The DHT key of a shard."""
    return f"sapo/1/{swarm}/{epoch}/{k}/{prefix}"


def key_id(swarm: str, epoch: int, k: int, prefix: int) -> bytes:
    """The 20 bytes by which the DHT knows that key: sha1 over its msgpack form, as hivemind computes it."""
    packed = msgspec.msgpack.encode(record_key(swarm, epoch, k, prefix))
    return hashlib.sha1(packed, usedforsecurity=False).digest()


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

    def __init__(self, swarm: str, now: Callable[[], float] = time.time) -> None:
        self.swarm = swarm
        self.now = now
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
        if key_id(self.swarm, a.epoch, a.k, a.prefix) != key:
            raise Refused("the record was made for another place")
        return a


def latest_expiry(epoch: int) -> float:
    """How long a record of an epoch may live. Follows from the epoch alone, so that holders and readers whose clocks
    differ agree."""
    return float((epoch + 1 + protocol.MAX_EXPIRY_EPOCHS) * protocol.EPOCH_SECONDS)


class RecordStore:
    """The records that this node holds for the swarm; bounded in keys, records a key and a signer, and bytes.

    Records of `own_key` are exempt from the bounds: there are only as many as this node announces.
    """

    def __init__(self, own_key: bytes, now: Callable[[], float] = time.time) -> None:
        self.own_key = own_key
        self._now = now
        self._shards: dict[bytes, dict[bytes, Record]] = {}
        self._of_signer: Counter[bytes] = Counter()
        self._bytes = 0
        self._next_sweep = -math.inf

    def __len__(self) -> int:
        return sum(map(len, self._shards.values()))

    def store(self, key: bytes, record: Record) -> bool:
        """Keep a valid record under a 20-byte key. False if a newer one is here or there is no room."""
        self._sweep()
        shard = self._shards.get(key, {})
        old = shard.get(record.public_key)
        if old is not None:
            if not record.is_newer_than(old):
                return False
            self._count(old, -1)
        elif record.public_key != self.own_key and not self._has_room(key, shard, record):
            return False
        self._shards.setdefault(key, shard)[record.public_key] = record
        self._count(record, 1)
        return True

    def get(self, key: bytes) -> list[Record]:
        """The records under a key that have not expired."""
        now = self._now()
        return [record for record in self._shards.get(key, {}).values() if record.expires_at > now]

    def _has_room(self, key: bytes, shard: dict[bytes, Record], record: Record) -> bool:
        return (
            len(shard) < protocol.MAX_SUBKEYS
            and (key in self._shards or len(self._shards) < MAX_KEYS)
            and self._of_signer[record.public_key] < MAX_RECORDS_OF_SIGNER
            and self._bytes + len(record.envelope) <= MAX_BYTES
        )

    def _count(self, record: Record, sign: int) -> None:
        self._bytes += sign * len(record.envelope)
        self._of_signer[record.public_key] += sign
        if not self._of_signer[record.public_key]:
            del self._of_signer[record.public_key]

    def _sweep(self) -> None:
        now = self._now()
        if now < self._next_sweep:
            return
        self._next_sweep = now + _SWEEP_SECONDS
        for key, shard in list(self._shards.items()):
            for public_key in [p for p, record in shard.items() if record.expires_at <= now]:
                self._count(shard.pop(public_key), -1)
            if not shard:
                del self._shards[key]


class ShardSchedule:
    """Which k this node announces under. A state machine: somebody else reads shards and tells it how full they were.

    A newcomer looks at shards of k = 0, 1, 2, ... (`next_probe`, `probed`) and takes the first k whose shard is not
    empty. From then on `k` follows the swarm's size, by at most one bit an epoch (`end_of_epoch`). With `forced_k` it
    never moves.
    """

    def __init__(self, forced_k: int | None = None) -> None:
        if forced_k is not None and not 0 <= forced_k <= protocol.MAX_SHARD_BITS:
            raise ValueError(f"k is between 0 and {protocol.MAX_SHARD_BITS}, not {forced_k}")
        self.k = forced_k or 0
        self._forced = forced_k is not None
        self._probe: int | None = None if self._forced else 0

    def readable(self) -> list[int]:
        """Values of k under which other nodes may be announcing, given that theirs differ from ours by at most one."""
        return [k for k in (self.k - 1, self.k, self.k + 1) if 0 <= k <= protocol.MAX_SHARD_BITS]

    def next_probe(self) -> int | None:
        """The k whose shard a newcomer should read next; None once `k` is settled."""
        return self._probe

    def probed(self, records: int) -> None:
        """Tell how many records the shard of `next_probe` held. If all were empty, this node is the first: k = 0."""
        if self._probe is None:
            return
        if records > 0:
            self.k, self._probe = self._probe, None
        else:
            self._probe = self._probe + 1 if self._probe < protocol.MAX_SHARD_BITS else None

    def end_of_epoch(self, shards: Sequence[int]) -> int:
        """Adapt k to the numbers of records that shards of this k held in the epoch that ended; return the new k.

        No shard read, no evidence: k stays.
        """
        if shards and not self._forced:
            median = statistics.median(shards)
            if median > protocol.SHARD_SPLIT_ABOVE:
                self.k = min(self.k + 1, protocol.MAX_SHARD_BITS)
            elif median < protocol.SHARD_MERGE_BELOW:
                self.k = max(self.k - 1, 0)
        return self.k
