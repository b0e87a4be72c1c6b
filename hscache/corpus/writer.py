"""Write a tokenized corpus: good rows to parquet, every other row with its reason beside it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hscache import console
from hscache.corpus.readers import CORPUS_SCHEMA
from hscache.errors import ConflictError, InputError

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
        finish_reasons: How completions that the target wrote ended -> rows.
    """

    corpus: str
    rows: int = 0
    samples: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    finish_reasons: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON."""
        return asdict(self)

    def say(self) -> None:
        """Log the report."""
        ends = ", ".join(f"{n} {reason}" for reason, n in sorted(self.finish_reasons.items()))
        console.say(
            f"{self.corpus}: {self.samples:,} samples, {self.tokens:,} tokens ({self.loss_tokens:,} supervised)"
            + (f", ended by {ends}" if ends else "")
        )
        if self.rejected:
            reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(self.rejected.items()))
            n, where = sum(self.rejected.values()), rejects_path(self.corpus)
            console.say(f"{n} of {self.rows} rows rejected: {reasons}; see {where}")


class CorpusWriter:
    """Collects samples; the file appears under its name when all are in.

    Args:
        out: Parquet file to write.

    Raises:
        ConflictError: ``corpus-exists``.
    """

    def __init__(self, out: Path) -> None:
        if out.exists():
            raise ConflictError("corpus-exists", f"{out} exists", hint="remove it or choose another --out")
        out.parent.mkdir(parents=True, exist_ok=True)
        self._out, self._partial = out, out.with_name(out.name + ".partial")
        self._writer = pq.ParquetWriter(self._partial, CORPUS_SCHEMA, compression="zstd", write_page_checksum=True)
        self._rows: list[dict[str, Any]] = []
        self._rejects: list[dict[str, Any]] = []
        self.report = CorpusReport(str(out))

    def add(
        self,
        sample_id: str,
        input_ids: list[int],
        loss_mask: list[int],
        *,
        tag: str | None = None,
        source: str | None = None,
        finish_reason: str | None = None,
    ) -> None:
        """Add a sample."""
        self._rows.append(
            {
                "sample_id": sample_id,
                "input_ids": input_ids,
                "loss_mask": loss_mask,
                "tag": tag,
                "source": source,
                "finish_reason": finish_reason,
            }
        )
        report = self.report
        report.rows += 1
        report.samples += 1
        report.tokens += len(input_ids)
        report.loss_tokens += sum(loss_mask[1:])
        if finish_reason:
            report.finish_reasons[finish_reason] = report.finish_reasons.get(finish_reason, 0) + 1
        if len(self._rows) == _ROW_GROUP_ROWS:
            self._flush()

    def reject(self, source: str, row: int, reason: str, detail: str) -> None:
        """Record a row that gives no sample."""
        self._rejects.append({"source": source, "row": row, "reason": reason, "detail": detail})
        self.report.rows += 1
        self.report.rejected[reason] = self.report.rejected.get(reason, 0) + 1

    def __enter__(self) -> CorpusWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._flush()
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
            self._partial.unlink()
            reasons = ", ".join(f"{n} {reason}" for reason, n in self.report.rejected.items()) or "no rows"
            raise InputError("corpus-empty", f"no row gave a sample ({reasons})", hint=f"see {rejects}")
        self._partial.rename(self._out)

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, schema=CORPUS_SCHEMA))
            self._rows = []


def rejects_path(out: Path | str) -> Path:
    """Return where the rejected rows of a corpus are listed: ``corpus.rejected.jsonl`` for ``corpus.parquet``."""
    return Path(out).with_suffix(".rejected.jsonl")
