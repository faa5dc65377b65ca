"""Folders for what a node keeps only while it runs: sockets, weights in memory, temporary files of its children.

Each belongs to one data directory and its name follows from that: what a node that was killed left behind is removed
by its next start. Containers may share a folder such as /dev/shm and call their data directories alike, so the name
does not follow from the path, but from where the directory lies on its disk.
"""

import contextlib
import hashlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sapo_node.errors import SapoError

NAME_DIGITS: Final = 16
"""Hex digits of the hash in a folder's name: long enough for no two data directories to share one, short enough for
the path of a Unix socket (103 bytes on macOS) below it."""

SHORT: Final = Path("/tmp")
LONGEST_SOCKET: Final = 103 if sys.platform == "darwin" else 107  # bytes, by the size of sun_path
SOCKET_BYTES: Final = len("/worker-12345678/") + len("12345678-1234-1234-1234-123456789012")
"""What a worker's folder and the name of vLLM's socket in it add to the path of the folder for temporary files."""


def own_folder(base: Path, data_dir: Path) -> Path:
    """An empty folder below `base` that is ours alone (0700). Raises SapoError, and OSError as the system says it.

    `data_dir` exists.
    """
    folder = private(base / _name(data_dir))
    empty(folder)
    return folder


def private(folder: Path) -> Path:
    """Make a folder that is ours alone (0700), or see that it is one. Raises SapoError, and OSError as the system has
    it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise SapoError(f"{folder} belongs to someone else; remove it")
    folder.chmod(0o700)
    return folder


def _name(data_dir: Path) -> str:
    """Of the folders that belong to a data directory: the same after a restart, another for each directory."""
    status = data_dir.stat()
    digits = hashlib.sha256(f"{status.st_dev} {status.st_ino}".encode()).hexdigest()[:NAME_DIGITS]
    return f"sapo-node-{os.geteuid()}-{digits}"


def empty(folder: Path, keep: Path | None = None) -> None:
    """Remove all that is in `folder`, but `keep`."""
    for old in folder.iterdir():
        if old == keep:
            continue
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
        else:
            old.unlink()


@contextlib.contextmanager
def temporary_files(data_dir: Path) -> Iterator[Path]:
    """Have this process and its children make their temporary files in a folder that goes when the block ends.

    vLLM, matplotlib and torch leave files there when they are killed, and a supervised worker may be killed often.
    Raises SapoError.
    """
    before = os.environ.get("TMPDIR")
    short = None
    try:
        folder = own_folder(Path(tempfile.gettempdir()), data_dir)
        if not _takes_sockets(folder):
            with contextlib.suppress(OSError, SapoError):  # `socket_folder` tells it to those who need one
                short = own_folder(SHORT, data_dir)
    except OSError as error:
        raise SapoError(f"{error.filename}: cannot make a folder for temporary files: {error.strerror}") from error
    _use(str(folder))
    _Sockets.folder = short
    try:
        yield folder
    finally:
        _use(before)
        _Sockets.folder = None
        for old in filter(None, (folder, short)):
            shutil.rmtree(old, ignore_errors=True)  # best effort: the next start empties it


def new_folder(prefix: str) -> str:
    """A new folder for temporary files. Where the one that they lie in is gone, since some machines clean /tmp after
    days, it is made again. Raises OSError."""
    try:
        return tempfile.mkdtemp(prefix=prefix)
    except FileNotFoundError:
        Path(tempfile.gettempdir()).mkdir(mode=0o700, parents=True, exist_ok=True)
        return tempfile.mkdtemp(prefix=prefix)


class _Sockets:
    folder: Path | None = None
    """With a short path; set within `temporary_files` where that one's is long."""


def socket_folder() -> Path | None:
    """Where a worker makes its sockets; None: in its own folder for temporary files.

    Batch systems and macOS set TMPDIR to paths below which that of a socket is longer than the system allows. Raises
    SapoError where there is no other place.
    """
    base = Path(tempfile.gettempdir())
    if _takes_sockets(base):
        return None
    if _Sockets.folder is None:
        raise SapoError(
            f"the path of {base} is too long for sockets in it, and {SHORT} cannot be used instead; set TMPDIR to a "
            "shorter path"
        )
    return _Sockets.folder


def _takes_sockets(folder: Path) -> bool:
    return len(os.fsencode(folder)) + SOCKET_BYTES <= LONGEST_SOCKET


def _use(folder: str | None) -> None:
    if folder is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = folder
    tempfile.tempdir = None  # so that tempfile looks again
