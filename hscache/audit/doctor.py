"""Diagnose, before a build, which kernel would run for each op of each kind of layer, and how to install missing ones.

Only a target's ``config.json`` is needed. The model is built on the meta device, so that transformers wires its layers
exactly as in a build, without weights or memory; then its sites are read as provenance reads them. The cost is the
import of transformers and a second or two for a model of 64 layers.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hscache.console import counted, figures
from hscache.errors import EnvironmentFault
from hscache.kernels.guards import (
    PACKAGES,
    GuardFinding,
    PackageProbe,
    environment,
    guard_findings,
    probe_package,
)
from hscache.kernels.observe import planned_records, plans
from hscache.kernels.path import KernelPath, describe_path, kernel_path_id
from hscache.kernels.sites import OPS, KernelRecord, find_sites


@dataclass(frozen=True)
class OpDiagnosis:
    """One op of one kind of layer."""

    op: str
    phase: str
    """``prefill`` ops run while states are cached; ``decode`` and ``training`` ops do not."""
    wiring: str
    bound: str
    """Implementation that transformers bound."""
    would_run: str
    """Implementation that a build here would call."""
    source: str
    missing: str | None
    """Package that has a kernel for the op but would not be used; None when nothing is missing."""
    reason: str | None
    """Why it would not be used: the import's own error, or the lack of a GPU."""
    mend: str | None


@dataclass(frozen=True)
class LayerKind:
    """All layers whose ops are bound to the same implementations."""

    kind: str
    """Type of layer as the config names it, or the class of the mixer."""
    layers: tuple[int, ...]
    ops: tuple[OpDiagnosis, ...]


