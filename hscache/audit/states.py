"""The comparisons of states that ``hscache verify`` is asked for, as findings of its report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hscache.audit.findings import Finding, VerifyReport
from hscache.console import counted
from hscache.errors import ConfigError
from hscache.store.index import read_manifest
from hscache.store.reader import coarsest_codec, open_store

if TYPE_CHECKING:
    from hscache.audit.compare import Comparison, KernelsReport, Path_


def verify_with_states(
    report: VerifyReport,
    *,
    recompute: int = 0,
    kernels: str | None = None,
    against: Path | None = None,
    samples: int = 8,
    target: Path | None = None,
    device: str | None = None,
    show: Callable[[str, Comparison | KernelsReport], None] | None = None,
) -> dict[str, Any]:
    """Compare states as asked, add findings to the report, and return the comparisons as plain JSON.

    Args:
        report: Result of the integrity check; findings are added to it.
        recompute: Samples to run again.
        kernels: ``reference,candidate``.
        against: Another store.
        samples: Samples for ``kernels`` and ``against``.
        target: Checkpoint directory; None for the manifest's.
        device: Device to run on.
        show: Gets a title and each comparison as soon as it is made.

    Raises:
        ConfigError: ``kernel-choice``.
    """
    if not (recompute or kernels or against):
        return {}
    from hscache.audit import compare

    store, out = open_store(report.store), {}
    if recompute:
        again = compare.recompute(store, recompute, target=target, device=device)
        bad = compare.fault(again, coarsest_codec(store.manifest))
        exact = min(tap.equal for tap in again.taps)
        sentence = f"recomputed {counted(again.samples, 'sample')} alone: "
        sentence += bad or f"the stored states, {exact:.2%} bit by bit"
        out["recompute"] = {**asdict(again), "sentence": sentence}
        if bad:
            report.findings.append(Finding("recompute-differs", again.worst_sample, bad))
        if show:
            show("stored against recomputed", again)
    if kernels:
        two = compare.kernels(store, parse_kernels(kernels), samples, target=target, device=device)
        out["kernels"] = two.to_json()
        if not two.agree:
            report.findings.append(Finding("kernels-differ", kernels, two.sentence))
        if show:
            show(" against ".join(reversed(two.paths)), two)
    if against:
        other = compare.against(store, open_store(against), samples)
        codecs = {coarsest_codec(document) for document in (store.manifest, read_manifest(against))}
        lossy_ones = sorted(codecs - {"raw"})  # int4, the coarser, first
        bad = compare.fault(other, [*lossy_ones, "raw"][0])
        exact = min(tap.equal for tap in other.taps)
        same = f"the same states up to the error of {' and '.join(lossy_ones)}" if lossy_ones else "the same states"
        sentence = f"against {against}, {counted(other.samples, 'sample')}: " + (
            bad or f"{same}, {exact:.2%} bit by bit"
        )
        out["against"] = {**asdict(other), "sentence": sentence}
        if bad:
            report.findings.append(Finding("stores-differ", str(against), bad))
        if show:
            show(f"{report.store} against {against}", other)
    return out


def parse_kernels(text: str) -> tuple[Path_, Path_]:
    """Return reference and candidate of ``--kernels``.

    Raises:
        ConfigError: ``kernel-choice``.
    """
    paths = tuple(text.split(","))
    if len(paths) != 2 or not set(paths) <= {"torch", "fla", "bound"}:
        raise ConfigError("kernel-choice", f"--kernels {text}: expected two of torch, fla, bound", hint="torch,fla")
    return paths  # type: ignore[return-value]
