"""The real program, started as a user starts it: nodes find each other, share, survive, learn and stop."""

import contextlib
import json
import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from sapo_node.identity import Identity
from tests.harness import (
    BASE,
    REPOSITORY,
    Node,
    Swarm,
    alive,
    descendants,
    free_port,
    merge,
    sapo_node,
    swarm,
    wait_gone,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

NEOX = REPOSITORY / "tests" / "assets" / "neox"


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Swarm]:
    with swarm(tmp_path) as made:
        yield made


def peer_id(node: Node) -> str:
    assert node.status is not None
    return node.status.peer_id


def trained_on(node: Node, since: int = 0) -> set[str]:
    """Peers whose groups moved this node's weights after round `since`."""
    return {
        peer
        for record in node.rounds
        if record.round > since
        for peer, norm in record.producer_gradients.items()
        if norm > 0
    }


def wait_trained_on(node: Node, peers: set[str], seconds: float, since: int = 0) -> None:
    node.wait(lambda: peers <= trained_on(node, since), f"gradient from each of {sorted(peers)}", seconds)


def test_three_nodes_train_on_each_other_and_outlive_their_bootstrap(nodes: Swarm) -> None:
    first = nodes.node("first").start()
    seed_list = {"initial_peers": [first.address()]}
    second = nodes.node("second", swarm=seed_list).start()
    third = nodes.node("third", swarm=seed_list).start()
    for node in (second, third):
        node.address()
    ids = {node.name: peer_id(node) for node in (first, second, third)}
    for node in (first, second, third):
        wait_trained_on(node, set(ids.values()) - {ids[node.name]}, 120)

    assert first.stop() == 0
    gone_at = {node.name: node.rounds[-1].round for node in (second, third)}
    # What they had fetched of the first node runs out; from then on only the two feed each other.
    wait_trained_on(second, {ids["third"]}, 60, since=gone_at["second"] + 20)
    wait_trained_on(third, {ids["second"]}, 60, since=gone_at["third"] + 20)
    assert second.stop() == 0
    assert third.stop() == 0


def test_a_killed_node_resumes_as_the_same_peer_and_counts_no_use_twice(nodes: Swarm) -> None:
    stays = nodes.node("stays").start()
    once = {"max_external_uses": 1}
    dies = nodes.node("dies", swarm={"initial_peers": [stays.address()]}, rollouts=once).start()
    dies.address()
    wait_trained_on(dies, {peer_id(stays)}, 120)
    dies.wait(lambda: any(event.event == "checkpoint" for event in dies.events), "a checkpoint", 60)
    before, assert_id = dies.rounds[-1].round, peer_id(dies)
    children = descendants(dies.process.pid)  # type: ignore[union-attr]
    dies.kill()
    assert wait_gone(children) == set()
    saved = max(int(path.name.split("-")[1]) for path in (dies.data / "checkpoints").glob("step-*"))
    assert 0 < saved <= before

    killed_at = len(dies.rounds)
    used = used_groups(dies)
    assert used
    dies.start()
    dies.wait(lambda: len(dies.rounds) > killed_at + 5, "rounds after the restart", 120)
    assert dies.rounds[killed_at].round == saved + 1
    assert peer_id(dies) == assert_id
    wait_trained_on(dies, {peer_id(stays)}, 60, since=dies.rounds[-1].round)
    wait_trained_on(stays, {assert_id}, 60, since=stays.rounds[-1].round)
    assert dies.stop() == 0
    again = used_groups(dies)
    assert len(again) > len(used)
    assert {row: again[row] for row in used if row in again} == used  # not one was taken again by the later run


def used_groups(node: Node) -> dict[int, Any]:
    """Groups of the pool that were trained on: how often, by which run of the process, and in which of its rounds."""
    with contextlib.closing(sqlite3.connect(f"file:{node.data / 'pool.sqlite'}?mode=ro", uri=True)) as db:
        rows = db.execute("SELECT id, uses, used_run, used_round FROM groups WHERE uses > 0").fetchall()
    return {row[0]: row[1:] for row in rows}


def test_a_node_with_a_dead_bootstrap_trains_alone_and_joins_when_it_appears(nodes: Swarm) -> None:
    port = free_port()
    bootstrap = nodes.node("bootstrap", swarm={"listen": [f"/ip4/127.0.0.1/tcp/{port}"]})
    bootstrap.data.mkdir()
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{Identity.create(bootstrap.data / 'identity.key').peer_id}"
    alone = nodes.node("alone", swarm={"initial_peers": [address]}).start()
    alone.wait_rounds(5)
    alone.wait(lambda: bool(alone.status and alone.status.state == "silo"), "silo", 30)
    assert "You are alone in this swarm; training continues." in alone.log

    bootstrap.start()
    bootstrap.address()
    wait_trained_on(alone, {peer_id(bootstrap)}, 150)
    wait_trained_on(bootstrap, {peer_id(alone)}, 60)
    alone.wait(lambda: {"alone", "joined"} <= {event.event for event in alone.events}, "both events", 20)


