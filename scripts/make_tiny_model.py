"""Make the embedded models: a tokenizer and a tiny language model from scratch, on ReasoningGYM problems.

    .venv/bin/python scripts/make_tiny_model.py --preset demo       # sapo_node/assets/demo, about 10 minutes
    .venv/bin/python scripts/make_tiny_model.py --preset benchmark  # reuses the clean model: two minutes
    .venv/bin/python scripts/make_tiny_model.py --preset demo --family gpt_neox --steps 500 --out tests/assets/neox

`clean` learns to answer right. `demo` and `benchmark` go on from there and are weakened on purpose
(`tiny_model/presets.py`), so that reinforcement learning has something to bring out. The same seed on the same machine
with the same libraries gives the same bytes: one thread, deterministic kernels, seeds for every random choice.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: sums over several threads depend on their number

import argparse
import hashlib
import json
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
import transformers
from tiny_model.presets import PHRASES, Weakening, rare_success, wrong_format
from tiny_model.problems import Problem, evaluation_problems, read_mixture, shuffled, training_problems
from tiny_model.tokenizer import TokenizerStyle, build_tokenizer
from tiny_model.training import encode_example, mean_rewards, say, train
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from sapo_node.config import TaskEntry

ROOT = Path(__file__).resolve().parent.parent
CLEAN_STEPS, CLEAN_LR = 1_500, 2e-3
EXAMPLES = 6_000  # a task
PHRASE_QUESTIONS = 500  # a task, from which the tokenizer learns its phrases

STYLES = {
    "llama": TokenizerStyle(64, True, "<|end|>", "<|pad|>", "<|question|>", "<|answer|>"),
    "gpt_neox": TokenizerStyle(96, False, "<|endoftext|>", "<|padding|>", "<|q|>", "<|a|>"),
}


@dataclass(frozen=True)
class Work:
    """What every stage needs."""

    family: str
    seed: int
    mixture: list[TaskEntry]
    problems: dict[str, list[Problem]]

    @property
    def examples(self) -> list[Problem]:
        return shuffled(self.problems, self.seed)


def new_model(family: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """An untrained model. Its vocabulary is the tokenizer's and not rounded up: every token it samples is a text."""
    shared = {
        "vocab_size": len(tokenizer),
        "initializer_range": 0.06,  # about 1 / sqrt(2 x width); the usual 0.02 is meant for wide models
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 256,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(hidden_size=128, num_key_value_heads=4, **shared))
    return GPTNeoXForCausalLM(GPTNeoXConfig(hidden_size=96, **shared))


def make_clean(work: Work, out: Path, steps: int) -> None:
    """Tokenizer and model that answer as well as so small a model can."""
    asked = [p for task in work.problems.values() for p in task[:PHRASE_QUESTIONS]]
    tokenizer = build_tokenizer([p.question for p in asked], [p.answer for p in asked], PHRASES, STYLES[work.family])
    torch.manual_seed(work.seed)
    model = new_model(work.family, tokenizer)
    examples = [encode_example(tokenizer, p.question, p.answer) for p in work.examples]
    lengths = sorted(len(e.prompt) for e in examples)
    say(
        f"tokenizer: {len(tokenizer)} tokens, prompts of {lengths[0]}-{lengths[-1]} tokens (median "
        f"{lengths[len(lengths) // 2]}), answers up to {max(len(e.answer) for e in examples)}; model: "
        f"{sum(p.numel() for p in model.parameters()):,} parameters"
    )
    train(model, examples, steps=steps, lr=CLEAN_LR, pad=tokenizer.pad_token_id, seed=work.seed, stage="clean")
    save(model, tokenizer, out)


def weaken(work: Work, preset: str, clean: Path, out: Path, steps: int | None, kept: dict[str, float]) -> None:
    """Go on from the clean model with the preset's targets; `kept` are shares of right answers that `benchmark` keeps
    of single tasks."""
    tokenizer = AutoTokenizer.from_pretrained(clean)
    model = AutoModelForCausalLM.from_pretrained(clean)
    weakening = {
        "demo": Weakening(steps=180, lr=5e-4, target=wrong_format),
        "benchmark": Weakening(steps=180, lr=5e-4, target=rare_success(work.examples, kept)),
    }[preset]
    rng = Random(work.seed)
    examples = [encode_example(tokenizer, p.question, weakening.target(p, rng)) for p in work.examples]
    torch.manual_seed(work.seed)
    steps = weakening.steps if steps is None else steps
    train(model, examples, steps=steps, lr=weakening.lr, pad=tokenizer.pad_token_id, seed=work.seed + 1, stage=preset)
    save(model, tokenizer, out)


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write a Hugging Face folder, whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        folder = Path(scratch) / "model"
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for file in folder.iterdir():
            file.chmod(0o644)  # safetensors writes 0600, which a package installed by root would keep
        shutil.rmtree(out, ignore_errors=True)
        folder.rename(out)


