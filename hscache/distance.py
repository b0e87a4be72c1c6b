"""The distance between two sets of states: 1 - cosine, relative L2 distance, ratio of norms, KL through the head.

Cosine alone misses an error of scale, so the relative L2 distance and the ratio of norms stand beside it. 1 - cosine is
half the squared distance of the unit vectors: subtracting a cosine from 1 loses everything below the precision.

Stored states that were computed once more are compared in float64 (:func:`compare`, :class:`Sums`). What a lossy codec
does to every state is measured in float32 while the store is written (:func:`compare_rows`), and its summary is kept in
the shard's record (:class:`CodecError`).

Shape suffixes: N tokens, B batch, T tokens of a sequence, C columns (taps or heads), H features, R rows of logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hscache.store.lossy import WORST_COSINE

if TYPE_CHECKING:
    import torch

POSITIONS = ("first 4", "chunk border", "other")
"""Groups of tokens: the first 4, multiples of 64 and their neighbours, the others. Kernel faults often show at the
borders of the delta rule's chunks."""
_CHUNK = 64

# Recomputing on other hardware changes 1 - cosine by as little as other kernels do; another sample, tap or norm changes
# it by tenths. The two differ by orders of magnitude.
_SAME_MEAN = 1e-3
SAME_MAX = 0.1
"""The largest 1 - cosine of a state computed twice."""
SAME_NORM = 0.02
"""How far the ratio of norms of states computed twice may be from 1."""


def same_mean(codec: str) -> float:
    """Return the largest mean of 1 - cosine of states computed twice.

    Args:
        codec: The coarsest codec that either set went through.
    """
    return _SAME_MEAN if codec != "int4" else 1 - WORST_COSINE[codec]


@dataclass(frozen=True)
class Pairs:
    """Distances of pairs of vectors, float64 [...].

    Attributes:
        apart: 1 - cosine; 1 where one vector is zero, 0 where both are, NaN where one is not finite.
        difference: Square of the difference.
        reference: Square of the reference.
        other: Square of the other vector.
    """

    apart: torch.Tensor
    difference: torch.Tensor
    reference: torch.Tensor
    other: torch.Tensor


def compare(reference: torch.Tensor, other: torch.Tensor) -> Pairs:
    """Compare vectors, [..., H] of any float dtype, pair by pair."""
    import torch

    x, y = reference.double(), other.double()
    difference, square_x, square_y = (z.square().sum(-1) for z in (y - x, x, y))
    apart = (x / square_x.sqrt()[..., None] - y / square_y.sqrt()[..., None]).square().sum(-1) / 2
    zero_x, zero_y = square_x == 0, square_y == 0
    apart = torch.where(zero_x | zero_y, (zero_x ^ zero_y).double(), apart)
    return Pairs(apart, difference, square_x, square_y)


@dataclass(frozen=True)
class Distance:
    """The distance between two sets of vectors."""

    vectors: int
    one_minus_cos_mean: float
    one_minus_cos_max: float
    rel_frobenius: float
    """``|other - reference| / |reference|`` over all vectors."""
    norm_ratio: float
    """``|other| / |reference|`` over all vectors."""


class Sums:
    """Sums over pairs of vectors, by column and by group of :data:`POSITIONS`.

    Args:
        columns: C: taps, or heads.
    """

    def __init__(self, columns: int) -> None:
        import torch

        # vectors, and the sums of the fields of Pairs
        self._sums = torch.zeros(1 + len(fields(Pairs)), columns, len(POSITIONS), dtype=torch.float64)
        self._largest = torch.zeros(columns, len(POSITIONS), dtype=torch.float64)

    def add(self, pairs: Pairs, keep_BT: torch.Tensor | None = None, largest: torch.Tensor | None = None) -> None:
        """Count pairs of vectors.

        Args:
            pairs: Of [B, T, C] vectors.
            keep_BT: bool [B, T], the tokens to count; None for all.
            largest: float64 [B, T, C], what the maximum is taken of; None for 1 - cosine.
        """
        import torch

        values = torch.stack([torch.ones_like(pairs.apart), *vars(pairs).values()])
        largest = pairs.apart if largest is None else largest
        groups_T = position_groups(largest.shape[1]).to(largest.device)
        for group in range(len(POSITIONS)):
            rows = (groups_T == group).expand(largest.shape[:2])
            rows = rows if keep_BT is None else rows & keep_BT
            if bool(rows.any()):
                self._sums[..., group] += values[:, rows].sum(1).cpu()
                self._largest[:, group] = torch.maximum(self._largest[:, group], largest[rows].amax(0).cpu())

    def distance(self, column: int | None = None) -> Distance:
        """Return the distance of all vectors, or of those of one column."""
        columns = slice(column, None if column is None else column + 1)
        return _distance(self._sums[:, columns], self._largest[columns])

    def by_position(self, column: int | None = None) -> dict[str, Distance]:
        """Return the distance of each group of :data:`POSITIONS` that has vectors."""
        columns = slice(column, None if column is None else column + 1)
        groups = {
            name: _distance(self._sums[:, columns, group], self._largest[columns, group])
            for group, name in enumerate(POSITIONS)
        }
        return {name: distance for name, distance in groups.items() if distance.vectors}


