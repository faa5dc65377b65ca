"""One policy trained on several devices of this machine, with torch's FSDP2 (`fully_shard`).

Rank 0 is the node's policy worker. It spawns ranks 1 to N - 1 (`rank_worker.py`), supervised as all workers are, and
every rank takes the same step on the same groups: each encodes and weighs all of them, runs the forward and backward
passes of its own share, and holds one N-th of weights, gradients and moments. Gradients add up to those of one device.

Everything else is rank 0's: sampling, checkpoints, weights for vLLM. For these all ranks gather the whole weights for a
moment (`ShardedTrainer.whole`) and rank 0 sees them as a plain model; so each device must have room for all weights
once, at a time when no gradients or activations exist. The other ranks wait while rank 0 samples.

A rank that dies, hangs or fails ends rank 0 with the reason, and the node starts all of them again from the newest
checkpoint: after a failure in the middle of a collective the ranks do not agree any more. Ranks die with rank 0.

Run on CPUs with gloo. No GPU has run it yet.
"""

import asyncio
import contextlib
import copy
import os
import socket
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from msgspec import Struct
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from sapo_node import workers
from sapo_node.config import InferenceSection, TrainingSection
from sapo_node.inference.base import Nothing, SampledBatch, SamplingParams
from sapo_node.training import state
from sapo_node.training.base import LoadRequest, StepRequest, StepResult, TrainGroup
from sapo_node.training.logprobs import Chosen, token_logprobs
from sapo_node.training.packing import Packed, Piece, micro_batches, pack, pad
from sapo_node.training.policy import Policy, agree, choose_device, singles
from sapo_node.training.remote import LOAD_SECONDS, SAVE_SECONDS, STEP_SECONDS
from sapo_node.training.rows import Row
from sapo_node.training.step_metrics import Measured
from sapo_node.training.trainer import MICRO_BATCH_SECONDS, Make, Trainer

RANK_MODULE: Final = "sapo_node.training.rank_worker"
START_SECONDS: Final = 300.0  # of a rank: torch is imported, by all at once
LOST_SECONDS: Final = 5.0  # until the thread that watches sees that a rank is gone; it looks every second
COLLECTIVE_SECONDS: Final = 2 * MICRO_BATCH_SECONDS  # ranks wait for the slowest; the stage's deadline comes first
RANK, SIZE = "RANK", "WORLD_SIZE"  # variables of a rank's environment, named as torchrun names them

Load = Callable[[LoadRequest, Make], Trainer]


class Join(Struct, frozen=True, kw_only=True):
    """Asks a rank to load the model as rank 0 did, and to join it."""

    load: LoadRequest
    store: str  # file by which the ranks find each other
    packed: bool  # what rank 0 found out about the model: all must choose alike
    split_head: bool


@dataclass(frozen=True)
class Team:
    """This process's place among the ranks."""

    rank: int
    size: int
    device: torch.device


# ---- a trainer on a part of the weights ------------------------------------------------------------------------------


