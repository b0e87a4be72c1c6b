"""What is damaged, foreign or missing in a store is refused by name, and never read as something else."""

from __future__ import annotations

import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hscache
from hscache.errors import FormatError, HscacheError, InputError, IntegrityError
from hscache.store.codecs import NAMES
from hscache.store.head import load_head
from hscache.store.index import load_index, read_manifest, read_plan, read_shard
from hscache.store.layout import (
    canonical_json,
    json_digest,
)
from tests.made.stores import (
    Little,
    change_token,
    corpus_rows,
    flip,
    little_manifest,
    make_store,
    same_bits,
)


def read_all(root: Path, *, verify: bool = False) -> None:
    store = hscache.open(root)
    for i in range(len(store)):
        store.sample(i, verify=verify)


def error_of(action: Callable[[], object]) -> HscacheError:
    with pytest.raises(HscacheError) as caught:
        action()
    return caught.value


def test_a_path_without_a_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        error = error_of(lambda path=path: hscache.open(path))  # type: ignore[misc]
        assert (error.code, type(error)) == ("not-a-store", InputError)
        assert "hscache build" in str(error.hint)


def test_a_newer_format_is_refused(copied: Path) -> None:
    body = {key: value for key, value in read_manifest(copied).items() if key != "digest"}
    body["format_version"] = 2
    (copied / "manifest.json").write_bytes(canonical_json({**body, "digest": json_digest(body)}))
    error = error_of(lambda: hscache.open(copied))
    assert (error.code, type(error)) == ("format-version", FormatError)


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b"17", b"{", b"\xff\xfe", b'{"format_version": 1, "digest": "x"}'])
def test_a_manifest_that_is_none_is_damage(copied: Path, text: bytes) -> None:
    (copied / "manifest.json").write_bytes(text)
    assert error_of(lambda: hscache.open(copied)).code == "store-damaged"


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b"{", b'{"attributes": {"hscache": 3}}', b'{"attributes": 1e999}'])
def test_a_shard_record_that_is_none_is_damage(copied: Path, text: bytes) -> None:
    (copied / "shards/00000.zarr/zarr.json").write_bytes(text)
    error = error_of(lambda: read_all(copied))
    assert (error.code, "00000.zarr/zarr.json" in error.message) == ("store-damaged", True)


@pytest.mark.parametrize("change", ["spaces", "node_type", "infinity", "surrogate"])
def test_a_shard_record_that_is_not_byte_for_byte_what_was_written_is_damage(copied: Path, change: str) -> None:
    path = copied / "shards/00000.zarr/zarr.json"
    text = path.read_bytes()
    changed = {
        "spaces": text.replace(b",", b", ", 1),
        "node_type": text.replace(b'"node_type":"group"', b'"node_type":"grouq"'),
        "infinity": text.replace(b'"rms":[', b'"rms":[1e999,'),
        "surrogate": re.sub(rb'"s\d"', b'"\\\\ud800"', text, count=1),
    }[change]
    assert changed != text
    path.write_bytes(changed)
    assert error_of(lambda: read_shard(path.parent)).code == "store-damaged"


FILES = [
    "shards/00000.zarr/zarr.json",
    *(f"shards/00000.zarr/{name}/zarr.json" for name in ("hidden_states", "input_ids", "logit_lse")),
    "shards/00000.zarr/hidden_states/c.0.0.0",
    "shards/00000.zarr/final_state/c.0.0",
    "shards/00000.zarr/input_ids/c.0",
    "shards/00000.zarr/loss_mask/c.0",
    "shards/00000.zarr/logit_ids/c.0.0",
    "shards/00000.zarr/logit_lse/c.0",
]


@pytest.mark.parametrize("damage", ["remove", "truncate", "grow", "empty"])
@pytest.mark.parametrize("name", FILES)
def test_a_missing_or_resized_file_of_a_shard_is_damage(copied: Path, name: str, damage: str) -> None:
    path = copied / name
    data = path.read_bytes()
    path.unlink()
    if damage != "remove":
        path.write_bytes({"truncate": data[:-1], "grow": data + b"\0", "empty": b""}[damage])
    error = error_of(lambda: read_all(copied))
    assert (error.code, type(error)) == ("store-damaged", IntegrityError)
    assert name.removeprefix("shards/") in error.message


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith("zarr.json")])
def test_altered_metadata_of_the_same_size_is_damage(copied: Path, name: str) -> None:
    flip(copied / name, position=30)
    assert error_of(lambda: read_all(copied)).code == "store-damaged"


@pytest.mark.parametrize("codec", NAMES)
@pytest.mark.parametrize("position", [0, 40, -30, -1])
def test_a_flipped_byte_of_data_is_damage_whether_digests_are_checked_or_not(
    tmp_path: Path, codec: str, position: int
) -> None:
    made = make_store(tmp_path / "store", manifest=little_manifest(store={"codec": codec}))
    flip(made.path / "shards/00000.zarr/hidden_states/c.0.0.0", position)
    for verify in (False, True):
        assert error_of(lambda verify=verify: read_all(made.path, verify=verify)).code == "store-damaged"  # type: ignore[misc]


def test_bytes_that_pass_every_checksum_but_the_samples_digest_are_found_by_verify(copied: Path) -> None:
    change_token(copied)
    read_all(copied)  # zarr is content
    error = error_of(lambda: read_all(copied, verify=True))
    assert (error.code, type(error)) == ("sample-digest", IntegrityError)
    assert error.message.startswith("00000.zarr: sample 's")


