"""Best-first draft trees over the marginals of a block (DDTree, arXiv 2604.12989).

A drafter that fills a block in one pass gives one distribution per slot, q_1 ... q_{B-1}, so that the continuation
t_1 ... t_d has the score ``sum over k of log q_k(t_k)``. The best tree of N nodes holds the N continuations of the
highest score. A node is never better than its parent, so every prefix of these is one of them, and a heap finds them in
order: pop the best, make it a node, push its next sibling (the next most likely token of its slot) and its first child
(the most likely token of the next slot). The root, which is the known anchor, does not count.

Nodes are made in the order of their score, so the best tree of n < N nodes is the first n of these: one tree of 64
nodes also gives the figures for 8, 16 and 32. A node of rank r in its slot comes after its r better siblings, so N
candidates per slot suffice. The cost is a heap of at most N + 1 entries and N pops, in plain Python: about 0.1 ms for
64 nodes.

Shapes: N nodes, B block size, m candidates a slot, n blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

SIZES = (8, 16, 32, 64)
"""Numbers of nodes for which figures are reported."""


@dataclass(frozen=True)
class Tree:
    """A draft tree; nodes by descending score, so that a node comes after its parent.

    Attributes:
        parents: int64 [N] index of the parent; -1 for children of the root.
        slots: int64 [N] slot that the node fills, 1 ... B - 1: its depth below the root.
        tokens: int64 [N] token ids.
        scores: float64 [N] sum of the log-probabilities from the root to the node.
    """

    parents: NDArray[np.int64]
    slots: NDArray[np.int64]
    tokens: NDArray[np.int64]
    scores: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.parents)

    def first(self, n: int) -> Tree:
        """Return the best tree of at most n nodes."""
        return Tree(self.parents[:n], self.slots[:n], self.tokens[:n], self.scores[:n])

    def path(self, continuation: Sequence[int]) -> list[int]:
        """Return the nodes of the longest prefix of a continuation that the tree holds."""
        child = {pair: i for i, pair in enumerate(zip(self.parents.tolist(), self.tokens.tolist(), strict=True))}
        nodes: list[int] = []
        for token in continuation:
            node = child.get((nodes[-1] if nodes else -1, int(token)))
            if node is None:
                break
            nodes.append(node)
        return nodes


def best_first(ids: Any, logprobs: Any, size: int) -> Tree:
    """Return the tree of the highest scores.

    Args:
        ids: [B - 1, m] token ids of each slot's candidates, the most likely first: an array or a CPU tensor. With
            m >= size the tree is the same as over the whole vocabulary.
        logprobs: [B - 1, m] their log-probabilities, descending along each row.
        size: N, the number of nodes; the tree has fewer if there are fewer continuations.
    """
    slot_logprobs, slot_ids = np.asarray(logprobs, np.float64).tolist(), np.asarray(ids).tolist()
    slots = len(slot_ids)
    nodes: list[tuple[int, int, int, float]] = []
    # equal scores are ordered by the time of the push, so that the input alone decides the tree
    heap: list[tuple[float, int, int, int, int, float]] = []
    if slots and slot_ids[0]:
        heap.append((-slot_logprobs[0][0], 0, -1, 0, 0, 0.0))
    pushed = 1
    while heap and len(nodes) < size:
        cost, _, parent, slot, rank, above = heappop(heap)
        nodes.append((parent, slot + 1, slot_ids[slot][rank], -cost))
        if rank + 1 < len(slot_ids[slot]):
            sibling = -(above + slot_logprobs[slot][rank + 1])
            heappush(heap, (sibling, pushed, parent, slot, rank + 1, above))
        if slot + 1 < slots:
            heappush(heap, (cost - slot_logprobs[slot + 1][0], pushed + 1, len(nodes) - 1, slot + 1, 0, -cost))
        pushed += 2
    columns = zip(*nodes, strict=True) if nodes else ((), (), (), ())
    parents, depths, tokens, scores = columns
    return Tree(
        np.array(parents, np.int64), np.array(depths, np.int64), np.array(tokens, np.int64), np.array(scores, float)
    )


def accepted(tree: Tree, continuation: Sequence[int]) -> int:
    """Return how many leading tokens of the true continuation the tree holds, 0 ... B - 1, without the bonus token."""
    return len(tree.path(continuation))


def accepted_lengths(ids: Any, logprobs: Any, continuations: Any, sizes: Sequence[int] = SIZES) -> NDArray[np.int64]:
    """Return how many tokens the target would accept of trees of several sizes, for many blocks.

    Args:
        ids: [n, B - 1, m] candidates of each slot, the most likely first.
        logprobs: [n, B - 1, m] their log-probabilities.
        continuations: [n, B - 1] true tokens; negative after the end of a sample.
        sizes: Numbers of nodes.

    Returns:
        int64 [n, len(sizes)] accepted tokens.
    """
    all_ids, all_logprobs, truth = np.asarray(ids), np.asarray(logprobs, np.float64), np.asarray(continuations)
    lengths = np.zeros((len(truth), len(sizes)), np.int64)
    for block, (block_ids, block_logprobs, row) in enumerate(zip(all_ids, all_logprobs, truth, strict=True)):
        nodes = best_first(block_ids, block_logprobs, max(sizes)).path(row.tolist())
        lengths[block] = [sum(node < size for node in nodes) for size in sizes]
    return lengths
