"""Read an already tokenized corpus: token ids with a mask or labels, from any file that :mod:`containers` reads.

::

    path -> read_corpus -> Sample | Reject, ...  -> plan

The tokens to supervise come from the columns that a row has:

- ``loss_mask`` (hscache, speculators, SpecForge): 1 where a token is supervised;
- ``completion_mask``, ``assistant_masks`` (TRL): 1 where it is supervised; with both, where both are 1;
- ``labels`` (axolotl, Hugging Face): the token's own id where it is supervised, -100 elsewhere.

Tokens whose ``attention_mask`` is 0 are padding and left out. A list of one list, as in SpecForge's processed rows,
means the inner list. A row that cannot be used becomes a :class:`hscache.rows.Reject`, so that rows keep their numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hscache.console import say
from hscache.corpus.containers import Row, find_files, read_file
from hscache.errors import InputError
from hscache.rows import Reject, Sample, content_digest

_ID_COLUMNS = ("sample_id", "id", "primary_id", "uuid")
_MASK_COLUMNS = ("loss_mask", "completion_mask", "assistant_masks", "labels")
_UNSUPERVISED = -100
_WANTED = ("input_ids", *_MASK_COLUMNS, "attention_mask", "tag", "finish_reason", *_ID_COLUMNS)

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


def read_corpus(path: Path) -> Iterator[Sample | Reject]:
    """Stream a tokenized corpus, and log one line that says which columns it is read from.

    Args:
        path: File, folder or glob pattern; see :func:`hscache.corpus.containers.find_files`.

    Raises:
        InputError: ``corpus-missing``, ``corpus-format``, ``corpus-truncated``.
    """
    files = find_files(path)
    # not the whole path: a corpus is the same one wherever it lies
    root = os.path.commonpath([file.parent for file in files])
    told: set[tuple[str, ...]] = set()
    number = 0
    for file in files:
        name = f"{file.relative_to(root)} " if len(files) > 1 else ""
        known = False
        for row in read_file(file, columns=_WANTED, arrays=True):
            place = f"{name}line {row.line}" if row.line else f"{name}row {row.number}"
            if row.value is None:
                yield Reject(number, "", row.reason, f"{place}: {row.fault}")
            else:
                if not known:
                    known, columns = True, _columns(row)
                    if columns not in told:
                        say(f"{path}: {' + '.join(columns)}" + (f", {len(files)} files" if len(files) > 1 else ""))
                    told.add(columns)
                yield read_sample(number, row.value, place, place if name else "")
            number += 1


def _columns(row: Row) -> tuple[str, ...]:
    """Return the columns that a file's first good row is read from.

    Raises:
        InputError: ``corpus-format``.
    """
    names = row.columns or list(row.value or ())
    masks = _masks(names)
    if "input_ids" in names and masks:
        return ("input_ids", *masks)
    missing = [] if "input_ids" in names else ["input_ids"]
    missing += [] if masks else [" or ".join(_MASK_COLUMNS)]
    what = f"{row.file}: no column {', '.join(missing)}; found {', '.join(names) or 'none'}"
    raise InputError("corpus-format", what, hint="hscache tokenize takes chat messages and prompt+completion rows")


def _masks(names: Sequence[str]) -> list[str]:
    """Return the columns that say which tokens are supervised; all of them must agree."""
    return ["loss_mask"] if "loss_mask" in names else [name for name in _MASK_COLUMNS if name in names]


def read_sample(number: int, value: Mapping[str, Any], place: str, source: str = "") -> Sample | Reject:
    """Return what a row of token ids holds.

    Args:
        number: Number of the row in the corpus.
        value: The row.
        place: Where the row is, for the detail of a reject.
        source: Where the row is, for the record of a sample.
    """
    sample_id = next((str(value[name]) for name in _ID_COLUMNS if value.get(name) is not None), "")
    tag = _text(value.get("tag"))
    names = [name for name, cell in value.items() if cell is not None]
    masks = _masks(names) or ["loss_mask"]
    padding = [name for name in ("attention_mask",) if name in names]
    try:
        ids = _whole_numbers(value.get("input_ids"), "input_ids")
        columns = {name: _whole_numbers(value.get(name), name) for name in (*masks, *padding)}
    except ValueError as error:
        return Reject(number, sample_id, "bad-row", f"{place}: {error}", tag)
    if fault := _fault(ids, columns):
        reason, detail = fault
        content = content_digest(*(column.astype(np.int64) for column in (ids, *columns.values())))
        return Reject(number, sample_id, reason, f"{place}: {detail}", tag, len(ids), content=content)
    supervised = np.ones(len(ids), np.uint8)
    for name in masks:
        supervised &= columns[name] != (_UNSUPERVISED if name == "labels" else 0)
    ids32: NDArray[np.int32] = ids.astype(np.int32)
    for name in padding:
        real = columns[name] != 0
        ids32, supervised = ids32[real], supervised[real]
    return Sample(number, sample_id, ids32, supervised, tag, _text(value.get("finish_reason")), source)


def _fault(ids: NDArray[Any], columns: Mapping[str, NDArray[Any]]) -> tuple[str, str] | None:
    """Return the reason why ids and masks cannot be a sample, and the wrong value; None when they can."""
    for name, column in columns.items():
        if len(column) != len(ids):
            return "length-mismatch", f"{len(ids)} input_ids, {len(column)} {name}"
    for name, column in columns.items():
        if name == "labels":
            wrong = (column != ids) & (column != _UNSUPERVISED)
            expected = "the token's own id, or -100"
        else:
            wrong, expected = (column < 0) | (column > 1), "0 or 1"
        if wrong.any():
            at = int(wrong.argmax())
            return "bad-mask", f"{name} holds {column[at]} for token {at}, which is {ids[at]}; expected {expected}"
    wrong = (ids < 0) | (ids > np.iinfo(np.int32).max)
    if wrong.any():
        at = int(wrong.argmax())
        return "ids-out-of-vocab", f"input_ids holds {ids[at]} as token {at}, expected an id of the vocabulary"
    return None


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _whole_numbers(value: object, name: str) -> NDArray[np.integer[Any]]:
    """Return a cell as a one-dimensional array.

    Raises:
        ValueError: It is something else; the message names the column and the value.
    """
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    if isinstance(value, np.ndarray):
        return value
    if value is None:
        raise ValueError(f"{name} is missing")
    if not isinstance(value, list):
        raise ValueError(f"{name} is {_short(value)}, expected a list of whole numbers")
    if not set(map(type, value)) <= {int, bool}:
        item = next(item for item in value if type(item) not in (int, bool))
        raise ValueError(f"{name} holds {_short(item)}, expected whole numbers")
    try:
        return np.array(value, np.int64)
    except OverflowError:
        item = next(item for item in value if not -(1 << 63) <= item < 1 << 63)
        raise ValueError(f"{name} holds {_short(item)}, a number beyond 64 bits") from None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
