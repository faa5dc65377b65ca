"""What `sapo-node start` says to a user's mistake: one clear message, the right exit code, never a traceback."""

import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sapo_node.identity import Identity
from tests.harness import Node, Swarm, sapo_node, swarm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

SILO = {"enabled": False}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Swarm]:
    with swarm(tmp_path) as made:
        yield made


def outcome(node: Node, *arguments: str) -> tuple[int, str]:
    """Exit code and everything said, after checking that no traceback is among it."""
    done = sapo_node("start", "--config", node.config_path, *arguments, timeout=150)
    said = done.stdout + done.stderr
    assert "Traceback" not in said, said
    return done.returncode, said


def loose_key(node: Node) -> None:
    node.data.mkdir()
    Identity.create(node.data / "identity.key")
    (node.data / "identity.key").chmod(0o644)


def foreign_key(node: Node) -> None:
    node.data.mkdir()
    path = node.data / "identity.key"
    path.write_bytes(b"ssh-ed25519 AAAA")
    path.chmod(0o600)


def newer_directory(node: Node) -> None:
    node.data.mkdir()
    (node.data / "version").write_text("99\n")


def newer_pool(node: Node) -> None:
    node.data.mkdir()
    with sqlite3.connect(node.data / "pool.sqlite") as db:
        db.execute("PRAGMA application_id = 0x5341504F")
        db.execute("PRAGMA user_version = 99")
    db.close()


def damaged_pool(node: Node) -> None:
    node.data.mkdir()
    (node.data / "pool.sqlite").write_bytes(b"not a database" * 1000)


def file_in_place_of_directory(node: Node) -> None:
    node.data.write_text("a file")


def damaged_checkpoint(node: Node) -> None:
    folder = node.data / "checkpoints" / "step-000007"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text('{"format": 1, "pol')


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (loose_key, ["identity.key", "chmod 600"]),
        (foreign_key, ["identity.key"]),
        (newer_directory, ["newer", "99"]),
        (newer_pool, ["pool.sqlite", "newer"]),
        (damaged_pool, ["pool.sqlite"]),
        (file_in_place_of_directory, ["file where a directory"]),
        (damaged_checkpoint, ["state.json", "damaged"]),
    ],
)
def test_a_data_directory_that_cannot_be_used_ends_with_1(
    nodes: Swarm, prepare: Callable[[Node], None], words: list[str]
) -> None:
    node = nodes.node("node", swarm=SILO)
    prepare(node)
    code, said = outcome(node)
    assert code == 1, said
    for word in words:
        assert word in said


def test_a_read_only_place_is_told(nodes: Swarm) -> None:
    node = nodes.node("node", swarm=SILO)
    code, said = outcome(node, "--set", "node.data_dir=/proc/sapo-node")
    assert code == 1
    assert "/proc/sapo-node" in said


def test_wrong_settings_are_all_told_at_once_with_their_places(nodes: Swarm) -> None:
    node = nodes.node("node")
    node.config_path.write_text("training:\n  lrr: 1.0e-3\n  local_groups: many\nswarm: {name: 'a b'}\n")
    code, said = outcome(node)
    assert code == 2
    path = node.config_path
    assert f"{path}:2:3: training.lrr: unknown setting; did you mean 'lr'?" in said
    assert f"{path}:3:17: training.local_groups:" in said
    assert f"{path}:4:" in said


def test_a_task_that_is_not_offered_is_told_with_its_line(nodes: Swarm) -> None:
    node = nodes.node("node")
    node.config_path.write_text("tasks:\n  mixture:\n    - name: codeio\n")
    code, said = outcome(node)
    assert code == 2
    assert "3:7: tasks.mixture.0: codeio cannot be used" in said


def write_rows(node: Node, rows: list[str]) -> dict[str, Any]:
    (node.directory / "rows.jsonl").write_text("".join(f"{row}\n" for row in rows))
    return {"mixture": [{"source": "dataset", "name": "mine", "path": "rows.jsonl", "verifier": "exact"}]}


def test_a_broken_row_of_a_data_set_is_told_with_its_line(nodes: Swarm) -> None:
    node = nodes.node("node", swarm=SILO)
    tasks = write_rows(node, ['{"question": "1+1?", "answer": "2"}', '{"question": "no answer"}'])
    node.configure({**node.config, "tasks": tasks})
    code, said = outcome(node)
    assert code == 1
    assert "rows.jsonl:2: " in said


def test_a_data_set_trains_and_says_how_many_rows_are_withheld(nodes: Swarm) -> None:
    node = nodes.node("node", swarm=SILO, node={"max_rounds": 3})
    rows = [json.dumps({"question": f"Calculate {i} + {i}.", "answer": str(2 * i)}) for i in range(60)]
    node.configure({**node.config, "tasks": write_rows(node, rows)})
    code, said = outcome(node)
    assert code == 0, said
    loaded = next(json.loads(line) for line in said.splitlines() if "data set loaded" in line)
    assert loaded["rows"] + loaded["withheld"] == 60
    assert loaded["withheld"] > 0
    assert [record.round for record in node.rounds] == [1, 2, 3]


def test_a_model_that_is_no_causal_language_model_is_told(nodes: Swarm, tmp_path: Path) -> None:
    model = tmp_path / "bert"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "bert", "architectures": ["BertForMaskedLM"]}')
    node = nodes.node("node", swarm=SILO, training={"model": str(model)})
    code, said = outcome(node)
    assert code == 2
    assert "causal" in said


def test_unknown_variables_with_our_prefix_are_told(nodes: Swarm) -> None:
    node = nodes.node("node", swarm=SILO)
    done = sapo_node("start", "--config", node.config_path, SAPO_NODE_TRAINING__LRR="1")
    assert done.returncode == 2
    assert "SAPO_NODE_TRAINING__LRR" in done.stderr
    assert os.environ.get("SAPO_NODE_TRAINING__LRR") is None
