"""Write a tokenized corpus: good rows to parquet, rejected rows with their reasons to a file beside it.

Completions take hours to generate, so they are kept in a :class:`Journal` until the corpus is complete.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hscache import console
from hscache.corpus.origin import Origin, with_origin
from hscache.corpus.readers import CORPUS_SCHEMA
from hscache.errors import ConflictError, InputError
from hscache.rows import count_supervised
from hscache.store.durable import fsync_directory, lock_file

_ROW_GROUP_ROWS = 1024


@dataclass
class CorpusReport:
    """What went into a corpus.

    Attributes:
        corpus: Path of the parquet file.
        rows: Rows read.
        samples: Rows written.
        tokens: Their tokens.
        loss_tokens: Their supervised tokens.
        rejected: Reason code -> rows.
        finish_reasons: How answers ended -> samples.
        notes: What was done to rows beyond their masks -> rows or answers.
    """

    corpus: str
    rows: int = 0
    samples: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    finish_reasons: dict[str, int] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)

    def note(self, **counts: int) -> None:
        """Count what was done to a row."""
        self.notes.update({name: int(n) for name, n in counts.items() if n})

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON."""
        return asdict(self)

    def say(self) -> None:
        """Log the report."""
        ends = console.counts(self.finish_reasons)
        samples = console.counted(self.samples, "sample")
        console.say(
            f"{self.corpus}: {samples}, {self.tokens:,} tokens ({self.loss_tokens:,} supervised)"
            + (f", ended by {ends}" if ends else "")
        )
        if self.rejected:
            n, where = sum(self.rejected.values()), rejects_path(self.corpus)
            console.say(
                f"{n} of {console.counted(self.rows, 'row')} rejected: {console.counts(self.rejected)}; see {where}"
            )


class CorpusWriter:
    """Collect samples; the file appears under its name when all are written.

    Args:
        out: Parquet file to write.
        made: Record of the target, :func:`hscache.corpus.origin.origin`; None for none.

    Raises:
        InputError: ``corpus-format`` for another suffix than ``.parquet``; ``corpus-empty`` at the end.
        ConflictError: ``corpus-exists``.
    """

    def __init__(self, out: Path, made: Origin | None = None) -> None:
        if out.suffix != ".parquet":  # a build recognises a corpus by its suffix
            hint = f"--out {out.with_suffix('.parquet')}"
            raise InputError("corpus-format", f"{out}: a corpus can only be written as .parquet", hint=hint)
        if out.exists():
            raise ConflictError("corpus-exists", f"{out} exists", hint="remove it or choose another --out")
        out.parent.mkdir(parents=True, exist_ok=True)
        self._schema = with_origin(CORPUS_SCHEMA, made)
        self._out, self._partial = out, out.with_name(out.name + ".partial")
        self._writer: pq.ParquetWriter | None = None
        self._rows: list[dict[str, Any]] = []
        self._rejects: list[dict[str, Any]] = []
        self.report = CorpusReport(str(out))

    def add(
        self,
        sample_id: str,
        input_ids: Sequence[int],
        loss_mask: Sequence[int] | NDArray[np.uint8],
        *,
        tag: str | None = None,
        source: str | None = None,
        finish_reason: str | None = None,
        new_row: bool = True,
    ) -> None:
        """Add a sample; ``new_row`` is False for a further one of the same row."""
        self._rows.append(
            {
                "sample_id": sample_id,
                "input_ids": np.asarray(input_ids, np.int32),  # a tenth of the memory of Python's numbers
                "loss_mask": np.asarray(loss_mask, np.uint8),
                "tag": tag,
                "source": source,
                "finish_reason": finish_reason,
            }
        )
        report = self.report
        report.rows += new_row
        report.samples += 1
        report.tokens += len(input_ids)
        report.loss_tokens += count_supervised(loss_mask)
        if finish_reason:
            report.finish_reasons[finish_reason] = report.finish_reasons.get(finish_reason, 0) + 1
        if len(self._rows) == _ROW_GROUP_ROWS:
            self._flush()

    def reject(
        self, source: str, row: int, reason: str, detail: str, *, line: int | None = None, new_row: bool = True
    ) -> None:
        """Record a rejected row, or a further sample of a row that was counted."""
        where = {"source": source, "row": row} | ({} if line is None else {"line": line})
        self._rejects.append({**where, "reason": reason, "detail": detail})
        self.report.rows += new_row
        self.report.rejected[reason] = self.report.rejected.get(reason, 0) + 1

    def __enter__(self) -> CorpusWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None and self.report.samples:
            self._flush()
        if self._writer is not None:
            self._writer.close()
        if error is not None:
            self._partial.unlink(missing_ok=True)
            return
        rejects = rejects_path(self._out)
        if self._rejects:
            rejects.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in self._rejects), "utf-8")
        else:
            rejects.unlink(missing_ok=True)
        if not self.report.samples:
            reasons = console.counts(self.report.rejected) or "no rows"
            hint = f"see {rejects}" if self._rejects else "the input has no rows"
            raise InputError("corpus-empty", f"no row gave a sample ({reasons})", hint=hint)
        with open(self._partial, "rb") as file:
            os.fsync(file.fileno())
        self._partial.rename(self._out)
        fsync_directory(self._out.parent)

    def _flush(self) -> None:
        if self._rows:
            if self._writer is None:
                self._writer = pq.ParquetWriter(
                    self._partial, self._schema, compression="zstd", write_page_checksum=True
                )
            self._writer.write_table(pa.Table.from_pylist(self._rows, schema=self._schema))
            self._rows = []


