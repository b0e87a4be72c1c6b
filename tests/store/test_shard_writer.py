"""Shards: any samples come back bit by bit, through zarr alone and by hand from the bytes."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import google_crc32c
import numcodecs.blosc
import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hscache.errors import ConfigError, IntegrityError
from hscache.store.codecs import NAMES, Codec
from hscache.store.index import read_shard
from hscache.store.layout import (
    ArraySpec,
    array_specs,
    data_file_name,
    group_metadata,
)
from hscache.store.reader import as_torch, bf16_to_float32
from hscache.store.shard_writer import ShardWriter
from tests.made.stores import same_bits

Arrays = dict[str, NDArray[Any]]


def random_sample(rng: np.random.Generator, specs: list[ArraySpec], n_tokens: int, n_loss: int) -> Arrays:
    """Return arrays of arbitrary bits: every NaN payload, subnormal and negative zero may be among them."""
    rows = {"tokens": n_tokens, "loss": n_loss}
    shapes = {spec.name: (rows[spec.axis], *spec.inner) for spec in specs}
    return {
        spec.name: np.frombuffer(rng.bytes(int(np.prod(shapes[spec.name])) * spec.dtype.itemsize), spec.dtype).reshape(
            shapes[spec.name]
        )
        for spec in specs
    }


WHOSE = {"shard": 0, "manifest_digest": "of the store"}


def write_shard(folder: Path, specs: list[ArraySpec], codec: str, samples: list[Arrays], **attributes: Any) -> Path:
    writer = ShardWriter(folder / "staged", specs, codec)
    for i, arrays in enumerate(samples):
        writer.add(f"s{i}", i, arrays)
    assert writer.commit(folder / "00000.zarr", WHOSE | attributes)
    return folder / "00000.zarr"


def joined(samples: list[Arrays], spec: ArraySpec) -> NDArray[Any]:
    return np.concatenate([np.zeros((0, *spec.inner), spec.dtype), *(arrays[spec.name] for arrays in samples)])


def parse_by_hand(shard: Path, spec: ArraySpec, codec: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Read an array from the bytes of the Zarr specification alone: its rows, and what fills the last chunk."""
    metadata = json.loads((shard / spec.name / "zarr.json").read_bytes())
    rows = metadata["shape"][0]
    path = shard / spec.name / data_file_name(spec)
    if not path.exists():
        return np.zeros((0, *spec.inner), spec.dtype), np.zeros((0, *spec.inner), spec.dtype)
    data = path.read_bytes()
    n_chunks = -(-rows // spec.chunk_rows)
    index_bytes, crc = data[-16 * n_chunks - 4 : -4], data[-4:]
    assert google_crc32c.value(index_bytes) == int.from_bytes(crc, "little")
    chunks = []
    for offset, length in np.frombuffer(index_bytes, "<u8").reshape(-1, 2).tolist():
        packed, crc = data[offset : offset + length - 4], data[offset + length - 4 : offset + length]
        assert google_crc32c.value(packed) == int.from_bytes(crc, "little")
        plain = numcodecs.blosc.decompress(packed) if spec.packed and codec != "raw" else packed
        chunks.append(np.frombuffer(plain, spec.dtype).reshape(spec.chunk_rows, *spec.inner))
    whole = np.concatenate(chunks)
    return whole[:rows], whole[rows:]


splits = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=0, max_size=6)


