"""What one step measures of itself: sums over trained tokens, apart for own and for others' completions."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sapo_node.training.base import Origin
from sapo_node.training.loss import TokenLoss
from sapo_node.training.rows import Row


@dataclass
class Sums:
    """Sums over the trained tokens of one stream and over micro-batches."""

    loss: float = 0.0
    tokens: float = 0.0
    clipped: float = 0.0
    ratio: float = 0.0
    entropy: float = 0.0
    logprob: float = 0.0
    delta: float = 0.0
    known: float = 0.0  # tokens with recorded log-probs
    kl: float = 0.0
    weight: float = 0.0  # of `training.external_weighting`

    def add(self, values: Sequence[float]) -> None:
        """Add one micro-batch's sums, in the order of the fields."""
        for name, value in zip(self.__dataclass_fields__, values, strict=True):
            setattr(self, name, getattr(self, name) + value)


@dataclass
class Measured:
    """What is gathered while a step goes on."""

    local: Sums = field(default_factory=Sums)
    external: Sums = field(default_factory=Sums)
    producers: dict[str, float] = field(default_factory=dict)  # gradient norms before clipping; empty unless asked for
    streams: dict[Origin, float] = field(default_factory=dict)  # likewise

    def add(
        self,
        result: TokenLoss,
        logprobs_N: Tensor,
        recorded_N: Tensor,
        entropy_N: Tensor,
        kl_N: Tensor | None,
        weight_N: Tensor | None,
        local_N: Tensor,
    ) -> None:
        """Add one micro-batch. `local_N` is 1 for own tokens, else 0; the others as in `loss.py`, detached here."""
        delta_N = (logprobs_N.detach() - recorded_N).abs()
        parts = torch.stack(
            [
                result.loss_N.detach(),
                torch.ones_like(local_N),
                result.clipped_N.to(local_N),
                result.ratio_N,
                entropy_N,
                logprobs_N.detach(),
                delta_N.nan_to_num(0.0),
                (~recorded_N.isnan()).to(local_N),
                torch.zeros_like(local_N) if kl_N is None else kl_N.detach(),
                torch.ones_like(local_N) if weight_N is None else weight_N,
            ]
        )
        local, external = torch.stack([(parts * local_N).sum(-1), (parts * (1 - local_N)).sum(-1)]).tolist()
        self.local.add(local)
        self.external.add(external)

    def metrics(self, rows: Sequence[Row], *, kl: bool, likelihood: bool) -> dict[str, float]:
        """Plain numbers; docs/operations.md explains each (a test compares).

        `kl` and `likelihood` say whether those were computed.
        """
        tokens = self.local.tokens + self.external.tokens
        metrics = {
            "loss": self.local.loss + self.external.loss,
            "loss_local": self.local.loss,
            "loss_external": self.external.loss,
            "tokens_trained": tokens,
            "tokens_masked": float(sum(len(row.tokens) for row in rows if row.weight == 0.0)),
        }
        if tokens:
            metrics["entropy"] = (self.local.entropy + self.external.entropy) / tokens
        streams: dict[Origin, Sums] = {"local": self.local, "external": self.external}
        for origin, one in streams.items():
            if one.tokens:
                metrics[f"entropy_{origin}"] = one.entropy / one.tokens
                metrics[f"clip_fraction_{origin}"] = one.clipped / one.tokens
                metrics[f"ratio_mean_{origin}"] = one.ratio / one.tokens
                metrics[f"logprob_{origin}"] = one.logprob / one.tokens
                if kl:
                    metrics[f"kl_{origin}"] = one.kl / one.tokens
            if origin in self.streams:
                metrics[f"grad_norm_{origin}"] = self.streams[origin]
        if self.local.known:  # others' recorded log-probs do not travel
            metrics["delta_logprob_local"] = self.local.delta / self.local.known
        if likelihood and self.external.tokens:
            metrics["likelihood_weight"] = self.external.weight / self.external.tokens
        if self.local.tokens and self.external.tokens:
            # Producers' own log-probs do not travel, so their distance is seen in how much less likely their text is.
            metrics["delta_logprob_producers"] = metrics["logprob_local"] - metrics["logprob_external"]
        return metrics
