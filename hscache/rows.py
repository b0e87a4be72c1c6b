"""A row of the corpus, and which of its tokens are supervised."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class CorpusRow:
    """One row as a reader returned it.

    Attributes:
        row: Number of the row in the corpus, 0-based.
        sample_id: The row's id; empty for "use the content hash".
        input_ids: int32 [n], or None when the reader could not make it.
        loss_mask: uint8 [m], or None.
        tag: Free label of the row.
        reason: Reason code of a row that the reader rejects.
        detail: What was seen.
    """

    row: int
    sample_id: str = ""
    input_ids: NDArray[np.int32] | None = None
    loss_mask: NDArray[np.uint8] | None = None
    tag: str | None = None
    reason: str = ""
    detail: str = ""


def supervised(mask: NDArray[np.uint8] | None) -> int:
    """Return the number of supervised tokens: marked, and with a token before them."""
    return 0 if mask is None else int(np.count_nonzero(mask[1:]))
