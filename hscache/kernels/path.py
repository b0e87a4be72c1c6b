"""Check that kernel records form one complete path, and identify that path by a digest.

A kernel path is the implementation of every prefill op of every layer. All states of a store must come from one path:
a build stops at any finding of :func:`check_calls`, and a resumed build compares :func:`kernel_path_id`.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hscache.kernels.guards import installed_versions
from hscache.kernels.sites import KernelRecord

PathKind = Literal["none needed", "torch", "kernels", "mixed", "unknown"]

_PATH_PACKAGES = {
    "torch": (),
    "fla": ("flash-linear-attention", "fla-core", "triton"),
    "causal_conv1d": ("causal-conv1d",),
    "mamba_ssm": ("mamba-ssm", "triton"),
    "hub": ("kernels",),
}
"""Packages whose versions decide what an implementation computes, beside transformers and torch."""


@dataclass(frozen=True)
class KernelFinding:
    """A fault of a kernel path that stops a build."""

    code: str
    message: str
    layer: str | None = None


@dataclass(frozen=True)
class KernelPath:
    """The kind of a model's path and the implementations of each prefill op; ``str()`` gives one line."""

    kind: PathKind
    by_op: dict[str, tuple[str, ...]]

    def __str__(self) -> str:
        ops = ", ".join(f"{op}: {'+'.join(names)}" for op, names in self.by_op.items())
        return f"{self.kind} ({ops})" if ops else self.kind


def check_calls(records: Sequence[KernelRecord]) -> list[KernelFinding]:
    """Return what is wrong with the records of a finished capture; an empty list when nothing is.

    The codes:

    - ``kernel-unknown``: what implements an op is not known.
    - ``layer-not-run``: no op of a layer ran.
    - ``op-not-run``: an op did not run in one layer, but ran in others of the same kind.
    - ``two-implementations``: an op ran in two implementations in one layer.
    - ``layers-disagree``: an op ran in different implementations in different layers.
    - ``outside-layer``: an op was called while no known layer was running.
    """
    findings = []
    by_layer: dict[str, list[KernelRecord]] = defaultdict(list)
    for record in records:
        by_layer[record.layer].append(record)
    kinds: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for layer in by_layer.values():
        kinds[_ops(layer)] |= {record.op for record in layer if record.calls}
    for name, layer in by_layer.items():
        ran = {record.op for record in layer if record.calls}
        if name == "?":
            findings += [
                KernelFinding("outside-layer", f"{op} was called outside any known layer") for op in sorted(ran)
            ]
        elif not ran:
            findings.append(KernelFinding("layer-not-run", f"{name}: no optional op ran in this layer", name))
        else:
            findings += [
                KernelFinding("op-not-run", f"{name}: {op} did not run, but it ran in other layers", name)
                for op in sorted(kinds[_ops(layer)] - ran)
            ]
        findings += [
            KernelFinding("kernel-unknown", f"{name}: what implements {r.op} is not known ({r.source})", name)
            for r in layer
            if r.implementation == "unknown"
        ]
        findings += _differing("two-implementations", layer, name)
    if not any(finding.code == "two-implementations" for finding in findings):
        findings += _differing("layers-disagree", records, None)
    return findings


def describe_path(records: Sequence[KernelRecord]) -> KernelPath:
    """Return the kind of path that the prefill ops of ``records`` make, and the implementations of each op."""
    by_op: dict[str, set[str]] = defaultdict(set)
    for record in records:
        if record.phase == "prefill":
            by_op[record.op].add(record.implementation)
    names = {name for implementations in by_op.values() for name in implementations}
    kind: PathKind = "mixed"
    if not records:
        kind = "none needed"
    elif "unknown" in names:
        kind = "unknown"
    elif names <= {"torch"}:
        kind = "torch"
    elif "torch" not in names:
        kind = "kernels"
    return KernelPath(kind, {op: tuple(sorted(by_op[op])) for op in sorted(by_op)})


def is_fallback(records: Sequence[KernelRecord], device: str) -> bool:
    """Return whether a torch reference or an unknown implementation runs on a GPU although a kernel exists.

    Args:
        records: Planned or observed records.
        device: Device type, ``cuda`` or ``cpu``.
    """
    return device == "cuda" and describe_path(records).kind in ("torch", "mixed", "unknown")


def kernel_path_id(
    records: Sequence[KernelRecord],
    *,
    device: str,
    backends: Sequence[str] = (),
    versions: Mapping[str, str | None] | None = None,
) -> str:
    """Return a digest (16 hex digits) that two machines share exactly when they compute by the same path.

    It covers the type of device, the implementation and source hash of each prefill op of each layer, fla's run-time
    backends, and the versions of transformers, torch and the kernel packages that run. For a dense model that is the
    device, transformers and torch alone.

    It does not cover call counts, so that a plan and its capture agree; nor wiring, decode and training ops, packages
    that do not run, or the local part of a version (``+cu130``), none of which changes the states.

    Args:
        records: Planned or observed records.
        device: Device type, ``cuda`` or ``cpu``.
        backends: What :func:`~hscache.kernels.guards.fla_backends` returned after the capture.
        versions: Package versions; by default those of this process.
    """
    have = installed_versions() if versions is None else versions
    prefill = [record for record in records if record.phase == "prefill"]
    packages = {"transformers", "torch"}
    for record in prefill:
        packages |= set(_PATH_PACKAGES.get(record.implementation, ()))
    if backends:
        packages |= {"flash-qla", "tilelang"}
    document = {
        "device": device,
        "sites": sorted([r.layer, r.op, r.implementation, r.source_hash or r.source] for r in prefill),
        "backends": sorted(backends),
        "versions": {name: (have.get(name) or "").split("+")[0] for name in sorted(packages)},
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


def _ops(layer: Sequence[KernelRecord]) -> tuple[str, ...]:
    return tuple(sorted({record.op for record in layer}))


def _differing(code: str, records: Sequence[KernelRecord], layer: str | None) -> list[KernelFinding]:
    """Return a finding for each op that ran in more than one implementation."""
    by_op: dict[str, set[str]] = defaultdict(set)
    for record in records:
        if record.calls and record.wiring == "closure":
            by_op[record.op].add(f"{record.implementation} {record.source}")
    where = f"{layer}: " if layer else ""
    return [
        KernelFinding(code, f"{where}{op} ran as {' and as '.join(sorted(names))}", layer)
        for op, names in sorted(by_op.items())
        if len(names) > 1
    ]
