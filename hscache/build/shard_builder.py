"""One shard: samples are checked, packed and written as they come, and it becomes visible as a whole."""

from __future__ import annotations

import uuid
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hscache.build.plan import manifest_specs
from hscache.console import say
from hscache.distance import CodecError
from hscache.health import Health
from hscache.manifest import ResolvedManifest
from hscache.store import lossy
from hscache.store.shard_writer import ShardWriter

if TYPE_CHECKING:
    from hscache.model.capture import Pending


class ShardBuilder:
    """One shard while it is written, on the writer thread.

    Args:
        staging: Private directory on the store's file system.
        manifest: With its target's shape and taps.
        destination: Folder of the shard once it is committed.
    """

    def __init__(self, staging: Path, manifest: ResolvedManifest, destination: Path) -> None:
        specs = manifest_specs(manifest, manifest.target.shape.hidden_size)
        self._destination = destination
        self._open_writer = partial(ShardWriter, staging / uuid.uuid4().hex, specs, manifest.store.codec)
        self._health = Health(len(manifest.states.taps) + 1)
        self._codec_error = CodecError() if manifest.store.codec in lossy.NAMES else None
        self.rejected = 0
        self.bytes = 0
        self.expected = 0
        """Samples that will be taken; counted where the batches are made."""

    @cached_property
    def _writer(self) -> ShardWriter:
        """Made by the writer thread, behind the commit of the shard before: files are those of one shard only."""
        return self._open_writer()

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
            if self._codec_error is not None and sample.errors is not None:
                self._codec_error.add(sample.errors)
            self.bytes += sum(array.nbytes for array in sample.arrays.values())
        return tokens

    def commit(self, attributes: dict[str, Any]) -> None:
        """Make the shard visible, if every sample was taken.

        When one was not, by a fault that passed (a full disk has room for small files), this call may be on its way
        already: whoever waits for that sample is told, but only later.
        """
        if self._writer.n_samples != self.expected:
            raise RuntimeError(f"{self._writer.n_samples} of {self.expected} samples taken")
        health = self._health.to_json()
        if self._codec_error is not None:
            health["codec"] = self._codec_error.to_json()
        self._writer.commit(self._destination, {**attributes, "health": health})
