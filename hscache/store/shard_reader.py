"""Read rows of a store's shards, which are opened on demand.

Opening an array costs a parse of its metadata and its shard index (about 0.1 ms), so a bounded number of arrays stays
open and the least recently used one is closed first; memory and descriptors are bounded whatever the store's size. When
a shard is first touched, it is checked once to be the right one: of this store, with this number, its samples where the
index says, its files of the recorded sizes. Checksums detect damaged bytes; only this check detects valid bytes of
another shard.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from hscache.store.buffers import page_aligned
from hscache.store.direct import ArrayFile, read_layout
from hscache.store.index import read_shard
from hscache.store.layout import ArraySpec, StorePaths, damaged

PLACE = ("corpus_row", "start", "n_tokens", "loss_start", "n_loss")
"""Columns that the index and a shard's own table share: which sample it is, and where it lies."""

_MAX_OPEN = 128
_MAX_DECODE_THREADS = 4


class ShardReader:
    """Reads rows of arrays of shards; any number of threads may call it, and it may be pickled.

    Args:
        root: Store directory.
        specs: Arrays of the store.
        manifest_digest: Digest of the store's manifest, which every shard names.
        samples: Places of the store's samples according to the index: columns of :data:`PLACE`, and ``shard``.
        decode_threads: Threads that unpack the packed chunks of a read; None for the machine's cores, at most 4.
        max_open: Arrays, and so descriptors, that stay open.
    """

    def __init__(
        self,
        root: Path,
        specs: Iterable[ArraySpec],
        manifest_digest: str,
        samples: Mapping[str, NDArray[Any]],
        *,
        decode_threads: int | None = None,
        max_open: int = _MAX_OPEN,
    ) -> None:
        self._paths, self._manifest_digest, self._samples = StorePaths(root), manifest_digest, samples
        self._specs = {spec.name: spec for spec in specs}
        self._threads = decode_threads or min(os.cpu_count() or 1, _MAX_DECODE_THREADS)
        self._max_open = max_open
        self._reset()

    def read(
        self,
        shard: int,
        name: str,
        rows: slice,
        *,
        room: NDArray[Any] | None = None,
        columns: Sequence[int] | None = None,
        crc: bool = True,
    ) -> NDArray[Any]:
        """Return rows of an array.

        Args:
            shard: Number of the shard.
            name: Array.
            rows: Row range; both ends given.
            room: Memory to read into, [at least as many rows, ...]; its first rows are filled. None for fresh memory.
            columns: Positions on the axis after the row axis; None for all.
            crc: Compare every chunk touched with its checksum.

        Raises:
            IntegrityError: ``store-damaged``.
        """
        file, spec, n = self._file(shard, name), self._specs[name], rows.stop - rows.start
        if n < 0 or rows.stop > file.rows:
            raise damaged(self._paths.shard(shard) / name, f"rows {rows.start}:{rows.stop} of {file.rows}")
        if room is None:
            inner = spec.inner if columns is None else (len(columns), *spec.inner[1:])
            out = page_aligned((n, *inner), spec.dtype)
        else:
            out = room[:n]
        pool = self._pool() if spec.packed else None
        file.read(rows.start, rows.stop, out, columns=columns, crc=crc, pool=pool)
        return out

    def close(self) -> None:
        """Close files and threads; the next read opens them again."""
        self._reset()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None, "_executor": None, "_checked": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def _reset(self) -> None:
        self._open: OrderedDict[tuple[int, str], StoredArray] = OrderedDict()
        self._checked: set[int] = set()
        self._executor: Executor | None = None
        self._lock, self._process = threading.Lock(), os.getpid()

    def _file(self, shard: int, name: str) -> StoredArray:
        if self._process != os.getpid():
            self._reset()  # after a fork: its threads are not here, and one of them may have held the lock
        key = (shard, name)
        with self._lock:
            file = self._open.get(key)
            if file is not None:
                self._open.move_to_end(key)
                return file
        path = self._paths.shard(shard)
        if shard not in self._checked:
            body = read_shard(path)
            check_files(path, body)
            self._check_samples(shard, path, body)
            self._checked.add(shard)
        file = open_array(path / name, self._specs[name])
        # dropping a file may run its __del__ in the middle of a dictionary operation: hence the lock and the list
        dropped = []
        with self._lock:
            dropped.append(self._open.pop(key, None))  # another thread may have opened it too
            self._open[key] = file
            while len(self._open) > self._max_open:
                dropped.append(self._open.popitem(last=False)[1])
        return file

    def _check_samples(self, shard: int, path: Path, body: dict[str, Any]) -> None:
        if (body["shard"], body["manifest_digest"]) != (shard, self._manifest_digest):
            store = "this" if body["manifest_digest"] == self._manifest_digest else "another"
            raise damaged(path, f"holds shard {body['shard']} of {store} store")
        table = body["samples"]
        good = [i for i, reason in enumerate(table["reason"]) if not reason]
        found = {tuple(table[name][i] for name in PLACE) for i in good}
        at = np.flatnonzero(self._samples["shard"] == shard)
        if found != set(zip(*(self._samples[name][at].tolist() for name in PLACE), strict=True)):
            raise damaged(path, "its samples are not those of index.parquet")

    def _pool(self) -> Executor | None:
        if self._threads == 1:
            return None
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self._threads, "hscache-decode")
            return self._executor


