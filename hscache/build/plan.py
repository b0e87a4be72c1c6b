"""Plan which sample goes into which shard, and all sizes: a pure function of corpus and manifest.

The corpus is streamed once. Rows that cannot be used get a reason. The others are sorted by length in windows of 1,024
and cut into forward batches of at most ``limits.batch_tokens`` padded tokens. The batches of a window are shuffled with
a fixed seed, so that each shard mixes lengths. Whole batches fill a shard until the next one would exceed
``store.shard_bytes``. The plan does not depend on the number of workers: any worker may build any
shard, and a different number of workers may finish the job.

Cost: one pass over the corpus; memory for one window of tokens and about 150 bytes of table per row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import xxhash

from hscache.console import counts
from hscache.corpus.chat import is_cut
from hscache.errors import InputError
from hscache.manifest import ResolvedManifest
from hscache.rows import Reject, Sample, content_digest
from hscache.store.index import PLAN_SCHEMA
from hscache.store.layout import ArraySpec, array_specs

WINDOW_ROWS = 1024
_SHUFFLE_SEED = 20260206  # arXiv 2602.06036

REASONS: dict[str, str] = {
    "bad-json": "the line is not a JSON object",
    "damaged": "the file is truncated or damaged at this row",
    "bad-row": "ids or mask are missing or not lists of whole numbers",
    "length-mismatch": "ids and mask differ in length",
    "empty": "no tokens",
    "bad-mask": "the mask holds values other than 0 and 1, or labels that are neither the token's id nor -100",
    "ids-out-of-vocab": "a token id is outside the target's vocabulary",
    "too-few-supervised": "fewer supervised tokens than limits.min_loss_tokens",
    "too-long": "more tokens than limits.max_tokens",
    "repeats": "a larger share of the supervised tokens are repeated than limits.repeats",
    "cut-answer": "the answer was cut off at a limit of length, and limits.drop_cut is set",
    "duplicate-id": "an earlier row has the same sample id",
}
"""Why the plan rejects a row; ``hscache.health.REASONS`` has the reasons of the capture."""


TOTALS = ("rows", "rejected", "samples", "tokens", "loss_tokens", "padded_tokens", "repeated_tokens", "cut")
"""Rows, and what the planned samples sum up to; ``cut`` counts samples whose answer was cut off."""


class SampleSink(Protocol):
    """Receives the accepted samples batch by batch, in plan order."""

    def write_batch(self, rows: list[Sample]) -> None:
        """Take one forward batch."""


@dataclass
class Plan:
    """Where every corpus row goes: a table, a digest of the corpus, and totals.

    Attributes:
        table: :data:`PLAN_SCHEMA`; planned samples in build order, then the rejected ones in corpus order.
        corpus: Number of rows, and a digest of the ids, masks and order of all rows.
        batches: For each shard the numbers of its forward batches.
        totals: Numbers of the names in :data:`TOTALS`.
    """

    table: pa.Table
    corpus: dict[str, Any]
    batches: list[range]
    totals: dict[str, int]
    shard_rows: list[tuple[int, int]] = field(default_factory=list)
    """Tokens and supervised tokens of each shard."""

    def reasons(self) -> dict[str, int]:
        """Return reason code -> number of rejected rows."""
        counts: dict[str, int] = {}
        for reason in self.table["reason"].to_pylist():
            if reason:
                counts[reason] = counts.get(reason, 0) + 1
        return counts


def manifest_specs(manifest: ResolvedManifest, hidden_size: int) -> list[ArraySpec]:
    """Return the arrays that a build of this manifest writes; its taps must be resolved."""
    return array_specs(
        n_taps=len(manifest.states.taps),
        hidden_size=hidden_size,
        final_state=manifest.states.final_state,
        topk=manifest.logits.topk,
        chunk_tokens=manifest.store.chunk_tokens,
        codec=manifest.store.codec,
    )


def plan_rows(rows: Iterable[Sample | Reject], manifest: ResolvedManifest, sink: SampleSink | None = None) -> Plan:
    """Return :func:`make_plan` for the widths of the manifest's target."""
    shape = manifest.target.shape
    return make_plan(rows, manifest, hidden_size=shape.hidden_size, vocab_size=shape.vocab_size, sink=sink)


