"""Make the missing shards of a store: the loop that builds and conversions share.

A command says how the samples of a shard are made (:class:`ShardLoop`). One thread makes them; another checks, packs
and writes them (:class:`ShardBuilder`), at most two pieces behind, so that memory stays at a few pieces however long
the corpus is. A shard becomes visible when it is whole, and the files of the next one are created after that: whatever
stops the process, the next start repeats at most the shard in progress and the pieces of which nothing was written.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hscache.build.claim import ShardClaims
from hscache.build.plan import manifest_specs
from hscache.build.space import free_bytes, require_room
from hscache.console import Progress, say, size
from hscache.distance import CodecError, RowErrors
from hscache.health import Health, RowStats
from hscache.manifest import ResolvedManifest
from hscache.store import lossy
from hscache.store.layout import StorePaths, is_committed
from hscache.store.shard_writer import ShardWriter

if TYPE_CHECKING:
    from hscache.model.capture import Pending

_IN_FLIGHT = 2


class ShardBuilder:
    """One shard while it is written, on the writer thread.

    Args:
        staging: Private directory on the store's file system.
        manifest: With its target's shape and taps.
        destination: Folder of the shard once it is committed.
        columns: Columns of the statistics: taps, and the final state where it is known.
    """

    def __init__(self, staging: Path, manifest: ResolvedManifest, destination: Path, columns: int) -> None:
        specs = manifest_specs(manifest, manifest.target.shape.hidden_size)
        self._destination = destination
        self._open_writer = partial(ShardWriter, staging / uuid.uuid4().hex, specs, manifest.store.codec)
        self._health = Health(columns)
        self._codec_error = CodecError() if manifest.store.codec in lossy.NAMES else None
        self.rejected = 0
        self.bytes = 0
        self.expected = 0
        """Samples that will be added or rejected; counted where they are made."""

    @cached_property
    def _writer(self) -> ShardWriter:
        """Created by the writer thread, after the commit of the shard before: only one shard has files at a time."""
        return self._open_writer()

    def take(self, pending: Pending) -> int:
        """Check and append the samples of a forward batch; return their tokens."""
        tokens = 0
        for sample in pending.samples():
            row = sample.row
            tokens += len(row.input_ids)
            if sample.stats is None:
                self.reject(row.sample_id, row.row, len(row.input_ids), sample.reason, sample.detail)
                say(f"rejected {row.sample_id}: {sample.reason} ({sample.detail})")
            else:
                self.add(row.sample_id, row.row, sample.arrays, sample.stats, sample.errors)
        return tokens

    def add(
        self,
        sample_id: str,
        corpus_row: int,
        arrays: dict[str, NDArray[Any]],
        stats: RowStats,
        errors: RowErrors | None = None,
    ) -> int:
        """Append a sample; return its tokens.

        Args:
            sample_id: The corpus's id.
            corpus_row: Its row in the corpus.
            arrays: Array name -> rows as stored.
            stats: Of its states before they were encoded.
            errors: Of encoding them with a lossy codec.
        """
        self._writer.add(sample_id, corpus_row, arrays)
        self._health.add(stats)
        if self._codec_error is not None and errors is not None:
            self._codec_error.add(errors)
        self.bytes += sum(array.nbytes for array in arrays.values())
        return len(stats.low)

    def reject(self, sample_id: str, corpus_row: int, n_tokens: int, reason: str, detail: str) -> int:
        """Record a sample that has no data; return 0, since no tokens of it are stored."""
        self._writer.reject(sample_id, corpus_row, n_tokens, reason, detail)
        self.rejected += 1
        return 0

    def add_kl(self, kl: NDArray[np.float32]) -> int:
        """Count KL divergences that the codec caused, in nats, float32 [R]; return 0."""
        assert self._codec_error is not None
        self._codec_error.add_kl(kl)
        return 0

    def health(self) -> dict[str, Any]:
        """Return the statistics of what was added, as plain JSON."""
        codec = {} if self._codec_error is None else {"codec": self._codec_error.to_json()}
        return self._health.to_json() | codec

    def commit(self, attributes: dict[str, Any]) -> None:
        """Make the shard visible, if every sample was taken.

        If writing a sample failed for a moment only (a full disk has room for small files), this call may be queued
        already. Whoever waits for that sample gets its error, but later than this call.
        """
        if self._writer.n_samples != self.expected:
            raise RuntimeError(f"{self._writer.n_samples} of {self.expected} samples taken")
        self._writer.commit(self._destination, attributes)


class ShardLoop(ABC):
    """Makes the missing shards of a store, and shares them with other processes that make them too.

    Args:
        label: Name of the work in the progress line.
        manifest: Of the store, with its target's shape and taps.
        paths: The store; its ``manifest.json`` exists.
        staging: Private directory on the store's file system.
        digest: Of the store's ``manifest.json``.
        stop: Signals received so far; the caller appends to it.
        columns: Columns of the states' statistics.
    """

    def __init__(
        self,
        label: str,
        manifest: ResolvedManifest,
        paths: StorePaths,
        staging: Path,
        digest: str,
        stop: list[int],
        columns: int,
    ) -> None:
        self._label, self._manifest, self._paths, self._staging = label, manifest, paths, staging
        self._digest, self._stop, self._columns = digest, stop, columns
        self.built = 0
        """Shards committed by this process."""
        self._done = self._total = self._rejected = self._bytes = 0
        self._in_flight: deque[Future[int]] = deque()
        self._writer: ThreadPoolExecutor
        self._progress: Progress

    @abstractmethod
    def tokens(self, shard: int) -> int:
        """Return the tokens of a shard."""

    @abstractmethod
    def bytes_needed(self, shard: int) -> int:
        """Return the size of a shard's data files without packing."""

    @abstractmethod
    def make(self, shard: int, work: ShardBuilder) -> dict[str, Any]:
        """Give the shard's samples to :meth:`write`; return the shard's provenance."""

    def accept(self, shard: int) -> None:  # noqa: B027
        """Check a shard that another process committed meanwhile."""

    def health(self, shard: int, counted: dict[str, Any]) -> dict[str, Any]:
        """Return the statistics that a shard records; runs on the writer thread."""
        return counted

    def run(self, todo: list[int]) -> None:
        """Make these shards, except those that other processes make meanwhile.

        Raises:
            HscacheError: As raised by the methods above.
            OSError: The disk refused a write, or has no room for the next shard.
            Interrupted: After a signal.
        """
        self._total = len(todo)
        self._progress = Progress(self._label, sum(map(self.tokens, todo)), "tok")
        with ShardClaims(self._paths.manifest) as claims, ThreadPoolExecutor(1, "writer") as self._writer:
            for shard in claims.shares(todo, self._is_made, self._stop, lambda: self._collect(0)):
                require_room(self.bytes_needed(shard), self._paths.root)
                work = ShardBuilder(self._staging, self._manifest, self._paths.shard(shard), self._columns)
                provenance = self.make(shard, work)
                self.built += 1
                self._done += 1
                # waits until the shard before this one is committed, so that at most one waits for its first write
                self.write(self._commit, shard, work, provenance)
            self._collect(0)
        self._progress.close()

    def write(self, function: Callable[..., int], *arguments: Any) -> None:
        """Run a function, which returns the tokens that it wrote, on the writer thread, after all earlier ones."""
        self._in_flight.append(self._writer.submit(function, *arguments))
        self._collect(_IN_FLIGHT)

    def _collect(self, limit: int) -> None:
        while len(self._in_flight) > limit:
            self._advance(self._in_flight.popleft().result())

    def _advance(self, tokens: int) -> None:
        rate = self._bytes / max(self._progress.elapsed_s, 1e-9)
        shards, free = f"{self._done}/{self._total} shards", size(free_bytes(self._paths.root))
        self._progress.advance(tokens, f"{size(rate)}/s, {shards}, {self._rejected} rejected, {free} free")

    def _is_made(self, shard: int) -> bool:
        if not is_committed(self._paths.shard(shard)):
            return False
        self.accept(shard)
        self._done += 1
        self._advance(self.tokens(shard))
        return True

    def _commit(self, shard: int, work: ShardBuilder, provenance: dict[str, Any]) -> int:
        health = self.health(shard, work.health())
        work.commit({"shard": shard, "manifest_digest": self._digest, "provenance": provenance, "health": health})
        self._rejected += work.rejected
        self._bytes += work.bytes
        return 0