class _ZarrArray:
    """An array whose layout only zarr-python can read; it returns the fill value for a missing chunk."""

    def __init__(self, directory: Path, spec: ArraySpec) -> None:
        import zarr

        self._directory = directory
        try:
            self._array = zarr.open_array(str(directory), mode="r")
        except (ValueError, KeyError, TypeError) as error:
            raise damaged(directory, f"zarr cannot open it: {error}") from error
        if self._array.shape[1:] != spec.inner or self._array.dtype != spec.dtype:
            raise damaged(directory, f"{self._array.dtype} {self._array.shape}, expected {spec.dtype} {spec.inner}")
        self.rows, self.chunk_rows = int(self._array.shape[0]), spec.chunk_rows

    def read(
        self,
        start: int,
        stop: int,
        out: NDArray[Any],
        *,
        columns: Sequence[int] | None = None,
        crc: bool = True,
        pool: Executor | None = None,
    ) -> None:
        """Read rows into ``out``; zarr compares checksums in any case."""
        try:
            rows = np.asarray(self._array[start:stop])
        except (ValueError, RuntimeError) as error:  # zarr's checksum failure, and blosc's
            raise damaged(self._directory, str(error)) from error
        out[...] = rows if columns is None else rows[:, list(columns)]


StoredArray: TypeAlias = ArrayFile | _ZarrArray
"""An open array of a shard: ``rows``, ``chunk_rows`` and ``read``."""


def open_array(directory: Path, spec: ArraySpec) -> StoredArray:
    """Open an array of a shard.

    Raises:
        IntegrityError: ``store-damaged``.
    """
    layout = read_layout(directory, spec)
    return _ZarrArray(directory, spec) if layout is None else ArrayFile(directory, spec, layout)


def check_files(path: Path, body: dict[str, Any]) -> None:
    """Compare a shard's files with the record: the sizes of all, since Zarr reads a missing file as fill value without
    an error, and the contents of the arrays' metadata, since a reader trusts the shape and codec given there.

    Raises:
        IntegrityError: ``store-damaged``, naming the first file.
    """
    for name, entry in body["files"].items():
        try:
            found = (path / name).stat().st_size
            differs = name.endswith("zarr.json") and _digest(path / name) != entry["xxh3_128"]
        except (FileNotFoundError, NotADirectoryError):
            raise damaged(path / name, f"missing, expected {entry['bytes']} bytes") from None
        except OSError as error:
            raise damaged(path / name, f"cannot be read: {error}") from error
        if found != entry["bytes"]:
            raise damaged(path / name, f"{found} bytes, expected {entry['bytes']} bytes")
        if differs:
            raise damaged(path / name, "differs from its digest")


def _digest(path: Path) -> str:
    return xxhash.xxh3_128_hexdigest(path.read_bytes())
