"""`sapo-node swarm`: real nodes from one command, an honest verdict, nothing left behind."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sapo_node.monitor import history
from tests.harness import descendants, sapo_node, wait_gone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_two_nodes_take_their_rounds_and_lr_0_is_told_not_to_have_learnt(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ["--demo", "--nodes", "2", "--rounds", "60", "--set", "training.lr=0", "--dir", str(run)]
    done = sapo_node("swarm", *arguments, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "did not learn" in done.stdout
    crossed = re.search(r"([\d,]+) groups crossed the swarm", done.stdout)
    assert crossed
    assert int(crossed[1].replace(",", "")) > 0
    assert (run / "swarm.png").read_bytes().startswith(b"\x89PNG")
    for name in ("node-1", "node-2"):
        records = history.read(run / name / "history.jsonl")
        assert [record.round for record in history.rounds(records)] == list(range(1, 61))
        start, *_, end = history.evals(records)
        assert start.per_question == end.per_question  # the same weights, questions and sampling noise


def test_ctrl_c_ends_cleanly_and_leaves_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "sapo_node",
        "swarm",
        "--demo",
        "--nodes",
        "2",
        "--minutes",
        "5",
        "--dir",
        str(run),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        end = time.monotonic() + 120
        while not all(history.rounds(history.read(run / n / "history.jsonl")) for n in ("node-1", "node-2")):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.2)
        everyone = {process.pid} | descendants(process.pid)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=100)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, output
    assert wait_gone(everyone) == set()
    for name in ("node-1", "node-2"):
        assert list((run / name / "checkpoints").glob("step-*"))


def test_the_trained_model_is_measured_and_exported(tmp_path: Path) -> None:
    run = tmp_path / "run"
    made = sapo_node("swarm", "--demo", "--nodes", "1", "--rounds", "3", "--dir", str(run), timeout=200)
    assert made.returncode == 0, made.stdout + made.stderr
    config = run / "node-1.yaml"

    measured = sapo_node("eval", "--config", config, "--json", timeout=120)
    assert measured.returncode == 0, measured.stderr
    assert '"policy_version": 3' in measured.stdout

    out = tmp_path / "model"
    exported = sapo_node("export", "--config", config, out)
    assert exported.returncode == 0, exported.stderr
    code = (
        "import sys; from transformers import AutoModelForCausalLM, AutoTokenizer; "
        "m = AutoModelForCausalLM.from_pretrained(sys.argv[1]); t = AutoTokenizer.from_pretrained(sys.argv[1]); "
        "print(m.generate(**t('Calculate 1 + 1.', return_tensors='pt'), max_new_tokens=4).shape)"
    )
    loaded = subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, text=True, check=False)
    assert loaded.returncode == 0, loaded.stderr

    again = sapo_node("eval", "--config", config, "--checkpoint", out, "--json", timeout=120)
    assert again.returncode == 0, again.stderr
    status = sapo_node("status", "--config", config)
    assert status.returncode == 1  # it has ended
    assert "not running" in status.stdout
