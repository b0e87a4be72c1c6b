"""Builds and checks of stores where kernels are not the same everywhere; fake packages stand for the real ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from hscache.audit.verify import verify
from hscache.build.run import KernelPolicy, build
from hscache.errors import EnvironmentFault
from hscache.manifest import load_manifest
from hscache.model import loading
from hscache.store.durable import Staging
from hscache.store.index import committed_shards, finalize, read_shard
from hscache.store.layout import canonical_json, group_metadata
from tests.made.fakes import CONV, fake, fake_fla, fla_source, hscache, run_python
from tests.made.six_samples import SHARDS, six_samples

pytestmark = pytest.mark.thorough

GDN_LAYERS = [0, 1, 2, 4, 5, 6]
CHUNK, CONV_OP = "chunk_gated_delta_rule", "causal_conv1d_fn"
INTERPRETED = {"TRITON_INTERPRET": "1"}  # else no fla kernel is given CPU tensors


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny hybrid and six samples of different lengths, in three shards."""
    return six_samples("qwen3_5", tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def torch_store(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in this process, which has no kernel packages."""
    out = tmp_path_factory.mktemp("torch") / "store"
    build(load_manifest(manifest), out, device="cpu")
    assert len(committed_shards(out)) == SHARDS
    return out


def unfinished(store: Path, out: Path) -> Path:
    """Copy a store as it is before its last shard."""
    shutil.copytree(store, out)
    shutil.rmtree(out / f"shards/0000{SHARDS - 1}.zarr")
    (out / "index.parquet").unlink()
    return out


def kernels_of(store: Path, shard: int) -> dict[str, Any]:
    made: dict[str, Any] = read_shard(store / f"shards/{shard:05d}.zarr")["provenance"]["kernels"]
    return made


def prefill(store: Path, shard: int, op: str) -> list[dict[str, Any]]:
    return [record for record in kernels_of(store, shard)["records"] if record["op"] == op]


# --- what a shard says of its kernels


def test_without_packages_every_shard_names_the_torch_reference_of_each_layer_and_op(torch_store: Path) -> None:
    calls = 0
    for shard in range(SHARDS):
        made = kernels_of(torch_store, shard)
        assert made["path"] == f"torch ({CONV_OP}: torch, {CHUNK}: torch)"
        for op in (CONV_OP, CHUNK):
            records = prefill(torch_store, shard, op)
            assert [record["layer_index"] for record in records] == GDN_LAYERS
            assert len({record["calls"] for record in records}) == 1
            for record in records:
                assert record["implementation"] == "torch"
                assert record["source"].startswith("transformers.models.qwen3_5.modeling_qwen3_5:")
                assert len(record["source_hash"]) == 16
        calls += records[0]["calls"]
    plan = pq.read_table(torch_store / "plan.parquet")
    assert calls == len(set(plan["batch"].to_pylist())), "one call per forward batch, over all shards"


def test_a_build_with_fla_stores_a_mixed_path(manifest: Path, torch_store: Path, tmp_path: Path) -> None:
    fake_fla(tmp_path / "site", fla_source())
    done = hscache(tmp_path / "site", "build", manifest, "--out", tmp_path / "store", **INTERPRETED)
    assert done.returncode == 0, done.stderr
    assert f"kernel path: mixed ({CONV_OP}: torch, {CHUNK}: fla)" in done.stderr
    for shard in range(SHARDS):
        made = kernels_of(tmp_path / "store", shard)
        assert made["path"] == f"mixed ({CONV_OP}: torch, {CHUNK}: fla)"
        assert made["path_id"] != kernels_of(torch_store, shard)["path_id"]
        chunk, conv = (prefill(tmp_path / "store", shard, op) for op in (CHUNK, CONV_OP))
        assert [record["layer_index"] for record in chunk] == [record["layer_index"] for record in conv] == GDN_LAYERS
        assert {(record["implementation"], record["source"]) for record in chunk} == {
            ("fla", "fla.ops.gated_delta_rule:chunk_gated_delta_rule")
        }
        assert {record["implementation"] for record in conv} == {"torch"}
        before = prefill(torch_store, shard, CHUNK)
        assert [record["calls"] for record in chunk] == [record["calls"] for record in before]
        assert {record["source_hash"] for record in chunk}.isdisjoint({record["source_hash"] for record in before})
    assert verify(tmp_path / "store").ok


def test_a_build_with_causal_conv1d_alone_is_mixed_the_other_way_round(manifest: Path, tmp_path: Path) -> None:
    """On a GPU; here the kernel is bound by force, since no CPU tensor is given to it otherwise."""
    fake(tmp_path / "site", "causal_conv1d", CONV, version="1.6.0", dists=("causal-conv1d",))
    got = run_python(
        tmp_path / "site",
        f"""
        from hscache.build.run import KernelPolicy, build
        from hscache.manifest import load_manifest
        from hscache.store.index import read_shard
        out = {{}}
        for choice in ("bound", "auto"):
            store = Path({str(tmp_path)!r}) / choice
            build(load_manifest(Path({str(manifest)!r})), store, device="cpu", kernels=KernelPolicy(choice))
            made = read_shard(store / "shards/00001.zarr")["provenance"]
            out[choice] = [made["kernels"]["path"], made["versions"]["causal-conv1d"],
                           [r["source"] for r in made["kernels"]["records"] if r["op"] == "{CONV_OP}"]]
        print(json.dumps(out))
        """,
    )
    path = f"mixed ({CONV_OP}: causal_conv1d, {CHUNK}: torch)"
    assert got["bound"] == [path, "1.6.0", ["causal_conv1d:causal_conv1d_fn"] * 6]
    assert got["auto"][0] == f"torch ({CONV_OP}: torch, {CHUNK}: torch)"


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_fallback_on_a_gpu_is_refused_unless_allowed(manifest: Path, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault) as caught:
        build(load_manifest(manifest), tmp_path / "store", device="cpu")
    assert caught.value.code == "kernel-fallback"
    assert f"torch ({CONV_OP}: torch, {CHUNK}: torch)" in caught.value.message
    assert committed_shards(tmp_path / "store") == []
    for policy in (KernelPolicy(allow_fallback=True), KernelPolicy("torch")):
        out = tmp_path / f"{policy.choice}"
        build(load_manifest(manifest), out, device="cpu", kernels=policy)
        assert len(committed_shards(out)) == SHARDS


def test_a_layer_whose_ops_never_ran_stops_the_build(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = loading.load_target

    def with_a_lazy_layer(*args: Any) -> loading.LoadedTarget:
        target = load(*args)
        mixer: Any = target.layers[4].linear_attn

        def skip(*_: Any) -> None:  # from the first batch on: what is bound was looked up before
            mixer.forward = lambda hidden_states, **_: hidden_states

        target.backbone.register_forward_pre_hook(skip)
        return target

    monkeypatch.setattr(loading, "load_target", with_a_lazy_layer)
    with pytest.raises(EnvironmentFault) as caught:
        build(load_manifest(manifest), tmp_path / "store", device="cpu")
    assert caught.value.code == "kernel-path-broken"
    assert "shard 0: layer-not-run: layers.4.linear_attn" in caught.value.message
    assert committed_shards(tmp_path / "store") == []


# --- going on with other kernels


@pytest.fixture(scope="module")
def other_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("other") / "site"
    fake_fla(site, fla_source())
    return site


def test_a_resume_with_other_kernels_is_refused_and_the_difference_named(
    manifest: Path, torch_store: Path, other_site: Path, tmp_path: Path
) -> None:
    store = unfinished(torch_store, tmp_path / "store")
    path_id = kernels_of(store, 0)["path_id"]
    command = ("build", manifest, "--out", store)
    refused = hscache(other_site, *command, **INTERPRETED)
    assert refused.returncode == 4, refused.stderr
    assert "store-other-kernels" in refused.stderr
    told = " ".join(refused.stderr.split())
    assert "flash-linear-attention: None there, 0.6.0 here" in told
    assert f"{CHUNK} of layers.0.linear_attn and 5 more layers: torch transformers.models.qwen3_5" in told
    assert "recurrent" not in told, "decoding does not show in a store"
    assert "fla fla.ops.gated_delta_rule:chunk_gated_delta_rule" in told
    assert f"--accept-path {path_id}" in told
    assert committed_shards(store) == [0, 1]
    # an id that is no shard's accepts nothing
    assert hscache(other_site, *command, "--accept-path", "0123456789abcdef", **INTERPRETED).returncode == 4
    accepted = hscache(other_site, *command, "--accept-path", path_id, **INTERPRETED)
    assert accepted.returncode == 0, accepted.stderr
    assert kernels_of(store, 2)["path"].startswith("mixed")
    assert read_shard(store / "shards/00002.zarr")["provenance"]["accepted_path"] == path_id
    assert verify(store).findings == []
    _forget_acceptance(store)
    (finding,) = verify(store).findings
    assert (finding.code, finding.shard) == ("kernels-mixed", 2)
    assert path_id in finding.detail


def _forget_acceptance(store: Path) -> None:
    path = store / "shards/00002.zarr"
    body = read_shard(path)
    body["provenance"]["accepted_path"] = None
    (path / "zarr.json").write_bytes(canonical_json(group_metadata(body)))
    with Staging(store / "staging") as staging:
        finalize(store, staging.path)


def test_the_path_of_the_store_is_still_open_where_other_kernels_are_installed(
    manifest: Path, torch_store: Path, other_site: Path, tmp_path: Path
) -> None:
    store = unfinished(torch_store, tmp_path / "store")
    done = hscache(other_site, "build", manifest, "--out", store, "--kernels", "torch", **INTERPRETED)
    assert done.returncode == 0, done.stderr
    assert kernels_of(store, 2)["path_id"] == kernels_of(store, 0)["path_id"]
    assert verify(store).ok


# --- verify and doctor


def test_verify_catches_a_scale_of_1_001_and_names_the_first_layer(torch_store: Path, tmp_path: Path) -> None:
    fake_fla(tmp_path / "site", fla_source(scale="1.001"))
    command = ("verify", torch_store, "--kernels", "torch,bound", "--json", "--device", "cpu")
    done = hscache(tmp_path / "site", *command, **INTERPRETED)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert [finding["code"] for finding in report["findings"]] == ["kernels-differ"]
    two = report["kernels"]
    assert not two["agree"]
    assert two["sentence"].startswith(f"these paths differ, beginning at layer 0 ({CHUNK}: rel_frobenius, norm_ratio")
    assert two["sentence"] in done.stderr
    assert [c["layer_index"] for c in two["local"]] == GDN_LAYERS
    for c in two["local"]:
        assert c["total"]["norm_ratio"] == pytest.approx(1.001, abs=1e-5)
        assert c["total"]["one_minus_cos_max"] < 1e-9, "cosine alone is blind to it"
    assert max(two["ratios"]) > 3


def test_verify_agrees_with_a_right_kernel(torch_store: Path, other_site: Path) -> None:
    done = hscache(other_site, "verify", torch_store, "--kernels", "torch,bound", "--device", "cpu", **INTERPRETED)
    assert done.returncode == 0, done.stderr
    assert "these paths agree" in done.stderr


def test_verify_refuses_a_path_that_cannot_run_here_before_it_runs_the_other(
    torch_store: Path, other_site: Path
) -> None:
    command = ("verify", torch_store, "--level", "quick", "--device", "cpu", "--kernels")
    for site, paths, code in ((other_site, "torch,bound", "kernel-device"), (Path(), "torch,fla", "kernel-missing")):
        done = hscache(site, *command, paths)  # not interpreted: no fla kernel takes CPU tensors
        assert done.returncode == 3, done.stderr
        assert code in done.stderr
        assert "states on the" not in done.stderr


def test_doctor_shows_the_error_of_an_import_that_fails(manifest: Path, tmp_path: Path) -> None:
    text = "RuntimeError: built for another libc: GLIBC_2.99"
    fake_fla(tmp_path, "raise RuntimeError('built for another libc: GLIBC_2.99')")
    done = hscache(tmp_path, "doctor", "--target", manifest.parent / "target")
    assert done.returncode == 1, done.stderr
    assert f"flash-linear-attention 0.6.0: cannot be used: {text}" in done.stdout
    assert f"not fla: {text}" in done.stdout
    assert "hint: pip install" in done.stdout
    # a build that must not fall back says the same
    built = hscache(tmp_path, "build", manifest, "--out", tmp_path / "store", "--kernels", "fla")
    assert built.returncode == 3
    assert "kernel-missing" in built.stderr
    assert text in " ".join(built.stderr.split())
