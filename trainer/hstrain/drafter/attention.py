"""The attention mask of a block's queries, and attention under that mask.

A block with its anchor at position a sees the context rows of its own sample strictly before a, and itself:

- a full layer: all of the block, both ways;
- a sliding layer with window W: of the block the slots up to the query, and of the context only positions
  >= query's position - (W - 1).

The rows of a sample are consecutive and in order, so the context that a block sees is one range of rows. Tests hold
three implementations equal: ``sdpa`` takes the blocks of one sample in small groups, with that sample's rows and these
blocks only, so that no mask is larger than (queries of the group) x (rows + queries of the group); ``flex`` is one call
with a sparse block mask, for CUDA; the tests have a dense one.

Shapes: see :mod:`hstrain.drafter.model`; G blocks of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

Backend = Literal["sdpa", "flex"]
GROUP_QUERIES = 256
"""Queries that share one sdpa call: larger groups need fewer calls, but every query then computes over more rows."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """N blocks over context rows of one or more samples.

    Attributes:
        anchors: int64 [N] position of each anchor in its sample. The blocks of a sample are consecutive, anchors
        ascend. lo: int64 [N] first context row of the block's sample. hi: int64 [N] end of the rows that the block
        sees: those strictly before its anchor.
        size: B.
        total_rows: T, the number of context rows.
        backend: The implementation of attention.
    """

    anchors: Tensor
    lo: Tensor
    hi: Tensor
    size: int
    total_rows: int
    backend: Backend = "sdpa"
    _masks: dict[int | None, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.anchors)

    @cached_property
    def positions(self) -> Tensor:
        """int64 [N * B]: anchor, anchor + 1, ... of every block."""
        return (self.anchors[:, None] + torch.arange(self.size, device=self.anchors.device)).flatten()

    @cached_property
    def groups(self) -> list[tuple[slice, slice]]:
        """Blocks of each group, and the context rows that the last of them sees; a group has blocks of one sample."""
        lo, hi = self.lo.tolist(), self.hi.tolist()
        limit, made, first = max(1, GROUP_QUERIES // self.size), [], 0
        for n in range(1, len(lo) + 1):
            if n == len(lo) or lo[n] != lo[first] or n - first == limit:
                made.append((slice(first, n), slice(lo[first], max(hi[first:n]))))
                first = n
        return made

    def group_masks(self, window: int | None) -> list[Tensor]:
        """Return for each group which keys a query sees: bool [G * B, rows + G * B]; cached for each window."""
        if window not in self._masks:
            self._masks[window] = [self._group_mask(blocks, rows, window) for blocks, rows in self.groups]
        return self._masks[window]  # type: ignore[no-any-return]

    def _group_mask(self, blocks: slice, rows: slice, window: int | None) -> Tensor:
        hi, device = self.hi[blocks, None, None], self.anchors.device
        slot = torch.arange(self.size, device=device)
        row = torch.arange(rows.start, rows.stop, device=device)
        seen = (row < hi).expand(-1, self.size, -1)
        own = torch.ones(self.size, self.size, dtype=torch.bool, device=device)
        if window is not None:
            # the position of a row is anchor - (hi - row), that of a query anchor + slot
            seen = seen & (row - hi >= slot[:, None] - (window - 1))
            own = (slot <= slot[:, None]) & (slot > slot[:, None] - window)
        G = len(hi)
        same = torch.eye(G, dtype=torch.bool, device=device)
        inside = (same[:, None, :, None] & own[None, :, None, :]).reshape(G * self.size, G * self.size)
        return torch.cat((seen.reshape(G * self.size, -1), inside), 1)

    def flex_mask(self, window: int | None) -> Any:
        """Return the block mask of ``flex_attention`` over keys [context rows, block slots]; cached for each window."""
        key = -1 if window is None else window
        if key not in self._masks:
            self._masks[key] = self._flex_mask(window)
        return self._masks[key]

    def _flex_mask(self, window: int | None) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        T, B, lo, hi = self.total_rows, self.size, self.lo, self.hi

        def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            n, slot = q // B, q % B
            row = torch.clamp(kv, max=T - 1)
            in_context = (kv < T) & (row >= lo[n]) & (row < hi[n])
            own_slot = (kv - T) % B
            in_block = (kv >= T) & ((kv - T) // B == n)
            if window is not None:
                in_context = in_context & (row - hi[n] >= slot - (window - 1))
                in_block = in_block & (own_slot <= slot) & (own_slot > slot - window)
            return in_context | in_block

        Q = len(self) * B
        return create_block_mask(visible, None, None, Q, T + Q, device=str(lo.device))


def attend(
    q_QAD: Tensor,
    context: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    blocks: Blocks,
    window: int | None,
) -> Tensor:
    """Return the attention of block queries over the context and their blocks.

    Args:
        q_QAD: [Q, A, D] queries.
        context: [T, K, D] keys and values of the context rows.
        own: [Q, K, D] keys and values of the block slots.
        blocks: The blocks, which decide what a query sees.
        window: Window of a sliding layer, in tokens; None for a full layer.

    Returns:
        [Q, A, D].
    """
    if blocks.backend == "flex":
        return _flex(q_QAD, context, own, blocks, window)
    return torch.cat(list(_by_group(q_QAD, context, own, blocks, window)))


def _by_group(
    q_QAD: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], blocks: Blocks, window: int | None
) -> Iterator[Tensor]:
    repeats = q_QAD.shape[1] // own[0].shape[1]
    for (some, rows), mask in zip(blocks.groups, blocks.group_masks(window), strict=True):
        queries = slice(some.start * blocks.size, some.stop * blocks.size)
        k, v = (_heads_first(torch.cat((c[rows], o[queries])), repeats) for c, o in zip(context, own, strict=True))
        q = _heads_first(q_QAD[queries], 1)
        yield F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), attn_mask=mask)[0].transpose(0, 1)


def _flex(
    q_QAD: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], blocks: Blocks, window: int | None
) -> Tensor:
    k, v = (_heads_first(torch.cat(pair), 1) for pair in zip(context, own, strict=True))
    q = _heads_first(q_QAD, 1)
    run = _flex_attention(q.device.type)
    gqa = q_QAD.shape[1] != own[0].shape[1]
    mixed = run(q, k.to(q.dtype), v.to(q.dtype), block_mask=blocks.flex_mask(window), enable_gqa=gqa)
    return mixed[0].transpose(0, 1)  # type: ignore[no-any-return]


def _flex_attention(device: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    if device not in _compiled:
        # on a CPU, where only tests use it, the compiled kernel has no backward pass
        function: Callable[..., Any] = flex_attention
        _compiled[device] = torch.compile(function, dynamic=True) if device == "cuda" else function
    return _compiled[device]


_compiled: dict[str, Callable[..., Any]] = {}


def _heads_first(x_nAD: Tensor, repeats: int) -> Tensor:
    """Return [1, A * repeats, n, D]."""
    x = x_nAD.transpose(0, 1)
    return (x if repeats == 1 else x.repeat_interleave(repeats, 0))[None]
