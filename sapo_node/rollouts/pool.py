"""The pool: every group this node may train on, how often it did, and the few counters that outlive the process.

SQLite in WAL mode. One thread owns the only writing connection, another one a read-only connection; the event loop
hands them work and awaits the answer, so neither the disk nor a long query stalls a peer. `synchronous=FULL`: a
transaction is on the disk before its caller goes on. That costs an fsync a few times a round, and two promises hang on
it, also when the power fails: sequence numbers never repeat, and a use, once counted, stays counted.

Uses are counted *before* the step that trains on the groups: `consume` counts and returns them in one transaction, and
there is no other way to a group's texts. A node that dies between the two has lost a use, never gained one: it comes
back with the older policy of its last checkpoint, while the groups used since then stay used. Repeating `consume` for
one round of one run of the process changes nothing; the same round number in a later run is another step, since the
policy went back, and counts again.

Groups of others are known by (producer, coordinates) for as long as they could arrive again, even when the group
itself is gone. So neither eviction nor use opens the door to a second copy. While a peer's group is here, used or not,
another one of its groups on the same question is not taken: where a task has few questions, one of them would otherwise
come back under many coordinates, and limits on uses would mean nothing.

No producer can displace the others. What cannot teach is no candidate and goes first; then go the rows of those who
hold most of the room.

Losing the file costs little: the groups are a cache, and sequence counters start at the clock. It is still never
replaced silently, because the use counts would be forgotten with it.
"""

import math
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from sapo_node.config import RolloutsSection
from sapo_node.rollouts.pool_file import Lane, PoolError
from sapo_node.rollouts.schema import Group, TaskRef
from sapo_node.rollouts.stored import pack_completions, unpack_completions
from sapo_node.swarm.protocol import EPOCH_SECONDS, MAX_AGE_SECONDS, MAX_EPOCHS_AHEAD, MAX_INDEX, digest, epoch_of
from sapo_node.tasks.base import TaskSpec
from sapo_node.training.base import Origin, TrainCompletion, TrainGroup
from sapo_node.training.sapo import Candidate, informative

__all__ = ["Counter", "NewGroup", "Pool", "PoolError", "PoolStats", "coordinates", "drawn_at"]

Counter = Literal["batch", "announcement"]

MAX_CANDIDATES: Final = 1024  # newest groups the sampler chooses from: far more than any I or J, few enough to be quick
MAX_SEEN: Final = 100_000  # digests remembered (about 10 MB); the oldest go first
SEEN_SHARE: Final = 1024  # of `max_bytes` there is one digest of 100 bytes to so many: they leave room for groups
SEEN_SECONDS: Final = MAX_AGE_SECONDS + (MAX_EPOCHS_AHEAD + 2) * EPOCH_SECONDS  # longest that a group stays acceptable
AHEAD_SECONDS: Final = (MAX_EPOCHS_AHEAD + 1) * EPOCH_SECONDS  # how far in the future an accepted group may be drawn

_rewards_decoder: Final = msgspec.json.Decoder(tuple[float, ...])


class NewGroup(Struct, frozen=True, kw_only=True):
    """A group for the pool: complete, with its question as text and the rewards that this node computed."""

    task: TaskRef
    question: str
    question_sha256: bytes
    completions: list[TrainCompletion]
    rewards: list[float]  # one a completion
    sampled_at: float  # seconds since 1970
    policy_version: int
    first_drawn: bool = True  # False for own groups drawn to fill a shortage or to replace others
    truth: bytes = b""  # `Judged.truth`; the pool does not keep it
    teaches: bool = True  # False for groups of others that cannot move the policy although their rewards differ


class PoolStats(Struct, frozen=True, kw_only=True):
    """What the pool holds, and what happened to groups since it was opened."""

    local: int
    local_unused: int
    external: int
    external_unused: int
    bytes: int  # on disk, free pages and the log not counted
    duplicates: int  # groups of others that were here already
    evicted: int  # by the limits on rows and bytes
    expired: int  # by age or staleness


def coordinates(producer: str, task: TaskRef) -> bytes:
    """The digest (32 bytes) under which a peer's group is known."""
    numbers = task.epoch.to_bytes(8, "big") + task.index.to_bytes(4, "big")
    names = (part.encode() for part in (producer, task.source, task.version, task.name))
    return digest(b"coordinates", *names, task.config_hash, numbers)


def drawn_at(task: TaskRef, sampled_at: float) -> float:
    """When a group was drawn, in seconds since 1970: the sender's time, held within the epoch that binds its seed."""
    start = task.epoch * EPOCH_SECONDS
    return min(max(sampled_at, start), start + EPOCH_SECONDS)


