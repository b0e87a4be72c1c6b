"""What a shard was computed with, as plain JSON for the shard's record.

It has two parts. ``context`` stays the same while a build runs: versions, hardware, switches, the load report, the
command line. ``kernels`` is observed anew for each shard: which implementation each optional op of each layer ran, and
how often.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import hscache
from hscache.errors import EnvironmentFault
from hscache.kernels.guards import environment, fla_backends
from hscache.kernels.path import check_calls, describe_path, is_fallback, kernel_path_id
from hscache.kernels.sites import OPS, KernelRecord

_STORE_PACKAGES = ("zarr", "numcodecs", "numpy", "tokenizers")


def context(device: torch.device, load_report: dict[str, Any]) -> dict[str, Any]:
    """Return what decides the numbers of a capture, apart from its kernels, and the command that asked for it.

    Args:
        device: Where the target runs.
        load_report: Of :func:`hscache.model.loading.load_target`.
    """
    seen = environment()
    seen["versions"] |= {"hscache": hscache.__version__}
    seen["versions"] |= {name: importlib.metadata.version(name) for name in _STORE_PACKAGES}
    if device.type == "cpu":  # a GPU that was not used is not what it ran on
        seen |= {"device": "cpu", "capability": torch.backends.cpu.get_cpu_capability()}
    return {
        **seen,
        "threads": torch.get_num_threads(),
        "load": load_report,
        "argv": sys.argv,
        "git_commit": _git_commit(),
    }


def kernels(records: Sequence[KernelRecord], device: torch.device) -> dict[str, Any]:
    """Return the kernel path that ran, as a shard records it.

    Args:
        records: Observed while the shard was captured, or planned.
        device: Where the target runs.
    """
    backends = fla_backends()
    return {
        "path_id": kernel_path_id(records, device=device.type, backends=backends),
        # fla picks its backends at run time: before anything ran, only a digest without them can be compared
        "planned_id": kernel_path_id(records, device=device.type),
        "path": str(describe_path(records)),
        "device_type": device.type,
        "fla_backends": backends,
        "records": [record.to_json() for record in records],
    }


def refuse_fallback(records: Sequence[KernelRecord], device: torch.device, target: str) -> None:
    """Refuse to run a target on a GPU without the kernels that exist for it.

    Args:
        records: Planned.
        device: Where the target runs.
        target: Its path, for the hint.

    Raises:
        EnvironmentFault: ``kernel-fallback``.
    """
    if is_fallback(records, device.type):
        raise EnvironmentFault(
            "kernel-fallback",
            f"on this GPU the target's kernels would be {describe_path(records)}",
            hint=f"hscache doctor --target {target} says why; --allow-fallback builds anyway",
        )


def require_one_path(records: Sequence[KernelRecord], where: str) -> None:
    """Refuse records of a capture that do not form one complete path.

    Args:
        records: Observed.
        where: Named in the error.

    Raises:
        EnvironmentFault: ``kernel-path-broken``.
    """
    findings = check_calls(records)
    if findings:
        more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        raise EnvironmentFault(
            "kernel-path-broken",
            f"{where}: {findings[0].code}: {findings[0].message}{more}",
            hint="hscache doctor --target DIR shows what each op is bound to",
        )


def path_differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """Return how two kernel paths differ, in words for an error.

    Args:
        there: ``provenance`` of a committed shard.
        here: The same for this process.
    """
    old_path, new_path = there["kernels"], here["kernels"]
    facts = [(key.replace("_", " "), old_path[key], new_path[key]) for key in ("device_type", "fla_backends")]
    versions = [item for item in there["versions"].items() if item[0] not in _STORE_PACKAGES]
    facts += [(name, version, here["versions"].get(name)) for name, version in versions]
    lines = [f"{what}: {before} there, {after} here" for what, before, after in facts if before != after]
    old, new = (
        {(r["layer"], r["op"]): f"{r['implementation']} {r['source']} {r['source_hash']}" for r in made["records"]}
        for made in (old_path, new_path)
    )
    changed: dict[tuple[str, str | None, str | None], list[str]] = defaultdict(list)
    for layer, op in [*old, *(new.keys() - old.keys())]:  # in the order of layers
        # decode ops do not influence what a store holds
        if old.get((layer, op)) != new.get((layer, op)) and (op not in OPS or OPS[op].phase == "prefill"):
            changed[op, old.get((layer, op)), new.get((layer, op))].append(layer)
    for (op, before, after), layers in changed.items():
        more = f" and {len(layers) - 1} more layers" if len(layers) > 1 else ""
        lines.append(f"{op} of {layers[0]}{more}: {before} there, {after} here")
    return lines


def _git_commit() -> str | None:
    """Return the commit of the source tree that runs, when it is a checkout."""
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(hscache.__file__).parent, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return answer.stdout.strip() or None
