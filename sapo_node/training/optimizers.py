"""The optimizer of a trainer: Adam with decoupled weight decay (arXiv:1711.05101), with moments as exact as asked for.

`adamw8bit` keeps the moments in blocks of 8-bit numbers ("8-bit optimizers via block-wise quantization",
arXiv:2110.02861), as bitsandbytes implements it; tensors of less than 4,096 numbers stay in float32. It is for GPUs,
where memory is scarce. It has not run on a GPU yet; steps and a resume were tried on a CPU with bitsandbytes 0.50.2.
"""

from collections.abc import Sequence

import torch

from sapo_node.config import TrainingSection
from sapo_node.workers import Refused


def make_optimizer(
    parameters: Sequence[torch.nn.Parameter], settings: TrainingSection, lr: float
) -> torch.optim.Optimizer:
    """The optimizer that the settings name. Raises Refused where it cannot run, told for people."""
    if settings.optimizer == "adamw8bit":
        return _adamw8bit(parameters, settings, lr)
    return torch.optim.AdamW(parameters, lr=lr, betas=settings.betas, weight_decay=settings.weight_decay, fused=True)


def _adamw8bit(parameters: Sequence[torch.nn.Parameter], settings: TrainingSection, lr: float) -> torch.optim.Optimizer:
    if parameters[0].device.type != "cuda":
        raise Refused(
            "training.optimizer adamw8bit saves memory of GPUs, and this node trains on a CPU; set it to adamw"
        )
    try:
        import bitsandbytes
    except ImportError as error:
        raise Refused(
            "training.optimizer adamw8bit needs bitsandbytes: pip install 'sapo-node[gpu]', or set it to adamw"
        ) from error
    optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(
        parameters, lr=lr, betas=settings.betas, weight_decay=settings.weight_decay
    )
    return optimizer