class Pool:
    """The pool of one node; `Pool.open` makes one. Every method may raise PoolError; times are seconds since 1970."""

    def __init__(self, path: Path, limits: RolloutsSection) -> None:
        self._path, self._limits = path, limits
        self._writer = Lane("pool-writer", path, writes=True)
        self._reader = Lane("pool-reader", path, writes=False)
        self._run = 0
        self._duplicates = self._evicted = self._expired = 0

    @classmethod
    async def open(cls, path: Path, limits: RolloutsSection) -> "Pool":
        """Open or create the pool at `path`, whose folder exists. One process at a time; the node's lock sees to it."""
        pool = cls(path, limits)
        try:
            pool._run = await pool._writer.ask(lambda db: _count_up(db, "run", 0))
        except PoolError:
            await pool.close()
            raise
        return pool

    async def close(self) -> None:
        """Finish what was handed in, then close the file. Safe to call again."""
        await self._reader.close()
        await self._writer.close()

    # Groups

    async def add_local(self, producer: str, groups: Sequence[NewGroup], now: float) -> list[int]:
        """Add groups of this node; returns their ids, in order."""

        def add(db: sqlite3.Connection) -> tuple[list[int], int]:
            ids = [_insert(db, "local", producer, None, group, now) for group in groups]
            return ids, _evict(db, self._limits)

        ids, evicted = await self._writer.ask(add)
        self._evicted += evicted
        return ids

    async def add_external(self, producer: str, content_id: bytes, groups: Sequence[NewGroup], now: float) -> list[int]:
        """Add a peer's verified groups and mark their batch as seen, in one transaction; returns the new ids.

        Groups known by their coordinates or their question are left out and counted. Empty `groups` only mark the
        batch, so that one without a usable group is not fetched again.
        """

        def add(db: sqlite3.Connection) -> tuple[list[int], int]:
            _mark(db, content_id, now)
            ids = [
                _insert(db, "external", producer, content_id, group, now)
                for group in groups
                if _mark(db, coordinates(producer, group.task), now) and not _asked(db, producer, group.question_sha256)
            ]
            _forget_seen(db, self._limits, now)
            return ids, _evict(db, self._limits)

        ids, evicted = await self._writer.ask(add)
        self._evicted += evicted
        self._duplicates += len(groups) - len(ids)
        return ids

    async def seen(self, content_ids: Iterable[bytes]) -> set[bytes]:
        """Those of these batches that were handed to `add_external` before."""
        wanted = list(content_ids)
        return await self._reader.ask(lambda db: _seen(db, wanted))

    async def known(self, producer: str, groups: Sequence[Group]) -> list[bool]:
        """For each of a peer's groups, whether its coordinates were added before, also if that group is used up or
        evicted, or its question is asked by one that is here."""

        def known(db: sqlite3.Connection) -> list[bool]:
            keys = [coordinates(producer, group.task) for group in groups]
            seen = _seen(db, keys)
            return [
                key in seen or _asked(db, producer, group.question_sha256)
                for key, group in zip(keys, groups, strict=True)
            ]

        return await self._reader.ask(known)

    async def local_candidates(self, now: float, policy_version: int, max_staleness: int) -> list[Candidate]:
        """Own groups that no step used, sampled at most `max_staleness` versions ago; oldest first."""
        where = "origin = 'local' AND uses = 0 AND policy_version BETWEEN ? AND ? ORDER BY id LIMIT ?"
        values = (policy_version - max_staleness, policy_version, MAX_CANDIDATES)
        return await self._reader.ask(lambda db: _candidates(db, where, values, now))

    async def external_candidates(self, now: float, *, idle: bool = False) -> list[Candidate]:
        """Groups of others that are young and have uses left, newest first; those that teach nothing only if `idle`.

        At most MAX_CANDIDATES: the newest of each producer, as many of one as of another.
        """
        where = "origin = 'external' AND uses < ? AND drawn_at BETWEEN ? AND ? AND (teaches OR ?)"
        values = (self._limits.max_external_uses, *self._recently(now), idle, MAX_CANDIDATES)
        return await self._reader.ask(lambda db: _candidates(db, f"id IN ({_newest_of_each(where)})", values, now))

    async def own_rewards(self, now: float) -> dict[str, float]:
        """Mean reward by task of this node's own recent groups, used ones included."""
        found: defaultdict[str, list[float]] = defaultdict(list)
        for origin, _, name, _, rewards in await self._recent(now):
            if origin == "local":
                found[name] += rewards
        return {name: fmean(rewards) for name, rewards in found.items()}

    async def yields(self, now: float) -> dict[tuple[str, bytes], tuple[int, int]]:
        """By name and settings of a task: recent groups, own and others', used or not, that have an advantage; and all
        recent ones. Of another producer at most as many count as are this node's own, but one: what a single peer
        sends cannot outweigh what this node sees itself."""
        of_task: dict[tuple[str, bytes], defaultdict[str, list[bool]]] = {}
        for origin, producer, name, config_hash, rewards in await self._recent(now):
            of_producer = of_task.setdefault((name, config_hash), defaultdict(list))
            of_producer["" if origin == "local" else producer].append(informative(rewards))
        found = {}
        for key, of_producer in of_task.items():
            own = of_producer.pop("", [])
            counted = own + [one for many in of_producer.values() for one in many[: max(1, len(own))]]
            found[key] = sum(counted), len(counted)
        return found

    async def _recent(self, now: float) -> list[tuple[Origin, str, str, bytes, Sequence[float]]]:
        """Origin, producer, task, its settings' hash and rewards of the groups of the last `max_age_seconds`: own ones,
        however many others there are, and the newest of each other producer, as many of one as of another."""
        recent = "drawn_at BETWEEN ? AND ?"
        own, others = (_newest_of_each(f"origin = '{origin}' AND {recent}") for origin in ("local", "external"))
        sql = f"""SELECT origin, producer, name, config_hash, rewards FROM groups
                  WHERE id IN ({own}) OR id IN ({others}) ORDER BY id DESC"""
        values = 2 * (*self._recently(now), MAX_CANDIDATES)
        rows = await self._reader.ask(lambda db: db.execute(sql, values).fetchall())
        return [(*names, _rewards_decoder.decode(rewards)) for *names, rewards in rows]

    async def look(self, ids: Sequence[int]) -> list[TrainGroup]:
        """Groups that are here, in order of `ids`, for a look before one of them is used: nothing is counted."""
        return await self._reader.ask(lambda db: [_group(i, row) for i in ids if (row := _row(db, i))])

    async def consume(self, ids: Sequence[int], round_number: int) -> list[TrainGroup]:
        """Count one use of each group, durably, and return those that this round may train on, in order of `ids`.

        A group that is gone or has no use left is missing in the answer. Asking again for the same round in the same
        run returns the same groups and counts nothing.

        `round_number` names an attempt to step. It must be new for every attempt of this run, also when the policy was
        loaded again from an older checkpoint: a policy version alone would come back and its uses go uncounted.
        """
        key = (self._run, round_number)
        limits = {"local": 1, "external": self._limits.max_external_uses}
        return await self._writer.ask(lambda db: [group for i in ids if (group := _use(db, i, key, limits))])

    async def discard(self, ids: Sequence[int]) -> None:
        """Forget groups that the sampler decided against."""
        rows = [(group_id,) for group_id in ids]
        await self._writer.ask(lambda db: db.executemany("DELETE FROM groups WHERE id = ?", rows).rowcount)

    async def expire(self, now: float, policy_version: int, max_staleness: int) -> int:
        """Forget what can no longer be trained on; returns the number of groups.

        Groups of others and used own ones go by age (`expire_by_age`). Unused own ones go when their policy version is
        too old, or newer than ours: then they come from steps after the checkpoint from which this node resumed.
        """
        sql = "DELETE FROM groups WHERE origin = 'local' AND uses = 0 AND policy_version NOT BETWEEN ? AND ?"
        values = (policy_version - max_staleness, policy_version)
        gone = await self._writer.ask(lambda db: db.execute(sql, values).rowcount)
        self._expired += gone
        return gone + await self.expire_by_age(now)

    async def expire_by_age(self, now: float) -> int:
        """Forget what is too old, whatever the policy is: it comes in, and ages, while no round is taken too. What is
        from the future as well: the clock was set back, and it would stay for as long."""
        oldest, newest = self._recently(now)

        def expire(db: sqlite3.Connection) -> int:
            _forget_seen(db, self._limits, now)
            db.execute("DELETE FROM next_index WHERE epoch < ?", (epoch_of(oldest),))
            sql = "DELETE FROM groups WHERE NOT (origin = 'local' AND uses = 0) AND drawn_at NOT BETWEEN ? AND ?"
            return db.execute(sql, (oldest, newest)).rowcount

        gone = await self._writer.ask(expire)
        self._expired += gone
        return gone

    def _recently(self, now: float) -> tuple[float, float]:
        """The first and the last moment at which a group was drawn that is young enough."""
        return now - self._limits.max_age_seconds, now + AHEAD_SECONDS

    async def purge(self, peer: str, until: float = math.inf) -> int:
        """Forget a peer's groups that were received by `until`, for good: their coordinates stay known. Returns the
        number of groups."""
        sql = "DELETE FROM groups WHERE origin = 'external' AND producer = ? AND received_at <= ?"
        return await self._writer.ask(lambda db: db.execute(sql, (peer, until)).rowcount)

    async def stats(self) -> PoolStats:
        """What the pool holds now."""

        def read(db: sqlite3.Connection) -> tuple[dict[tuple[str, int], int], int]:
            rows = db.execute("SELECT origin, uses = 0, count(*) FROM groups GROUP BY 1, 2")
            return {(origin, unused): count for origin, unused, count in rows}, _bytes(db)

        counts, size = await self._reader.ask(read)
        local, external = ([counts.get((origin, unused), 0) for unused in (0, 1)] for origin in ("local", "external"))
        return PoolStats(
            local=sum(local),
            local_unused=local[1],
            external=sum(external),
            external_unused=external[1],
            bytes=size,
            duplicates=self._duplicates,
            evicted=self._evicted,
            expired=self._expired,
        )

    # Counters

    async def next_seq(self, counter: Counter) -> int:
        """The next sequence number: strictly rising, across restarts and also after the file was lost.

        A new file starts at the clock in milliseconds, which no node reaches by counting.
        """
        start = int(time.time() * 1000)
        return await self._writer.ask(lambda db: _count_up(db, f"seq.{counter}", start))

    async def reserve_indices(self, spec: TaskSpec, epoch: int, count: int) -> range:
        """The next `count` question indices of a task in an epoch, never given before; fewer when the epoch is full."""
        task = digest(spec.source.encode(), spec.name.encode(), spec.config_hash)  # what the seed depends on

        def reserve(db: sqlite3.Connection) -> range:
            row = db.execute("SELECT value FROM next_index WHERE epoch = ? AND task = ?", (epoch, task)).fetchone()
            indices = range(MAX_INDEX)[row[0] if row else 0 :][:count]
            db.execute("INSERT OR REPLACE INTO next_index VALUES (?, ?, ?)", (epoch, task, indices.stop))
            return indices

        return await self._writer.ask(reserve)


