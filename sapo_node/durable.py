"""Files that survive a crash: whole or not there, and on the disk when the call returns."""

import asyncio
import contextlib
import os
import tempfile
from pathlib import Path


def flush(path: Path) -> None:
    """Wait until a file's or folder's entries are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, data: bytes) -> None:
    """Put `data` (mode 0600) in place of a file: a crash leaves the old one or the new one. Raises OSError."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):  # renamed, as it should be
            os.unlink(temporary)
    flush(path.parent)


async def replace_aside(path: Path, data: bytes) -> None:
    """`replace` beside the event loop, since a busy disk takes seconds. One that is cancelled still waits for it, so
    that it overtakes no later write. Raises OSError."""
    writing = asyncio.create_task(asyncio.to_thread(replace, path, data))
    try:
        await asyncio.shield(writing)
    finally:
        await asyncio.wait({writing})
