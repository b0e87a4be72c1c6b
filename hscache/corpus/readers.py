"""Stream tokenized sources: parquet, JSONL and Arrow directories with ``input_ids`` and ``loss_mask``.

::

    path -> detect_format -> read_corpus -> Sample | Reject, ...  -> plan

A row that cannot be read becomes a :class:`hscache.rows.Reject` with a reason, so that row numbers stay those of the
file. A file that ends in the middle of a record gives its good rows; the last row says at which byte the file ends.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hscache.errors import InputError
from hscache.rows import Reject, Sample, content_digest, count_supervised

_ID_COLUMNS = ("sample_id", "id", "primary_id", "uuid")
_BATCH_ROWS = 256
_ARROW_FILES = ("state.json", "dataset_info.json", "dataset_dict.json")

CORPUS_SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("tag", pa.string()),
        ("source", pa.string()),
        ("finish_reason", pa.string()),
    ]
)
"""Columns that ``tokenize`` and ``generate`` write; ``finish_reason`` is null where the input had the completion."""


def detect_format(path: Path) -> str:
    """Return ``parquet``, ``jsonl`` or ``arrow``.

    Raises:
        InputError: ``corpus-missing`` or ``corpus-format``.
    """
    if not path.exists():
        raise InputError(
            "corpus-missing", f"{path}: no such corpus", hint="hscache tokenize or hscache generate makes one"
        )
    if path.is_dir() and any((path / name).exists() for name in _ARROW_FILES):
        return "arrow"
    suffixes = path.suffixes
    if path.is_file() and suffixes[-1:] == [".parquet"]:
        return "parquet"
    if path.is_file() and (suffixes[-1:] in ([".jsonl"], [".json"]) or suffixes[-2:] == [".jsonl", ".gz"]):
        return "jsonl"
    raise InputError(
        "corpus-format",
        f"{path}: expected .parquet, .jsonl, .jsonl.gz or a save_to_disk directory",
        hint="hscache tokenize turns chat messages and prompt+completion files into a corpus",
    )


def read_corpus(path: Path) -> Iterator[Sample | Reject]:
    """Stream a tokenized corpus.

    Args:
        path: File or directory.

    Raises:
        InputError: ``corpus-missing``, ``corpus-format``, ``corpus-truncated``.
    """
    kind = detect_format(path)
    if kind == "jsonl":
        yield from _jsonl_rows(path)
        return
    batches, names = _arrow_batches(path, kind)
    _require_columns(path, names)
    id_column = next((name for name in _ID_COLUMNS if name in names), None)
    row = 0
    for batch in batches:
        for line in _lines(batch):
            yield _row(row, line, id_column)
            row += 1


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any] | None, str]]:
    """Stream a JSONL file, plain or gzipped.

    Yields:
        Row number, the object (None when the line is not a JSON object), and what was wrong.
    """
    for row, (start, line, fault) in enumerate(_read_lines(path)):
        value: Any = None
        if not fault:
            try:
                value = json.loads(line)
                if b"\\ud" in line.lower():  # a lone surrogate is a str that cannot be encoded as UTF-8
                    json.dumps(value, ensure_ascii=False).encode()
                if not isinstance(value, dict):
                    fault = f"{type(value).__name__}, expected an object"
            except (ValueError, RecursionError) as error:  # bad JSON and bad UTF-8 alike
                fault = str(error)
        yield row, (None if fault else value), f"byte {start}: {fault}" if fault else ""


def _read_lines(path: Path) -> Iterator[tuple[int, bytes, str]]:
    """Stream the lines that are not blank: offset, line, fault; in a broken .gz the last item has only a fault."""
    packed = path.suffix == ".gz"
    with gzip.open(path, "rb") if packed else open(path, "rb") as file:
        offset = 0
        while True:
            try:
                line = file.readline()
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                if not offset and isinstance(error, gzip.BadGzipFile):
                    raise InputError("corpus-format", f"{path}: not gzip: {error}") from error
                yield offset, b"", f"(of the unpacked text) {error}"
                return
            if not line:
                return
            if line.strip():
                yield offset, line, ""
            offset += len(line)


def _jsonl_rows(path: Path) -> Iterator[Sample | Reject]:
    id_column: str | None = None
    checked = False
    for row, value, fault in read_jsonl(path):
        if value is None:
            yield Reject(row, "", "bad-json", fault)
            continue
        if not checked:
            _require_columns(path, value)
            checked = True
        id_column = id_column or next((name for name in _ID_COLUMNS if name in value), None)
        yield _row(row, value, id_column)


def open_parquet(path: Path) -> pq.ParquetFile:
    """Open a parquet file.

    Raises:
        InputError: ``corpus-truncated`` when the file begins as parquet but has no footer, else ``corpus-format``.
    """
    try:
        return pq.ParquetFile(path, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        with open(path, "rb") as file:
            begun = file.read(4) == b"PAR1"
        if begun:
            what = f"{path}: a parquet file without a valid footer, truncated or half written: {error}"
            raise InputError("corpus-truncated", what, hint="write it again: parquet cannot be read in part") from error
        raise InputError("corpus-format", f"{path}: not a parquet file: {error}") from error


def parquet_batches(path: Path, file: pq.ParquetFile, **options: Any) -> Iterator[pa.RecordBatch]:
    """Stream a parquet file's batches.

    Raises:
        InputError: ``corpus-truncated`` when a page cannot be read.
    """
    try:
        yield from map(_sound, file.iter_batches(**options))
    except (pa.ArrowException, OSError) as error:
        raise InputError("corpus-truncated", f"{path}: damaged data before a valid footer: {error}") from error


def _sound(batch: pa.RecordBatch) -> pa.RecordBatch:
    batch.validate(full=True)  # finds text that is not UTF-8, which would otherwise fail when a row is read
    return batch


def _arrow_batches(path: Path, kind: str) -> tuple[Iterable[pa.RecordBatch], list[str]]:
    wanted = ["input_ids", "loss_mask", "tag", "finish_reason", *_ID_COLUMNS]
    if kind == "parquet":
        file = open_parquet(path)
        names = file.schema_arrow.names
        return parquet_batches(path, file, batch_size=_BATCH_ROWS, columns=[n for n in wanted if n in names]), names
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise InputError("corpus-truncated", f"{path}: not a complete save_to_disk directory: {error}") from error
    if isinstance(loaded, datasets.DatasetDict):
        raise InputError(
            "corpus-format", f"{path}: holds the splits {list(loaded)}", hint="name one: --set corpus.path=DIR/SPLIT"
        )
    names = loaded.column_names
    kept = loaded.select_columns([n for n in wanted if n in names]).with_format("arrow")
    tables = kept.iter(batch_size=_BATCH_ROWS)
    return _table_batches(path, tables), names


def _table_batches(path: Path, tables: Iterable[pa.Table]) -> Iterator[pa.RecordBatch]:
    try:
        for table in tables:
            yield from map(_sound, table.to_batches())
    except (pa.ArrowException, OSError) as error:
        raise InputError("corpus-truncated", f"{path}: damaged: {error}") from error


def _lines(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Return rows as mappings; lists of integers become numpy views, fifty times faster than Python numbers."""
    lists, plain = {}, {}
    for name in batch.schema.names:
        column = batch.column(name)
        typed = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        if typed and pa.types.is_integer(column.type.value_type) and not column.flatten().null_count:
            lists[name] = column
        else:
            plain[name] = column.to_pylist()
    for i in range(batch.num_rows):
        line: dict[str, Any] = {name: values[i] for name, values in plain.items()}
        for name, column in lists.items():
            values = column[i].values
            line[name] = None if values is None else values.to_numpy()
        yield line


