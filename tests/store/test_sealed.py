"""Sealed parquet: any reader reads it, no byte of it changes unseen, and files without a seal stay readable."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hscache.store.sealed import read_sealed, sealed_bytes

TABLE = pa.table({"sample_id": ["a", "b", "ü"], "n": [1, 2, 3], "tag": ["x", None, "x"]})
ANY_ERROR = (ValueError, OSError, KeyError, pa.ArrowException)


def plain(table: pa.Table) -> bytes:
    """The same file as it was written before there were seals."""
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return sink.getvalue()


@pytest.mark.parametrize("table", [TABLE, TABLE.slice(0, 0), pa.table({"n": list(range(100_000))})])
def test_what_was_sealed_is_read_by_us_and_by_arrow(table: pa.Table, tmp_path: Path) -> None:
    data = sealed_bytes(table)
    assert read_sealed(data).equals(table)
    (tmp_path / "t.parquet").write_bytes(data)
    assert pq.read_table(tmp_path / "t.parquet").equals(table)


def test_files_without_a_seal_are_read() -> None:
    assert read_sealed(plain(TABLE)).equals(TABLE)


def test_every_changed_bit_of_every_byte_is_seen() -> None:
    good = sealed_bytes(TABLE)
    for position in range(len(good)):
        for bit in range(8):
            bad = bytearray(good)
            bad[position] ^= 1 << bit
            with pytest.raises(ANY_ERROR):
                read_sealed(bytes(bad))


def test_every_truncation_is_seen() -> None:
    good = sealed_bytes(TABLE)
    for n in range(len(good)):
        with pytest.raises(ANY_ERROR):
            read_sealed(good[:n])


@given(st.binary(max_size=100), st.integers(0, 10_000))
def test_bytes_that_were_put_in_are_seen(extra: bytes, at: int) -> None:
    good = sealed_bytes(TABLE)
    at %= len(good) + 1
    if extra:
        with pytest.raises(ANY_ERROR):
            read_sealed(good[:at] + extra + good[at:])
