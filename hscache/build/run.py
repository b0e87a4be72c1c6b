"""The main job: corpus and manifest in, a verified store out; it can be resumed wherever it stopped.

Read from top to bottom: :func:`build` stages the corpus, claims the store, and makes the shards that are not committed
yet (:class:`hscache.build.shard_builder.ShardLoop`). This thread runs the target; the writer thread checks, packs and
writes its states.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hscache.build.claim import claim, now, refuse_foreign, store_document
from hscache.build.plan import Plan, plan_rows
from hscache.build.shard_builder import ShardBuilder, ShardLoop
from hscache.build.space import bytes_needed, require_space
from hscache.build.spool import Spool, SpoolWriter
from hscache.console import check_stop, say, stop_on_signal
from hscache.corpus.origin import check_origin
from hscache.corpus.readers import read_corpus
from hscache.device import pick_device, pick_dtype
from hscache.errors import ConflictError
from hscache.manifest import BuildManifest, ResolvedManifest
from hscache.model.facts import file_digests, resolve_manifest, tokenizer_files
from hscache.rows import Reject, Sample
from hscache.store import lossy
from hscache.store.durable import Staging, disk_errors
from hscache.store.head import write_target
from hscache.store.index import committed_shards, finalize, missing_shards, read_manifest, read_shard
from hscache.store.layout import StorePaths, is_committed

if TYPE_CHECKING:
    from hscache.kernels.sites import KernelRecord
    from hscache.model.loading import LoadedTarget


@dataclass
class BuildReport:
    """The result of a build.

    Attributes:
        store: Store directory.
        shards: Planned shards.
        built: Shards committed by this run.
        samples: Samples in the store.
        tokens: Their tokens.
        loss_tokens: Their supervised tokens.
        rejected: Reason code -> rows that plan or capture rejected.
        capture_rejected: The part of them that was planned: reason code -> samples that capture rejected.
        bytes: Size of all shards on disk.
        seconds: Wall time of this run.
        capture_seconds: The part from the first forward batch to the last commit.
    """

    store: str
    shards: int
    built: int = 0
    samples: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    capture_rejected: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    seconds: float = 0.0
    capture_seconds: float = 0.0


@dataclass(frozen=True)
class KernelPolicy:
    """Which kernel paths a build accepts.

    Attributes:
        choice: ``auto`` keeps the kernels that transformers chose, ``torch`` forces the torch references, ``fla`` never
            falls back.
        allow_fallback: Let ``auto`` run torch references on a GPU where kernels exist.
        accept_path: ``path_id`` of a kernel path of committed shards that may differ from this build's.
    """

    choice: Literal["auto", "torch", "fla"] = "auto"
    allow_fallback: bool = False
    accept_path: str | None = None


def build(
    manifest: BuildManifest,
    out: Path,
    *,
    device: str | None = None,
    fast_digest: bool = False,
    accept_corpus: bool = False,
    kernels: KernelPolicy = KernelPolicy(),
) -> BuildReport:
    """Build a store, or finish one.

    Args:
        manifest: What to cache.
        out: Store directory; new, empty, or started with the same manifest.
        device: Where the target runs, such as ``cuda:0``; None for CUDA if there is one.
        fast_digest: Identify the weight files by size and time instead of sha256.
        accept_corpus: Use a corpus that was made with another target.
        kernels: Which kernel paths are accepted.

    Raises:
        HscacheError: Of any group; see :mod:`hscache.errors`.
        Interrupted: On the first SIGINT or SIGTERM, at the next batch.
    """
    started = time.monotonic()
    resolved, directory = resolve_manifest(manifest, download=True)
    assert directory is not None
    paths = StorePaths(out)
    refuse_foreign(out)
    corpus = Path(resolved.corpus.path).expanduser()
    made = check_origin(corpus, directory, accept=accept_corpus)
    resolved = _with_dtype(resolved, paths, device)
    with disk_errors(out), Staging(paths.staging) as staging, stop_on_signal() as stop:
        with SpoolWriter(staging.path / "corpus.arrow") as sink:
            rows = _until_stopped(read_corpus(corpus), stop)
            plan = plan_rows(rows, resolved, sink)
        document = store_document(resolved, file_digests(directory, fast=fast_digest), plan, made)
        # checked before the store is started: once it is, it refuses a smaller manifest
        if not paths.manifest.exists():
            require_space(bytes_needed(plan, resolved, range(len(plan.batches)), target=True, least=True), out)
        digest = claim(paths, document, plan, staging.path)
        _set_strays_aside(paths, staging.path)
        todo = missing_shards(out, len(plan.batches))
        target_there = paths.target.exists()
        require_space(bytes_needed(plan, resolved, todo, target=not target_there, least=True), out)
        report = BuildReport(str(out), len(plan.batches))
        if todo or not target_there:
            what = f"{len(todo)} of {len(plan.batches)} shards to build" if todo else "target/ to write"
            say(f"{what}; loading {directory.name} ({resolved.target.dtype})")
            job = _Job("build", resolved, paths, staging.path, digest, stop, len(resolved.states.taps) + 1)
            report.capture_seconds = job.capture(plan, kernels, todo, directory, device)
            report.built = job.built
        index = finalize(out, staging.path)
    _fill_report(report, index, paths)
    report.seconds = time.monotonic() - started
    return report


def _with_dtype(manifest: ResolvedManifest, paths: StorePaths, device: str | None) -> ResolvedManifest:
    """Return the manifest with ``auto`` as ``target.dtype`` replaced by the store's dtype, or the device's if new."""
    if manifest.target.dtype != "auto":
        return manifest
    if paths.manifest.exists():
        dtype = read_manifest(paths.root)["manifest"]["target"]["dtype"]
    else:
        dtype = pick_dtype("auto", pick_device(device))
    return manifest.model_copy(update={"target": manifest.target.model_copy(update={"dtype": dtype})})


def _set_strays_aside(paths: StorePaths, staging: Path) -> None:
    """Move shard folders without ``zarr.json`` away: no build leaves one, but a user who deletes files may."""
    for path in paths.shards.glob("*.zarr"):
        if not is_committed(path):
            say(f"{path}: no zarr.json, so not a shard; it is rebuilt")
            path.rename(staging / f"stray-{path.name}")


class _Job(ShardLoop):
    """The capture of the shards that are missing."""

    def capture(self, plan: Plan, kernels: KernelPolicy, todo: list[int], directory: Path, device: str | None) -> float:
        """Load the target and capture; return seconds from the first forward batch to the last commit."""
        # imported here: planning, and resuming a finished store, need no torch
        from hscache.kernels.observe import observe_kernels
        from hscache.model.capture import Capturer
        from hscache.model.loading import load_target

        self._plan, self._kernels = plan, kernels
        self._paths_there: dict[str, dict[str, Any]] = {}
        self._own: dict[str, Any] | None = None
        """The kernels that the shards of this process ran."""
        shape, states = self._manifest.target.shape, self._manifest.states
        target = load_target(self._manifest.target, shape, directory, pick_device(device))
        self._accept_path(target)
        self._write_target(target, directory)
        codec = self._manifest.store.codec
        self._capturer = Capturer(
            target,
            states.taps,
            final_state=states.final_state,
            topk=self._manifest.logits.topk,
            scheme=lossy.scheme(codec, shape.hidden_size) if codec in lossy.NAMES else None,
        )
        self._spool = Spool(self._staging / "corpus.arrow")
        started = time.monotonic()
        with observe_kernels(target.model, kernels.choice) as self._observation:
            self.run(todo)
        return time.monotonic() - started

    def tokens(self, shard: int) -> int:
        """Return the planned tokens of a shard."""
        return self._plan.shard_rows[shard][0]

    def bytes_needed(self, shard: int) -> int:
        """Return the size of a shard's data files without packing."""
        return bytes_needed(self._plan, self._manifest, [shard], target=False)

    def make(self, shard: int, work: ShardBuilder) -> dict[str, Any]:
        """Run the shard's forward batches; return how its states were computed."""
        forwards = self._capturer.forwards
        for number in self._plan.batches[shard]:
            check_stop(self._stop)
            rows = self._spool.batch(number)
            work.expected += len(rows)
            for pending in self._capturer.start(rows):
                self.write(work.take, pending)
        # a shard of which no sample fitted into memory records the kernels that it would have run
        ran = self._ran(self._observation.take(), shard) if self._capturer.forwards > forwards else self._planned
        kernels = {"kernels": ran, "accepted_path": self._kernels.accept_path}
        return {**self._context, "oom_splits": self._capturer.oom_splits, **kernels, "time": now()}

    def accept(self, shard: int) -> None:
        """Check that a shard of another process ran the same kernels."""
        self._accept_shard(shard)
        if self._own is not None:
            self._require_same(self._own)

    def _write_target(self, target: LoadedTarget, directory: Path) -> None:
        tensors = {"embed": target.model.get_input_embeddings().weight}  # type: ignore[operator]
        tensors |= {"lm_head": target.head.weight, "norm": target.norm.weight}
        facts = {name: target.report[name] for name in ("class", "head", "embed_scale", "norm_kind", "norm_eps")}
        copies = [directory / "config.json", *tokenizer_files(directory)]
        write_target(self._paths.target, self._staging, tensors, {**facts, "shape": target.shape.model_dump()}, copies)

    def _accept_path(self, target: LoadedTarget) -> None:
        """Refuse a fallback on a GPU, and a kernel path that differs from that of the committed shards."""
        from hscache.kernels.observe import planned_records
        from hscache.kernels.path import describe_path
        from hscache.kernels.provenance import context, kernels, refuse_fallback

        records = planned_records(target.model, self._kernels.choice)
        if self._kernels.choice == "auto" and not self._kernels.allow_fallback:
            refuse_fallback(records, target.device, self._manifest.target.path)
        self._device = target.device
        self._context = context(target.device, target.report)
        self._planned = kernels(records, target.device)
        say(f"kernel path: {describe_path(records)}")
        for shard in committed_shards(self._paths.root):
            self._accept_shard(shard)

    def _accept_shard(self, shard: int) -> None:
        """Refuse to add to a store that has a shard of another kernel path."""
        record = read_shard(self._paths.shard(shard), whole=True)
        there, made = record["provenance"], record["provenance"]["kernels"]
        if made["path_id"] == self._kernels.accept_path or all(record["samples"]["reason"]):
            return
        here = {**self._context, "kernels": self._planned}
        if made.get("planned_id") != self._planned["planned_id"]:
            raise self._other_kernels(there, here)
        self._paths_there[made["path_id"]] = there

    def _other_kernels(self, there: dict[str, Any], here: dict[str, Any]) -> ConflictError:
        from hscache.kernels.provenance import path_differences

        return ConflictError(
            "store-other-kernels",
            f"{self._paths.root}: its shards were computed by another kernel path:\n  "
            + "\n  ".join(path_differences(there, here)),
            hint=f"restore that environment, or accept the mixture: --accept-path {there['kernels']['path_id']}",
        )

    def _ran(self, records: list[KernelRecord], shard: int) -> dict[str, Any]:
        """Return the kernels that a shard ran.

        Refuses them when they do not form one path, or when other shards of the store ran another one.
        """
        from hscache.kernels.provenance import kernels, require_one_path

        require_one_path(records, f"shard {shard}")
        here = {**self._context, "kernels": kernels(records, self._device)}
        self._require_same(here)
        self._paths_there, self._own = {here["kernels"]["path_id"]: here}, here
        return here["kernels"]  # type: ignore[no-any-return]

    def _require_same(self, here: dict[str, Any]) -> None:
        for path_id, there in self._paths_there.items():
            if path_id != here["kernels"]["path_id"]:
                raise self._other_kernels(there, here)


def _until_stopped(rows: Iterable[Sample | Reject], stop: list[int]) -> Iterator[Sample | Reject]:
    for row in rows:
        check_stop(stop)
        yield row


def _fill_report(report: BuildReport, index: Any, paths: StorePaths) -> None:
    for shard, status, reason, tokens, loss in zip(
        *(index[name].to_pylist() for name in ("shard", "status", "reason", "n_tokens", "n_loss")), strict=True
    ):
        if status == "ok":
            report.samples += 1
            report.tokens += tokens
            report.loss_tokens += loss
        else:
            report.rejected[reason] = report.rejected.get(reason, 0) + 1
            if shard >= 0:
                report.capture_rejected[reason] = report.capture_rejected.get(reason, 0) + 1
    report.bytes = sum(path.stat().st_size for path in paths.shards.rglob("*") if path.is_file())
