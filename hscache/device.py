"""Where tensors are computed: the device that the user names, or CUDA where it is."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hscache.errors import EnvironmentFault

if TYPE_CHECKING:
    import torch


def pick_device(name: str | None = None) -> torch.device:
    """Return a device on which tensors can be made; one of CUDA's becomes torch's current one.

    Triton's kernels run on the current device, whatever their tensors are on.

    Args:
        name: As torch names it, such as ``cuda:0``; None for CUDA when there is one, else the CPU. Of several CUDA
            devices each of torchrun's or SLURM's processes on a machine gets its own, unless a number is given.

    Raises:
        EnvironmentFault: ``device-missing``.
    """
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device("cuda", _own_number()) if name == "cuda" else torch.device(name)
        torch.empty(1, device=device)  # the only question that every kind of device answers
        if device.type == "cuda":
            torch.cuda.set_device(device)
    except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts
        raise EnvironmentFault(
            "device-missing", f"device {name}: {str(error).splitlines()[0]}", hint="cpu always works; cuda:0 needs CUDA"
        ) from error
    return device


def _own_number() -> int:
    import torch

    local = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID"))
    return torch.cuda.current_device() if local is None else int(local) % max(1, torch.cuda.device_count())
