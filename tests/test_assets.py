"""The embedded models and the configuration that names their tasks."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from sapo_node.config import NodeConfig, TaskEntry
from sapo_node.tasks import catalog
from sapo_node.tasks.base import MIN_EVAL_QUESTIONS, is_eval_question, question_sha256

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "make_tiny_model.py"
SHIPPED = {
    "demo": ROOT / "sapo_node" / "assets" / "demo",
    "benchmark": ROOT / "sapo_node" / "assets" / "benchmark",
    "neox": ROOT / "tests" / "assets" / "neox",
}
CONFIG = NodeConfig(**yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text()))
TASKS = {entry.name: entry for entry in CONFIG.tasks.mixture}
TOKENIZERS: dict[str, Any] = {name: AutoTokenizer.from_pretrained(folder) for name, folder in SHIPPED.items()}


def questions(entry: TaskEntry, seeds: int) -> set[str]:
    """The distinct questions of a task's first seeds."""
    return {
        reasoning_gym.create_dataset(entry.name, size=1, seed=seed, **entry.config)[0]["question"]
        for seed in range(seeds)
    }


def ask(name: str, question: str) -> str:
    """A question in a model's chat template."""
    message = [{"role": "user", "content": question}]
    return str(TOKENIZERS[name].apply_chat_template(message, tokenize=False, add_generation_prompt=True))


@pytest.mark.parametrize("name", SHIPPED)
def test_loads_in_plain_transformers_and_answers(name: str) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(SHIPPED[name]), TOKENIZERS[name]
    prompt = tokenizer(ask(name, "Calculate 2 + 3."), return_tensors="pt", add_special_tokens=False)
    output = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert output.shape[1] > prompt["input_ids"].shape[1]


@pytest.mark.parametrize("name", SHIPPED)
def test_every_token_the_model_can_sample_is_in_its_tokenizer(name: str) -> None:
    config = AutoModelForCausalLM.from_pretrained(SHIPPED[name]).config
    assert config.vocab_size == len(TOKENIZERS[name])
    assert config.eos_token_id == TOKENIZERS[name].eos_token_id


@pytest.mark.parametrize("name", SHIPPED)
@given(text=st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_survives_encoding(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("task", TASKS)
def test_questions_and_marks_survive_encoding(name: str, task: str) -> None:
    tokenizer = TOKENIZERS[name]
    for text in [*questions(TASKS[task], 20), "<answer>(P ∧ ¬Q)</answer>", "\n.2. ¬¬R  Monday\t\n"]:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("task", TASKS)
def test_prompts_fit_into_the_demo_configuration(name: str, task: str) -> None:
    longest = max(
        len(TOKENIZERS[name].encode(ask(name, question), add_special_tokens=False))
        for question in questions(TASKS[task], 200)
    )
    assert longest <= CONFIG.inference.max_prompt_tokens


def test_the_families_have_different_tokenizers() -> None:
    question = next(iter(questions(TASKS["gcd"], 1)))
    lengths = {name: len(TOKENIZERS[name].encode(question, add_special_tokens=False)) for name in ("demo", "neox")}
    assert lengths["demo"] != lengths["neox"]


def test_shipped_files_stay_small() -> None:
    files = [file for folder in SHIPPED.values() for file in folder.rglob("*") if file.is_file()]
    assert len(files) >= 3 * 5
    assert not [file for file in files if file.stat().st_size > 4 << 20]


@pytest.mark.parametrize("task", TASKS)
def test_each_task_has_enough_questions_held_out(task: str) -> None:
    asked = questions(TASKS[task], 4000)
    assert len(asked) >= 350
    assert sum(is_eval_question(question_sha256(question)) for question in asked) >= MIN_EVAL_QUESTIONS


@pytest.mark.parametrize("task", TASKS)
def test_tasks_lie_within_the_bounds_of_the_catalog(task: str) -> None:
    catalog.validate(task, TASKS[task].config)


def test_evaluation_questions_are_not_used_to_make_a_model() -> None:
    check = (
        "import sys; from pathlib import Path; from tiny_model.problems import read_mixture, training_problems\n"
        "from sapo_node.tasks.base import is_eval_question, question_sha256\n"
        "problems = training_problems(read_mixture(Path(sys.argv[1])), 100, seed=0)\n"
        "asked = [problem.question for task in problems.values() for problem in task]\n"
        "print(len(asked), sum(is_eval_question(question_sha256(question)) for question in asked))"
    )
    command = [sys.executable, "-c", check, str(ROOT / "configs" / "demo.yaml")]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parent)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.split() == ["800", "0"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_the_same_seed_makes_the_same_bytes(tmp_path: Path, family: str) -> None:
    digests = []
    for run in ("first", "second"):
        options = ["--steps", "3", "--weaken-steps", "2", "--examples", "120", "--eval-questions", "1"]
        folders = ["--out", str(tmp_path / run), "--cache", str(tmp_path / f"cache-{run}")]
        subprocess.run(
            [sys.executable, str(SCRIPT), "--preset", "demo", "--family", family, *options, *folders],
            capture_output=True,
            timeout=110,
            check=True,
        )
        files = sorted((tmp_path / run).iterdir())
        digests.append({file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files})
    assert "model.safetensors" in digests[0]
    assert digests[0] == digests[1]
