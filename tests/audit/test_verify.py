"""verify: every planted fault is found under its name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hscache.audit.findings import FINDINGS
from hscache.audit.verify import verify
from hscache.rows import Sample
from hscache.store.durable import Staging
from hscache.store.index import committed_shards, finalize, read_shard
from hscache.store.layout import canonical_json, group_metadata
from tests.made.stores import VOCAB, Arrays, change_token, corpus_rows, flip, little_manifest, make_store

SHARD = "shards/00000.zarr"
QUICK = {
    "plan-damaged", "shard-missing", "shard-extra", "shard-record", "shard-foreign", "shard-samples", "file-missing",
    "file-size", "file-extra", "statistics-outlier", "index-stale", "target-damaged", "kernels-mixed", "codec-error",
}  # fmt: skip
"""What is found without reading the arrays."""

Plant = Callable[[Path], Path]
PLANTS: dict[str, list[Plant]] = {}


def plant(code: str) -> Callable[[Plant], Plant]:
    """Register a function that makes a store with one fault below a directory and returns its path."""

    def register(make: Plant) -> Plant:
        PLANTS.setdefault(code, []).append(make)
        return make

    return register


def damaged(folder: Path, harm: Callable[[Path], object]) -> Path:
    root = make_store(folder / "store").path
    harm(root)
    return root


def built_with(folder: Path, edit: Callable[[Arrays], None]) -> Path:
    """Make a store whose writer itself was wrong about one sample: all checksums agree."""
    return make_store(folder / "store", edit=lambda row, arrays: edit(arrays) if row.sample_id == "s3" else None).path


def reseal(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a shard's record and its digest with it."""
    body = read_shard(root / SHARD)
    change(body)
    (root / SHARD / "zarr.json").write_bytes(canonical_json(group_metadata(body)))


def reindex(root: Path) -> None:
    with Staging(root / "staging") as staging:
        finalize(root, staging.path)


@plant("plan-damaged")
def _truncated_plan(folder: Path) -> Path:
    return damaged(folder, lambda root: (root / "plan.parquet").write_bytes(b"PAR1"))


@plant("plan-damaged")
def _missing_plan(folder: Path) -> Path:
    return damaged(folder, lambda root: (root / "plan.parquet").unlink())


@plant("plan-damaged")
def _plan_of_another_corpus(folder: Path) -> Path:
    other = make_store(folder / "other", corpus_rows(seed=1)).path
    return damaged(folder, lambda root: shutil.copy(other / "plan.parquet", root))


@plant("shard-missing")
def _removed_shard(folder: Path) -> Path:
    return damaged(folder, lambda root: shutil.rmtree(root / "shards/00001.zarr"))


@plant("shard-missing")
def _shard_without_record(folder: Path) -> Path:
    return damaged(folder, lambda root: (root / SHARD / "zarr.json").unlink())


@plant("shard-missing")
def _unfinished(folder: Path) -> Path:
    return make_store(folder / "store", shards=[0, 1]).path


@plant("shard-extra")
def _a_shard_too_many(folder: Path) -> Path:
    return damaged(folder, lambda root: shutil.copytree(root / SHARD, root / "shards/00003.zarr"))


@plant("shard-record")
def _flipped_record(folder: Path) -> Path:
    return damaged(folder, lambda root: flip(root / SHARD / "zarr.json", 100))


@plant("shard-foreign")
def _shard_under_another_number(folder: Path) -> Path:
    def harm(root: Path) -> None:
        shutil.rmtree(root / "shards/00001.zarr")
        shutil.copytree(root / SHARD, root / "shards/00001.zarr")

    return damaged(folder, harm)


@plant("shard-foreign")
def _shard_of_another_manifest(folder: Path) -> Path:
    other = make_store(folder / "other", manifest=little_manifest(target={"revision": "abc"})).path

    def harm(root: Path) -> None:
        shutil.rmtree(root / SHARD)
        shutil.copytree(other / SHARD, root / SHARD)

    return damaged(folder, harm)


@plant("shard-samples")
def _renamed_sample(folder: Path) -> Path:
    def harm(root: Path) -> None:
        reseal(root, lambda body: body["samples"]["sample_id"].__setitem__(0, "renamed"))
        reindex(root)

    return damaged(folder, harm)


@plant("file-missing")
def _missing_file(folder: Path) -> Path:
    return damaged(folder, lambda root: (root / SHARD / "final_state/c.0.0").unlink())


@plant("file-size")
def _truncated_file(folder: Path) -> Path:
    path = f"{SHARD}/hidden_states/c.0.0.0"
    return damaged(folder, lambda root: (root / path).write_bytes((root / path).read_bytes()[:-1]))


@plant("file-extra")
def _stray_file(folder: Path) -> Path:
    return damaged(folder, lambda root: (root / SHARD / "input_ids/c.1").write_bytes(b"x"))


@plant("file-extra")
def _stray_file_beside_the_shards(folder: Path) -> Path:
    return damaged(folder, lambda root: (root / "shards/notes.txt").write_bytes(b"x"))