def _require_columns(path: Path, names: Iterable[str]) -> None:
    names = list(names)
    missing = [name for name in ("input_ids", "loss_mask") if name not in names]
    if missing:
        hint = "hscache tokenize takes chat messages and prompt+completion rows"
        raise InputError(
            "corpus-format", f"{path}: no column {', '.join(missing)}; found {', '.join(names)}", hint=hint
        )


def _row(row: int, value: Mapping[str, Any], id_column: str | None) -> Sample | Reject:
    sample_id = _text(value.get(id_column)) if id_column else None
    name, tag = sample_id or "", _text(value.get("tag"))
    try:
        ids = _whole_numbers(value.get("input_ids"), "input_ids")
        mask = _whole_numbers(value.get("loss_mask"), "loss_mask")
    except ValueError as error:
        return Reject(row, name, "bad-row", str(error), tag)
    most = np.iinfo(np.int32).max
    low, high, other = ids < 0, ids > most, (mask < 0) | (mask > 1)
    ids32, mask8 = ids.astype(np.int32), mask.astype(np.uint8)
    if len(ids) != len(mask):
        reason, detail = "length-mismatch", f"{len(ids)} ids, {len(mask)} mask entries"
    elif other.any():
        reason, detail = "bad-mask", f"loss_mask holds {mask[other][0]}, expected 0 or 1"
    elif (outside := low | high).any():
        reason, detail = "ids-out-of-vocab", f"input_ids holds {ids[outside][0]}, expected token ids"
    else:
        return Sample(row, name, ids32, mask8, tag, _text(value.get("finish_reason")))
    ids32[low], ids32[high], mask8[other] = -1, most, 2  # must not wrap around to numbers that a good row could hold
    return Reject(row, name, reason, detail, tag, len(ids), count_supervised(mask8), content_digest(ids32, mask8))


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _whole_numbers(value: object, name: str) -> np.ndarray[Any, np.dtype[np.integer[Any]]]:
    if isinstance(value, np.ndarray):
        return value
    if not isinstance(value, list):
        raise ValueError(f"{name} is {type(value).__name__}, expected a list of whole numbers")
    if not set(map(type, value)) <= {int, bool}:
        raise ValueError(f"{name} holds something else than whole numbers")
    try:
        return np.array(value, np.int64)
    except OverflowError:
        raise ValueError(f"{name} holds a number beyond 64 bits") from None
