"""Rewrite a store without its target: another codec, fewer taps, fewer logits.

::

    committed shard of the source
      -> each sample, checked against its digest (damage must not get a fresh checksum)
      -> taps selected, states decoded or encoded, logits shortened
      -> a shard with the same samples in the same places; the record of how they were computed is copied

The plan stays the source's, so shards become smaller, not fewer. The new ``manifest.json`` holds the source's digest
and the settings that were changed. A conversion can be stopped and run again like a build: committed shards stay.

Cost: one pass over the source; encoding to ``int8`` or ``int4`` on one core takes the time that
:mod:`hscache.store.lossy` says.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import hscache
from hscache.build.claim import claim, now, refuse_foreign
from hscache.build.plan import Plan, manifest_specs
from hscache.build.shard_builder import ShardBuilder, ShardLoop
from hscache.build.space import require_space
from hscache.console import check_stop, say, stop_on_signal
from hscache.distance import RowErrors, compare_rows, kl_nats, spread
from hscache.errors import ConfigError, InputError
from hscache.health import RowStats, reduce_rows
from hscache.manifest import PACKED, Codec, ResolvedManifest, check_fields
from hscache.rows import supervised_positions
from hscache.store import lossy
from hscache.store.durable import Staging, copy_file, disk_errors, publish_directory
from hscache.store.head import TargetHead, check_target, load_head
from hscache.store.index import committed_shards, finalize, missing_shards, read_plan, read_shard
from hscache.store.layout import (
    FINAL_STATE,
    HIDDEN_STATES,
    INPUT_IDS,
    LOGIT_IDS,
    LOGIT_LOGPROBS,
    LOGIT_LSE,
    LOSS_MASK,
    STATE_ARRAYS,
    ArraySpec,
    StorePaths,
    json_digest,
    scales_name,
)
from hscache.store.reader import Store, as_torch, coarsest_codec, decoded

if TYPE_CHECKING:
    import torch

_KL_SAMPLES_PER_SHARD, _KL_ROWS_PER_SAMPLE = 32, 2


@dataclass(frozen=True)
class Change:
    """The changes of a conversion; None keeps the source's setting.

    Attributes:
        codec: Of the new store.
        taps: Decoder blocks to keep, ascending.
        final_state: False drops the final state.
        topk: Log-probabilities to keep for each supervised token.
    """

    codec: Codec | None = None
    taps: tuple[int, ...] | None = None
    final_state: bool = True
    topk: int | None = None


@dataclass
class ConvertReport:
    """The result of a conversion.

    Attributes:
        source: Store that was read.
        store: Store that was written.
        codecs: Of source and new store.
        exact: Whether the new store's states are the target's own, bit by bit.
        shards: Shards of either store.
        built: Shards committed by this run.
        samples: Samples in the store.
        bytes_before: Size of the source's array files.
        bytes: Size of the new store's.
        seconds: Wall time of this run.
    """

    source: str
    store: str
    codecs: tuple[str, str]
    exact: bool
    shards: int
    built: int = 0
    samples: int = 0
    bytes_before: int = 0
    bytes: int = 0
    seconds: float = 0.0


def convert(source: Path, out: Path, change: Change) -> ConvertReport:
    """Rewrite a complete store, or finish doing so.

    Args:
        source: Store directory; it is only read.
        out: Store directory; new, empty, or started by the same conversion.
        change: The changes.

    Raises:
        ConfigError: ``convert-nothing``, ``convert-lossy``, ``taps-invalid``.
        InputError: ``store-unfinished``, ``array-absent``.
        IntegrityError: ``store-damaged``, ``sample-digest``: the source is damaged.
        HscacheError: As in a build, for an output that is not this store or a full disk.
        Interrupted: On the first SIGINT or SIGTERM, at the next sample.
    """
    started = time.monotonic()
    store = Store(source)
    if not store.complete:
        done = len(committed_shards(source))
        raise InputError(
            "store-unfinished",
            f"{source}: {done} of {store.manifest['plan']['shards']} shards are complete",
            hint="finish the build first: run its command again",
        )
    manifest = changed_manifest(store, change)
    paths = StorePaths(out)
    refuse_foreign(out)
    with disk_errors(out), Staging(paths.staging) as staging, stop_on_signal() as stop:
        plan = Plan(read_plan(source), store.manifest["corpus"], [], {})
        digest = claim(paths, _document(store.manifest, manifest), plan, staging.path)
        n_shards = store.manifest["plan"]["shards"]
        todo = missing_shards(out, n_shards)
        job = _Conversion(store, manifest, paths, staging.path, digest, stop)
        hint = "convert to another disk, with fewer --taps, or to a smaller --codec"
        require_space(sum(map(job.bytes_needed, todo)) // (2 if manifest.store.codec in PACKED else 1), out, hint)
        _copy_target(source, out, staging.path)
        job.run(todo)
        index = finalize(out, staging.path)
    exact = coarsest_codec(store.manifest) == "raw" and job.to_scheme is None
    codecs = (store.manifest["manifest"]["store"]["codec"], manifest.store.codec)
    report = ConvertReport(str(source), str(out), codecs, exact, n_shards, job.built)
    report.samples = int(np.count_nonzero(index["status"].to_numpy(zero_copy_only=False) == "ok"))
    report.bytes_before, report.bytes = (_array_bytes(root) for root in (source, out))
    report.seconds = time.monotonic() - started
    return report


def changed_manifest(store: Store, change: Change) -> ResolvedManifest:
    """Return the manifest of the new store.

    Raises:
        ConfigError: ``convert-nothing``, ``convert-lossy``, ``taps-invalid``.
        InputError: ``array-absent``.
    """
    old = check_fields(store.manifest["manifest"], ResolvedManifest, str(store.path))
    codec = change.codec or old.store.codec
    before = coarsest_codec(store.manifest)
    if before != "raw" and codec in lossy.NAMES and codec != old.store.codec:
        raise ConfigError(
            "convert-lossy",
            f"{store.path}: its states already have the error of {before}, and {codec} would add its own",
            hint="convert the lossless store that this one was made from",
        )
    taps = tuple(store.taps) if change.taps is None else change.taps
    _check_taps(store, taps)
    topk = old.logits.topk if change.topk is None else change.topk
    if topk > old.logits.topk:
        raise InputError("array-absent", f"{store.path}: got top-{topk}, but only top-{old.logits.topk} is stored")
    final_state = old.states.final_state and change.final_state
    new = old.model_copy(
        update={
            "states": old.states.model_copy(update={"taps": taps, "final_state": final_state}),
            "logits": old.logits.model_copy(update={"topk": topk}),
            "store": old.store.model_copy(update={"codec": codec}),
        }
    )
    if new == old:
        raise ConfigError(
            "convert-nothing",
            f"{store.path}: the store already has codec {codec}, taps {list(taps)} and top-{topk}",
            hint="choose another --codec, or fewer --taps or --topk",
        )
    return new


def _check_taps(store: Store, taps: Sequence[int]) -> None:
    if not taps or list(taps) != sorted(set(taps)):
        raise ConfigError(
            "taps-invalid",
            f"taps {list(taps)}: expected at least one, ascending, without repetition",
            hint="--taps 1,8,14",
        )
    if absent := sorted(set(taps) - set(store.taps)):
        raise InputError("array-absent", f"{store.path}: no tap {absent[0]}; stored are {store.taps}")


def _document(source: dict[str, Any], manifest: ResolvedManifest) -> dict[str, Any]:
    """Return ``manifest.json`` of the new store: the source's with the changes, and where it comes from."""
    old = source["manifest"]
    body = {
        **{name: source[name] for name in ("format_version", "target", "corpus", "plan")},
        "manifest": manifest.model_dump(mode="json"),
        "converted": {
            "from": source["digest"],
            "codec": old["store"]["codec"],
            "states": old["states"],
            "logits": old["logits"],
            "built": source["created"],
            "converted": source.get("converted"),
        },
        "created": {"hscache": hscache.__version__, "time": now()},
    }
    return {**body, "digest": json_digest(body)}


