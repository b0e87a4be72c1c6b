"""Read the samples of a shard one after another through zarr-python, not through the code that wrote them.

Short neighbours are read together, because a read through zarr-python costs a millisecond however small it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hscache.store.layout import ArraySpec

# Samples are read together up to this size.
_READ_BYTES = 16 << 20


def read_samples(
    arrays: dict[str, Any], specs: list[ArraySpec], rows: list[dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], dict[str, NDArray[Any]] | Exception]]:
    """Yield each sample's row with its stored arrays, or with the error of reading them.

    Args:
        arrays: The shard's, as zarr-python opened them.
        specs: Expected arrays.
        rows: Rows of the shard's sample table.
    """
    row_bytes = sum(spec.row_bytes for spec in specs)
    for run in _runs(rows, max(1, _READ_BYTES // row_bytes)):
        first, last = run[0], run[-1]
        span = {
            **first,
            "n_tokens": last["start"] + last["n_tokens"] - first["start"],
            "n_loss": last["loss_start"] + last["n_loss"] - first["loss_start"],
        }
        try:
            blocks = {spec.name: _rows(arrays[spec.name], spec, span) for spec in specs}
        except (ValueError, OSError, RuntimeError) as error:
            if len(run) == 1:
                yield first, error
            else:  # read one by one to find the damaged sample
                for row in run:
                    yield from read_samples(arrays, specs, [row])
            continue
        for row in run:
            at = {spec.name: _place(spec, row)[0] - _place(spec, first)[0] for spec in specs}
            yield row, {s.name: blocks[s.name][at[s.name] : at[s.name] + _place(s, row)[1]] for s in specs}


def _runs(rows: list[dict[str, Any]], most_tokens: int) -> Iterator[list[dict[str, Any]]]:
    """Cut samples into runs of neighbours; a run has one sample, or a bounded number of tokens."""
    run: list[dict[str, Any]] = []
    for row in rows:
        follows = run and all(
            row[start] == run[-1][start] + run[-1][n] for start, n in (("start", "n_tokens"), ("loss_start", "n_loss"))
        )
        if run and not (follows and row["start"] + row["n_tokens"] - run[0]["start"] <= most_tokens):
            yield run
            run = []
        run.append(row)
    if run:
        yield run


def _place(spec: ArraySpec, row: dict[str, Any]) -> tuple[int, int]:
    """Return a sample's first row in an array, and its number of rows."""
    return (row["start"], row["n_tokens"]) if spec.axis == "tokens" else (row["loss_start"], row["n_loss"])


def _rows(array: Any, spec: ArraySpec, row: dict[str, Any]) -> NDArray[Any]:
    start, count = _place(spec, row)
    values = np.asarray(array[start : start + count])
    if len(values) != count or values.dtype != spec.dtype or values.shape[1:] != spec.inner:
        raise ValueError(f"{spec.name}: {values.dtype} {values.shape}, expected {spec.dtype} {(count, *spec.inner)}")
    return values