def make_plan(
    rows: Iterable[Sample | Reject],
    manifest: ResolvedManifest,
    *,
    hidden_size: int,
    vocab_size: int,
    sink: SampleSink | None = None,
) -> Plan:
    """Stream the corpus once and place every row.

    Args:
        rows: The corpus, in order.
        manifest: With resolved taps.
        hidden_size: H of the target.
        vocab_size: Rows of the target's embedding; token ids must be smaller.
        sink: Receives the accepted samples batch by batch, in plan order.

    Raises:
        InputError: ``corpus-empty`` when no row can be used.
    """
    planner = _Planner(manifest, manifest_specs(manifest, hidden_size), vocab_size, sink)
    for row in rows:
        planner.take(row)
    planner.flush_window()
    plan = planner.result()
    if not plan.totals["samples"]:
        reasons = counts(plan.reasons()) or "it has no rows"
        raise InputError(
            "corpus-empty",
            f"{manifest.corpus.path}: no row can be used ({reasons})",
            hint=f"the first row: {plan.table['detail'][0]}" if len(plan.table) else "hscache generate writes a corpus",
        )
    return plan


class _Planner:
    def __init__(
        self, manifest: ResolvedManifest, specs: list[ArraySpec], vocab_size: int, sink: SampleSink | None
    ) -> None:
        self._manifest, self._vocab_size, self._sink = manifest, vocab_size, sink
        self._token_bytes = sum(s.row_bytes for s in specs if s.axis == "tokens")
        self._loss_bytes = sum(s.row_bytes for s in specs if s.axis == "loss")
        self._digest = xxhash.xxh3_128()
        self._seen: set[bytes] = set()
        self._window: list[Sample] = []
        self._windows = 0
        self._columns: dict[str, list[Any]] = {name: [] for name in PLAN_SCHEMA.names}
        self._rejected: dict[str, list[Any]] = {name: [] for name in PLAN_SCHEMA.names}
        self._shard, self._shard_bytes, self._order, self._n_batches = 0, 0, 0, 0
        self._batches: list[range] = []
        self._shard_rows: list[tuple[int, int]] = []
        self._first_batch = 0
        self._sums = [0, 0]
        self._totals = dict.fromkeys(TOTALS, 0)

    def take(self, row: Sample | Reject) -> None:
        """Add one row to the window, or to the rejected ones."""
        self._totals["rows"] += 1
        content = row.content
        self._digest.update(content or content_digest())
        if not row.sample_id:
            row = replace(row, sample_id=content.hex())
        if isinstance(row, Sample):
            row = self._checked(row)
        if isinstance(row, Reject):
            self._totals["rejected"] += 1
            line = (
                row.sample_id, row.row, -1, -1, -1,
                row.n_tokens, row.n_loss, "rejected", row.reason, row.detail, row.tag,
            )  # fmt: skip
            _append(self._rejected, line)
            return
        self._window.append(row)
        if len(self._window) == WINDOW_ROWS:
            self.flush_window()

    def flush_window(self) -> None:
        """Cut the window into batches and give them to shards."""
        window = sorted(
            self._window, key=lambda sample: -len(sample.input_ids)
        )  # stable: equal lengths keep their order
        batches = list(_cut(window, self._manifest.limits.batch_tokens))
        order = np.random.default_rng((_SHUFFLE_SEED, self._windows)).permutation(len(batches))
        for i in order:
            self._place(batches[i])
        self._window, self._windows = [], self._windows + 1

    def _place(self, batch: list[Sample]) -> None:
        n_tokens = sum(len(sample.input_ids) for sample in batch)
        n_loss = sum(sample.n_loss for sample in batch)
        n_bytes = n_tokens * self._token_bytes + n_loss * self._loss_bytes
        if self._shard_bytes and self._shard_bytes + n_bytes > self._manifest.store.shard_bytes:
            self._close_shard()
        for sample in batch:
            line = (
                sample.sample_id, sample.row, self._shard, self._n_batches, self._order,
                len(sample.input_ids), sample.n_loss, "planned", "", "", sample.tag,
            )  # fmt: skip
            _append(self._columns, line)
            self._order += 1
        self._shard_bytes += n_bytes
        self._n_batches += 1
        self._sums = [self._sums[0] + n_tokens, self._sums[1] + n_loss]
        self._totals["samples"] += len(batch)
        self._totals["tokens"] += n_tokens
        self._totals["loss_tokens"] += n_loss
        self._totals["repeated_tokens"] += sum(sample.repeats for sample in batch)
        self._totals["cut"] += sum(is_cut(sample.finish_reason) for sample in batch)
        self._totals["padded_tokens"] += len(batch) * len(batch[0].input_ids)
        if self._sink is not None:
            self._sink.write_batch(batch)

    def _close_shard(self) -> None:
        self._batches.append(range(self._first_batch, self._n_batches))
        self._shard_rows.append((self._sums[0], self._sums[1]))
        self._shard, self._shard_bytes, self._order = self._shard + 1, 0, 0
        self._first_batch, self._sums = self._n_batches, [0, 0]

    def result(self) -> Plan:
        """Return the plan; the planner cannot be used again."""
        if self._shard_bytes:
            self._close_shard()
        columns = {name: self._columns[name] + self._rejected[name] for name in PLAN_SCHEMA.names}
        corpus = {"rows": self._totals["rows"], "digest": self._digest.hexdigest()}
        table = pa.table(columns, schema=PLAN_SCHEMA)
        return Plan(table, corpus, self._batches, self._totals, self._shard_rows)

    def _checked(self, sample: Sample) -> Sample | Reject:
        """Return a sample that this build can use, else the record of what is wrong with it."""
        ids, n_loss, limits = sample.input_ids, sample.n_loss, self._manifest.limits
        if not len(ids):
            return sample.reject("empty", "no tokens")
        if (high := int(ids.max())) >= self._vocab_size:
            return sample.reject("ids-out-of-vocab", f"id {high}, vocabulary of {self._vocab_size}")
        if len(ids) > limits.max_tokens:
            return sample.reject("too-long", f"{len(ids)} tokens, limit {limits.max_tokens}")
        if n_loss < limits.min_loss_tokens:
            wanted = f"expected at least {limits.min_loss_tokens}"
            return sample.reject("too-few-supervised", f"{n_loss} supervised tokens, {wanted}")
        if limits.drop_cut and is_cut(sample.finish_reason):
            return sample.reject("cut-answer", f"finish_reason is {sample.finish_reason}")
        if limits.repeats < 1 and sample.repeats > limits.repeats * n_loss:
            detail = f"{sample.repeats} of {n_loss} supervised tokens, limit {limits.repeats:g} of them"
            return sample.reject("repeats", detail)
        key = xxhash.xxh3_128_digest(sample.sample_id.encode())
        if key in self._seen:
            return sample.reject("duplicate-id", f"{sample.sample_id!r} was seen before")
        self._seen.add(key)
        return sample


