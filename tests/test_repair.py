"""Repair rebuilds what is damaged and nothing else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from faults import contents
from typer.testing import CliRunner

from hscache.build import build
from hscache.cli import app
from hscache.errors import IntegrityError
from hscache.manifest import parse_manifest
from hscache.repair import repair
from hscache.verify import verify
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
