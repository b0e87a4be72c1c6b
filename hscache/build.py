"""The main job: corpus and manifest in, a verified store out, resumable at every moment.

Read top to bottom: :func:`build` stages the corpus, claims the store, and loops over the shards that are not committed
yet. One thread runs the target; another checks, packs and writes what it hands over, at most two forward batches
behind, so that memory stays at the model and a few batches however long the corpus is. A shard becomes visible when it
is whole; whatever stops the process, the next start redoes at most the shards in progress.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
import uuid
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import hscache
from hscache.checks import Health
from hscache.console import Progress, say, size
from hscache.corpus.readers import read_corpus
from hscache.errors import ConflictError, EnvironmentFault
from hscache.manifest import BuildManifest
from hscache.plan import Plan, array_bytes, make_plan, manifest_specs
from hscache.spool import Spool, SpoolWriter
from hscache.store.durable import Staging, fsync_directory, replace_file, write_file
from hscache.store.head import write_target
from hscache.store.index import committed_shards, finalize, parquet_bytes, read_manifest, table_digest
from hscache.store.layout import FORMAT_VERSION, StorePaths, canonical_json, json_digest
from hscache.store.shard_writer import ShardWriter
from hscache.target.facts import file_digests, read_shape, resolve_path, resolve_taps, tokenizer_files

if TYPE_CHECKING:
    from hscache.target.capture import Capturer, Pending

_BATCHES_IN_FLIGHT = 2
_FREE_MARGIN_BYTES = 256 << 20
# where things lie on this machine is no part of what a store holds
_NOT_IDENTITY = ("manifest.target.path", "manifest.corpus.path", "created", "digest")


class Interrupted(Exception):
    """A signal asked the build to stop; the store is resumable.

    Args:
        signum: Signal number.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@dataclass
class BuildReport:
    """What a build did.

    Attributes:
        store: Store directory.
        shards: Planned shards.
        built: Shards committed by this run.
        samples: Samples in the store.
        tokens: Their tokens.
        loss_tokens: Their supervised tokens.
        rejected: Reason code -> rows, over plan and capture.
        bytes: Size of all shards on disk.
        seconds: Wall time of this run.
        capture_seconds: Of it, from the first forward batch to the last commit.
    """

    store: str
    shards: int
    built: int = 0
    samples: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    seconds: float = 0.0
    capture_seconds: float = 0.0


def build(manifest: BuildManifest, out: Path, *, device: str | None = None, fast_digest: bool = False) -> BuildReport:
    """Build a store, or finish one.

    Args:
        manifest: What to cache.
        out: Store directory; new, empty, or begun with the same manifest.
        device: Where the target runs, such as ``cuda:0``; None for CUDA if there is one.
        fast_digest: Know the weight files by size and time instead of sha256.

    Raises:
        HscacheError: Of every group; see :mod:`hscache.errors`.
        Interrupted: On the first SIGINT or SIGTERM, at the next batch.
    """
    started = time.monotonic()
    directory = resolve_path(manifest.target, download=True)
    assert directory is not None
    shape = read_shape(manifest.target, directory)
    manifest = resolve_taps(manifest, shape)
    paths = StorePaths(out)
    _refuse_foreign(out)
    with Staging(paths.staging) as staging, _stop_on_signal() as stop:
        with SpoolWriter(staging.path / "corpus.arrow") as sink:
            rows = read_corpus(Path(manifest.corpus.path).expanduser())
            plan = make_plan(rows, manifest, hidden_size=shape.hidden_size, vocab_size=shape.vocab_size, sink=sink)
        document = _document(manifest, file_digests(directory, fast=fast_digest), plan)
        _claim(paths, document, plan, staging.path)
        todo = sorted(set(range(len(plan.batches))) - set(committed_shards(out)))
        require_space(bytes_needed(plan, manifest, todo), out)
        report = BuildReport(str(out), len(plan.batches), built=len(todo))
        if todo:
            say(
                f"{len(todo)} of {len(plan.batches)} shards to build;"
                f" loading {directory.name} ({manifest.target.dtype})"
            )
            job = _Job(manifest, plan, paths, staging.path, str(document["digest"]), stop)
            report.capture_seconds = job.run(todo, directory, device)
        index = finalize(out, staging.path)
    _fill_report(report, index, paths)
    report.seconds = time.monotonic() - started
    return report


def require_space(needed: int, out: Path) -> None:
    """Refuse a build that cannot fit, before it begins.

    Args:
        needed: Bytes still to write.
        out: Store directory, which need not exist.

    Raises:
        EnvironmentFault: ``disk-full``.
    """
    free = free_bytes(out)
    if needed and needed + _FREE_MARGIN_BYTES > free:
        raise EnvironmentFault(
            "disk-full",
            f"{out}: {size(needed)} to write, {size(free)} free ({size(_FREE_MARGIN_BYTES)} of it kept)",
            hint='build elsewhere, with fewer taps (--set "states.taps=[...]"), or with --set store.codec=zstd',
        )