class Journal:
    """The finished prompts of an unfinished ``generate``, in any order: one line each, on the disk before it counts.

    The first line holds the settings of the run, each other line a prompt's number, its completion and notes. A line
    that was cut off by a kill, and everything after it, counts as not written. Use as a context manager; the file stays
    when the work stops, and :meth:`remove` deletes it. ``number in journal`` says whether a prompt is finished.

    Args:
        path: JSONL file; new, or left by a run with the same settings.
        settings: The settings that decide the completions; plain JSON, without nesting.

    Raises:
        ConflictError: ``corpus-begun`` when the file was begun with other settings, or another process writes it.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._path = path
        self._at: dict[int, int] = {}
        self._end = 0
        self._file = path.open("a+b")
        try:
            try:
                lock_file(self._file.fileno(), path)
            except BlockingIOError:
                raise ConflictError("corpus-begun", f"{path}: another process writes it") from None
            self._open(dict(settings))
        except BaseException:
            self._file.close()
            raise

    def __contains__(self, number: int) -> bool:
        return number in self._at

    def append(self, completions: Mapping[int, Sequence[int]], notes: Sequence[str] = ()) -> None:
        """Add finished prompts.

        Args:
            completions: Number of the prompt -> token ids of its completion.
            notes: What was done to each of these completions.
        """
        self._write([[number, list(ids), *notes] for number, ids in completions.items()])

    def read(self, number: int) -> tuple[list[int], list[str]]:
        """Return the completion of a finished prompt, and its notes."""
        self._file.seek(self._at[number])
        _, ids, *notes = json.loads(self._file.readline())
        return ids, notes

    def remove(self) -> None:
        """Remove the file, because the corpus now has all of it."""
        self._path.unlink()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _open(self, settings: dict[str, Any]) -> None:
        """Find the finished prompts, and cut off a broken end."""
        header = json.dumps(settings, separators=(",", ":"))
        self._file.seek(0)
        first = self._file.readline()
        if not first.endswith(b"\n") and f"{header}\n".encode().startswith(first):  # new, or a header that was cut off
            self._file.truncate(0)
            self._write([settings])
            fsync_directory(self._path.parent)
            return
        self._refuse_other(first, settings)
        self._end = len(first)
        for line in self._file:
            entry = _parsed(line) if line.endswith(b"\n") else None
            if not isinstance(entry, list):
                break
            self._at[entry[0]] = self._end
            self._end += len(line)
        self._file.truncate(self._end)

    def _refuse_other(self, first: bytes, settings: dict[str, Any]) -> None:
        there = _parsed(first)
        if not isinstance(there, dict) or "generate" not in there:
            what = f"{self._path} was not written by hscache generate"
            raise ConflictError("corpus-begun", what, hint="move it away, or choose another --out")
        names = [name for name in {**there, **settings} if there.get(name) != settings.get(name)]
        if names:
            differing = "; ".join(f"{name}: {there.get(name)} there, {settings.get(name)} here" for name in names)
            raise ConflictError(
                "corpus-begun",
                f"{self._path}: begun with other settings: {differing}",
                hint=f"finish it with the settings it was begun with, or remove {self._path} to start again",
            )

    def _write(self, entries: Sequence[Any]) -> None:
        lines = [json.dumps(entry, separators=(",", ":")).encode() + b"\n" for entry in entries]
        self._file.write(b"".join(lines))
        self._file.flush()
        os.fsync(self._file.fileno())
        for entry, line in zip(entries, lines, strict=True):
            if isinstance(entry, list):
                self._at[entry[0]] = self._end
            self._end += len(line)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def journal_path(out: Path) -> Path:
    """Return where an unfinished corpus is kept: ``corpus.batches.jsonl`` for ``corpus.parquet``."""
    return out.with_suffix(".batches.jsonl")


def rejects_path(out: Path | str) -> Path:
    """Return where the rejected rows of a corpus are listed: ``corpus.rejected.jsonl`` for ``corpus.parquet``."""
    return Path(out).with_suffix(".rejected.jsonl")
