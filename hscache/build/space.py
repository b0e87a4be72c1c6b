"""Whether a build fits on the disk: what it will write, and what is free."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from hscache.build.plan import Plan, array_bytes, manifest_specs
from hscache.console import size
from hscache.errors import EnvironmentFault
from hscache.manifest import ResolvedManifest

_FREE_MARGIN_BYTES = 256 << 20
PACKED = ("lz4", "zstd")
SMALLER = 'build elsewhere, with fewer taps (--set "states.taps=[...]"), or with --set store.codec=zstd'


def require_space(needed: int, out: Path, hint: str = SMALLER) -> None:
    """Refuse a build that cannot fit, before it begins.

    Args:
        needed: Bytes still to write, at least; the disk is watched at each shard again.
        out: Store directory, which need not exist.
        hint: What else to do.

    Raises:
        EnvironmentFault: ``disk-full``.
    """
    free = free_bytes(out)
    if needed and needed + _FREE_MARGIN_BYTES > free:
        raise EnvironmentFault(
            "disk-full",
            f"{out}: {size(needed)} to write, {size(free)} free ({size(_FREE_MARGIN_BYTES)} of it kept)",
            hint=hint,
        )


def bytes_needed(
    plan: Plan, manifest: ResolvedManifest, todo: Sequence[int], *, target: bool, least: bool = False
) -> int:
    """Return what there is to write.

    Args:
        plan: The plan.
        manifest: With its target's shape.
        todo: Shards to write; their data files are counted without packing.
        target: Whether ``target/`` is to be written, too.
        least: Count packed states as half, less than which they hardly come to.
    """
    specs = manifest_specs(manifest, manifest.target.shape.hidden_size)
    rest = Plan(plan.table, plan.corpus, [], {}, [plan.shard_rows[shard] for shard in todo])
    arrays = sum(entry.files for entry in array_bytes(rest, specs))
    return arrays // (2 if least and manifest.store.codec in PACKED else 1) + target * target_bytes(manifest)


def target_bytes(manifest: ResolvedManifest) -> int:
    """Return the size of ``target/`` in bf16: embedding and head; half as much where they are one."""
    return 2 * 2 * manifest.target.shape.vocab_size * manifest.target.shape.hidden_size


def free_bytes(path: Path) -> int:
    """Return the free bytes of the file system that holds ``path`` or its nearest existing parent."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def require_room(needed: int, out: Path) -> None:
    """Stop before a shard that the disk cannot hold, not in the middle of it.

    Args:
        needed: Bytes of the shard.
        out: Store directory.

    Raises:
        OSError: ENOSPC, as the disk itself would raise it.
    """
    if free_bytes(out) < needed + _FREE_MARGIN_BYTES // 4:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
