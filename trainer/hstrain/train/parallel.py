"""Run in one process or in many: torchrun's ranks, and the checks that they agree.

Gradients are averaged by DDP, or by FSDP2 (``fully_shard``), which also cuts weights and moments over the ranks. Sums
over slots are added up by :meth:`World.sum`. Checkpoints are made of whole tensors, so a run may be resumed with
another number of ranks, or with the other of these two methods.
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
    """Return whether this process writes and speaks: rank 0 of torchrun's, or the only one."""
    return os.environ.get("RANK", "0") == "0"


@dataclass(frozen=True)
class World:
    """The ranks of a run.

    Attributes:
        rank: This process.
        size: Number of processes.
        device: Where this one computes.
    """

    rank: int
    size: int
    device: torch.device

    @staticmethod
    def join(device: str | None = None) -> World:
        """Return the world that torchrun made, or a world of one.

        Args:
            device: Such as ``cpu``; None for CUDA where it is, the rank's own.

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
        """Whether this process writes and speaks."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order; all must call it."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def merge(self, values: dict[str, str]) -> dict[str, str]:
        """Return the entries of all ranks; all must call it."""
        return {key: value for part in self.gather(values) for key, value in part.items()}

    def together(self, act: Callable[[], T]) -> T:
        """Return what an action gives on this rank; a refusal that any rank meets, all raise; all must call it.

        A rank that stopped alone would leave the others waiting for it, to end as if by a bug.

        Args:
            act: Must not call upon the other ranks.

        Raises:
            HscacheError: That of the lowest rank that met one.
        """
        met: HscacheError | None = None
        try:
            value = act()
        except HscacheError as error:
            met = error
        # an error's parts: pickle would build it again from its message alone
        parts: Any = None if met is None else (type(met), met.code, met.message, met.hint)
        for rank, told in enumerate(self.gather(parts)):
            if met is not None and rank == self.rank == 0:
                raise met
            if told is not None:
                kind, code, message, hint = told
                raise kind(code, message if rank == 0 else f"rank {rank}: {message}", hint=hint) from met
        return value

    def on_main(self, act: Callable[[], T]) -> T:
        """Return on all ranks what an action gives on the first one, which alone does it; all must call it.

        Args:
            act: Gives what can be pickled.

        Raises:
            HscacheError: What the first rank met.
        """
        found: Any = self.gather(self.together(lambda: act() if self.main else None))[0]
        return found  # type: ignore[no-any-return]

    def leave(self) -> None:
        """End the process group.

        A thread of gloo's wants the interpreter's lock to let go of its last work. In torch 2.13 the group's destructor
        waits for that thread with the lock held, so a process could hang after its run; and one that ended before the
        thread had the lock was aborted. So the lock is left to the thread for a while, and the group stays in memory.
        """
        if self.size > 1 and dist.is_initialized():
            if dist.get_backend() == "gloo":
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
                time.sleep(_GLOO_REST)
            dist.destroy_process_group()


def distribute(drafter: Drafter, world: World, kind: str, precision: str) -> nn.Module:
    """Return the module to train; the drafter itself is changed by ``fsdp``.

    Args:
        drafter: Equal on all ranks.
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
    """Return a context in which gradients stay with their rank unless this is the step's last pack."""
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if last else model.no_sync()
    synchronise = getattr(model, "set_requires_gradient_sync", None)
    if synchronise is not None:  # FSDP2
        synchronise(last)
    return nullcontext()


def whole_tensors(tensors: Iterable[tuple[str, Tensor]], world: World) -> dict[str, Tensor]:
    """Return tensors by name as one process would have them, on the CPU; all ranks must call it.

    What is whole and there already is not copied: write it before the next step. Other ranks than the first get
    nothing, and hold one tensor at a time.

    Args:
        tensors: In the same order on all ranks.
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
    """Return a copy of a whole tensor, placed and cut as a parameter is."""
    placed = whole.to(parameter.device, copy=True)  # out of the mapped file
    # a counter has another shape: fused kernels want it beside the parameter
    if whole.shape != parameter.shape or not hasattr(parameter, "placements"):
        return placed
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    # every rank has read the whole tensor and cuts out its own part: nothing is sent
    return distribute_tensor(placed, mesh, placements, src_data_rank=None)


def optimizer_tensors(model: Drafter, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[tuple[str, Tensor]]:
    """Yield all moments, under ``name of parameter/name of moment``, in an order that all ranks share."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})  # none before the first step that had a slot to train
                for key, value in sorted(state.items()):  # safetensors gives them in any order
                    if isinstance(value, Tensor):
                        yield f"{names[id(parameter)]}/{key}", value


def restore_optimizers(model: Drafter, optimizers: Iterable[torch.optim.Optimizer], tensors: dict[str, Tensor]) -> None:
    """Put moments back where :func:`optimizer_tensors` took them.

    Args:
        model: The drafter, as it is distributed.
        optimizers: Its own.
        tensors: Of all parameters, or of none: before the first step that had a slot to train there are no moments.
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
