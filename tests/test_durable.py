"""Durable files: replaced whole, and nothing left beside them."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from sapo_node import durable


def test_a_file_is_replaced_whole_and_private(tmp_path: Path) -> None:
    path = tmp_path / "file"
    durable.replace(path, b"old")
    durable.replace(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["file"]


def test_a_failure_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    durable.replace(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        durable.replace(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_write_beside_the_loop_is_over_when_its_cancellation_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, replace = tmp_path / "file", durable.replace

    def slowly(path: Path, data: bytes) -> None:
        time.sleep(0.3)
        replace(path, data)

    monkeypatch.setattr(durable, "replace", slowly)

    async def body() -> None:
        writing = asyncio.create_task(durable.replace_aside(path, b"new"))
        await asyncio.sleep(0.05)
        assert not path.exists(), "the loop goes on meanwhile"
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert path.read_bytes() == b"new"
        await durable.replace_aside(path, b"newer")
        assert path.read_bytes() == b"newer"

    asyncio.run(body())
