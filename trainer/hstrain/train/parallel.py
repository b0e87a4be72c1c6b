"""Run in one process or in torchrun's ranks, and let the ranks agree.

Gradients are averaged by DDP, or by FSDP2 (``fully_shard``), which also divides weights and moments among the ranks.
:meth:`World.sum` adds up sums over slots. Checkpoints contain whole tensors, so a run may be resumed with another
number of ranks, or with the other of these two methods.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hscache.device import pick_device
from hscache.errors import HscacheError
from hstrain.drafter.model import Drafter

T = TypeVar("T")

_GLOO_REST = 0.2  # seconds


def first_rank() -> bool:
    """Return whether this process writes files and prints: it is rank 0 of torchrun's, or the only process."""
    return os.environ.get("RANK", "0") == "0"


@dataclass(frozen=True)
class World:
    """The ranks of a run.

    Attributes:
        rank: Rank of this process.
        size: Number of processes.
        device: Device of this process.
    """

    rank: int
    size: int
    device: torch.device

    @staticmethod
    def join(device: str | None = None) -> World:
        """Return the ranks that torchrun started, or a world of one process.

        Args:
            device: Such as ``cpu``; None for the rank's own CUDA device if there is one.

        Raises:
            EnvironmentFault: ``device-missing``.
        """
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        chosen = pick_device(device)
        if size > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
        return World(rank, size, chosen)

    @property
    def main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks; all must call it."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, ordered by rank; all must call it."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def merge(self, values: dict[str, str]) -> dict[str, str]:
        """Return the entries of all ranks; all must call it."""
        return {key: value for part in self.gather(values) for key, value in part.items()}

    def together(self, act: Callable[[], T]) -> T:
        """Return the result of an action on this rank; if it fails on any rank, all ranks raise; all must call it.

        If one rank stopped alone, the others would wait for it and then end as if by a bug.

        Args:
            act: The action; it must not communicate with other ranks.

        Raises:
            HscacheError: The error of the lowest rank that had one.
        """
        own: HscacheError | None = None
        try:
            value = act()
        except HscacheError as error:
            own = error
        # the parts of an error, because pickle would rebuild it from its message alone
        parts: Any = None if own is None else (type(own), own.code, own.message, own.hint)
        for rank, reported in enumerate(self.gather(parts)):
            if own is not None and rank == self.rank == 0:
                raise own
            if reported is not None:
                kind, code, message, hint = reported
                raise kind(code, message if rank == 0 else f"rank {rank}: {message}", hint=hint) from own
        return value

    def on_main(self, act: Callable[[], T]) -> T:
        """Run an action on the first rank only, and return its result on all ranks; all must call it.

        Args:
            act: The action; its result must be picklable.

        Raises:
            HscacheError: The error of the first rank.
        """
        found: Any = self.gather(self.together(lambda: act() if self.main else None))[0]
        return found  # type: ignore[no-any-return]

    def leave(self) -> None:
        """End the process group.

        A thread of gloo needs the interpreter's lock to release its last work. In torch 2.13 the group's destructor
        holds the lock while it waits for that thread, so a process could hang after its run; a process that ended
        before the thread got the lock was aborted. So the group is kept in memory, and the thread is given some time.
        """
        if self.size > 1 and dist.is_initialized():
            if dist.get_backend() == "gloo":
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
                time.sleep(_GLOO_REST)
            dist.destroy_process_group()


def distribute(drafter: Drafter, world: World, kind: str, precision: str) -> nn.Module:
    """Return the module to train; ``fsdp`` changes the drafter itself.

    Args:
        drafter: The drafter, equal on all ranks.
        world: The ranks.
        kind: ``ddp`` or ``fsdp``.
        precision: ``bf16`` or ``fp32``.
    """
    if world.size == 1:
        return drafter
    if kind == "ddp":
        return DistributedDataParallel(drafter)
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(torch.bfloat16 if precision == "bf16" else None, torch.float32)
    for layer in drafter.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(drafter, mp_policy=policy)
    return drafter


def accumulating(model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Return a context in which gradients are exchanged between ranks only for the last pack of a step."""
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if last else model.no_sync()
    synchronise = getattr(model, "set_requires_gradient_sync", None)
    if synchronise is not None:  # FSDP2
        synchronise(last)
    return nullcontext()


def whole_tensors(tensors: Iterable[tuple[str, Tensor]], world: World) -> dict[str, Tensor]:
    """Return whole tensors by name, on the CPU, on the first rank; the others get none. All ranks must call it.

    Tensors that are already whole and on the CPU are not copied: write them before the next step. The other ranks hold
    one whole tensor at a time.

    Args:
        tensors: Names and tensors, in the same order on all ranks.
        world: The ranks.
    """
    found = {}
    for name, tensor in tensors:
        whole = tensor.detach()
        if hasattr(whole, "full_tensor"):
            whole = whole.full_tensor()
        if world.main:
            found[name] = whole.cpu().contiguous()
    return found


def like(whole: Tensor, parameter: Tensor) -> Tensor:
    """Return a copy of a whole tensor, placed and divided among the ranks like a parameter."""
    placed = whole.to(parameter.device, copy=True)  # out of the mapped file
    # a counter has another shape; fused kernels need it on the parameter's device
    if whole.shape != parameter.shape or not hasattr(parameter, "placements"):
        return placed
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    # every rank has read the whole tensor and takes its own part: nothing is sent
    return distribute_tensor(placed, mesh, placements, src_data_rank=None)


def optimizer_tensors(model: Drafter, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[tuple[str, Tensor]]:
    """Yield all moments, under ``name of parameter/name of moment``, in an order that all ranks share."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})  # empty before the first step that had a slot to train
                for key, value in sorted(state.items()):  # safetensors returns them in any order
                    if isinstance(value, Tensor):
                        yield f"{names[id(parameter)]}/{key}", value


def restore_optimizers(model: Drafter, optimizers: Iterable[torch.optim.Optimizer], tensors: dict[str, Tensor]) -> None:
    """Restore the moments that :func:`optimizer_tensors` returned.

    Args:
        model: The drafter, after :func:`distribute`.
        optimizers: The drafter's optimizers.
        tensors: Moments of all parameters, or none, if no step had a slot to train yet.
    """
    if not tensors:
        return
    moments: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        parameter, _, key = name.partition("/")
        moments.setdefault(parameter, {})[key] = tensor
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = moments[names[id(parameter)]]
                optimizer.state[parameter] = {key: like(value, parameter) for key, value in state.items()}
