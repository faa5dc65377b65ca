import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sapo_node import scratch
from sapo_node.errors import SapoError


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of the machine."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


def test_temporary_files_of_a_process_and_its_children_go_with_the_block(base: Path, tmp_path: Path) -> None:
    with scratch.temporary_files(tmp_path / "data") as folder:
        ours = Path(tempfile.mkdtemp())
        child = "import tempfile; print(tempfile.mkdtemp())"
        theirs = Path(subprocess.run([sys.executable, "-c", child], check=True, capture_output=True, text=True).stdout)
        assert ours.parent == theirs.parent == folder
        assert folder.parent == base
    assert list(base.iterdir()) == []
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(base)


def test_without_a_tmpdir_before_there_is_none_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    with scratch.temporary_files(tmp_path / "data"):
        assert "TMPDIR" in os.environ
    assert "TMPDIR" not in os.environ


def test_the_next_start_of_the_same_node_removes_what_a_kill_left(base: Path, tmp_path: Path) -> None:
    left = scratch.own_folder(base, tmp_path / "data")
    (left / "worker-1").mkdir()
    (left / "worker-1" / "socket").touch()
    with scratch.temporary_files(tmp_path / "data") as folder:
        assert folder == left
        assert list(folder.iterdir()) == []


def test_a_folder_of_someone_else_is_refused(base: Path, tmp_path: Path) -> None:
    folder = scratch.own_folder(base, tmp_path / "data")
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with (
        pytest.raises(SapoError, match="belongs to someone else; remove it"),
        scratch.temporary_files(tmp_path / "data"),
    ):
        pass


def test_where_nothing_can_be_written_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    with (
        pytest.raises(SapoError, match="cannot make a folder for temporary files: "),
        scratch.temporary_files(tmp_path),
    ):
        pass
