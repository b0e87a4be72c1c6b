"""Parquet files in which a change of any byte is detected.

Page checksums cover the values, but nothing covers the footer. About a quarter of its bytes affect nothing that a
reader returns, such as the name of the writing program, so a change there goes unnoticed. Therefore a digest of all
other bytes is written right before the footer, where the format allows any bytes (column indexes and Bloom filters lie
there too) and every Parquet reader skips them::

    | PAR1 | row groups ... | "hscache" 0x00, xxh3-128 | footer | its length | PAR1 |
"""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

_MARK = b"hscache\x00"
_SEAL_BYTES = len(_MARK) + 16
_LENGTH_AND_MAGIC_BYTES = 8


def sealed_bytes(table: pa.Table) -> bytes:
    """Return a table as sealed zstd parquet whose pages carry checksums."""
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    data = sink.getvalue()
    at = _footer_at(data)
    return data[:at] + _MARK + _digest(data[:at], data[at:]) + data[at:]


def read_sealed(data: bytes) -> pa.Table:
    """Read a table, and refuse bytes that differ from those written.

    Args:
        data: The file.

    Raises:
        ValueError: The digest differs, or is missing.
        pyarrow.ArrowException, OSError, KeyError: The bytes are not a parquet file.
    """
    at = _footer_at(data)
    start = at - _SEAL_BYTES
    if start < 0 or data[start:at] != _MARK + _digest(data[:start], data[at:]):
        raise ValueError("content differs from its digest")
    table = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True).read()
    table.validate(full=True)
    return table


def _footer_at(data: bytes) -> int:
    """Return where the footer begins, or a negative number in a file that is not parquet."""
    length = data[-_LENGTH_AND_MAGIC_BYTES:][:4]
    return len(data) - _LENGTH_AND_MAGIC_BYTES - int.from_bytes(length, "little")


def _digest(before: bytes, footer: bytes) -> bytes:
    digest = xxhash.xxh3_128(before)
    digest.update(footer)
    return digest.digest()
