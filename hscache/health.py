"""Check that a captured sample is fit to be stored: before each commit, and again in ``verify``.

States that are not finite, zero, constant or the same for two taps have all been trained on in practice, with a loss
that looked fine. Everything is decided from four numbers per (token, tap): the row's smallest and largest element, its
sum of squares, and whether it equals the next tap's row. They are computed on the states' device for the whole batch,
and only these numbers are copied to the host. Thresholds and reason codes are defined in this file alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

REASONS: dict[str, str] = {
    "non-finite": "a state or logit is NaN or infinite, or the square of a state is",
    "zero-tap": "a tap is zero at every token of the sample",
    "constant-row": "a state vector has one value in all channels",
    "constant-tap": "a tap has the same state at every token of the sample",
    "duplicate-taps": "two neighbouring taps are equal at every token of the sample",
    "length-mismatch": "states and token ids differ in length",
    "out-of-memory": "the sample does not fit into memory even in a batch of its own",
}
"""Why capture rejects a sample; ``hscache.build.plan.REASONS`` are the reasons found before capture."""


# Elements that are measured together: 512 KiB of bf16 and 1 MiB of float32.
_TILE_ELEMENTS = 1 << 18
# A constant vector's mean of squares is its largest square, up to rounding; a real one's is less than a tenth of it.
_CONSTANT = 0.9


@dataclass(frozen=True)
class RowStats:
    """Reduced states of N tokens at L taps, on the host.

    Attributes:
        low: float32 [N, L], smallest element of each state vector; NaN if any element is.
        high: float32 [N, L], largest element.
        square: float32 [N, L], mean of squares.
        same_as_next_tap: bool [N, L-1], the vector equals the next tap's, bit by bit.
        same_as_next_row: bool [N, L], the vector equals the next token's; the last row is False.
    """

    low: NDArray[np.float32]
    high: NDArray[np.float32]
    square: NDArray[np.float32]
    same_as_next_tap: NDArray[np.bool_]
    same_as_next_row: NDArray[np.bool_]

    @classmethod
    def join(cls, *parts: list[torch.Tensor]) -> RowStats:
        """Put the reductions of several state arrays side by side; tensors must be on the host."""
        return cls(*(np.concatenate([t.numpy() for t in column], axis=1) for column in zip(*parts, strict=True)))

    def rows(self, start: int, stop: int) -> RowStats:
        """Return the statistics of a token range."""
        return RowStats(*(getattr(self, name)[start:stop] for name in self.__dataclass_fields__))


def reduce_rows(states: torch.Tensor) -> list[torch.Tensor]:
    """Return the fields of :class:`RowStats` as tensors on the states' device, without waiting for it.

    Args:
        states: bf16 or float32 [N, L, H] on any device.
    """
    import torch

    low, high = torch.aminmax(states, dim=-1)
    # in float32: the squares of massive activations fit bf16's range but not its precision
    square = torch.linalg.vector_norm(states, dim=-1, dtype=torch.float32).square() / states.shape[-1]
    bits = states.view(torch.int16 if states.dtype == torch.bfloat16 else torch.int32)
    next_tap = (bits[:, 1:] == bits[:, :-1]).all(dim=-1)
    next_row = torch.zeros_like(low, dtype=torch.bool)
    next_row[:-1] = (bits[1:] == bits[:-1]).all(dim=-1)
    return [low.float(), high.float(), square, next_tap, next_row]


class RowMeter:
    """Measures states on the host at a speed that suits files: a sixteenth of the time of :func:`reduce_rows`.

    It looks only for signs of a fault, which :func:`may_be_faulty` judges: no fault of :func:`find_fault` lacks them.

    Args:
        width: H, elements of a state vector.
    """

    def __init__(self, width: int) -> None:
        import torch

        self.width, self._tile = width, max(1, _TILE_ELEMENTS // width)
        self._wide = torch.empty(self._tile, width)
        self._bits = np.empty((self._tile, width), np.uint16)

    def measure(self, bits: NDArray[np.uint16]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return mean of squares and largest magnitude of each state vector.

        Args:
            bits: bf16 bits, uint16 [N, L, H], C-contiguous.

        Returns:
            float32 [N, L] twice.
        """
        import torch

        rows = bits.reshape(-1, self.width)
        square, largest = np.empty(len(rows), np.float32), np.empty(len(rows), np.uint32)
        # tiles that stay in the processor's cache from one step to the next
        for start in range(0, len(rows), self._tile):
            tile, stop = rows[start : start + self._tile], min(start + self._tile, len(rows))
            wide, shifted = self._wide[: stop - start], self._bits[: stop - start]
            wide.copy_(torch.from_numpy(tile.view(np.int16)).view(torch.bfloat16))
            square[start:stop] = (torch.linalg.vector_norm(wide, dim=-1).square() / self.width).numpy()
            np.left_shift(tile, 1, out=shifted)  # without the sign, bf16 bits are ordered like the numbers
            largest[start:stop] = shifted.max(axis=-1)
        lead = bits.shape[:-1]
        return square.reshape(lead), (largest << 15).view(np.float32).reshape(lead)


