"""Two implementations of the same op on the same inputs, inside one forward pass.

Differences between two whole models grow with depth, so that no fixed limit separates a healthy kernel from a broken
one. Here each optional op is run twice at its place, on the very tensors that the model gives it; the model goes on
with the reference's output, so a fault of one layer is not seen by the next. The distance is then flat with depth and
fixed limits work.

For each (layer, op) the outputs are compared vector by vector, one vector per token and head, as
:mod:`hscache.distance` measures them. Costs one call of each implementation per op, and the outputs once in float64.

Shape suffixes: B batch, T tokens, H heads, D features of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from hscache.console import plain
from hscache.distance import Distance, Sums, compare
from hscache.errors import ConfigError
from hscache.kernels.guards import import_op
from hscache.kernels.observe import call, intercept
from hscache.kernels.sites import OPS, Function, Site, classify, find_sites, source_hash


@dataclass(frozen=True)
class Limits:
    """The largest difference of two correct implementations; a larger one is a fault."""

    one_minus_cos_mean: float
    one_minus_cos_max: float
    rel_frobenius: float
    norm_ratio: float
    """Largest distance of the norm ratio from 1, beside what rounding alone may move it (:func:`noise`)."""


LIMITS = {
    torch.float32: Limits(1e-9, 1e-9, 1e-4, 1e-5),
    torch.bfloat16: Limits(1e-4, 5e-3, 2e-2, 2e-4),
    torch.float16: Limits(1e-5, 5e-4, 5e-3, 1e-4),
}
"""By the dtype in which the op's output is given; bfloat16 as measured at 64 layers with a margin of about ten."""


def noise(distance: Distance, limits: Limits) -> float:
    """Return how far rounding may move the norm ratio.

    Errors of relative size r, uncorrelated with the values, move the norm of n vectors by about r / sqrt(n); four
    times that is allowed. Only the part of the distance that is not a change of scale counts as such errors. Beside
    it, the scale of a lone vector hangs on the rounding of a single product (a delta rule over one token is (q.k) v),
    so that many vectors are needed to tell a wrong scale from that.
    """
    sideways = math.sqrt(max(distance.rel_frobenius**2 - (distance.norm_ratio - 1.0) ** 2, 0.0))
    return (4.0 * sideways + limits.rel_frobenius) / math.sqrt(max(distance.vectors, 1))


def measures_beyond(distance: Distance, limits: Limits) -> tuple[str, ...]:
    """Return the names of the measures beyond ``limits``; NaN is beyond any limit."""
    measured = {
        "one_minus_cos_mean": distance.one_minus_cos_mean,
        "one_minus_cos_max": distance.one_minus_cos_max,
        "rel_frobenius": distance.rel_frobenius,
        "norm_ratio": abs(distance.norm_ratio - 1.0) - noise(distance, limits),
    }
    return tuple(name for name, value in measured.items() if not value <= getattr(limits, name))


