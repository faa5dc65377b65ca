"""`sapo-node swarm` starts, watches and ends nodes, and leaves nothing behind.

The nodes here are a stand-in that only writes what a node writes: what is tested is how they are kept, not what they
learn. The real ones are driven by tests/e2e.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from sapo_node import config_load, local_swarm
from sapo_node.config import NodeConfig
from sapo_node.errors import ConfigError, SapoError
from sapo_node.identity import Identity

STAND_IN = """
import json, os, signal, sys, time
from pathlib import Path
import yaml
from sapo_node.monitor.history import History
from sapo_node.monitor.metrics import QuestionScore, RoundRecord, eval_record
from sapo_node.monitor.status import NodeStatus, StatusFile

config_path, mode = Path(sys.argv[-1]), os.environ.get("STAND_IN", "")
settings = yaml.safe_load(config_path.read_text())
data = config_path.parent / settings["node"]["data_dir"]
name = data.name
stop = []
signal.signal(signal.SIGTERM, lambda *_: None if mode == "deaf" else stop.append(1))
history = History(data / "history.jsonl", 1 << 20)
file = StatusFile(data / "node.json")

def score(round, value):
    scores = [QuestionScore("sums", str(k), value) for k in range(32)]
    history.append(eval_record(scores, round=round, time=time.time(), policy_version=round, samples=1))

def say(state, round):
    file.write(NodeStatus(pid=os.getpid(), state=state, started_at=0, updated_at=time.time(), round=round), now=True)

score(0, 0.0)
if mode == "dies" and name == "node-2":
    print(json.dumps({"event": "cannot go on", "level": "error", "exception": "Traceback\\nValueError: no luck"}))
    sys.exit(3)
number = 0
while not stop and number != settings["node"].get("max_rounds"):
    number += 1
    history.append(RoundRecord(round=number, time=time.time(), policy_version=number, local_groups=2,
                               external_groups=2, groups_accepted=5))
    say("training", number)
    time.sleep(0.05)
score(number, 0.0 if mode == "flat" else 1.0)
say("stopped", number)
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> list[str]:
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    return [sys.executable, str(script)]


def swarm(stand_in: list[str], folder: Path, *, nodes: int = 2, rounds: int | None = 3) -> int:
    return local_swarm.run(
        nodes=nodes,
        rounds=rounds,
        minutes=None,
        demo=False,
        config_path=None,
        sets=[],
        directory=folder,
        command=stand_in,
    )


def peer(k: int) -> str:
    """A peer id as the settings accept it."""
    return f"12D3KooW{str(k + 1) * 44}"


def settings(count: int, number: int, base: NodeConfig | None = None, prefer: bool = False) -> NodeConfig:
    """The settings of one node of several, checked as the node would."""
    chosen = local_swarm.settings(
        base or NodeConfig(),
        number,
        ports=[20_000 + k for k in range(count)],
        peer_ids=[peer(k) for k in range(count)],
        rounds=7,
        prefer=prefer,
    )
    return NodeConfig.model_validate(chosen)


def test_a_setting_that_is_given_and_is_the_default_wins_over_the_recipe_in_each_node() -> None:
    base = NodeConfig.model_validate({"training": {"external_groups": 4}})
    assert base.training.strategy == "coverage", "the embedded model follows a recipe"
    for number in range(2):
        training = settings(2, number, base).training
        assert (training.external_groups, training.strategy) == (4, "coverage")
    written = local_swarm.settings(base, 0, ports=[20_000], peer_ids=[peer(0)], rounds=None, prefer=False)
    assert written["training"] == {"external_groups": 4}, "what only the recipe says is not written down as given"


