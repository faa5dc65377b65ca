"""The command line: exit codes, messages, speed, and the commands that need neither a model nor a network."""

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sapo_node import cli, config_load
from sapo_node.commands.status import last_record
from sapo_node.datadir import DataDir
from sapo_node.identity import Identity
from sapo_node.model_shape import folder_here
from sapo_node.monitor.history import History
from sapo_node.monitor.metrics import EvalRecord, QuestionScore, eval_record
from sapo_node.monitor.status import NodeStatus, StatusFile
from sapo_node.training import checkpoint
from sapo_node.training.checkpoint import State

PROGRAM = [sys.executable, "-m", "sapo_node"]
PEER_ID = re.compile(r"12D3KooW[A-Za-z0-9]{44}")


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith("SAPO_NODE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[DataDir]:
    """A data directory that another process holds, as a node would."""
    code = (
        "import sys, pathlib; from sapo_node.datadir import DataDir\n"
        "lock = DataDir(pathlib.Path(sys.argv[1])).lock(); print('held', flush=True); sys.stdin.read()"
    )
    data = DataDir(tmp_path / "held")
    with subprocess.Popen(
        [sys.executable, "-c", code, data.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stdin
        assert process.stdout.readline() == "held\n"
        yield data
        process.stdin.close()


def a_status(**changes: object) -> NodeStatus:
    values = {"pid": 4711, "state": "training", "started_at": time.time() - 120, "updated_at": time.time(), "round": 7}
    return NodeStatus(**{**values, **changes})  # type: ignore[arg-type]


def processor_seconds(command: list[str]) -> float:
    """Processor time of a command, the least of several runs. It waits for nothing, so on an idle machine that is its
    wall time; on a busy one the wall time says more about the neighbours."""

    def once() -> float:
        before = os.times()
        subprocess.run(command, capture_output=True, check=False)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    return min(once() for _ in range(3))


# ---- the program as a whole


def test_help_and_status_answer_at_once(tmp_path: Path) -> None:
    assert cli.run(["init", str(tmp_path)]) == 0
    assert processor_seconds([*PROGRAM, "--help"]) < 0.3
    assert processor_seconds([*PROGRAM, "status"]) < 0.3  # reads node.yaml for the data directory


@pytest.mark.parametrize("arguments", [["--help"], ["start", "--help"], ["status"], ["--version"]])
def test_quick_commands_import_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from sapo_node import cli; cli.run(sys.argv[1:])\n"
        "print(sorted({'pydantic', 'torch', 'transformers', 'hivemind', 'rich', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_start_loads_settings_without_torch(tmp_path: Path) -> None:
    code = "import sys; from sapo_node import config_load; config_load.load(None, {}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert re.fullmatch(r"sapo-node \d+\.\d+\.\d+\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["strat"], "No such command 'strat'"),
        (["start", "--confg", "x"], "No such option"),
        (["swarm", "--nodes", "0"], "0 is not in the range"),
        (["swarm", "--rounds", "3", "--minutes", "1"], "give one of them"),
        (["status", "--config", "a.yaml", "--data-dir", "b"], "give one of them"),
        (["completion", "csh"], "'csh' is not one of"),
    ],
)
def test_wrong_usage_exits_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["start", "eval", "swarm"])
def test_wrong_settings_exit_2_before_anything_starts(command: str, tmp_path: Path) -> None:
    (tmp_path / "node.yaml").write_text("training:\n    lrr: 0.1\n    rule: x\n")
    done = subprocess.run([*PROGRAM, command, "--config", "node.yaml"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "node.yaml:2:5: training.lrr: unknown setting; did you mean 'lr'?",
        "node.yaml:3:11: training.rule: must be 'paper' or 'capped', not 'x'",
    ]


def start_in(data_dir: Path) -> "subprocess.CompletedProcess[str]":
    """`sapo-node start` without a network, for what is checked before anything else begins."""
    Path("node.yaml").write_text("swarm: {enabled: false}\n")
    command = [*PROGRAM, "start", "--set", f"node.data_dir={data_dir}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_start_in_a_directory_that_is_in_use_exits_4(running: DataDir) -> None:
    done = start_in(running.path)
    assert done.returncode == 4
    assert re.fullmatch(
        rf"error: the data directory {running.path} is in use by another node \(process \d+\); stop it first, or give "
        r"this node its own node\.data_dir\n",
        done.stderr,
    )


def test_start_in_a_directory_of_a_newer_version_exits_1(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "version").write_text("2\n")
    done = start_in(tmp_path / "data")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: the data directory {tmp_path}/data was made by a newer sapo-node (format 2)")


def test_interrupted_exits_130_without_a_word(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # reading it waits for a writer that never comes
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, also by children, in a job of the background
    with subprocess.Popen(
        [*PROGRAM, "config", "check", "pipe"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        time.sleep(1.5)  # until it waits there
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
    assert (process.returncode, out, err.strip()) == (130, "", "")


def test_a_fault_of_ours_shows_its_traceback() -> None:
    code = (
        "import sys; from sapo_node import cli\n"
        "@cli.cli.command()\ndef broken(): {}['key']\n"
        "sys.argv = ['sapo-node', 'broken']; cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "KeyError: 'key'" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("This is a fault of sapo-node. Please report it")


def test_a_reader_that_leaves_is_no_fault() -> None:
    done = subprocess.run(
        ["bash", "-c", '"$0" -m sapo_node config show | head -c 1', sys.executable], capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("n", "")


@pytest.mark.parametrize(
    ("shell", "marker"), [("bash", "complete -o nosort"), ("zsh", "#compdef"), ("fish", "complete")]
)
def test_completion_scripts(shell: str, marker: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert marker in script
    assert f"_SAPO_NODE_COMPLETE={shell}_complete" in script


def test_completion_works_in_bash(tmp_path: Path) -> None:
    """A real bash loads the script and asks the real program what comes after `sapo-node st`."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "sapo-node"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m sapo_node "$@"\n')
    program.chmod(0o755)
    script = (
        'eval "$(sapo-node completion bash)"\n'
        "COMP_WORDS=(sapo-node st); COMP_CWORD=1; _sapo_node_completion sapo-node; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    bash = shutil.which("bash")
    assert bash
    done = subprocess.run(
        [bash, "-c", script],
        env={"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["start", "status"], done.stderr


# ---- init and id


def test_init_writes_settings_and_a_private_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["init", "mine"]) == 0
    said = capsys.readouterr().out
    key = tmp_path / "mine" / "sapo-data" / "identity.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    assert "A node in a swarm is public" in said
    assert "sapo-node start --config mine/node.yaml" in said
    assert cli.run(["config", "check", "mine/node.yaml"]) == 0
    capsys.readouterr()
    assert cli.run(["id", "--config", "mine/node.yaml"]) == 0
    assert capsys.readouterr().out.strip() == Identity.load(key).peer_id
    assert PEER_ID.search(said)


def test_init_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["init"]) == 0
    key = tmp_path / "sapo-data" / "identity.key"
    before = key.read_bytes()
    assert cli.run(["init"]) == 1
    assert "node.yaml exists and is not overwritten" in capsys.readouterr().err
    (tmp_path / "node.yaml").unlink()
    assert cli.run(["init"]) == 0
    assert "kept, it was there" in capsys.readouterr().out
    assert key.read_bytes() == before


def test_init_where_nothing_can_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert cli.run(["init", "file/sub"]) == 1
    assert capsys.readouterr().err == "error: file/sub cannot be made: Not a directory\n"


def test_init_says_what_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["init"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"Engine: +(transformers|vllm): \w+", said)
    assert re.search(r"Memory: +up to [\d.]+ GiB are needed; memory: [\d.]+ GiB", said)


def test_init_says_what_becomes_public(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["init"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "others see its IP address, its peer id, and the questions and completions that it shares" in said
    assert "Licence:" not in said, "that of the embedded model is known"


def test_init_writes_the_settings_that_are_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo = folder_here("demo")
    assert demo is not None
    folder = shutil.copytree(demo, tmp_path / "mine")
    arguments = ["--model", "mine", "--set", "training.lr=3e-4", "--set", "training.betas=[0.5, 0.9]"]
    assert cli.run(["init", "deep/er", *arguments]) == 0
    training = config_load.load(Path("deep/er/node.yaml"), {}).config.training
    assert (training.model, training.lr, training.betas) == (str(folder), 3e-4, (0.5, 0.9))
    assert training.licence == "unknown", "the template's is that of the embedded model"
    assert "Licence:  training.licence does not name that of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("training.lrr=1e-5", "did you mean 'training.lr'?"),
        ("tasks.mixture=[{name: gcd}]", "edit it in node.yaml"),
        ("training.lr", "has no value"),
    ],
)
def test_init_refuses_settings_it_cannot_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, complaint: str
) -> None:
    assert cli.run(["init", "--set", setting]) == 2
    assert complaint in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


SEVENTY_BILLION = {
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28_672,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
}


def test_init_knows_a_model_that_is_too_large_by_its_config_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "config.json").write_text(json.dumps(SEVENTY_BILLION))
    assert cli.run(["init", "node", "--model", "large"]) == 2
    assert re.search("71 G parameters x 4 bytes", capsys.readouterr().err)
    assert not (tmp_path / "node").exists()


def test_init_names_a_folder_that_is_not_there_as_it_was_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["init", "node", "--model", "./nosuch"]) == 2
    assert "--model ./nosuch: there is no such folder" in capsys.readouterr().err
    assert cli.run(["init", "node", "--set", "training.model=./nosuch"]) == 2
    assert f"there is no folder {tmp_path}/node/nosuch" in capsys.readouterr().err
    assert cli.run(["init", "node", "--model", "nosuch"]) == 2
    assert "'nosuch' is no embedded model" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [["init", "node", "--model", "mine"], ["start", "--config", "mine.yaml"]])
@pytest.mark.timeout(20)
def test_a_folder_that_is_not_whole_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    demo = folder_here("demo")
    assert demo is not None
    folder = shutil.copytree(demo, tmp_path / "mine")
    Path("mine.yaml").write_text("training: {model: ./mine}\n")
    (folder / "tokenizer.json").unlink()
    assert cli.run(command) == 2
    assert "has no tokenizer" in capsys.readouterr().err
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    assert cli.run(command) == 2
    assert "is no regular file" in capsys.readouterr().err
    assert not [*tmp_path.rglob("identity.key"), *tmp_path.rglob("pool.sqlite")]


@pytest.mark.parametrize(
    "command", [["init"], ["start", "--config", "small.yaml"], ["swarm", "--config", "small.yaml"]]
)
def test_what_cannot_fit_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    Path("small.yaml").write_text("training: {model: demo}\n")
    assert cli.run([*command, "--set", "training.micro_batch_tokens=1000000000"]) == 2
    error = capsys.readouterr().err
    assert "cannot fit" in error
    assert re.search(r"activations +[\d.]+ GiB +1000000000 tokens", error)
    assert re.search(r"training.micro_batch_tokens: \d+ +\(now 1000000000; results stay the same\)", error)
    assert [
        file.name for file in tmp_path.rglob("*") if file.name in ("pool.sqlite", "node.json", "identity.key")
    ] == []


def test_a_key_that_others_can_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["init"]) == 0
    key = tmp_path / "sapo-data" / "identity.key"
    key.chmod(0o644)
    assert cli.run(["id"]) == 1
    error = capsys.readouterr().err
    assert "(mode 0644)" in error
    assert f"chmod 600 {key}" in error


def test_no_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["id", "--data-dir", "nowhere"]) == 1
    assert "there is no key file; `sapo-node init` makes one" in capsys.readouterr().err


# ---- config check and show


def test_check_names_the_errors_of_all_files_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAPO_NODE_LR", "1")
    (tmp_path / "a.yaml").write_text("threads: 1\n")
    (tmp_path / "b.yaml").write_text("node: 1\n")
    assert cli.run(["config", "check", "a.yaml", "b.yaml"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "a.yaml:1:1: threads: unknown setting; did you mean 'node.threads'?",
        "SAPO_NODE_LR: unknown setting; did you mean SAPO_NODE_TRAINING__LR?",
        "b.yaml:1:7: node: must be settings (name: value), not 1",
    ]


def test_show_can_be_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text(
        "training: {max_grad_norm: .inf, lr: 1e-9}\nswarm: {name: '1e3', push: 'on'}\n"
        "inference: {system_prompt: 'null'}\n"
    )
    assert cli.run(["config", "show", "a.yaml", "--origin"]) == 0
    first = capsys.readouterr().out
    (tmp_path / "b.yaml").write_text(first)
    assert cli.run(["config", "show", "a.yaml"]) == 0
    plain = capsys.readouterr().out
    assert cli.run(["config", "show", "b.yaml"]) == 0
    assert capsys.readouterr().out == plain
    assert re.search(r"^  lr: 1e-09 +# a\.yaml:1$", first, re.MULTILINE)
    assert re.search(r"^  objective: \"grpo\" +# default$", first, re.MULTILINE)
    assert re.search(r"^  rule: \"capped\" +# training.recipe: wide$", first, re.MULTILINE)


def test_show_without_a_file_prints_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["config", "show", "--set", "training.lr=3e-4", "--origin"]) == 0
    assert re.search(r"lr: 0\.0003 +# --set training\.lr$", capsys.readouterr().out, re.MULTILINE)


# ---- status


def test_status_of_a_running_node(running: DataDir, capsys: pytest.CaptureFixture[str]) -> None:
    status = a_status(
        swarm="here", peers=3, reward_first_drawn=0.25, held_out=0.5, held_out_start=0.4, addresses=["/ip4/1", "/ip4/2"]
    )
    StatusFile(running.status).write(status)
    assert cli.run(["status", "--data-dir", str(running.path)]) == 0
    said = capsys.readouterr().out
    for fact in (
        "running for 2 min (process 4711)",
        "state      training",
        "round      7",
        "here, 3 peers",
        "0.250 of the groups drawn first",
        "0.500 (+0.100 since the start)",
    ):
        assert fact in said
    assert cli.run(["status", "--data-dir", str(running.path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["running"], report["node"]["round"], report["last"]) == (True, 7, None)


def test_status_of_a_silent_and_of_a_starting_node(running: DataDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["status", "--data-dir", str(running.path)]) == 0
    assert "is starting; it has said nothing yet" in capsys.readouterr().out
    StatusFile(running.status).write(a_status(updated_at=time.time() - 600))
    assert cli.run(["status", "--data-dir", str(running.path)]) == 0
    assert "but silent for 10 min" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("state", "silent_seconds", "code"),
    [
        ("starting", 0, 1),
        ("joining", 0, 0),
        ("training", 0, 0),
        ("silo", 0, 0),
        ("draining", 0, 1),
        ("training", 60, 1),
    ],
)
def test_status_ready(running: DataDir, state: str, silent_seconds: float, code: int) -> None:
    StatusFile(running.status).write(a_status(state=state, updated_at=time.time() - silent_seconds))
    assert cli.run(["status", "--data-dir", str(running.path), "--ready"]) == code


def test_a_node_that_has_said_nothing_is_not_ready(running: DataDir) -> None:
    assert cli.run(["status", "--data-dir", str(running.path), "--ready"]) == 1


def test_a_node_that_has_ended_is_not_ready(tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    StatusFile(data.status).write(a_status(state="training", updated_at=time.time()))
    assert cli.run(["status", "--data-dir", ".", "--ready"]) == 1


def test_status_of_a_stopped_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = DataDir(tmp_path)
    data.lock().close()
    StatusFile(data.status).write(a_status(state="stopped", reason="stopped by SIGTERM", updated_at=time.time() - 7200))
    assert cli.run(["status", "--data-dir", "."]) == 1
    said = capsys.readouterr().out
    assert "not running; last heard of 2.0 h ago" in said
    assert "stopped: stopped by SIGTERM" in said


def test_status_where_there_is_no_node(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["status", "--data-dir", "nowhere"]) == 1
    assert "no node has run in nowhere; start one with" in capsys.readouterr().err
    assert not Path("nowhere").exists()
    assert cli.run(["status", "--data-dir", "nowhere", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["node"] is None


def test_status_that_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "node.json").write_text('{"pid": 1, "sta')
    assert cli.run(["status", "--data-dir", "."]) == 1
    error = capsys.readouterr().err
    assert "node.json is not the status of a node" in error
    assert "not running" in error


def test_status_reads_past_a_torn_line_of_history(tmp_path: Path) -> None:
    history = tmp_path / "history.jsonl"
    assert last_record(history) is None
    with History(history, 1 << 20) as writer:
        score = QuestionScore(task="bf", sha256="00" * 8, score=1.0)
        writer.append(eval_record([score], round=3, time=0.0, policy_version=3, samples=1))
    with history.open("ab") as stream:
        stream.write(b'{"kind": "rou')
    found = last_record(history)
    assert isinstance(found, EvalRecord)
    assert found.round == 3


# ---- export


def test_export_without_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["export", "--data-dir", "data", "out"]) == 1
    assert "data holds no checkpoint yet" in capsys.readouterr().err


def write_model(folder: Path) -> None:
    (folder / "model").write_text("weights")


def test_export_of_the_newest_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for version in (9, 100):
        state = State(policy_version=version, model="demo", extra={})
        checkpoint.write(tmp_path / "data" / "checkpoints", state, write_model, keep=2)
    assert cli.run(["export", "--data-dir", "data", "out"]) == 0
    assert "out: the model of step-000100" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]
    assert cli.run(["export", "--data-dir", "data", "out"]) == 1
    assert "out exists already" in capsys.readouterr().err
