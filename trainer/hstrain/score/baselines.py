"""What drafting without a model gives on the same walk: tables of the training text, and copying from the sample's own.

A drafter that such a table beats has learnt nothing worth serving. All three are free of states and weights:

- ``bigram`` and ``5-gram``: the token that most often followed the last one, or the last four, in the training samples;
  where these four never came, the last three, and so on;
- ``lookup``: prompt lookup as engines offer it. The text goes on as it did after the latest earlier place with the same
  last four tokens, or three, or two;
- ``lookup, 5-gram``: the lookup where there is such a place, else the table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hscache.console import say
from hscache.store.reader import Store
from hstrain.data.anchors import anchor_candidates
from hstrain.score.walk import SampleScore, tokens_left

NAMES = ("bigram", "5-gram", "lookup", "lookup, 5-gram")
_ORDER = 4
"""Tokens of context of the longest table."""
_SHORTEST = 2
"""Tokens that a lookup must find again."""
_MOST_TOKENS = 4_000_000
"""Training tokens that the tables count; a lookup needs none."""
_NONE = -1
_MIX = np.uint64(0x9E3779B97F4A7C15)


def baseline_scores(
    store: Store, training: Sequence[int], numbers: Sequence[int], block_size: int
) -> dict[str, list[SampleScore]]:
    """Score every baseline on samples of a store, as :func:`hstrain.score.walk.score_store` scores a drafter.

    Args:
        store: An opened store.
        training: Numbers of the samples whose text the tables count; none for no tables.
        numbers: Numbers of the samples to score.
        block_size: Tokens of a block, its anchor included.

    Returns:
        Name -> scores, without DDTrees: those of :data:`NAMES`, or ``lookup`` alone without training samples.

    Raises:
        IntegrityError: ``store-damaged``.
    """
    tables = _tables(store, training)
    scores: dict[str, list[SampleScore]] = {name: [] for name in (NAMES if tables else ("lookup",))}
    for i in numbers:
        ids, mask = store.input_ids(i), store.loss_mask(i)
        anchors = anchor_candidates(mask)
        left, K = tokens_left(mask, anchors), block_size - 1
        copied = _lookup(ids, anchors, K)
        drafts = {"lookup": copied}
        if tables:
            by_table = _chain(tables, ids, anchors, K)
            found = copied[:, :1] != _NONE
            drafts |= {"bigram": _chain(tables[:1], ids, anchors, K), "5-gram": by_table}
            drafts["lookup, 5-gram"] = np.where(found, copied, by_table)
        # beyond the turn nothing is right; the clipped position is never read
        at = anchors[:, None] + 1 + np.arange(K)
        truth = np.where(np.arange(K) < left[:, None], ids[np.minimum(at, len(ids) - 1)], _NONE - 1)
        no_trees = np.zeros((len(anchors), 0), np.int64)
        for name, of_name in scores.items():
            correct = drafts[name] == truth
            of_name.append(SampleScore(store.sample_ids[i], store.tags[i], anchors, left, correct, (), no_trees))
    return scores


Table = tuple[NDArray[np.uint64], NDArray[np.int32]]
"""Keys of contexts, ascending, and the token that most often followed each."""


def _tables(store: Store, training: Sequence[int]) -> list[Table]:
    """Return a table for each length of context, the shortest first."""
    texts: list[NDArray[np.int32]] = []
    n_tokens = 0
    for i in training:
        texts.append(store.input_ids(i))
        n_tokens += len(texts[-1])
        if n_tokens > _MOST_TOKENS:
            say(f"the tables of n-grams count the first {len(texts):,} of {len(training):,} training samples")
            break
    tables = []
    for n in range(1, _ORDER + 1) if texts else ():
        keys = np.concatenate([_keys(text, n)[:-1] for text in texts])
        following = np.concatenate([text[n:] for text in texts])
        order = np.lexsort((following, keys))
        keys, following = keys[order], following[order]
        begins = _begins((np.diff(keys) != 0) | (np.diff(following) != 0), len(keys))
        counts = np.diff(np.r_[begins, len(keys)])
        keys, following = keys[begins], following[begins]
        # of each key the most frequent token, the smallest id among equals
        order = np.lexsort((following, -counts, keys))
        keys, following = keys[order], following[order]
        firsts = _begins(np.diff(keys) != 0, len(keys))
        tables.append((keys[firsts], following[firsts]))
    return tables


def _begins(changes: NDArray[np.bool_], n: int) -> NDArray[np.int64]:
    """Return where each group of equal neighbours begins among n, given which neighbours differ."""
    return np.concatenate([np.zeros(min(n, 1), np.int64), 1 + np.flatnonzero(changes)])


def _keys(ids: NDArray[np.int32], n: int) -> NDArray[np.uint64]:
    """Return a 64-bit key of every ``n`` tokens in a row: uint64 [len(ids) - n + 1], empty for shorter texts."""
    if len(ids) < n:
        return np.zeros(0, np.uint64)
    return _key(np.lib.stride_tricks.sliding_window_view(ids, n))


def _key(context: NDArray[np.int32]) -> NDArray[np.uint64]:
    key = np.zeros(context.shape[:-1], np.uint64)
    for column in range(context.shape[-1]):
        key = (key ^ (context[..., column].astype(np.uint64) + np.uint64(1))) * _MIX
        key ^= key >> np.uint64(29)
    return key


def _chain(tables: Sequence[Table], ids: NDArray[np.int32], anchors: NDArray[np.int64], K: int) -> NDArray[np.int32]:
    """Draft K tokens after each anchor, each from the longest context that a table knows: int32 [N, K]."""
    longest = len(tables)
    # positions before the text are negative ids, which no table has
    padded = np.r_[np.full(longest - 1, -2, np.int32), ids]
    window = padded[anchors[:, None] + np.arange(longest)]
    drafted = np.empty((len(anchors), K), np.int32)
    for k in range(K):
        best = np.full(len(anchors), _NONE, np.int32)
        for n, (keys, following) in enumerate(tables, 1):
            if not len(keys):
                continue
            wanted = _key(window[:, longest - n :])
            at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
            best = np.where(keys[at] == wanted, following[at], best)
        drafted[:, k] = best
        window = np.c_[window[:, 1:], best]
    return drafted


def _lookup(ids: NDArray[np.int32], anchors: NDArray[np.int64], K: int) -> NDArray[np.int32]:
    """Copy the K tokens that followed the latest place with the same last tokens: int32 [N, K], -1 without one."""
    source = np.full(len(anchors), _NONE, np.int64)
    for n in range(_SHORTEST, _ORDER + 1):
        before = _latest_before(_keys(ids, n))
        at = anchors - (n - 1)
        found = np.where(at >= 0, before[np.maximum(at, 0)], _NONE) if len(before) else np.full(len(anchors), _NONE)
        source = np.where(found != _NONE, found + n, source)  # the place after the earlier occurrence
    # beyond the anchor the text goes on with what was copied: it repeats with the distance as its period
    period = anchors + 1 - source
    copied = ids[np.maximum(source, 0)[:, None] + np.arange(K) % np.maximum(period, 1)[:, None]]
    return np.where(source[:, None] != _NONE, copied, _NONE).astype(np.int32)


def _latest_before(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return for each position the latest earlier one with the same key, -1 where there is none."""
    order = np.argsort(keys, kind="stable")
    again = 1 + np.flatnonzero(np.diff(keys[order]) == 0)
    before = np.full(len(keys), _NONE, np.int64)
    before[order[again]] = order[again - 1]
    return before