class ShardedTrainer(Trainer):
    """The trainer of one rank. Methods that are collective must be called on all ranks; rank 0's see to that."""

    def __init__(
        self,
        team: Team,
        policy: Policy,
        training: TrainingSection,
        inference: InferenceSection,
        seed: int | None,
        followers: "Followers | None" = None,
    ) -> None:
        """`policy` is whole and on the CPU; here it loses its weights. `followers` is rank 0's. Collective."""
        self._team = team
        self._followers = followers
        self._root, self._shell = shard(policy, team)
        self._gathered = 0
        super().__init__(policy, training, inference, seed, trained=self._root.model)

    # ---- what rank 0 does alone --------------------------------------------------------------------------------------

    def sample(self, questions: Sequence[str], params: SamplingParams) -> SampledBatch:
        """As the trainer's, while the others wait."""
        with self.whole():
            return super().sample(questions, params)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Every rank gathers the weights and rank 0 has them in `policy.model`, until the block ends."""
        if not self._gathered:
            with self._together("gather", Nothing(), SAVE_SECONDS):
                self.gather()
        self._gathered += 1
        try:
            with self._shell.filled(self._root.model):
                yield
        finally:
            self._gathered -= 1
            if not self._gathered:
                self.scatter()

    def write(self, folder: Path) -> None:
        """As the trainer's; the folder is the same as one device would write."""
        with self._together("moments", Nothing(), SAVE_SECONDS):
            moments = self.moments()
        with self.whole():
            self._write(folder, moments)

    def close(self) -> None:
        """End the other ranks, and leave the group."""
        if self._followers is not None:
            self._followers.close()
        dist.destroy_process_group()

    @contextlib.contextmanager
    def _together(self, method: str, request: Struct, seconds: float) -> Iterator[None]:
        """Have all ranks do the same."""
        if self._followers is None:
            yield
            return
        with self._followers.follow(method, request, seconds):
            yield

    # ---- what all ranks do -------------------------------------------------------------------------------------------

    def step(self, groups: Sequence[TrainGroup]) -> StepResult:
        """As the trainer's. Collective."""
        with self._together("step", StepRequest(groups=list(groups)), STEP_SECONDS):
            return super().step(groups)

    def gather(self) -> None:
        """Have the whole weights in `trained`. Collective."""
        workers.stage("gathering weights", deadline=MICRO_BATCH_SECONDS)
        for part in _parts(self._root):
            part.unshard()

    def scatter(self) -> None:
        """Keep only this rank's part of the weights."""
        for part in _parts(self._root):
            part.reshard()

    def moments(self) -> dict[str, Tensor]:
        """The optimizer's state, whole and on the CPU; empty tensors on ranks other than 0. Collective."""
        workers.stage("gathering moments", deadline=MICRO_BATCH_SECONDS)

        def whole(tensor: Tensor) -> Tensor:
            gathered = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            return gathered.cpu() if self._team.rank == 0 else torch.empty(0)

        return state.moments(self.trained, self.optimizer, whole)

    def _logprobs(self, inputs: Packed) -> Chosen:
        found: Chosen = self._root(inputs, self.inference.temperature, self.policy.split_head)
        return found

    def _micro_batches(self, trained: Sequence[Row]) -> list[tuple[list[Piece], float]]:
        """This rank's share, with as many passes as the rank with most has: weights are gathered in each by all.

        FSDP averages gradients over ranks, so shares are multiplied by their number; passes that only take part by 0.
        """
        limit = self.training.micro_batch_tokens
        pieces = sorted(self._pieces(trained), key=lambda piece: -piece.width)
        shares = [
            micro_batches(pieces[rank :: self._team.size], limit, packed=self.policy.packed)
            for rank in range(self._team.size)
        ]
        own = shares[self._team.rank]
        idle = max(map(len, shares)) - len(own)
        return [(batch, float(self._team.size)) for batch in own] + [([pieces[-1]], 0.0)] * idle

    def _backward(self, batch: Sequence[Row]) -> Measured:
        measured = super()._backward(batch)
        both = (measured.local, measured.external)
        sums = torch.tensor([list(vars(one).values()) for one in both], dtype=torch.float64)
        dist.all_reduce(sums)
        for one, values in zip(both, sums.tolist(), strict=True):
            for name, value in zip(vars(one), values, strict=True):
                setattr(one, name, value)
        return measured


class Root(nn.Module):
    """The policy's forward pass with its log-probs: FSDP gathers what is needed where a module's `forward` begins."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Packed, temperature: float, split_head: bool) -> Chosen:
        """As `token_logprobs`."""
        return token_logprobs(self.model, inputs, temperature, split_head)


class Shell:
    """A plain model without weights of its own, into which those of a sharded one are put while they are whole.

    Sampling and saving use it: FSDP's own modules count their forward passes, and would expect the same of all ranks.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        """A copy of the model, whose parameters have shapes but no numbers."""
        hollow = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()}
        self.model = copy.deepcopy(model, hollow)
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)

    @contextlib.contextmanager
    def filled(self, sharded: nn.Module) -> Iterator[None]:
        """With the weights of `sharded`, which must be whole now."""
        hollow = [dict(module._parameters) for module in self.model.modules()]
        for name, module in self.model.named_modules():
            module._parameters.update(sharded.get_submodule(name)._parameters)
        try:
            yield
        finally:
            for module, parameters in zip(self.model.modules(), hollow, strict=True):
                module._parameters.update(parameters)


def shard(policy: Policy, team: Team) -> tuple[Root, Shell]:
    """Cut the policy's weights and put this rank's part onto its device; `policy.model` is the shell then. Collective.

    The model goes over block by block, so that no device holds all of it. Raises Refused where the sharded model
    computes other log-probs than the whole one.
    """
    model = policy.model
    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokens: list[int] = torch.randint(vocabulary, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    piece = Piece(tokens[:7], [tokens[7:12], tokens[12:]], [0, 1])
    exact = _first_pass(Root(model), policy, piece).detach()
    shell = Shell(model, team.device)
    mesh = init_device_mesh(team.device.type, (team.size,))
    reduce = MixedPrecisionPolicy(reduce_dtype=torch.float32)  # sums of bfloat16 gradients lose small ones
    blocks = set(getattr(model, "_no_split_modules", None) or ())
    for module in list(model.modules()):
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh, mp_policy=reduce)
    root = Root(model)
    fully_shard(root, mesh=mesh, mp_policy=reduce)
    policy.device, policy.model = team.device, shell.model
    found = _first_pass(root, policy, piece)
    (0 * found.sum()).backward()  # type: ignore[no-untyped-call]  # FSDP counts forward passes and waits for their end
    root.zero_grad(set_to_none=True)
    if not agree(found.detach(), exact, policy.dtype):
        raise workers.Refused("training.devices: this model gives other log-probs when it is split; set it to 1")
    return root, shell