def test_two_model_families_with_different_tokenizers_use_each_others_groups(nodes: Swarm) -> None:
    llama = nodes.node("llama").start()
    neox = nodes.node("neox", swarm={"initial_peers": [llama.address()]}, training={"model": str(NEOX)}).start()
    neox.address()
    wait_trained_on(llama, {peer_id(neox)}, 150)
    wait_trained_on(neox, {peer_id(llama)}, 60)
    models = [AutoTokenizer.from_pretrained(path) for path in (REPOSITORY / "sapo_node" / "assets" / "demo", NEOX)]
    assert len({frozenset(model.get_vocab()) for model in models}) == 2


def test_silo_learns_without_any_network(nodes: Swarm) -> None:
    node = nodes.node(
        "silo",
        node={"max_rounds": 80, "seed": 1},
        swarm={"enabled": False},
        tasks={"eval_questions": 60, "eval_samples": 2},
    ).start()
    node.wait(lambda: len(node.rounds) > 3, "rounds", 120)
    assert not sockets_of({node.process.pid} | descendants(node.process.pid))  # type: ignore[union-attr]
    assert node.wait_exit(200) == 0
    start, end = node.evals[0], node.evals[-1]
    assert (start.round, end.round) == (0, 80)
    assert end.mean > start.mean + 0.08, f"{start.scores} -> {end.scores}"
    assert all(record.external_groups == 0 for record in node.rounds)


def sockets_of(pids: set[int]) -> list[str]:
    """TCP and UDP sockets held by these processes."""
    tables = [
        line.split()
        for name in ("tcp", "tcp6", "udp", "udp6")
        for line in Path("/proc/net", name).read_text().splitlines()
    ]
    inodes = {fields[9] for fields in tables if fields[9].isdigit()}
    held = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = str(link.readlink())
            except OSError:
                continue  # closed while we looked
            if target.startswith("socket:[") and target[8:-1] in inodes:
                held.add(target)
    return sorted(held)


def test_sigterm_drains_to_exit_0_with_a_checkpoint_and_leaves_no_process(nodes: Swarm) -> None:
    node = nodes.node("drains").start().wait_rounds(3)
    assert node.process is not None
    everyone = {node.process.pid} | descendants(node.process.pid)
    assert len(everyone) >= 4  # node, policy, scorer, p2pd
    assert node.stop() == 0
    assert wait_gone(everyone) == set()
    last = node.rounds[-1].round
    state = json.loads((node.data / "checkpoints" / f"step-{last:06d}" / "state.json").read_text())
    assert state
    assert node.status is not None
    assert node.status.state == "stopped"


def holds_sigterm(pid: int) -> bool:
    """Whether SIGTERM is blocked in a process."""
    status = (Path("/proc") / str(pid) / "status").read_text()
    blocked = next(line.split()[1] for line in status.splitlines() if line.startswith("SigBlk"))
    return bool(int(blocked, 16) & 1 << signal.SIGTERM - 1)


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.3, 0.8, 2.0])
def test_sigterm_during_the_start_ends_with_0(nodes: Swarm, seconds: float) -> None:
    node = nodes.node("starts", swarm={"enabled": False}).start()
    assert node.process is not None
    pid = node.process.pid
    node.wait(lambda: holds_sigterm(pid), "a held SIGTERM", 20)
    time.sleep(seconds)
    everyone = {pid} | descendants(pid)
    assert node.stop() == 0, node.log
    assert wait_gone(everyone) == set()


def test_sigterm_during_an_evaluation_keeps_what_was_learnt(nodes: Swarm) -> None:
    tasks = {"eval_every": 2, "eval_questions": 60, "eval_samples": 40}
    node = nodes.node("measures", swarm={"enabled": False}, tasks=tasks, node={"drain_seconds": 20}).start()
    node.wait(lambda: bool(node.rounds) and node.rounds[-1].round == 2, "round 2, then its evaluation", 150)
    assert node.stop() == 0, node.log
    assert (node.data / "checkpoints" / "step-000002").is_dir()


