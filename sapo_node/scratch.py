"""Folders for what a node keeps only while it runs: sockets, weights in memory, temporary files of its children.

Each belongs to one data directory and its name follows from that: what a node that was killed left behind is removed
by its next start.
"""

import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sapo_node.errors import SapoError

NAME_DIGITS: Final = 16
"""Hex digits of the hash in a folder's name: long enough for no two data directories to share one, short enough for
the path of a Unix socket (103 bytes on macOS) below it."""


def own_folder(base: Path, data_dir: Path) -> Path:
    """An empty folder below `base` that is ours alone (0700). Raises SapoError, and OSError as the system says it."""
    name = hashlib.sha256(os.fsencode(data_dir.absolute())).hexdigest()[:NAME_DIGITS]
    folder = base / f"sapo-node-{os.geteuid()}-{name}"
    base.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise SapoError(f"{folder} belongs to someone else; remove it")
    folder.chmod(0o700)
    empty(folder)
    return folder


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
    try:
        folder = own_folder(Path(tempfile.gettempdir()), data_dir)
    except OSError as error:
        raise SapoError(f"{error.filename}: cannot make a folder for temporary files: {error.strerror}") from error
    _use(str(folder))
    try:
        yield folder
    finally:
        _use(before)
        shutil.rmtree(folder, ignore_errors=True)  # best effort: the next start empties it


def _use(folder: str | None) -> None:
    if folder is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = folder
    tempfile.tempdir = None  # so that tempfile looks again
