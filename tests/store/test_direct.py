"""Rows straight from shard files: equal to what zarr-python reads, and damage is an error, never numbers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import google_crc32c
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hscache.errors import IntegrityError
from hscache.store import direct
from hscache.store.codecs import NAMES
from hscache.store.direct import ArrayFile, read_layout
from hscache.store.layout import ArraySpec, array_specs
from hscache.store.shard_writer import ShardWriter
from tests.made.stores import flip, same_bits

HIDDEN = 6


@pytest.fixture(scope="module")
def pool() -> Iterator[Executor]:
    with ThreadPoolExecutor(3) as executor:
        yield executor


def states_spec(taps: int, chunk_tokens: int, hidden: int = HIDDEN) -> ArraySpec:
    specs = array_specs(n_taps=taps, hidden_size=hidden, final_state=False, topk=0, chunk_tokens=chunk_tokens)
    return specs[-1]


def random_states(n_tokens: int, spec: ArraySpec, seed: int = 0) -> NDArray[np.uint16]:
    return np.random.default_rng(seed).integers(0, 1 << 16, (n_tokens, *spec.inner), dtype=np.uint16)


@contextmanager
def written(spec: ArraySpec, states: NDArray[np.uint16], codec: str) -> Iterator[Path]:
    """Write one array with our writer and yield its directory."""
    with tempfile.TemporaryDirectory() as folder, patch("os.fsync"):
        writer = ShardWriter(Path(folder) / "staged", [*_small_specs(), spec], codec)
        ids = np.zeros(len(states), "i4")
        writer.add("s", 0, {"input_ids": ids, "loss_mask": ids.astype("u1"), "hidden_states": states})
        shard = Path(folder) / "store/shards/00000.zarr"
        shard.parent.mkdir(parents=True)
        writer.commit(shard, {})
        yield shard / "hidden_states"


def _small_specs() -> list[ArraySpec]:
    return array_specs(n_taps=1, hidden_size=1, final_state=False, topk=0, chunk_tokens=1)[:2]


def opened(directory: Path, spec: ArraySpec) -> ArrayFile:
    layout = read_layout(directory, spec)
    assert layout is not None
    return ArrayFile(directory, spec, layout)


def read(file: ArrayFile, start: int, stop: int, columns: list[int] | None = None, **how: Any) -> NDArray[np.uint16]:
    taps = file._spec.inner[0] if columns is None else len(columns)
    out = np.full((stop - start, taps, file._spec.inner[1]), 0xDEAD, np.uint16)
    file.read(start, stop, out, columns=columns, **how)
    return out


def damage_of(action: Any) -> str:
    with pytest.raises(IntegrityError) as caught:
        action()
    assert caught.value.code == "store-damaged"
    assert "00000.zarr/hidden_states: " in caught.value.message
    assert caught.value.hint
    return caught.value.message


@st.composite
def reads(draw: st.DrawFn) -> dict[str, Any]:
    """Draw an array and a part of it."""
    n_tokens, taps = draw(st.integers(1, 40)), draw(st.integers(1, 4))
    start = draw(st.integers(0, n_tokens - 1))
    return {
        "n_tokens": n_tokens,
        "taps": taps,
        "chunk": draw(st.integers(1, 50)),
        "start": start,
        "stop": draw(st.integers(start, n_tokens)),
        "columns": draw(st.none() | st.lists(st.integers(0, taps - 1), max_size=5)),
        "crc": draw(st.booleans()),
        # small enough that every path is taken with small arrays
        "first": draw(st.sampled_from([1, 6, 50, 16 << 10])),
        "batch": draw(st.sampled_from([1, 7, 100, 1 << 20])),
        "gap": draw(st.sampled_from([3, 4, 4096])),
        "skip": draw(st.sampled_from([0, 1 << 14])),
        "most_parts": draw(st.sampled_from([1, 2, 5, 1024])),
    }


@pytest.mark.parametrize("codec", NAMES)
@settings(max_examples=150)
@given(case=reads(), threaded=st.booleans())
def test_any_range_of_any_taps_is_what_zarr_reads(
    codec: str, pool: Executor, case: dict[str, Any], threaded: bool
) -> None:
    spec = states_spec(case["taps"], case["chunk"])
    with written(spec, random_states(case["n_tokens"], spec), codec) as directory:
        columns, span = case["columns"], slice(case["start"], case["stop"])
        expected = np.asarray(zarr.open_array(str(directory), mode="r")[span])
        expected = expected if columns is None else expected[:, columns]
        with (
            patch.object(direct, "_FIRST_BYTES", case["first"]),
            patch.object(direct, "_BATCH_BYTES", case["batch"]),
            patch.object(direct, "_MAX_GAP_BYTES", case["gap"]),
            patch.object(direct, "_SKIP_BYTES", case["skip"]),
            patch.object(direct, "_IOV_MAX", case["most_parts"]),
        ):
            how = {"crc": case["crc"], "pool": pool if threaded else None}
            got = read(opened(directory, spec), span.start, span.stop, columns, **how)
        assert same_bits(got, np.ascontiguousarray(expected))


@settings(max_examples=30)
@given(case=reads(), packed=st.booleans())
def test_arrays_that_zarr_wrote_are_read_too(case: dict[str, Any], packed: bool) -> None:
    spec = states_spec(case["taps"], case["chunk"])
    states = random_states(case["n_tokens"], spec) | 1  # no chunk of fill values, which zarr would leave out
    chunks = (case["chunk"], *spec.inner)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "shards/00000.zarr/hidden_states"
        outer = (-(-case["n_tokens"] // case["chunk"]) * case["chunk"] * 2, *spec.inner)  # room for twice the chunks
        compressors = [zarr.codecs.BloscCodec(cname="zstd", typesize=2)] if packed else []
        array = zarr.create_array(
            str(directory),
            shape=states.shape,
            dtype="u2",
            chunks=chunks,
            shards=outer,
            compressors=[*compressors, zarr.codecs.Crc32cCodec()],
            chunk_key_encoding={"name": "default", "separator": "."},
            filters=None,
        )
        array[:] = states
        file = opened(directory, spec)
        assert file.layout.blosc == packed
        assert file.layout.n_entries >= -(-case["n_tokens"] // case["chunk"])
        got = read(file, case["start"], case["stop"], case["columns"], crc=case["crc"])
    expected = states[case["start"] : case["stop"]]
    assert same_bits(got, expected if case["columns"] is None else np.ascontiguousarray(expected[:, case["columns"]]))


def rewrite_index(path: Path, edit: Any) -> None:
    """Edit the shard index and make its checksum agree."""
    data = bytearray(path.read_bytes())
    n = _n_chunks(path)
    table = np.frombuffer(bytes(data[-16 * n - 4 : -4]), "<u8").reshape(-1, 2).copy()
    edit(table)
    data[-16 * n - 4 :] = table.tobytes() + google_crc32c.value(table.tobytes()).to_bytes(4, "little")
    path.write_bytes(data)


def _n_chunks(path: Path) -> int:
    layout = read_layout(path.parent, states_spec(2, 4))
    assert layout is not None
    return layout.n_entries


def test_chunks_in_any_order_in_the_file_are_found_by_the_index() -> None:
    spec = states_spec(2, 4)
    states = random_states(20, spec)
    with written(spec, states, "raw") as directory:
        path = directory / "c.0.0.0"
        size = 128  # 96 bytes of rows, a checksum, padding
        data, order = path.read_bytes(), [3, 0, 1, 4, 2]
        path.write_bytes(b"".join(data[size * i : size * (i + 1)] for i in order) + data[5 * size :])
        rewrite_index(
            path, lambda table: table.__setitem__((slice(None), 0), [order.index(i) * size for i in range(5)])
        )
        for crc in (False, True):
            assert same_bits(read(opened(directory, spec), 2, 19, crc=crc), states[2:19])


@pytest.mark.parametrize("codec", NAMES)
@pytest.mark.parametrize("damage", ["missing", "offset", "length", "empty", "behind the end"])
def test_an_index_that_lacks_a_chunk_or_points_nowhere_is_damage(codec: str, damage: str) -> None:
    spec = states_spec(2, 4)
    with written(spec, random_states(20, spec), codec) as directory:
        edits: dict[str, tuple[int, int, int]] = {
            "missing": (2, 0, 2**64 - 1),
            "offset": (2, 0, 1 << 63),
            "length": (2, 1, 1 << 40),
            "empty": (2, 1, 3),
            "behind the end": (4, 0, (directory / "c.0.0.0").stat().st_size - 8),
        }
        row, column, value = edits[damage]
        rewrite_index(directory / "c.0.0.0", lambda table: table.__setitem__((row, column), value))
        assert f"chunk {row}" in damage_of(lambda: opened(directory, spec))


@pytest.mark.parametrize("codec", NAMES)
def test_every_byte_of_the_index_is_under_its_checksum(codec: str) -> None:
    spec = states_spec(2, 4)
    with written(spec, random_states(20, spec), codec) as directory:
        data = (directory / "c.0.0.0").read_bytes()
        for back in range(1, 16 * 5 + 5):
            flip(directory / "c.0.0.0", position=-back, bit=0x40)
            assert "index" in damage_of(lambda: opened(directory, spec))
            (directory / "c.0.0.0").write_bytes(data)


@pytest.mark.parametrize("codec", NAMES)
@pytest.mark.parametrize("columns", [None, [1]])
def test_a_changed_byte_of_a_chunk_is_found_by_whoever_reads_a_row_of_it(codec: str, columns: list[int] | None) -> None:
    spec = states_spec(2, 4)
    states = random_states(18, spec)
    with written(spec, states, codec) as directory:
        path = directory / "c.0.0.0"
        data = path.read_bytes()
        index = np.frombuffer(data[-84:-4], "<u8").reshape(-1, 2).tolist()
        expected = states if columns is None else states[:, columns]
        rng = np.random.default_rng(0)
        for chunk, (offset, length) in enumerate(index):
            for position in {offset, offset + length - 1, *rng.integers(offset, offset + length, 6).tolist()}:
                flip(path, position)
                for row in range(18):
                    if row // 4 == chunk:
                        assert f"chunk {chunk} differs" in damage_of(
                            lambda row=row: read(opened(directory, spec), row, row + 1, columns)  # type: ignore[misc]
                        )
                    else:
                        got = read(opened(directory, spec), row, row + 1, columns)
                        assert same_bits(got, np.ascontiguousarray(expected[row : row + 1]))
                path.write_bytes(data)


def test_without_checksums_a_raw_row_is_given_as_it_lies() -> None:
    spec = states_spec(1, 4)
    states = random_states(4, spec)
    with written(spec, states, "raw") as directory:
        flip(directory / "c.0.0.0", position=0, bit=1)
        assert read(opened(directory, spec), 0, 4, crc=False)[0, 0, 0] == states[0, 0, 0] ^ 1


@pytest.mark.parametrize("codec", NAMES)
def test_a_file_that_is_truncated_under_an_open_reader_is_damage(codec: str) -> None:
    spec = states_spec(2, 4)
    with written(spec, random_states(20, spec), codec) as directory:
        file = opened(directory, spec)
        os.truncate(directory / "c.0.0.0", 30)
        for crc in (False, True):
            for columns in (None, [1]):
                damage_of(lambda crc=crc, columns=columns: read(file, 0, 20, columns, crc=crc))  # type: ignore[misc]


@pytest.mark.parametrize("size", [0, 3, 50, -1])
def test_a_file_of_another_size_or_none_cannot_be_opened(size: int) -> None:
    spec = states_spec(2, 4)
    with written(spec, random_states(20, spec), "raw") as directory:
        if size < 0:
            (directory / "c.0.0.0").unlink()
        else:
            os.truncate(directory / "c.0.0.0", size)
        damage_of(lambda: opened(directory, spec))


def test_a_disk_error_is_damage_and_another_system_error_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = states_spec(2, 4)
    with written(spec, random_states(20, spec), "raw") as directory:
        file = opened(directory, spec)

        def preadv(*_: Any) -> int:
            raise OSError(number, "planted")

        monkeypatch.setattr(os, "preadv", preadv)
        number = 5  # EIO
        assert "planted" in damage_of(lambda: read(file, 0, 3))
        number = 9  # EBADF
        with pytest.raises(OSError, match="planted"):
            read(file, 0, 3)


@pytest.mark.parametrize("most", [1, 7, 100])
def test_short_reads_of_the_kernel_lose_nothing(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    spec = states_spec(2, 4)
    states, real = random_states(20, spec), os.preadv
    with written(spec, states, "raw") as directory:
        monkeypatch.setattr(os, "preadv", lambda fd, parts, offset: real(fd, [parts[0][:most]], offset))
        for crc in (False, True):
            assert same_bits(read(opened(directory, spec), 1, 19, crc=crc), states[1:19])


def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by what each call of preadv gives from now on."""
    real, got = os.preadv, []

    def preadv(fd: int, parts: Any, offset: int) -> int:
        got.append(real(fd, parts, offset))
        return got[-1]

    monkeypatch.setattr(os, "preadv", preadv)
    return got


