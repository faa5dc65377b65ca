"""The folder of weights between two processes."""

import os
from pathlib import Path

import pytest

from sapo_node.errors import SapoError
from sapo_node.inference import weights
from sapo_node.inference.weights import RESERVE_BYTES, VERSIONS_AT_ONCE, WeightsFolder

ROOM = 1 << 20  # bytes; a model that fits anywhere


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(weights, "MEMORY", folder)
    return folder


def prepare(tmp_path: Path, wanted: Path | None = None, weight_bytes: int = ROOM) -> Path:
    return WeightsFolder.prepare(wanted, tmp_path / "data", weight_bytes).path


@pytest.fixture(autouse=True)
def data(tmp_path: Path) -> Path:
    """A node's data directory."""
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


def fill(folder: Path, *versions: str) -> None:
    for version in versions:
        (folder / version).mkdir()
        (folder / version / "model.safetensors").write_bytes(b"weights")


def test_weights_pass_through_memory_where_there_is_room(tmp_path: Path, memory: Path) -> None:
    path = prepare(tmp_path)
    assert path.parent == memory
    assert path.is_dir()


def test_nobody_else_may_read_them(tmp_path: Path) -> None:
    assert prepare(tmp_path).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("spare", [-1, 0])
def test_without_room_for_two_versions_in_memory_the_data_directory_is_used(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, spare: int
) -> None:
    free = VERSIONS_AT_ONCE * ROOM + RESERVE_BYTES + spare
    monkeypatch.setattr(weights.shutil, "disk_usage", lambda path: _Usage(free))
    expected = memory if spare == 0 else tmp_path / "data" / "run"
    assert prepare(tmp_path).parent == expected


class _Usage:
    def __init__(self, free: int) -> None:
        self.free = free


def test_without_dev_shm_the_data_directory_is_used(tmp_path: Path, memory: Path) -> None:
    memory.rmdir()
    assert prepare(tmp_path).parent == tmp_path / "data" / "run"


def test_a_folder_that_was_asked_for_is_used_whatever_there_is(tmp_path: Path) -> None:
    assert prepare(tmp_path, tmp_path / "fast" / "disk").parent == tmp_path / "fast" / "disk"


def test_two_nodes_of_one_machine_do_not_meet(tmp_path: Path) -> None:
    first = prepare(tmp_path)
    fill(first, "v00000001")
    (tmp_path / "data").rename(tmp_path / "other")  # another container's, which calls its own data directory alike
    (tmp_path / "data").mkdir()
    assert prepare(tmp_path) != first
    assert (first / "v00000001").exists()


def test_what_a_killed_node_left_behind_is_removed_by_its_next_start(tmp_path: Path, memory: Path) -> None:
    left = prepare(tmp_path)
    fill(left, "v00000003", "v00000004")
    (left / "model.tmp").write_bytes(b"half")
    (left / "link").symlink_to(tmp_path)
    path = prepare(tmp_path)
    assert path == left
    assert list(path.iterdir()) == []
    assert memory.is_dir()  # a link is removed, not what it leads to


def test_a_link_in_its_place_is_refused_and_nothing_behind_it_is_touched(tmp_path: Path) -> None:
    path = prepare(tmp_path)
    path.rmdir()
    treasure = tmp_path / "treasure"
    treasure.mkdir()
    fill(treasure, "v00000001")
    path.symlink_to(treasure)
    with pytest.raises(SapoError, match=r"belongs to someone else; remove it, or set inference\.weights_dir"):
        prepare(tmp_path)
    assert (treasure / "v00000001" / "model.safetensors").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    path = prepare(tmp_path)
    os.chown(path, 12345, 12345)
    with pytest.raises(SapoError, match="belongs to someone else"):
        prepare(tmp_path)


def test_a_file_in_its_place_is_told(tmp_path: Path) -> None:
    path = prepare(tmp_path)
    path.rmdir()
    path.write_text("")
    with pytest.raises(SapoError, match="cannot make a folder for weights: File exists"):
        prepare(tmp_path)


def test_only_the_newest_version_stays(tmp_path: Path) -> None:
    folder = WeightsFolder.prepare(None, tmp_path / "data", ROOM)
    fill(folder.path, "v00000001", "v00000002", "v00000003")
    folder.keep_only(str(folder.path / "v00000003"))
    assert [path.name for path in folder.path.iterdir()] == ["v00000003"]


def test_it_goes_with_the_node_and_going_twice_is_no_fault(tmp_path: Path, memory: Path) -> None:
    folder = WeightsFolder.prepare(None, tmp_path / "data", ROOM)
    fill(folder.path, "v00000001")
    folder.remove()
    folder.remove()
    assert list(memory.iterdir()) == []