def bytes_needed(plan: Plan, manifest: BuildManifest, todo: list[int]) -> int:
    """Return the size of the shards' data files without packing; an upper bound for packed codecs."""
    assert manifest.target.shape is not None
    specs = manifest_specs(manifest, manifest.target.shape.hidden_size)
    rest = Plan(plan.table, plan.corpus, [], {}, [plan.shard_rows[shard] for shard in todo])
    return sum(entry.files for entry in array_bytes(rest, specs))


def free_bytes(path: Path) -> int:
    """Return the free bytes of the file system that holds ``path`` or its nearest existing parent."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


class _Job:
    """The capture of the shards that are left."""

    def __init__(
        self,
        manifest: BuildManifest,
        plan: Plan,
        paths: StorePaths,
        staging: Path,
        manifest_digest: str,
        stop: list[int],
    ) -> None:
        self._manifest, self._plan, self._paths, self._staging = manifest, plan, paths, staging
        self._manifest_digest, self._stop = manifest_digest, stop
        self._rejected = 0
        self._bytes = 0

    def run(self, todo: list[int], directory: Path, device: str | None) -> float:
        """Load the target and capture; return seconds from the first forward batch to the last commit."""
        # here, since planning and resuming a finished store need no torch
        from hscache.target.capture import Capturer
        from hscache.target.loading import load_target, pick_device
        from hscache.target.provenance import provenance

        shape, states = self._manifest.target.shape, self._manifest.states
        assert shape is not None
        assert isinstance(states.taps, tuple)
        target = load_target(self._manifest.target, shape, directory, pick_device(device))
        tensors = {"embed": target.model.get_input_embeddings().weight}  # type: ignore[operator]
        tensors |= {"lm_head": target.head.weight, "norm": target.norm.weight}
        facts = {name: target.report[name] for name in ("class", "head", "norm_kind", "norm_eps")}
        copies = [directory / "config.json", *tokenizer_files(directory)]
        write_target(self._paths.target, self._staging, tensors, {**facts, "shape": shape.model_dump()}, copies)
        capturer = Capturer(target, states.taps, final_state=states.final_state, topk=self._manifest.logits.topk)
        self._provenance = provenance(target.device, target.report)
        started = time.monotonic()
        self._capture(todo, capturer)
        return time.monotonic() - started

    def _capture(self, todo: list[int], capturer: Capturer) -> None:
        spool = Spool(self._staging / "corpus.arrow")
        progress = Progress("build", sum(self._plan.shard_rows[shard][0] for shard in todo), "tok")
        in_flight: deque[Future[int]] = deque()
        done = 0

        def collect(limit: int) -> None:
            while len(in_flight) > limit:
                tokens = in_flight.popleft().result()
                progress.advance(tokens, self._note(progress, done, len(todo)))

        with ThreadPoolExecutor(1, "writer") as writer:
            for shard in todo:
                self._require_room(shard)
                work = _Shard(self._staging, self._manifest, self._paths.shard(shard))
                for number in self._plan.batches[shard]:
                    if self._stop:
                        raise Interrupted(self._stop[0])
                    for pending in capturer.start(spool.batch(number)):
                        in_flight.append(writer.submit(self._guarded, work.take, pending))
                    collect(_BATCHES_IN_FLIGHT)
                in_flight.append(writer.submit(self._guarded, self._commit, work, shard, capturer.oom_splits))
                done += 1
            collect(0)
        progress.close()

    def _guarded(self, step: Any, *args: Any) -> int:
        """Run a step of the writer thread; a full disk becomes an error that says how to go on."""
        try:
            return int(step(*args))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise self._disk_full(f"{error.strerror}") from error

    def _commit(self, work: _Shard, shard: int, oom_splits: int) -> int:
        work.commit(
            {
                "shard": shard,
                "manifest_digest": self._manifest_digest,
                "provenance": {**self._provenance, "oom_splits": oom_splits, "time": _now()},
            }
        )
        self._rejected += work.rejected
        self._bytes += work.bytes
        return 0

    def _require_room(self, shard: int) -> None:
        needed = bytes_needed(self._plan, self._manifest, [shard])
        if free_bytes(self._paths.root) < needed + _FREE_MARGIN_BYTES // 4:
            raise self._disk_full(f"{size(free_bytes(self._paths.root))} free, the next shard takes {size(needed)}")

    def _disk_full(self, what: str) -> EnvironmentFault:
        return EnvironmentFault(
            "disk-full",
            f"{self._paths.root}: {what}; {len(committed_shards(self._paths.root))} shards are committed",
            hint="make room and run the same command again: it goes on where it stopped",
        )

    def _note(self, progress: Progress, done: int, total: int) -> str:
        rate = self._bytes / max(progress.elapsed_s, 1e-9)
        free = size(free_bytes(self._paths.root))
        return f"{size(rate)}/s, {done}/{total} shards, {self._rejected} rejected, {free} free"


class _Shard:
    """One shard while it is written, on the writer thread."""

    def __init__(self, staging: Path, manifest: BuildManifest, destination: Path) -> None:
        assert manifest.target.shape is not None
        specs = manifest_specs(manifest, manifest.target.shape.hidden_size)
        self._destination = destination
        self._writer = ShardWriter(staging / uuid.uuid4().hex, specs, manifest.store.codec)
        assert isinstance(manifest.states.taps, tuple)
        self._health = Health(len(manifest.states.taps) + 1)
        self.rejected = 0
        self.bytes = 0

    def take(self, pending: Pending) -> int:
        """Check and append the samples of a forward batch; return their tokens."""
        tokens = 0
        for sample in pending.samples():
            row = sample.row
            assert row.input_ids is not None
            tokens += len(row.input_ids)
            if sample.stats is None:
                self._writer.reject(row.sample_id, row.row, len(row.input_ids), sample.reason, sample.detail)
                self.rejected += 1
                say(f"rejected {row.sample_id}: {sample.reason} ({sample.detail})")
                continue
            self._writer.add(row.sample_id, row.row, sample.arrays)
            self._health.add(sample.stats)
            self.bytes += sum(array.nbytes for array in sample.arrays.values())
        return tokens

    def commit(self, attributes: dict[str, Any]) -> None:
        """Make the shard visible."""
        self._destination.parent.mkdir(exist_ok=True)
        self._writer.commit(self._destination, {**attributes, "health": self._health.to_json()})


@contextmanager
def _stop_on_signal() -> Iterator[list[int]]:
    """Turn the first SIGINT or SIGTERM into an entry of the list; the second acts as ever."""
    stop: list[int] = []

    def on_signal(signum: int, frame: FrameType | None) -> None:
        if stop:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        stop.append(signum)
        say("stopping after this batch; once more to stop at once")

    try:
        previous = {signum: signal.signal(signum, on_signal) for signum in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: signals are the caller's affair
        yield stop
        return
    try:
        yield stop
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _document(manifest: BuildManifest, digests: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Return ``manifest.json``: all that decides the store's content, and a digest over it."""
    assert manifest.target.shape is not None
    body = {
        "format_version": FORMAT_VERSION,
        "manifest": manifest.model_dump(mode="json"),
        "target": {"shape": manifest.target.shape.model_dump(), **digests},
        "corpus": plan.corpus,
        "plan": {
            "digest": table_digest(plan.table),
            "shards": len(plan.batches),
            "batches": sum(len(batches) for batches in plan.batches),
            **plan.totals,
        },
        "created": {"hscache": hscache.__version__, "time": _now()},
    }
    return {**body, "digest": json_digest(body)}


