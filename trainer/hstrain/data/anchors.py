"""Choose where blocks begin, and which tokens their slots should predict.

An anchor is a supervised token whose successor is supervised too. Anchors are drawn anew each epoch (fixed ones give
tau 4.94 where random ones give 5.64, arXiv 2602.06036), from (seed, epoch, sample id) alone, so that neither the order
of reading nor the number of ranks changes them. Slot k = 1 .. B-1 of a block should predict token anchor + k as long as
all tokens from the anchor on are supervised: a block ends with the target's turn or with the sample.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import xxhash
from numpy.typing import NDArray

from hscache.errors import IntegrityError
from hscache.rows import supervised_positions
from hscache.store.reader import Store


def random_of(*key: object) -> np.random.Generator:
    """Return a generator that depends only on the parts of the key, on every machine."""
    return np.random.default_rng(xxhash.xxh3_64_intdigest("\0".join(map(str, key)).encode()))


def sample_with(store: Store, token: int) -> str | None:
    """Return the first stored sample that contains a token, in words; only the first 256 that can be read count."""
    for i in range(min(len(store), 256)):
        with suppress(IntegrityError):
            if token in store.input_ids(i):
                return f"in sample {store.sample_ids[i]!r}"
    return None


def anchor_candidates(loss_mask: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return int64 positions that may be anchors: supervised, and the next token too.

    Args:
        loss_mask: uint8 [n].
    """
    at = supervised_positions(loss_mask)
    candidates: NDArray[np.int64] = at[:-1][np.diff(at) == 1]
    return candidates


def choose_anchors(loss_mask: NDArray[np.uint8], most: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Return at most ``most`` anchors, int64, ascending, without repetition."""
    candidates = anchor_candidates(loss_mask)
    if len(candidates) > most:
        candidates = np.sort(random.choice(candidates, most, replace=False))
    return candidates


def choose_window(
    loss_mask: NDArray[np.uint8], most: int, most_anchors: int, random: np.random.Generator
) -> tuple[int, int, NDArray[np.int64]]:
    """Return the token range of a long sample that is read, and the anchors in it.

    Every possible anchor has the same chance, at the ends of a long answer as in its middle. A stretch of ``most - 2``
    positions is drawn from all stretches that contain a possible anchor; they may extend beyond the sample, so each
    anchor is in the same number of stretches. Anchors come from that stretch. The range that is read ends with the
    token after the last anchor, and its other tokens are context before the first. If all possible anchors fit into one
    stretch, that stretch is taken.

    Args:
        loss_mask: uint8 [n] of the whole sample.
        most: Longest range, 3 or more.
        most_anchors: Number of anchors taken from the stretch with the most possible anchors; from another stretch the
            same share is taken, rounded up.
        random: Source of the choice.

    Returns:
        Start and stop; int64 anchors, ascending, counted from the sample's first token. If no anchor is possible, the
        first ``most`` tokens and no anchors.
    """
    candidates, stretch = anchor_candidates(loss_mask), most - 2
    if not len(candidates):
        return 0, min(most, len(loss_mask)), candidates
    if candidates[-1] - candidates[0] < stretch:
        inside, fullest = candidates, len(candidates)
    else:
        # cumulative number of stretches whose first anchor is each candidate; one stretch is drawn from all of them
        ends = np.minimum(np.diff(candidates, prepend=candidates[0] - stretch), stretch).cumsum()
        drawn = int(random.integers(ends[-1]))
        reached = int(np.searchsorted(ends, drawn, side="right"))
        begin = candidates[reached] - (ends[reached] - 1 - drawn)
        inside = candidates[(candidates >= begin) & (candidates < begin + stretch)]
        fullest = int((np.searchsorted(candidates, candidates + stretch) - np.arange(len(candidates))).max())
    if fullest > most_anchors:
        share = -(-most_anchors * len(inside) // fullest)
        inside = np.sort(random.choice(inside, share, replace=False))
    stop = int(inside[-1]) + 2
    return max(0, stop - most), stop, inside


def slot_tokens(
    input_ids: NDArray[np.int32], loss_mask: NDArray[np.uint8], anchors: NDArray[np.int64], block_size: int
) -> NDArray[np.int64]:
    """Return the token that each slot should predict, int64 [N, B - 1]; -1 where the block has ended.

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
