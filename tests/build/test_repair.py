"""Repair rebuilds what is damaged and nothing else."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from faults import contents
from typer.testing import CliRunner

import hscache
from hscache.audit import compare
from hscache.audit.findings import VerifyReport
from hscache.audit.states import verify_with_states
from hscache.audit.verify import verify
from hscache.build import repair as repair_module
from hscache.build.convert import Change, convert
from hscache.build.repair import repair
from hscache.build.run import build
from hscache.cli import app
from hscache.console import Interrupted
from hscache.errors import ConfigError, ConflictError, HscacheError, IntegrityError
from hscache.manifest import Codec, parse_manifest
from hscache.store.index import committed_shards, read_shard
from hscache.store.info import store_info
from hscache.store.layout import canonical_json, group_metadata
from tests.conftest import DATA, TINY_HYBRID


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw = {
        "target": {"path": str(TINY_HYBRID), "dtype": "float32"},
        "states": {"taps": [1, 4, 7]},
        "corpus": {"path": str(DATA / "tiny-hybrid-completions.parquet")},
        "limits": {"batch_tokens": 1024},
        "store": {"shard_bytes": "2MiB"},
    }
    out = tmp_path_factory.mktemp("repair") / "store"
    assert build(parse_manifest(raw, "test"), out).shards > 3
    return out


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def swap(store: Path) -> None:
    a, b, aside = (store / "shards" / name for name in ("00001.zarr", "00002.zarr", "aside"))
    a.rename(aside)
    b.rename(a)
    aside.rename(b)


DAMAGE: dict[str, tuple[Callable[[Path], object], list[int]]] = {
    "a flipped byte": (lambda s: flip(s / "shards/00001.zarr/hidden_states/c.0.0.0", 1000), [1]),
    "a truncated file": (lambda s: os.truncate(s / "shards/00002.zarr/final_state/c.0.0", 5000), [2]),
    "a deleted file": (lambda s: (s / "shards/00000.zarr/loss_mask/c.0").unlink(), [0]),
    "a deleted shard": (lambda s: shutil.rmtree(s / "shards/00003.zarr"), [3]),
    "a shard without its record": (lambda s: (s / "shards/00001.zarr/zarr.json").unlink(), [1]),
    "a garbled record": (lambda s: (s / "shards/00001.zarr/zarr.json").write_text("{"), [1]),
    "two shards swapped": (swap, [1, 2]),
    "an unknown shard": (lambda s: shutil.copytree(s / "shards/00000.zarr", s / "shards/00099.zarr"), []),
    "a lost plan": (lambda s: (s / "plan.parquet").unlink(), []),
    "a lost index": (lambda s: (s / "index.parquet").unlink(), []),
    "a flipped byte of the head": (lambda s: flip(s / "target/head.safetensors", 5000), []),
    "a lost head": (lambda s: shutil.rmtree(s / "target"), []),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_repaired_and_only_what_was_damaged_is_built_again(
    damage: str, reference: Path, tmp_path: Path
) -> None:
    apply, shards = DAMAGE[damage]
    store = tmp_path / "store"
    shutil.copytree(reference, store)
    kept = {p: p.stat().st_mtime_ns for p in store.glob("shards/*/zarr.json")}
    apply(store)
    assert not verify(store).ok
    report = repair(store)
    assert report.ok
    assert report.rebuilt == shards
    assert report.build is not None
    assert report.build.built == len(shards)
    assert contents(store) == contents(reference)
    assert (store / "target/head.safetensors").read_bytes() == (reference / "target/head.safetensors").read_bytes()
    for path, time in kept.items():
        if int(path.parent.stem) not in shards:
            assert path.stat().st_mtime_ns == time, "a good shard was touched"
    assert list((store / "staging").iterdir()) == []


def test_a_good_store_is_left_alone(reference: Path) -> None:
    result = CliRunner().invoke(app, ["repair", str(reference)])
    assert result.exit_code == 0, result.output
    assert "nothing to repair" in result.output


def test_a_damaged_manifest_cannot_be_repaired(reference: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(reference, store)
    flip(store / "manifest.json", 200)
    with pytest.raises(IntegrityError) as caught:
        repair(store)
    assert caught.value.code == "store-damaged"


def _converted(reference: Path, folder: Path, *codecs: Codec) -> Path:
    for codec in codecs:
        convert(reference, folder / codec, Change(codec))
        reference = folder / codec
    return reference


@pytest.mark.parametrize(
    "how",
    [{"target": Path("/nonexistent")}, {"corpus": Path("/nonexistent.parquet")}, {"device": "cuda:7"}],
    ids=["target", "corpus", "device"],
)
def test_what_cannot_be_built_again_stays_as_it_was(reference: Path, tmp_path: Path, how: dict[str, Any]) -> None:
    store = tmp_path / "store"
    shutil.copytree(reference, store)
    flip(store / "shards/00001.zarr/hidden_states/c.0.0.0", 1000)
    (store / "index.parquet").unlink()
    before = {p: p.read_bytes() for p in store.rglob("*") if p.is_file()}
    with pytest.raises(HscacheError):
        repair(store, **how)
    assert {p: p.read_bytes() for p in store.rglob("*") if p.is_file()} == before
    assert repair(store).ok


def test_a_wrong_corpus_never_advises_to_remove_a_store(reference: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(reference, store)
    for shard in committed_shards(store):
        flip(store / f"shards/{shard:05d}.zarr/hidden_states/c.0.0.0", 1000)
    pq.write_table(pq.read_table(DATA / "tiny-hybrid-completions.parquet").slice(0, 3), tmp_path / "other.parquet")
    with pytest.raises(ConflictError) as caught:
        repair(store, corpus=tmp_path / "other.parquet")
    assert (caught.value.code, "rm -r" in caught.value.hint) == ("store-other-manifest", False)
    assert len(committed_shards(store)) == len(committed_shards(reference))


def test_a_repair_that_is_stopped_loses_nothing_and_is_resumed(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    shutil.copytree(reference, store)
    flip(store / "shards/00001.zarr/hidden_states/c.0.0.0", 1000)
    damaged = (store / "shards/00001.zarr/hidden_states/c.0.0.0").read_bytes()

    def stopped(*_: Any, **__: Any) -> None:
        assert not (store / "shards/00001.zarr").exists()
        raise Interrupted(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(repair_module, "build", stopped)
        result = CliRunner().invoke(app, ["repair", str(store)])
    assert (result.exit_code, "To resume" in result.output) == (130, True)
    assert (store / "shards/00001.zarr/hidden_states/c.0.0.0").read_bytes() == damaged
    assert repair(store).rebuilt == [1]


@pytest.mark.parametrize("where", ["shards/00002.zarr", "shards/00002.zarr/input_ids", "."])
def test_what_no_record_names_is_told_and_left(reference: Path, tmp_path: Path, where: str) -> None:
    store = tmp_path / "store"
    shutil.copytree(reference, store)
    (store / where / "notes.txt").write_text("mine")
    report = repair(store)
    assert (report.ok, report.found, report.rebuilt) == (False, {"file-extra": 1}, [])
    assert (store / where / "notes.txt").read_text() == "mine"


def test_a_converted_store_is_mended_as_far_as_its_shards_are_whole(reference: Path, tmp_path: Path) -> None:
    store = _converted(reference, tmp_path, "int8")
    (store / "index.parquet").unlink()
    assert repair(store).ok
    flip(store / "shards/00001.zarr/hidden_states/c.0.0.0", 1000)
    before = {p: p.read_bytes() for p in store.rglob("*") if p.is_file()}
    with pytest.raises(ConflictError) as caught:
        repair(store)
    assert caught.value.code == "store-converted"
    assert {p: p.read_bytes() for p in store.rglob("*") if p.is_file()} == before


def test_every_shard_of_the_rarer_kernel_path_is_named(reference: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(reference, store)
    for shard in (0, 2):
        path = store / f"shards/{shard:05d}.zarr"
        body = read_shard(path)
        body["provenance"]["kernels"]["path_id"] = "other"
        (path / "zarr.json").write_bytes(canonical_json(group_metadata(body)))
    assert len(committed_shards(store)) > 4
    assert [(f.code, f.shard) for f in verify(store, "quick").findings] == [("kernels-mixed", 0), ("kernels-mixed", 2)]
    assert repair(store).rebuilt == [0, 2]


def test_states_that_went_through_a_lossy_codec_are_judged_by_its_promise(reference: Path, tmp_path: Path) -> None:
    store = _converted(reference, tmp_path, "int4", "raw")
    report = verify(store)
    assert report.findings == []
    states = verify_with_states(report, recompute=2, against=reference)
    assert report.findings == [], states
    # its states are int4's all the same: another lossy codec would add to their error, and they are not the target's
    with pytest.raises(ConfigError) as caught:
        convert(store, tmp_path / "again", Change("int8"))
    assert caught.value.code == "convert-lossy"
    assert not convert(store, tmp_path / "zstd", Change("zstd")).exact
    assert store_info(tmp_path / "zstd")["codecs_before"] == ["raw", "int4", "raw"]


def test_a_target_that_rounds_otherwise_agrees_with_an_int4_store(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, load = hscache.open(_converted(reference, tmp_path, "int4")), compare.load_for
    monkeypatch.setattr(compare, "load_for", lambda s, t, d: load(s, t, d, dtype="bfloat16"))
    report = VerifyReport(str(store.path), "quick")
    verify_with_states(report, recompute=8)
    assert report.findings == []
    assert compare.fault(compare.recompute(store, 8)), "by the limit of exact states it is another one"


def test_a_named_shard_alone_is_read_and_repaired(reference: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(reference, store)
    for shard in (1, 2, 3):
        flip(store / f"shards/{shard:05d}.zarr/hidden_states/c.0.0.0", 1000)
    assert repair(store, shards=[0]).found == {}
    for shards, left in (([1], {2, 3}), ([2, 3], set())):
        report = repair(store, shards=shards)
        assert (report.ok, report.rebuilt) == (True, shards)
        assert {finding.shard for finding in verify(store).findings} == left
    assert contents(store) == contents(reference)


def test_a_named_shard_is_also_compared_with_the_others(reference: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(reference, store)
    path = store / "shards/00002.zarr"
    body = read_shard(path)
    body["provenance"]["kernels"]["path_id"] = "other"
    (path / "zarr.json").write_bytes(canonical_json(group_metadata(body)))
    (store / "index.parquet").unlink()
    report = repair(store, shards=[2])
    assert (report.ok, report.found) == (True, {"kernels-mixed": 1, "index-stale": 1})
    assert contents(store) == contents(reference)


def test_a_shard_that_no_plan_has_cannot_be_repaired(reference: Path) -> None:
    result = CliRunner().invoke(app, ["repair", str(reference), "--shard", "0", "--shard", "99"])
    assert isinstance(result.exception, HscacheError)
    assert result.exception.code == "shard-unknown"