# What runs inside the threads; each function is part of one transaction.


def _insert(
    db: sqlite3.Connection, origin: Origin, producer: str, content_id: bytes | None, group: NewGroup, now: float
) -> int:
    if len(group.rewards) != len(group.completions):
        raise ValueError(f"{len(group.rewards)} rewards for {len(group.completions)} completions")
    row = {
        "origin": origin,
        "producer": producer,
        "source": group.task.source,
        "version": group.task.version,
        "name": group.task.name,
        "config_hash": group.task.config_hash,
        "config": msgspec.json.encode(group.task.config).decode(),
        "epoch": group.task.epoch,
        "task_index": group.task.index,
        "drawn_at": drawn_at(group.task, group.sampled_at),
        "sampled_at": group.sampled_at,
        "received_at": now,
        "policy_version": group.policy_version,
        "first_drawn": group.first_drawn,
        "content_id": content_id,
        "question_sha256": group.question_sha256,
        "rewards": msgspec.json.encode(group.rewards).decode(),
        "question": group.question,
        "completions": pack_completions(group.completions),
        "teaches": group.teaches and informative(group.rewards),
    }
    places = ", ".join(f":{name}" for name in row)
    return db.execute(f"INSERT INTO groups ({', '.join(row)}) VALUES ({places})", row).lastrowid or 0


