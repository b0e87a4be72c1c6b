"""Parquet files in which a change of any byte is detected.

Page checksums cover the values, but nothing covers the footer. About a quarter of its bytes affect nothing that a
reader returns, such as the name of the writing program, so a change there goes unnoticed. Therefore a digest of all
other bytes is written right before the footer, where the format allows any bytes (column indexes and Bloom filters lie
there too) and every Parquet reader skips them::

    | PAR1 | row groups ... | "hscache" 0x00, xxh3-128 | footer | its length | PAR1 |

Older files without a seal are read as before; they are recognised by their row groups, which reach up to the footer. A
changed byte cannot make a sealed file pass for one of these: either its seal is found and differs, or the gap between
row groups and footer remains.
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
        ValueError: The seal differs, or was removed.
        pyarrow.ArrowException, OSError, KeyError: The bytes are not a parquet file.
    """
    at = _footer_at(data)
    start = at - _SEAL_BYTES
    if start >= 0 and data[start:].startswith(_MARK):
        if data[start + len(_MARK) : at] != _digest(data[:start], data[at:]):
            raise ValueError("content differs from its seal")
    elif _row_groups_end(data) != at:
        raise ValueError("the bytes before the footer are not a seal")
    table = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True).read()
    table.validate(full=True)
    return table


def _footer_at(data: bytes) -> int:
    """Return where the footer begins, or a negative number in a file that is not parquet."""
    length = data[-_LENGTH_AND_MAGIC_BYTES:][:4]
    return len(data) - _LENGTH_AND_MAGIC_BYTES - int.from_bytes(length, "little")


def _row_groups_end(data: bytes) -> int:
    metadata = pq.ParquetFile(pa.BufferReader(data)).metadata
    end = 4  # after the first PAR1
    for group in range(metadata.num_row_groups):
        for column in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(column)
            offsets = [at for at in (chunk.dictionary_page_offset, chunk.data_page_offset) if at is not None]
            end = max(end, min(offsets) + chunk.total_compressed_size)
    return end


def _digest(before: bytes, footer: bytes) -> bytes:
    digest = xxhash.xxh3_128(before)
    digest.update(footer)
    return digest.digest()
