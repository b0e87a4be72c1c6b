"""Reusable memory that samples are read into.

The first write to fresh memory costs a page fault per 4 KiB, which makes reading 50 MB into new arrays twice to ten
times as slow as into used ones. So a trainer makes its buffers once, as large as its longest sample, and each sample is
a set of views of them. On a machine with CUDA they are page-locked, because only then are copies to the device
asynchronous.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hscache.store.layout import ArraySpec

_PAGE_BYTES = 4096


class Buffers:
    """Room for one sample, or a token range of one.

    Args:
        specs: Arrays of the store.
        n_tokens: Longest range that it holds.
        n_taps: Taps of the states; None for all of the store.
        pinned: Page-lock the memory; needs CUDA.

    Attributes:
        n_tokens: Longest range that it holds.
        nbytes: Size of the memory. Unless pinned, a page is allocated when it is first written to.
    """

    def __init__(
        self, specs: Iterable[ArraySpec], n_tokens: int, *, n_taps: int | None = None, pinned: bool = False
    ) -> None:
        self.n_tokens, self._n_taps = n_tokens, 0
        self._arrays: dict[str, NDArray[Any]] = {}
        for spec in specs:
            inner = spec.inner
            if spec.by_tap:
                self._n_taps = inner[0] if n_taps is None else n_taps
                inner = (self._n_taps, *inner[1:])
            # the supervised tokens of a range are at most its tokens
            self._arrays[spec.name] = _room((n_tokens, *inner), spec.dtype, pinned=pinned)
        self.nbytes = sum(array.nbytes for array in self._arrays.values())

    @property
    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """The memory by array name, as stored: [n_tokens, ...]."""
        return self._arrays

    def check(self, n_tokens: int, n_taps: int) -> None:
        """Check that a range fits.

        Raises:
            ValueError: Too many tokens, or another number of taps.
        """
        if n_tokens > self.n_tokens or n_taps != self._n_taps:
            room = f"{self.n_tokens} tokens of {self._n_taps}"
            raise ValueError(f"{n_tokens} tokens of {n_taps} taps do not fit into buffers for {room}")


def page_aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return uninitialised memory that begins at a page boundary.

    The kernel copies out of its cache at a quarter to an eighth of the usual speed when the destination's offset in its
    page is a few bytes larger than the source's. numpy's memory begins 16 bytes into a page, so the first chunks of
    every file would be copied that slowly.
    """
    n_bytes = math.prod(shape) * dtype.itemsize
    room = np.empty(n_bytes + _PAGE_BYTES, np.uint8)
    skip = -room.ctypes.data % _PAGE_BYTES
    return room[skip : skip + n_bytes].view(dtype).reshape(shape)


def _room(shape: tuple[int, ...], dtype: np.dtype[Any], *, pinned: bool) -> NDArray[Any]:
    if not pinned:
        return page_aligned(shape, dtype)
    import torch

    n_bytes = math.prod(shape) * dtype.itemsize
    room: NDArray[Any] = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    return room.view(dtype).reshape(shape)
