"""Compare states: a store with its target, one kernel path with another, or a store with another store.

All three measure the distance between two sets of states (:mod:`hscache.distance`). Per tap: mean, 99th percentile and
maximum of 1 - cosine over tokens, relative L2 distance, ratio of norms. Through the head: how often the first choice is
the same, and the KL divergence in nats.

A fixed cosine fails healthy kernels at depth 64 and passes broken ones, so kernel paths are judged end to end as a
multiple of the *noise floor*: the distance between the reference path in the store's precision and in the next wider
one. Paths whose distance exceeds :data:`FLOOR_LIMIT` times the floor differ. The local comparison of
:mod:`hscache.kernels.compare`, which does not grow with depth, names the first layer and the heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.compute as pc
import torch

from hscache.console import Progress, say
from hscache.device import pick_device
from hscache.distance import SAME_MAX, SAME_NORM, Sums, compare, kl_nats, same_mean
from hscache.errors import EnvironmentFault, InputError
from hscache.kernels.compare import LocalComparison, compare_local, first_divergence
from hscache.kernels.observe import gpu_only, observe_kernels, planned_records
from hscache.manifest import BuildManifest, parse_manifest
from hscache.model.capture import Captured, Capturer
from hscache.model.facts import read_shape, resolve_path
from hscache.model.loading import LoadedTarget, load_target
from hscache.rows import Sample as CorpusSample
from hscache.rows import supervised_positions
from hscache.store.head import TargetHead, load_head
from hscache.store.index import read_plan
from hscache.store.layout import FINAL_STATE, HIDDEN_STATES, StorePaths
from hscache.store.reader import Sample, Store, as_torch, decoded

FLOOR_LIMIT = 3.0
"""Kernel paths differ when the distance of their states exceeds this many noise floors."""
_WIDER = {"bfloat16": "float32", "float32": "float64"}

Path_ = Literal["torch", "fla", "bound"]


@dataclass(frozen=True)
class TapDistance:
    """The distance between two sets of states of one tap.

    Attributes:
        name: ``tap N`` or ``final state``.
        tokens: State vectors compared.
        mean: Mean of 1 - cosine.
        p99: Its 99th percentile.
        max: Its maximum.
        rel_l2: Norm of the difference over the norm of the reference.
        norm_ratio: Norm of the other states over that of the reference.
        equal: Share of elements that are equal bit by bit.
        by_position: Mean of 1 - cosine by :data:`hscache.distance.POSITIONS`.
    """

    name: str
    tokens: int
    mean: float
    p99: float
    max: float
    rel_l2: float
    norm_ratio: float
    equal: float
    by_position: dict[str, float]


@dataclass
class Comparison:
    """The distance of two sets of samples.

    Attributes:
        taps: One entry per tap, the final state last.
        samples: Samples compared.
        top1: Share of supervised tokens with the same first choice; None without final states.
        kl_nats: Mean KL divergence of the other distribution from the reference's.
        worst_sample: Id of the sample with the largest mean of 1 - cosine.
    """

    taps: list[TapDistance]
    samples: int
    top1: float | None
    kl_nats: float | None
    worst_sample: str

    @property
    def mean(self) -> float:
        """The largest mean of 1 - cosine over taps."""
        return max(tap.mean for tap in self.taps)


@dataclass
class KernelsReport:
    """One kernel path against another.

    Attributes:
        paths: Names of reference and candidate.
        end_to_end: Distance of the stored taps.
        floor: Distance of the reference in the store's precision from the next wider one.
        ratios: Per tap, mean of 1 - cosine over that of the floor.
        local: Per (layer, op), on the same inputs.
        sentence: The result in words.
        agree: Whether they agree.
    """

    paths: tuple[str, str]
    end_to_end: Comparison
    floor: Comparison
    ratios: list[float]
    local: list[LocalComparison] = field(default_factory=list)
    sentence: str = ""
    agree: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON."""
        own = {"paths": self.paths, "ratios": self.ratios, "sentence": self.sentence, "agree": self.agree}
        both = {"end_to_end": asdict(self.end_to_end), "floor": asdict(self.floor)}
        return {**own, **both, "local": [comparison.to_json() for comparison in self.local]}


