"""Checkpoints that are whole or not there: written beside, flushed to disk, renamed.

A checkpoint `step-000123` is a Hugging Face model folder with `trainer.safetensors` (optimizer, random stream) and
`state.json` (this module's). A folder that a crash left half written has another name and is ignored, then removed.

No torch here: the node reads `state.json` and exports without it.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from sapo_node import durable
from sapo_node.errors import SapoError

FORMAT: Final = 1
"""Version of the layout. A newer one is refused: this program would lose what it does not know."""

STATE_FILE: Final = "state.json"
TRAINER_FILES: Final = (STATE_FILE, "trainer.safetensors")  # what `export` leaves out

_NAME = re.compile(r"step-(\d{6,})")
_TEMPORARY = ".tmp-"  # prefix of folders being written or removed


class CheckpointError(SapoError):
    """A checkpoint that cannot be used; the text names the folder and the cure."""


class State(Struct, frozen=True, kw_only=True):
    """`state.json`: what is not a tensor."""

    policy_version: int  # optimiser steps taken
    model: str  # `training.model` of its node
    extra: dict[str, Any]  # the node's own: counters, random numbers of its task mixture
    format: int = FORMAT


def write(directory: Path, state: State, fill: Callable[[Path], None], keep: int) -> Path:
    """Write `<directory>/step-<version>`; `fill` puts the model's files into the folder it is given.

    Older checkpoints beyond the newest `keep` are removed afterwards. An existing one of the same step is replaced. On
    any error the old checkpoints are untouched. Raises OSError (disk full, not writable).
    """
    directory.mkdir(parents=True, exist_ok=True)
    _sweep(directory)
    final = directory / f"step-{state.policy_version:06d}"
    temporary = directory / f"{_TEMPORARY}{final.name}"
    temporary.mkdir()
    try:
        fill(temporary)
        (temporary / STATE_FILE).write_text(
            json.dumps({name: getattr(state, name) for name in State.__struct_fields__}, allow_nan=False)
        )
        _flush(temporary)
        _put(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    durable.flush(directory)
    for old in steps(directory)[:-keep]:
        _remove(old)
    _sweep(directory)
    return final


def _put(temporary: Path, final: Path) -> None:
    """Rename, in place of what is there. Raises OSError; what was there then is there again."""
    old = final.with_name(f"{_TEMPORARY}old-{final.name}")
    replaced = final.exists()
    if replaced:
        final.rename(old)
    try:
        temporary.rename(final)
    except OSError:
        if replaced:
            old.rename(final)
        raise


def steps(directory: Path) -> list[Path]:
    """The whole checkpoints in a directory, oldest first."""
    if not directory.is_dir():
        return []
    found = [(int(match[1]), path) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found) if (path / STATE_FILE).is_file()]


def latest(directory: Path) -> Path | None:
    """The newest whole checkpoint, or None."""
    found = steps(directory)
    return found[-1] if found else None


def read_state(path: Path) -> State:
    """`state.json` of a checkpoint. Raises CheckpointError for a damaged, foreign or newer one."""
    file = path / STATE_FILE
    try:
        values = json.loads(file.read_text())
        version = int(values["format"])
        if version <= FORMAT:
            return State(**{name: values[name] for name in State.__struct_fields__})
    except FileNotFoundError:
        raise CheckpointError(f"{path} is no checkpoint: it has no {STATE_FILE}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is damaged ({type(error).__name__}: {error}); remove {path} to go on from an older checkpoint"
        ) from error
    raise CheckpointError(
        f"{path} was written by a newer sapo-node (format {version}; this one knows {FORMAT}); update sapo-node"
    )


def _remove(path: Path) -> None:
    """Rename first, so that a half removed checkpoint is never taken for a whole one."""
    doomed = path.with_name(f"{_TEMPORARY}old-{path.name}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def _sweep(directory: Path) -> None:
    """Remove what crashes left behind."""
    for path in directory.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path)


def _flush(folder: Path) -> None:
    """Every file and folder below, and the folder itself, onto the disk."""
    for path in sorted(folder.rglob("*"), reverse=True):  # files before the folders that hold them
        durable.flush(path)
    durable.flush(folder)