def test_a_run_ends_by_itself_with_a_verdict(
    stand_in: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert swarm(stand_in, tmp_path / "run") == 0
    out = capfd.readouterr().out
    assert "The swarm learnt: its held-out score went from 0.000 to 1.000" in out
    assert "2 nodes, 32 questions), and 30 groups crossed the swarm." in out
    assert (tmp_path / "run" / "swarm.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(file.name for file in (tmp_path / "run" / "logs").iterdir()) == ["node-1.log", "node-2.log"]


def test_a_swarm_that_does_not_change_did_not_learn(
    stand_in: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN", "flat")
    assert swarm(stand_in, tmp_path / "run") == 0
    assert "The swarm did not learn: its held-out score stayed at 0.000" in capfd.readouterr().out


def test_a_node_that_dies_is_named_with_its_last_words_and_the_others_go_on(
    stand_in: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN", "dies")
    assert swarm(stand_in, tmp_path / "run", nodes=3) == 1
    out = capfd.readouterr().out
    assert "node-2 ended with exit code 3 after" in out
    assert "error: cannot go on" in out
    assert "ValueError: no luck" in out
    assert out.count("cannot go on") == 1
    assert "1 of 3 nodes did not finish: node-2." in out
    assert "2 of 3 nodes, 32 questions" in out


def test_the_settings_of_the_run_are_not_read_twice(
    stand_in: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listening address from the environment would put all nodes on one port."""
    monkeypatch.setenv("SAPO_NODE_TRAINING__LR", "0.5")
    assert swarm(stand_in, tmp_path / "run") == 0
    loaded = config_load.load(tmp_path / "run" / "node-2.yaml", {}).config
    assert loaded.training.lr == 0.5


class Driven:
    """A swarm in a process of its own, that can be interrupted."""

    def __init__(self, stand_in: list[str], folder: Path, mode: str) -> None:
        code = (
            "import sys\nfrom pathlib import Path\nfrom sapo_node import local_swarm\n"
            "sys.exit(local_swarm.run(nodes=2, rounds=None, minutes=None, demo=False, config_path=None, sets=[], "
            f"directory=Path({str(folder)!r}), command={stand_in!r}))"
        )
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "STAND_IN": mode},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def pids(self) -> list[int]:
        """Process ids of both nodes, once they run."""
        files = [self.folder / f"node-{k}" / "node.json" for k in (1, 2)]
        wait_until(lambda: all(file.exists() for file in files))
        return [yaml.safe_load(file.read_text())["pid"] for file in files]

    def end(self) -> str:
        return self.process.communicate(timeout=20)[0]


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.fixture
def driven(stand_in: list[str], tmp_path: Path) -> Iterator[Callable[..., Driven]]:
    started: list[Driven] = []

    def start(mode: str = "") -> Driven:
        started.append(Driven(stand_in, tmp_path / "run", mode))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.communicate()


def test_ctrl_c_lets_the_nodes_end_their_round(driven: Callable[..., Driven]) -> None:
    run = driven()
    pids = run.pids()
    run.process.send_signal(signal.SIGINT)
    out = run.end()
    assert run.process.returncode == 130
    assert "Ending: the nodes finish their round" in out
    assert "The swarm learnt" in out  # they took their last held-out score
    assert not any(runs(pid) for pid in pids)


def test_a_second_ctrl_c_ends_nodes_at_once_that_do_not_listen(driven: Callable[..., Driven]) -> None:
    run = driven("deaf")
    pids = run.pids()
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert all(runs(pid) for pid in pids)
    begun = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    run.end()
    assert time.monotonic() - begun < 2.0
    assert run.process.returncode == 130
    assert not any(runs(pid) for pid in pids)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
def test_nodes_die_with_a_swarm_that_is_killed(driven: Callable[..., Driven]) -> None:
    run = driven("deaf")
    pids = run.pids()
    run.process.kill()
    run.end()
    wait_until(lambda: not any(runs(pid) for pid in pids), 5.0)


def test_a_node_that_does_not_end_in_time_is_killed_and_named(
    stand_in: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STAND_IN", "deaf")
    monkeypatch.setattr(local_swarm, "END_MARGIN", 0.5)
    code = local_swarm.run(
        nodes=1,
        rounds=None,
        minutes=1.5 / 60,
        demo=False,
        config_path=None,
        sets=["node.drain_seconds=0.5"],
        directory=tmp_path / "run",
        command=stand_in,
    )
    assert code == 1
    assert "node-1 did not end within 1 s and was killed" in capfd.readouterr().out


def test_every_node_joins_by_the_first_and_by_two_others() -> None:
    joins = [[address.rpartition("/p2p/")[2] for address in settings(5, k).swarm.initial_peers] for k in range(5)]
    assert joins == [
        [peer(1), peer(2)],
        [peer(0), peer(2), peer(3)],
        [peer(0), peer(3), peer(4)],
        [peer(0), peer(4)],
        [peer(0), peer(1)],
    ]
    assert settings(1, 0).swarm.initial_peers == []


def test_nodes_stay_on_loopback() -> None:
    base = NodeConfig.model_validate({"swarm": {"nat_port_map": True, "announce": ["/ip4/192.0.2.1/tcp/1"]}})
    swarm = settings(3, 1, base).swarm
    assert swarm.listen == ["/ip4/127.0.0.1/tcp/20001"]
    assert swarm.announce == []
    assert not swarm.nat_port_map


def test_silo_nodes_stay_silo() -> None:
    assert settings(3, 1, NodeConfig.model_validate({"swarm": {"enabled": False}})).swarm.initial_peers == []


def test_trainers_share_few_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert settings(4, 0).node.threads == 1
    assert settings(3, 0).node.threads == 0
    assert settings(4, 0, NodeConfig.model_validate({"node": {"threads": 2}})).node.threads == 2


def test_every_task_of_the_demo_is_preferred_by_one_node_and_drawn_by_all() -> None:
    base = config_load.load(local_swarm.demo_config_path(), {}).config
    weights = [[entry.weight for entry in settings(4, k, base, prefer=True).tasks.mixture] for k in range(4)]
    for of_task in zip(*weights, strict=True):
        assert sorted(of_task) == [1.0, 1.0, 1.0, local_swarm.PREFERENCE]
    assert len({tuple(of_node) for of_node in weights}) == 4


def test_the_written_settings_are_what_a_node_reads(tmp_path: Path) -> None:
    base = config_load.load(local_swarm.demo_config_path(), {}, ["training.lr=1e-6", "swarm.push=on"]).config
    with local_swarm.reserved_ports(2) as ports:
        nodes = local_swarm.write_nodes(tmp_path, base, ports, 5, prefer=True)
    loaded = config_load.load(nodes[1].config_path, {}).config
    assert loaded.training.lr == 1e-6
    assert loaded.swarm.push == "on"
    assert loaded.node.data_dir == tmp_path / "node-2"
    assert loaded.node.max_rounds == 5
    assert [entry.config for entry in loaded.tasks.mixture] == [entry.config for entry in base.tasks.mixture]
    first = Identity.load(tmp_path / "node-1" / "identity.key")
    assert loaded.swarm.initial_peers == [f"/ip4/127.0.0.1/tcp/{ports[0]}/p2p/{first.peer_id}"]


def test_reserved_ports_are_distinct_and_held_until_the_nodes_start() -> None:
    with local_swarm.reserved_ports(20) as first, local_swarm.reserved_ports(20) as second:
        assert len({*first, *second}) == 40
        assert not {*first, *second} & set(range(32_768, 61_000))


def test_a_folder_with_something_in_it_is_refused(stand_in: list[str], tmp_path: Path) -> None:
    with pytest.raises(SapoError, match=r"is not empty; name another folder with --dir"):
        swarm(stand_in, tmp_path)


def test_wrong_settings_are_told_before_anything_is_started(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        local_swarm.run(
            nodes=2,
            rounds=1,
            minutes=None,
            demo=True,
            config_path=None,
            sets=["training.lrr=1"],
            directory=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


def test_the_demo_takes_no_other_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave out --config"):
        local_swarm.run(
            nodes=2, rounds=1, minutes=None, demo=True, config_path=tmp_path / "x", sets=[], directory=tmp_path
        )


def test_the_log_of_a_dead_node_is_cleaned(tmp_path: Path) -> None:
    log = tmp_path / "node.log"
    log.write_bytes(b'{"event": "one", "peer": "\\u001b[31mx"}\n\n\x1b[2Jtwo \xff\n')
    assert local_swarm.last_lines(log) == ["info: one peer=x", "two \N{REPLACEMENT CHARACTER}"]