class _Distances:
    """Collect the distances of pairs of samples."""

    def __init__(self, names: list[str], head: TargetHead | None) -> None:
        self._names, self._head, self._sums = names, head, Sums(len(names))
        self._apart: list[torch.Tensor] = []  # for the percentiles
        self._equal, self._elements = torch.zeros(len(names), dtype=torch.float64), 0
        self._same, self._kl, self._rows = 0, 0.0, 0
        self._worst, self._worst_id, self.samples = -1.0, "", 0

    def add(self, sample_id: str, a_NCH: torch.Tensor, b_NCH: torch.Tensor, loss_mask: torch.Tensor) -> None:
        """Add one sample: states of reference and other, bf16 or float32 [tokens, columns, H]."""
        pairs = compare(a_NCH[None], b_NCH[None])
        pairs = replace(pairs, apart=pairs.apart.nan_to_num(nan=1.0))
        self._sums.add(pairs)
        self._apart.append(pairs.apart[0])
        self._equal += (a_NCH == b_NCH).sum((0, 2)).double()
        self._elements += a_NCH[:, 0].numel()
        self.samples += 1
        mean = float(pairs.apart[0].mean(0).max())
        if mean > self._worst:
            self._worst, self._worst_id = mean, sample_id
        if self._head is not None and self._names[-1] == "final state":
            before = torch.from_numpy(supervised_positions(loss_mask.numpy()) - 1)
            self._add_logits(a_NCH[before, -1], b_NCH[before, -1])

    def _add_logits(self, a_RH: torch.Tensor, b_RH: torch.Tensor) -> None:
        assert self._head is not None
        for rows in zip(a_RH.split(64), b_RH.split(64), strict=True):  # 64 rows of a 248k vocabulary are 64 MB
            a, b = (self._head.logits(part) for part in rows)
            self._same += int((a.argmax(-1) == b.argmax(-1)).sum())
            self._kl += float(kl_nats(a, b).sum(dtype=torch.float64))
            self._rows += len(a)

    def finish(self) -> Comparison:
        """Return the distances."""
        taps = []
        for column, name in enumerate(self._names):
            distance, apart = self._sums.distance(column), torch.cat([part[:, column] for part in self._apart])
            taps.append(
                TapDistance(
                    name,
                    distance.vectors,
                    distance.one_minus_cos_mean,
                    float(np.quantile(apart.numpy(), 0.99)),
                    distance.one_minus_cos_max,
                    distance.rel_frobenius,
                    distance.norm_ratio,
                    float(self._equal[column]) / self._elements,
                    {where: part.one_minus_cos_mean for where, part in self._sums.by_position(column).items()},
                )
            )
        top1, kl = (self._same / self._rows, self._kl / self._rows) if self._rows else (None, None)
        return Comparison(taps, self.samples, top1, kl, self._worst_id)


def recompute(store: Store, count: int, *, target: Path | None = None, device: str | None = None) -> Comparison:
    """Run random samples through the target alone and compare with what is stored.

    Finds errors that no checksum can: swapped rows, a tap off by one, a wrong norm, leaks through padding. Each sample
    runs by itself, right-padded to its batch's width, so that on the same machine the states are equal bit by bit.

    Args:
        store: The store; its samples are picked with a fixed seed.
        count: Samples to recompute.
        target: Checkpoint directory; None for the manifest's.
        device: Where to run.
    """
    picks = list(_pick(len(store), count))
    loaded = load_for(store, target, device)
    capturer = _capturer(store, loaded)
    distances = _Distances(_names(store), load_head(StorePaths(store.path).target))
    plan = read_plan(store.path)
    with observe_kernels(loaded.model):
        for i in picks:
            sample = store.sample(i, kind="bits")
            # through the store's codec as well: then equal states stay equal, bit by bit
            width = _batch_width(plan, sample.sample_id)
            captured = _capture(capturer, _row(i, sample.sample_id, sample.input_ids, sample.loss_mask), width)
            mask = torch.from_numpy(sample.loss_mask)
            arrays = {**captured.arrays, **decoded(captured.arrays, store.specs.values())}
            distances.add(sample.sample_id, _columns(store, arrays), _columns(store, vars(sample)), mask)
    return distances.finish()


def fault(comparison: Comparison, codec: str = "raw") -> str:
    """Return why two sets of states cannot be the same states computed twice, or an empty string.

    Args:
        comparison: Distance of the two sets.
        codec: The coarsest codec that either set went through.
    """
    for tap in comparison.taps:
        if tap.mean > same_mean(codec) or tap.max > SAME_MAX or abs(tap.norm_ratio - 1) > SAME_NORM:
            return (
                f"{tap.name}: 1-cos mean {tap.mean:.2g}, max {tap.max:.2g}, norm ratio {tap.norm_ratio:.4f}; "
                f"worst sample {comparison.worst_sample}"
            )
    return ""


