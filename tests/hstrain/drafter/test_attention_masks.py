"""What a query sees: both ways of computing it against a mask written down rule by rule."""

from __future__ import annotations

import pytest
import torch
from hstrain.drafter import attention as masks
from hstrain.drafter.attention import Blocks, attend
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

A, K, D = 4, 2, 8
Documents = list[tuple[int, list[int]]]
"""Rows and anchors of each document."""

FIXED: Documents = [(12, [1, 2, 3, 12]), (7, [4, 7]), (1, [1]), (30, [5, 11, 17, 18, 30])]


def blocks_of(documents: Documents, size: int, backend: masks.Backend = "sdpa", first: int = 0) -> Blocks:
    """Return blocks over documents whose rows begin at position ``first``."""
    anchors, lo, hi, row = [], [], [], 0
    for n, some in documents:
        for a in some:
            anchors.append(first + a)
            lo.append(row)
            hi.append(row + a)
        row += n
    return Blocks(torch.tensor(anchors), torch.tensor(lo), torch.tensor(hi), size, row, backend)


def rules(documents: Documents, size: int, window: int | None) -> Tensor:
    """Return whether query q sees key k, bool [Q, T + Q], by going through all pairs."""
    context = [(d, t) for d, (n, _) in enumerate(documents) for t in range(n)]
    slots = [(d, a, s) for d, (_, anchors) in enumerate(documents) for a in anchors for s in range(size)]
    seen = torch.zeros(len(slots), len(context) + len(slots), dtype=torch.bool)
    for q, (d, anchor, slot) in enumerate(slots):
        at = anchor + slot
        for k, (other, t) in enumerate(context):
            seen[q, k] = other == d and t < anchor and (window is None or t >= at - (window - 1))
        for k, (other, a, s) in enumerate(slots, len(context)):
            own = (other, a) == (d, anchor)
            seen[q, k] = own and (window is None or 0 <= slot - s < window)
    return seen


def dense(q: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], seen: Tensor) -> Tensor:
    """Attention head by head under a dense mask, float64 inside."""
    k, v = (torch.cat(pair).double() for pair in zip(context, own, strict=True))
    out = []
    for head in range(q.shape[1]):
        of = head // (q.shape[1] // k.shape[1])
        scores = (q[:, head].double() @ k[:, of].T / q.shape[2] ** 0.5).masked_fill(~seen, -torch.inf)
        out.append(scores.softmax(-1) @ v[:, of])
    return torch.stack(out, 1).to(q.dtype)


def random_inputs(blocks: Blocks, heads: int = A, groups: int = K, seed: int = 0) -> list[Tensor]:
    """Return queries, keys and values of the context, keys and values of the slots, all of which want a gradient."""
    made = torch.Generator().manual_seed(seed)
    Q, T = len(blocks) * blocks.size, blocks.total_rows
    shapes = [(Q, heads, D), (T, groups, D), (T, groups, D), (Q, groups, D), (Q, groups, D)]
    return [torch.randn(shape, generator=made).requires_grad_() for shape in shapes]


def compare(documents: Documents, size: int, window: int | None, heads: int = A, groups: int = K) -> None:
    blocks = blocks_of(documents, size)
    inputs = random_inputs(blocks, heads, groups)
    q, ck, cv, ok, ov = inputs
    got = attend(q, (ck, cv), (ok, ov), blocks, window)
    want = dense(q, (ck, cv), (ok, ov), rules(documents, size, window))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    towards = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    both = (torch.autograd.grad(out, inputs, towards, allow_unused=True) for out in (got, want))
    for name, a, b in zip(("q", "context k", "context v", "own k", "own v"), *both, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


WINDOWS = [None, 1, 3, 4, 6, 1000]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (3, 3), (4, 1)])
def test_grouped_attention_is_the_dense_one(window: int | None, heads: int, groups: int) -> None:
    compare(FIXED, 4, window, heads, groups)


