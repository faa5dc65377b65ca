"""The data directory: one node at a time, and plain words where it cannot be used."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from sapo_node.datadir import FORMAT, DataDir, DataDirError
from sapo_node.errors import DataDirLocked


def test_it_is_made_private_and_marked(tmp_path: Path) -> None:
    data = DataDir(tmp_path / "a" / "b")
    data.prepare()
    assert stat.S_IMODE(data.path.stat().st_mode) == 0o700
    assert data.version.read_text() == f"{FORMAT}\n"
    assert data.checkpoints.is_dir()
    data.prepare()
    assert sorted(path.name for path in data.path.iterdir()) == ["checkpoints", "version"]


def test_an_existing_directory_keeps_its_permissions(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    DataDir(tmp_path).prepare()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o750


def test_a_second_node_is_told_who_has_it(tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    with data.lock():
        assert data.running()
        with pytest.raises(DataDirLocked) as caught:
            DataDir(tmp_path).lock()
    assert caught.value.exit_code == 4
    assert caught.value.pid == os.getpid()
    assert str(caught.value) == (
        f"the data directory {tmp_path} is in use by another node (process {os.getpid()}); stop it first, or give this "
        "node its own node.data_dir"
    )
    assert not data.running()
    data.lock().close()


def test_the_lock_ends_with_its_process_even_if_a_child_lives_on(tmp_path: Path) -> None:
    code = (
        "import os, signal, subprocess, sys, pathlib; from sapo_node.datadir import DataDir\n"
        "lock = DataDir(pathlib.Path(sys.argv[1])).lock()\n"
        "quiet = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}\n"
        "child = subprocess.Popen(['sleep', '60'], close_fds=False, **quiet)\n"
        "print(child.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    child = int(done.stdout)
    try:
        assert not DataDir(tmp_path).running()
        DataDir(tmp_path).lock().close()
    finally:
        os.kill(child, 9)


def test_looking_at_the_lock_does_not_stop_a_node_from_starting(tmp_path: Path) -> None:
    import fcntl

    data = DataDir(tmp_path)
    data.lock().close()
    look = (
        "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_SH)\n"
        "print('looking', flush=True); time.sleep(0.2)"
    )
    with subprocess.Popen([sys.executable, "-c", look, data.lock_file], stdout=subprocess.PIPE, text=True) as looker:
        assert looker.stdout
        looker.stdout.readline()
        with open(data.lock_file) as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        data.lock().close()


def refusal(path: Path) -> str:
    with pytest.raises(DataDirError) as caught:
        DataDir(path).prepare()
    assert caught.value.exit_code == 1
    return str(caught.value)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "version").write_text("2\n")
    assert refusal(tmp_path) == (
        f"the data directory {tmp_path} was made by a newer sapo-node (format 2); this one reads up to 1; upgrade "
        "sapo-node, or choose another node.data_dir"
    )


def test_a_damaged_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "version").write_text("one")
    assert "should hold a format number, not 'one'; if this is a data directory of sapo-node, write 1" in refusal(
        tmp_path
    )


def test_a_file_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    reason = "there is a file where a directory is expected; move it, or choose another node.data_dir"
    assert refusal(tmp_path / "file") == f"the data directory {tmp_path}/file cannot be used: {reason}"
    assert refusal(tmp_path / "file" / "sub") == f"the data directory {tmp_path}/file/sub cannot be used: {reason}"


def test_a_place_where_nothing_can_be_written() -> None:
    """/proc refuses root too."""
    message = refusal(Path("/proc/sapo-data"))
    assert message.startswith("the data directory /proc/sapo-data cannot be used: ")
    assert message.endswith("choose another node.data_dir")


def test_a_read_only_file_system() -> None:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    read_only = [Path(mount[1]) for mount in mounts if "ro" in mount[3].split(",") and Path(mount[1]).is_dir()]
    if not read_only:
        pytest.skip("this machine has no file system that is mounted read-only")
    assert "the file system is read-only; choose another node.data_dir" in refusal(read_only[0] / "sapo-data")
