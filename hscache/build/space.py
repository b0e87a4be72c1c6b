"""Whether a build fits on the disk: what it will write, and what is free; and a plan's figures as JSON."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hscache.build.plan import Plan, array_bytes, manifest_specs
from hscache.console import size
from hscache.errors import EnvironmentFault
from hscache.manifest import PACKED, ResolvedManifest
from hscache.store.index import committed_shards, read_manifest, table_digest
from hscache.store.layout import StorePaths

_FREE_MARGIN_BYTES = 256 << 20
SMALLER = 'build elsewhere, with fewer taps (--set "states.taps=[...]"), or with --set store.codec=zstd'


def require_space(needed: int, out: Path, hint: str = SMALLER) -> None:
    """Refuse a build that cannot fit, before it starts.

    Args:
        needed: Bytes still to write, at least; each shard checks the disk again.
        out: Store directory, which need not exist.
        hint: What the user can do.

    Raises:
        EnvironmentFault: ``disk-full``.
    """
    free = free_bytes(out)
    if needed and needed + _FREE_MARGIN_BYTES > free:
        raise EnvironmentFault(
            "disk-full",
            f"{out}: {size(needed)} to write, {size(free)} free ({size(_FREE_MARGIN_BYTES)} of it must stay free)",
            hint=hint,
        )


def bytes_needed(
    plan: Plan, manifest: ResolvedManifest, todo: Sequence[int], *, target: bool, least: bool = False
) -> int:
    """Return the bytes to write.

    Args:
        plan: The plan.
        manifest: With its target's shape.
        todo: Shards to write; their data files are counted without packing.
        target: Count ``target/`` too.
        least: Count packed states as half; packing hardly makes them smaller than that.
    """
    specs = manifest_specs(manifest, manifest.target.shape.hidden_size)
    rest = Plan(plan.table, plan.corpus, [], {}, [plan.shard_rows[shard] for shard in todo])
    arrays = sum(entry.files for entry in array_bytes(rest, specs))
    return arrays // (2 if least and manifest.store.codec in PACKED else 1) + target * target_bytes(manifest)


def plan_json(plan: Plan, manifest: ResolvedManifest, out: Path) -> dict[str, Any]:
    """Return a plan's totals and sizes as plain JSON.

    Args:
        plan: The plan.
        manifest: With resolved taps and shape.
        out: Directory where the store would be.
    """
    arrays = array_bytes(plan, manifest_specs(manifest, manifest.target.shape.hidden_size))
    shards = len(plan.batches)
    same = _is_planned(out, plan)
    done = set(committed_shards(out)) & set(range(shards)) if same else set()
    todo, no_target = sorted(set(range(shards)) - done), not (same and StorePaths(out).target.exists())
    return {
        **plan.totals,
        "rejected_reasons": plan.reasons(),
        "arrays": [
            {"name": a.name, "bytes_per_row": a.per_row, "rows": a.axis, "bytes": a.data, "file_bytes": a.files}
            for a in arrays
        ],
        "bytes_per_token": {a.name: a.per_row for a in arrays if a.axis == "tokens"},
        "total_bytes": sum(a.data for a in arrays),
        "total_file_bytes": sum(a.files for a in arrays),
        "shards": shards,
        "shards_committed": len(done),
        "files": shards * (2 * len(arrays) + 1),
        "batches": sum(len(batches) for batches in plan.batches),
        "target_bytes": target_bytes(manifest),
        "needed_bytes": bytes_needed(plan, manifest, todo, target=no_target),
        "least_bytes": bytes_needed(plan, manifest, todo, target=no_target, least=True),
        "free_bytes": free_bytes(out),
        "taps": list(manifest.states.taps),
        "codec": manifest.store.codec,
    }


def _is_planned(out: Path, plan: Plan) -> bool:
    """Return whether a store was begun with this plan; shards of another plan do not count as committed."""
    return StorePaths(out).manifest.exists() and read_manifest(out)["plan"]["digest"] == table_digest(plan.table)


def target_bytes(manifest: ResolvedManifest) -> int:
    """Return the size of ``target/`` in bf16: embedding and head; half of it where the two are tied."""
    return 2 * 2 * manifest.target.shape.vocab_size * manifest.target.shape.hidden_size


def free_bytes(path: Path) -> int:
    """Return the free bytes of the file system that holds ``path`` or its nearest existing parent."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def require_room(needed: int, out: Path) -> None:
    """Stop before a shard that does not fit on the disk, not in the middle of it.

    Args:
        needed: Bytes of the shard.
        out: Store directory.

    Raises:
        OSError: ENOSPC, as the disk itself would raise it.
    """
    if free_bytes(out) < needed + _FREE_MARGIN_BYTES // 4:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
