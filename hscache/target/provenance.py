"""What a shard was computed with: observed on the machine, JSON-plain, kept in every shard's record."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import hscache

_PACKAGES = (
    "hscache", "transformers", "torch", "triton", "flash-linear-attention", "fla-core", "causal-conv1d", "kernels",
    "flash-attn", "zarr", "numcodecs", "numpy", "safetensors", "tokenizers",
)  # fmt: skip
_ENVIRONMENT = re.compile(r"^(FLA_|TRITON_|CUBLAS|NVIDIA_TF32|CUDA_VISIBLE|PYTORCH_|OMP_|MKL_)")


def provenance(device: torch.device, load_report: dict[str, Any]) -> dict[str, Any]:
    """Return what decides the numbers of a capture, and who asked for it.

    Args:
        device: Where the target runs.
        load_report: Of :func:`hscache.target.loading.load_target`.
    """
    return {
        "versions": {name: _version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hardware": _hardware(device),
        "torch": {
            "threads": torch.get_num_threads(),
            "cuda": torch.version.cuda,
            "matmul_precision": torch.get_float32_matmul_precision(),
            "tf32": {"matmul": torch.backends.cuda.matmul.allow_tf32, "cudnn": torch.backends.cudnn.allow_tf32},
        },
        "environment": {key: value for key, value in sorted(os.environ.items()) if _ENVIRONMENT.match(key)},
        "load": load_report,
        "argv": sys.argv,
        "git_commit": _git_commit(),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _hardware(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        return {
            "device": torch.cuda.get_device_name(device),
            "capability": list(torch.cuda.get_device_capability(device)),
        }
    return {"device": "cpu", "machine": platform.machine(), "capability": torch.backends.cpu.get_cpu_capability()}


def _git_commit() -> str | None:
    """Return the commit of the source tree that runs, when it is a checkout."""
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(hscache.__file__).parent, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return answer.stdout.strip() or None
