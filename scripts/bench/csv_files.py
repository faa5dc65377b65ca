"""Results of benches as small CSV files, which grow run by run."""

import csv
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def row(*parts: Any) -> dict[str, str]:
    """One line from dataclasses: six digits of a float, nothing for None."""
    return {name: _text(value) for part in parts for name, value in asdict(part).items()}


def typed(line: Mapping[str, str], kind: type[T]) -> T:
    """The part of a line that is a `kind`, as `row` wrote it."""
    values = {field.name: line[field.name] for field in fields(kind)}  # type: ignore[arg-type]
    texts = {field.name for field in fields(kind) if field.type is str}  # type: ignore[arg-type]
    return msgspec.convert(
        {name: None if value == "" and name not in texts else value for name, value in values.items()},
        kind,
        strict=False,
    )


def append(file: Path, rows: Iterable[Mapping[str, str]]) -> None:
    """Add a whole run in one write; the file is made, with its head, where it is missing."""
    lines = list(rows)
    if not lines:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    new = not file.exists() or file.stat().st_size == 0
    with file.open("a", newline="") as handle:
        writer = csv.DictWriter(handle, list(lines[0]), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(lines)


def read(file: Path) -> list[dict[str, str]]:
    """The lines of a file; none where there is none."""
    if not file.exists():
        return []
    with file.open(newline="") as handle:
        return list(csv.DictReader(handle))


def drop(file: Path, unwanted: Callable[[Mapping[str, str]], bool]) -> int:
    """Take lines out of a file; returns how many."""
    lines = read(file)
    kept = [line for line in lines if not unwanted(line)]
    if len(kept) < len(lines):
        new = file.with_suffix(".new")
        new.touch()
        append(new, kept)
        new.replace(file)
    return len(lines) - len(kept)


def _text(value: object) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
