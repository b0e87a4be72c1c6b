"""The golden store of each format version: today's reader gives what it gave when it was made."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import zarr

from hscache.audit.verify import verify
from hscache.store.index import load_index
from tests.conftest import DATA
from tests.made.make_golden import CODECS, REJECTED, digests

# Never to be made again, whatever the reason: these are the stores that users have. See make_golden.py.
V1 = DATA / "golden-v1"


@pytest.mark.parametrize("codec", CODECS)
def test_the_reader_gives_the_recorded_values_of_format_v1(codec: str) -> None:
    recorded = json.loads((V1 / "digests.json").read_text())
    assert recorded.keys() == set(CODECS)
    assert digests(V1 / codec) == recorded[codec]


@pytest.mark.parametrize("codec", CODECS)
def test_a_store_of_format_v1_is_called_whole(codec: str) -> None:
    report = verify(V1 / codec)
    assert report.findings == []
    assert (report.samples, report.rejected, report.shards) == (3, 1, 2 if codec == "raw" else 1)
    status = dict(zip(*(load_index(V1 / codec)[name].to_pylist() for name in ("sample_id", "reason")), strict=True))
    assert status == {"s0": "", "s1": "", "s2": "too-few-supervised", REJECTED: "non-finite", "s4": ""}


def test_zarr_alone_reads_format_v1() -> None:
    group = zarr.open_group(str(V1 / "raw/shards/00000.zarr"), mode="r")
    assert group["hidden_states"].attrs["logical_dtype"] == "bfloat16"
    assert group["hidden_states"].fill_value == 0x7FC0
    states = (group["hidden_states"][:].astype(np.uint32) << np.uint32(16)).view(np.float32)
    assert np.isfinite(states).all()


def test_the_golden_store_is_small() -> None:
    assert sum(path.stat().st_size for path in Path(V1).rglob("*") if path.is_file()) <= 300_000
