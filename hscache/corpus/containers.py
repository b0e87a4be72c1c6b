"""Rows of data files, whatever holds them: JSON lines, JSON arrays, parquet or Arrow; one file or many.

::

    path, folder or pattern -> find_files -> read_file -> Row, Row, ...

A row means the same in every container. Parquet and Arrow give every struct of a column the same keys, and fill those
that a row does not have with nulls; such keys are left out here. Files are streamed: memory holds one row of JSON, one
batch of parquet, or one record batch of Arrow. Where a file ends early or is damaged, the rows before that place are
kept, and a row with a fault says at which byte it is.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from hscache.errors import InputError

FORMATS = ".jsonl, .json (both also .gz or .zst), .parquet, .arrow, a folder of them, or one that save_to_disk wrote"
_BATCH_ROWS = 256
_CHUNK = 1 << 16
_ARROW_SUFFIXES = (".arrow", ".feather", ".ipc")
_NOT_DATA = ("state.json", "dataset_info.json", "dataset_dict.json")  # what save_to_disk writes beside the data
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_BLANKS = re.compile("[ \t\r\n\ufeff]*")
_BROKEN = (EOFError, zlib.error, OSError)


@dataclass(frozen=True)
class Row:
    """One row of a file.

    Attributes:
        file: The file that holds it.
        number: Number of the row in its file, 0-based; blank lines are not rows.
        value: Column -> value; None when the row cannot be read.
        reason: ``bad-json`` or ``damaged`` for a row that cannot be read, else empty.
        fault: What is wrong with it, and at which byte of the file.
        line: Line of the file, 1-based; None for other files than JSON lines.
        columns: All columns of the file; empty for JSON, where each row has its own.
    """

    file: Path
    number: int
    value: dict[str, Any] | None
    reason: str = ""
    fault: str = ""
    line: int | None = None
    columns: Sequence[str] = ()


def find_files(path: Path) -> list[Path]:
    """Return the files that a path means, in the order in which they are read.

    Args:
        path: A file; a folder, for the files in it; a pattern such as ``data/*.jsonl`` or ``data/**/*.parquet``; or
            ``owner/name`` of a dataset whose snapshot the hub's local cache has, or a pattern inside it, such as
            ``owner/name/data/train-*``.

    Raises:
        InputError: ``corpus-missing``, ``corpus-format``, ``corpus-truncated``.
    """
    path = path.expanduser()
    if path.is_dir():
        found = _files_in(path)
    elif path.exists():
        found = [path]
    else:
        matches = list(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
        matches = matches or _cached_dataset(path)
        if not matches:
            what = f"{path}: no such file or folder, nothing matches it, and no dataset in the hub's local cache"
            raise InputError("corpus-missing", what, hint="hscache tokenize or hscache generate makes a corpus")
        folders = [match for match in matches if match.is_dir() and (match / "state.json").exists()]
        inside = [file for folder in folders for file in _files_in(folder)]
        found = sorted({*inside, *filter(_is_data, matches)})
    if not found or not all(map(_container, found)):
        raise InputError(
            "corpus-format",
            f"{path}: expected {FORMATS}",
            hint="hscache tokenize turns chat messages and prompt+completion files into a corpus",
        )
    return found


def _cached_dataset(path: Path) -> list[Path]:
    """Return the files of a dataset repository in the hub's local cache that ``owner/name[/pattern]`` means."""
    if len(path.parts) < 2 or path.is_absolute():
        return []
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download("/".join(path.parts[:2]), repo_type="dataset", local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return []
    return list(folder.glob("/".join(path.parts[2:]) or "**/*"))


def read_objects(path: Path, *, columns: Collection[str] | None = None, arrays: bool = False) -> Iterator[Row]:
    """Stream the rows of all files that a path means; see :func:`find_files` and :func:`read_file`."""
    for file in find_files(path):
        yield from read_file(file, columns=columns, arrays=arrays)


def read_file(file: Path, *, columns: Collection[str] | None = None, arrays: bool = False) -> Iterator[Row]:
    """Stream the rows of one file.

    Args:
        file: As :func:`find_files` returned it.
        columns: Columns that are wanted; parquet reads no others. None for all.
        arrays: Give lists of integers in parquet and Arrow as numpy arrays, which is fifty times faster.

    Raises:
        InputError: ``corpus-format``, ``corpus-truncated`` for a file that gives no row at all.
    """
    kind = _container(file)
    if kind == "parquet":
        yield from _parquet_rows(file, columns, arrays)
    elif kind == "arrow":
        yield from _arrow_rows(file, columns, arrays)
    else:
        yield from _json_rows(file)


def _container(file: Path) -> str:
    """Return ``parquet``, ``arrow`` or ``json``, by the file's name; empty for another file."""
    suffix = Path(file.stem).suffix if file.suffix in (".gz", ".zst") else file.suffix
    if suffix in (".jsonl", ".json"):
        return "json"
    return "parquet" if file.suffix == ".parquet" else "arrow" if file.suffix in _ARROW_SUFFIXES else ""


def _is_data(file: Path) -> bool:
    """Return whether a file found in a folder is meant to be read."""
    return bool(_container(file)) and file.is_file() and file.name not in _NOT_DATA and not file.name.startswith(".")


def _files_in(folder: Path) -> list[Path]:
    if (folder / "dataset_dict.json").exists():
        splits = sorted(child.name for child in folder.iterdir() if child.is_dir())
        what = f"{folder}: holds the splits {', '.join(splits)}"
        raise InputError("corpus-format", what, hint=f"name one, such as {folder / (splits or ['train'])[0]}")
    state = folder / "state.json"
    if not state.exists():
        return sorted(filter(_is_data, folder.iterdir()))
    try:
        content = json.loads(state.read_bytes())
        files = [folder / str(entry["filename"]) for entry in content["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError("corpus-truncated", f"{state}: not what save_to_disk writes: {error!r}") from error
    if content.get("_indices_data_files"):
        what = f"{folder}: its rows are reordered by an index file, as datasets before 2.0 wrote it"
        raise InputError("corpus-format", what, hint="load_from_disk and save_to_disk write it anew")
    if missing := [file.name for file in files if not file.is_file()]:
        raise InputError("corpus-truncated", f"{folder}: {', '.join(missing)} is missing, which state.json lists")
    return files


# --- JSON


def _json_rows(file: Path) -> Iterator[Row]:
    with _open(file) as stream:
        if ".json" in file.suffixes[-2:] and _is_array(file, stream):
            for number, (start, value, fault) in enumerate(_elements(file, stream)):
                yield _json_row(file, number, None, start, value, fault)
            return
        for number, (line_number, start, line, fault) in enumerate(_lines(file, stream)):
            value = None
            if not fault:
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError) as error:  # bad JSON and bad UTF-8 alike
                    fault = str(error)
            yield _json_row(file, number, line_number, start, value, fault, surrogates=b"\\ud" in line.lower())


def _is_array(file: Path, stream: BinaryIO) -> bool:
    try:
        head = cast("io.BufferedReader", stream).peek(_CHUNK)
    except _BROKEN as error:
        _broken(file, 0, error)
        return False
    return head.lstrip(codecs.BOM_UTF8 + b" \t\r\n").startswith(b"[")


def _json_row(
    file: Path, number: int, line: int | None, start: int, value: object, fault: str, *, surrogates: bool = True
) -> Row:
    if not fault and not isinstance(value, dict):
        fault = f"{type(value).__name__}, expected an object"
    if not fault and surrogates:  # half a surrogate pair is text that cannot be encoded as UTF-8
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except ValueError as error:
            fault = str(error)
    if fault:
        return Row(file, number, None, "bad-json", f"byte {start}: {fault}", line)
    return Row(file, number, cast("dict[str, Any]", value), line=line)


def _open(file: Path) -> BinaryIO:
    if file.suffix == ".gz":
        return cast("BinaryIO", gzip.open(file, "rb"))
    if file.suffix == ".zst":
        return io.BufferedReader(pa.input_stream(str(file), compression="zstd"), _CHUNK)
    return open(file, "rb")


def _broken(file: Path, offset: int, error: Exception) -> str:
    """Return what is wrong with packed data.

    Raises:
        InputError: ``corpus-format`` when the file is not packed as its name says.
    """
    if isinstance(error, OSError) and error.errno is not None:  # the disk's, not the file's
        raise error
    if not offset and (isinstance(error, gzip.BadGzipFile) or "Unknown frame" in str(error)):
        raise InputError("corpus-format", f"{file}: not {file.suffix[1:]} data: {error}") from error
    return f"(of the unpacked text) {error}"


def _lines(file: Path, stream: BinaryIO) -> Iterator[tuple[int, int, bytes, str]]:
    """Stream the lines that are not blank: their number, byte, text and fault; broken data ends in a fault."""
    offset, number = 0, 0
    while True:
        number += 1
        try:
            line = stream.readline()
        except _BROKEN as error:
            yield number, offset, b"", _broken(file, offset, error)
            return
        if not line:
            return
        if line.strip():
            yield number, offset, line, ""
        offset += len(line)


def _elements(file: Path, stream: BinaryIO) -> Iterator[tuple[int, Any, str]]:
    """Stream the elements of a JSON array: byte, value and fault; after a fault in the syntax nothing follows."""
    text = _Text(stream)
    try:
        text.take("[")
        more = text.next() != "]"
        while more:
            text.next()
            start = text.offset
            yield start, text.value(), ""
            if more := text.next() != "]":
                text.take(",")
        text.take("]")
        if char := text.next():
            yield text.offset, None, f"{char!r} after the end of the array"
    except _BROKEN as error:
        yield text.offset, None, _broken(file, text.offset, error)
    except (ValueError, RecursionError) as error:
        yield text.offset, None, str(error)


class _Text:
    """The text of a JSON file, read piece by piece."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._decoder = stream, json.JSONDecoder()
        # bytes that are not UTF-8 become half surrogates, which fail the check of each row
        self._decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self._text, self._at, self._ended = "", 0, False
        self.offset = 0
        """Bytes before the next character."""

    def next(self) -> str:
        """Skip blanks and return the next character without taking it; empty at the end."""
        while True:
            self._move(_BLANKS.match(self._text, self._at).end())  # type: ignore[union-attr]
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._read()

    def take(self, wanted: str) -> None:
        """Take one character, which must be this one."""
        if (found := self.next()) != wanted:
            raise ValueError(f"expected {wanted!r}, found {found!r}" if found else f"ends where {wanted!r} is expected")
        self._move(self._at + 1)

    def value(self) -> Any:
        """Take one JSON value."""
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
                if end < len(self._text) or self._ended:
                    self._move(end)
                    return value
            except json.JSONDecodeError as error:
                cut = error.pos >= len(self._text) - 10 or error.msg.startswith("Unterminated string")
                if self._ended or not cut:
                    raise
            self._read()

    def _move(self, to: int) -> None:
        self.offset += len(self._text[self._at : to].encode("utf-8", "surrogateescape"))
        self._at = to

    def _read(self) -> None:
        data = self._stream.read(max(_CHUNK, len(self._text) - self._at))
        self._ended = not data
        self._text, self._at = self._text[self._at :] + self._decode(data, self._ended), 0


# --- parquet and Arrow


def open_parquet(file: Path) -> pq.ParquetFile:
    """Open a parquet file.

    Raises:
        InputError: ``corpus-truncated`` when the file begins as parquet but has no footer; ``corpus-format`` for
            another file, or one with two columns of one name.
    """
    try:
        # without these two, whole columns of a row group are in memory
        opened = pq.ParquetFile(file, page_checksum_verification=True, pre_buffer=False, buffer_size=1 << 20)
    except (pa.ArrowException, OSError) as error:
        with open(file, "rb") as head:
            begun = head.read(4) == b"PAR1"
        if begun:
            what = f"{file}: a parquet file without a valid footer, truncated or half written: {error}"
            raise InputError("corpus-truncated", what, hint="write it again: parquet cannot be read in part") from error
        raise InputError("corpus-format", f"{file}: not a parquet file: {error}") from error
    _refuse_twins(file, opened.schema_arrow.names)
    return opened


def _refuse_twins(file: Path, names: Sequence[str]) -> None:
    if twins := sorted({name for name in names if names.count(name) > 1}):
        what = f"{file}: has two columns named {', '.join(twins)}, expected names that differ"
        raise InputError("corpus-format", what, hint="write the file with one of them")


def _parquet_rows(file: Path, columns: Collection[str] | None, arrays: bool) -> Iterator[Row]:
    opened = open_parquet(file)
    names = opened.schema_arrow.names
    wanted = None if columns is None else [name for name in names if name in columns]
    number = 0
    for group in range(opened.num_row_groups):
        facts = opened.metadata.row_group(group)
        start = min((_first_byte(facts.column(i)) for i in range(facts.num_columns)), default=0)
        stop = number + facts.num_rows
        try:
            for batch in opened.iter_batches(_BATCH_ROWS, row_groups=[group], columns=wanted):
                for value, fault in _values(batch, arrays):
                    yield _table_row(file, number, value, f"byte {start}: {fault}", names)
                    number += 1
        except (pa.ArrowException, OSError) as error:  # the row groups after it can still be read
            for lost in range(number, stop):
                yield _table_row(file, lost, None, f"byte {start}: damaged data: {error}", names)
        number = stop


def _first_byte(chunk: Any) -> int:
    return int(chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset)


def _arrow_rows(file: Path, columns: Collection[str] | None, arrays: bool) -> Iterator[Row]:
    """Stream an Arrow file as a stream of record batches: also of a file whose footer is missing."""
    number, start = 0, 0
    with pa.memory_map(str(file)) as source:
        whole = source.read(8)[:6] == b"ARROW1"
        source.seek(8 if whole else 0)
        try:
            reader = pa.ipc.open_stream(source)
        except (pa.ArrowException, OSError) as error:
            raise InputError("corpus-format", f"{file}: not Arrow data, or cut off at its start: {error}") from error
        names = reader.schema.names
        _refuse_twins(file, names)
        wanted = names if columns is None else [name for name in names if name in columns]
        while True:
            start = source.tell()
            try:
                batch = reader.read_next_batch()
            except StopIteration:
                source.seek(source.tell() - 8)
                if source.read(8) != _END_OF_STREAM:
                    fault = f"byte {start}: ends without the mark of a complete file: half written"
                    yield _table_row(file, number, None, fault, names)
                return
            except (pa.ArrowException, OSError) as error:
                yield _table_row(file, number, None, f"byte {start}: truncated or damaged: {error}", names)
                return
            batch = batch.select(wanted)
            for first in range(0, batch.num_rows, _BATCH_ROWS):
                for value, fault in _values(batch.slice(first, _BATCH_ROWS), arrays):
                    yield _table_row(file, number, value, f"byte {start}: {fault}", names)
                    number += 1


def _table_row(file: Path, number: int, value: dict[str, Any] | None, fault: str, names: Sequence[str]) -> Row:
    if value is None:
        return Row(file, number, None, "damaged", fault, columns=names)
    return Row(file, number, value, columns=names)


def _values(batch: pa.RecordBatch, arrays: bool) -> Iterator[tuple[dict[str, Any] | None, str]]:
    """Stream the rows of a batch as mappings; None and a fault for a row with text that is not UTF-8."""
    try:
        batch.validate(full=True)
    except pa.ArrowException as error:
        if batch.num_rows == 1:
            yield None, str(error)
        else:
            for i in range(batch.num_rows):
                yield from _values(batch.slice(i, 1), arrays)
        return
    lists, plain = {}, {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        typed = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        integers = typed and pa.types.is_integer(column.type.value_type)
        if arrays and integers and not column.flatten().null_count:
            lists[name] = column
        else:
            plain[name] = column.to_pylist()
    for i in range(batch.num_rows):
        value = {name: _without_padding(values[i]) for name, values in plain.items()}
        for name, column in lists.items():
            numbers = column[i].values
            value[name] = None if numbers is None else numbers.to_numpy()
        yield {name: cell for name, cell in value.items() if cell is not None}, ""


def _without_padding(value: Any) -> Any:
    """Return a cell without the keys of its structs that hold null: other rows have them, this one does not."""
    if isinstance(value, dict):
        return {key: _without_padding(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_padding(item) for item in value]
    return value
