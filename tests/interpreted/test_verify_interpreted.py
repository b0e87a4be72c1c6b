"""The commands on fla's real kernels: a store of the trained tiny hybrid, through Triton's interpreter.

As in :mod:`test_fla_interpreted`, ``python tools/bench/fla_env.py`` installs the packages once. The interpreter takes
seconds per call, so the samples are few and short, and some cross the chunk border at 64 tokens.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import fla_env
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hscache.build.run import build
from hscache.manifest import load_manifest
from hscache.store.index import committed_shards, read_shard

pytestmark = pytest.mark.fla

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (70, 24)
GDN_LAYERS = [0, 1, 2, 4, 5, 6]


def hscache(fla: str, *args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command line where this version of fla is installed and interpreted."""
    if not fla_env.is_ready(fla):
        pytest.skip(f"fla {fla} is not installed for the interpreter: python tools/bench/fla_env.py {fla}")
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "import fla_on_cpu; from hscache.cli import main; main()",
         *map(str, args)],
        env=fla_env.environment(fla),
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped manifest of the tiny hybrid over what it wrote itself, cut short around the first written token."""
    root = tmp_path_factory.mktemp("inputs")
    rows = pq.read_table(ROOT / "tests/data/tiny-hybrid-completions.parquet").to_pylist()[: len(LENGTHS)]
    for row, n in zip(rows, LENGTHS, strict=True):
        start = row["loss_mask"].index(1) - n // 2
        row["input_ids"], row["loss_mask"] = (row[name][start : start + n] for name in ("input_ids", "loss_mask"))
        assert len(row["input_ids"]) == n
    pq.write_table(pa.Table.from_pylist(rows), root / "corpus.parquet")
    path = root / "tiny-hybrid.toml"
    text = (ROOT / "manifests/build/demo.toml").read_text()
    text = text.replace('"tools/targets/tiny_hybrid"', f'"{ROOT}/tools/targets/tiny_hybrid"')
    path.write_text(text.replace("runs/demo/corpus.parquet", f"{root}/corpus.parquet"))
    return path


@pytest.fixture(scope="module")
def torch_store(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("float32") / "store"
    build(load_manifest(manifest), out, device="cpu")
    return out


@pytest.fixture(scope="module")
def bf16_store(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bfloat16") / "store"
    build(load_manifest(manifest, ["target.dtype=bfloat16"]), out, device="cpu")
    return out


def compared(store: Path, fla: str, exit_status: int) -> dict[str, Any]:
    done = hscache(fla, "verify", store, "--kernels", "torch,fla", "--device", "cpu", "--json")
    assert done.returncode == exit_status, done.stderr
    two: dict[str, Any] = json.loads(done.stdout)["kernels"]
    print(two["sentence"])
    return two


def test_new_fla_agrees_with_torch_in_float32(torch_store: Path) -> None:
    two = compared(torch_store, fla_env.NEW, 0)
    assert two["sentence"].startswith("these paths agree")
    assert [c["layer_index"] for c in two["local"]] == GDN_LAYERS
    for c in two["local"]:
        assert c["total"]["vectors"] == sum(LENGTHS) * 4
        assert c["total"]["one_minus_cos_max"] <= 1e-9
    assert max(tap["mean"] for tap in two["end_to_end"]["taps"]) <= 1e-9


def test_new_fla_agrees_with_torch_in_bfloat16(bf16_store: Path) -> None:
    two = compared(bf16_store, fla_env.NEW, 0)
    assert two["sentence"].startswith("these paths agree")
    for c in two["local"]:
        assert c["dtype"] == "bfloat16"
        assert c["total"]["one_minus_cos_mean"] <= 1e-4
        assert c["total"]["one_minus_cos_max"] <= 5e-3
        assert c["total"]["rel_frobenius"] <= 2e-2
    assert max(two["ratios"]) <= 3


def test_old_fla_is_refused_by_a_build_and_shown_wrong_by_verify(
    manifest: Path, torch_store: Path, tmp_path: Path
) -> None:
    for choice in ("fla", "auto"):
        refused = hscache(fla_env.OLD, "build", manifest, "--out", tmp_path / choice, "--kernels", choice)
        assert refused.returncode == 3, refused.stderr
        assert "kernel-wrong-states" in refused.stderr
        assert "4 value heads over 2 key heads" in " ".join(refused.stderr.split())
        assert committed_shards(tmp_path / choice) == []
    two = compared(torch_store, fla_env.OLD, 1)
    assert not two["agree"]
    assert re.match(
        r"these paths differ, beginning at layer 0 \(chunk_gated_delta_rule: .* heads 0, 1, 2, 3\); "
        r"the difference is .* times the float32 noise floor",
        two["sentence"],
    )
    assert all(not c["ok"] for c in two["local"])


def test_a_store_built_with_fla_holds_the_states_of_the_torch_store(
    manifest: Path, torch_store: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    built = hscache(fla_env.NEW, "build", manifest, "--out", store, "--kernels", "fla", "--device", "cpu")
    assert built.returncode == 0, built.stderr
    made = read_shard(store / "shards/00000.zarr")["provenance"]["kernels"]
    assert made["path"] == "mixed (causal_conv1d_fn: torch, chunk_gated_delta_rule: fla)"
    chunk = [record for record in made["records"] if record["op"] == "chunk_gated_delta_rule"]
    assert {r["source"] for r in chunk} == {"fla.ops.gated_delta_rule.chunk:chunk_gated_delta_rule"}
    assert all(record["calls"] for record in chunk)
    done = hscache(fla_env.NEW, "verify", store, "--against", torch_store, "--json")
    assert done.returncode == 0, done.stderr
    against = json.loads(done.stdout)["against"]
    print(against["sentence"])
    for tap in against["taps"]:
        assert tap["mean"] <= 1e-7, "float32 noise rounds a few elements of bf16 the other way"
        assert tap["equal"] >= 0.99
        assert tap["norm_ratio"] == pytest.approx(1, abs=1e-4)
    assert against["top1"] == 1.0