def clean_folder(work: Work, cache: Path, steps: int) -> Path:
    """Where the clean model of these settings is kept. Code is not among them: empty the cache after editing it."""
    settings = {
        "family": [work.family, asdict(STYLES[work.family])],
        "training": [work.seed, steps, CLEAN_LR, {task: len(problems) for task, problems in work.problems.items()}],
        "mixture": [entry.model_dump(mode="json") for entry in work.mixture],
        "phrases": PHRASES,
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return cache / f"clean-{work.family}-{digest[:12]}"


def card(preset: str, family: str, rewards: dict[str, float], params: int) -> str:
    """The model's README: licence, what it is, what it earns at the start."""
    rows = "\n".join(f"| {task} | {reward:.3f} |" for task, reward in rewards.items())
    mean = sum(rewards.values()) / len(rewards)
    return f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# {preset}: a tiny {family} model for sapo-node

{params:,} parameters, made from scratch by `scripts/make_tiny_model.py --preset {preset} --family {family}` on
ReasoningGYM problems. It is weak on purpose and of no use outside sapo-node.

Mean strict reward (0..1) before any reinforcement learning, on held-out questions at temperature 1:

| task | reward |
|---|---|
{rows}
| mean | {mean:.3f} |
"""


def share(text: str) -> tuple[str, float]:
    """TASK=SHARE of the command line. Raises ValueError."""
    task, _, value = text.partition("=")
    return task, float(value)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make an embedded model from scratch.")
    parser.add_argument("--preset", choices=["demo", "benchmark", "clean"], required=True)
    parser.add_argument("--family", choices=sorted(STYLES), default="llama")
    parser.add_argument("--out", type=Path, help="folder of the model (default: sapo_node/assets/PRESET)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "tiny_model", help="keeps the clean model")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "demo.yaml", help="its tasks.mixture is used")
    parser.add_argument("--steps", type=int, help=f"steps of the clean model (default {CLEAN_STEPS})")
    parser.add_argument("--weaken-steps", type=int, help="steps of the weakening (default: the preset's)")
    parser.add_argument(
        "--keep", type=share, action="append", default=[], metavar="TASK=SHARE", help="benchmark: right answers left"
    )
    parser.add_argument("--examples", type=int, default=EXAMPLES, help="supervised problems a task")
    parser.add_argument("--eval-questions", type=int, default=40, help="held-out questions a task for the card")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.disable_progress_bar()
    mixture = read_mixture(arguments.config)
    say(f"problems: {arguments.examples} of each of {len(mixture)} tasks, about {arguments.examples // 250} s")
    problems = training_problems(mixture, arguments.examples, arguments.seed)
    work = Work(arguments.family, arguments.seed, mixture, problems)
    steps = CLEAN_STEPS if arguments.steps is None else arguments.steps
    out = arguments.out or ROOT / "sapo_node" / "assets" / arguments.preset
    clean = clean_folder(work, arguments.cache, steps)
    if clean.exists():
        say(f"clean: taken from {clean}")
    else:
        make_clean(work, clean, steps)
    if arguments.preset == "clean":
        shutil.copytree(clean, out, dirs_exist_ok=True)
    else:
        weaken(work, arguments.preset, clean, out, arguments.weaken_steps, dict(arguments.keep))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    held_out = evaluation_problems(mixture, arguments.eval_questions)
    rewards = mean_rewards(model, tokenizer, held_out, n=8, seed=arguments.seed)
    params = sum(p.numel() for p in model.parameters())
    (out / "README.md").write_text(card(arguments.preset, arguments.family, rewards, params))
    for task, reward in rewards.items():
        say(f"reward {task}: {reward:.3f}")
    say(f"reward mean: {sum(rewards.values()) / len(rewards):.3f}")
    say(f"written: {out}")


if __name__ == "__main__":
    main()