@plant("file-extra")
def _shard_folder_that_no_plan_names(folder: Path) -> Path:
    def harm(root: Path) -> None:
        shutil.copytree(root / SHARD, root / "shards/00007.zarr")
        (root / "shards/00007.zarr/zarr.json").unlink()

    return damaged(folder, harm)


@plant("file-extra")
def _stray_file_in_the_store(folder: Path) -> Path:
    return damaged(folder, lambda root: (root / "index.parquet.old").write_bytes(b"x"))


@plant("file-extra")
def _stray_file_of_the_target(folder: Path) -> Path:
    return damaged(folder, lambda root: (root / "target/extra.json").write_bytes(b"{}"))


@plant("file-content")
def _flipped_data(folder: Path) -> Path:
    return damaged(folder, lambda root: flip(root / SHARD / "hidden_states/c.0.0.0", 9))


@plant("file-content")
def _flipped_metadata(folder: Path) -> Path:
    return damaged(folder, lambda root: flip(root / SHARD / "hidden_states/zarr.json", 9))


@plant("array-unreadable")
def _flipped_checksum(folder: Path) -> Path:
    return damaged(folder, lambda root: flip(root / SHARD / "logit_lse/c.0", -1))


@plant("array-unreadable")
def _array_of_another_shape(folder: Path) -> Path:
    def harm(root: Path) -> None:
        import xxhash

        path = root / SHARD / "final_state/zarr.json"
        text = path.read_bytes().replace(b'"data_type":"uint16"', b'"data_type":"float9"')
        path.write_bytes(text)
        entry = {"bytes": len(text), "xxh3_128": xxhash.xxh3_128_hexdigest(text)}
        reseal(root, lambda body: body["files"].__setitem__("final_state/zarr.json", entry))

    return damaged(folder, harm)


@plant("sample-digest")
def _changed_token(folder: Path) -> Path:
    return damaged(folder, change_token)


@plant("sample-ids")
def _token_outside_the_vocabulary(folder: Path) -> Path:
    def edit(arrays: Arrays) -> None:
        arrays["input_ids"] = np.append(arrays["input_ids"][:-1], np.int32(VOCAB))

    return built_with(folder, edit)


@plant("sample-mask")
def _mask_of_twos(folder: Path) -> Path:
    return built_with(folder, lambda arrays: arrays.update(loss_mask=arrays["loss_mask"] * 2))


@plant("sample-mask")
def _mask_with_another_count(folder: Path) -> Path:
    return built_with(folder, lambda arrays: arrays.update(loss_mask=np.ones_like(arrays["loss_mask"])))


@plant("sample-mask")
def _mask_of_zeros(folder: Path) -> Path:
    return built_with(folder, lambda arrays: arrays.update(loss_mask=np.zeros_like(arrays["loss_mask"])))


@plant("sample-states")
def _zero_tap(folder: Path) -> Path:
    return built_with(folder, lambda arrays: arrays["hidden_states"].__setitem__((slice(None), 1), 0))


@plant("sample-states")
def _constant_final_state(folder: Path) -> Path:
    return built_with(folder, lambda arrays: arrays["final_state"].__setitem__(3, 0x3F80))


@plant("statistics-record")
def _other_statistics(folder: Path) -> Path:
    def harm(root: Path) -> None:
        reseal(root, lambda body: body["health"].update(rms=[2 * x for x in body["health"]["rms"]]))

    return damaged(folder, harm)


@plant("statistics-outlier")
def _shard_of_another_magnitude(folder: Path) -> Path:
    rows, manifest = corpus_rows((20, 24, 31, 18, 22, 19)), little_manifest(store={"shard_bytes": 2500})
    made = make_store(folder / "store", rows, manifest=manifest, scale=lambda shard: 10.0 if shard == 1 else 1.0)
    assert len(committed_shards(made.path)) > 2
    return made.path


@plant("index-stale")
def _index_that_names_another_writer(folder: Path) -> Path:
    def harm(root: Path) -> None:
        path = root / "index.parquet"
        changed = path.read_bytes().replace(b"parquet-cpp-arrow", b"parquet-cpp-arr0w")
        assert changed != path.read_bytes()
        path.write_bytes(changed)

    return damaged(folder, harm)


@plant("index-stale")
def _missing_index(folder: Path) -> Path:
    return damaged(folder, lambda root: (root / "index.parquet").unlink())


@plant("index-stale")
def _truncated_index(folder: Path) -> Path:
    return damaged(folder, lambda root: (root / "index.parquet").write_bytes(b""))


@plant("index-stale")
def _index_of_other_columns(folder: Path) -> Path:
    return damaged(folder, lambda root: pq.write_table(pa.table({"sample_id": ["s0"]}), root / "index.parquet"))


@plant("index-stale")
def _index_that_misses_a_row(folder: Path) -> Path:
    def harm(root: Path) -> None:
        path = root / "index.parquet"
        pq.write_table(pq.read_table(path).slice(1), path)

    return damaged(folder, harm)


@plant("target-damaged")
def _missing_target(folder: Path) -> Path:
    return damaged(folder, lambda root: shutil.rmtree(root / "target"))


