"""Keep the accepted samples of a plan on disk, so that a build never holds a corpus in memory.

Any source format becomes the same Arrow file in the staging directory, with one record batch per forward batch, so
reading a forward batch is one positioned read whatever the order of the corpus. The file is rewritten at each start,
which also checks that the corpus is unchanged.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa

from hscache.rows import Sample

_SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("sample_id", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
    ]
)


class SpoolWriter:
    """A :class:`hscache.build.plan.SampleSink` that writes an Arrow IPC file."""

    def __init__(self, path: Path) -> None:
        self._writer = pa.ipc.new_file(str(path), _SCHEMA)

    def write_batch(self, rows: list[Sample]) -> None:
        """Write one forward batch."""
        columns = [
            pa.array([row.row for row in rows], pa.int64()),
            pa.array([row.sample_id for row in rows], pa.string()),
            pa.array([row.input_ids for row in rows], pa.list_(pa.int32())),
            pa.array([row.loss_mask for row in rows], pa.list_(pa.uint8())),
        ]
        self._writer.write_batch(pa.record_batch(columns, schema=_SCHEMA))

    def __enter__(self) -> SpoolWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._writer.close()


class Spool:
    """Forward batches by number; reads only the batch asked for, without mapping the file."""

    def __init__(self, path: Path) -> None:
        self._reader = pa.ipc.open_file(pa.OSFile(str(path)))

    def batch(self, number: int) -> list[Sample]:
        """Return the samples of one forward batch."""
        table = self._reader.get_batch(number)
        ids, masks = table.column("input_ids"), table.column("loss_mask")
        return [
            Sample(
                row=table.column("row")[i].as_py(),
                sample_id=table.column("sample_id")[i].as_py(),
                input_ids=np.asarray(ids[i].values.to_numpy(zero_copy_only=False), np.int32),
                loss_mask=np.asarray(masks[i].values.to_numpy(zero_copy_only=False), np.uint8),
            )
            for i in range(table.num_rows)
        ]
