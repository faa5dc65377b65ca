"""The node's end after a fault: what was learnt is kept, and nothing good is overwritten. Parts are stand-ins."""

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sapo_node.config import NodeConfig
from sapo_node.datadir import DataDir
from sapo_node.errors import SapoError
from sapo_node.inference.base import EngineStatus
from sapo_node.inference.choice import Chosen
from sapo_node.monitor import history
from sapo_node.monitor.metrics import EventRecord
from sapo_node.node import Node


class Policy:
    """A policy that only counts how often it was saved."""

    alive, version, restarts = True, 7, 0
    engine = EngineStatus(name="transformers", state="ready")
    info = None

    def __init__(self) -> None:
        self.saved: list[dict[str, Any]] = []

    async def save(self, extra: dict[str, Any]) -> Any:
        self.saved.append(extra)
        return SimpleNamespace(policy_version=self.version, path="somewhere")


def made(folder: Path) -> tuple[Node, Policy]:
    data = DataDir(folder / "data")
    data.prepare()
    config = NodeConfig.model_validate({"node": {"data_dir": data.path}})
    node = Node(config, data, Chosen("transformers", "a test"))
    node._policy = policy = Policy()  # type: ignore[assignment]
    return node, policy


def failing(node: Node, error: Exception, *, restored: bool) -> None:
    """Let the start of a node fail, before or after it took up what its checkpoint says."""

    async def startup(stack: contextlib.AsyncExitStack) -> bool:
        if restored:
            node._restore_own_state("")
        raise error

    node._startup = startup  # type: ignore[method-assign]


def events(node: Node) -> list[str]:
    records = history.read(node._data.history)
    return [record.event for record in records if isinstance(record, EventRecord)]


@pytest.mark.parametrize("restored", [False, True])
def test_a_start_that_fails_writes_no_checkpoint_with_counters_that_begin_anew(tmp_path: Path, restored: bool) -> None:
    node, policy = made(tmp_path)
    failing(node, SapoError("vLLM cannot be started"), restored=restored)
    assert asyncio.run(node._life()) == 1
    assert len(policy.saved) == restored
    assert events(node) == ["started", *(["checkpoint"] if restored else []), "failed"]
    assert node._state == "stopped"


def test_a_fault_of_the_program_itself_is_told_too_and_costs_nothing_that_was_learnt(tmp_path: Path) -> None:
    node, policy = made(tmp_path)
    failing(node, OSError(24, "Too many open files"), restored=True)
    with pytest.raises(OSError, match="Too many open files"):
        asyncio.run(node._life())
    assert len(policy.saved) == 1
    assert events(node) == ["started", "checkpoint", "failed"]
    assert (node._state, node._reason) == ("stopped", "[Errno 24] Too many open files")
