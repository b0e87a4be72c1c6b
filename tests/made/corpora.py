"""The same rows in files of every kind that a corpus may have."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hscache.corpus.readers import read_corpus
from hscache.rows import Reject

ROWS: list[dict[str, Any]] = [
    {"id": "a", "input_ids": [1, 2, 3], "loss_mask": [0, 0, 1], "tag": "math"},
    {"id": "b", "input_ids": [7], "loss_mask": [1], "tag": None},
    {"id": "c", "input_ids": list(range(300)), "loss_mask": [0] * 100 + [1] * 200, "tag": "code"},
]


Plain = tuple[int, str, list[int] | None, list[int] | None, str | None, str]


def plain(rows: list[Any]) -> list[Plain]:
    return [
        (row.row, row.sample_id, None, None, row.tag, row.reason)
        if isinstance(row, Reject)
        else (row.row, row.sample_id, row.input_ids.tolist(), row.loss_mask.tolist(), row.tag, "")
        for row in rows
    ]


def reasons(rows: list[Any]) -> list[str]:
    return [row[-1] for row in plain(rows)]


def read(path: Path) -> list[Any]:
    return list(read_corpus(path))


def as_lines(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def jsonl(path: Path, content: list[Any] | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else as_lines(content))
    return path


def parquet(path: Path, rows: list[dict[str, Any]], schema: pa.Schema | None = None, **options: Any) -> Path:
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, **options)
    return path


def arrow(path: Path, rows: list[dict[str, Any]]) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return path


def write(kind: str, folder: Path, rows: list[dict[str, Any]]) -> Path:
    if kind == "parquet":
        return parquet(folder / "c.parquet", rows)
    if kind == "jsonl":
        return jsonl(folder / "c.jsonl", rows)
    if kind == "jsonl.gz":
        return jsonl(folder / "c.jsonl.gz", gzip.compress(as_lines(rows)))
    if kind in ("jsonl.zst", "json.zst"):
        text = as_lines(rows) if kind == "jsonl.zst" else json.dumps(rows).encode()
        return jsonl(folder / f"c.{kind}", pa.Codec("zstd").compress(text, asbytes=True))
    if kind == "json":
        return jsonl(folder / "c.json", json.dumps(rows, indent=1).encode())
    if kind in ("feather", "stream.arrow"):
        table, path = pa.Table.from_pylist(rows), folder / f"c.{kind}"
        with (pa.ipc.new_file if kind == "feather" else pa.ipc.new_stream)(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=300)
        return path
    return arrow(folder / "c", rows)


KINDS = ("parquet", "jsonl", "jsonl.gz", "jsonl.zst", "json", "json.zst", "arrow", "feather", "stream.arrow")