def _refuse_foreign(out: Path) -> None:
    if out.exists() and not StorePaths(out).manifest.exists():
        # staging alone is what an interrupted first start leaves
        foreign = [path.name for path in out.iterdir() if path.name != "staging"] if out.is_dir() else [out.name]
        if foreign:
            raise ConflictError(
                "store-exists",
                f"{out}: holds {', '.join(sorted(foreign)[:3])} but no manifest.json",
                hint="choose another --out; nothing was changed",
            )


def _claim(paths: StorePaths, document: dict[str, Any], plan: Plan, staging: Path) -> None:
    """Write ``manifest.json`` and ``plan.parquet``, or check that the store was begun with the same ones."""
    fresh = staging / "manifest.json"
    write_file(fresh, canonical_json(document))
    try:
        os.link(fresh, paths.manifest)  # fails when it exists: of two builders one is first, and neither overwrites
        fsync_directory(paths.root)
    except FileExistsError:
        _refuse_other(paths.root, document)
    if not paths.plan.exists():
        replace_file(paths.plan, parquet_bytes(plan.table), staging)


def _refuse_other(root: Path, document: dict[str, Any]) -> None:
    there, wanted = _flat(read_manifest(root)), _flat(document)
    differing = [
        f"{key}: store {there.get(key)!r}, now {wanted.get(key)!r}"
        for key in sorted(there.keys() | wanted.keys())
        if there.get(key) != wanted.get(key) and not key.startswith(_NOT_IDENTITY)
    ]
    if not differing:
        document["digest"] = read_manifest(root)["digest"]
        return
    # a changed limit changes the plan too: name the cause before its consequences
    differing.sort(key=lambda line: (not line.startswith("manifest."), line.startswith("plan.")))
    more = f"\n  and {len(differing) - 5} more" if len(differing) > 5 else ""
    raise ConflictError(
        "store-other-manifest",
        f"{root} was begun differently:\n  " + "\n  ".join(differing[:5]) + more,
        hint="build into another --out, or give the manifest, target and corpus that the store was begun with",
    )


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    out: dict[str, Any] = {}
    for key, item in value.items():
        out.update(_flat(item, f"{prefix}.{key}" if prefix else key))
    return out


def _fill_report(report: BuildReport, index: Any, paths: StorePaths) -> None:
    for status, reason, tokens, loss in zip(
        *(index[name].to_pylist() for name in ("status", "reason", "n_tokens", "n_loss")), strict=True
    ):
        if status == "ok":
            report.samples += 1
            report.tokens += tokens
            report.loss_tokens += loss
        else:
            report.rejected[reason] = report.rejected.get(reason, 0) + 1
    report.bytes = sum(path.stat().st_size for path in paths.shards.rglob("*") if path.is_file())


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
