"""Which shards passed a full check, kept in a file of the user's, so that a verification that was killed continues.

::

    {"hscache_verify_record": 1, "manifest": "..."}
    {"shard": 0, "level": "full", "record": "...", "target": "...", "files": "...", "head_rows": 32, ...}

One line is appended for each shard without findings, as soon as it has been checked. A line holds for as long as the
shard's record, the target's head, and size, times and inode of each file are the same. It cannot show that a disk has
lost bits since, which change none of these.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from hscache.errors import ConflictError
from hscache.store.durable import disk_errors
from hscache.store.layout import canonical_json, json_digest

# Raised when verify checks more than it did: older records are then not used.
_VERSION = 1
_VERSION_KEY = "hscache_verify_record"


class VerifyRecord:
    """The record of one store; threads may add to it at once. Use as a context manager: it is closed at the end.

    Args:
        path: File; new, or the record of this store.
        manifest_digest: Digest of the store's manifest.
        again: Forget what is recorded and start anew.

    Raises:
        ConflictError: ``record-other``: the file is something else, or the record of another store.
        EnvironmentFault: ``disk-full`` or ``disk-error``.
    """

    def __init__(self, path: Path, manifest_digest: str, *, again: bool = False) -> None:
        self._path, self._lines = path, dict[int, dict[str, Any]]()
        header = canonical_json({_VERSION_KEY: _VERSION, "manifest": manifest_digest}) + b"\n"
        with disk_errors(path):
            size = path.stat().st_size if path.exists() else 0
            with open(path, "ab+") as file:
                file.seek(0)
                first = file.readline(4096)
                # a header that was cut short is one, too
                fields = _parse(first)
                ours = _VERSION_KEY in fields and fields.get("manifest") == manifest_digest
                if not ours and not header.startswith(first):
                    what = f"{path}: not a record of this store's verification"
                    raise ConflictError("record-other", what, hint="name a new file")
                keep = first == header and not again
                for line in file if keep else ():
                    entry = _parse(line)
                    if type(entry.get("shard")) is int:
                        self._lines[entry["shard"]] = entry
                if keep and size:
                    file.seek(size - 1)
                    ends = file.read(1) == b"\n"
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | (0 if keep else os.O_TRUNC))
            if not keep:
                self._write(header)
            elif not ends:
                self._write(b"\n")  # after a line that was cut short

    def passed(self, shard: int, seen: dict[str, Any]) -> dict[str, Any] | None:
        """Return the line of a shard that passed as it is now, or None.

        Args:
            shard: Number of the shard.
            seen: What :func:`look` returned.
        """
        entry = self._lines.get(shard)
        if entry is None or any(entry.get(name) != value for name, value in seen.items()):
            return None
        numbers = (entry.get("head_rows"), entry.get("head_error_sum"))
        return entry if all(type(number) in (int, float) for number in numbers) else None

    def add(self, shard: int, seen: dict[str, Any], head_rows: int, head_error_sum: float) -> None:
        """Record a shard without findings.

        Args:
            shard: Number of the shard.
            seen: What :func:`look` returned before the shard was read.
            head_rows: Rows of its self-check.
            head_error_sum: Sum of their differences, nats.

        Raises:
            EnvironmentFault: ``disk-full`` or ``disk-error``.
        """
        line = {"shard": shard, **seen, "head_rows": head_rows, "head_error_sum": head_error_sum}
        with disk_errors(self._path):
            self._write(canonical_json(line) + b"\n")

    def _write(self, data: bytes) -> None:
        # in one call, so that lines of several threads or processes do not mix
        if os.write(self._fd, data) != len(data):
            os.write(self._fd, b"\n")

    def __enter__(self) -> VerifyRecord:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._fd)


def look(path: Path, body: dict[str, Any], target_digest: str | None) -> dict[str, Any] | None:
    """Return what a line of the record compares, or None where a file cannot be seen.

    Args:
        path: ``STORE/shards/NNNNN.zarr``.
        body: The shard's record.
        target_digest: Digest of ``target.json``; None where the target is damaged.
    """
    try:
        stats = [(name, (path / name).stat()) for name in sorted([*body["files"], "zarr.json"])]
    except OSError:
        return None
    files = [(name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for name, s in stats]
    return {"level": "full", "record": json_digest(body), "target": target_digest, "files": json_digest(files)}


def _parse(line: bytes) -> dict[str, Any]:
    """Return a line's fields; none for a line that is not whole."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