def may_be_faulty(square: NDArray[np.float32], largest: NDArray[np.float32], n_taps: int) -> bool:
    """Return whether a sample shows a sign of a fault, so that :func:`find_fault` has to look at all of its states.

    Args:
        square: float32 [N, L], mean of squares of each state vector.
        largest: float32 [N, L], largest magnitude.
        n_taps: Taps; a column after them is the final state.
    """
    taps = largest[:, :n_taps]
    with np.errstate(over="ignore", invalid="ignore"):
        constant = square >= _CONSTANT * np.square(largest)  # zero, too
    return bool(
        not np.isfinite(square).all()
        or constant.any()
        or (len(largest) > 1 and (largest == largest[0]).all(axis=0).any())
        or (taps[:, 1:] == taps[:, :-1]).all(axis=0).any()
    )


def find_fault(stats: RowStats, taps: list[int] | tuple[int, ...]) -> tuple[str, str]:
    """Return reason code and detail of the first fault found in a sample, or two empty strings.

    Args:
        stats: Statistics of the sample's rows.
        taps: Decoder block of each column, for the detail; a column after them is the final state.
    """
    names = [f"tap {tap}" for tap in taps] + ["final state"] * (stats.low.shape[1] - len(taps))
    finite = np.isfinite(stats.low) & np.isfinite(stats.high) & np.isfinite(stats.square)
    if not finite.all():
        row, column = np.argwhere(~finite)[0]
        return "non-finite", f"{names[column]}, token {row}; {int((~finite).sum())} state vectors in all"
    zero = ((stats.low == 0) & (stats.high == 0)).all(axis=0)
    if zero.any():
        return "zero-tap", f"{names[int(zero.argmax())]}"
    constant = stats.low == stats.high
    if constant.any():
        row, column = np.argwhere(constant)[0]
        return "constant-row", f"{names[column]}, token {row}: every channel is {stats.low[row, column]:g}"
    if len(stats.low) > 1:
        same = stats.same_as_next_row[:-1].all(axis=0)
        if same.any():
            return "constant-tap", f"{names[int(same.argmax())]}: the same state at all {len(stats.low)} tokens"
    twins = stats.same_as_next_tap.all(axis=0)
    if twins.any():
        column = int(twins.argmax())
        return "duplicate-taps", f"{names[column]} equals {names[column + 1]} at every token"
    return "", ""


class Health:
    """Running statistics of what a shard holds, kept in its record.

    Args:
        n_columns: Taps, and one more for the final state.
    """

    def __init__(self, n_columns: int) -> None:
        self._tokens = 0
        self._square = np.zeros(n_columns, np.float64)
        self._log_square = np.zeros(n_columns, np.float64)
        self._largest = np.zeros(n_columns, np.float64)

    def add(self, stats: RowStats) -> None:
        """Count one accepted sample."""
        self.add_rows(stats.square, np.maximum(-stats.low, stats.high))

    def add_rows(self, square: NDArray[np.float32], largest: NDArray[np.float32]) -> None:
        """Count one accepted sample, measured by :class:`RowMeter`.

        Args:
            square: float32 [N, L], mean of squares.
            largest: float32 [N, L], largest magnitude.
        """
        self._tokens += len(square)
        self._square += square.sum(axis=0, dtype=np.float64)
        # the square of a state below 1e-23 is zero
        self._log_square += np.log(np.maximum(square, np.finfo(np.float32).tiny), dtype=np.float64).sum(axis=0)
        self._largest = np.maximum(self._largest, largest.max(axis=0))

    def to_json(self) -> dict[str, Any]:
        """Return ``rms``, ``typical_rms`` and ``max_abs`` per tap, the final state last.

        ``typical_rms`` is the geometric mean over tokens: unlike ``rms`` it is not ruled by the few tokens with massive
        activations, so that shards can be compared.
        """
        n = max(self._tokens, 1)
        return {
            "tokens": self._tokens,
            "rms": [float(x) for x in np.sqrt(self._square / n)],
            "typical_rms": [float(x) for x in np.exp(self._log_square / n / 2)],
            "max_abs": [float(x) for x in self._largest],
        }
