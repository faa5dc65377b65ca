"""What runs inside vLLM's own worker processes: new weights go into the model there.

vLLM mixes `WeightSync` into its worker class (`worker_extension_cls`), so `self` is that worker.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sapo_node.inference.tensor_transfer import Description, Receiver


class WeightSync:
    """Methods that `collective_rpc` calls, in every worker of the engine. They return what went wrong, or ""."""

    model_runner: Any
    device: torch.device
    rank: int
    sapo_receiver: Receiver | None = None

    def sapo_reload(self, folder: str) -> str:
        """Take the weights from safetensors in a folder."""
        return problem(lambda: self._reload(folder))

    def sapo_receive(self, transfer: Description) -> str:
        """Take the weights from the trainer's memory; see `tensor_transfer` for what no GPU has run yet."""
        return problem(lambda: self._receive(transfer))

    def _reload(self, folder: str) -> None:
        self.model_runner.reload_weights(weights_path=folder)
        repack(self.model_runner.get_model())

    def _receive(self, transfer: Description) -> None:
        if self.sapo_receiver is None:
            self.sapo_receiver = Receiver(self.device, self.rank)
        self.model_runner.reload_weights(weights_iterator=self.sapo_receiver.receive(transfer))
        repack(self.model_runner.get_model())


def problem(action: Callable[[], None]) -> str:
    """How an action failed, in a line, or "". vLLM itself passes on that something failed, and not what."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - the node is told, and ends the engine
        return f"{type(error).__name__}: {error}"
    return ""


def repack(model: nn.Module) -> None:
    """Pack a tied output layer again.

    CPU kernels keep linear weights in a packed copy. A reload packs every layer it has loaded, but the output layer of
    a model with tied embeddings is not loaded under a name of its own: its packed copy stays that of the old weights,
    and log-probs are silently wrong. Packing it once more costs little where it was not needed.
    """
    head = getattr(model, "lm_head", None)
    method = getattr(head, "quant_method", None)
    if head is not None and method is not None:
        method.process_weights_after_loading(head)
