"""Write one shard: sample by sample into a private directory, which then becomes visible all at once.

Rows are appended to one file per array, chunk by chunk. Each chunk is followed by its crc32c and zeros up to an aligned
offset, and the Zarr shard index comes last, so the file is a standard ``sharding_indexed`` object that zarr-python
reads. Memory is one chunk per array, whatever the shard's size. zarr-python itself would rewrite the whole shard object
for each piecemeal write.

The group's ``zarr.json`` is written last. It holds the sample table with a digest per sample, and the size and digest
of every file; a digest covers it too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from hscache.rows import count_supervised
from hscache.store.codecs import Codec
from hscache.store.crc import crc32c
from hscache.store.durable import fsync_directory, publish_directory, write_file
from hscache.store.layout import (
    CRC_BYTES,
    FORMAT_VERSION,
    INPUT_IDS,
    LOSS_MASK,
    ArraySpec,
    array_metadata,
    canonical_json,
    damaged,
    data_file_name,
    group_metadata,
    is_committed,
    json_digest,
    padding_bytes,
)

_WRITEBACK_BYTES = 16 << 20


@dataclass(frozen=True)
class SampleRow:
    """A sample's line in its shard's table.

    Attributes:
        sample_id: The corpus's id of the sample.
        corpus_row: Its row in the corpus.
        start: First token row in the shard; -1 when rejected.
        n_tokens: Token rows.
        loss_start: First row in the logit arrays; -1 when rejected.
        n_loss: Supervised tokens; rows in the logit arrays where there are any.
        digest: xxh3-128 over the sample's bytes in all arrays, in layout order; empty when rejected.
        reason: Reason code of a rejected sample, else empty.
        detail: The values that led to the rejection.
    """

    sample_id: str
    corpus_row: int
    start: int
    n_tokens: int
    loss_start: int
    n_loss: int
    digest: str
    reason: str = ""
    detail: str = ""


class _ArrayWriter:
    def __init__(self, directory: Path, spec: ArraySpec, codec_name: str) -> None:
        self._fd = -1
        directory.mkdir()
        self.directory, self.spec = directory, spec
        self.codec = Codec(codec_name if spec.packed else "raw", spec.dtype)
        self.rows = 0
        self._chunk = np.full((spec.chunk_rows, *spec.inner), spec.fill_scalar, spec.dtype)
        self._filled = 0
        self._index: list[tuple[int, int]] = []
        self._offset = 0
        self._digest = xxhash.xxh3_128()
        self._begun = 0  # bytes whose write to the disk has been started

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # of an abandoned shard; os.close is bound above, since the os module may be gone when the interpreter exits
        if self._fd >= 0:
            close(self._fd)
            self._fd = -1

    def append(self, rows: NDArray[Any]) -> None:
        spec = self.spec
        assert rows.dtype == spec.dtype, (spec.name, rows.dtype)
        assert rows.shape[1:] == spec.inner, (spec.name, rows.shape)
        assert rows.flags.c_contiguous
        done = 0
        while done < len(rows):
            if self._filled == 0 and len(rows) - done >= spec.chunk_rows:  # a whole chunk needs no copy
                self._write_chunk(rows[done : done + spec.chunk_rows])
                done += spec.chunk_rows
                continue
            n = min(spec.chunk_rows - self._filled, len(rows) - done)
            self._chunk[self._filled : self._filled + n] = rows[done : done + n]
            self._filled += n
            done += n
            if self._filled == spec.chunk_rows:
                self._write_chunk(self._chunk)
                self._filled = 0
        self.rows += len(rows)

    def finish(self) -> dict[str, dict[str, Any]]:
        """Write the last chunk, the index and the metadata; return file -> size and digest."""
        if self._filled:
            self._chunk[self._filled :] = self.spec.fill_scalar
            self._write_chunk(self._chunk)
        files = {}
        if self._index:
            index = np.array(self._index, "<u8").tobytes()
            self._write([memoryview(index), _crc(memoryview(index))])
            os.fsync(self._fd)
            name = data_file_name(self.spec)
            files[name] = {"bytes": self._offset, "xxh3_128": self._digest.hexdigest()}
            os.close(self._fd)
            self._fd = -1
        metadata = canonical_json(array_metadata(self.spec, self.rows, self.codec.zarr_codecs()))
        write_file(self.directory / "zarr.json", metadata)
        files["zarr.json"] = {"bytes": len(metadata), "xxh3_128": xxhash.xxh3_128_hexdigest(metadata)}
        fsync_directory(self.directory)
        return {f"{self.spec.name}/{name}": entry for name, entry in files.items()}

    def _write_chunk(self, chunk: NDArray[Any]) -> None:
        data = self.codec.encode(chunk)
        size = data.nbytes + CRC_BYTES
        self._index.append((self._offset, size))
        self._write([data, _crc(data), memoryview(bytes(padding_bytes(size)))])

    def _write(self, parts: list[memoryview]) -> None:
        if self._fd < 0:
            path = self.directory / data_file_name(self.spec)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        for part in parts:
            self._digest.update(part)
        self._offset += sum(part.nbytes for part in parts)
        parts = [part for part in parts if part.nbytes]
        while parts:
            written = os.writev(self._fd, parts)
            while parts and written >= parts[0].nbytes:
                written -= parts.pop(0).nbytes
            if written:
                parts[0] = parts[0][written:]
        if self._offset - self._begun >= _WRITEBACK_BYTES:
            # starts the write to disk while checksums are computed; the pages are dirty, so they stay in the cache
            os.posix_fadvise(self._fd, self._begun, self._offset - self._begun, os.POSIX_FADV_DONTNEED)
            self._begun = self._offset


class ShardWriter:
    """Collect the samples of one shard and commit them together.

    Args:
        directory: Private directory to write in; must not exist.
        specs: Arrays of the store.
        codec: Name of the codec for the state arrays.
    """

    def __init__(self, directory: Path, specs: list[ArraySpec], codec: str) -> None:
        directory.mkdir()
        self._directory = directory
        self._arrays = {spec.name: _ArrayWriter(directory / spec.name, spec, codec) for spec in specs}
        self._rows: list[SampleRow] = []
        self._tokens = 0
        self._loss = 0

    @property
    def n_samples(self) -> int:
        """Number of samples added or rejected."""
        return len(self._rows)

    def add(self, sample_id: str, corpus_row: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Append a sample.

        Args:
            sample_id: The corpus's id.
            corpus_row: Its row in the corpus.
            arrays: One entry per array of the store, with the stored element type and the sample's rows.
        """
        digest = xxhash.xxh3_128()
        # the mask's own count, for a store without logit arrays
        n_tokens, n_loss = len(arrays[INPUT_IDS]), count_supervised(arrays[LOSS_MASK])
        for name, writer in self._arrays.items():
            rows = np.ascontiguousarray(arrays[name])
            if writer.spec.axis == "tokens":
                assert len(rows) == n_tokens, (name, len(rows), n_tokens)
            else:
                n_loss = len(rows)
            writer.append(rows)
            digest.update(rows.data.cast("B"))
        row = SampleRow(sample_id, corpus_row, self._tokens, n_tokens, self._loss, n_loss, digest.hexdigest())
        self._rows.append(row)
        self._tokens += n_tokens
        self._loss += n_loss

    def reject(self, sample_id: str, corpus_row: int, n_tokens: int, reason: str, detail: str) -> None:
        """Record a sample that has no data, with a reason code."""
        self._rows.append(SampleRow(sample_id, corpus_row, -1, n_tokens, -1, 0, "", reason, detail))

    def commit(self, destination: Path, attributes: Mapping[str, Any]) -> bool:
        """Make the shard durable and visible.

        Args:
            destination: ``STORE/shards/NNNNN.zarr``.
            attributes: JSON-plain entries for the group: shard number, manifest digest, provenance, health.

        Returns:
            False when another process committed this shard first.

        Raises:
            IntegrityError: ``store-damaged``: the destination is a directory that is not a shard.
        """
        files: dict[str, dict[str, Any]] = {}
        for writer in self._arrays.values():
            files.update(writer.finish())
        samples = {name: [asdict(row)[name] for row in self._rows] for name in SampleRow.__dataclass_fields__}
        body = {
            "format_version": FORMAT_VERSION,
            "samples": samples,
            "files": files,
            # the shard's content, without when and where it was made: equal for equal data
            "content_digest": json_digest({"samples": samples, "files": files}),
            **attributes,
        }
        write_file(self._directory / "zarr.json", canonical_json(group_metadata(body)))
        published = publish_directory(self._directory, destination)
        if not published and not is_committed(destination):
            what = "exists without zarr.json, so it is not a shard, but it blocks this one"
            raise damaged(destination, what, hint=f"rm -r {destination}, then run the same command again")
        return published


def _crc(data: memoryview) -> memoryview:
    # google_crc32c takes numpy arrays without a copy, memoryviews not at all
    return memoryview(crc32c(np.frombuffer(data, np.uint8)).to_bytes(CRC_BYTES, "little"))
