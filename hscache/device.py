"""Where tensors are computed, and in which precision: what the user names, or what suits the machine."""

from __future__ import annotations

import os
import time
from functools import cache
from typing import TYPE_CHECKING, Literal

from hscache.console import say
from hscache.errors import EnvironmentFault

if TYPE_CHECKING:
    import torch

Dtype = Literal["auto", "bfloat16", "float32"]

_PRODUCT_ROWS = 256
_SLOW_BF16 = 4.0
"""bf16 counts as emulated when its product takes this many times a float32 product's time.

Hardware units take 0.3 to 1 times as long, emulation 50 times or more."""


def pick_device(name: str | None = None) -> torch.device:
    """Return a device on which tensors can be made; a CUDA device also becomes torch's current device.

    Triton needs that: its kernels run on the current device, even if their tensors are on another one.

    Args:
        name: As torch names it, such as ``cuda:0``; None for CUDA if available, else the CPU. On a machine with
            several CUDA devices each process of torchrun or SLURM gets its own, unless a number is given.

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


def pick_dtype(dtype: Dtype, device: torch.device) -> Literal["bfloat16", "float32"]:
    """Return the precision to compute in; log a line when ``auto`` decides against bfloat16.

    Args:
        dtype: A precision, returned unchanged; ``auto`` for bfloat16 where its products are fast, else float32.
        device: The device that computes.
    """
    if dtype != "auto":
        return dtype
    if fast_bf16(device.type):
        return "bfloat16"
    say(f"computing in float32: bf16 products are emulated on this {device.type.upper()}")
    return "float32"


@cache
def fast_bf16(kind: str) -> bool:
    """Return whether a kind of device multiplies bfloat16 matrices in hardware.

    On x86 torch names what it uses: with AVX2 a product is about 50 times slower than in float32 (1 to 3 against 90 to
    170 GFLOP/s), with AVX-512 at most three times. A CPU that torch does not name is timed once.

    Args:
        kind: Type of the device, such as ``cpu``.
    """
    import torch

    if kind == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if kind != "cpu":
        return True
    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX"):
        return bool(capability != "AVX2")
    wide = torch.ones(_PRODUCT_ROWS, _PRODUCT_ROWS)
    narrow = wide.bfloat16()
    shortest: dict[torch.dtype, float] = {}
    for matrix in (wide, narrow) * 4:  # the first ones also start the threads
        began = time.perf_counter()
        matrix @ matrix
        took = time.perf_counter() - began
        shortest[matrix.dtype] = min(took, shortest.get(matrix.dtype, took))
    return shortest[torch.bfloat16] < _SLOW_BF16 * shortest[torch.float32]


def _own_number() -> int:
    import torch

    local = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID"))
    return torch.cuda.current_device() if local is None else int(local) % max(1, torch.cuda.device_count())
