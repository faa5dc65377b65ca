"""history.jsonl: what a node recorded, one JSON object a line, only ever appended to.

A line is written by one `write` to a file opened for appending, so a reader never sees lines mixed up, and a node that
is killed tears at most the last line. Readers skip a torn line; a writer that finds one ends it before it goes on. At
`max_bytes` the file is turned over to history.1.jsonl, whose predecessor goes: two files bound the disk used.
"""

import os
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec

from sapo_node.monitor.metrics import EvalRecord, Record, RoundRecord

FILE_NAME = "history.jsonl"

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def older(path: Path) -> Path:
    """Where a turned-over history lies: history.1.jsonl for history.jsonl."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


class History:
    """The writing end. One process writes; any number may read."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Opens `path` for appending, and makes it where missing. Raises OSError where that is not allowed."""
        self._path = path
        self._max_bytes = max_bytes
        self._fd = -1
        self._size = 0
        self._torn = False  # whether the file's last line has no end
        self._open()

    def append(self, record: Record) -> None:
        """Write one line. Raises OSError when the disk is full; the next line then starts afresh."""
        line = _encoder.encode(record) + b"\n"
        if self._fd < 0:  # it could not be opened after it was turned over
            self._open()
        if self._size and self._size + len(line) > self._max_bytes:
            self.close()
            os.replace(self._path, older(self._path))
            self._size = 0
            self._open()
        data = b"\n" + line if self._torn else line
        self._torn = True  # until all of it is written
        written = os.write(self._fd, data)
        self._size += written
        if written < len(data):
            raise OSError(f"{self._path}: only {written} of {len(data)} bytes could be written; is the disk full?")
        self._torn = False

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._size = os.fstat(self._fd).st_size
        self._torn = self._size > 0 and os.pread(self._fd, 1, self._size - 1) != b"\n"

    def __enter__(self) -> "History":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def parse(line: bytes) -> Record | None:
    """A record, or None for a line that is torn or of a kind this version does not know."""
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


class Follower:
    """Reads what was added since the last look, over a turn-over too, without reading the file again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode: int | None = None
        self._offset = 0

    def new(self) -> list[Record]:
        """Records added since the last call, oldest first; [] while there is no file. Raises OSError otherwise."""
        try:
            handle = self._path.open("rb")
        except FileNotFoundError:
            return []
        with handle:
            inode = os.fstat(handle.fileno()).st_ino
            records: list[Record] = []
            if inode != self._inode:
                records += self._rest_of_older(inode)
                self._inode, self._offset = inode, 0
            return records + self._read(handle)

    def _rest_of_older(self, current: int) -> list[Record]:
        """What the turned-over file holds beyond what was read of it (all of it at the first look)."""
        try:
            handle = older(self._path).open("rb")
        except FileNotFoundError:
            return []
        with handle:
            inode = os.fstat(handle.fileno()).st_ino
            if inode == current:  # turned over just now: the caller holds this very file
                return []
            if inode != self._inode:
                self._offset = 0
            return self._read(handle)

    def _read(self, handle: BinaryIO) -> list[Record]:
        """The ended lines from the offset on. What follows the last line end is still being written, or torn."""
        handle.seek(self._offset)
        data = handle.read()
        end = data.rfind(b"\n") + 1
        self._offset += end
        return [record for line in data[:end].split(b"\n") if (record := parse(line)) is not None]


def read(path: Path) -> list[Record]:
    """All records of a history, the older file's first; [] where there is none. Torn lines are skipped."""
    return Follower(path).new()


def rounds(records: list[Record]) -> list[RoundRecord]:
    """The rounds among `records`, in their order."""
    return [record for record in records if isinstance(record, RoundRecord)]


def evals(records: list[Record]) -> list[EvalRecord]:
    """The evaluations among `records`, in their order."""
    return [record for record in records if isinstance(record, EvalRecord)]