def against(store: Store, other: Store, count: int) -> Comparison:
    """Compare two stores sample by sample, without a model.

    Args:
        store: The reference.
        other: The other one.
        count: Common samples to compare, picked with a fixed seed.

    Raises:
        InputError: ``stores-incomparable`` when they share no tap or no sample with equal tokens.
    """
    taps = [tap for tap in store.taps if tap in other.taps]
    common = sorted(set(store.sample_ids) & set(other.sample_ids), key=store.index_of)
    both_final = FINAL_STATE in store.specs and FINAL_STATE in other.specs
    if not taps or not common:
        raise InputError(
            "stores-incomparable",
            f"{store.path} and {other.path}: {len(common)} samples and taps {taps} in common",
            hint="build both from one corpus with the same taps",
        )
    names = [f"tap {tap}" for tap in taps] + ["final state"] * both_final
    distances = _Distances(names, load_head(StorePaths(store.path).target) if both_final else None)
    for i in _pick(len(common), count):
        pair = [s.sample(s.index_of(common[i]), taps=taps) for s in (store, other)]
        if not torch.equal(pair[0].input_ids, pair[1].input_ids):
            raise InputError(
                "stores-incomparable", f"sample {common[i]!r} has other tokens in {other.path}", hint="same corpus?"
            )
        states = [s.hidden_states if s.final_state is None else _with_final(s, both_final) for s in pair]
        distances.add(common[i], states[0], states[1], pair[0].loss_mask)
    return distances.finish()


def kernels(
    store: Store,
    paths: tuple[Path_, Path_],
    count: int,
    *,
    target: Path | None = None,
    device: str | None = None,
) -> KernelsReport:
    """Run samples of a store on two kernel paths and report whether the paths agree.

    Args:
        store: Gives samples, taps and precision.
        paths: Reference and candidate, such as ``("torch", "fla")``.
        count: Samples.
        target: Checkpoint directory; None for the manifest's.
        device: Where to run.

    Raises:
        ConfigError: ``kernel-choice``.
        EnvironmentFault: ``kernel-missing``, ``kernel-device``.
    """
    rows = [
        _row(i, s.sample_id, s.input_ids, s.loss_mask)
        for i in _pick(len(store), count)
        for s in [store.sample(i, kind="bits")]
    ]
    head = load_head(StorePaths(store.path).target)
    loaded = load_for(store, target, device)
    for path in paths:
        _require_path(loaded, path)
    # no guard: this is the command that shows why a combination is refused
    reference, candidate = (_run(store, loaded, rows, path, guard=False) for path in paths)
    end_to_end = _compare(store, head, rows, reference, candidate)
    batches = [(torch.from_numpy(row.input_ids).long()[None].to(loaded.device), None) for row in rows]
    local = compare_local(loaded.model, batches, candidate="fla" if "fla" in paths else "bound")
    spec = _manifest(store).target
    del loaded  # before the wider one: two copies of a large target need not fit
    wider = load_for(store, target, device, dtype=_WIDER[spec.dtype])
    floor = _compare(store, head, rows, _run(store, wider, rows, "torch", guard=False), reference)
    ratios = [tap.mean / max(base.mean, 1e-18) for tap, base in zip(end_to_end.taps, floor.taps, strict=True)]
    report = KernelsReport(tuple(map(str, paths)), end_to_end, floor, ratios, local)  # type: ignore[arg-type]
    report.agree, report.sentence = _verdict(report, spec.dtype)
    return report


def load_for(store: Store, target: Path | None, device: str | None, dtype: str | None = None) -> LoadedTarget:
    """Load the target of a store.

    Args:
        store: The store.
        target: Checkpoint directory; None for the manifest's.
        device: Where to run; None for CUDA if there is one.
        dtype: Another precision than the store's.
    """
    spec = _manifest(store).target
    change = {"path": str(target) if target else spec.path, "dtype": dtype or spec.dtype}
    spec = spec.model_copy(update=change)
    directory = resolve_path(spec, download=True)
    assert directory is not None
    say(f"loading {directory.name} ({spec.dtype})")
    return load_target(spec, read_shape(spec, directory), directory, pick_device(device))


