"""Repair a damaged store by rebuilding only what is damaged.

``verify`` names the damaged shards and derived files; these are moved away and rebuilt from the store's own manifest,
plan and corpus. Undamaged files stay as they are, byte for byte. Damaged files also stay when they cannot be rebuilt,
because the target or corpus is missing, the kernels differ or the disk is full. A damaged ``manifest.json`` cannot be
repaired, because only it says what the store should hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hscache.audit.findings import VerifyReport
from hscache.audit.verify import verify
from hscache.build.run import BuildReport, KernelPolicy, build
from hscache.console import counted, say
from hscache.errors import ConflictError
from hscache.manifest import parse_manifest
from hscache.store.durable import Staging, disk_errors
from hscache.store.index import finalize, read_manifest
from hscache.store.layout import StorePaths

_AUTO = KernelPolicy()


@dataclass
class RepairReport:
    """The result of a repair.

    Attributes:
        store: Store directory.
        found: Codes of the findings -> how many.
        rebuilt: Numbers of the shards that were rebuilt.
        rewritten: Other files that were written again.
        build: Report of the build; None when nothing had to be built.
        ok: Whether the store has no findings left.
    """

    store: str
    found: dict[str, int] = field(default_factory=dict)
    rebuilt: list[int] = field(default_factory=list)
    rewritten: list[str] = field(default_factory=list)
    build: BuildReport | None = None
    ok: bool = True


def repair(
    root: Path,
    *,
    target: Path | None = None,
    corpus: Path | None = None,
    device: str | None = None,
    kernels: KernelPolicy = _AUTO,
    shards: Sequence[int] = (),
) -> RepairReport:
    """Verify a store and rebuild what is damaged.

    Args:
        root: Store directory.
        target: Checkpoint directory; None for the manifest's.
        corpus: Corpus; None for the manifest's.
        device: Where the target runs.
        kernels: Which kernel paths are accepted; the good shards' path is required unless another one is named.
        shards: The only shards to read and to rebuild if damaged; none for all. Of the others, records and file sizes
            are read.

    Raises:
        InputError: ``shard-unknown``: the store's plan has no such shard.
        ConflictError: ``store-converted``: the shards of a converted store can only be made again from its source.
        HscacheError: Of every group; ``store-damaged`` when ``manifest.json`` itself is damaged.
        Interrupted: On the first SIGINT or SIGTERM, at the next batch.
    """
    document, paths = read_manifest(root), StorePaths(root)
    before = _verify(root, shards)
    report = RepairReport(str(root))
    for finding in before.findings:
        report.found[finding.code] = report.found.get(finding.code, 0) + 1
    damaged = _damaged(paths, before)
    if not report.found.keys() - {"file-extra"}:
        report.ok = before.ok  # unrecorded files may be the user's: report them, never delete them
        return report
    if "converted" in document and report.found.keys() - {"file-extra", "index-stale"}:
        raise ConflictError(
            "store-converted",
            f"{root}: {counted(len(before.findings), 'finding')}; a target cannot rebuild what hscache convert made",
            hint="convert its source again, into another --out; nothing was changed",
        )
    report.rebuilt = sorted({f.shard for f in before.findings if f.shard is not None and f.shard < before.shards})
    report.rewritten = [path.name for path in damaged if path.parent != paths.shards]
    others = ", ".join(report.rewritten) or "no other file"
    say(f"{root}: to rebuild: {counted(len(report.rebuilt), 'shard')}, and {others}")
    with disk_errors(root), Staging(paths.staging) as staging, _set_aside(damaged, staging.path):
        if "converted" in document:
            finalize(root, staging.path)
        else:
            report.build = build(
                _manifest(document, target, corpus), root, device=device, kernels=kernels, accept_corpus=True
            )  # claim() compares both with those of the store
    report.ok = _verify(root, shards).ok
    return report


def _verify(root: Path, shards: Sequence[int]) -> VerifyReport:
    """Verify a store, or these shards in full and the store as a whole quickly; the rest of it counts as good."""
    if not shards:
        return verify(root)
    parts = [verify(root, shards=slice(shard, shard + 1)) for shard in shards]
    report = verify(root, "quick")
    found = dict.fromkeys(finding for part in (*parts, report) for finding in part.findings)
    report.findings = [finding for finding in found if finding.shard in (None, *shards)]
    return report


@contextmanager
def _set_aside(damaged: list[Path], staging: Path) -> Iterator[None]:
    """Move damaged files away; if they cannot be rebuilt, move each back unless a new one has taken its place.

    Each move is one rename, so a repair that is killed leaves a store that a build can finish.
    """
    aside: list[tuple[Path, Path]] = []
    try:
        for path in damaged:
            aside.append((path, staging / f"{path.parent.name}-{path.name}"))
            path.rename(aside[-1][1])
        yield
    except BaseException:
        for path, kept in aside:
            if kept.exists() and not path.exists():
                kept.rename(path)
        raise


def _damaged(paths: StorePaths, found: VerifyReport) -> list[Path]:
    """Return what has to be rebuilt: shards with findings, and derived files that are wrong."""
    shards = {paths.shard(finding.shard) for finding in found.findings if finding.shard is not None}
    codes = {finding.code for finding in found.findings}
    others = {"plan-damaged": paths.plan, "index-stale": paths.index, "target-damaged": paths.target}
    damaged = sorted(shards) + [path for code, path in others.items() if code in codes]
    return [path for path in damaged if path.exists()]


def _manifest(document: dict[str, Any], target: Path | None, corpus: Path | None) -> Any:
    raw = dict(document["manifest"])
    if target is not None:
        raw["target"] = {**raw["target"], "path": str(target)}
    if corpus is not None:
        raw["corpus"] = {**raw["corpus"], "path": str(corpus)}
    return parse_manifest(raw, "manifest.json")
