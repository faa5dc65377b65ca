"""The policy as its node started: what the KL penalty compares with, and what adapters are added to.

It is a second, frozen copy of the weights, or, with adapters, the policy itself while they are switched off. After a
restart it is still the model that `training.model` names, not the checkpoint; the log-probs of a few fixed tokens, kept
in every checkpoint, tell whether that is the same model as before.
"""

from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor

from sapo_node.training import adapters
from sapo_node.training.logprobs import token_logprobs
from sapo_node.training.packing import Packed
from sapo_node.training.policy import Policy, agree
from sapo_node.training.share import PROBE_TOKENS, probe


class Reference:
    """A frozen policy."""

    def __init__(self, policy: Policy) -> None:
        """`policy` is used as it is: with its adapters switched off where it has some."""
        self._policy = policy
        self._adapted = adapters.attached(policy.model)
        self.fingerprint = self._fingerprint()
        """Log-probs of fixed tokens, float32."""

    @classmethod
    def of(cls, policy: Policy) -> "Reference":
        """The policy as it is now: a copy, unless all that will change of it are its adapters."""
        if adapters.attached(policy.model):
            return cls(policy)
        return cls(replace(policy, model=deepcopy(policy.model).requires_grad_(False)))

    @torch.no_grad()
    def logprobs(self, inputs: Packed, temperature: float) -> Tensor:
        """Log-probs of the N tokens of `inputs`, N."""
        with self._as_it_was():
            return token_logprobs(self._policy.model, inputs, temperature, self._policy.split_head)[0]

    def is_that_of(self, fingerprint: Tensor) -> bool:
        """Whether another life of this node had the same reference."""
        return agree(self.fingerprint, fingerprint, self._policy.dtype)

    def _fingerprint(self) -> Tensor:
        with self._as_it_was():
            return torch.tensor(probe(self._policy, PROBE_TOKENS).logprobs)

    def _as_it_was(self) -> AbstractContextManager[None]:
        return adapters.switched_off(self._policy.model) if self._adapted else nullcontext()