@plant("target-damaged")
def _truncated_head(folder: Path) -> Path:
    path = "target/head.safetensors"
    return damaged(folder, lambda root: (root / path).write_bytes((root / path).read_bytes()[:-2]))


@plant("target-damaged")
def _edited_facts(folder: Path) -> Path:
    path = "target/target.json"
    return damaged(folder, lambda root: (root / path).write_bytes((root / path).read_bytes().replace(b"1.0", b"2.0")))


@plant("head-mismatch")
def _other_logprobs(folder: Path) -> Path:
    return built_with(folder, lambda arrays: arrays.update(logit_logprobs=arrays["logit_logprobs"] - np.float16(1)))


@plant("head-mismatch")
def _shifted_final_states(folder: Path) -> Path:
    return built_with(folder, lambda arrays: arrays.update(final_state=np.roll(arrays["final_state"], 1, axis=0)))


@plant("head-mismatch")
def _top_ids_outside_the_vocabulary(folder: Path) -> Path:
    return built_with(folder, lambda arrays: arrays.update(logit_ids=arrays["logit_ids"] + VOCAB))


@plant("head-mismatch")
def _nan_logprobs(folder: Path) -> Path:
    return built_with(folder, lambda arrays: arrays["logit_logprobs"].__setitem__(0, np.nan))


@plant("kernels-mixed")
def _shard_of_another_kernel_path(folder: Path) -> Path:
    return damaged(
        folder, lambda root: reseal(root, lambda body: body["provenance"]["kernels"].update(path_id="fla-1"))
    )


def test_a_kernel_path_that_somebody_accepted_is_no_finding(tmp_path: Path) -> None:
    def accept(body: dict[str, Any]) -> None:
        body["provenance"].update(kernels={"path_id": "fla-1", "path": "fla"}, accepted_path="fla-1")

    root = make_store(tmp_path / "store").path
    reseal(root, accept)
    assert verify(root, "quick").findings == []


def lossy_store(folder: Path) -> Path:
    return make_store(folder / "store", manifest=little_manifest(store={"codec": "int8"})).path


@plant("codec-error")
def _no_record_of_the_codec(folder: Path) -> Path:
    root = lossy_store(folder)
    reseal(root, lambda body: body["health"].pop("codec"))
    return root


@plant("codec-error")
def _an_error_beyond_the_promise(folder: Path) -> Path:
    root = lossy_store(folder)
    reseal(root, lambda body: body["health"]["codec"].update(worst_cosine=[0.9999, 0.9, 0.9999, 0.9999]))
    return root


@plant("file-content")
def _corrupted_scale(folder: Path) -> Path:
    root = lossy_store(folder)
    flip(root / SHARD / "hidden_states_scales/c.0.0.0", 1)
    return root


@plant("sample-states")
def _scales_that_were_never_written(folder: Path) -> Path:
    """The fill value under matching checksums: what a reader without ours would see of a missing chunk."""

    def forget(row: Sample, arrays: Arrays) -> None:
        if row.sample_id == "s3":
            arrays["hidden_states_scales"][:] = 0x7FC0

    return make_store(folder / "store", manifest=little_manifest(store={"codec": "int8"}), edit_stored=forget).path


BY_COMPARISON = {"recompute-differs", "kernels-differ", "stores-differ"}
"""Found only when states are compared with others."""


def test_the_plants_cover_every_finding() -> None:
    assert PLANTS.keys() == FINDINGS.keys() - BY_COMPARISON
    assert FINDINGS.keys() >= QUICK


CASES = [(code, make) for code, plants in PLANTS.items() for make in plants]


@pytest.mark.parametrize(("code", "make"), CASES, ids=[f"{code}:{make.__name__[1:]}" for code, make in CASES])
def test_a_planted_fault_is_found(code: str, make: Plant, tmp_path: Path) -> None:
    root = make(tmp_path)
    full, quick = verify(root, "full"), verify(root, "quick")
    assert code in {finding.code for finding in full.findings}
    assert {finding.code for finding in quick.findings} <= QUICK
    assert (code in {finding.code for finding in quick.findings}) == (code in QUICK)
    assert not full.ok
    for finding in full.findings:
        assert finding.where
        assert finding.detail
    assert json.loads(json.dumps(full.to_json(), allow_nan=False))["findings"]


def test_altered_metadata_is_reported_and_what_it_describes_is_not_read(tmp_path: Path) -> None:
    assert [finding.code for finding in verify(_flipped_metadata(tmp_path)).findings] == ["file-content"]


def test_findings_name_the_shard_to_rebuild(tmp_path: Path) -> None:
    root = _removed_shard(tmp_path)
    (finding,) = [f for f in verify(root).findings if f.code == "shard-missing"]
    assert (finding.shard, finding.where) == (1, "00001.zarr")


def test_the_index_of_an_unfinished_store_is_not_called_stale(tmp_path: Path) -> None:
    assert {finding.code for finding in verify(_unfinished(tmp_path)).findings} == {"shard-missing"}
