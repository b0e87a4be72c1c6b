"""Check that a store is complete and correct, and list exactly what is not.

``quick`` reads records and sizes: every planned shard exists, belongs to this manifest, and has its files. ``full``
also reads every byte: file and sample digests, ids, masks, the health battery of :mod:`hscache.health`, statistics
against the record, and a self-check that ``lm_head(final_state)`` gives the stored top-k. Nothing is repaired here.
Arrays are read through zarr-python, not through the code that wrote them.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
import zarr
from numpy.typing import NDArray

from hscache.console import Progress
from hscache.errors import HscacheError, IntegrityError
from hscache.health import Health, RowStats, find_fault, reduce_rows
from hscache.rows import count_supervised, supervised_positions
from hscache.store import lossy
from hscache.store.head import TargetHead, check_target, load_head
from hscache.store.index import (
    build_index,
    committed_shards,
    load_index,
    read_manifest,
    read_plan,
    read_shard,
    table_digest,
)
from hscache.store.layout import (
    FINAL_STATE,
    HIDDEN_STATES,
    INPUT_IDS,
    LOGIT_IDS,
    LOGIT_LOGPROBS,
    LOSS_MASK,
    StorePaths,
    shard_name,
)
from hscache.store.reader import as_torch, coarsest_codec, decoded, specs_of
from hscache.store.scan import read_samples

if TYPE_CHECKING:
    import torch

FINDINGS: dict[str, str] = {
    "plan-damaged": "plan.parquet is unreadable or not the plan of the manifest",
    "shard-missing": "a planned shard does not exist",
    "shard-extra": "a shard is not in the plan",
    "shard-record": "a shard's zarr.json is unreadable or differs from its digest",
    "shard-foreign": "a shard was built for another manifest",
    "shard-samples": "a shard's sample table differs from the plan",
    "file-missing": "a file of a shard does not exist",
    "file-size": "a file of a shard has another size than recorded",
    "file-extra": "no record names a file or folder",
    "file-content": "a file of a shard differs from its digest",
    "array-unreadable": "zarr cannot read an array",
    "sample-digest": "a sample's bytes differ from its digest",
    "sample-ids": "a token id is outside the vocabulary",
    "sample-mask": "a loss mask has values other than 0 and 1, or another count than recorded",
    "sample-states": "a sample fails the health battery",
    "statistics-record": "a shard's statistics differ from its record",
    "statistics-outlier": "a shard's states are of another magnitude than the store's",
    "index-stale": "index.parquet is missing, unreadable or differs from the shards",
    "kernels-mixed": "shards were computed by different kernel paths without --accept-path",
    "target-damaged": "a file of target/ is missing or altered",
    "head-mismatch": "lm_head(final state) does not give the stored top-k",
    "codec-error": "a shard's record lacks the error of its lossy codec, or it is beyond what the codec promises",
    "recompute-differs": "the target gives other states for a sample than are stored (--recompute)",
    "kernels-differ": "two kernel paths give different states (--kernels)",
    "stores-differ": "two stores hold different states for the same samples (--against)",
}
"""What ``verify`` can find: code -> meaning."""

# A shard's typical magnitude against the median shard's, per tap; lengths and topics move it by a few percent.
_OUTLIER_FACTOR = 2.0
_TYPICAL_TOKENS = 16
# Statistics are those of the states before a lossy codec; what decoding gives differs by its error.
_STATISTICS_RTOL = {"int8": 0.01, "int4": 0.1}
_STATISTICS_RTOL_LOSSLESS = 1e-3
# The self-check compares log-probabilities taken from the unrounded state with those of the stored bf16 one. Rounding
# moves them by a few hundredths at most on real models; another norm or layer moves them by whole nats. int8 moves
# them by a tenth at most; int4 by 0.2 on average, with single rows beyond 1, so that a shard's mean is judged instead.
_HEAD_ROWS_PER_SHARD = 32
_HEAD_LIMIT_NATS = {"raw": 0.25, "int8": 0.5, "int4": math.inf}
_HEAD_MEAN_LIMIT_NATS = 1.0
# At most this many missing shards are named one by one.
_MOST_MISSING = 10_000


@dataclass(frozen=True)
class Finding:
    """One fault of a store.

    Attributes:
        code: Key of :data:`FINDINGS`.
        where: Shard, file or sample.
        detail: What was found and what was expected.
        shard: Shard to rebuild, or None when the fault is not in a shard.
    """

    code: str
    where: str
    detail: str
    shard: int | None = None


@dataclass
class VerifyReport:
    """What was checked and what was found.

    Attributes:
        store: Store directory.
        level: ``quick`` or ``full``.
        findings: In the order of discovery; empty for a good store.
        shards: Planned shards.
        samples: Samples checked.
        tokens: Their tokens.
        rejected: Samples recorded as rejected.
        head_rows: Rows of the self-check.
        head_error_nats: Mean absolute difference of log-probabilities in the self-check, or None where it cannot run.
    """

    store: str
    level: str
    findings: list[Finding] = field(default_factory=list)
    shards: int = 0
    samples: int = 0
    tokens: int = 0
    rejected: int = 0
    head_rows: int = 0
    head_error_nats: float | None = None

    @property
    def ok(self) -> bool:
        """Whether there are no findings."""
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON."""
        return {"ok": self.ok, **asdict(self)}


