"""The folder through which weights pass from the trainer to an engine in another process.

In memory (/dev/shm, a tmpfs on Linux) where there is room, since a disk would wear and wait; else in the data
directory. The folder is ours alone, is emptied at the start, holds one version at a time, and goes when the node ends.
What a node that was killed left behind is removed by its next start: the folder's name follows from the data directory,
also where containers share /dev/shm and call theirs alike.
"""

import os
import shutil
from pathlib import Path
from typing import Final

from sapo_node import scratch
from sapo_node.errors import SapoError

MEMORY: Final = Path("/dev/shm")
VERSIONS_AT_ONCE: Final = 2  # the one being written and the one that an engine may still read
RESERVE_BYTES: Final = 16 << 20  # left to others in a small /dev/shm, as containers have it


class WeightsFolder:
    """One node's folder of weights."""

    def __init__(self, path: Path) -> None:
        """Use `prepare`."""
        self.path = path

    @classmethod
    def prepare(cls, wanted: Path | None, data_dir: Path, weight_bytes: int) -> "WeightsFolder":
        """An empty folder, at `wanted` or where there is room for weights of this size. Raises SapoError."""
        base = wanted or (MEMORY if _has_room(MEMORY, weight_bytes) else data_dir / "run")
        try:
            return cls(scratch.own_folder(base, data_dir))
        except SapoError as error:
            raise SapoError(f"{error}, or set inference.weights_dir") from error
        except OSError as error:
            where = error.filename or base
            raise SapoError(f"{where}: cannot make a folder for weights: {error.strerror or error}") from error

    def keep_only(self, newest: str | None) -> None:
        """Remove every version but the one in the folder `newest` (a path below this one)."""
        scratch.empty(self.path, keep=None if newest is None else Path(newest))

    def remove(self) -> None:
        """Remove the folder with all in it."""
        shutil.rmtree(self.path, ignore_errors=True)  # best effort: the next start empties it


def _has_room(folder: Path, weight_bytes: int) -> bool:
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return False
    return os.access(folder, os.W_OK) and free >= VERSIONS_AT_ONCE * weight_bytes + RESERVE_BYTES