@dataclass(frozen=True)
class Diagnosis:
    """What :func:`diagnose` found."""

    target: str | None
    model_type: str | None
    num_layers: int | None
    device: str
    """Device type that a build here would use: ``cuda`` or ``cpu``."""
    environment: dict[str, Any]
    packages: tuple[PackageProbe, ...]
    layer_kinds: tuple[LayerKind, ...]
    path: KernelPath | None
    """None without a target."""
    path_id: str | None
    findings: tuple[GuardFinding, ...]
    would_fall_back: bool
    """Whether a prefill op that a package implements would run as torch reference or as an unknown implementation."""

    @property
    def ok(self) -> bool:
        """Whether a build here would run the kernels that exist, and none that are known to be wrong."""
        return not self.would_fall_back and not any(finding.refuse for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return asdict(self) | {"path": str(self.path) if self.path else None, "ok": self.ok}


def diagnose(target: Path | None = None) -> Diagnosis:
    """Return what a build of ``target`` would run on this machine.

    Args:
        target: Directory with the target's ``config.json``, or that file; None looks at the machine alone.

    Raises:
        EnvironmentFault: ``target-missing`` or ``target-config`` when the config cannot be read, or when this version
            of transformers does not know the model.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    packages = {package: probe_package(package) for package in PACKAGES}
    model = None if target is None else _meta_model(target)
    if model is None:
        return Diagnosis(
            None, None, None, device, environment(), tuple(packages.values()), (), None, None, (), would_fall_back=False
        )  # fmt: skip
    sites = find_sites(model)
    bound, runs = planned_records(model, "bound", device=device), planned_records(model, "auto", device=device)
    needed = {OPS[record.op].package for record in runs if record.op in OPS and record.phase == "prefill"}
    for package in needed:  # the import error of the ops that this model uses, not of others
        ops_of = sorted({record.op for record in runs if record.op in OPS and OPS[record.op].package == package})
        packages[package] = probe_package(package, ops_of)
    ops = [_diagnose_op(b, r, device, packages) for b, r in zip(bound, runs, strict=True)]
    whole: Any = model.config
    config = whole.get_text_config()
    fallen = any(op.phase == "prefill" and (op.missing or op.would_run == "unknown") for op in ops)
    return Diagnosis(
        target=str(target),
        model_type=config.model_type,
        num_layers=config.num_hidden_layers,
        device=device,
        environment=environment(),
        packages=tuple(packages.values()),
        layer_kinds=tuple(_layer_kinds(runs, ops, list(getattr(config, "layer_types", None) or []))),
        path=describe_path(runs),
        path_id=kernel_path_id(runs, device=device),
        findings=tuple(guard_findings(sites, plans(sites, "auto", device))),
        would_fall_back=fallen,
    )


def render(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as plain text, with the command that fixes a problem below it."""
    facts = diagnosis.environment
    lines = [f"device    {facts['device']}" + (f", capability {facts['capability']}, CUDA {facts['cuda']}"
                                               if facts["capability"] else "")]  # fmt: skip
    lines += ["versions  " + figures({name: version for name, version in facts["versions"].items() if version})]
    if facts["env"]:
        lines += ["env       " + ", ".join(f"{name}={value}" for name, value in facts["env"].items())]
    lines += ["", "kernel packages"]
    for probe in diagnosis.packages:
        state = "ok" if probe.ok else f"cannot be used: {probe.error}"
        lines.append(f"  {probe.distribution} {probe.version or '(not installed)'}: {state}")
    if diagnosis.target is not None:
        lines += ["", f"target    {diagnosis.target}: {diagnosis.model_type}, {diagnosis.num_layers} layers"]
        lines += _render_layers(diagnosis.layer_kinds)
        lines += [f"path      {diagnosis.path} [{diagnosis.path_id}]"]
    for finding in diagnosis.findings:
        lines += ["", f"{'REFUSED' if finding.refuse else 'note'}: {finding.message}", f"  hint: {finding.mend}"]
    if diagnosis.target is not None:
        lines += ["", _verdict(diagnosis)]
    return "\n".join(lines) + "\n"


def _render_layers(kinds: Sequence[LayerKind]) -> list[str]:
    lines = []
    for kind in kinds:
        lines.append(f"  {kind.kind}: {counted(len(kind.layers), 'layer')} ({_spans(kind.layers)})")
        for op in kind.ops:
            if op.phase != "prefill":
                continue
            lines.append(f"    {op.op}: {op.would_run} ({op.source})")
            if op.missing:
                lines.append(f"      not {op.missing}: {op.reason}")
            if op.mend:
                lines.append(f"      hint: {op.mend}")
    return lines


def _verdict(diagnosis: Diagnosis) -> str:
    if any(finding.refuse for finding in diagnosis.findings):
        return "a build here is refused: it would store wrong states"
    if diagnosis.would_fall_back:
        return "a build here would not run every kernel that this target has"
    assert diagnosis.path is not None
    if diagnosis.path.kind == "none needed":
        return "this target has no optional kernels: there is nothing to fall back from"
    return "a build here would run every kernel that this target has"


def _diagnose_op(bound: KernelRecord, run: KernelRecord, device: str, packages: dict[str, PackageProbe]) -> OpDiagnosis:
    missing = reason = mend = None
    facts = OPS.get(run.op)
    if run.implementation == "torch" and facts is not None and run.phase == "prefill":
        probe = packages[facts.package]
        missing = facts.package
        if not probe.ok:
            reason, mend = probe.error, probe.mend
        elif device == "cpu":
            reason, mend = "no GPU: the torch reference is what runs on a CPU", None
        else:
            reason, mend = "it can be imported, but transformers did not bind it", "pip install --upgrade transformers"
    elif run.implementation == "unknown":
        reason = "this layer's wiring is not known to hscache, so what runs is unknown"
    return OpDiagnosis(
        run.op, run.phase, run.wiring, bound.implementation, run.implementation, run.source, missing, reason, mend
    )


def _layer_kinds(
    records: Sequence[KernelRecord], ops: Sequence[OpDiagnosis], layer_types: Sequence[str]
) -> Iterator[LayerKind]:
    """Group layers by type and by how their ops are bound, in the order of their first layer."""
    by_layer: dict[int, list[OpDiagnosis]] = defaultdict(list)
    for record, op in zip(records, ops, strict=True):
        by_layer[-1 if record.layer_index is None else record.layer_index].append(op)
    groups: dict[tuple[str, tuple[OpDiagnosis, ...]], list[int]] = defaultdict(list)
    for index in sorted({*by_layer, *range(len(layer_types))}):
        kind = layer_types[index] if 0 <= index < len(layer_types) else "layer"
        groups[kind, tuple(by_layer.get(index, ()))].append(index)
    for (kind, kind_ops), layers in groups.items():
        yield LayerKind(kind, tuple(layers), kind_ops)


def _meta_model(target: Path) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    directory = target.parent if target.is_file() else target
    if not (directory / "config.json").is_file():
        raise EnvironmentFault(
            "target-missing", f"{directory}: no config.json there", hint="give the target's checkpoint directory"
        )
    try:
        with _quiet():
            config = AutoConfig.from_pretrained(directory)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # an invalid config, or one of another transformers version, can fail in any way
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise EnvironmentFault(
            "target-config", f"{directory}/config.json: {first}", hint="pip install --upgrade transformers"
        ) from error
    assert isinstance(model, nn.Module)
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress transformers' warning "The fast path is not available", which does not say what runs."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _spans(numbers: Sequence[int]) -> str:
    """Return ascending numbers as ``0-2, 4-6``."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