@st.composite
def some_documents(draw: st.DrawFn) -> Documents:
    documents = []
    for _ in range(draw(st.integers(1, 4))):
        n = draw(st.integers(1, 14))
        documents.append((n, sorted(draw(st.sets(st.integers(1, n), min_size=1, max_size=5)))))
    return documents


@given(some_documents(), st.integers(2, 6), st.none() | st.integers(1, 9), st.integers(1, 30))
def test_however_documents_lie_and_groups_are_cut(
    documents: Documents, size: int, window: int | None, cut: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "GROUP_QUERIES", cut)
        compare(documents, size, window)


@pytest.mark.filterwarnings("ignore:.*flex_attention.*:UserWarning")
@pytest.mark.parametrize("window", WINDOWS)
@torch.no_grad()  # on a CPU flex_attention has no backward pass
def test_flex_attention_is_the_dense_one(window: int | None) -> None:
    blocks = blocks_of(FIXED, 4, "flex")
    q, ck, cv, ok, ov = (x.detach() for x in random_inputs(blocks))
    got = attend(q, (ck, cv), (ok, ov), blocks, window)
    torch.testing.assert_close(got, dense(q, (ck, cv), (ok, ov), rules(FIXED, 4, window)), atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.*flex_attention.*:UserWarning")
@torch.no_grad()
def test_flex_attention_over_more_than_one_tile_of_its_sparse_mask() -> None:
    documents: Documents = [(90, list(range(20, 90, 9))), (40, [3, 39]), (60, list(range(1, 60, 7)))]
    blocks = blocks_of(documents, 8, "flex")
    for window in (None, 24):  # both masks of the same blocks
        q, ck, cv, ok, ov = (x.detach() for x in random_inputs(blocks))
        got = attend(q, (ck, cv), (ok, ov), blocks, window)
        torch.testing.assert_close(got, dense(q, (ck, cv), (ok, ov), rules(documents, 8, window)), atol=1e-5, rtol=1e-5)


def test_a_window_is_measured_from_where_the_context_lies_in_its_sample() -> None:
    """A window of a long sample: rows begin at position 500, and only distances count."""
    near, far = blocks_of(FIXED, 4), blocks_of(FIXED, 4, first=500)
    q, ck, cv, ok, ov = random_inputs(near)
    for window in (None, 4):
        a, b = (attend(q, (ck, cv), (ok, ov), blocks, window) for blocks in (near, far))
        assert torch.equal(a, b)
    assert (far.positions - near.positions == 500).all()


def test_masks_of_a_group_cover_its_own_sample_and_blocks_alone() -> None:
    blocks = blocks_of(FIXED, 4)
    assert [(some.start, some.stop) for some, _ in blocks.groups] == [(0, 4), (4, 6), (6, 7), (7, 12)]
    assert [(rows.start, rows.stop) for _, rows in blocks.groups] == [(0, 12), (12, 19), (19, 20), (20, 50)]
    for window in (None, 6):
        shapes = [tuple(mask.shape) for mask in blocks.group_masks(window)]
        assert shapes == [(16, 12 + 16), (8, 7 + 8), (4, 1 + 4), (20, 30 + 20)]


def test_a_long_sample_is_cut_into_groups_that_pay_for_what_they_see() -> None:
    many: Documents = [(4000, list(range(10, 4000, 10)))]
    blocks = blocks_of(many, 16)
    assert all((some.stop - some.start) * 16 <= masks.GROUP_QUERIES for some, _ in blocks.groups)
    assert sum(some.stop - some.start for some, _ in blocks.groups) == len(blocks)
    assert [rows.stop for _, rows in blocks.groups] == [int(blocks.hi[some].max()) for some, _ in blocks.groups]


def test_masks_are_made_once_a_window() -> None:
    blocks = blocks_of(FIXED, 4)
    assert blocks.group_masks(6) is blocks.group_masks(6)
    assert not torch.equal(blocks.group_masks(6)[3], blocks.group_masks(None)[3])
