"""verify: a good store is good at both levels, nothing in it is changed, and no flipped byte goes unseen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hscache.audit.states import verify_with_states
from hscache.audit.verify import verify
from hscache.errors import HscacheError
from hscache.rows import Sample
from hscache.store import lossy
from hscache.store.codecs import NAMES
from hscache.store.index import read_shard
from hscache.store.layout import StorePaths
from tests.made.stores import corpus_rows, flip, little_manifest, make_store


@pytest.mark.parametrize("level", ["quick", "full"])
@pytest.mark.parametrize("codec", [*NAMES, *lossy.NAMES])
def test_a_good_store_is_clean(tmp_path: Path, codec: str, level: Any) -> None:
    made = make_store(tmp_path / "store", manifest=little_manifest(store={"codec": codec}), reject=["s1"])
    report = verify(made.path, level)
    assert report.findings == []
    assert (report.ok, report.level, report.shards) == (True, level, len(made.plan.batches))
    assert (report.samples, report.rejected) == (len(made.rows) - 1, 1)
    assert report.tokens == sum(len(arrays["input_ids"]) for arrays in made.arrays.values())
    if level == "full":
        assert report.head_error_nats is not None
        assert report.head_error_nats < {"int8": 0.02, "int4": 0.3}.get(codec, 0.01)
        assert report.head_rows > 0


@pytest.mark.parametrize("fields", [{"final_state": False}, {"topk": 0}, {"final_state": False, "topk": 0}])
def test_a_good_store_without_some_arrays_is_clean(tmp_path: Path, fields: dict[str, Any]) -> None:
    manifest = little_manifest(
        states={"final_state": fields.get("final_state", True)}, logits={"topk": fields.get("topk", 4)}
    )
    report = verify(make_store(tmp_path / "store", manifest=manifest).path)
    assert (report.findings, report.head_rows, report.head_error_nats) == ([], 0, None)


def test_a_store_whose_samples_were_all_rejected_is_clean(tmp_path: Path) -> None:
    rows = corpus_rows((5, 7))
    report = verify(make_store(tmp_path / "store", rows, reject=["s0", "s1"]).path)
    assert (report.findings, report.samples, report.rejected) == ([], 0, 2)


def test_shards_of_equal_magnitude_are_no_outliers(tmp_path: Path) -> None:
    made = make_store(tmp_path / "store", scale=lambda shard: 1.0 + 0.3 * shard)
    assert verify(made.path).findings == []


@pytest.mark.parametrize("level", ["quick", "full"])
def test_without_a_manifest_that_can_be_trusted_nothing_is_checked(tmp_path: Path, level: Any) -> None:
    root = make_store(tmp_path / "store").path
    flip(root / "manifest.json", 50)
    with pytest.raises(HscacheError) as caught:
        verify(root, level)
    assert caught.value.code == "store-damaged"


def test_a_store_is_compared_with_another_one(tmp_path: Path) -> None:
    first, same = (make_store(tmp_path / name, time=name).path for name in ("first", "same"))
    other = make_store(tmp_path / "other", edit=lambda row, arrays: arrays.update(
        hidden_states=np.roll(arrays["hidden_states"], 1, axis=2))).path  # fmt: skip
    for store, codes in ((same, []), (other, ["stores-differ"])):
        report = verify(first)
        out = verify_with_states(report, against=store, samples=6)
        assert [finding.code for finding in report.findings] == codes
        assert out["against"]["samples"] == 6
    foreign = make_store(tmp_path / "foreign", manifest=little_manifest(states={"taps": [1]})).path
    with pytest.raises(HscacheError) as caught:
        verify_with_states(verify(first), against=foreign)
    assert caught.value.code == "stores-incomparable"


def test_the_files_of_other_tools_are_no_findings(tmp_path: Path) -> None:
    root = make_store(tmp_path / "store").path
    (root / ".gitattributes").write_text("*.zarr binary")
    assert verify(root).ok


def test_a_damaged_sample_between_others_is_the_only_one_named(tmp_path: Path) -> None:
    """Short neighbours are read together; the checksum that fails is one sample's, or those of a shared chunk."""
    rows = corpus_rows((8, 8, 8, 8))
    manifest = little_manifest(store={"shard_bytes": 100_000, "chunk_tokens": 8}, limits={"batch_tokens": 8})
    made = make_store(tmp_path / "store", rows, manifest=manifest)
    shard = made.path / "shards/00000.zarr"
    flip(shard / "hidden_states/c.0.0.0", 2 * 448 + 7)  # 8 rows of 48 bytes, checksum and padding: 448
    third = read_shard(shard)["samples"]["sample_id"][2]
    found = {(finding.code, finding.where) for finding in verify(made.path).findings}
    assert found == {
        ("file-content", "00000.zarr/hidden_states/c.0.0.0"),
        ("array-unreadable", f"00000.zarr: {third}"),
    }


def test_verify_changes_nothing(tmp_path: Path) -> None:
    root = make_store(tmp_path / "store").path
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in root.rglob("*") if p.is_file()}
    verify(root)
    assert before == {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in root.rglob("*") if p.is_file()}


def one_shard_store(root: Path) -> list[Path]:
    """Make a store of one shard with two samples; return its files."""
    rows = [*corpus_rows((6,)), Sample(1, "x", np.arange(4, dtype="i4"), np.ones(4, "u1"), tag="ü")]
    make_store(root, rows, manifest=little_manifest(store={"shard_bytes": 100_000, "codec": "zstd"}))
    assert len(list(StorePaths(root).shards.iterdir())) == 1
    return sorted(p for p in root.rglob("*") if p.is_file())


def check_flips(root: Path, files: list[Path], per_file: int) -> int:
    """Change one byte at a time; return how many changes were tried."""
    rng = np.random.default_rng(0)
    tried = 0
    for path in files:
        good = path.read_bytes()
        for position in rng.permutation(len(good))[:per_file].tolist():
            bad = bytearray(good)
            bad[position] ^= int(rng.integers(1, 256))
            path.write_bytes(bad)
            tried += 1
            try:
                found = not verify(root).ok
            except HscacheError:
                found = True
            assert found, f"{path.relative_to(root)}: byte {position}: {good[position]:#x} -> {bad[position]:#x}"
        path.write_bytes(good)
    assert verify(root).ok
    return tried


def test_no_changed_byte_of_any_file_goes_unseen(tmp_path: Path) -> None:
    files = one_shard_store(tmp_path / "store")
    names = {p.name for p in files}
    assert names >= {"manifest.json", "plan.parquet", "index.parquet", "target.json", "head.safetensors", "zarr.json"}
    assert check_flips(tmp_path / "store", files, per_file=15) >= 15 * len(files)


@pytest.mark.fuzz
def test_no_changed_byte_of_any_file_goes_unseen_in_many_tries(tmp_path: Path) -> None:
    files = one_shard_store(tmp_path / "store")
    assert check_flips(tmp_path / "store", files, per_file=500) > 5000
