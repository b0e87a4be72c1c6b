"""verify with several jobs: the same report in the same order, and shards that are really checked at the same time."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from hscache.audit import verify as verify_module
from hscache.audit.shard import ShardResult, StoreFacts
from hscache.audit.verify import verify
from hscache.rows import Sample
from hscache.store.index import committed_shards
from tests.made.stores import Arrays, corpus_rows, flip, little_manifest, make_store


def build_wrong(row: Sample, arrays: Arrays) -> None:
    """Plant faults whose checksums agree."""
    if row.sample_id in ("s2", "s9"):
        arrays["hidden_states"][:, 1] = 0
    if row.sample_id == "s5":
        arrays["final_state"][3] = 0x3F80


@pytest.fixture(scope="module")
def harmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of many shards with a fault in most of them."""
    rows = corpus_rows((9, 8, 7, 11, 6, 5, 12, 8, 9, 10, 7, 6))
    manifest = little_manifest(store={"shard_bytes": 800}, limits={"batch_tokens": 12})
    root = make_store(tmp_path_factory.mktemp("jobs") / "store", rows, manifest=manifest, edit=build_wrong).path
    assert len(committed_shards(root)) > 6
    flip(root / "shards/00000.zarr/hidden_states/c.0.0.0", 9)
    flip(root / "shards/00003.zarr/zarr.json", 100)
    (root / "shards/00004.zarr/input_ids/c.1").write_bytes(b"x")
    shutil.rmtree(root / "shards/00005.zarr")
    return root


def test_any_number_of_jobs_gives_the_same_report(harmed: Path) -> None:
    one = verify(harmed, jobs=1)
    assert len({finding.code for finding in one.findings}) > 4
    assert len({finding.shard for finding in one.findings}) > 4
    for jobs in (2, 3, 16, None):
        assert verify(harmed, jobs=jobs).to_json() == one.to_json()


def test_shards_are_checked_at_the_same_time(harmed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check, finished, order = verify_module.check_shard, threading.Event(), []

    def first_waits(store: StoreFacts, shard: int) -> ShardResult:
        if shard == 0:
            assert finished.wait(60), "no other shard is checked meanwhile"
        result = check(store, shard)
        order.append(shard)
        finished.set()
        return result

    one = verify(harmed, jobs=1)
    monkeypatch.setattr(verify_module, "check_shard", first_waits)
    assert verify(harmed, jobs=2).to_json() == one.to_json()
    assert order[0] != 0


def test_an_error_in_a_job_ends_the_verification(harmed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(store: StoreFacts, shard: int) -> ShardResult:
        raise MemoryError(f"shard {shard}")

    monkeypatch.setattr(verify_module, "check_shard", fails)
    for jobs in (1, 2):
        with pytest.raises(MemoryError, match="shard 0"):
            verify(harmed, jobs=jobs)
