"""A node's data directory: its paths, who may use it, and which versions can read it.

One node at a time: `flock` on node.lock, which the kernel drops when the node dies, however it dies. The descriptor is
close-on-exec, or a child that outlives the node would keep the lock.
"""

import errno
import fcntl
import os
import tempfile
import time
from pathlib import Path
from types import TracebackType

from sapo_node import durable
from sapo_node.errors import DataDirLocked, SapoError

FORMAT = 1  # raise it when an older sapo-node would misread what this one writes
LOCK_SECONDS = 0.5  # `status` holds the lock for microseconds while it looks; a node holds it for longer than this

_REASONS = {
    errno.EACCES: "permission denied; give this user the right to write there, or choose another node.data_dir",
    errno.EPERM: "permission denied; give this user the right to write there, or choose another node.data_dir",
    errno.EROFS: "the file system is read-only; choose another node.data_dir",
    errno.ENOSPC: "the disk is full; free some space, or choose another node.data_dir",
    errno.ENOTDIR: "there is a file where a directory is expected; move it, or choose another node.data_dir",
    errno.EEXIST: "there is a file where a directory is expected; move it, or choose another node.data_dir",
}


class DataDirError(SapoError):
    """The data directory cannot be used; the message says why and what to do."""


class DataDirLock:
    """The right to use a data directory, until `close` or the end of the process. A context manager."""

    def __init__(self, descriptor: int) -> None:
        """Made by `DataDir.lock`."""
        self._descriptor = descriptor

    def close(self) -> None:
        """Give the directory back; safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> "DataDirLock":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class DataDir:
    """Paths of a data directory. Nothing is touched before `prepare` or `lock`."""

    def __init__(self, path: Path) -> None:
        """`path` need not exist."""
        self.path = path
        self.lock_file = path / "node.lock"
        self.version = path / "version"
        self.key = path / "identity.key"
        self.peers = path / "peers.json"
        self.denied = path / "denied.json"
        self.pool = path / "pool.sqlite"
        self.checkpoints = path / "checkpoints"
        self.status = path / "node.json"
        self.history = path / "history.jsonl"

    def prepare(self) -> None:
        """Create the directory (0700) and its folders where missing; check that it is writable and of our format.

        Raises DataDirError. An existing directory keeps its permissions.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_format()
            self.checkpoints.mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass  # access() would say yes to root on some file systems that then refuse
        except OSError as error:
            raise self._unusable(error) from error

    def lock(self) -> DataDirLock:
        """Prepare the directory and take it for this process. Raises DataDirLocked or DataDirError."""
        self.prepare()
        try:
            descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._unusable(error) from error
        end = time.monotonic() + LOCK_SECONDS
        while not _try_lock(descriptor, fcntl.LOCK_EX):
            if time.monotonic() > end:
                pid = _read_pid(descriptor)
                os.close(descriptor)
                raise DataDirLocked(
                    f"the data directory {self.path} is in use by another node"
                    f"{f' (process {pid})' if pid else ''}; stop it first, or give this node its own node.data_dir",
                    pid,
                )
            time.sleep(0.02)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return DataDirLock(descriptor)

    def running(self) -> bool:
        """Whether a node holds the lock now."""
        try:
            descriptor = os.open(self.lock_file, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except PermissionError as error:
            raise DataDirError(
                f"{self.lock_file} cannot be read: permission denied; ask as the user that runs the node"
            ) from error
        try:
            return not _try_lock(descriptor, fcntl.LOCK_SH)
        finally:
            os.close(descriptor)

    def _unusable(self, error: OSError) -> DataDirError:
        reason = _REASONS.get(error.errno or 0, f"{error.strerror}; choose another node.data_dir")
        return DataDirError(f"the data directory {self.path} cannot be used: {reason}")

    def _check_format(self) -> None:
        """Refuse a directory that a newer version made; mark a new one as ours."""
        try:
            text = self.version.read_text(encoding="utf-8", errors="replace")[:100].strip()
        except FileNotFoundError:
            durable.replace(self.version, f"{FORMAT}\n".encode())
            return
        if not text.isdecimal():
            raise DataDirError(
                f"{self.version} should hold a format number, not {text!r}; if this is a data directory of sapo-node, "
                f"write {FORMAT} into that file, or else choose another node.data_dir"
            )
        if int(text) > FORMAT:
            raise DataDirError(
                f"the data directory {self.path} was made by a newer sapo-node (format {text}); this one reads up to "
                f"{FORMAT}; upgrade sapo-node, or choose another node.data_dir"
            )


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_pid(descriptor: int) -> int | None:
    text = os.pread(descriptor, 20, 0).strip()
    return int(text) if text.isdigit() else None
