"""The newest weights, for an engine in another process, with a probe to compare the two processes by."""

import time
from pathlib import Path
from typing import Final

import torch

from sapo_node import workers
from sapo_node.inference.base import Probe
from sapo_node.inference.tensor_transfer import Sender
from sapo_node.training import adapters
from sapo_node.training.base import ShareRequest, Weights
from sapo_node.training.policy import Policy, plain_logprobs

PROBE_TOKENS: Final = 32
"""Enough to pass through every layer with a context, few enough to cost no more than a few tokens of sampling."""

SHARE_SECONDS: Final = 600.0


class Sharer:
    """Hands the weights of one policy over: as files, or from memory to memory."""

    def __init__(self, policy: Policy, longest: int) -> None:
        """`longest` bounds the probe's tokens."""
        self._policy = policy
        self._longest = longest
        self._sender: Sender | None = None  # of one life of the engine

    def share(self, request: ShareRequest, version: int) -> Weights:
        """The weights as they are now. Raises OSError when the folder cannot be written."""
        started = time.monotonic()
        workers.stage("sharing weights", deadline=SHARE_SECONDS)
        path = transfer = None
        if request.whole:
            self._sender = None  # an engine that starts from files knows nothing of an older one's group
        if request.whole or request.transfer == "files":
            path = str(self._write(request, version))
        else:
            if self._sender is None:
                self._sender = Sender(request.transfer, self._policy.model, request.receivers)
            transfer = self._sender.describe()
        workers.progress()
        return Weights(
            policy_version=version,
            probe=probe(self._policy, self._longest),
            path=path,
            transfer=transfer,
            seconds=time.monotonic() - started,
        )

    def send(self) -> None:
        """Broadcast what `share` described; returns when every receiver has it."""
        workers.stage("sending weights", deadline=SHARE_SECONDS)
        if self._sender is not None:
            self._sender.send()

    def _write(self, request: ShareRequest, version: int) -> Path:
        """Safetensors in `<directory>/v<version>`, and what an engine starts from; an older folder is overwritten."""
        folder = Path(request.directory) / f"v{version:08d}"
        folder.mkdir(exist_ok=True)
        adapters.save_model(self._policy.model, folder)
        if request.whole:
            self._policy.tokenizer.save_pretrained(folder)
        return folder


def probe(policy: Policy, longest: int) -> Probe:
    """Tokens that are the same at every call, and their log-probs under the policy as it is now."""
    count = min(PROBE_TOKENS, longest, policy.max_length - 1)
    vocabulary = len(policy.tokenizer)
    tokens = torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    return Probe(token_ids=tokens, logprobs=plain_logprobs(policy, tokens[:1], tokens[1:]).tolist())