def _copy_target(source: Path, out: Path, staging: Path) -> None:
    there, here = StorePaths(source).target, StorePaths(out).target
    if here.exists():
        return
    check_target(there, full=True)
    directory = staging / "target"
    directory.mkdir()
    for path in sorted(there.iterdir()):
        copy_file(path, directory / path.name)
    publish_directory(directory, here)


def _array_bytes(root: Path) -> int:
    records = (read_shard(StorePaths(root).shard(shard), whole=True) for shard in committed_shards(root))
    return sum(entry["bytes"] for record in records for entry in record["files"].values())


class _Conversion(ShardLoop):
    """Converts shards of one store."""

    def __init__(
        self, store: Store, manifest: ResolvedManifest, paths: StorePaths, staging: Path, digest: str, stop: list[int]
    ) -> None:
        columns = len(manifest.states.taps) + (FINAL_STATE in store.specs)
        super().__init__("convert", manifest, paths, staging, digest, stop, columns)
        self._store = store
        self._source = list(store.specs.values())
        self._specs: list[ArraySpec] = manifest_specs(manifest, store.manifest["target"]["shape"]["hidden_size"])
        self.from_scheme = store.specs[HIDDEN_STATES].scheme
        self.to_scheme = next((spec.scheme for spec in self._specs if spec.scheme), None)
        self._encodes = self.to_scheme is not None and self.from_scheme is None
        self._picks = [store.taps.index(tap) for tap in manifest.states.taps]
        self._head: TargetHead | None = None
        if self._encodes and FINAL_STATE in store.specs and manifest.states.final_state:
            self._head = load_head(StorePaths(store.path).target)
        if self.from_scheme is not None and self.to_scheme is None:
            say(f"the states were stored as {self.from_scheme.name}: their decoded values are kept, with the error")

    def tokens(self, shard: int) -> int:
        """Return the tokens of a shard."""
        return sum(row["n_tokens"] for row in self._rows(shard) if not row["reason"])

    def bytes_needed(self, shard: int) -> int:
        """Return the size of the shard's data files without packing; an upper bound for packed codecs."""
        rows = [row for row in self._rows(shard) if not row["reason"]]
        counts = {"tokens": sum(row["n_tokens"] for row in rows), "loss": sum(row["n_loss"] for row in rows)}
        return sum(spec.raw_file_bytes(counts[spec.axis]) for spec in self._specs)

    def make(self, shard: int, work: ShardBuilder) -> dict[str, Any]:
        """Convert the shard's samples; return the source's provenance and a note of this conversion."""
        record, rows = self._record(shard), self._rows(shard)
        work.expected = len(rows)
        asked = set(spread(np.flatnonzero([not row["reason"] for row in rows]), _KL_SAMPLES_PER_SHARD).tolist())
        final: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number, row in enumerate(rows):
            check_stop(self._stop)
            place = row["sample_id"], row["corpus_row"]
            if row["reason"]:
                self.write(work.reject, *place, row["n_tokens"], row["reason"], row["detail"])
                continue
            stored = self._store.stored(self._store.index_of(row["sample_id"]))
            states = self._states(stored)
            arrays = {**self._rest(stored), **self._written(stored, states)}
            errors = None
            if self._encodes:
                back = decoded(arrays, self._specs)
                errors = _errors(states, back)
                if self._head is not None and number in asked:
                    picks = spread(supervised_positions(stored[LOSS_MASK]) - 1, _KL_ROWS_PER_SAMPLE)
                    final.append((_final(states, picks), _final(back, picks)))
            stats = RowStats.join(*(reduce_rows(_columns(states, name)) for name in states))
            self.write(work.add, *place, arrays, stats, errors)
        if self._head is not None and final:  # once a shard: the head becomes float32 for each call
            import torch

            true, other = (torch.cat(rows) for rows in zip(*final, strict=True))
            kl = kl_nats(*self._head.logits(torch.cat([true, other])).chunk(2))
            self.write(work.add_kl, kl.numpy())
        made = {"from": record["content_digest"], "hscache": hscache.__version__, "time": now()}
        return {**record["provenance"], "converted": made}

    def health(self, shard: int, counted: dict[str, Any]) -> dict[str, Any]:
        """Return the statistics of the new shard; those that cannot be computed from it are the source's."""
        old, health = self._record(shard)["health"], dict(counted)
        for name in ("rms", "typical_rms", "max_abs"):
            # those of a final state that the source did not keep, or of states before they were encoded
            final = [] if FINAL_STATE in self._store.specs else [old[name][-1]]
            keep = self.from_scheme is not None and self.to_scheme is not None
            health[name] = [old[name][i] for i in (*self._picks, -1)] if keep else counted[name] + final
        if not self._encodes:
            health.pop("codec", None)
            if "codec" in old:
                health["codec"] = self._carried(old["codec"])
        return health

    def _record(self, shard: int) -> dict[str, Any]:
        return read_shard(StorePaths(self._store.path).shard(shard), whole=True)

    def _rows(self, shard: int) -> list[dict[str, Any]]:
        samples = read_shard(StorePaths(self._store.path).shard(shard))["samples"]
        return [dict(zip(samples, row, strict=True)) for row in zip(*samples.values(), strict=True)]

    def _states(self, stored: dict[str, NDArray[Any]]) -> dict[str, NDArray[np.uint16]]:
        """Return the source's states as bf16 bits, only the taps to keep."""
        states = {**stored, **decoded(stored, self._source)}
        picked = {HIDDEN_STATES: np.ascontiguousarray(states[HIDDEN_STATES][:, self._picks])}
        return picked | ({FINAL_STATE: states[FINAL_STATE]} if FINAL_STATE in states else {})

    def _rest(self, stored: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return ids, mask and as many logits as are wanted."""
        rest = {name: stored[name] for name in (INPUT_IDS, LOSS_MASK)}
        if k := self._manifest.logits.topk:
            rest |= {name: stored[name][:, :k] for name in (LOGIT_IDS, LOGIT_LOGPROBS)}
            rest[LOGIT_LSE] = stored[LOGIT_LSE]
        return rest

    def _written(
        self, stored: dict[str, NDArray[Any]], states: dict[str, NDArray[np.uint16]]
    ) -> dict[str, NDArray[Any]]:
        """Return the state arrays of the new store."""
        out: dict[str, NDArray[Any]] = {}
        for name in STATE_ARRAYS[: 1 + self._manifest.states.final_state]:
            if self.to_scheme is None:
                out[name] = states[name]
            elif self.from_scheme is None:
                out[name], out[scales_name(name)] = lossy.encode_bits(states[name], self.to_scheme)
            else:  # the same codec: codes are copied, not encoded again
                for part in (name, scales_name(name)):
                    out[part] = stored[part][:, self._picks] if name == HIDDEN_STATES else stored[part]
        return out

    def _carried(self, error: dict[str, Any]) -> dict[str, Any]:
        """Return the codec error that a lossy source recorded, for the columns that are kept."""
        if not error["tokens"]:
            return error
        columns = [*self._picks, *([-1] if self._manifest.states.final_state else [])]
        return error | {name: [error[name][i] for i in columns] for name in ("rel_l2", "rel_l2_p99", "worst_cosine")}


def _errors(states: dict[str, NDArray[np.uint16]], back: dict[str, NDArray[np.uint16]]) -> RowErrors:
    """Return how far a sample's decoded states are from the source's."""
    import torch

    parts = [compare_rows(_columns(states, name), _columns(back, name)) for name in back]
    rel_l2, apart = (torch.cat(part, dim=1).numpy() for part in zip(*parts, strict=True))
    return RowErrors(rel_l2, apart, np.full(len(rel_l2), np.nan, np.float32))


def _final(states: dict[str, NDArray[np.uint16]], rows: NDArray[np.int64]) -> torch.Tensor:
    """Return final states of these tokens, bf16 [rows, H]."""
    return _columns(states, FINAL_STATE)[rows, 0]


def _columns(states: dict[str, NDArray[np.uint16]], name: str) -> torch.Tensor:
    """Return states as bf16 [tokens, columns, H]."""
    tensor = as_torch(states[name], name)
    return tensor if tensor.dim() == 3 else tensor[:, None]
