"""A row of the corpus, a sample or a reject, and the rule that says which tokens of a sample are supervised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

_GRAM = 4
"""Tokens of a sequence whose second appearance in a sample counts as a repeat."""


def count_supervised(loss_mask: NDArray[np.uint8] | Sequence[int]) -> int:
    """Return the number of supervised tokens: those that are marked and have a token before them."""
    return int(np.count_nonzero(loss_mask[1:]))


def supervised_positions(loss_mask: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the positions of the supervised tokens, int64, ascending.

    The target predicts the token at position t from its final state at t - 1: ``supervised_positions(mask) - 1`` are
    the rows that the head reads.

    Args:
        loss_mask: uint8 [n], from the sample's first token on.
    """
    return 1 + np.flatnonzero(loss_mask[1:])


def repeated_tokens(input_ids: NDArray[np.integer[Any]], loss_mask: NDArray[np.uint8]) -> int:
    """Return how many supervised tokens end a sequence of four tokens that the sample had before.

    Args:
        input_ids: Token ids, [n], each between 0 and 2**31 - 1.
        loss_mask: uint8 [n].
    """
    ids = np.asarray(input_ids, np.int64)
    if len(ids) < _GRAM:
        return 0
    pairs = ids[:-1] << 32 | ids[1:]
    first, second = pairs[:-2], pairs[2:]
    order = np.lexsort((second, first))  # equal sequences side by side, the earliest first
    again = np.zeros(len(first), bool)
    again[order[1:]] = (np.diff(first[order]) == 0) & (np.diff(second[order]) == 0)
    at = supervised_positions(loss_mask) - (_GRAM - 1)
    return int(again[at[at >= 0]].sum())


@dataclass(frozen=True)
class Sample:
    """A row with token ids and a loss mask of equal length.

    Attributes:
        row: Number of the row in the corpus, 0-based.
        sample_id: The row's id; empty for "use the digest of the content".
        input_ids: int32 [n], none negative.
        loss_mask: uint8 [n], 0 or 1.
        tag: Free label of the row.
        finish_reason: How the completion ended, such as ``stop`` or ``length``; None where that is unknown.
        source: File and row of a corpus of several files; empty for a single file, where ``row`` says it.
    """

    row: int
    sample_id: str
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    tag: str | None = None
    finish_reason: str | None = None
    source: str = ""

    @cached_property
    def n_loss(self) -> int:
        """Number of supervised tokens."""
        return count_supervised(self.loss_mask)

    @cached_property
    def repeats(self) -> int:
        """Number of supervised tokens that repeat: see :func:`repeated_tokens`."""
        return repeated_tokens(self.input_ids, self.loss_mask)

    @property
    def content(self) -> bytes:
        """The sample's identity: see :func:`content_digest`."""
        return content_digest(self.input_ids, self.loss_mask)

    def reject(self, reason: str, detail: str) -> Reject:
        """Return the record of this sample as a row that a build cannot use."""
        detail = f"{self.source}: {detail}" if self.source else detail
        n_tokens = len(self.input_ids)
        return Reject(self.row, self.sample_id, reason, detail, self.tag, n_tokens, self.n_loss, self.content)


@dataclass(frozen=True)
class Reject:
    """A row that cannot be used, with the reason.

    Attributes:
        row: Number of the row in the corpus, 0-based.
        sample_id: The row's id as far as it could be read, else empty.
        reason: Reason code.
        detail: What was found.
        tag: Free label of the row.
        n_tokens: Length of its token ids; 0 where they could not be read.
        n_loss: Supervised tokens of its mask; 0 where it could not be read.
        content: :func:`content_digest` of ids and mask; empty where they could not be read.
    """

    row: int
    sample_id: str
    reason: str
    detail: str
    tag: str | None = None
    n_tokens: int = 0
    n_loss: int = 0
    content: bytes = b""


def content_digest(*arrays: NDArray[np.generic]) -> bytes:
    """Return the identity of a row: xxh3-128 of its ids and mask, with their lengths."""
    digest = xxhash.xxh3_128()
    for values in arrays:
        if len(values):
            digest.update(len(values).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(values).data.cast("B"))
    return digest.digest()
