"""Where blocks begin, and what their slots should say.

An anchor is a supervised token whose successor is supervised too. Anchors are drawn anew each epoch (fixed ones give
tau 4.94 where random ones give 5.64, arXiv 2602.06036), from (seed, epoch, sample id) alone, so that neither the order
of reading nor the number of ranks changes them. Slot k = 1 .. B-1 of a block should say token anchor + k, as long as
all tokens from the anchor on are supervised: a block stops where the target's turn stops, and at the sample's end.
"""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray


def random_of(*key: object) -> np.random.Generator:
    """Return a generator that depends on the parts of the key alone, on every machine."""
    return np.random.default_rng(xxhash.xxh3_64_intdigest("\0".join(map(str, key)).encode()))


def anchor_candidates(loss_mask: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return int64 positions that may be anchors: supervised, the next too, and something before them.

    Args:
        loss_mask: uint8 [n].
    """
    both = (loss_mask[:-1] != 0) & (loss_mask[1:] != 0)
    both[:1] = False  # a first token has no context
    return np.flatnonzero(both)


def choose_anchors(loss_mask: NDArray[np.uint8], most: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Return at most ``most`` anchors, int64, ascending, without repetition."""
    candidates = anchor_candidates(loss_mask)
    if len(candidates) > most:
        candidates = np.sort(random.choice(candidates, most, replace=False))
    return candidates


def choose_window(n_tokens: int, anchors: NDArray[np.int64], most: int, random: np.random.Generator) -> tuple[int, int]:
    """Return the token range of a long sample that is trained on.

    It ends a random stretch behind an anchor drawn at random, so that every anchor of the sample has the same chance to
    be inside, with context before it.

    Args:
        n_tokens: Tokens of the sample.
        anchors: int64 positions of its possible anchors, not empty unless nothing is supervised.
        most: Longest range.
        random: Source of the choice.
    """
    if n_tokens <= most:
        return 0, n_tokens
    anchor = int(random.choice(anchors)) if len(anchors) else 0
    stop = min(n_tokens, max(most, anchor + 2 + int(random.integers(max(1, most // 2)))))
    return stop - most, stop


def slot_tokens(
    input_ids: NDArray[np.int32], loss_mask: NDArray[np.uint8], anchors: NDArray[np.int64], block_size: int
) -> NDArray[np.int64]:
    """Return what each slot should say, int64 [N, B - 1]; -1 where the block has ended.

    Args:
        input_ids: int32 [n].
        loss_mask: uint8 [n].
        anchors: int64 [N].
        block_size: B.
    """
    at = anchors[:, None] + np.arange(1, block_size)
    inside = at < len(input_ids)
    at = np.minimum(at, len(input_ids) - 1)
    going = np.logical_and.accumulate(inside & (loss_mask[at] != 0), axis=1)
    return np.where(going, input_ids[at], -1).astype(np.int64)
