"""Other readers of Zarr: tensorstore, which shares no code with zarr-python, reads every codec's shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

import hscache
from hscache.store.index import read_shard
from hscache.store.layout import StorePaths
from tests.made.stores import little_manifest, make_store
from tests.store.test_golden import V1
from tests.store.test_lossy import by_the_page

pytestmark = pytest.mark.oracle


@pytest.fixture(scope="module", params=["raw", "lz4", "zstd", "int8", "int4"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param != "lz4":
        return V1 / str(request.param)
    manifest = little_manifest(store={"codec": "lz4", "chunk_tokens": 4, "shard_bytes": 1600})
    return make_store(tmp_path_factory.mktemp("lz4") / "store", manifest=manifest).path


def open_array(tensorstore: Any, directory: Path) -> Any:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{directory}/"}}
    return tensorstore.open(spec, read=True).result()


def test_every_array_has_the_same_elements(tensorstore: Any, store: Path) -> None:
    seen = 0
    for path in sorted(store.glob("shards/*/*/zarr.json")):
        theirs, ours = open_array(tensorstore, path.parent), zarr.open_array(str(path.parent), mode="r")
        assert theirs.shape == ours.shape
        assert np.array_equal(theirs.read().result(), ours[:])
        part = slice(ours.shape[0] // 3, ours.shape[0] - 1)
        assert np.array_equal(theirs[part].read().result(), ours[part])
        seen += 1
    assert seen >= 6


def test_a_sample_is_what_our_reader_gives(tensorstore: Any, store: Path) -> None:
    shard, opened = StorePaths(store).shard(0), hscache.open(store)
    samples = read_shard(shard)["samples"]
    sample, n = opened[opened.index_of(samples["sample_id"][0])], samples["n_tokens"][0]
    for name, states in (("hidden_states", sample.hidden_states), ("final_state", sample.final_state)):
        bits = open_array(tensorstore, shard / name)[:n].read().result()
        if (shard / f"{name}_scales").exists():
            scales = open_array(tensorstore, shard / f"{name}_scales")[:n].read().result()
            codec = zarr.open_array(str(shard / name), mode="r").attrs["codec"]
            theirs = torch.from_numpy(by_the_page(bits, scales, codec)).bfloat16()  # type: ignore[arg-type]
        else:
            theirs = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
        assert torch.equal(theirs, states)


def test_a_flipped_byte_is_refused(tensorstore: Any, tmp_path: Path) -> None:
    """The checksums are Zarr's own: a reader that knows nothing of us sees damage, too."""
    made = make_store(tmp_path / "store")
    directory = StorePaths(made.path).shard(0) / "hidden_states"
    (file,) = [path for path in directory.iterdir() if path.name != "zarr.json"]
    content = bytearray(file.read_bytes())
    content[5] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"(?i)crc|checksum|digest"):
        open_array(tensorstore, directory).read().result()