@pytest.mark.parametrize("codec", NAMES)
@settings(max_examples=20)  # every file is synced: disks of shared machines are slow at that
@given(split=splits, chunk_tokens=st.integers(1, 12), taps=st.integers(1, 3), seed=st.integers(0, 1 << 32))
def test_any_split_of_rows_reads_back_bit_by_bit(
    codec: str, split: list[tuple[int, int]], chunk_tokens: int, taps: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    specs = array_specs(n_taps=taps, hidden_size=4, final_state=True, topk=2, chunk_tokens=chunk_tokens)
    samples = [random_sample(rng, specs, n_tokens, n_loss) for n_tokens, n_loss in split]
    with tempfile.TemporaryDirectory() as folder:
        shard = write_shard(Path(folder), specs, codec, samples)
        group = zarr.open_group(str(shard), mode="r")
        assert sorted(group.array_keys()) == sorted(spec.name for spec in specs)
        for spec in specs:
            expected = joined(samples, spec)
            assert same_bits(np.asarray(group[spec.name][...]), expected), spec.name
            rows, padding = parse_by_hand(shard, spec, codec)
            assert same_bits(rows, expected), spec.name
            fill = np.full(padding.shape, spec.fill_scalar, spec.dtype)
            assert same_bits(padding, fill), spec.name


@pytest.mark.parametrize("codec", NAMES)
def test_every_bf16_bit_pattern_survives(codec: str, tmp_path: Path) -> None:
    specs = array_specs(n_taps=1, hidden_size=256, final_state=False, topk=0, chunk_tokens=64)
    every = np.arange(1 << 16, dtype=np.uint16).reshape(256, 1, 256)
    sample = {"input_ids": np.arange(256, dtype="i4"), "loss_mask": np.ones(256, "u1"), "hidden_states": every}
    shard = write_shard(tmp_path, specs, codec, [sample])
    back = np.asarray(zarr.open_group(str(shard), mode="r")["hidden_states"][...])
    assert same_bits(back, every)
    as_bf16 = as_torch(back, "hidden_states")
    assert as_bf16.dtype == torch.bfloat16
    assert torch.equal(as_bf16.view(torch.int16), torch.from_numpy(every.view(np.int16)))
    as_float = bf16_to_float32(every)
    np.testing.assert_array_equal(as_float.view(np.uint32) >> 16, every)
    finite = np.isfinite(as_float)
    np.testing.assert_array_equal(as_float[finite], as_bf16.float().numpy()[finite])


def test_a_missing_data_file_reads_as_fill_value_in_zarr(tmp_path: Path) -> None:
    specs = array_specs(n_taps=1, hidden_size=4, final_state=True, topk=2, chunk_tokens=4)
    shard = write_shard(tmp_path, specs, "raw", [random_sample(np.random.default_rng(0), specs, 5, 3)])
    for spec in specs:
        (shard / spec.name / data_file_name(spec)).unlink()
    group = zarr.open_group(str(shard), mode="r")
    assert (np.asarray(group["hidden_states"][...]) == 0x7FC0).all()  # NaN
    assert (np.asarray(group["final_state"][...]) == 0x7FC0).all()  # NaN
    assert (np.asarray(group["input_ids"][...]) == -1).all()
    assert (np.asarray(group["loss_mask"][...]) == 255).all()
    assert (np.asarray(group["logit_ids"][...]) == -1).all()
    assert np.isnan(np.asarray(group["logit_logprobs"][...])).all()
    assert np.isnan(np.asarray(group["logit_lse"][...])).all()


@pytest.mark.parametrize("codec", NAMES)
def test_a_shard_whose_samples_are_all_rejected_has_arrays_without_rows(codec: str, tmp_path: Path) -> None:
    specs = array_specs(n_taps=2, hidden_size=4, final_state=True, topk=2, chunk_tokens=4)
    writer = ShardWriter(tmp_path / "staged", specs, codec)
    writer.reject("bad", 3, 17, "non-finite", "tap 1, token 4")
    writer.commit(tmp_path / "00000.zarr", WHOSE)
    body = read_shard(tmp_path / "00000.zarr")
    assert body["samples"] == {
        "sample_id": ["bad"], "corpus_row": [3], "start": [-1], "n_tokens": [17], "loss_start": [-1], "n_loss": [0],
        "digest": [""], "reason": ["non-finite"], "detail": ["tap 1, token 4"],
    }  # fmt: skip
    group = zarr.open_group(str(tmp_path / "00000.zarr"), mode="r")
    for spec in specs:
        assert np.asarray(group[spec.name][...]).shape == (0, *spec.inner)
        assert f"{spec.name}/zarr.json" in body["files"]
    assert not list((tmp_path / "00000.zarr").rglob("c.*"))


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_short_writes_of_the_kernel_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    specs = array_specs(n_taps=1, hidden_size=4, final_state=False, topk=1, chunk_tokens=4)
    samples = [random_sample(np.random.default_rng(1), specs, 9, 5)]
    (tmp_path / "whole").mkdir()
    (tmp_path / "short").mkdir()
    whole = write_shard(tmp_path / "whole", specs, "zstd", samples)
    real, calls = os.writev, []

    def writev(fd: int, parts: list[memoryview]) -> int:
        calls.append(len(parts))
        return real(fd, [parts[0][:most]])

    monkeypatch.setattr(os, "writev", writev)
    short = write_shard(tmp_path / "short", specs, "zstd", samples)
    assert len(calls) > 10
    assert read_shard(short) == read_shard(whole)
    for spec in specs:
        name = f"{spec.name}/{data_file_name(spec)}"
        assert (short / name).read_bytes() == (whole / name).read_bytes()


def test_recorded_sizes_and_digests_are_those_of_the_files(tmp_path: Path) -> None:
    import xxhash

    specs = array_specs(n_taps=2, hidden_size=4, final_state=True, topk=2, chunk_tokens=4)
    shard = write_shard(tmp_path, specs, "lz4", [random_sample(np.random.default_rng(2), specs, 11, 4)])
    files = read_shard(shard)["files"]
    on_disk = {p.relative_to(shard).as_posix() for p in shard.rglob("*") if p.is_file()}
    assert files.keys() == on_disk - {"zarr.json"}
    for name, entry in files.items():
        data = (shard / name).read_bytes()
        assert entry == {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}


def test_content_digest_is_of_the_data_not_of_when_or_how_it_was_made(tmp_path: Path) -> None:
    specs = array_specs(n_taps=1, hidden_size=4, final_state=False, topk=0, chunk_tokens=4)
    sample = random_sample(np.random.default_rng(3), specs, 6, 1)
    other = {**sample, "hidden_states": sample["hidden_states"] ^ 1}
    bodies = []
    for name, arrays, time in (("a", sample, "now"), ("b", sample, "later"), ("c", other, "now")):
        (tmp_path / name).mkdir()
        bodies.append(read_shard(write_shard(tmp_path / name, specs, "raw", [arrays], time=time)))
    assert bodies[0]["content_digest"] == bodies[1]["content_digest"] != bodies[2]["content_digest"]
    assert bodies[0]["samples"] == bodies[1]["samples"]
    assert bodies[0]["samples"]["digest"] != bodies[2]["samples"]["digest"]


def test_sample_digests_do_not_depend_on_the_codec_chunks_or_neighbours(tmp_path: Path) -> None:
    digests = set()
    for i, (codec, chunk) in enumerate((c, n) for c in NAMES for n in (1, 4, 64)):
        specs = array_specs(n_taps=1, hidden_size=4, final_state=False, topk=1, chunk_tokens=chunk)
        rng = np.random.default_rng(4)
        sample = random_sample(rng, specs, 6, 2)
        before = [random_sample(rng, specs, i + 1, 1)]
        (tmp_path / str(i)).mkdir()
        digests.add(read_shard(write_shard(tmp_path / str(i), specs, codec, [*before, sample]))["samples"]["digest"][1])
    assert len(digests) == 1


def test_writing_the_wrong_shape_or_type_is_a_programmers_error(tmp_path: Path) -> None:
    specs = array_specs(n_taps=2, hidden_size=4, final_state=False, topk=0, chunk_tokens=4)
    good = random_sample(np.random.default_rng(5), specs, 6, 1)
    bad: list[Arrays] = [
        {**good, "hidden_states": good["hidden_states"][:-1]},
        {**good, "hidden_states": good["hidden_states"][:, :1]},
        {**good, "hidden_states": good["hidden_states"].view(np.int16)},
        {**good, "input_ids": good["input_ids"].astype(np.int64)},
    ]
    for i, arrays in enumerate(bad):
        writer = ShardWriter(tmp_path / str(i), specs, "raw")
        with pytest.raises(AssertionError):
            writer.add("s", 0, arrays)


@pytest.mark.parametrize(
    ("name", "packing"),
    [
        ("raw", []),
        ("lz4", [{"cname": "lz4", "clevel": 5, "shuffle": "bitshuffle", "blocksize": 0, "typesize": 2}]),
        # the default block size would reach a ratio of 1.2 instead of 1.4 on real states
        ("zstd", [{"cname": "zstd", "clevel": 1, "shuffle": "shuffle", "blocksize": 1 << 20, "typesize": 2}]),
    ],
)
def test_the_codec_chain_is_the_one_of_the_format(name: str, packing: list[dict[str, Any]]) -> None:
    assert Codec(name, np.dtype("<u2")).zarr_codecs() == [
        {"name": "bytes", "configuration": {"endian": "little"}},
        *({"name": "blosc", "configuration": options} for options in packing),
        {"name": "crc32c"},
    ]


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Codec("gzip", np.dtype("u2"))
    assert caught.value.code == "codec-unknown"


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compressed_codecs_make_smooth_states_smaller(codec: str, tmp_path: Path) -> None:
    specs = array_specs(n_taps=1, hidden_size=512, final_state=False, topk=0, chunk_tokens=64)
    states = torch.randn(64, 1, 512, generator=torch.Generator().manual_seed(0)).bfloat16().view(torch.int16).numpy()
    sample = {"input_ids": np.zeros(64, "i4"), "loss_mask": np.ones(64, "u1"), "hidden_states": states.view(np.uint16)}
    entry = read_shard(write_shard(tmp_path, specs, codec, [sample]))["files"]["hidden_states/c.0.0.0"]
    assert entry["bytes"] < 0.9 * states.nbytes


def test_a_shard_that_another_process_committed_first_stays(tmp_path: Path) -> None:
    specs = array_specs(n_taps=1, hidden_size=4, final_state=False, topk=0, chunk_tokens=4)
    write_shard(tmp_path, specs, "raw", [], who=1)
    second = ShardWriter(tmp_path / "late", specs, "raw")
    assert second.commit(tmp_path / "00000.zarr", WHOSE | {"who": 2}) is False
    assert read_shard(tmp_path / "00000.zarr")["who"] == 1
    assert not (tmp_path / "late").exists()


def test_a_directory_in_the_place_of_a_shard_is_an_error_not_a_committed_shard(tmp_path: Path) -> None:
    specs = array_specs(n_taps=1, hidden_size=4, final_state=False, topk=0, chunk_tokens=4)
    (tmp_path / "00000.zarr" / "hidden_states").mkdir(parents=True)
    writer = ShardWriter(tmp_path / "staged", specs, "raw")
    with pytest.raises(IntegrityError) as caught:
        writer.commit(tmp_path / "00000.zarr", WHOSE)
    assert caught.value.code == "store-damaged"


def test_a_record_reads_back_as_it_was_given(tmp_path: Path) -> None:
    specs = array_specs(n_taps=1, hidden_size=4, final_state=False, topk=0, chunk_tokens=4)
    given_ = {"shard": 7, "text": 'ü "quoted" \n', "numbers": [0.1, 1e-300, 2**60], "none": None}
    body = read_shard(write_shard(tmp_path, specs, "raw", [], **given_))
    assert {key: body[key] for key in given_} == given_
    assert group_metadata(body)["attributes"]["hscache"] == body
    assert zarr.open_group(str(tmp_path / "00000.zarr"), mode="r").attrs["hscache"]["text"] == given_["text"]
