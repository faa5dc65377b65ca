"""Real nodes that sample with vLLM. The first tests share two nodes and are one story; a start takes half a minute."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Node, Swarm, swarm, wait_gone
from tests.inference.support import family, needs_vllm, shared_memory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500), needs_vllm]

START_SECONDS = 240.0  # of vLLM, beside another node on two busy cores
MAX_STALENESS = 1


def inference(folder: Path) -> dict[str, Any]:
    return {"engine": "vllm", "batch_completions": 64, "kv_cache_gib": 0.25, "weights_dir": str(folder / "weights")}


def check_bound(node: Node) -> None:
    """No own group was ever staler than allowed, whatever was killed."""
    found = [record.staleness_max for record in node.rounds if record.staleness_max is not None]
    assert found
    assert max(found) <= MAX_STALENESS


def used_external(node: Node, producer: Node, since: int = 0) -> bool:
    """Whether groups of the other node moved this one's weights, in a round that it recorded after `since` others."""
    assert producer.status is not None
    return any(record.producer_gradients.get(producer.status.peer_id, 0) > 0 for record in node.rounds[since:])


@dataclass
class Pair:
    vllm: Node
    plain: Node
    weights: Path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    with swarm(folder) as nodes:
        plain = nodes.node("plain", inference={"engine": "transformers"}).start()
        vllm = nodes.node(
            "vllm",
            inference=inference(folder),
            training={"max_staleness": MAX_STALENESS},
            swarm={"initial_peers": [plain.address()]},
        ).start()
        vllm.wait_rounds(5, START_SECONDS)
        yield Pair(vllm, plain, folder / "weights")


def test_both_go_on_when_the_engine_is_killed_and_train_on_each_others_groups(pair: Pair) -> None:
    vllm, plain = pair.vllm, pair.plain
    assert vllm.process is not None
    before = family(vllm.process.pid)
    (core,) = [pid for pid, name in before.items() if name.startswith("VLLM::EngineCor")]
    worker = [pid for pid, name in before.items() if name == "VLLM::Worker"]
    os.kill(core, signal.SIGKILL)
    killed_at = len(vllm.rounds)

    vllm.wait(lambda: bool(vllm.status and vllm.status.engine_restarts == 1), "another engine", START_SECONDS)
    back_at = len(vllm.rounds)
    vllm.wait(lambda: len(vllm.rounds) > back_at + 5, "rounds with the new engine", 100)
    for node, other in ((vllm, plain), (plain, vllm)):
        node.wait(lambda node=node, other=other: used_external(node, other), "gradient from the other", 60)
        node.wait_rounds(10, 60)
    assert vllm.rounds[-1].local_groups > 0
    assert back_at > killed_at + 1, "rounds go on without the engine, on the other node's groups"
    assert any(record.local_groups == 0 and record.external_groups > 0 for record in vllm.rounds[killed_at:])
    assert "SIGKILL" in vllm.log
    assert vllm.status is not None
    assert vllm.status.engine == "vllm"
    assert vllm.status.sync_faults <= 1  # one where it was killed during an exchange
    assert wait_gone({core, *worker}) == set()
    check_bound(vllm)


def test_a_killed_node_resumes_and_keeps_within_the_bound(pair: Pair) -> None:
    vllm, plain = pair.vllm, pair.plain
    assert vllm.process is not None
    everyone = set(family(vllm.process.pid))
    shared = shared_memory(everyone)
    vllm.kill()
    assert wait_gone(everyone) == set()
    assert [path for path in shared if path.exists()] == []

    saved = max(int(path.name.split("-")[1]) for path in (vllm.data / "checkpoints").glob("step-*"))
    before = len(vllm.rounds)
    vllm.start()
    vllm.wait(lambda: len(vllm.rounds) > before + 8, "rounds after the restart", START_SECONDS)
    assert vllm.rounds[before].round == saved + 1
    assert any(record.local_groups > 0 for record in vllm.rounds[before:])
    vllm.wait(lambda: used_external(vllm, plain, before), "gradient from the other", 60)
    check_bound(vllm)
    (folder,) = pair.weights.iterdir()
    assert len(list(folder.iterdir())) <= 2, "the weights that the killed life left were removed"


def test_both_end_with_0_and_leave_nothing(pair: Pair) -> None:
    assert pair.vllm.process is not None
    everyone = set(family(pair.vllm.process.pid))
    shared = shared_memory(everyone)
    assert pair.vllm.stop() == 0, pair.vllm.log
    assert pair.plain.stop() == 0, pair.plain.log
    assert wait_gone(everyone) == set()
    assert [path for path in shared if path.exists()] == []
    assert list(pair.weights.iterdir()) == []
    last_life = pair.vllm.log.rpartition('"starting"')[2]  # in an earlier one vLLM said at length how it was killed
    assert "Traceback" not in last_life
    assert "never retrieved" not in last_life


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Swarm]:
    with swarm(tmp_path) as made:
        yield made


def test_sigterm_while_vllm_starts_ends_with_0_and_leaves_nothing(nodes: Swarm, tmp_path: Path) -> None:
    stages = {"imports": '"stage":"starting"', "loads": '"stage":"loading model"', "late": "VLLM::Worker"}
    started = {
        name: nodes.node(name, inference=inference(tmp_path / name), swarm={"enabled": False}).start()
        for name in stages
    }
    for name, node in started.items():
        assert node.process is not None
        process, text = node.process, stages[name]
        node.wait(
            lambda node=node, process=process, text=text: text in node.log or text in family(process.pid).values(),
            text,
            START_SECONDS,
        )
        everyone = set(family(process.pid))
        shared = shared_memory(everyone)
        assert node.stop() == 0, node.log
        assert wait_gone(everyone) == set()
        assert [path for path in shared if path.exists()] == []
        weights = tmp_path / name / "weights"
        assert not weights.exists() or list(weights.iterdir()) == []
        assert "Traceback" not in node.log
