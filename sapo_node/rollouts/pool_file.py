"""The pool's file: its tables, its two connections with a thread each, and what its errors mean for people.

What the tables mean, and what is promised about them, is `pool.py`.
"""

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from sapo_node.errors import SapoError

T = TypeVar("T")

APPLICATION_ID: Final = 0x5341504F  # "SAPO", in the file's header: tells our file from another program's
SCHEMA_VERSION: Final = 2

MAX_WAITING: Final = 64  # jobs handed to a thread; further callers wait their turn in the event loop
JOB_SECONDS: Final = 60.0  # a disk that has not answered by then will not
BUSY_SECONDS: Final = 5.0  # somebody else's lock, for example a backup's
WAL_BYTES: Final = 4 << 20  # the log is cut back to this after a checkpoint

_FIRST: Final = """
CREATE TABLE groups (
    id INTEGER PRIMARY KEY AUTOINCREMENT, -- never given twice: a plan may name a group that is gone
    origin TEXT NOT NULL, producer TEXT NOT NULL,
    source TEXT NOT NULL, version TEXT NOT NULL, name TEXT NOT NULL, config_hash BLOB NOT NULL, config TEXT NOT NULL,
    epoch INTEGER NOT NULL, task_index INTEGER NOT NULL, drawn_at REAL NOT NULL, sampled_at REAL NOT NULL,
    received_at REAL NOT NULL, policy_version INTEGER NOT NULL, first_drawn INTEGER NOT NULL,
    uses INTEGER NOT NULL DEFAULT 0, used_run INTEGER, used_round INTEGER,
    content_id BLOB, question_sha256 BLOB NOT NULL, rewards TEXT NOT NULL,
    question TEXT NOT NULL, completions BLOB NOT NULL
);
CREATE INDEX groups_by_use ON groups (origin, uses, drawn_at);
CREATE TABLE seen (digest BLOB PRIMARY KEY, until REAL NOT NULL);
CREATE INDEX seen_by_time ON seen (until);
CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL);
CREATE TABLE next_index (epoch INTEGER, task BLOB, value INTEGER NOT NULL, PRIMARY KEY (epoch, task))
"""
_SECOND: Final = """
ALTER TABLE groups ADD COLUMN teaches INTEGER NOT NULL DEFAULT 1; -- 0: nothing can be learnt from it
CREATE INDEX groups_by_question ON groups (producer, question_sha256)
"""
_STEPS: Final = (_FIRST, _SECOND)  # from each version of the file to the next


class PoolError(SapoError):
    """The pool's file cannot be used. The message names it, says why, and what to do."""


class Lane:
    """One thread that owns one connection and runs jobs in order, each as one transaction."""

    def __init__(self, name: str, path: Path, *, writes: bool) -> None:
        self._path, self._writes = path, writes
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._places = asyncio.Semaphore(MAX_WAITING)
        self._db: sqlite3.Connection | None = None
        self._closed = False

    async def ask(self, job: Callable[[sqlite3.Connection], T]) -> T:
        """Run a job, raise its error. A job that has started ends even if its caller is cancelled."""
        async with self._places:
            if self._closed:
                raise PoolError(f"{self._path}: the pool is closed")
            loop = asyncio.get_running_loop()
            try:
                async with asyncio.timeout(JOB_SECONDS):
                    return await loop.run_in_executor(self._executor, self._transact, job)
            except TimeoutError:
                reason = f"the disk did not answer within {JOB_SECONDS:g} s; is it failing, or a network drive gone?"
                raise PoolError(f"{self._path}: {reason}") from None
            except (sqlite3.ProgrammingError, sqlite3.IntegrityError):
                raise  # a mistake of ours, not a state of the file
            except sqlite3.DatabaseError as error:
                raise PoolError(f"{self._path}: {_explain(error)}") from error

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await asyncio.get_running_loop().run_in_executor(self._executor, self._disconnect)
            self._executor.shutdown(wait=False)

    def _transact(self, job: Callable[[sqlite3.Connection], T]) -> T:
        if self._db is None:
            self._db = (_connect_writer if self._writes else _connect_reader)(self._path)
        with self._db:
            self._db.execute("BEGIN IMMEDIATE" if self._writes else "BEGIN")
            return job(self._db)

    def _disconnect(self) -> None:
        if self._db is not None:
            self._db.close()


def _connect_writer(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, timeout=BUSY_SECONDS)
    try:
        _check_version(db, path)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
        with db:
            db.execute("BEGIN IMMEDIATE")  # also the moment at which a file that cannot be written says so
            for statements in _STEPS[db.execute("PRAGMA user_version").fetchone()[0] :]:
                for statement in statements.split(";"):
                    db.execute(statement)
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    except BaseException:
        db.close()
        raise
    return db


def _connect_reader(path: Path) -> sqlite3.Connection:
    uri = path.absolute().as_uri() + "?mode=ro"
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_SECONDS)


def _check_version(db: sqlite3.Connection, path: Path) -> None:
    application, version = (db.execute(f"PRAGMA {p}").fetchone()[0] for p in ("application_id", "user_version"))
    (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application != APPLICATION_ID and (tables or version):
        raise PoolError(f"{path}: this is another program's database; choose another node.data_dir or move it away")
    if version > SCHEMA_VERSION:
        raise PoolError(
            f"{path}: made by a newer sapo-node (pool version {version}, this one knows {SCHEMA_VERSION}); update "
            "sapo-node, or move the file away to start with an empty pool"
        )


def _explain(error: sqlite3.DatabaseError) -> str:
    """Why, and what to do, for people."""
    match getattr(error, "sqlite_errorcode", 0) & 0xFF:
        case sqlite3.SQLITE_FULL:
            return "the disk is full; free some space there, or lower rollouts.max_bytes"
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_PERM:
            return (
                "cannot be written; give this user write access to it and its folder, or choose another node.data_dir"
            )
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return (
                f"the file is damaged ({error}); move it away together with its -wal and -shm files and start again. "
                "It is a cache of groups: key, checkpoints and history lie elsewhere"
            )
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return f"another process has held it for {BUSY_SECONDS:g} s; is a second node or a backup using it?"
        case sqlite3.SQLITE_IOERR:
            return f"the disk failed or is full ({error}); free some space there and check the system's log"
        case _:
            return str(error)