@pytest.mark.parametrize("chunk", [64, 8])
@pytest.mark.parametrize("crc", [False, True])
def test_the_calls_of_a_range_grow(monkeypatch: pytest.MonkeyPatch, chunk: int, crc: bool) -> None:
    spec = states_spec(3, chunk, hidden=4096)  # chunks larger and smaller than a batch
    states = random_states(256, spec)
    with written(spec, states, "raw") as directory:
        file, got = opened(directory, spec), bytes_read(monkeypatch)
        assert same_bits(read(file, 0, 256, crc=crc), states)
    assert sum(got) >= states.nbytes
    # a checked batch holds whole chunks
    assert got[0] == 16 << 10 if chunk == 64 or not crc else got[0] < 1.1 * states[:chunk].nbytes
    assert all(now <= 4.1 * sum(got[:k]) for k, now in enumerate(got) if k)
    assert len(got) <= (12 if crc else 6)


def test_a_wide_subset_of_taps_leaves_out_the_bytes_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = states_spec(5, 4, hidden=4096)
    states = random_states(11, spec)
    with written(spec, states, "raw") as directory:
        file, got = opened(directory, spec), bytes_read(monkeypatch)
        for columns in ([2], [1, 3], [0, 1], [4, 1]):
            got.clear()
            rows = read(file, 1, 10, columns, crc=False)
            assert same_bits(rows, np.ascontiguousarray(states[1:10, columns]))
            narrow = columns == sorted(columns)
            assert sum(got) == 9 * 8192 * (max(columns) + 1 - min(columns) if narrow else 5)


@pytest.mark.parametrize(
    "change",
    [
        {"data_type": "int16"},
        {"shape": [20, 2, 7]},
        {"shape": [21, 2, 6]},
        {"shape": [-1, 2, 6]},
        {"shape": ["20", 2, 6]},
        {"codecs": []},
        {"codecs": [{"name": "bytes"}]},
        {"chunk_grid": {}},
        {"chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}}},
    ],
)
def test_metadata_of_another_layout_is_left_to_zarr(change: dict[str, Any]) -> None:
    import json

    spec = states_spec(2, 4)
    with written(spec, random_states(20, spec), "raw") as directory:
        metadata = json.loads((directory / "zarr.json").read_text())
        (directory / "zarr.json").write_text(json.dumps({**metadata, **change}))
        assert read_layout(directory, spec) is None
        for text in ("", "[]", "3", "{", '{"codecs": 3}'):
            (directory / "zarr.json").write_text(text)
            assert read_layout(directory, spec) is None
        (directory / "zarr.json").unlink()
        damage_of(lambda: read_layout(directory, spec))