def verify(root: Path, level: Literal["quick", "full"] = "full") -> VerifyReport:
    """Check a store.

    Args:
        root: Store directory.
        level: ``quick`` or ``full``.

    Raises:
        HscacheError: When there is no store, or its ``manifest.json`` is damaged, so that nothing can be checked.
    """
    document = read_manifest(root)
    return _Verifier(root, document, full=level == "full").run()


class _Verifier:
    def __init__(self, root: Path, document: dict[str, Any], *, full: bool) -> None:
        self._root, self._paths, self._document, self._full = root, StorePaths(root), document, full
        self._specs = specs_of(document)
        self._taps: list[int] = document["manifest"]["states"]["taps"]
        self._report = VerifyReport(str(root), "full" if full else "quick", shards=document["plan"]["shards"])
        self._typical: dict[int, list[float]] = {}
        self._mean_tokens: dict[int, float] = {}
        self._paths_seen: dict[str, list[int]] = {}
        self._paths_accepted: set[str] = set()
        self._codec: str = document["manifest"]["store"]["codec"]
        self._error_codec = coarsest_codec(document)
        self._head: TargetHead | None = None
        self._head_errors: list[float] = []

    def run(self) -> VerifyReport:
        plan = self._plan()
        self._target()
        present = set(committed_shards(self._root))
        planned = range(self._report.shards)
        total = self._document["plan"]["tokens"]
        progress = Progress("verify", total, "tok") if self._full else None
        missing = (shard for shard in planned if shard not in present)
        for shard in islice(missing, _MOST_MISSING):
            self._find("shard-missing", shard_name(shard), "planned, not there", shard)
        more = len(planned) - sum(shard in planned for shard in present) - _MOST_MISSING
        if more > 0:
            self._find("shard-missing", "shards/", f"{more:,} more are planned, not there")
        for shard in sorted(shard for shard in present if shard in planned):
            tokens = self._shard(shard, plan)
            if progress is not None:
                progress.advance(tokens)
        if progress is not None:
            progress.close()
        for shard in sorted(shard for shard in present if shard not in planned):
            self._find("shard-extra", shard_name(shard), f"the plan has {len(planned)} shards", shard)
        self._strays(present, planned)
        self._kernels()
        self._magnitudes()
        self._index()
        if self._head_errors:
            self._report.head_error_nats = float(np.mean(self._head_errors))
            self._report.head_rows = len(self._head_errors)
        return self._report

    def _find(self, code: str, where: str, detail: str, shard: int | None = None) -> None:
        assert code in FINDINGS, code
        self._report.findings.append(Finding(code, where, detail, shard))

    def _plan(self) -> pa.Table | None:
        try:
            plan = read_plan(self._root)
        except IntegrityError as error:
            self._find("plan-damaged", "plan.parquet", error.message)
            return None
        if table_digest(plan) != self._document["plan"]["digest"]:
            self._find("plan-damaged", "plan.parquet", "not the plan of manifest.json")
            return None
        shards = 1 + max(plan["shard"].to_pylist(), default=-1)
        if shards != self._report.shards:
            self._find("plan-damaged", "plan.parquet", f"{shards} shards, manifest.json has {self._report.shards}")
            return None
        return plan

    def _target(self) -> None:
        try:
            facts = check_target(self._paths.target, full=self._full)
            known = {*facts["files"], "target.json"}
            self._extra([p for p in self._paths.target.iterdir() if p.name not in known])
            if self._full:
                self._head = load_head(self._paths.target)
        except IntegrityError as error:
            self._find("target-damaged", "target/", error.message)

    def _strays(self, present: set[int], planned: range) -> None:
        """Report files in the store that are not part of it; names that begin with a dot are left to other tools."""
        paths, root = self._paths, self._root
        parts = {paths.manifest, paths.plan, paths.index, paths.shards, paths.target, paths.staging}
        self._extra([p for p in root.iterdir() if p not in parts and not p.name.startswith(".")])
        known = {shard_name(shard) for shard in present}
        others = [p for p in paths.shards.glob("*") if p.name not in known]
        # a planned shard without its record counts as missing; any other folder without one is not a shard
        numbers = {p: int(p.stem) for p in others if p.stem.isdecimal() and len(p.stem) < 18}
        self._extra([p for p in others if numbers.get(p, -1) not in planned or p.name != shard_name(numbers[p])])

    def _extra(self, found: list[Path]) -> None:
        for path in sorted(found):
            self._find("file-extra", path.relative_to(self._root).as_posix(), "no record names it; remove it")

    def _shard(self, shard: int, plan: pa.Table | None) -> int:
        """Check one shard; return its tokens."""
        path, name = self._paths.shard(shard), shard_name(shard)
        try:
            body = read_shard(path, whole=True)
        except IntegrityError as error:
            self._find("shard-record", name, error.message, shard)
            return 0
        if body["shard"] != shard or body["manifest_digest"] != self._document["digest"]:
            self._find("shard-foreign", name, f"says it is shard {body['shard']} of another manifest", shard)
            return 0
        table = pa.table(body["samples"])
        self._table(shard, table, plan)
        whole = self._files(shard, path, body)
        good = table.filter(pc.equal(table["reason"], "")).to_pylist()
        self._report.samples += len(good)
        self._report.rejected += table.num_rows - len(good)
        tokens = sum(int(row["n_tokens"]) for row in good)
        self._report.tokens += tokens
        made = body["provenance"]
        if good:  # else no sample ran through the target
            self._paths_seen.setdefault(made["kernels"]["path_id"], []).append(shard)
        self._paths_accepted.add(made["accepted_path"])
        if good and self._columns(shard, body["health"]):
            self._typical[shard] = body["health"]["typical_rms"]
            self._mean_tokens[shard] = tokens / len(good)
            self._codec_error(shard, body["health"])
        if self._full and whole:
            self._contents(shard, path, body, good)
        return tokens

    def _columns(self, shard: int, health: dict[str, Any]) -> bool:
        """Return whether a shard's record has statistics for this store's taps and the final state."""
        counts = {len(health[name]) for name in ("rms", "typical_rms", "max_abs")}
        if counts == {len(self._taps) + 1}:
            return True
        detail = f"of {sorted(counts)} columns, expected {len(self._taps) + 1}"
        self._find("statistics-record", shard_name(shard), detail, shard)
        return False

    def _table(self, shard: int, table: pa.Table, plan: pa.Table | None) -> None:
        if plan is None:
            return
        planned = plan.filter(pc.equal(plan["shard"], shard)).to_pylist()
        got = [(r["sample_id"], r["corpus_row"], r["n_tokens"]) for r in table.to_pylist()]
        wanted = [(r["sample_id"], r["corpus_row"], r["n_tokens"]) for r in planned]
        if got != wanted:
            self._find("shard-samples", shard_name(shard), f"{len(got)} samples, {len(wanted)} planned", shard)

    def _files(self, shard: int, path: Path, body: dict[str, Any]) -> bool:
        """Compare files with the record; return whether the arrays can be read."""
        whole = True
        for name, entry in body["files"].items():
            where = f"{shard_name(shard)}/{name}"
            try:
                found = (path / name).stat().st_size
                digest = _file_digest(path / name) if self._full and found == entry["bytes"] else entry["xxh3_128"]
            except (FileNotFoundError, NotADirectoryError):
                self._find("file-missing", where, f"expected {entry['bytes']} bytes", shard)
                whole = False
                continue
            except OSError as error:
                self._find("file-content", where, f"cannot be read: {error}", shard)
                whole = False
                continue
            if found != entry["bytes"]:
                self._find("file-size", where, f"{found} bytes, expected {entry['bytes']}", shard)
                whole = False
            elif digest != entry["xxh3_128"]:
                self._find("file-content", where, "differs from its digest", shard)
                # altered metadata can make zarr read or raise anything, so the arrays it describes are not read
                whole = whole and not name.endswith("zarr.json")
        known = {path / name for name in (*body["files"], "zarr.json")}
        # an unrecorded folder is reported itself, without a shard, since the shard's own data are intact
        folders = {path, *(file.parent for file in known)}
        self._extra([p for p in path.rglob("*") if p.parent in folders and p not in known | folders])
        return whole

    def _contents(self, shard: int, path: Path, body: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        """Read every sample of a shard: digests, ids, masks, states, statistics, self-check."""
        try:
            group = zarr.open_group(str(path), mode="r")
            arrays = {spec.name: group[spec.name] for spec in self._specs}
        except (ValueError, KeyError, OSError, TypeError) as error:
            self._find("array-unreadable", shard_name(shard), str(error), shard)
            return
        health = Health(len(self._taps) + (FINAL_STATE in arrays))
        picks, before = _spread(rows, _HEAD_ROWS_PER_SHARD), len(self._head_errors)
        complete = True
        for i, (row, values) in enumerate(read_samples(arrays, self._specs, rows)):
            where = f"{shard_name(shard)}: {row['sample_id']}"
            if isinstance(values, Exception):
                self._find("array-unreadable", where, str(values), shard)
                complete = False
                continue
            self._digest(where, shard, row, values)
            values |= decoded(values, self._specs)
            stats = self._sample(where, shard, row, values)
            if stats is not None:
                health.add(stats)
            if i in picks and self._head is not None:
                self._head_check(where, shard, values, picks[i])
        mean = float(np.mean(self._head_errors[before:] or [0.0]))
        if self._error_codec == "int4" and mean > _HEAD_MEAN_LIMIT_NATS:
            detail = f"log-probabilities differ by {mean:.3f} nats on average, limit {_HEAD_MEAN_LIMIT_NATS}"
            self._find("head-mismatch", shard_name(shard), detail, shard)
        if complete and shard in self._typical:
            self._statistics(shard, body["health"], health.to_json())

    def _digest(self, where: str, shard: int, row: dict[str, Any], values: dict[str, NDArray[Any]]) -> None:
        digest = xxhash.xxh3_128()
        for spec in self._specs:
            # not a memoryview cast, which fails on an array without rows, as a wrong record may describe
            digest.update(np.ascontiguousarray(values[spec.name]).reshape(-1).view(np.uint8).data)
        if digest.hexdigest() != row["digest"]:
            self._find("sample-digest", where, "bytes differ from the digest taken at capture", shard)

    def _sample(self, where: str, shard: int, row: dict[str, Any], values: dict[str, NDArray[Any]]) -> RowStats | None:
        """Check ids, mask and states (decoded) of a sample; return its statistics if the states are sound."""
        ids, mask = values[INPUT_IDS], values[LOSS_MASK]
        vocab = self._document["target"]["shape"]["vocab_size"]
        if ids.min() < 0 or ids.max() >= vocab:
            self._find("sample-ids", where, f"ids from {ids.min()} to {ids.max()}, vocabulary of {vocab}", shard)
        n = count_supervised(mask)
        if mask.max() > 1 or n != row["n_loss"]:
            self._find("sample-mask", where, f"{n} supervised tokens, {row['n_loss']} recorded", shard)
        stats = _stats(values)
        reason, detail = find_fault(stats, self._taps)
        if reason:
            self._find("sample-states", where, f"{reason}: {detail}", shard)
            return None
        return stats

    def _head_check(self, where: str, shard: int, values: dict[str, NDArray[Any]], count: int) -> None:
        if self._head is None or FINAL_STATE not in values or LOGIT_IDS not in values:
            return
        import torch

        before = supervised_positions(values[LOSS_MASK]) - 1
        if not len(before) or len(before) != len(values[LOGIT_IDS]):
            return  # the wrong mask is reported already
        picks = np.unique(np.linspace(0, len(before) - 1, count).astype(int))
        final: torch.Tensor = as_torch(values[FINAL_STATE][before[picks]], FINAL_STATE)
        recomputed = torch.log_softmax(self._head.logits(final), dim=-1)
        ids = torch.from_numpy(values[LOGIT_IDS][picks]).long()
        if int(ids.min()) < 0 or int(ids.max()) >= recomputed.shape[-1]:
            self._find("head-mismatch", where, "stored top-k ids outside the vocabulary", shard)
            return
        stored = torch.from_numpy(values[LOGIT_LOGPROBS][picks].astype(np.float32))
        # weighted by probability: the tail of a top-64 is noise
        weight = stored.exp()
        error = ((recomputed.gather(-1, ids) - stored).abs() * weight).sum(-1) / weight.sum(-1)
        worst = float(error.max())
        self._head_errors += error[error.isfinite()].tolist()
        limit = _HEAD_LIMIT_NATS[self._error_codec]
        if not math.isfinite(worst) or worst > limit:
            detail = f"log-probabilities differ by {worst:.3f} nats, limit {limit}"
            self._find("head-mismatch", where, detail, shard)

    def _codec_error(self, shard: int, health: dict[str, Any]) -> None:
        if self._error_codec == "raw":
            return
        if health.get("codec") is None:
            self._find("codec-error", shard_name(shard), "no record of it", shard)
            return
        promise = lossy.WORST_COSINE[self._error_codec]
        for column, cosine in enumerate(health["codec"]["worst_cosine"]):
            if not cosine >= promise:
                name = f"tap {self._taps[column]}" if column < len(self._taps) else "final state"
                detail = f"{name}: a token's cosine is {cosine:.5f}, {self._error_codec} promises {promise}"
                self._find("codec-error", shard_name(shard), detail)

    def _statistics(self, shard: int, recorded: dict[str, Any], found: dict[str, Any]) -> None:
        for name in ("rms", "typical_rms", "max_abs"):
            # without a stored final state its statistics, the record's last column, cannot be recomputed
            rtol = _STATISTICS_RTOL.get(self._codec, _STATISTICS_RTOL_LOSSLESS)
            if not np.allclose(recorded[name][: len(found[name])], found[name], rtol=rtol):
                self._find(
                    "statistics-record", shard_name(shard), f"{name}: {found[name]} now, {recorded[name]}", shard
                )
                return

    def _kernels(self) -> None:
        others = {path: shards for path, shards in self._paths_seen.items() if path not in self._paths_accepted}
        if len(others) > 1:
            most, *rest = sorted(others, key=lambda path: (-len(others[path]), others[path]))
            for shard, path in sorted((shard, rare) for rare in rest for shard in others[rare]):
                self._find("kernels-mixed", shard_name(shard), f"kernel path {path}, most shards ran {most}", shard)

    def _magnitudes(self) -> None:
        # the first token's state is up to a thousand times as large as the others': it dominates a mean of few tokens
        shards = sorted(shard for shard in self._typical if self._mean_tokens[shard] >= _TYPICAL_TOKENS)
        if len(shards) < 2:
            return
        typical = np.array([self._typical[shard] for shard in shards])
        with np.errstate(all="ignore"):  # a record may hold any numbers; the comparison reports them
            ratio = typical / np.median(typical, axis=0)
        for i, column in np.argwhere((ratio > _OUTLIER_FACTOR) | (ratio < 1 / _OUTLIER_FACTOR)):
            name = f"tap {self._taps[column]}" if column < len(self._taps) else "final state"
            detail = f"{name}: {ratio[i, column]:.2f} times the store's median magnitude"
            self._find("statistics-outlier", shard_name(shards[i]), detail, shards[i])

    def _index(self) -> None:
        if len(committed_shards(self._root)) < self._report.shards:
            return  # unfinished: there is no index yet
        if not self._paths.index.exists():
            self._find("index-stale", "index.parquet", "missing")
            return
        try:
            index = load_index(self._root)
        except IntegrityError as error:
            self._find("index-stale", "index.parquet", error.message)
            return
        try:
            fresh = build_index(self._root)
        except HscacheError:
            return  # found above already
        if not index.equals(fresh):
            self._find("index-stale", "index.parquet", "differs from the shards' own tables")


def _stats(values: dict[str, NDArray[Any]]) -> RowStats:
    states = as_torch(values[HIDDEN_STATES], HIDDEN_STATES)
    # a store without the final state is judged by its taps alone
    final = as_torch(values[FINAL_STATE], FINAL_STATE)[:, None] if FINAL_STATE in values else states[:, :0]
    return RowStats.join(*(reduce_rows(part) for part in (states, final) if part.shape[1]))


def _spread(rows: list[dict[str, Any]], count: int) -> dict[int, int]:
    """Return sample number -> rows to self-check, spread over a shard's samples."""
    picks = np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(int).tolist()
    return dict.fromkeys(picks, -(-count // max(len(rows), 1)))


def _file_digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()
