"""Check that a store is complete and correct, and list exactly what is not.

``quick`` reads records and sizes: every planned shard exists, belongs to this manifest, and has its files. ``full``
also reads every byte: file and sample digests, ids, masks, the health battery of :mod:`hscache.health`, statistics
against the record, and a self-check that ``lm_head(final_state)`` gives the stored top-k. Nothing is repaired here.
Shards are checked by several threads (:mod:`hscache.audit.shard`); the report is the same for any number of them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hscache.audit.findings import FINDINGS, Finding, VerifyReport
from hscache.audit.record import VerifyRecord
from hscache.audit.shard import ShardResult, StoreFacts, check_shard
from hscache.console import Progress
from hscache.errors import HscacheError, InputError, IntegrityError
from hscache.store.head import check_target, load_head
from hscache.store.index import build_index, committed_shards, load_index, read_manifest, read_plan, table_digest
from hscache.store.layout import StorePaths, json_digest, shard_name

# A shard's typical magnitude against the median shard's, per tap; lengths and topics move it by a few percent.
_OUTLIER_FACTOR = 2.0
_TYPICAL_TOKENS = 16
# At most this many missing shards are named one by one.
_MOST_MISSING = 10_000
# More threads than this wait for the disk and for each other on most machines.
_MOST_JOBS = 8


def default_jobs() -> int:
    """Return how many shards are checked at a time unless the user says: one for each core, at most 8."""
    return min(len(os.sched_getaffinity(0)), _MOST_JOBS)


def verify(
    root: Path,
    level: Literal["quick", "full"] = "full",
    *,
    jobs: int | None = None,
    shards: slice | None = None,
    record: Path | None = None,
    again: bool = False,
) -> VerifyReport:
    """Check a store, or some of its shards.

    Args:
        root: Store directory.
        level: ``quick`` or ``full``.
        jobs: Shards that are read at a time, each by one thread; None for :func:`default_jobs`. Memory grows with it
            by a chunk of each array, some 10 MB.
        shards: Numbers of the shards to check; None for the whole store. With numbers, what concerns the store as a
            whole is left out: shards compared with each other, files that no record names, ``index.parquet``.
        record: File that keeps which shards passed a full check (:mod:`hscache.audit.record`). The bytes of those that
            passed are not read again as long as no file of theirs changes in size, times or inode.
        again: Read all bytes again and start the record anew.

    Raises:
        InputError: ``shard-unknown``: the store's plan has none of these shards.
        ConflictError: ``record-other``: the record is not one of this store.
        HscacheError: When there is no store, or its ``manifest.json`` is damaged, so that nothing can be checked.
    """
    document = read_manifest(root)
    part = None if shards is None else planned_range(root, document, shards)
    store = StoreFacts(root, document, level == "full")
    with VerifyRecord(record, document["digest"], again=again) if record else nullcontext() as store.record:
        return _Verifier(store, jobs or default_jobs(), part).run()


def planned_range(root: Path, document: dict[str, Any], shards: slice) -> range:
    """Return the planned shards that a slice names.

    Raises:
        InputError: ``shard-unknown``: there are none.
    """
    planned = range(document["plan"]["shards"])
    if not planned[shards]:
        what = f"{root}: got shard {shards_text(shards)}, expected some of 0 to {len(planned) - 1}"
        raise InputError("shard-unknown", what, hint="--shards 0:10 takes the first ten")
    return planned[shards]


def shards_text(shards: slice | range) -> str:
    """Return a number or range of shards as ``--shards`` takes it."""
    start, stop = ("" if end is None else str(end) for end in (shards.start, shards.stop))
    return start if shards.start is not None and shards.stop == shards.start + 1 else f"{start}:{stop}"


class _Verifier:
    def __init__(self, store: StoreFacts, jobs: int, part: range | None) -> None:
        self._store, self._jobs, self._part, self._paths = store, jobs, part, StorePaths(store.root)
        level = "full" if store.full else "quick"
        self._report = VerifyReport(str(store.root), level, shards=store.document["plan"]["shards"])
        self._report.part = None if part is None else (part.start, part.stop)
        self._results: list[ShardResult] = []

    def run(self) -> VerifyReport:
        store, report = self._store, self._report
        store.plan = self._plan()
        self._target()
        present = set(committed_shards(store.root))
        planned = range(report.shards)
        wanted = planned if self._part is None else self._part
        self._missing(wanted, present)
        self._shards(sorted(shard for shard in present if shard in wanted))
        if self._part is not None:
            return report
        for shard in sorted(shard for shard in present if shard not in planned):
            self._find("shard-extra", shard_name(shard), f"the plan has {len(planned)} shards", shard)
        self._strays(present, planned)
        self._kernels()
        self._magnitudes()
        self._index()
        return report

    def _find(self, code: str, where: str, detail: str, shard: int | None = None) -> None:
        assert code in FINDINGS, code
        self._report.findings.append(Finding(code, where, detail, shard))

    def _plan(self) -> pa.Table | None:
        try:
            plan = read_plan(self._store.root)
        except IntegrityError as error:
            self._find("plan-damaged", "plan.parquet", error.message)
            return None
        if table_digest(plan) != self._store.document["plan"]["digest"]:
            self._find("plan-damaged", "plan.parquet", "not the plan of manifest.json")
            return None
        shards = 1 + max(plan["shard"].to_pylist(), default=-1)
        if shards != self._report.shards:
            self._find("plan-damaged", "plan.parquet", f"{shards} shards, manifest.json has {self._report.shards}")
            return None
        return plan

    def _target(self) -> None:
        try:
            facts = check_target(self._paths.target, full=self._store.full)
            self._store.target_digest = json_digest(facts)
            known = {*facts["files"], "target.json"}
            self._extra([p for p in self._paths.target.iterdir() if p.name not in known])
            if self._store.full:
                head = load_head(self._paths.target)
                # converted here, once: a large head takes seconds
                self._store.head = replace(head, lm_head=head.lm_head.float())
        except IntegrityError as error:
            self._find("target-damaged", "target/", error.message)

    def _missing(self, planned: range, present: set[int]) -> None:
        missing = (shard for shard in planned if shard not in present)
        for shard in islice(missing, _MOST_MISSING):
            self._find("shard-missing", shard_name(shard), "planned, not there", shard)
        more = len(planned) - sum(shard in planned for shard in present) - _MOST_MISSING
        if more > 0:
            self._find("shard-missing", "shards/", f"{more:,} more are planned, not there")

    def _shards(self, shards: list[int]) -> None:
        """Check shards; their findings come in the order of their numbers, whichever is checked first."""
        store, report, errors = self._store, self._report, list[float]()
        progress = Progress("verify", self._tokens(), "tok") if store.full else None
        for result in _in_order(store, shards, self._jobs):
            self._results.append(result)
            report.findings += result.findings
            report.samples += result.samples
            report.tokens += result.tokens
            report.rejected += result.rejected
            report.recorded += result.recorded
            report.head_rows += result.head_rows
            errors.append(result.head_error_sum)
            if progress is not None:
                progress.advance(result.tokens)
        if progress is not None:
            progress.close()
        if report.head_rows:
            report.head_error_nats = math.fsum(errors) / report.head_rows

    def _tokens(self) -> int:
        """Return the tokens that are planned for the shards to check."""
        plan, part = self._store.plan, self._part
        if plan is None or part is None:
            return int(self._store.document["plan"]["tokens"])
        here = pc.and_(pc.greater_equal(plan["shard"], part.start), pc.less(plan["shard"], part.stop))
        return int(pc.sum(plan["n_tokens"].filter(here)).as_py() or 0)

    def _strays(self, present: set[int], planned: range) -> None:
        """Report files in the store that are not part of it; names that begin with a dot are left to other tools."""
        paths = self._paths
        parts = {paths.manifest, paths.plan, paths.index, paths.shards, paths.target, paths.staging}
        self._extra([p for p in self._store.root.iterdir() if p not in parts and not p.name.startswith(".")])
        known = {shard_name(shard) for shard in present}
        others = [p for p in paths.shards.glob("*") if p.name not in known]
        # a planned shard without its record counts as missing; any other folder without one is not a shard
        numbers = {p: int(p.stem) for p in others if p.stem.isdecimal() and len(p.stem) < 18}
        self._extra([p for p in others if numbers.get(p, -1) not in planned or p.name != shard_name(numbers[p])])

    def _extra(self, found: Iterable[Path]) -> None:
        for path in sorted(found):
            self._find("file-extra", path.relative_to(self._store.root).as_posix(), "no record names it; remove it")

    def _kernels(self) -> None:
        accepted, seen = {result.accepted_path for result in self._results}, dict[str, list[int]]()
        for result in self._results:
            if result.kernel_path is not None and result.kernel_path not in accepted:
                seen.setdefault(result.kernel_path, []).append(result.shard)
        if len(seen) > 1:
            most, *rest = sorted(seen, key=lambda path: (-len(seen[path]), seen[path]))
            for shard, path in sorted((shard, rare) for rare in rest for shard in seen[rare]):
                self._find("kernels-mixed", shard_name(shard), f"kernel path {path}, most shards ran {most}", shard)

    def _magnitudes(self) -> None:
        # the first token's state is up to a thousand times as large as the others': it dominates a mean of few tokens
        shards = [r for r in self._results if r.typical_rms and r.tokens / r.samples >= _TYPICAL_TOKENS]
        if len(shards) < 2:
            return
        typical = np.array([result.typical_rms for result in shards])
        with np.errstate(all="ignore"):  # a record may hold any numbers; the comparison reports them
            ratio = typical / np.median(typical, axis=0)
        for i, column in np.argwhere((ratio > _OUTLIER_FACTOR) | (ratio < 1 / _OUTLIER_FACTOR)):
            name = self._store.column_name(int(column))
            detail = f"{name}: {ratio[i, column]:.2f} times the store's median magnitude"
            self._find("statistics-outlier", shard_name(shards[i].shard), detail, shards[i].shard)

    def _index(self) -> None:
        root = self._store.root
        if len(committed_shards(root)) < self._report.shards:
            return  # unfinished: there is no index yet
        if not self._paths.index.exists():
            self._find("index-stale", "index.parquet", "missing")
            return
        try:
            index = load_index(root)
        except IntegrityError as error:
            self._find("index-stale", "index.parquet", error.message)
            return
        try:
            fresh = build_index(root)
        except HscacheError:
            return  # found above already
        if not index.equals(fresh):
            self._find("index-stale", "index.parquet", "differs from the shards' own tables")


def _in_order(store: StoreFacts, shards: list[int], jobs: int) -> Iterator[ShardResult]:
    """Yield the results of shards in their order, checked by so many threads."""
    check = partial(check_shard, store)
    # records alone keep Python itself busy, which runs one thread at a time
    jobs = min(jobs, len(shards)) if store.full else 1
    with _one_thread_per_product() if store.full else nullcontext():
        if jobs <= 1:
            yield from map(check, shards)
            return
        pool = ThreadPoolExecutor(jobs, "hscache-verify")
        try:
            yield from pool.map(check, shards)
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def _one_thread_per_product() -> Iterator[None]:
    """Let torch use one thread per product: jobs share the cores, and sums do not depend on how many there are."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
