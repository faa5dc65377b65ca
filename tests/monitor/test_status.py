"""node.json is whole at any moment and is not written more often than it is worth."""

from pathlib import Path

import msgspec
import pytest

from sapo_node.monitor.status import NodeStatus, StatusFile, StatusUnreadable, read_status


def status(**changes: object) -> NodeStatus:
    base = NodeStatus(pid=1, state="training", started_at=1.0, updated_at=2.0)
    return msgspec.structs.replace(base, **changes)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_it_comes_back_as_written(tmp_path: Path) -> None:
    written = status(peer_id="12D3", addresses=["/ip4/127.0.0.1/tcp/1/p2p/12D3"], held_out=0.5, reason="all is well")
    StatusFile(tmp_path / "node.json").write(written)
    assert read_status(tmp_path / "node.json") == written
    assert [file.name for file in tmp_path.iterdir()] == ["node.json"]


def test_at_most_one_write_a_second(tmp_path: Path) -> None:
    clock = Clock()
    file = StatusFile(tmp_path / "node.json", clock=clock)
    assert file.write(status(round=1))
    clock.now += 0.5
    assert not file.write(status(round=2))
    clock.now += 0.5
    assert file.write(status(round=3))
    assert not file.write(status(round=4))
    assert file.write(status(round=5), now=True)


def test_a_change_of_state_is_written_at_once(tmp_path: Path) -> None:
    file = StatusFile(tmp_path / "node.json", clock=Clock())
    file.write(status(state="training"))
    assert file.write(status(state="draining"))
    found = read_status(tmp_path / "node.json")
    assert found is not None
    assert found.state == "draining"


def test_no_file_is_no_status(tmp_path: Path) -> None:
    assert read_status(tmp_path / "node.json") is None


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b'{"pid": 1}', b"\xff\xfe"])
def test_something_else_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "node.json").write_bytes(data)
    with pytest.raises(StatusUnreadable, match=r"node\.json is not the status of a node"):
        read_status(tmp_path / "node.json")
