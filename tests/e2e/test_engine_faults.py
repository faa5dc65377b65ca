"""A node whose engine fails in ways that vLLM seldom does; `inference/toy_engine.py` stands in its place."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import Node, Swarm, descendants, swarm, wait_gone
from tests.inference.support import needs_vllm
from tests.inference.toy_engine import FAULTS

pytestmark = [pytest.mark.slow, needs_vllm]  # without vllm `inference.engine: vllm` is refused


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Swarm]:
    (tmp_path / "faults").mkdir()
    monkeypatch.setenv(FAULTS, str(tmp_path / "faults"))
    with swarm(tmp_path) as made:
        yield made


def toy(nodes: Swarm, **over: object) -> Node:
    """A node without a swarm, not started."""
    over = {"node": {"drain_seconds": 20}, "swarm": {"enabled": False}, **over}
    node = nodes.node("toy", inference={"engine": "vllm", "kv_cache_gib": 0.1}, **over)
    node.module = "tests.inference.toy_engine"
    return node


def switch(nodes: Swarm, fault: str) -> Path:
    file = nodes.directory / "faults" / fault
    file.touch()
    return file


def test_a_stop_during_an_exchange_that_hangs_keeps_what_was_learnt(nodes: Swarm) -> None:
    node = toy(nodes, training={"checkpoint_every": 1000}).start().wait_rounds(2)
    switch(nodes, "hangs in exchanges")
    time.sleep(2)  # until a step waits for the exchange before it
    rounds = node.rounds[-1].round
    assert node.stop(25) == 0, node.log
    last = node.rounds[-1].round
    assert last >= rounds
    assert (node.data / "checkpoints" / f"step-{last:06d}").is_dir()


def test_an_engine_that_dies_at_every_batch_does_not_end_the_node(nodes: Swarm) -> None:
    node = toy(nodes).start().wait_rounds(2)
    fault = switch(nodes, "dies at sampling")
    node.wait(lambda: node.log.count("a batch could not be sampled") >= 3, "three lost batches", 60)
    fault.unlink()
    rounds = node.rounds[-1].round
    node.wait_rounds(rounds + 2, 60)
    assert node.status is not None
    assert node.status.engine_restarts >= 2  # the third may still be under way
    assert "in_a_row" not in node.log.split("a batch could not be sampled")[1].splitlines()[0]
    assert node.stop() == 0


def test_a_node_whose_policy_cannot_come_back_ends_although_only_the_engine_asks_for_it(
    nodes: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = toy(nodes, training={"checkpoint_every": 1000}).start().wait_rounds(2)
    assert node.process is not None
    switch(nodes, "dies at sampling")  # so that no round is taken that would ask the policy for anything
    node.wait(lambda: "a batch could not be sampled" in node.log, "an engine that is down", 30)
    everyone = descendants(node.process.pid)
    while '"faults_in_a_row":5' not in node.log:
        node.wait(lambda: bool(policies(node)) or '"faults_in_a_row":5' in node.log, "the policy's process", 60)
        for pid in policies(node):
            os.kill(pid, signal.SIGKILL)
    assert node.wait_exit(120) == 1
    assert "failed 5 times in a row" in node.log
    assert "Traceback" not in node.log
    assert wait_gone(everyone) == set()


def policies(node: Node) -> list[int]:
    """Process ids of the node's policy worker."""
    assert node.process is not None
    found = []
    for pid in descendants(node.process.pid):
        with contextlib.suppress(OSError):  # it ended just now
            if b"sapo_node.training.policy_worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@pytest.mark.parametrize("turn", range(4))
def test_ctrl_c_in_the_first_moments_of_the_engine_ends_at_once(nodes: Swarm, turn: int) -> None:
    node = toy(nodes).start()
    assert node.process is not None
    node.wait(lambda: '"stage":"not started"' in node.log, "vLLM's first stage", 30)
    everyone = descendants(node.process.pid)
    node.signal(signal.SIGINT)
    assert node.wait_exit(10) == 0, node.log
    assert wait_gone(everyone) == set()


def test_status_tells_of_the_start_while_it_goes_on(nodes: Swarm) -> None:
    node = toy(nodes).start()
    node.wait(lambda: node.status is not None and node.status.engine == "vllm", "the engine in node.json", 30)
    assert node.status is not None
    assert node.status.state == "starting"