def _first_pass(root: Root, policy: Policy, piece: Piece) -> Tensor:
    inputs = pack([piece], policy.device, policy.dtype) if policy.packed else pad(singles(piece), policy.device)
    logprobs: Tensor = root(inputs, 1.0, policy.split_head)[0]
    return logprobs


def _parts(root: nn.Module) -> list[FSDPModule]:
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


# ---- ranks -----------------------------------------------------------------------------------------------------------


def join(rank: int, size: int, store: str, device: str) -> Team:
    """Meet the other ranks; returns when all are there."""
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    own = torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")
    if own.type == "cuda":
        torch.cuda.set_device(own)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if own.type == "cuda" else "gloo",
        store=FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
    )
    return Team(rank, size, own)


def check(training: TrainingSection) -> str:
    """The kind of device that the ranks run on. Raises Refused where there are too few."""
    kind = choose_device(training.device).type
    if kind == "cuda" and torch.cuda.device_count() < training.devices:
        raise workers.Refused(
            f"training.devices is {training.devices}, but torch finds {torch.cuda.device_count()} GPU(s) here"
        )
    return kind


def lead(request: LoadRequest, training: TrainingSection, load: Load) -> ShardedTrainer:
    """Rank 0: load the model, spawn the others, and share it out. Raises Refused as `load` does."""
    kind = check(training)
    followers = Followers(training.devices)

    def make(
        policy: Policy, training: TrainingSection, inference: InferenceSection, seed: int | None, origin: Policy | None
    ) -> ShardedTrainer:
        workers.stage("starting ranks", deadline=START_SECONDS)
        followers.start()
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            store = str(Path(folder) / "store")
            others = Join(load=request, store=store, packed=policy.packed, split_head=policy.split_head)
            with followers.follow("join", others, LOAD_SECONDS):
                workers.stage("sharing the model out", deadline=LOAD_SECONDS)
                team = join(0, training.devices, store, kind)
                return ShardedTrainer(team, policy, training, inference, seed, followers)

    try:
        trainer = load(request, make)
    except BaseException:
        followers.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        raise
    assert isinstance(trainer, ShardedTrainer)
    if kind == "cpu":
        trainer.policy.notes.append(
            "training.devices on a CPU is for trying it out: the ranks share the cores, and it is slower than 1"
        )
    return trainer


class Followers:
    """Ranks 1 to N - 1 as rank 0 sees them. A thread watches them while rank 0 computes."""

    def __init__(self, size: int) -> None:
        """`size` counts rank 0 too."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ranks", daemon=True)
        self._thread.start()  # lives as long as the process: the kernel ends children with the thread that spawned them
        self._workers = [
            workers.Worker(
                f"rank {rank}",
                RANK_MODULE,
                env={**os.environ, RANK: str(rank), SIZE: str(size)},
                start_seconds=START_SECONDS,
            )
            for rank in range(1, size)
        ]

    def start(self) -> None:
        """Spawn them."""

        async def start() -> None:
            await asyncio.gather(*(worker.start() for worker in self._workers))

        asyncio.run_coroutine_threadsafe(start(), self._loop).result(timeout=2 * START_SECONDS)

    @contextlib.contextmanager
    def follow(self, method: str, request: Struct, seconds: float) -> Iterator[None]:
        """All followers do `method` while rank 0 does the block; returns when all have.

        Raises ArithmeticError and Refused, which all ranks come to alike. Any other failure ends this process.
        """
        calls = [
            asyncio.run_coroutine_threadsafe(worker.call(method, request, Nothing, deadline=seconds), self._loop)
            for worker in self._workers
        ]
        for call in calls:
            call.add_done_callback(_check)
        try:
            yield
        except (ArithmeticError, workers.Refused):
            with contextlib.suppress(workers.Refused):
                self._wait(calls, seconds)
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the others wait for what rank 0 will not do
            traceback.print_exc()
            workers.give_up(_lost(calls) or f"rank 0 failed in '{method}': {type(error).__name__}: {error}")
        self._wait(calls, seconds)

    def close(self) -> None:
        """End them, and the thread."""

        async def stop() -> None:
            await asyncio.gather(*(worker.stop() for worker in self._workers))

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(timeout=START_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait(self, calls: Sequence["Future[Nothing]"], seconds: float) -> None:
        for call in calls:
            call.result(timeout=seconds)


def _lost(calls: Sequence["Future[Nothing]"]) -> str:
    """What ended another rank, empty if nothing did. Rank 0 may hear of it first, from the connection that broke."""
    done, _ = wait(calls, timeout=LOST_SECONDS, return_when=FIRST_EXCEPTION)
    return next(filter(None, map(_failure, done)), "")


def _check(call: "Future[Nothing]") -> None:
    """Runs in the thread that watches: rank 0 itself may wait for the lost one, and would for long."""
    if failure := _failure(call):
        workers.give_up(failure)


def _failure(call: "Future[Nothing]") -> str:
    """Why an ended call failed; empty if it did not, or as rank 0 does."""
    error = None if call.cancelled() else call.exception()
    return "" if error is None or isinstance(error, workers.Refused) else str(error) or type(error).__name__
