"""Whose store is this? A store belongs to one manifest, target and corpus from its first file on.

``manifest.json`` is written first and never changed. Whoever comes later must agree with it in all that decides the
content; where target and corpus lie on a machine is compared by content instead.

Any number of builders may work on one store, or of conversions. Each takes shards that no other is at
(:class:`ShardClaims`).
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import hscache
from hscache.build.plan import Plan
from hscache.console import check_stop, say
from hscache.errors import ConflictError
from hscache.manifest import ResolvedManifest
from hscache.store.durable import fsync_directory, replace_file, say_no_locks, write_file
from hscache.store.index import committed_shards, read_manifest, table_digest
from hscache.store.layout import FORMAT_VERSION, StorePaths, canonical_json, json_digest
from hscache.store.sealed import sealed_bytes

_LOOK_AGAIN_S = 0.1
_NOT_IDENTITY = ("manifest.target.path", "manifest.corpus.path", "created", "digest")


def store_document(manifest: ResolvedManifest, target_digests: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Return ``manifest.json``: all that decides the store's content, and a digest over it.

    Args:
        manifest: With resolved taps and shape.
        target_digests: Of weights, config and tokenizer.
        plan: The plan.
    """
    body = {
        "format_version": FORMAT_VERSION,
        "manifest": manifest.model_dump(mode="json"),
        "target": {"shape": manifest.target.shape.model_dump(), **target_digests},
        "corpus": plan.corpus,
        "plan": {
            "digest": table_digest(plan.table),
            "shards": len(plan.batches),
            "batches": sum(len(batches) for batches in plan.batches),
            **plan.totals,
        },
        "created": {"hscache": hscache.__version__, "time": now()},
    }
    return {**body, "digest": json_digest(body)}


def refuse_foreign(out: Path) -> None:
    """Refuse to write into a folder that is neither empty nor a store.

    Raises:
        ConflictError: ``store-exists``.
    """
    if out.exists() and not StorePaths(out).manifest.exists():
        # staging alone is what an interrupted first start leaves
        foreign = [path.name for path in out.iterdir() if path.name != "staging"] if out.is_dir() else [out.name]
        if foreign:
            raise ConflictError(
                "store-exists",
                f"{out}: holds {', '.join(sorted(foreign)[:3])} but no manifest.json",
                hint="choose another --out; nothing was changed",
            )


def claim(paths: StorePaths, document: dict[str, Any], plan: Plan, staging: Path) -> str:
    """Write ``manifest.json`` and ``plan.parquet``, or check that the store was begun with the same ones.

    Returns:
        The digest of the store's manifest.

    Raises:
        ConflictError: ``store-other-manifest``, naming the fields.
    """
    fresh = staging / "manifest.json"
    write_file(fresh, canonical_json(document))
    digest = str(document["digest"])
    try:
        os.link(fresh, paths.manifest)  # fails when it exists: of two builders one is first, and neither overwrites
        fsync_directory(paths.root)
    except FileExistsError:
        there = read_manifest(paths.root)
        _refuse_other(paths, there, document)
        digest = str(there["digest"])
    if not paths.plan.exists():
        replace_file(paths.plan, sealed_bytes(plan.table), staging)
    return digest


class ShardClaims:
    """Tells the builders of one store which shards the others are at, without a file of its own.

    Byte k of ``manifest.json`` stands for shard k: whoever has it locked builds that shard. The locks belong to the
    open file, so the kernel lets go of them with the process, however it ends. Where a file system knows no such locks,
    or keeps them to one machine, two builders may make the same shard: the first one's stays, and both are equal.

    Use as a context manager.
    """

    def __init__(self, manifest: Path) -> None:
        """Args: manifest: The store's ``manifest.json``."""
        self._root = manifest.parent
        self._file = os.open(manifest, os.O_RDWR | os.O_CLOEXEC)

    def take(self, shard: int) -> bool:
        """Return whether this builder may make a shard: no other one is at it."""
        # struct flock: type, whence, start, length, process
        lock = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, shard, 1, 0)
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, lock)
        except BlockingIOError:
            return False
        except OSError:
            say_no_locks(self._root)  # and waiting for a lock would never end
        return True

    def shares(
        self,
        todo: Iterable[int],
        made: Callable[[int], bool],
        stop: Sequence[int],
        finish: Callable[[], object] = lambda: None,
    ) -> Iterator[int]:
        """Yield each shard that this process should build; wait for those that others are building.

        Args:
            todo: Shards that were not there when this builder looked.
            made: Whether a shard is there by now; not called again when it is.
            stop: Signals that came.
            finish: Ends what was begun, before we wait for others that may wait for us.

        Raises:
            Interrupted: After a signal.
        """
        left, busy, told = deque(todo), list[int](), False
        while left or busy:
            check_stop(stop)
            busy = [shard for shard in busy if not made(shard)]
            if left:
                shard = left.popleft()
                if made(shard):
                    continue
                if not self.take(shard):
                    busy.append(shard)
                elif not made(shard):  # it may have been made just before
                    yield shard
            elif busy:
                finish()
                if not told:
                    say(f"waiting for others that write this store, and are at {len(busy)} of its shards")
                told = True
                time.sleep(_LOOK_AGAIN_S)
                left.extend(busy)  # whoever ended left them to us
                busy = []

    def __enter__(self) -> ShardClaims:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._file)


def now() -> str:
    """Return the time of day as UTC text."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _refuse_other(paths: StorePaths, there: dict[str, Any], document: dict[str, Any]) -> None:
    old, new = _flat(there), _flat(document)
    differing = [
        f"{key}: store {old.get(key)!r}, now {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not key.startswith(_NOT_IDENTITY)
    ]
    if not differing:
        return
    # a changed limit changes the plan too: name the cause before its consequences
    differing.sort(key=lambda line: (not line.startswith("manifest."), line.startswith("plan.")))
    more = f"\n  and {len(differing) - 5} more" if len(differing) > 5 else ""
    # a repair, too, has shards out of their place; but only of a store that once ran its target
    begun = paths.target.exists() or paths.index.exists() or bool(committed_shards(paths.root))
    other = "build into another --out, or give the manifest, target and corpus that the store was begun with"
    raise ConflictError(
        "store-other-manifest",
        f"{paths.root} was begun differently:\n  " + "\n  ".join(differing[:5]) + more,
        hint=other if begun else f"nothing is in it yet: rm -r {paths.root} to begin anew; or {other}",
    )


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    out: dict[str, Any] = {}
    for key, item in value.items():
        out.update(_flat(item, f"{prefix}.{key}" if prefix else key))
    return out
