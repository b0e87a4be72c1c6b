"""Read token ranges of one array straight from its shard object, without zarr-python.

Where chunks split only the row axis, the rows of a Zarr shard object lie in order, so any range of rows can be read by
a few calls of ``preadv`` into the caller's memory; the checksum and padding after each chunk are read into scratch::

    | chunk 0 rows ... |crc|0| chunk 1 rows ... |crc|0| ... | index: (offset, length) per chunk |crc|
              ^-- preadv ---^----- preadv --------^

Memory: a file costs its index, 16 bytes per chunk; a reading thread keeps a few chunks of scratch. Nothing is mapped: a
mapped file counts as the process's memory, and one that is truncated under a reader kills it.

Checksums are computed piece by piece right after the copy, while the bytes are still in the cache: half the cost of a
second pass. A chunk is read whole for its checksum, even when only a part of it is asked for.
"""

from __future__ import annotations

import errno
import json
import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hscache.store.buffers import page_aligned
from hscache.store.crc import crc32c
from hscache.store.layout import CRC_BYTES, ArraySpec, damaged, data_file_name

_ENTRY_BYTES = 16
_IOV_MAX = os.sysconf("SC_IOV_MAX")
_MISSING = 2**64 - 1
_BYTE = np.dtype(np.uint8)
_THREAD = threading.local()
_BLOSC_NBYTES = slice(4, 8)  # of a blosc 1 header: the size of what is packed
# Checksummed reads go in batches of this size: small enough to stay in the cache, large enough to be worth a call.
_BATCH_BYTES = 1 << 20
# The first call of a range reads only this much, and each further call this many times more: Linux reads ahead in
# folios that grow from call to call and begin with single pages, however much is asked for. One call for the whole
# range leaves small folios: reading takes a third more time from the disk, and up to twice the time from its cache.
_FIRST_BYTES, _GROWTH = 16 << 10, 4
# Chunks with a gap of at most this size are read in one call; the bytes between them are discarded.
_MAX_GAP_BYTES = 4096
# A call per row costs as much as copying this many bytes; skipping fewer gains nothing.
_SKIP_BYTES = 16 << 10
# Receives the discarded bytes; nothing reads it, so all threads may share it.
_ASIDE = memoryview(bytearray(_MAX_GAP_BYTES))


@dataclass(frozen=True)
class Layout:
    """How the rows of one array lie in its file, from the array's ``zarr.json``.

    Attributes:
        rows: Rows of the array.
        chunk_rows: Rows of one inner chunk.
        n_entries: Entries of the shard index.
        blosc: Whether the chunks are packed.
    """

    rows: int
    chunk_rows: int
    n_entries: int
    blosc: bool


