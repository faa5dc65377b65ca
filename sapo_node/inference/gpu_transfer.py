"""placeholder"""

from collections.abc import Iterator
from typing import Any

import torch


def receive(transfer: dict[str, Any], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """x"""
    raise NotImplementedError
