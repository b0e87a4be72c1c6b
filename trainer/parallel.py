"""One process or many: torchrun's ranks, and what they have to agree on.

Gradients are averaged by DDP, or by FSDP2 (``fully_shard``), which also cuts weights and moments over the ranks. Sums
over slots are added up by :meth:`World.sum`. Checkpoints are made of whole tensors, so a run may go on with another
number of ranks, or another kind of them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hscache.device import pick_device
from trainer.drafter import Drafter


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
        if device is None and torch.cuda.is_available():
            device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        chosen = pick_device(device)
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
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

    def gather(self, value: object) -> list[object]:
        """Return the values of all ranks, in their order."""
        if self.size == 1:
            return [value]
        values: list[object] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def merge(self, values: dict[str, str]) -> dict[str, str]:
        """Return the entries of all ranks; all must call it."""
        return {key: value for part in self.gather(values) for key, value in part.items()}  # type: ignore[attr-defined]

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()

    def leave(self) -> None:
        """End the process group.

        A group of gloo stays in memory. Its destructor holds the interpreter's lock while it waits for a thread of its
        own, which may want that lock to let go of its last work: in torch 2.13 a process could so hang after its run.
        """
        if self.size > 1 and dist.is_initialized():
            if dist.get_backend() == "gloo":
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
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


def full(tensor: Tensor) -> Tensor:
    """Return a tensor as one process would have it, on the CPU; all ranks must call it."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().cpu().clone()


def like(whole: Tensor, parameter: Tensor) -> Tensor:
    """Return a whole tensor placed and cut as a parameter is."""
    if whole.shape != parameter.shape:  # a counter: fused kernels want it beside the parameter
        return whole.to(parameter.device)
    if hasattr(parameter, "placements"):
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
        # every rank has read the whole tensor and cuts out its own part: nothing is sent
        return distribute_tensor(whole.to(parameter.device), mesh, placements, src_data_rank=None)
    return whole.to(parameter.device)


def optimizer_tensors(model: Drafter, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Return all moments as ``name of parameter/name of moment``; all ranks must call it."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}/{key}": full(value)
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        for key, value in sorted(state.items())  # the same order on all ranks: safetensors gives any
        if isinstance(value, Tensor)
    }


def restore_optimizers(model: Drafter, optimizers: Iterable[torch.optim.Optimizer], tensors: dict[str, Tensor]) -> None:
    """Put moments back where :func:`optimizer_tensors` took them."""
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