def _candidates(db: sqlite3.Connection, where: str, values: tuple[float, ...], now: float) -> list[Candidate]:
    columns = "id, producer, name, question_sha256, rewards, drawn_at, uses, first_drawn"
    rows = db.execute(f"SELECT {columns} FROM groups WHERE {where}", values)
    return [
        Candidate(
            group_id=group_id,
            producer=producer,
            task=name,
            question_sha256=question_sha256,
            rewards=_rewards_decoder.decode(rewards),
            age_seconds=max(0.0, now - drawn),
            uses=uses,
            first_drawn=bool(first_drawn),
        )
        for group_id, producer, name, question_sha256, rewards, drawn, uses, first_drawn in rows
    ]


def _newest_of_each(where: str) -> str:
    """SQL of the ids of the groups that `where` names: the newest of each producer, then the second newest of each, and
    so on, up to the number that is the last parameter."""
    turns = f"SELECT id, row_number() OVER (PARTITION BY producer ORDER BY id DESC) AS turn FROM groups WHERE {where}"
    return f"SELECT id FROM ({turns}) ORDER BY turn, id DESC LIMIT ?"


def _asked(db: sqlite3.Connection, producer: str, question_sha256: bytes) -> bool:
    """Whether a group of this peer on this question is here."""
    sql = "SELECT 1 FROM groups WHERE producer = ? AND question_sha256 = ? AND origin = 'external'"
    return db.execute(sql, (producer, question_sha256)).fetchone() is not None


