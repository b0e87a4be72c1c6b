"""Why a kernel package cannot be used, and which versions compute wrong states.

transformers catches whatever a kernel package raises when it is imported, and says "not installed". The probes here
import the same names and keep the true error. The guard knows the combination of versions that was measured to compute
wrong states without any error.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from packaging.version import Version

from hscache.errors import EnvironmentFault
from hscache.kernels.sites import OPS, Function, Site, classify

PACKAGES = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm"}
"""Import name -> distribution of the kernel packages."""

DISTRIBUTIONS = (
    "transformers", "torch", "triton", "flash-linear-attention", "fla-core", "causal-conv1d", "mamba-ssm", "kernels",
    "flash-qla", "tilelang", "flash-attn", "accelerate", "safetensors",
)  # fmt: skip
_ENVIRONMENT = re.compile(r"^(FLA_|TRITON_|USE_HUB_KERNELS$|NVIDIA_TF32|CUBLAS_|CUDA_VISIBLE_DEVICES$|PYTORCH_)")
_FIXED_FLA = "0.5.0"


@dataclass(frozen=True)
class PackageProbe:
    """Whether a kernel package can be imported here, and the exact error when it cannot."""

    package: str
    distribution: str
    version: str | None
    """The distribution's version; None when it is not installed."""
    ok: bool
    error: str | None
    """``Type: message`` of the import, in full; None when it works."""
    mend: str | None
    """The command that fixes it; None when there is nothing to fix."""


@dataclass(frozen=True)
class GuardFinding:
    """A combination of versions that must not compute states."""

    code: str
    message: str
    mend: str
    refuse: bool


def probe_package(package: str, ops: Sequence[str] | None = None) -> PackageProbe:
    """Import what transformers would take from ``package`` and keep the error.

    Args:
        package: ``fla``, ``causal_conv1d`` or ``mamba_ssm``.
        ops: Ops that are needed of it; by default all that it implements.
    """
    wanted = [op for op, facts in OPS.items() if facts.package == package] if ops is None else list(ops)
    distribution = PACKAGES[package]
    version = installed_versions().get(distribution)
    errors = {op: error for op in wanted if (error := _import_error(op)) is not None}
    if not errors:
        return PackageProbe(package, distribution, version, True, None, None)
    texts = list(dict.fromkeys(errors.values()))
    error = texts[0] if len(texts) == 1 else "; ".join(f"{op}: {text}" for op, text in errors.items())
    return PackageProbe(package, distribution, version, False, error, mend_command(package, version))


def mend_command(package: str, version: str | None) -> str:
    """Return the command that makes ``package`` importable: installs it, or reinstalls it when it is broken."""
    if version is not None:
        return f"pip install --upgrade --force-reinstall --no-deps --no-cache-dir {PACKAGES[package]}"
    return "pip install mamba-ssm --no-build-isolation" if package == "mamba_ssm" else "pip install 'hscache[gpu]'"


def import_op(op: str) -> Function:
    """Return the kernel package's own function for ``op``.

    Raises:
        EnvironmentFault: ``kernel-missing``, with the import's own error.
    """
    facts = OPS[op]
    error = _import_error(op)
    if error is not None:
        version = installed_versions().get(PACKAGES[facts.package])
        raise EnvironmentFault(
            "kernel-missing",
            f"{facts.package} is forced for {op}, but {facts.module}.{op} cannot be imported: {error}",
            hint=mend_command(facts.package, version),
        )
    function: Function = getattr(sys.modules[facts.module], op)
    return function


def guard_findings(sites: Sequence[Site], plans: Mapping[tuple[str, str], Function]) -> list[GuardFinding]:
    """Return the reasons to refuse a plan: combinations that give wrong states without any error.

    Args:
        sites: The model's sites.
        plans: What would run, by (layer, op).
    """
    versions = installed_versions()
    if not fla_breaks_grouped_heads(versions):
        return []
    for site in sites:
        values, keys = (getattr(site.module, name, 0) for name in ("num_v_heads", "num_k_heads"))
        if site.wiring == "closure" and 0 < keys < values and classify(plans[site.layer, site.op])[0] == "fla":
            fla = versions["flash-linear-attention"] or versions["fla-core"]
            return [
                GuardFinding(
                    "fla-grouped-heads",
                    f"flash-linear-attention {fla} with transformers {versions['transformers']} computes wrong states "
                    f"for grouped value heads ({site.layer}: {values} value heads over {keys} key heads), without an "
                    "error",
                    f"pip install --upgrade 'flash-linear-attention>={_FIXED_FLA}'",
                    refuse=True,
                )
            ]
    return []


def fla_breaks_grouped_heads(versions: Mapping[str, str | None]) -> bool:
    """Return whether this fla gives wrong states for more value heads than key heads.

    transformers passes queries and keys once for each key head; fla's delta rule up to 0.4.2 reads them as if they had
    been repeated for each value head.
    """
    fla = versions.get("flash-linear-attention") or versions.get("fla-core")
    return fla is not None and Version(fla) < Version(f"{_FIXED_FLA}.dev0")


def fla_backends() -> list[str]:
    """Return the run-time backends of fla that ran in this process, as ``operation:function:backend``.

    fla >= 0.6 may replace its Triton kernels at each call (FlashQLA, TileLang, Gluon). Its registries name the backends
    that were used, and those that were tried and rejected; only the former are returned.
    """
    module = sys.modules.get("fla.backends")
    used: set[str] = set()
    for name in ("_operation_registries", "_function_registries"):
        for registry in getattr(module, name, {}).values():
            used |= {entry for entry in getattr(registry, "_logged", ()) if not entry.endswith(":fail")}
    return sorted(used)


def installed_versions() -> dict[str, str | None]:
    """Return the version of each package that can change states; None for those that are not installed."""
    versions: dict[str, str | None] = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def environment() -> dict[str, Any]:
    """Return the facts about machine and process for a shard's provenance, as plain JSON values."""
    cuda = torch.cuda.is_available()
    return {
        "versions": installed_versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "capability": list(torch.cuda.get_device_capability()) if cuda else None,
        "device_memory_bytes": torch.cuda.get_device_properties(0).total_memory if cuda else None,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "tf32_matmul": torch.backends.cuda.matmul.allow_tf32,
        "tf32_cudnn": torch.backends.cudnn.allow_tf32,
        "bf16_reduced_precision": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "env": {name: value for name, value in sorted(os.environ.items()) if _ENVIRONMENT.match(name)},
    }


def _import_error(op: str) -> str | None:
    facts = OPS[op]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a package's complaints about the machine are not this command's output
            getattr(importlib.import_module(facts.module), op)
    except Exception as error:  # the import of a foreign package can raise anything
        return f"{type(error).__name__}: {error}"
    return None
