"""The same build under other versions of transformers, each in a process of its own.

``python tools/bench/fla_env.py`` installs them once. They wire their kernels differently, and their torch references
are other code: a store begun with one of them is not finished with another.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path

import fla_env
import pytest

from hscache.audit.verify import verify
from hscache.build.run import build
from hscache.manifest import load_manifest
from hscache.store.index import committed_shards, read_shard
from tests.made.six_samples import SHARDS, six_samples

pytestmark = pytest.mark.fla


def hscache(version: str, *args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command line under another version of transformers."""
    if not fla_env.transformers_directory(version).is_dir():
        pytest.skip(f"transformers {version} is not installed for this test: python tools/bench/fla_env.py")
    return subprocess.run(
        [sys.executable, "-c", "from hscache.cli import main; main()", *map(str, args)],
        env=fla_env.transformers_environment(version),
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return six_samples("qwen3_5_vlm", tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def store(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built under the environment's own transformers."""
    out = tmp_path_factory.mktemp("store") / "store"
    build(load_manifest(manifest), out, device="cpu")
    assert len(committed_shards(out)) == SHARDS
    return out


@pytest.mark.parametrize("version", fla_env.OTHER_TRANSFORMERS)
def test_a_store_is_not_finished_under_another_transformers(
    manifest: Path, store: Path, tmp_path: Path, version: str
) -> None:
    begun = tmp_path / "begun"
    shutil.copytree(store, begun)
    shutil.rmtree(begun / "shards/00002.zarr")
    (begun / "index.parquet").unlink()
    refused = hscache(version, "build", manifest, "--out", begun, "--device", "cpu")
    assert refused.returncode == 4, refused.stderr
    told = " ".join(refused.stderr.split())
    print(refused.stderr)
    assert "store-other-kernels" in told
    assert f"transformers: {importlib.metadata.version('transformers')} there, {version} here" in told
    assert "chunk_gated_delta_rule of layers.0.linear_attn and 5 more layers: torch" in told
    assert len(committed_shards(begun)) == SHARDS - 1


@pytest.mark.parametrize("version", fla_env.OTHER_TRANSFORMERS)
def test_another_transformers_builds_whole_stores_of_the_same_states(
    manifest: Path, store: Path, tmp_path: Path, version: str
) -> None:
    own = tmp_path / "own"
    built = hscache(version, "build", manifest, "--out", own, "--device", "cpu")
    assert built.returncode == 0, built.stderr
    made = read_shard(own / "shards/00000.zarr")["provenance"]
    assert made["versions"]["transformers"] == version
    assert made["kernels"]["path"] == "torch (causal_conv1d_fn: torch, chunk_gated_delta_rule: torch)"
    assert made["kernels"]["path_id"] != read_shard(store / "shards/00000.zarr")["provenance"]["kernels"]["path_id"]
    assert {r["calls"] > 0 for r in made["kernels"]["records"] if r["op"] == "chunk_gated_delta_rule"} == {True}
    done = hscache(version, "verify", own, "--recompute", "2", "--against", store, "--json", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert min(tap["equal"] for tap in report["recompute"]["taps"]) == 1.0
    for tap in report["against"]["taps"]:
        assert tap["mean"] < 1e-6
    assert verify(own).ok
