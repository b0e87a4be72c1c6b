"""The tree of N nodes holds the N best prefixes, by brute force over all of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hstrain.score.ddtree import Tree, accepted_lengths, best_first
from hypothesis import given
from hypothesis import strategies as st


def sorted_slots(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return candidate ids and log-probabilities of every slot, the most likely first."""
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    order = np.argsort(-logprobs, -1, kind="stable")
    return order, np.take_along_axis(logprobs, order, -1)


def prefixes(ids: np.ndarray, logprobs: np.ndarray) -> dict[tuple[int, ...], float]:
    """Return every continuation of every length with its score."""
    scores = [dict(zip(row.tolist(), values.tolist(), strict=True)) for row, values in zip(ids, logprobs, strict=True)]
    return {
        tokens: sum(slot[token] for slot, token in zip(scores, tokens, strict=False))
        for depth in range(1, len(ids) + 1)
        for tokens in itertools.product(*scores[:depth])
    }


def continuations(tree: Tree) -> list[tuple[int, ...]]:
    """Return what each node spells from the root."""
    spelled: list[tuple[int, ...]] = []
    for parent, token in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True):
        spelled.append((*(spelled[parent] if parent >= 0 else ()), token))
    return spelled


@st.composite
def blocks(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    slots, vocabulary = draw(st.integers(1, 4)), draw(st.integers(2, 5))
    # few distinct values, so that ties occur
    value = st.one_of(st.integers(-3, 3).map(float), st.floats(-6, 6, width=32))
    return sorted_slots(np.array(draw(st.lists(value, min_size=slots * vocabulary, max_size=slots * vocabulary)))
                        .reshape(slots, vocabulary))  # fmt: skip


@given(blocks(), st.integers(1, 70))
def test_the_nodes_are_the_best_prefixes(block, size):
    ids, logprobs = block
    every = prefixes(ids, logprobs)
    tree = best_first(ids, logprobs, size)
    spelled = continuations(tree)
    assert len(set(spelled)) == len(spelled) == min(size, len(every))
    np.testing.assert_allclose(tree.scores, [every[tokens] for tokens in spelled], atol=1e-9)
    np.testing.assert_allclose(tree.scores, sorted(every.values(), reverse=True)[: len(tree)], atol=1e-9)


@given(blocks(), st.integers(1, 70))
def test_a_tree_is_closed_and_begins_with_every_smaller_tree(block, size):
    tree = best_first(*block, size)
    assert all(parent < node for node, parent in enumerate(tree.parents.tolist()))
    smaller = best_first(*block, max(1, size // 2))
    for name in ("parents", "tokens", "scores"):
        assert getattr(smaller, name).tolist() == getattr(tree, name).tolist()[: len(smaller)]


@given(blocks(), st.data())
def test_what_is_accepted_is_the_longest_prefix_inside(block, data):
    ids, logprobs = block
    truth = [data.draw(st.integers(0, ids.shape[1] - 1)) for _ in ids]
    sizes = (1, 2, 4, 8, 16)
    lengths = []
    for size in sizes:
        tree = best_first(ids, logprobs, size)
        inside = set(continuations(tree))
        lengths.append(max((d for d in range(1, len(truth) + 1) if tuple(truth[:d]) in inside), default=0))
        assert len(tree.path(truth)) == lengths[-1]
    assert lengths == sorted(lengths)
    assert accepted_lengths(ids[None], logprobs[None], [truth], sizes).tolist() == [lengths]


@given(blocks(), st.integers(1, 5))
def test_as_many_candidates_as_nodes_lose_nothing(block, size):
    ids, logprobs = block
    whole, cut = best_first(ids, logprobs, size), best_first(ids[:, :size], logprobs[:, :size], size)
    assert (whole.parents.tolist(), whole.tokens.tolist()) == (cut.parents.tolist(), cut.tokens.tolist())


def test_one_node_more_than_the_greedy_chain():
    logits = torch.full((3, 6), -9.0)
    logits[range(3), [4, 1, 2]] = 0.0
    logits[1, 5] = -0.1
    logprobs, ids = logits.log_softmax(-1).sort(descending=True, stable=True)
    tree = best_first(ids, logprobs, 5)
    assert sorted(continuations(tree)) == [(4,), (4, 1), (4, 1, 2), (4, 5), (4, 5, 2)]
    assert len(tree.path([4, 5, 2])) == 3
    assert len(tree.path([4, 5, 3])) == 2
    assert len(tree.path([3, 5, 2])) == 0


def test_tokens_beyond_a_sample_are_never_accepted():
    ids, logprobs = sorted_slots(np.zeros((2, 4)))
    assert accepted_lengths(ids[None], logprobs[None], [[0, -1]], (64,)).tolist() == [[1]]


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_nothing_to_draft_is_an_empty_tree(shape):
    tree = best_first(np.zeros(shape, int), np.zeros(shape), 8)
    assert len(tree) == 0
    assert len(tree.path([1, 2])) == 0