@dataclass(frozen=True)
class LocalComparison:
    """One op of one layer: candidate against reference on the same inputs."""

    layer: str
    layer_index: int | None
    op: str
    reference: str
    candidate: str
    """``module:qualname``; with the hash beside it, what was compared."""
    candidate_hash: str | None
    dtype: str
    total: Distance
    """In its maximum a vector smaller than its head's root mean square counts by its share of the mean square."""
    by_head: tuple[Distance, ...]
    by_position: dict[str, Distance]
    """By :data:`hscache.distance.POSITIONS`."""
    beyond: tuple[str, ...]
    """Measures of ``total`` beyond the limits."""
    bad_heads: tuple[int, ...]
    """Heads beyond the limits on their own."""

    @property
    def ok(self) -> bool:
        """Whether the two implementations agree here."""
        return not self.beyond and not self.bad_heads

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values; infinities and NaN become strings."""
        document: dict[str, Any] = plain(asdict(self) | {"ok": self.ok})
        return document


def compare_local(
    model: nn.Module,
    input_ids: torch.Tensor | Iterable[tuple[torch.Tensor, torch.Tensor | None]],
    attention_mask: torch.Tensor | None = None,
    *,
    candidate: Literal["fla", "bound"] = "fla",
    ops: Sequence[str] | None = None,
    limits: Limits | None = None,
) -> list[LocalComparison]:
    """Run the torch reference and a candidate side by side in every layer, and measure the difference.

    No guard is applied: this is the means by which a known-bad combination is shown to be bad.

    Args:
        model: A loaded model in eval mode, on a device where the candidate runs.
        input_ids: int64 [batch, tokens], or several batches of (ids, mask); the distances are over all of them.
        attention_mask: int64 [batch, tokens], 1 for real tokens; padding is not compared.
        candidate: ``fla`` imports fla's own op, ``bound`` takes what transformers bound.
        ops: Ops to compare; by default every prefill op that has a candidate other than the reference.
        limits: By default :data:`LIMITS` for the dtype of each op's output.

    Returns:
        One comparison per (layer, op), in the order of layers; empty for a model without optional ops.

    Raises:
        ConfigError: ``kernel-choice`` when the model has optional ops but none with such a candidate.
        EnvironmentFault: ``kernel-missing`` when fla cannot be imported.
    """
    sites = find_sites(model)
    candidates = {(s.layer, s.op): f for s in sites if (f := _candidate(s, candidate, ops)) is not None}
    if sites and not candidates:
        raise ConfigError(
            "kernel-choice", f"kernels: no op of this model has a {candidate} implementation beside the reference",
            hint="hscache doctor shows what each op is bound to",
        )  # fmt: skip
    batches = [(input_ids, attention_mask)] if isinstance(input_ids, torch.Tensor) else list(input_ids)
    sums: dict[tuple[str, str], _Sums] = {}
    for ids, mask in batches:
        _run_batch(model, sites, candidates, ids, mask, sums)
    return [
        _finish(site, candidates[site.layer, site.op], sums[site.layer, site.op], limits)
        for site in sites
        if (site.layer, site.op) in sums
    ]


def first_divergence(comparisons: Sequence[LocalComparison]) -> LocalComparison | None:
    """Return the comparison of the lowest layer that is beyond its limits, None when all agree."""
    bad = [comparison for comparison in comparisons if not comparison.ok]
    return min(bad, key=lambda c: -1 if c.layer_index is None else c.layer_index, default=None)


class _Sums(Sums):
    """Sums over all batches, by head.

    Args:
        heads: H.
        dtype: Of the op's output.
    """

    def __init__(self, heads: int, dtype: torch.dtype) -> None:
        super().__init__(heads)
        self.heads, self.dtype = heads, dtype

    def add_outputs(self, reference_BTHD: torch.Tensor, candidate_BTHD: torch.Tensor, keep_BT: torch.Tensor) -> None:
        pairs = compare(reference_BTHD, candidate_BTHD)
        pairs = replace(pairs, apart=pairs.apart.nan_to_num(nan=math.inf))
        # a vector that came out small by cancellation has lost its direction to rounding in a healthy kernel too, and
        # among many vectors there is one: in the maximum it counts by its share of the head's mean square
        share = torch.maximum(pairs.reference, pairs.other) / pairs.reference[keep_BT].mean(0)
        self.add(pairs, keep_BT, largest=pairs.apart * share.clamp(max=1.0).nan_to_num(nan=1.0))


def _run_batch(
    model: nn.Module,
    sites: Sequence[Site],
    candidates: dict[tuple[str, str], Function],
    input_ids: torch.Tensor,
    mask: torch.Tensor | None,
    sums: dict[tuple[str, str], _Sums],
) -> None:
    keep_BT = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()

    def route(site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = (site.layer, site.op)
        function = candidates.get(key)
        if function is None or site.reference is None:
            return call(site, site.reference or site.bound(), args, kwargs)
        # both get copies: a kernel may write into its inputs
        other = call(site, function, _copies(args), {name: _copy(value) for name, value in kwargs.items()})
        output = call(site, site.reference, args, kwargs)
        reference_BTHD, candidate_BTHD = _by_head(site.op, output), _by_head(site.op, other)
        if key not in sums:
            sums[key] = _Sums(reference_BTHD.shape[2], reference_BTHD.dtype)
        sums[key].add_outputs(reference_BTHD, candidate_BTHD, keep_BT)
        return output

    with intercept(sites, route, lambda *_: None), torch.inference_mode():
        model(input_ids=input_ids, attention_mask=mask, use_cache=False)


def _candidate(site: Site, candidate: str, ops: Sequence[str] | None) -> Function | None:
    facts = OPS.get(site.op)
    if facts is None or facts.phase != "prefill" or site.reference is None or (ops is not None and site.op not in ops):
        return None
    if candidate == "fla":
        if facts.package != "fla":
            return None
        bound = site.bound()
        return bound if classify(bound)[0] == "fla" else import_op(site.op)
    bound = site.bound()
    return None if bound is site.reference else bound


def _by_head(op: str, output: Any) -> torch.Tensor:
    """Return an op's output as [batch, tokens, heads, features]."""
    tensor: torch.Tensor = output[0] if isinstance(output, tuple) else output
    if tensor.ndim == 4:
        return tensor
    # convs and Mamba-1 scans keep time last: [batch, channels, tokens]
    return tensor.transpose(1, 2).unsqueeze(2)


def _finish(site: Site, candidate: Function, sums: _Sums, limits: Limits | None) -> LocalComparison:
    assert site.reference is not None
    limits = limits or LIMITS.get(sums.dtype, LIMITS[torch.float32])
    total, heads = sums.distance(), tuple(sums.distance(h) for h in range(sums.heads))
    return LocalComparison(
        layer=site.layer,
        layer_index=site.layer_index,
        op=site.op,
        reference=classify(site.reference)[1],
        candidate=classify(candidate)[1],
        candidate_hash=source_hash(candidate),
        dtype=str(sums.dtype).removeprefix("torch."),
        total=total,
        by_head=heads,
        by_position=sums.by_position(),
        beyond=measures_beyond(total, limits),
        bad_heads=tuple(h for h, distance in enumerate(heads) if measures_beyond(distance, limits)),
    )


def _copies(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_copy(value) for value in values)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
