"""The owner's word on single peers, given while the node runs or not: `sapo-node peers deny` and `allow`.

It is a small file in the data directory. Only those commands write it, one at a time; the node reads it at its start
and again whenever it has changed. It outlives the node, and nothing that peers do changes it.

A word is *denied* or, for as long as a request to purge may still be unread, *allowed again*. A purge means the groups
that came before it was asked for: a peer that is allowed again may send new ones.
"""

import contextlib
import fcntl
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from sapo_node import durable
from sapo_node.config_addresses import is_peer_id
from sapo_node.errors import SapoError

MAX_DENIED: Final = 1024
MAX_FILE_BYTES: Final = 256 * 1024
"""More than anybody types. Whoever wants to keep out more than that names whom to let in (`swarm.allow`)."""

LOCK_SECONDS: Final = 5.0
"""How long a command waits for another one, which takes milliseconds."""

PURGE_SECONDS: Final = 600.0
"""How long the request to purge a peer that is allowed again is kept: twice as long as any group is trained on."""


class Word(Struct, frozen=True, kw_only=True):
    """What the owner said of one peer."""

    denied: bool
    at: float  # seconds since 1970, of the last `deny`
    purge: bool = False

    @property
    def purge_until(self) -> float:
        """Groups of this peer that were received by then are to go; -inf for none."""
        if not self.purge:
            return -math.inf
        return math.inf if self.denied else self.at


class DenialsUnreadable(SapoError):
    """The file of denials cannot be used; the message names it and says what to do."""


class _File(Struct, kw_only=True):
    version: int = 1
    peers: dict[str, Word] = {}


def read(path: Path) -> dict[str, Word]:
    """The words by peer id; none without a file. Raises DenialsUnreadable."""
    try:
        with open(path, "rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"it is larger than {MAX_FILE_BYTES >> 10} KiB")
        content = msgspec.json.decode(data, type=_File)
        if content.version != 1:
            raise ValueError(f"it has version {content.version}, this program reads version 1")
        wrong = [peer_id for peer_id in content.peers if not is_peer_id(peer_id)]
        if wrong:
            raise ValueError(f"{wrong[0][:80]!r} is no peer id")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors, but for deep nesting
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DenialsUnreadable(
            f"{path}: whom you denied cannot be read ({reason}). Correct it, or remove it and deny again"
        ) from error
    return content.peers


def deny(path: Path, peer_id: str, now: float, *, purge: bool) -> bool:
    """Deny a peer; False if it was denied already. An earlier request to purge is kept. Raises SapoError, OSError."""
    with _changing(path) as words:
        before = words.get(peer_id)
        words[peer_id] = Word(denied=True, at=now, purge=purge or (before is not None and before.purge))
        _write(path, words, now)
        return before is None or not before.denied


def allow(path: Path, peer_id: str, now: float) -> bool:
    """Take a denial back; False if there was none. Raises SapoError, OSError."""
    with _changing(path) as words:
        before = words.get(peer_id)
        if before is None or not before.denied:
            return False
        words[peer_id] = Word(denied=False, at=now, purge=before.purge)
        _write(path, words, now)
        return True


def _write(path: Path, words: Mapping[str, Word], now: float) -> None:
    kept = {
        peer_id: word
        for peer_id, word in words.items()
        if word.denied or (word.purge and abs(now - word.at) <= PURGE_SECONDS)
    }
    if len(kept) > MAX_DENIED:
        raise SapoError(
            f"{path}: more than {MAX_DENIED} peers cannot be denied; name those to let in instead (swarm.allow)"
        )
    durable.replace(path, msgspec.json.format(msgspec.json.encode(_File(peers=kept)), indent=1))


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[dict[str, Word]]:
    """The words, while no other command can change them."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        end = time.monotonic() + LOCK_SECONDS
        while not _taken(descriptor):
            if time.monotonic() > end:
                raise SapoError(
                    f"{path}: another `sapo-node peers` has been changing it for {LOCK_SECONDS:g} s; end it"
                )
            time.sleep(0.02)
        yield read(path)
    finally:
        os.close(descriptor)


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Denials:
    """The file as a running node sees it."""

    def __init__(self, path: Path) -> None:
        """Reads it. Raises DenialsUnreadable: a node that cannot tell whom to keep out must not start."""
        self._path = path
        self._mark = self._stamp()
        self.words: Mapping[str, Word] = read(path)

    def changed(self) -> bool:
        """Whether `words` are others now. Raises DenialsUnreadable, once for each state of the file; the words from
        before stay."""
        mark = self._stamp()
        if mark == self._mark:
            return False
        self._mark = mark  # taken before the file is read: what changes meanwhile is seen the next time
        self.words = read(self._path)
        return True

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DenialsUnreadable(f"{self._path}: whom you denied cannot be read ({error.strerror})") from error
        return found.st_ino, found.st_mtime_ns, found.st_size
