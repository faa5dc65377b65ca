"""A trainer alone in a process: two rounds of full micro-batches, then sampling; prints its peak memory in bytes.

Pages of libraries, which other processes share, are taken off. Arguments: model folder, settings as JSON.
"""

import json
import re
import sys
from pathlib import Path

import torch

from sapo_node.config import NodeConfig
from sapo_node.training.base import TrainCompletion, TrainGroup
from sapo_node.training.policy import load_policy
from sapo_node.training.trainer import Trainer


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def _group(number: int, config: NodeConfig) -> TrainGroup:
    count, length = config.rollouts.completions_per_task, config.inference.max_completion_tokens
    tokens = torch.randint(300, (count, length)).tolist()
    return TrainGroup(
        group_id=number,
        origin="local",
        producer="",
        question="why?",
        policy_version=0,
        rewards=[float(index % 2) for index in range(count)],
        completions=[
            TrainCompletion(text="", finish="stop", token_ids=ids, logprobs=[-3.0] * length) for ids in tokens
        ],
    )


def main() -> None:
    """Train and sample."""
    folder, config = sys.argv[1], NodeConfig.model_validate(json.loads(sys.argv[2]))
    torch.set_num_threads(1)
    libraries = _status("RssFile")
    trainer = Trainer(load_policy(folder), config.training, config.inference, seed=0)
    group_tokens = config.rollouts.completions_per_task * config.inference.max_completion_tokens
    groups = [_group(index, config) for index in range(config.training.micro_batch_tokens // group_tokens)]
    for _ in range(2):  # the moments exist from the first step on
        trainer.step(groups)
    print(_status("VmHWM") - libraries)


if __name__ == "__main__":
    main()