def _use(db: sqlite3.Connection, group_id: int, key: tuple[int, int], limits: dict[str, int]) -> TrainGroup | None:
    row = _row(db, group_id)
    if row is None:
        return None
    origin, *_, uses, used_run, used_round = row
    if (used_run, used_round) != key:
        if uses >= limits[origin]:
            return None
        sql = "UPDATE groups SET uses = uses + 1, used_run = ?, used_round = ? WHERE id = ?"
        db.execute(sql, (*key, group_id))
    return _group(group_id, row)


def _row(db: sqlite3.Connection, group_id: int) -> tuple[Any, ...] | None:
    sql = """SELECT origin, producer, question, completions, rewards, policy_version, uses, used_run, used_round
             FROM groups WHERE id = ?"""
    found: tuple[Any, ...] | None = db.execute(sql, (group_id,)).fetchone()
    return found


def _group(group_id: int, row: tuple[Any, ...]) -> TrainGroup:
    origin, producer, question, completions, rewards, policy_version, *_ = row
    return TrainGroup(
        group_id=group_id,
        origin=origin,
        producer=producer,
        question=question,
        completions=unpack_completions(completions),
        rewards=list(_rewards_decoder.decode(rewards)),
        policy_version=policy_version,
    )


def _evict(db: sqlite3.Connection, limits: RolloutsSection) -> int:
    """Keep to the limits. Groups of others that teach nothing go first, unused own ones last; else the oldest of
    whoever holds most, in rows and bytes taken together, so that a flood displaces itself. Returns how many went."""
    (rows,) = db.execute("SELECT count(*) FROM groups").fetchone()
    of_row = limits.max_bytes // limits.max_groups  # all rows that are allowed weigh as much as all bytes
    first = """SELECT id FROM (
        SELECT id, origin = 'local' AND uses = 0 AS fresh, origin = 'external' AND NOT teaches AS idle,
               sum(length(completions) + ?) OVER (PARTITION BY producer ORDER BY id DESC) AS held FROM groups
        ) ORDER BY fresh, idle DESC, held DESC, id LIMIT ?"""
    gone = 0
    while gone < rows and (rows - gone > limits.max_groups or _bytes(db) > limits.max_bytes):
        step = max(rows - gone - limits.max_groups, rows // 64, 1)  # several: a page is free when all on it is gone
        gone += db.execute(f"DELETE FROM groups WHERE id IN ({first})", (of_row, step)).rowcount
    return gone


def _bytes(db: sqlite3.Connection) -> int:
    pages, free, size = (db.execute(f"PRAGMA {p}").fetchone()[0] for p in ("page_count", "freelist_count", "page_size"))
    return int((pages - free) * size)


def _mark(db: sqlite3.Connection, key: bytes, now: float) -> bool:
    """Remember a digest; whether it is new."""
    return db.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (key, now + SEEN_SECONDS)).rowcount == 1


def _forget_seen(db: sqlite3.Connection, limits: RolloutsSection, now: float) -> None:
    """Digests of what cannot arrive again, and the oldest beyond the most that are kept."""
    db.execute("DELETE FROM seen WHERE until < ?", (now,))
    oldest = "SELECT digest FROM seen ORDER BY until DESC LIMIT -1 OFFSET ?"
    db.execute(f"DELETE FROM seen WHERE digest IN ({oldest})", (min(MAX_SEEN, limits.max_bytes // SEEN_SHARE),))


def _seen(db: sqlite3.Connection, keys: Sequence[bytes]) -> set[bytes]:
    return {key for key in keys if db.execute("SELECT 1 FROM seen WHERE digest = ?", (key,)).fetchone()}


def _count_up(db: sqlite3.Connection, key: str, start: int) -> int:
    db.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", (key, start))
    db.execute("UPDATE meta SET value = value + 1 WHERE key = ?", (key,))
    return int(db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()[0])
