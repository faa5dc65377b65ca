"""Weights from the trainer's memory into vLLM's, without files between them: for GPUs.

Two ways, chosen by `inference.weight_transfer`:

- `ipc`: trainer and engine share one GPU. The trainer copies its weights into a buffer of that GPU and tells the engine
  the handle by which CUDA lets another process read it. Costs one more copy of the weights in the GPU's memory.
- `nccl`: the engine has GPUs of its own. Trainer and engine's workers form a process group on this machine, and the
  trainer broadcasts one tensor after the other. On CPUs the group is gloo's, so this way is tried without a GPU.

No GPU has run `ipc` or NCCL's group yet. On CPUs `files` is as fast and simpler. Both ways give vLLM the tensors under
the names that the model's state dict has; architectures whose files are named otherwise need `files`.
"""

import math
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from sapo_node.training import adapters

HOST: Final = "127.0.0.1"  # trainer and engine are processes of one node
TIMEOUT: Final = timedelta(seconds=120)

Description = dict[str, Any]
"""What the trainer tells the engine, as plain values: `kind`, `tensors` (name, shape, type of each), and how to get at
them: `handle` (ipc), or `port` and `size` (nccl)."""


def named_weights(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The model's weights under the names of its state dict, tied ones once, adapters added in."""
    return list(adapters.weights(model))


def _tensors(weights: list[tuple[str, Tensor]]) -> list[tuple[str, list[int], str]]:
    return [(name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in weights]


class Sender:
    """The trainer's side, for one life of an engine."""

    def __init__(self, kind: str, model: nn.Module, workers: int) -> None:
        """`workers` is how many processes of the engine receive."""
        self._kind = kind
        self._model = model
        self._size = 1 + workers
        self._store: TCPStore | None = None
        self._group: Any = None
        self._buffer: Tensor | None = None  # must outlive the engine's reading of it

    def describe(self) -> Description:
        """What the engine has to know to receive the weights as they are now."""
        weights = named_weights(self._model)
        description: Description = {"kind": self._kind, "tensors": _tensors(weights)}
        if self._kind == "ipc":
            self._buffer = torch.cat([tensor.flatten() for _, tensor in weights])
            torch.cuda.synchronize()
            return description | {"handle": export_handle(self._buffer)}
        if self._store is None:
            self._store = _local_store(self._size)
        return description | {"port": self._store.port, "size": self._size}

    def send(self) -> None:
        """Broadcast the weights, while every worker of the engine receives. Nothing to do for `ipc`."""
        if self._store is None:
            return
        weights = named_weights(self._model)
        if self._group is None:
            self._group = process_group(self._store, 0, self._size, weights[0][1].device)
        for _, tensor in weights:
            self._group.broadcast(tensor.contiguous(), 0).wait()


def _local_store(size: int) -> TCPStore:
    """Where the group of `size` processes meets. Left to itself it would listen on every network of the machine."""
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        HOST,
        port,
        size,
        is_master=True,
        wait_for_workers=False,
        timeout=TIMEOUT,
        master_listen_fd=listener.detach(),  # the store closes it
    )


class Receiver:
    """The engine's side, in each of its workers."""

    def __init__(self, device: torch.device, index: int) -> None:
        """`index` is the worker's place among the engine's workers, from 0."""
        self._device = device
        self._index = index
        self._group: Any = None

    def receive(self, description: Description) -> Iterator[tuple[str, Tensor]]:
        """The tensors, one after the other."""
        if description["kind"] == "ipc":
            return self._from_buffer(description)
        return self._from_group(description)

    def _from_group(self, description: Description) -> Iterator[tuple[str, Tensor]]:
        if self._group is None:
            size = description["size"]
            store = TCPStore(HOST, description["port"], size, is_master=False, timeout=TIMEOUT)
            self._group = process_group(store, 1 + self._index, size, self._device)
        for name, shape, dtype in description["tensors"]:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            self._group.broadcast(tensor, 0).wait()
            yield name, tensor

    def _from_buffer(self, description: Description) -> Iterator[tuple[str, Tensor]]:
        buffer = open_handle(description["handle"], self._device)
        start = 0
        for name, shape, _ in description["tensors"]:
            count = math.prod(shape)
            yield name, buffer[start : start + count].view(shape)
            start += count


def process_group(store: TCPStore, rank: int, size: int, device: torch.device) -> Any:
    """A process group beside whatever groups the process has already."""
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = TIMEOUT
        return dist.ProcessGroupNCCL(store, rank, size, options)
    return dist.ProcessGroupGloo(store, rank, size, TIMEOUT)


def export_handle(buffer: Tensor) -> list[Any]:
    """How another process opens this tensor of a GPU, as plain values."""
    _, arguments = reduce_tensor(buffer)  # type: ignore[no-untyped-call]
    _, size, stride, offset, _, dtype, *rest = arguments
    return [list(size), list(stride), offset, str(dtype).removeprefix("torch."), *rest]


def open_handle(handle: list[Any], device: torch.device) -> Tensor:
    """The tensor that `export_handle` describes, in this process."""
    size, stride, offset, dtype, _, *rest = handle
    return rebuild_cuda_tensor(  # type: ignore[no-any-return, no-untyped-call]
        Tensor,
        torch.Size(size),
        tuple(stride),
        offset,
        torch.storage.TypedStorage,
        getattr(torch, dtype),
        device.index,  # the same GPU, which may have another number here
        *rest,
    )