def _verdict(report: KernelsReport, dtype: str) -> tuple[bool, str]:
    ratio = max(report.ratios)
    times = f"the difference is {ratio:.2g} times the {dtype} noise floor"
    first = first_divergence(report.local)
    if first is not None:
        heads = f", heads {', '.join(map(str, first.bad_heads))}" if first.bad_heads else ""
        what = f"{first.op}: {', '.join(first.beyond) or 'single heads'} beyond the limits{heads}"
        return False, f"these paths differ, beginning at layer {first.layer_index} ({what}); {times}"
    if not ratio <= FLOOR_LIMIT:
        tap = next(t.name for t, r in zip(report.end_to_end.taps, report.ratios, strict=True) if not r <= FLOOR_LIMIT)
        return False, f"these paths differ, beginning at {tap}; {times}"
    return True, f"these paths agree; {times}"


def _require_path(target: LoadedTarget, path: Path_) -> None:
    """Refuse a path that cannot run here, before the other path is run over every sample."""
    for record in planned_records(target.model, path):
        if target.device.type == "cpu" and record.phase == "prefill" and gpu_only(record.implementation):
            raise EnvironmentFault(
                "kernel-device",
                f"{record.layer}: {record.op} is bound to {record.source}, but the model is on the CPU",
                hint="run on a GPU",
            )


def _run(
    store: Store, target: LoadedTarget, rows: Sequence[CorpusSample], path: Path_, *, guard: bool
) -> list[torch.Tensor]:
    # before rounding: otherwise the distance would only show the few elements that bf16 rounds the other way
    capturer = _capturer(store, target, dtype=torch.float32)
    out = []
    progress = Progress(f"states on the {path} path", sum(len(row.input_ids) for row in rows), "tok")
    with observe_kernels(target.model, path, guard=guard):
        for row in rows:
            out.append(_columns(store, _capture(capturer, row, None).arrays))
            progress.advance(len(row.input_ids))
    progress.close()
    return out


def _compare(
    store: Store, head: TargetHead, rows: Sequence[CorpusSample], a: list[torch.Tensor], b: list[torch.Tensor]
) -> Comparison:
    distances = _Distances(_names(store), head)
    for row, x, y in zip(rows, a, b, strict=True):
        distances.add(row.sample_id, x, y, torch.from_numpy(row.loss_mask))
    return distances.finish()


def _capture(capturer: Capturer, row: CorpusSample, width: int | None) -> Captured:
    [pending] = capturer.start([row], width)
    [captured] = pending.samples(check=False)
    return captured


def _columns(store: Store, arrays: dict[str, Any]) -> torch.Tensor:
    """Return stored or captured states as [tokens, columns, H], the final state last; bits become bf16."""
    names = [HIDDEN_STATES, *([FINAL_STATE] if FINAL_STATE in store.specs else [])]
    parts = [as_torch(a, name) if (a := arrays[name]).dtype == np.uint16 else torch.from_numpy(a) for name in names]
    return torch.cat([parts[0], *(part[:, None] for part in parts[1:])], dim=1)


def _with_final(sample: Sample, wanted: bool) -> torch.Tensor:
    final: Any = sample.final_state
    return torch.cat([sample.hidden_states, final[:, None]], dim=1) if wanted else sample.hidden_states


def _names(store: Store) -> list[str]:
    return [f"tap {tap}" for tap in store.taps] + ["final state"] * (FINAL_STATE in store.specs)


def _capturer(store: Store, target: LoadedTarget, dtype: torch.dtype = torch.bfloat16) -> Capturer:
    scheme = store.specs[HIDDEN_STATES].scheme if dtype == torch.bfloat16 else None
    final_state = FINAL_STATE in store.specs
    return Capturer(target, tuple(store.taps), final_state=final_state, topk=0, dtype=dtype, scheme=scheme)


def _manifest(store: Store) -> BuildManifest:
    return parse_manifest(store.manifest["manifest"], str(store.path))


def _batch_width(plan: Any, sample_id: str) -> int:
    """Return the padded width of a sample's forward batch."""
    batch = plan.filter(pc.equal(plan["sample_id"], sample_id))["batch"][0]
    return int(pc.max(plan.filter(pc.equal(plan["batch"], batch))["n_tokens"]).as_py())


def _row(i: int, sample_id: str, ids: Any, mask: Any) -> CorpusSample:
    return CorpusSample(i, sample_id, np.asarray(ids, np.int32), np.asarray(mask, np.uint8))


def _pick(n: int, count: int) -> Iterator[int]:
    """Return sorted random numbers below n, the same at every run.

    Raises:
        InputError: ``store-unfinished``.
    """
    if n == 0:
        raise InputError(
            "store-unfinished", "no sample is stored yet", hint="hscache build, then the same command again"
        )
    yield from sorted(np.random.default_rng(0).choice(n, min(n, count), replace=False).tolist())