def _distance(sums: torch.Tensor, largest: torch.Tensor) -> Distance:
    n, apart, difference, reference, other = sums.flatten(1).sum(1).tolist()
    if not n:
        return Distance(0, 0.0, 0.0, 0.0, 1.0)
    ratios = _root_ratio(difference, reference), _root_ratio(other, reference)
    return Distance(round(n), apart / n, float(largest.max()), *ratios)


def position_groups(tokens: int) -> torch.Tensor:
    """Return the group of each token of a sequence, an index of :data:`POSITIONS`, int64 [T]."""
    import torch

    t = torch.arange(tokens)
    border = (t + 1) % _CHUNK <= 2  # t = 63, 64, 65, 127, ...
    return torch.where(t < 4, 0, torch.where(border, 1, 2))


def _root_ratio(numerator: float, denominator: float) -> float:
    """Return the root of a ratio of sums of squares."""
    if denominator == 0.0:
        return 0.0 if numerator == 0.0 else math.inf
    return math.sqrt(numerator / denominator) if math.isfinite(numerator / denominator) else math.inf


@dataclass(frozen=True)
class RowErrors:
    """Errors of decoded states, for N tokens and C columns (taps, then the final state if stored).

    Attributes:
        rel_l2: float32 [N, C], norm of the difference over the norm of the state.
        apart: float32 [N, C], 1 - cosine.
        kl_nats: float32 [N], KL divergence of the distribution after the decoded final state from the true one; NaN
            where it was not computed.
    """

    rel_l2: NDArray[np.float32]
    apart: NDArray[np.float32]
    kl_nats: NDArray[np.float32]

    def rows(self, start: int, stop: int) -> RowErrors:
        """Return the errors of a token range."""
        return RowErrors(self.rel_l2[start:stop], self.apart[start:stop], self.kl_nats[start:stop])


def compare_rows(states: torch.Tensor, decoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``rel_l2`` and ``apart`` of :class:`RowErrors`, float32 [N, C], on the states' device.

    Args:
        states: bf16 [N, C, H].
        decoded: The same states after encoding and decoding.
    """
    import torch

    columns = []
    for column in range(states.shape[1]):  # one at a time: the float32 of all taps is twice what the taps take
        x, y = states[:, column].float(), decoded[:, column].float()
        long_x, long_y = (torch.linalg.vector_norm(z, dim=-1).clamp_min_(1e-30) for z in (x, y))
        rel_l2 = torch.linalg.vector_norm(y - x, dim=-1) / long_x
        # half the squared distance of unit vectors: 1 - cosine itself loses everything below 1e-7
        apart = torch.linalg.vector_norm(y / long_y[:, None] - x / long_x[:, None], dim=-1).square() / 2
        columns.append((rel_l2, apart))
    rel_l2_NC, apart_NC = (torch.stack(part, dim=1) for part in zip(*columns, strict=True))
    return rel_l2_NC, apart_NC


def kl_nats(true_logits: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return the KL divergence of softmax(logits) from softmax(true_logits), float32 [R], of logits [R, V]."""
    import torch

    log_p, log_q = (torch.log_softmax(part.float(), dim=-1) for part in (true_logits, logits))
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def spread(rows: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return at most ``count`` of these rows, evenly spaced."""
    picked: NDArray[np.int64] = rows[np.unique(np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(int))]
    return picked


class CodecError:
    """What a lossy codec did to the states of a shard, kept in its record.

    Memory: 8 bytes for each state vector of the shard.
    """

    def __init__(self) -> None:
        self._rel_l2: list[NDArray[np.float32]] = []
        self._apart: list[NDArray[np.float32]] = []
        self._kl: list[NDArray[np.float32]] = []

    def add(self, errors: RowErrors) -> None:
        """Count one sample."""
        self._rel_l2.append(errors.rel_l2)
        self._apart.append(errors.apart)
        self.add_kl(errors.kl_nats[~np.isnan(errors.kl_nats)])

    def add_kl(self, kl_nats: NDArray[np.float32]) -> None:
        """Count KL divergences of supervised tokens, float32 [R]."""
        self._kl.append(kl_nats)

    def to_json(self) -> dict[str, Any]:
        """Return mean and 99th percentile of the relative L2 error, and the worst token's cosine, per tap, the final
        state last; and the mean KL divergence through the head over ``kl_rows`` supervised tokens (None without any).
        """
        if not self._rel_l2:
            return {"tokens": 0, "rel_l2": [], "rel_l2_p99": [], "worst_cosine": [], "kl_nats": None, "kl_rows": 0}
        rel_l2, kl = np.concatenate(self._rel_l2), np.concatenate(self._kl)
        return {
            "tokens": len(rel_l2),
            "rel_l2": [float(x) for x in rel_l2.mean(axis=0, dtype=np.float64)],
            "rel_l2_p99": [float(x) for x in np.quantile(rel_l2, 0.99, axis=0)],
            "worst_cosine": [1 - float(x) for x in np.concatenate(self._apart).max(axis=0)],
            "kl_nats": float(kl.mean(dtype=np.float64)) if len(kl) else None,
            "kl_rows": len(kl),
        }
