import os
import stat
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest

from sapo_node import scratch
from sapo_node.config import InferenceSection
from sapo_node.errors import SapoError
from sapo_node.inference.vllm import environment


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of the machine, and `tmp_path / "data"`, a data directory."""
    (tmp_path / "data").mkdir()
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


def test_a_folder_that_a_cleaner_took_away_is_made_again(base: Path, tmp_path: Path) -> None:
    with scratch.temporary_files(tmp_path / "data") as folder:
        Path(scratch.new_folder("first-")).rmdir()
        folder.rmdir()
        again = Path(scratch.new_folder("second-"))
        assert again.parent == folder
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(base.iterdir()) == []


def test_without_a_tmpdir_before_there_is_none_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    with scratch.temporary_files(tmp_path):
        assert "TMPDIR" in os.environ
    assert "TMPDIR" not in os.environ


def test_the_next_start_of_the_same_node_removes_what_a_kill_left(base: Path, tmp_path: Path) -> None:
    left = scratch.own_folder(base, tmp_path / "data")
    (left / "worker-1").mkdir()
    (left / "worker-1" / "socket").touch()
    with scratch.temporary_files(tmp_path / "data") as folder:
        assert folder == left
        assert list(folder.iterdir()) == []


def test_two_data_directories_of_one_name_share_nothing(base: Path, tmp_path: Path) -> None:
    """As two containers that share /dev/shm see it: each calls its own data directory /data."""
    data = tmp_path / "data"
    first = scratch.own_folder(base, data)
    (first / "weights").touch()
    data.rename(tmp_path / "moved")
    data.mkdir()
    assert scratch.own_folder(base, data) != first
    assert (first / "weights").exists()
    assert scratch.own_folder(base, tmp_path / "moved") == first, "wherever it is mounted"


@pytest.fixture
def long(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files with a long path, in place of the other, which stands for /tmp."""
    folder = tmp_path / ("x" * 60)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(scratch, "SHORT", base)
    return folder


def test_sockets_lie_elsewhere_where_the_path_is_long(base: Path, long: Path, tmp_path: Path) -> None:
    with scratch.temporary_files(tmp_path / "data") as folder:
        sockets = scratch.socket_folder()
        assert sockets is not None
        assert (sockets.parent, folder.parent) == (base, long)
        (sockets / "socket").touch()
    assert [*base.iterdir(), *long.iterdir()] == []


def test_sockets_of_a_killed_node_go_with_its_next_start(base: Path, long: Path, tmp_path: Path) -> None:
    left = scratch.own_folder(base, tmp_path / "data")
    (left / "socket").touch()
    with scratch.temporary_files(tmp_path / "data"):
        assert scratch.socket_folder() == left
        assert list(left.iterdir()) == []


def test_without_a_short_path_only_those_who_need_one_are_told(
    base: Path, long: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "SHORT", tmp_path / "file")
    (tmp_path / "file").touch()
    with (
        scratch.temporary_files(tmp_path / "data"),
        pytest.raises(SapoError, match="set TMPDIR to a shorter path"),
    ):
        scratch.socket_folder()


def test_a_worker_below_any_temporary_folder_can_make_vllms_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`<worker's TMPDIR, or VLLM_RPC_BASE_PATH>/<uuid>` is where vLLM's processes meet."""
    monkeypatch.setattr(os, "geteuid", lambda: 4_294_967_294)  # as long as user ids get
    monkeypatch.setattr(scratch, "own_folder", lambda base, data: base / scratch._name(data))  # ours it is not
    for length in range(1, 120):
        monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * length)
        monkeypatch.setattr(scratch, "_use", lambda folder: monkeypatch.setattr(tempfile, "tempdir", folder))
        with scratch.temporary_files(tmp_path) as folder:
            base = environment(InferenceSection()).get("VLLM_RPC_BASE_PATH", f"{folder}/worker-12345678")
            assert len(f"{base}/{uuid.uuid4()}") <= scratch.LONGEST_SOCKET


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