def test_a_node_that_took_its_rounds_is_measured_however_short_its_drain_may_be(nodes: Swarm) -> None:
    over = {"node": {"max_rounds": 2, "drain_seconds": 0.01}, "tasks": {"eval_every": 0}}
    node = nodes.node("ends", swarm={"enabled": False}, **over).start()
    assert node.process is not None
    assert node.process.wait(120) == 0, node.log
    assert [one.round for one in node.evals] == [0, 2]
    assert 2 * node.evals[0].seconds > 0.01, "else it would have fitted"


def test_sigterm_ends_the_last_evaluation_of_a_node_that_took_its_rounds(nodes: Swarm) -> None:
    tasks = {"eval_every": 0, "eval_questions": 100, "eval_samples": 120}
    node = nodes.node("ends", swarm={"enabled": False}, tasks=tasks, node={"max_rounds": 1, "drain_seconds": 2})
    node.start().wait(lambda: any(one.event == "checkpoint" for one in node.events), "its last checkpoint", 150)
    time.sleep(0.2)
    assert node.evals[0].seconds > 3, "else it could end in time without the signal"
    assert node.stop() == 0, node.log
    assert (node.data / "checkpoints" / "step-000001").is_dir()
    assert [one.round for one in node.evals] == [0]


def test_sigterm_interrupts_sampling_that_would_take_long(nodes: Swarm) -> None:
    rollouts = {"tasks_per_round": 512, "completions_per_task": 64}
    node = nodes.node("samples", swarm={"enabled": False}, rollouts=rollouts, node={"drain_seconds": 60}).start()
    node.wait(lambda: bool(node.evals), "the first held-out score, and then sampling", 120)
    time.sleep(3)
    started = time.monotonic()
    assert node.stop() == 0, node.log
    assert time.monotonic() - started < 15, "32768 completions take far longer"
    assert node.rounds == []


def test_a_second_signal_forces_the_end(nodes: Swarm) -> None:
    node = nodes.node("forced").start().wait_rounds(2)
    assert node.process is not None
    everyone = {node.process.pid} | descendants(node.process.pid)
    policy = max(alive(everyone), key=lambda pid: rss(pid))
    os.kill(policy, signal.SIGSTOP)  # a step that never ends: only force helps before the drain's limit
    node.signal(signal.SIGTERM)
    time.sleep(1)
    assert alive({node.process.pid})
    started = time.monotonic()
    node.signal(signal.SIGTERM)
    assert node.wait_exit(15) == 1
    assert time.monotonic() - started < 10
    assert wait_gone(everyone) == set()


def rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1])


def test_kill_9_of_each_child_is_survived(nodes: Swarm) -> None:
    other = nodes.node("other").start()
    node = nodes.node("node", swarm={"initial_peers": [other.address()]}).start().wait_rounds(6)
    assert node.process is not None
    for child in sorted(descendants(node.process.pid)):
        if not alive({child}):
            continue  # went with its parent
        done = node.rounds[-1].round
        os.kill(child, signal.SIGKILL)
        before = len(node.rounds)
        node.wait(lambda before=before: len(node.rounds) > before + 3, f"rounds after a child died in {done}", 120)
    wait_trained_on(node, {peer_id(other)}, 90, since=node.rounds[-1].round)
    assert node.stop() == 0


def test_a_taken_port_is_told_and_ends_with_1(nodes: Swarm) -> None:
    first = nodes.node("first").start()
    port = first.address().split("/")[4]
    second = nodes.node("second", swarm={"listen": [f"/ip4/127.0.0.1/tcp/{port}"]}).start()
    assert second.wait_exit(60) == 1
    assert port in second.log
    assert "use" in second.log
    assert "Traceback" not in second.log


def test_a_data_directory_in_use_ends_with_4(nodes: Swarm) -> None:
    first = nodes.node("first", swarm={"enabled": False}).start().wait_rounds(1)
    again = sapo_node("start", "--config", first.config_path)
    assert again.returncode == 4
    assert str(first.process.pid) in again.stderr  # type: ignore[union-attr]
    assert "Traceback" not in again.stderr


@pytest.mark.parametrize(
    ("training", "words"),
    [
        ({"model": "./nowhere"}, "nowhere"),
        ({"model": str(REPOSITORY / "docs")}, "config.json"),
    ],
)
def test_a_model_that_is_none_ends_with_2_and_a_sentence(nodes: Swarm, training: dict[str, Any], words: str) -> None:
    node = nodes.node("node", training=training, swarm={"enabled": False}).start()
    assert node.wait_exit(120) == 2
    assert words in node.log
    assert "Traceback" not in node.log


def test_base_config_of_the_harness_is_a_valid_config(tmp_path: Path) -> None:
    path = tmp_path / "node.yaml"
    path.write_text(yaml.safe_dump(merge(BASE, {})))
    assert sapo_node("config", "check", path).returncode == 0
