"""Check one shard: its record, its files, and with ``full`` every byte of its arrays.

The file digests show that the files are those that were written, the sample digests that the arrays read back as what
was captured. Arrays are read through the store's own reader, which is not the code that wrote them; some rows of each
shard are read through zarr-python as well and must be the same bytes.

A shard is read chunk by chunk, so that a check needs memory for one chunk of each array and a few rows of logits,
whatever the length of a sample. Only a sample that looks damaged is read as a whole. Statistics are those of all
states; of a lossy store they follow from codes and scales, so that only the self-check decodes states.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
import zarr
from numpy.typing import NDArray

from hscache.audit.findings import FINDINGS, Finding
from hscache.audit.record import VerifyRecord, look
from hscache.errors import IntegrityError
from hscache.health import Health, RowMeter, RowStats, find_fault, may_be_faulty, reduce_rows
from hscache.rows import count_supervised, supervised_positions
from hscache.store import lossy
from hscache.store.buffers import page_aligned
from hscache.store.head import TargetHead
from hscache.store.index import read_shard
from hscache.store.layout import (
    FINAL_STATE,
    HIDDEN_STATES,
    INPUT_IDS,
    LOGIT_IDS,
    LOGIT_LOGPROBS,
    LOSS_MASK,
    STATE_ARRAYS,
    ArraySpec,
    StorePaths,
    scales_name,
    shard_name,
)
from hscache.store.reader import as_torch, coarsest_codec, decoded, specs_of
from hscache.store.shard_reader import StoredArray, open_array

# Statistics are those of the states before a lossy codec; what decoding gives differs by its error.
_STATISTICS_RTOL = {"int8": 0.01, "int4": 0.1}
_STATISTICS_RTOL_LOSSLESS = 1e-3
# The self-check compares log-probabilities taken from the unrounded state with those of the stored bf16 one. Rounding
# moves them by a few hundredths at most on real models; another norm or layer moves them by whole nats. int8 moves
# them by a tenth at most; int4 by 0.2 on average, with single rows beyond 1, so that a shard's mean is judged instead.
_HEAD_ROWS_PER_SHARD = 32
_HEAD_LIMIT_NATS = {"raw": 0.25, "int8": 0.5, "int4": math.inf}
_HEAD_MEAN_LIMIT_NATS = 1.0
# Rows of each shard that are also read through zarr-python.
_ZARR_ROWS = 64
# Files are digested in pieces that stay in the processor's cache.
_PIECE_BYTES = 1 << 20


@dataclass
class StoreFacts:
    """What all shards are compared with.

    Attributes:
        root: Store directory.
        document: ``manifest.json``.
        full: Whether to read the arrays.
        plan: ``plan.parquet``, or None where it is damaged.
        head: The target's head in float32, or None where it is damaged or not needed.
        target_digest: Digest of ``target.json``, or None where the target is damaged.
        record: Shards that passed before, or None.
    """

    root: Path
    document: dict[str, Any]
    full: bool
    plan: pa.Table | None = None
    head: TargetHead | None = None
    target_digest: str | None = None
    record: VerifyRecord | None = None

    def __post_init__(self) -> None:
        self.specs: list[ArraySpec] = specs_of(self.document)
        self.taps: list[int] = self.document["manifest"]["states"]["taps"]
        self.codec: str = self.document["manifest"]["store"]["codec"]
        self.error_codec = coarsest_codec(self.document)
        self.vocab_size: int = self.document["target"]["shape"]["vocab_size"]

    def column_name(self, column: int) -> str:
        """Return what a column of a shard's statistics belongs to."""
        return f"tap {self.taps[column]}" if column < len(self.taps) else "final state"


@dataclass
class ShardResult:
    """What the check of a shard gave.

    Attributes:
        shard: Number of the shard.
        findings: In the order of discovery.
        samples: Samples checked.
        tokens: Their tokens.
        rejected: Samples recorded as rejected.
        kernel_path: Id of the kernel path that computed the samples; None without any.
        accepted_path: Id of the other path that the builder accepted.
        typical_rms: Magnitude per tap, from the record; None without samples.
        head_rows: Rows of the self-check.
        head_error_sum: Sum of their differences, nats.
        recorded: Whether it passed before and was not read again.
    """

    shard: int
    findings: list[Finding] = field(default_factory=list)
    samples: int = 0
    tokens: int = 0
    rejected: int = 0
    kernel_path: str | None = None
    accepted_path: str | None = None
    typical_rms: list[float] | None = None
    head_rows: int = 0
    head_error_sum: float = 0.0
    recorded: bool = False


