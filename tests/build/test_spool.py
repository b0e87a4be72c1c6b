"""The spool: forward batches come back whole, in any order, as they were given."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hscache.build.spool import Spool, SpoolWriter
from hscache.rows import Sample

rows = st.builds(
    lambda row, name, ids, bit: Sample(
        row, name, np.array(ids, np.int32), np.resize(np.array([bit, 1], np.uint8), len(ids))
    ),
    st.integers(0, 1 << 60),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=12),
    st.integers(0, 1),
)


@given(st.lists(st.lists(rows, min_size=1, max_size=4), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_batches_come_back_in_any_order(batches: list[list[Sample]], random: object) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.arrow"
        with SpoolWriter(path) as writer:
            for batch in batches:
                writer.write_batch(batch)
        spool, numbers = Spool(path), list(range(len(batches)))
        random.shuffle(numbers)  # type: ignore[attr-defined]
        for number in numbers:
            got = spool.batch(number)
            assert [(r.row, r.sample_id) for r in got] == [(r.row, r.sample_id) for r in batches[number]]
            for mine, theirs in zip(got, batches[number], strict=True):
                for a, b in ((mine.input_ids, theirs.input_ids), (mine.loss_mask, theirs.loss_mask)):
                    assert (a.dtype, a.tolist()) == (b.dtype, b.tolist())