@pytest.mark.parametrize("damage", ["truncate", "empty", "other", "columns"])
def test_an_index_that_cannot_be_read_is_damage(copied: Path, damage: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = copied / "index.parquet"
    if damage == "columns":
        pq.write_table(pa.table({"sample_id": ["s0"]}), path)
    else:
        path.write_bytes({"truncate": path.read_bytes()[:-20], "empty": b"", "other": b"PAR1" * 9}[damage])
    assert error_of(lambda: hscache.open(copied)).code == "store-damaged"


@pytest.mark.parametrize(("name", "read"), [("index.parquet", load_index), ("plan.parquet", read_plan)])
def test_no_changed_byte_of_a_table_gives_another_table(copied: Path, name: str, read: Callable[[Path], Any]) -> None:
    path, table = copied / name, read(copied)
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for position in range(0, len(data), 5):
        bad = bytearray(data)
        bad[position] ^= int(rng.integers(1, 256))
        path.write_bytes(bad)
        try:
            assert read(copied).equals(table), position
        except IntegrityError:
            refused += 1
    assert refused > len(data) // 10


def test_without_index_the_store_is_read_from_its_shards_and_needs_the_plan(copied: Path, little: Little) -> None:
    (copied / "index.parquet").unlink()
    assert hscache.open(copied).sample_ids == hscache.open(little.path).sample_ids
    (copied / "plan.parquet").unlink()
    assert error_of(lambda: hscache.open(copied)).code == "store-damaged"


@pytest.mark.parametrize("name", ["target.json", "head.safetensors", "config.json"])
@pytest.mark.parametrize("damage", ["remove", "truncate"])
def test_a_missing_or_truncated_file_of_the_target_is_damage(copied: Path, name: str, damage: str) -> None:
    path = copied / "target" / name
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-3])
    error = error_of(lambda: load_head(copied / "target"))
    assert (error.code, name in error.message) == ("store-damaged", True)


def _swapped(store: Path) -> None:
    a, b, aside = (store / "shards" / name for name in ("00000.zarr", "00001.zarr", "aside"))
    a.rename(aside)
    b.rename(a)
    aside.rename(b)


def _foreign(store: Path) -> None:
    other = make_store(store.parent / "other", time="2026-02-02T00:00:00Z").path / "shards/00001.zarr"
    shutil.rmtree(store / "shards/00001.zarr")
    other.rename(store / "shards/00001.zarr")


def _index_of_before(store: Path) -> None:
    # as a build leaves it that was killed behind its last shard: the sample s3 is rejected by now
    whole = make_store(store.parent / "other")
    (store / "index.parquet").write_bytes((whole.path / "index.parquet").read_bytes())


@pytest.mark.parametrize("harm", [_swapped, _foreign, _index_of_before])
def test_good_bytes_of_another_shard_store_or_time_are_damage(
    harm: Callable[[Path], None], copied: Path, little: Little
) -> None:
    harm(copied)
    store, refused = hscache.open(copied), set()
    for i, sample_id in enumerate(store.sample_ids):
        try:
            sample = store.sample(i, kind="bits", crc=False)
            assert same_bits(sample.hidden_states, little.arrays[sample_id]["hidden_states"]), sample_id
        except IntegrityError as error:
            refused.add((error.code, int(store._columns["shard"][i])))
    where = {_swapped: {0, 1}, _foreign: {1}, _index_of_before: {0}}[harm]
    assert refused == {("store-damaged", shard) for shard in where}


def test_a_store_is_complete_when_the_planned_shards_are_there_not_so_many(copied: Path) -> None:
    (copied / "shards/00001.zarr").rename(copied / "shards/00077.zarr")
    assert not hscache.open(copied).complete


def test_a_file_where_an_array_should_be_is_damage(copied: Path) -> None:
    array = copied / "shards/00001.zarr/hidden_states"
    shutil.rmtree(array)
    array.write_bytes(b"")
    store = hscache.open(copied)
    at = store._columns["shard"].tolist().index(1)
    assert error_of(lambda: store[at]).code == "store-damaged"


@pytest.mark.parametrize("position", [-1, -100, 300])
def test_a_flipped_bit_of_the_head_is_damage(copied: Path, position: int) -> None:
    path = copied / "target" / "head.safetensors"
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)
    assert error_of(lambda: load_head(copied / "target")).code == "store-damaged"


def test_a_head_file_of_garbage_is_damage(copied: Path) -> None:
    path = copied / "target" / "head.safetensors"
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert error_of(lambda: load_head(copied / "target")).code == "store-damaged"


def everything(root: Path, *, verify: bool) -> list[Any]:
    """Return all that a reader can get from a store."""
    store = hscache.open(root)
    return [pickle.dumps(store.sample(i, kind="bits", verify=verify)) for i in range(len(store))]


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_changed_byte_never_gives_other_data_nor_a_foreign_error(tmp_path: Path, codec: str) -> None:
    rows = corpus_rows((6, 4))
    root = make_store(tmp_path / "store", rows, manifest=little_manifest(store={"codec": codec})).path
    good = everything(root, verify=True)
    assert len(good) == 2
    rng = np.random.default_rng(0)
    refused = 0
    files = [p for p in sorted(root.rglob("*")) if p.is_file() and p.parent != root / "target"]
    for path in files:
        data = path.read_bytes()
        for position in rng.permutation(len(data))[:5].tolist():
            bad = bytearray(data)
            bad[position] ^= int(rng.integers(1, 256))
            path.write_bytes(bad)
            for verify in (False, True):
                try:
                    got = everything(root, verify=verify)
                except HscacheError:
                    refused += 1
                else:  # in padding, in a chunk that is not read, or in the plan, which a finished store does not need
                    assert got == good, f"{path.relative_to(root)}: byte {position}"
        path.write_bytes(data)
    assert refused > 5 * len(files)