def check_shard(store: StoreFacts, shard: int) -> ShardResult:
    """Check a committed shard; any number of threads may check different ones.

    Args:
        store: The store.
        shard: Number of the shard.
    """
    check = _ShardCheck(store, shard)
    check.run()
    return check.result


class _ShardCheck:
    def __init__(self, store: StoreFacts, shard: int) -> None:
        self._store, self._path, self._name = store, StorePaths(store.root).shard(shard), shard_name(shard)
        self.result = ShardResult(shard)

    def run(self) -> None:
        shard, store, result = self.result.shard, self._store, self.result
        try:
            body = read_shard(self._path, whole=True)
        except IntegrityError as error:
            self._find("shard-record", self._name, error.message)
            return
        if body["shard"] != shard or body["manifest_digest"] != store.document["digest"]:
            self._find("shard-foreign", self._name, f"says it is shard {body['shard']} of another manifest")
            return
        table = pa.table(body["samples"])
        self._table(table)
        record = store.record if store.full else None
        # before the files are read: whatever changes them meanwhile makes them differ from what is recorded
        seen = record and look(self._path, body, store.target_digest)
        passed = record.passed(shard, seen) if record and seen else None
        read = store.full and passed is None
        whole = self._files(body, read=read)
        good = table.filter(pc.equal(table["reason"], "")).to_pylist()
        result.samples, result.rejected = len(good), table.num_rows - len(good)
        result.tokens = sum(int(row["n_tokens"]) for row in good)
        made = body["provenance"]
        if good:  # else no sample ran through the target
            result.kernel_path = made["kernels"]["path_id"]
        result.accepted_path = made["accepted_path"]
        if good and self._columns(body["health"]):
            result.typical_rms = body["health"]["typical_rms"]
            self._codec_error(body["health"])
        if passed is not None:
            result.recorded, result.head_rows = True, passed["head_rows"]
            result.head_error_sum = passed["head_error_sum"]
        elif read and whole:
            self._contents(body, good)
            if record and seen and store.head is not None and not result.findings:
                record.add(shard, seen, result.head_rows, result.head_error_sum)

    def _find(self, code: str, where: str, detail: str, *, rebuild: bool = True) -> None:
        assert code in FINDINGS, code
        self.result.findings.append(Finding(code, where, detail, self.result.shard if rebuild else None))

    def _columns(self, health: dict[str, Any]) -> bool:
        """Return whether a shard's record has statistics for this store's taps and the final state."""
        counts, expected = {len(health[name]) for name in ("rms", "typical_rms", "max_abs")}, len(self._store.taps) + 1
        if counts == {expected}:
            return True
        self._find("statistics-record", self._name, f"of {sorted(counts)} columns, expected {expected}")
        return False

    def _table(self, table: pa.Table) -> None:
        plan = self._store.plan
        if plan is None:
            return
        planned = plan.filter(pc.equal(plan["shard"], self.result.shard)).to_pylist()
        got = [(r["sample_id"], r["corpus_row"], r["n_tokens"]) for r in table.to_pylist()]
        wanted = [(r["sample_id"], r["corpus_row"], r["n_tokens"]) for r in planned]
        if got != wanted:
            self._find("shard-samples", self._name, f"{len(got)} samples, {len(wanted)} planned")

    def _files(self, body: dict[str, Any], *, read: bool) -> bool:
        """Compare sizes, and if asked contents, of files with the record; return whether the arrays can be read."""
        whole, path = True, self._path
        for name, entry in body["files"].items():
            where = f"{self._name}/{name}"
            try:
                found = (path / name).stat().st_size
                digest = _file_digest(path / name) if read and found == entry["bytes"] else entry["xxh3_128"]
            except (FileNotFoundError, NotADirectoryError):
                self._find("file-missing", where, f"expected {entry['bytes']} bytes")
                whole = False
                continue
            except OSError as error:
                self._find("file-content", where, f"cannot be read: {error}")
                whole = False
                continue
            if found != entry["bytes"]:
                self._find("file-size", where, f"{found} bytes, expected {entry['bytes']}")
                whole = False
            elif digest != entry["xxh3_128"]:
                self._find("file-content", where, "differs from its digest")
                # altered metadata can make zarr read or raise anything, so the arrays it describes are not read
                whole = whole and not name.endswith("zarr.json")
        known = {path / name for name in (*body["files"], "zarr.json")}
        # an unrecorded folder is reported itself, without a shard, since the shard's own data are intact
        folders = {path, *(file.parent for file in known)}
        for extra in sorted(p for p in path.rglob("*") if p.parent in folders and p not in known | folders):
            where = extra.relative_to(self._store.root).as_posix()
            self._find("file-extra", where, "no record names it; remove it", rebuild=False)
        return whole

    def _codec_error(self, health: dict[str, Any]) -> None:
        codec = self._store.error_codec
        if codec == "raw":
            return
        if health.get("codec") is None:
            self._find("codec-error", self._name, "no record of it")
            return
        promise = lossy.WORST_COSINE[codec]
        for column, cosine in enumerate(health["codec"]["worst_cosine"]):
            if not cosine >= promise:
                name = self._store.column_name(column)
                detail = f"{name}: a token's cosine is {cosine:.5f}, {codec} promises {promise}"
                self._find("codec-error", self._name, detail, rebuild=False)

    def _contents(self, body: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        """Read every sample of a shard: digests, ids, masks, states, statistics, self-check."""
        store = self._store
        try:
            arrays = {spec.name: _Rows(open_array(self._path / spec.name, spec), spec) for spec in store.specs}
        except (IntegrityError, OSError) as error:
            self._find("array-unreadable", self._name, str(error))
            return
        health, head = Health(len(store.taps) + (FINAL_STATE in arrays)), _HeadRows()
        meter = RowMeter(store.document["target"]["shape"]["hidden_size"])
        picks = _spread(rows, _HEAD_ROWS_PER_SHARD)
        complete = True
        for i, row in enumerate(rows):
            where = f"{self._name}: {row['sample_id']}"
            try:
                mask = self._sample(where, row, arrays, meter, health)
                if i in picks and store.head is not None and mask is not None:
                    head.take(where, row, arrays, mask, picks[i])
            except (IntegrityError, OSError) as error:
                self._find("array-unreadable", where, str(error))
                complete = False
        if rows and complete:
            self._zarr(rows[self.result.shard % len(rows)], arrays)
        if store.head is not None:
            self._head(head, store.head)
        if complete and self.result.typical_rms is not None:
            self._statistics(body["health"], health.to_json())

    def _sample(
        self, where: str, row: dict[str, Any], arrays: dict[str, _Rows], meter: RowMeter, health: Health
    ) -> NDArray[np.uint8] | None:
        """Check a sample and count its states if they are sound; return its mask, or None if that has another count."""
        digest = xxhash.xxh3_128()
        kept: dict[str, list[NDArray[Any]]] = {INPUT_IDS: [], LOSS_MASK: []}
        measured: dict[str, list[tuple[NDArray[np.float32], NDArray[np.float32]]]] = {}
        for spec in self._store.specs:
            for at, piece in arrays[spec.name].pieces(row):
                digest.update(piece.reshape(-1).view(np.uint8).data)
                if spec.name in kept:
                    kept[spec.name].append(piece.copy())
                if spec.name in STATE_ARRAYS:
                    vectors = piece.reshape(len(piece), -1, piece.shape[-1])
                    if spec.scheme is None:
                        part = meter.measure(vectors)
                    else:
                        scales = arrays[scales_name(spec.name)].take(at, at + len(piece))
                        part = lossy.measure_codes(vectors, scales.reshape(*vectors.shape[:2], -1), spec.scheme)
                    measured.setdefault(spec.name, []).append(part)
        if digest.hexdigest() != row["digest"]:
            self._find("sample-digest", where, "bytes differ from the digest taken at capture")
        ids, mask = (np.concatenate(kept[name]) for name in (INPUT_IDS, LOSS_MASK))
        vocab = self._store.vocab_size
        if ids.min() < 0 or ids.max() >= vocab:
            self._find("sample-ids", where, f"ids from {ids.min()} to {ids.max()}, vocabulary of {vocab}")
        n = count_supervised(mask)
        if mask.max() > 1 or n != row["n_loss"]:
            self._find("sample-mask", where, f"{n} supervised tokens, {row['n_loss']} recorded")
        square, largest = (
            np.concatenate([np.concatenate([part[k] for part in parts]) for parts in measured.values()], axis=1)
            for k in (0, 1)
        )
        reason = detail = ""
        if may_be_faulty(square, largest, len(self._store.taps)):
            reason, detail = find_fault(self._all_stats(row, arrays), self._store.taps)
        if reason:
            self._find("sample-states", where, f"{reason}: {detail}")
        else:
            health.add_rows(square, largest)
        return mask if n == row["n_loss"] else None

    def _all_stats(self, row: dict[str, Any], arrays: dict[str, _Rows]) -> RowStats:
        start, stop = row["start"], row["start"] + row["n_tokens"]
        values = {spec.name: arrays[spec.name].take(start, stop) for spec in self._store.specs if spec.axis == "tokens"}
        values |= decoded(values, self._store.specs)
        states = as_torch(values[HIDDEN_STATES], HIDDEN_STATES)
        # a store without the final state is judged by its taps alone
        final = as_torch(values[FINAL_STATE], FINAL_STATE)[:, None] if FINAL_STATE in values else states[:, :0]
        return RowStats.join(*(reduce_rows(part) for part in (states, final) if part.shape[1]))

    def _zarr(self, row: dict[str, Any], arrays: dict[str, _Rows]) -> None:
        """Compare what zarr-python reads of a sample with what the store's own reader reads."""
        try:
            group = zarr.open_group(str(self._path), mode="r")
            for spec in self._store.specs:
                start, stop = _place(spec, row)
                stop = min(stop, start + _ZARR_ROWS)
                theirs = np.asarray(group[spec.name][start:stop])
                if theirs.tobytes() != arrays[spec.name].take(start, stop).tobytes():
                    detail = f"zarr-python reads other values in rows {start}:{stop}"
                    self._find("array-unreadable", f"{self._name}/{spec.name}", detail)
        except (ValueError, KeyError, OSError, TypeError, RuntimeError, IntegrityError) as error:
            self._find("array-unreadable", self._name, str(error))

    def _head(self, rows: _HeadRows, head: TargetHead) -> None:
        """Compare all picked rows of the shard with the head's log-probabilities, in one product."""
        import torch

        if not rows.where:
            return
        recomputed = torch.log_softmax(head.logits(as_torch(np.stack(rows.final), FINAL_STATE)), dim=-1)
        ids, stored = torch.from_numpy(np.stack(rows.ids)).long(), torch.from_numpy(np.stack(rows.logprobs)).float()
        known = ((ids >= 0) & (ids < recomputed.shape[-1])).all(-1)
        # weighted by probability: the tail of a top-64 is noise
        weight = stored.exp()
        ids.clamp_(0, recomputed.shape[-1] - 1)
        errors = ((recomputed.gather(-1, ids) - stored).abs() * weight).sum(-1) / weight.sum(-1)
        limit, codec = _HEAD_LIMIT_NATS[self._store.error_codec], self._store.error_codec
        found: list[float] = []
        for where in dict.fromkeys(rows.where):
            here = torch.tensor([other == where for other in rows.where])
            if not known[here].all():
                self._find("head-mismatch", where, "stored top-k ids outside the vocabulary")
                continue
            worst = float(errors[here].max())
            found += errors[here & errors.isfinite()].tolist()
            if not math.isfinite(worst) or worst > limit:
                detail = f"log-probabilities differ by {worst:.3f} nats, limit {limit}"
                self._find("head-mismatch", where, detail)
        self.result.head_rows, self.result.head_error_sum = len(found), math.fsum(found)
        mean = math.fsum(found) / max(len(found), 1)
        if codec == "int4" and mean > _HEAD_MEAN_LIMIT_NATS:
            detail = f"log-probabilities differ by {mean:.3f} nats on average, limit {_HEAD_MEAN_LIMIT_NATS}"
            self._find("head-mismatch", self._name, detail)

    def _statistics(self, recorded: dict[str, Any], found: dict[str, Any]) -> None:
        rtol = _STATISTICS_RTOL.get(self._store.codec, _STATISTICS_RTOL_LOSSLESS)
        for name in ("rms", "typical_rms", "max_abs"):
            # without a stored final state its statistics, the record's last column, cannot be recomputed
            if not np.allclose(recorded[name][: len(found[name])], found[name], rtol=rtol):
                self._find("statistics-record", self._name, f"{name}: {found[name]} now, {recorded[name]}")
                return


class _Rows:
    """Rows of one array, read chunk by chunk; the chunk read last is kept, since neighbouring samples share it."""

    def __init__(self, array: StoredArray, spec: ArraySpec) -> None:
        self._array, self.spec = array, spec
        self._room = page_aligned((min(array.chunk_rows, array.rows), *spec.inner), spec.dtype)
        self._held = -1

    def pieces(self, row: dict[str, Any]) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield the number of the first row and the rows, for each chunk that holds rows of a sample.

        Raises:
            IntegrityError: ``store-damaged``.
        """
        return self._pieces(*_place(self.spec, row))

    def take(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows in memory of their own."""
        none = np.empty((0, *self.spec.inner), self.spec.dtype)
        return np.concatenate([none, *(piece.copy() for _, piece in self._pieces(start, stop))])

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, NDArray[Any]]]:
        n, rows = self._array.chunk_rows, self._array.rows
        if start < stop and stop > rows:
            raise IntegrityError("store-damaged", f"{self.spec.name}: rows {start}:{stop} of {rows}")
        for chunk in range(start // n, -(-stop // n) if start < stop else 0):
            first, last = chunk * n, min((chunk + 1) * n, rows)
            if chunk != self._held:
                self._held = -1  # its memory is written to
                self._array.read(first, last, self._room[: last - first])
                self._held = chunk
            yield max(first, start), self._room[max(start - first, 0) : min(stop, last) - first]


@dataclass
class _HeadRows:
    """Rows of a shard for the self-check: sample, final state (bf16 bits), top-k ids and log-probabilities of each."""

    where: list[str] = field(default_factory=list)
    final: list[NDArray[np.uint16]] = field(default_factory=list)
    ids: list[NDArray[np.int32]] = field(default_factory=list)
    logprobs: list[NDArray[np.float16]] = field(default_factory=list)

    def take(
        self, where: str, row: dict[str, Any], arrays: dict[str, _Rows], mask: NDArray[np.uint8], count: int
    ) -> None:
        """Pick rows of a sample, spread over its supervised tokens."""
        before = supervised_positions(mask) - 1
        if FINAL_STATE not in arrays or LOGIT_IDS not in arrays or not len(before):
            return
        for pick in np.unique(np.linspace(0, len(before) - 1, count).astype(int)).tolist():
            at, logit = row["start"] + int(before[pick]), row["loss_start"] + pick
            self.where.append(where)
            values = {name: arrays[name].take(at, at + 1) for name in arrays if name.startswith(FINAL_STATE)}
            values |= decoded(values, [array.spec for array in arrays.values()])
            self.final.append(values[FINAL_STATE][0])
            self.ids.append(arrays[LOGIT_IDS].take(logit, logit + 1)[0])
            self.logprobs.append(arrays[LOGIT_LOGPROBS].take(logit, logit + 1)[0])


def _place(spec: ArraySpec, row: dict[str, Any]) -> tuple[int, int]:
    """Return a sample's first row in an array, and the row after its last."""
    start, n = (row["start"], row["n_tokens"]) if spec.axis == "tokens" else (row["loss_start"], row["n_loss"])
    return start, start + n


def _spread(rows: list[dict[str, Any]], count: int) -> dict[int, int]:
    """Return sample number -> rows to self-check, spread over a shard's samples."""
    picks = np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(int).tolist()
    return dict.fromkeys(picks, -(-count // max(len(rows), 1)))


def _file_digest(path: Path) -> str:
    digest, room = xxhash.xxh3_128(), memoryview(bytearray(_PIECE_BYTES))
    with open(path, "rb", buffering=0) as file:
        while n := file.readinto(room):
            digest.update(room[:n])
    return digest.hexdigest()