@dataclass(frozen=True)
class ArrayBytes:
    """Exact bytes of one array over all shards, without packing.

    Attributes:
        name: Array name.
        per_row: Bytes of one row.
        axis: ``tokens`` or ``loss``.
        data: Rows times row bytes.
        files: Size of the data files: whole chunks, checksums, shard indexes.
    """

    name: str
    per_row: int
    axis: str
    data: int
    files: int


def array_bytes(plan: Plan, specs: list[ArraySpec]) -> list[ArrayBytes]:
    """Return the exact size of every array of a plan."""
    out = []
    for spec in specs:
        rows = [tokens if spec.axis == "tokens" else loss for tokens, loss in plan.shard_rows]
        files = sum(spec.raw_file_bytes(n) for n in rows)
        out.append(ArrayBytes(spec.name, spec.row_bytes, spec.axis, sum(rows) * spec.row_bytes, files))
    return out


def _append(columns: dict[str, list[Any]], line: tuple[Any, ...]) -> None:
    for name, value in zip(PLAN_SCHEMA.names, line, strict=True):
        columns[name].append(value)


def _cut(window: list[Sample], batch_tokens: int) -> Iterator[list[Sample]]:
    """Cut samples, sorted longest first, into batches; the first sample of a batch gives its padded width."""
    batch: list[Sample] = []
    for sample in window:
        if batch and (len(batch) + 1) * len(batch[0].input_ids) > batch_tokens:
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch
