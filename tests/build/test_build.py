"""A build is resumable, refuses to mix, rejects with reasons, and stops cleanly."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from faults import contents, small_manifest
from typer.testing import CliRunner

import hscache
import hscache.build.run as build_module
import hscache.device
from hscache.audit.verify import verify
from hscache.build import space
from hscache.build.repair import repair
from hscache.build.run import build
from hscache.cli import app
from hscache.errors import ConfigError, ConflictError, EnvironmentFault, IntegrityError
from hscache.manifest import load_manifest, to_toml
from hscache.model.capture import Capturer
from hscache.store import shard_writer
from hscache.store.index import committed_shards, load_index, read_manifest, read_shard
from hscache.store.info import store_info
from hscache.store.layout import StorePaths, canonical_json, group_metadata, json_digest
from hscache.store.shard_writer import ShardWriter
from tests.conftest import DATA, SMOLLM2, TINY_HYBRID, smollm2_manifest
from tests.made.six_samples import six_samples

COMMAND = [sys.executable, "-c", "from hscache.cli import main; main()"]


@pytest.fixture(scope="module")
def short_corpus(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real completions, each cut to its last 24 prompt and first 24 written tokens: quick to build."""
    table = pq.read_table(corpus).to_pylist()
    for row in table:
        first = row["loss_mask"].index(1)
        cut = slice(max(0, first - 24), first + 24)
        row["input_ids"], row["loss_mask"] = row["input_ids"][cut], row["loss_mask"][cut]
    out = tmp_path_factory.mktemp("short") / "corpus.parquet"
    pq.write_table(pa.Table.from_pylist(table), out)
    return out


@pytest.fixture
def manifest_file(short_corpus: Path, tmp_path: Path) -> Path:
    path = tmp_path / "manifest.toml"
    path.write_text(
        f"""
        target = {{ path = "{SMOLLM2}", dtype = "float32" }}
        states = {{ taps = [1, 8, 14, 20, 27] }}
        corpus = {{ path = "{short_corpus}" }}
        limits = {{ batch_tokens = 128 }}
        store = {{ shard_bytes = "768KiB" }}
        """
    )
    return path


@pytest.fixture(scope="module")
def reference(smollm2: Path, short_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted build to compare with."""
    out = tmp_path_factory.mktemp("reference") / "store"
    build(quick(short_corpus), out)
    return out


def quick(corpus: Path, **sections: dict[str, object]) -> Any:
    small: dict[str, dict[str, object]] = {"limits": {"batch_tokens": 128}, "store": {"shard_bytes": "768KiB"}}
    for name, section in sections.items():
        small[name] = {**small.get(name, {}), **section}
    return smollm2_manifest(corpus, **small)


def test_a_second_run_finishes_what_is_missing_and_the_result_is_the_same(
    reference: Path, short_corpus: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(reference, store)
    shutil.rmtree(store / "shards/00002.zarr")
    (store / "index.parquet").unlink()
    report = build(quick(short_corpus), store)
    assert report.built == 1
    assert contents(store) == contents(reference)
    assert load_index(store).equals(load_index(reference))
    assert list((store / "staging").iterdir()) == []
    assert verify(store).ok


def test_a_finished_store_is_left_alone_without_loading_the_target(
    reference: Path, short_corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hscache.model.loading.load_target", lambda *_: pytest.fail("the target was loaded"))
    before = contents(reference)
    assert build(quick(short_corpus), reference).built == 0
    assert contents(reference) == before


def test_a_store_from_before_a_setting_existed_has_its_default(
    reference: Path, short_corpus: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(reference, store)
    body = read_manifest(store)
    for place in (body["manifest"]["limits"], body["plan"]):
        for name in ("repeats", "drop_cut", "repeated_tokens", "cut"):
            place.pop(name, None)
    sealed = {key: value for key, value in body.items() if key != "digest"}
    (store / "manifest.json").write_bytes(canonical_json({**sealed, "digest": json_digest(sealed)}))
    assert build(quick(short_corpus), store).built == 0
    assert store_info(store)["repeated_tokens"] is None
    with pytest.raises(ConflictError, match=r"manifest\.limits\.repeats: store 1\.0, now 0\.5"):
        build(quick(short_corpus, limits={"batch_tokens": 128, "repeats": 0.5}), store)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"limits": {"max_tokens": 2047}}, "manifest.limits.max_tokens"),
        ({"target": {"dtype": "bfloat16"}}, "manifest.target.dtype"),
        ({"states": {"taps": [2, 8, 14, 20, 27]}}, "manifest.states.taps"),
        ({"store": {"codec": "zstd"}}, "manifest.store.codec"),
        ({"logits": {"topk": 8}}, "manifest.logits.topk"),
    ],
)
def test_another_manifest_is_refused_and_the_field_named(
    reference: Path, short_corpus: Path, change: dict[str, dict[str, object]], named: str
) -> None:
    before = contents(reference)
    with pytest.raises(ConflictError) as caught:
        build(quick(short_corpus, **change), reference)
    assert caught.value.code == "store-other-manifest"
    assert named in caught.value.message
    assert contents(reference) == before


def test_another_order_of_the_same_rows_is_another_corpus(reference: Path, short_corpus: Path, tmp_path: Path) -> None:
    table = pq.read_table(short_corpus)
    turned = tmp_path / "turned.parquet"
    pq.write_table(table.take(list(range(len(table)))[::-1]), turned)
    with pytest.raises(ConflictError, match=r"corpus\.digest"):
        build(quick(turned), reference)


def test_the_same_target_and_corpus_elsewhere_are_the_same(reference: Path, short_corpus: Path, tmp_path: Path) -> None:
    moved, link = tmp_path / "moved.parquet", tmp_path / "target"
    shutil.copy(short_corpus, moved)
    link.symlink_to(SMOLLM2)
    assert build(quick(moved, target={"path": str(link)}), reference).built == 0


def test_other_weights_are_refused(reference: Path, short_corpus: Path, tmp_path: Path) -> None:
    other = tmp_path / "target"
    shutil.copytree(SMOLLM2, other)
    with open(other / "model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    with pytest.raises(ConflictError, match=r"target\.weights\.model\.safetensors"):
        build(quick(short_corpus, target={"path": str(other)}), reference)


def test_a_folder_that_is_no_store_is_not_written_into(short_corpus: Path, smollm2: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConflictError) as caught:
        build(quick(short_corpus), tmp_path)
    assert caught.value.code == "store-exists"
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def hundred_rows(corpus: Path, nan_token: int) -> list[dict[str, Any]]:
    """93 good rows cut from real completions, and seven bad ones."""
    ids = [token for row in pq.read_table(corpus).to_pylist() for token in row["input_ids"] if token != nan_token]
    rows = [
        {"id": f"r{i}", "input_ids": ids[i * 20 : i * 20 + 20], "loss_mask": [0] * 8 + [1] * 12} for i in range(100)
    ]
    rows[3]["input_ids"] = [*rows[3]["input_ids"][:-1], 49152]
    rows[17]["loss_mask"] = rows[17]["loss_mask"][:-1]
    rows[31] |= {"input_ids": [], "loss_mask": []}
    rows[44]["loss_mask"] = [0] * 20
    rows[58] |= {"input_ids": ids[:65], "loss_mask": [0] * 8 + [1] * 57}
    rows[72]["input_ids"] = [*rows[72]["input_ids"][:-1], nan_token]
    rows[99]["id"] = "r5"
    return rows


@pytest.mark.parametrize(("flags", "status"), [([], 0), (["--strict"], 1)])
def test_rows_that_the_plan_rejects_are_a_failure_only_on_wish(tmp_path: Path, flags: list[str], status: int) -> None:
    manifest = small_manifest(tmp_path)
    source = Path(manifest.corpus.path)
    rows = pq.read_table(source).to_pylist()
    rows[2]["input_ids"], rows[2]["loss_mask"] = rows[2]["input_ids"] * 2, rows[2]["loss_mask"] * 2
    pq.write_table(pa.Table.from_pylist(rows), source)
    file = tmp_path / "manifest.toml"
    file.write_text(to_toml(manifest))
    args = ["build", str(file), "--out", str(tmp_path / "store"), "--set", "limits.max_tokens=64", "--json", *flags]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == status, result.output
    report = json.loads(result.stdout)
    assert (report["samples"], report["rejected"], report["capture_rejected"]) == (5, {"too-long": 1}, {})
    assert "1 row rejected: 1 too-long" in result.stderr


@pytest.mark.thorough
def test_of_100_rows_with_7_bad_ones_93_are_stored_and_7_recorded_with_reasons(
    smollm2: Path, corpus: Path, manifest_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nan_token = 11
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in hundred_rows(corpus, nan_token)))
    from hscache.model import loading

    load = loading.load_target

    def with_nan_token(*args: Any) -> loading.LoadedTarget:
        target = load(*args)

        def poison(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            return output.masked_fill((inputs[0] == nan_token)[..., None], float("nan"))

        target.model.get_input_embeddings().register_forward_hook(poison)  # type: ignore[operator]
        return target

    monkeypatch.setattr(loading, "load_target", with_nan_token)
    store = tmp_path / "store"
    args = ["build", str(manifest_file), "--out", str(store), "--json", "--set", "limits.max_tokens=64"]
    result = CliRunner().invoke(app, [*args, "--set", f"corpus.path={source}", "--set", "limits.batch_tokens=512"])
    assert result.exit_code == 1, result.output
    report = json.loads(result.stdout)
    reasons = {
        "ids-out-of-vocab": 1, "length-mismatch": 1, "empty": 1, "too-few-supervised": 1, "too-long": 1,
        "non-finite": 1, "duplicate-id": 1,
    }  # fmt: skip
    assert report["samples"] == 93
    assert report["rejected"] == reasons
    assert report["capture_rejected"] == {"non-finite": 1}
    index = load_index(store)
    assert index["corpus_row"].to_pylist() == list(range(100))
    assert Counter(r for r in index["reason"].to_pylist() if r) == reasons
    bad = {row["corpus_row"]: row["reason"] for row in index.to_pylist() if row["status"] == "rejected"}
    assert sorted(bad) == [3, 17, 31, 44, 58, 72, 99]
    assert bad[72] == "non-finite"
    assert len(hscache.open(store)) == 93
    assert np.isfinite(hscache.open(store)[71].hidden_states.float().numpy()).all()
    checked = CliRunner().invoke(app, ["verify", str(store), "--json"])
    assert checked.exit_code == 0, checked.output
    assert json.loads(checked.stdout)["samples"] == 93
    # a second run has nothing to do, and still says that rows are missing
    again = CliRunner().invoke(app, [*args, "--set", f"corpus.path={source}", "--set", "limits.batch_tokens=512"])
    assert again.exit_code == 1
    assert json.loads(again.stdout)["rejected"] == reasons


@pytest.mark.thorough
def test_the_first_interrupt_leaves_a_resumable_store_and_prints_the_command(
    manifest_file: Path, reference: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    args = [*COMMAND, "build", str(manifest_file), "--out", str(store)]
    process = subprocess.Popen(args, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not committed_shards(store) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, log = process.communicate(timeout=120)
    assert process.returncode == 130, log
    assert f"build {manifest_file} --out {store}" in log
    done = len(committed_shards(store))
    assert 0 < done < len(committed_shards(reference))
    assert list((store / "staging").iterdir()) == []
    subprocess.run(args, check=True, capture_output=True)
    assert contents(store) == contents(reference)


@pytest.mark.thorough
def test_two_builders_on_one_store_give_what_one_gives(manifest_file: Path, reference: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    args = [*COMMAND, "build", str(manifest_file), "--out", str(store), "--json"]
    pair = [subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    built = 0
    for process in pair:
        report, log = process.communicate(timeout=240)
        assert process.returncode == 0, log
        built += json.loads(report)["built"]
    assert built == len(committed_shards(reference)), "no shard is made twice"
    assert contents(store) == contents(reference)
    assert list((store / "staging").iterdir()) == []
    assert verify(store).ok


def test_a_build_that_does_not_fit_is_refused_before_it_begins(
    smollm2: Path, short_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "free_bytes", lambda _: 300 << 20 >> 1)
    with pytest.raises(EnvironmentFault) as caught:
        build(quick(short_corpus), tmp_path / "store")
    assert caught.value.code == "disk-full"
    assert caught.value.exit_code == 3
    assert committed_shards(tmp_path / "store") == []


def test_a_disk_that_fills_up_stops_the_build_cleanly_and_it_can_go_on(
    short_corpus: Path, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, written, writev = tmp_path / "store", 0, os.writev

    def small_disk(fd: int, parts: list[memoryview]) -> int:
        nonlocal written
        written += sum(part.nbytes for part in parts)
        if written > 3 << 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return writev(fd, parts)

    monkeypatch.setattr(shard_writer.os, "writev", small_disk)
    with pytest.raises(EnvironmentFault) as caught:
        build(quick(short_corpus), store)
    assert caught.value.code == "disk-full"
    monkeypatch.undo()
    n = len(committed_shards(store))
    assert n > 0
    assert {f.code for f in verify(store).findings} == {"shard-missing"}
    assert build(quick(short_corpus), store).built == len(committed_shards(reference)) - n
    assert contents(store) == contents(reference)


@pytest.mark.thorough
@pytest.mark.parametrize("fault", [OSError(errno.EIO, "bad sector"), OSError(errno.ENOSPC, "full"), MemoryError()])
def test_a_shard_that_lost_a_sample_to_a_fault_that_passed_is_not_committed(
    short_corpus: Path, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    """The sample is the shard's last one: its commit is on its way before anybody hears of the fault."""
    store, add, calls = tmp_path / "store", ShardWriter.add, 0
    last = len(read_shard(StorePaths(reference).shard(1))["samples"]["sample_id"])
    last += len(read_shard(StorePaths(reference).shard(0))["samples"]["sample_id"])

    def failing(self: ShardWriter, *args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == last:
            raise fault
        add(self, *args)

    monkeypatch.setattr(ShardWriter, "add", failing)
    with pytest.raises((EnvironmentFault, MemoryError)):
        build(quick(short_corpus), store)
    monkeypatch.undo()
    assert committed_shards(store) == [0]
    assert {f.code for f in verify(store).findings} == {"shard-missing"}
    build(quick(short_corpus), store)
    assert contents(store) == contents(reference)


def test_a_shard_with_other_samples_than_planned_ends_a_build_with_an_error(
    short_corpus: Path, reference: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(reference, store)
    path = StorePaths(store).shard(1)
    body = read_shard(path, whole=True)
    body["samples"] = {name: values[1:] for name, values in body["samples"].items()}
    (path / "zarr.json").write_bytes(canonical_json(group_metadata(body)))
    with pytest.raises(IntegrityError, match=r"00001.zarr: \d+ samples, but \d+ were planned") as caught:
        build(quick(short_corpus), store)
    assert "hscache repair" in str(caught.value.hint)
    assert repair(store).ok
    assert contents(store) == contents(reference)


MEMORY = """
import resource, sys, torch
torch.set_num_threads(1)
from pathlib import Path
from hscache.build.run import build
from hscache.manifest import parse_manifest
target, corpus, store = sys.argv[1:]
sections = {"target": {"path": target, "dtype": "float32"}, "states": {"taps": [1, 2, 4, 5, 7]}}
sections |= {"corpus": {"path": corpus}, "limits": {"batch_tokens": 512}, "store": {"shard_bytes": "4MiB"}}
build(parse_manifest(sections, "test"), Path(store), device="cpu")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""


@pytest.mark.thorough
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    """Peak memory of a build over a corpus ten times as long: less than a third of the states that it has more."""
    ids = [i for row in pq.read_table(DATA / "tiny-hybrid-completions.parquet").to_pylist() for i in row["input_ids"]]
    peaks, sizes = [], []
    for n in (40, 400):
        rows = [{"id": f"r{i}", "input_ids": ids[i * 3 :][:64], "loss_mask": [0] * 8 + [1] * 56} for i in range(n)]
        source, store = tmp_path / f"{n}.parquet", tmp_path / f"store-{n}"
        pq.write_table(pa.Table.from_pylist(rows), source)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, str(TINY_HYBRID), str(source), str(store)],
            check=True, capture_output=True, text=True, env=env,
        )  # fmt: skip
        peaks.append(int(done.stdout))
        sizes.append(sum(path.stat().st_size for path in store.rglob("*") if path.is_file()) >> 20)
        assert len(hscache.open(store)) == n
    assert sizes[1] - sizes[0] > 50
    assert peaks[1] - peaks[0] < (sizes[1] - sizes[0]) / 3, f"{peaks} MiB for stores of {sizes} MiB"


@pytest.mark.parametrize("stuck", [0, 1])
def test_a_shard_whose_samples_all_run_out_of_memory_is_a_shard_without_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck: int
) -> None:
    manifest, store = small_manifest(tmp_path), tmp_path / "store"
    build(manifest, tmp_path / "whole")
    ids = set(read_shard(StorePaths(tmp_path / "whole").shard(stuck))["samples"]["sample_id"])
    forward = Capturer._forward

    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def smaller(self: Capturer, rows: list[Any], width: int) -> Any:
        # in a block behind others, whose kernels have run by then
        hook = (
            self._target.layers[5].register_forward_pre_hook(out_of_memory)
            if {r.sample_id for r in rows} & ids
            else None
        )
        try:
            return forward(self, rows, width)
        finally:
            if hook is not None:
                hook.remove()

    with monkeypatch.context() as patch:
        patch.setattr(Capturer, "_forward", smaller)
        assert build(manifest, store).rejected == {"out-of-memory": len(ids)}
    assert verify(store).findings == []
    assert len(hscache.open(store)) == 6 - len(ids)
    # the path that it would have run is no other one to a build that goes on
    shutil.rmtree(store / "shards/00002.zarr")
    assert build(manifest, store).built == 1
    assert verify(store).findings == []


def test_a_store_that_was_never_begun_binds_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, manifest = tmp_path / "store", small_manifest(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(space, "free_bytes", lambda _: 1 << 20)
        with pytest.raises(EnvironmentFault) as full:
            build(manifest, store)
    assert (full.value.code, StorePaths(store).manifest.exists()) == ("disk-full", False)
    smaller = manifest.model_copy(update={"states": manifest.states.model_copy(update={"taps": (1,)})})
    build(smaller, store)
    with pytest.raises(ConflictError) as begun:
        build(manifest, store)
    assert "rm -r" not in begun.value.hint


def test_a_store_without_a_shard_can_be_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, manifest = tmp_path / "store", small_manifest(tmp_path)
    odd = manifest.model_copy(update={"target": manifest.target.model_copy(update={"attn_implementation": "odd"})})
    with pytest.raises(EnvironmentFault):
        build(odd, store)
    with pytest.raises(ConflictError) as begun:
        build(manifest, store)
    assert f"rm -r {store}" in begun.value.hint


def test_the_target_is_counted_and_packed_states_at_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, asked = small_manifest(tmp_path), {}
    target = 2 * 2 * 2048 * 256
    for codec in ("raw", "zstd"):
        chosen = manifest.model_copy(update={"store": manifest.store.model_copy(update={"codec": codec})})
        needed: list[int] = []
        monkeypatch.setattr(build_module, "require_space", lambda n, _, needed=needed: needed.append(n))
        build(chosen, tmp_path / codec)
        build(chosen, tmp_path / codec)
        asked[codec] = needed
    written = sum(p.stat().st_size for p in (tmp_path / "raw/shards").glob("*/*/c.*"))
    # before the store is begun, when it is, and for a store that is whole
    assert asked["raw"] == [written + target, written + target, 0]
    assert asked["zstd"] == [written // 2 + target, written // 2 + target, 0]


def test_more_logits_than_the_vocabulary_has_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    manifest = small_manifest(tmp_path)
    manifest = manifest.model_copy(update={"logits": manifest.logits.model_copy(update={"topk": 3000})})
    with pytest.raises(ConfigError) as caught:
        build(manifest, tmp_path / "store")
    assert (caught.value.code, "2048" in caught.value.message) == ("manifest-value", True)
    assert not (tmp_path / "store").exists()


def test_a_store_keeps_the_precision_that_its_machine_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = load_manifest(six_samples("qwen3_5", tmp_path), ["target.dtype=auto"])
    monkeypatch.setattr(hscache.device, "fast_bf16", lambda kind: False)
    build(manifest, tmp_path / "auto")
    before = contents(tmp_path / "auto")
    shutil.rmtree(tmp_path / "auto/shards/00001.zarr")
    monkeypatch.setattr(hscache.device, "fast_bf16", lambda kind: True)  # another machine finishes it
    assert build(manifest, tmp_path / "auto").built == 1
    assert contents(tmp_path / "auto") == before
    assert read_manifest(tmp_path / "auto")["manifest"]["target"]["dtype"] == "float32"
    build(manifest, tmp_path / "fast")
    assert read_manifest(tmp_path / "fast")["manifest"]["target"]["dtype"] == "bfloat16"
