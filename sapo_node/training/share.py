"""The newest weights, for an engine in another process: written as files, with a probe to compare the processes by."""

import time
from pathlib import Path
from typing import Final

import torch

from sapo_node import workers
from sapo_node.inference.base import Probe
from sapo_node.training.base import ShareRequest, Weights
from sapo_node.training.policy import Policy, plain_logprobs

PROBE_TOKENS: Final = 32
"""Enough to pass through every layer with a context, few enough to cost no more than a few tokens of sampling."""

WRITE_SECONDS: Final = 600.0


def share(policy: Policy, version: int, longest: int, request: ShareRequest) -> Weights:
    """Write the weights as safetensors into `<directory>/v<version>`; an older folder of that name is replaced.

    `longest` bounds the probe's tokens. Raises OSError when the folder cannot be written.
    """
    started = time.monotonic()
    workers.stage("writing weights", deadline=WRITE_SECONDS)
    folder = Path(request.directory) / f"v{version:08d}"
    folder.mkdir(exist_ok=True)
    policy.model.save_pretrained(folder)
    if request.whole:
        policy.tokenizer.save_pretrained(folder)
    workers.progress()
    return Weights(
        policy_version=version,
        probe=probe(policy, longest),
        path=str(folder),
        seconds=time.monotonic() - started,
    )


def probe(policy: Policy, longest: int) -> Probe:
    """Tokens that are the same at every call, and their log-probs under the policy as it is now."""
    count = min(PROBE_TOKENS, longest, policy.max_length - 1)
    vocabulary = len(policy.tokenizer)
    tokens = torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    return Probe(token_ids=tokens, logprobs=plain_logprobs(policy, tokens[:1], tokens[1:]).tolist())
