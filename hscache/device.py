"""Where tensors are computed: the device that the user names, or CUDA where it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hscache.errors import EnvironmentFault

if TYPE_CHECKING:
    import torch


def pick_device(name: str | None = None) -> torch.device:
    """Return a device on which tensors can be made.

    Args:
        name: As torch names it, such as ``cuda:0``; None for CUDA when there is one, else the CPU.

    Raises:
        EnvironmentFault: ``device-missing``.
    """
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)  # the only question that every kind of device answers
    except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts
        raise EnvironmentFault(
            "device-missing", f"device {name}: {str(error).splitlines()[0]}", hint="cpu always works; cuda:0 needs CUDA"
        ) from error
    return device
