"""Claim a store for one manifest, target and corpus, and the shards of it for one process.

``manifest.json`` is the first file of a store and never changes. Every later build must agree with it in all settings
that decide the content. Target and corpus are compared by content, not by their paths, which differ between machines.

Any number of builders or conversions may work on one store. Each takes shards that no other process is making
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

from pydantic import ValidationError

import hscache
from hscache.build.plan import Plan
from hscache.console import check_stop, counted, say
from hscache.errors import ConflictError
from hscache.manifest import ResolvedManifest
from hscache.store.durable import fsync_directory, replace_file, say_no_locks, write_file
from hscache.store.index import committed_shards, read_manifest, table_digest
from hscache.store.layout import FORMAT_VERSION, StorePaths, canonical_json, json_digest
from hscache.store.sealed import sealed_bytes

_LOOK_AGAIN_S = 0.1
_NOT_IDENTITY = ("manifest.target.path", "manifest.corpus.path", "created", "digest")


def store_document(
    manifest: ResolvedManifest, target_digests: dict[str, Any], plan: Plan, corpus_made: str = "unknown"
) -> dict[str, Any]:
    """Return ``manifest.json``: all that decides the store's content, and a digest over it.

    Args:
        manifest: With resolved taps and shape.
        target_digests: Of weights, config and tokenizer.
        plan: The plan.
        corpus_made: What :func:`hscache.corpus.origin.check_origin` returned.
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
        "created": {"hscache": hscache.__version__, "time": now(), "corpus": corpus_made},
    }
    return {**body, "digest": json_digest(body)}


def refuse_foreign(out: Path) -> None:
    """Refuse to write into a folder that is neither empty nor a store.

    Raises:
        ConflictError: ``store-exists``.
    """
    if out.exists() and not StorePaths(out).manifest.exists():
        # a first start that was interrupted leaves staging/ alone
        foreign = [path.name for path in out.iterdir() if path.name != "staging"] if out.is_dir() else [out.name]
        if foreign:
            raise ConflictError(
                "store-exists",
                f"{out}: holds {', '.join(sorted(foreign)[:3])} but no manifest.json",
                hint="choose another --out; nothing was changed",
            )


def claim(paths: StorePaths, document: dict[str, Any], plan: Plan, staging: Path) -> str:
    """Write ``manifest.json`` and ``plan.parquet``, or check that the store was started with the same ones.

    Returns:
        The digest of the store's manifest.

    Raises:
        ConflictError: ``store-other-manifest``, with the fields that differ.
    """
    fresh = staging / "manifest.json"
    write_file(fresh, canonical_json(document))
    digest = str(document["digest"])
    try:
        os.link(fresh, paths.manifest)  # fails if it exists, so that of two builders neither overwrites the other's
        fsync_directory(paths.root)
    except FileExistsError:
        there = read_manifest(paths.root)
        _refuse_other(paths, there, document)
        digest = str(there["digest"])
    if not paths.plan.exists():
        replace_file(paths.plan, sealed_bytes(plan.table), staging)
    return digest


class ShardClaims:
    """Shows which shards other builders are making, without an extra file.

    Byte k of ``manifest.json`` stands for shard k: the builder that has locked it makes that shard. The locks belong to
    the open file, so the kernel releases them when the process ends, however it ends. On a file system that has no such
    locks, or does not share them between machines, two builders may make the same shard. The two are equal, and the one
    that is committed first stays.

    Use as a context manager.
    """

    def __init__(self, manifest: Path) -> None:
        """Args: manifest: The store's ``manifest.json``."""
        self._root = manifest.parent
        self._file = os.open(manifest, os.O_RDWR | os.O_CLOEXEC)

    def take(self, shard: int) -> bool:
        """Return whether this builder may make a shard, because no other one is making it."""
        # struct flock: type, whence, start, length, process
        lock = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, shard, 1, 0)
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, lock)
        except BlockingIOError:
            return False
        except OSError:
            say_no_locks(self._root)  # waiting for a lock would never end
        return True

    def shares(
        self,
        todo: Iterable[int],
        made: Callable[[int], bool],
        stop: Sequence[int],
        finish: Callable[[], object] = lambda: None,
    ) -> Iterator[int]:
        """Yield each shard that this process should make; wait for those that others are making.

        Args:
            todo: Shards that were missing at the start.
            made: Returns whether a shard is committed by now; not called again after it was.
            stop: Signals received so far.
            finish: Finishes the work in progress before this process waits, since others may wait for it.

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
                elif not made(shard):  # it may have been committed just before
                    yield shard
            elif busy:
                finish()
                if not told:
                    say(f"waiting for other processes that are writing {counted(len(busy), 'shard')} of this store")
                told = True
                time.sleep(_LOOK_AGAIN_S)
                left.extend(busy)  # a process that ended without them leaves them to this one
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
    old, new = _flat(_with_defaults(there)), _flat(document)
    differing = [
        f"{key}: store {old.get(key)!r}, now {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
        and not key.startswith(_NOT_IDENTITY)
        and not (key.startswith("plan.") and key not in old)  # a total that is counted since
    ]
    if not differing:
        return
    # a changed limit changes the plan too: list the cause before its consequences
    differing.sort(key=lambda line: (not line.startswith("manifest."), line.startswith("plan.")))
    more = f"\n  and {len(differing) - 5} more" if len(differing) > 5 else ""
    # a repair moves shards away too, but only in a store that has its target/ or index
    started = paths.target.exists() or paths.index.exists() or bool(committed_shards(paths.root))
    other = "build into another --out, or use the manifest, target and corpus that the store was started with"
    raise ConflictError(
        "store-other-manifest",
        f"{paths.root} was started with other settings:\n  " + "\n  ".join(differing[:5]) + more,
        hint=other if started else f"it is still empty: rm -r {paths.root} to start again; or {other}",
    )


def _with_defaults(document: dict[str, Any]) -> dict[str, Any]:
    """Return a store's document with the defaults of settings that are newer than the store."""
    try:
        manifest = ResolvedManifest.model_validate(document["manifest"])
    except ValidationError:  # such as a setting of a later version, which then differs
        return document
    return {**document, "manifest": manifest.model_dump(mode="json")}


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    out: dict[str, Any] = {}
    for key, item in value.items():
        out.update(_flat(item, f"{prefix}.{key}" if prefix else key))
    return out