def read_layout(directory: Path, spec: ArraySpec) -> Layout | None:
    """Read an array's ``zarr.json``.

    Args:
        directory: The array's directory.
        spec: What the store's manifest says of the array.

    Returns:
        None for an array that is valid Zarr, but not of the layout that this module reads.
    """
    try:
        metadata = json.loads((directory / "zarr.json").read_bytes())
        (sharding,) = metadata["codecs"]
        inner = sharding["configuration"]
        chunk_rows, *tail = inner["chunk_shape"]
        outer_rows = metadata["chunk_grid"]["configuration"]["chunk_shape"][0]
        expected = (
            (metadata["data_type"], spec.dtype.name),
            (metadata["shape"][1:], list(spec.inner)),
            (tail, list(spec.inner)),
            (metadata["chunk_key_encoding"], {"name": "default", "configuration": {"separator": "."}}),
            (sharding["name"], "sharding_indexed"),
            (inner["index_location"], "end"),
            ([codec["name"] for codec in inner["index_codecs"]], ["bytes", "crc32c"]),
        )
        names = [codec["name"] for codec in inner["codecs"]]
        endian = inner["codecs"][0].get("configuration", {}).get("endian", "little")
        rows = metadata["shape"][0]
        whole = all(type(n) is int for n in (rows, chunk_rows, outer_rows)) and 0 <= rows <= outer_rows
        whole = whole and chunk_rows > 0 and outer_rows % chunk_rows == 0
    except OSError as error:
        raise damaged(directory, f"zarr.json cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None
    known = names in (["bytes", "crc32c"], ["bytes", "blosc", "crc32c"]) and endian == "little"
    if not (known and whole) or any(got != wanted for got, wanted in expected):
        return None
    return Layout(rows, chunk_rows, outer_rows // chunk_rows, "blosc" in names)


_Memory = memoryview | NDArray[np.uint8]
_Chunk = tuple[int, list[NDArray[np.uint8]], NDArray[np.uint8]]
"""Number of a chunk, the memory for its bytes in order, and the memory for the checksum and padding after it."""


class ArrayFile:
    """The data file of one array, opened for reading rows; any number of threads may read at once.

    The descriptor is closed when the last reference goes, so that a cache can drop a file that another thread is still
    reading.

    Args:
        directory: The array's directory.
        spec: The array.
        layout: From :func:`read_layout`.

    Attributes:
        rows: Rows of the array.
        chunk_rows: Rows of a chunk.
        layout: As given.
        chunk_bytes: Bytes of an unpacked chunk.

    Raises:
        IntegrityError: ``store-damaged``: no file, another size than its index says, an index that fails its checksum,
            or one that lacks a chunk (Zarr would give fill values).
    """

    def __init__(self, directory: Path, spec: ArraySpec, layout: Layout) -> None:
        self._fd = -1
        self._directory, self._spec, self.layout = directory, spec, layout
        self.rows, self.chunk_rows = layout.rows, layout.chunk_rows
        self._row_bytes = spec.row_bytes
        self.chunk_bytes = layout.chunk_rows * self._row_bytes
        if layout.rows == 0:
            return  # no file
        try:
            self._fd = os.open(directory / data_file_name(spec), os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise damaged(self._directory, f"{data_file_name(spec)} is missing") from error
        self._offsets, self._lengths = self._read_index()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # os.close is bound above, since the os module may be gone when the interpreter exits
        if self._fd >= 0:
            close(self._fd)
            self._fd = -1

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
        """Read rows into the caller's memory.

        Args:
            start: First row.
            stop: Row after the last one.
            out: C-contiguous, of the array's element type: [stop - start, *inner], or [stop - start, len(columns),
                ...] where columns are picked.
            columns: Positions on the axis after the row axis, in any order; None for all.
            crc: Compare every chunk touched with its checksum. Packed chunks are compared in any case.
            pool: Threads that unpack packed chunks; None for this thread alone.

        Raises:
            IntegrityError: ``store-damaged``: a checksum differs, or the file ends early. ``out`` is undefined then.
        """
        inner = self._spec.inner if columns is None else (len(columns), *self._spec.inner[1:])
        assert out.shape == (stop - start, *inner), (out.shape, start, stop, inner)
        assert out.dtype == self._spec.dtype
        assert out.flags.c_contiguous
        assert 0 <= start <= stop <= self.rows, (start, stop, self.rows)
        if out.size == 0:
            return
        if self.layout.blosc:
            self._read_packed(start, stop, out, columns, pool)
        elif columns is not None:
            self._read_columns(start, stop, out, columns, crc=crc)
        elif crc:
            self._read_checked(start, stop, out)
        else:
            self._read_plain(start, stop, out)

    def _read_index(self) -> tuple[list[int], list[int]]:
        """Return offset and length, checksum included, of every chunk that holds rows."""
        used = -(-self.layout.rows // self.layout.chunk_rows)
        size, index_bytes = os.fstat(self._fd).st_size, self.layout.n_entries * _ENTRY_BYTES
        if size < index_bytes + CRC_BYTES:
            raise damaged(self._directory, f"{size} bytes, its index alone has {index_bytes + CRC_BYTES}")
        buffer = bytearray(index_bytes + CRC_BYTES)
        self._preadv([memoryview(buffer)], size - len(buffer))
        table, crc = bytes(buffer[:index_bytes]), buffer[index_bytes:]
        if crc32c(table) != int.from_bytes(crc, "little"):
            raise damaged(self._directory, "the shard index differs from its checksum")
        entries = np.frombuffer(table, "<u8").reshape(-1, 2)[:used]
        if (entries == _MISSING).any():
            chunk = int(np.flatnonzero((entries == _MISSING).any(axis=1))[0])
            raise damaged(self._directory, f"chunk {chunk} is missing")
        offsets, lengths = entries[:, 0].tolist(), entries[:, 1].tolist()
        end, exact = size - len(buffer), self.chunk_bytes + CRC_BYTES
        for chunk, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
            if offset + length > end or length <= CRC_BYTES or (not self.layout.blosc and length != exact):
                raise damaged(self._directory, f"chunk {chunk} cannot be {length} bytes at {offset} of {size}")
        return offsets, lengths

    def _read_plain(self, start: int, stop: int, out: NDArray[Any]) -> None:
        row_bytes, chunk_rows, offsets = self._row_bytes, self.layout.chunk_rows, self._offsets
        flat = out.data.cast("B")
        parts: list[memoryview] = []
        begin = end = done = 0
        for chunk in range(start // chunk_rows, -(-stop // chunk_rows)):
            first, last = max(start - chunk * chunk_rows, 0), min(stop - chunk * chunk_rows, chunk_rows)
            at = offsets[chunk] + first * row_bytes
            if parts and 0 < at - end <= _MAX_GAP_BYTES:
                parts.append(_ASIDE[: at - end])
            else:
                self._preadv(parts, begin, growing=True)
                parts, begin = [], at
            n_bytes = (last - first) * row_bytes
            parts.append(flat[done : done + n_bytes])
            end, done = at + n_bytes, done + n_bytes
        self._preadv(parts, begin, growing=True)

    def _read_checked(self, start: int, stop: int, out: NDArray[Any]) -> None:
        """Read the chunks that hold rows, whole: large ones piece by piece, neighbouring small ones in one call."""
        row_bytes, chunk_rows, chunk_bytes = self._row_bytes, self.layout.chunk_rows, self.chunk_bytes
        flat, offsets, done = _bytes_of(out), self._offsets, 0
        batch: list[_Chunk] = []
        begin = end = 0
        limit = _FIRST_BYTES
        last_chunk = (stop - 1) // chunk_rows
        for chunk in range(start // chunk_rows, last_chunk + 1):
            before = max(start - chunk * chunk_rows, 0) * row_bytes
            n_bytes = min(stop - chunk * chunk_rows, chunk_rows) * row_bytes - before
            body = [flat[done : done + n_bytes]]
            done += n_bytes
            if n_bytes < chunk_bytes:
                # rows that were not asked for are read into scratch, because the checksum covers them
                aside = _scratch("head" if before else "tail", chunk_bytes - n_bytes)
                body = [part for part in (aside[:before], body[0], aside[before:]) if part.size]
            at = offsets[chunk]
            gap = offsets[chunk + 1] - at - chunk_bytes if chunk < last_chunk else CRC_BYTES
            # together with the padding after it, if only padding follows
            trailer = np.empty(gap if CRC_BYTES <= gap <= _MAX_GAP_BYTES else CRC_BYTES, np.uint8)
            if chunk_bytes > _BATCH_BYTES:
                limit = self._read_large(chunk, body, trailer, limit)
                continue
            if batch and (at != end or end - begin >= limit):
                self._read_batch(batch, begin)
                batch, limit = [], _grown(limit)
            begin = begin if batch else at
            batch.append((chunk, body, trailer))
            end = at + chunk_bytes + trailer.size
        if batch:
            self._read_batch(batch, begin)

    def _read_batch(self, batch: list[_Chunk], begin: int) -> None:
        """Read adjacent chunks in one call and compare each with its checksum."""
        self._preadv([part for _, body, trailer in batch for part in (*body, trailer)], begin)
        for chunk, body, trailer in batch:
            crc = 0
            for part in body:
                crc = crc32c(part, crc)
            self._compare(chunk, crc, trailer[:CRC_BYTES].tobytes())

    def _read_large(self, chunk: int, body: list[NDArray[np.uint8]], trailer: NDArray[np.uint8], limit: int) -> int:
        """Read a chunk in pieces and update the checksum right after each, while it is in the cache.

        Returns:
            The size of the next piece, when the first one's was ``limit``.
        """
        at, crc = self._offsets[chunk], 0
        for part in body:
            done = 0
            while done < part.size:
                piece = part[done : done + limit]
                last = at + piece.size == self._offsets[chunk] + self.chunk_bytes
                self._preadv([piece, trailer] if last else [piece], at)
                crc = crc32c(piece, crc)
                at, done, limit = at + piece.size, done + piece.size, _grown(limit)
        self._compare(chunk, crc, trailer[:CRC_BYTES].tobytes())
        return limit

    def _read_columns(self, start: int, stop: int, out: NDArray[Any], columns: Sequence[int], *, crc: bool) -> None:
        cell = math.prod(self._spec.inner[1:]) * self._spec.dtype.itemsize
        low, high = min(columns), max(columns) + 1
        ascending = all(a < b for a, b in pairwise(columns))
        if crc or not ascending or self._spec.row_bytes - (high - low) * cell < _SKIP_BYTES:
            self._select(start, stop, out, columns, crc=crc)
            return
        # a call per row, from the first column to the last one asked for; the bytes between are discarded
        row_bytes, chunk_rows, flat = self._spec.row_bytes, self.layout.chunk_rows, out.data.cast("B")
        gap = memoryview(bytearray(row_bytes))
        pieces: list[tuple[int, int]] = []  # bytes to skip, bytes to take
        previous = low
        for column in columns:
            pieces.append(((column - previous) * cell, cell))
            previous = column + 1
        done = 0
        for row in range(start, stop):
            parts: list[memoryview] = []
            for skip, take in pieces:
                if skip:
                    parts.append(gap[:skip])
                parts.append(flat[done : done + take])
                done += take
            chunk, inside = divmod(row, chunk_rows)
            self._preadv(parts, self._offsets[chunk] + inside * row_bytes + low * cell)

    def _select(self, start: int, stop: int, out: NDArray[Any], columns: Sequence[int], *, crc: bool) -> None:
        """Read all columns of a chunk into scratch and copy those asked for: the scratch stays in the cache."""
        chunk_rows = self.layout.chunk_rows
        scratch = self._scratch_chunk()
        for chunk in range(start // chunk_rows, -(-stop // chunk_rows)):
            first, last = max(start, chunk * chunk_rows), min(stop, (chunk + 1) * chunk_rows)
            rows = scratch[: last - first]
            self.read(first, last, rows, crc=crc)
            _take(rows, columns, out[first - start : last - start])

    def _read_packed(
        self, start: int, stop: int, out: NDArray[Any], columns: Sequence[int] | None, pool: Executor | None
    ) -> None:
        chunk_rows = self.layout.chunk_rows

        def decode(chunk: int) -> None:
            first, last = max(start, chunk * chunk_rows), min(stop, (chunk + 1) * chunk_rows)
            target = out[first - start : last - start]
            if last - first == chunk_rows and columns is None:
                self._unpack(chunk, target)
                return
            whole = self._scratch_chunk()
            self._unpack(chunk, whole)
            _take(whole[first - chunk * chunk_rows : last - chunk * chunk_rows], columns, target)

        chunks = range(start // chunk_rows, -(-stop // chunk_rows))
        if pool is None or len(chunks) == 1:
            for chunk in chunks:
                decode(chunk)
            return
        # wait for all of them even if one raises: none may write into the caller's memory afterwards
        futures = [pool.submit(decode, chunk) for chunk in chunks]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error

    def _unpack(self, chunk: int, target: NDArray[Any]) -> None:
        """Decode one chunk into ``target``, which is as large as a chunk."""
        import numcodecs.blosc

        packed = _scratch("packed", self._lengths[chunk])
        self._preadv([packed.data], self._offsets[chunk])
        data, crc = packed[:-CRC_BYTES], packed[-CRC_BYTES:].tobytes()
        # always, and before decoding: a decoder must never see damaged bytes
        self._compare(chunk, crc32c(data), crc)
        unpacked_bytes = int.from_bytes(data[_BLOSC_NBYTES].tobytes(), "little")
        if unpacked_bytes != self.chunk_bytes:
            raise damaged(
                self._directory, f"chunk {chunk} unpacks to {unpacked_bytes} bytes, expected {self.chunk_bytes}"
            )
        try:
            numcodecs.blosc.decompress(data, _bytes_of(target))
        except (RuntimeError, ValueError) as error:
            raise damaged(self._directory, f"chunk {chunk} cannot be unpacked: {error}") from error

    def _scratch_chunk(self) -> NDArray[Any]:
        shape = (self.layout.chunk_rows, *self._spec.inner)
        return _scratch("chunk", self.chunk_bytes).view(self._spec.dtype).reshape(shape)

    def _compare(self, chunk: int, found: int, recorded: bytes) -> None:
        if found != int.from_bytes(recorded, "little"):
            raise damaged(self._directory, f"chunk {chunk} differs from its checksum")

    def _preadv(self, parts: Sequence[_Memory], offset: int, *, growing: bool = False) -> None:
        """Fill all parts from the file, in calls of at most IOV_MAX parts, however little each call gives."""
        i, limit = 0, _FIRST_BYTES
        while i < len(parts):
            call = parts[i : i + _IOV_MAX]
            if growing:
                call, limit = _head(call, limit), limit * _GROWTH
            try:
                got = os.preadv(self._fd, call, offset)  # type: ignore[arg-type]
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                raise damaged(self._directory, f"the disk cannot read it: {error}") from error
            if got == 0:
                raise damaged(self._directory, f"{data_file_name(self._spec)} ends at byte {offset}")
            offset += got
            while i < len(parts) and got >= parts[i].nbytes:
                got -= parts[i].nbytes
                i += 1
            if got:
                parts = [*parts[:i], parts[i][got:], *parts[i + 1 :]]


def _scratch(use: str, n_bytes: int) -> NDArray[np.uint8]:
    """Return this thread's scratch memory, reused for the same use: fresh pages cost more than reading."""
    room: NDArray[np.uint8] | None = getattr(_THREAD, use, None)
    if room is None or room.size < n_bytes:
        room = page_aligned((n_bytes,), _BYTE)
        setattr(_THREAD, use, room)
    return room[:n_bytes]


def _grown(limit: int) -> int:
    return min(limit * _GROWTH, _BATCH_BYTES)


def _head(parts: Sequence[_Memory], n_bytes: int) -> Sequence[_Memory]:
    """Return the first bytes of these parts."""
    head: list[_Memory] = []
    for part in parts:
        if n_bytes <= 0:
            break
        head.append(part[:n_bytes])
        n_bytes -= part.nbytes
    return head


def _bytes_of(rows: NDArray[Any]) -> NDArray[np.uint8]:
    return rows.reshape(-1).view(np.uint8)


def _take(rows: NDArray[Any], columns: Sequence[int] | None, out: NDArray[Any]) -> None:
    if columns is None:
        out[...] = rows
        return
    for place, column in enumerate(columns):
        out[:, place] = rows[:, column]
