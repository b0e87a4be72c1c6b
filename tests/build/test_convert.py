"""convert: every pair of codecs, fewer taps and logits, refusals, resuming; the result verifies and says where from."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hscache
from hscache.audit.verify import verify
from hscache.build import convert as module
from hscache.build import space
from hscache.build.convert import Change, convert
from hscache.cli import main
from hscache.console import Interrupted
from hscache.errors import EnvironmentFault, HscacheError
from hscache.store import lossy
from hscache.store.codecs import NAMES
from hscache.store.index import committed_shards, read_manifest, read_shard
from hscache.store.layout import StorePaths
from tests.made.stores import TAPS, TOPK, flip, little_manifest, make_store

EVERY = (*NAMES, *lossy.NAMES)
PAIRS = [
    (a, b)
    for a in EVERY
    for b in EVERY
    if a != b and not (a in lossy.NAMES and b in lossy.NAMES)
]  # fmt: skip


@pytest.fixture(autouse=True)
def _no_power_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of a little store's time would be the disk's."""
    monkeypatch.setattr("os.fsync", lambda fd: None)


def little(folder: Path, codec: str = "raw", **how: Any) -> Path:
    return make_store(folder / codec, manifest=little_manifest(store={"codec": codec}), **how).path


def states(root: Path, sample_id: str) -> torch.Tensor:
    store = hscache.open(root)
    sample = store.sample(store.index_of(sample_id), verify=True)
    return torch.cat([sample.hidden_states, sample.final_state[:, None]], dim=1)


def code_of(*arguments: Any) -> str:
    with pytest.raises(HscacheError) as caught:
        convert(*arguments)
    return caught.value.code


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_each_pair_of_codecs(tmp_path: Path, before: Any, after: Any) -> None:
    source, out = little(tmp_path, before, reject=["s4"]), tmp_path / "out"
    report = convert(source, out, Change(after))
    assert (report.codecs, report.built, report.samples) == ((before, after), report.shards, 5)
    assert report.exact == (not {before, after} & set(lossy.NAMES))
    assert verify(out).findings == []
    there, here = hscache.open(source), hscache.open(out)
    assert here.sample_ids == there.sample_ids
    for sample_id in here.sample_ids:
        x, y = states(source, sample_id), states(out, sample_id)
        if after in lossy.NAMES:
            scheme = lossy.scheme(after, x.shape[-1])
            x = lossy.decode(*lossy.encode(x, scheme), scheme)
        assert torch.equal(x, y)
        for name in ("ids", "logprobs", "lse"):
            logits = [getattr(store[store.index_of(sample_id)].logits, name) for store in (there, here)]
            assert torch.equal(*logits)
    old, new = read_manifest(source), read_manifest(out)
    assert (new["converted"]["from"], new["converted"]["codec"]) == (old["digest"], before)
    assert (new["plan"], new["corpus"], new["target"]) == (old["plan"], old["corpus"], old["target"])
    record, origin = (read_shard(StorePaths(root).shard(0)) for root in (out, source))
    assert record["provenance"]["kernels"] == origin["provenance"]["kernels"]
    assert record["provenance"]["converted"]["from"] == origin["content_digest"]
    assert ("codec" in record["health"]) == bool({before, after} & set(lossy.NAMES))
    if after in lossy.NAMES:
        assert record["health"]["codec"]["kl_rows"] > 0
    elif before in lossy.NAMES:
        assert record["health"]["codec"] == origin["health"]["codec"]


@pytest.mark.parametrize("codec", ["raw", "zstd", "int8", "int4"])
@pytest.mark.parametrize("change", [Change(taps=(0, 3)), Change(topk=2), Change(topk=0), Change(final_state=False)])
def test_fewer_arrays_of_the_same_codec_keep_every_stored_bit(tmp_path: Path, codec: str, change: Change) -> None:
    source, out = little(tmp_path, codec), tmp_path / "out"
    convert(source, out, change)
    assert verify(out).findings == []
    there, here = hscache.open(source), hscache.open(out)
    picks = [TAPS.index(tap) for tap in change.taps or TAPS]
    assert here.taps == list(change.taps or TAPS)
    for i in range(len(here)):
        old, new = there.stored(i), here.stored(i)
        assert set(old) >= set(new)
        for name, values in new.items():
            expected = old[name][:, picks] if name.startswith("hidden_states") else old[name]
            expected = (
                expected[:, : change.topk] if change.topk and name in ("logit_ids", "logit_logprobs") else expected
            )
            assert np.array_equal(values, expected), name
    gone = {"logit_ids", "logit_logprobs", "logit_lse"} if change.topk == 0 else set()
    gone |= {name for name in there.specs if name.startswith("final_state") and not change.final_state}
    assert there.specs.keys() - here.specs.keys() == gone


def test_a_disk_that_fills_up_stops_a_conversion_as_it_does_a_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = little(tmp_path)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.writev", full)
        with pytest.raises(EnvironmentFault) as caught:
            convert(source, tmp_path / "out", Change("zstd"))
    assert (caught.value.code, str(tmp_path / "out") in caught.value.message) == ("disk-full", True)
    assert convert(source, tmp_path / "out", Change("zstd")).built > 0


def test_a_conversion_that_cannot_fit_is_refused_and_packed_states_count_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, asked = little(tmp_path), {}
    with monkeypatch.context() as patch:
        for codec in ("lz4", "zstd", "int8"):
            patch.setattr(module, "require_space", lambda n, *_, codec=codec: asked.update({codec: n}))
            convert(source, tmp_path / codec, Change(codec))
    assert asked["int8"] == sum(p.stat().st_size for p in (tmp_path / "int8/shards").glob("*/*/c.*"))
    assert asked["zstd"] == asked["lz4"] == sum(p.stat().st_size for p in source.glob("shards/*/*/c.*")) // 2
    monkeypatch.setattr(space, "free_bytes", lambda _: asked["zstd"] - 1 + space._FREE_MARGIN_BYTES)
    with pytest.raises(EnvironmentFault) as caught:
        convert(source, tmp_path / "out", Change("zstd"))
    assert (caught.value.code, "--taps" in caught.value.hint) == ("disk-full", True)


def test_twice_converted_names_both(tmp_path: Path) -> None:
    source = little(tmp_path)
    convert(source, tmp_path / "a", Change("int8"))
    convert(tmp_path / "a", tmp_path / "b", Change("raw", taps=(2,)))
    assert verify(tmp_path / "b").findings == []
    converted = read_manifest(tmp_path / "b")["converted"]
    assert (converted["codec"], converted["converted"]["codec"]) == ("int8", "raw")
    assert converted["converted"]["from"] == read_manifest(source)["digest"]
    assert len(read_shard(StorePaths(tmp_path / "b").shard(0))["health"]["codec"]["rel_l2"]) == 2


@pytest.mark.parametrize(
    ("codec", "change", "code"),
    [
        ("int8", Change("int4"), "convert-lossy"),
        ("int4", Change("int8"), "convert-lossy"),
        ("raw", Change(), "convert-nothing"),
        ("int8", Change("int8"), "convert-nothing"),
        ("raw", Change(taps=TAPS, topk=TOPK), "convert-nothing"),
        ("raw", Change(topk=TOPK + 1), "array-absent"),
        ("raw", Change(taps=(0, 1)), "array-absent"),
        ("raw", Change(taps=(3, 0)), "taps-invalid"),
        ("raw", Change(taps=()), "taps-invalid"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    tmp_path: Path, codec: str, change: Change, code: str
) -> None:
    source = little(tmp_path, codec)
    assert code_of(source, tmp_path / "out", change) == code
    assert not (tmp_path / "out").exists()


def test_an_unfinished_store_is_refused(tmp_path: Path) -> None:
    assert code_of(little(tmp_path, shards=[0]), tmp_path / "out", Change("int8")) == "store-unfinished"


def test_damage_gets_no_fresh_checksum(tmp_path: Path) -> None:
    source = little(tmp_path)
    flip(source / "shards/00000.zarr/hidden_states/c.0.0.0", 3)
    assert code_of(source, tmp_path / "out", Change("int8")) in ("store-damaged", "sample-digest")
    assert committed_shards(tmp_path / "out") == []


def test_a_conversion_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out, whole = little(tmp_path), tmp_path / "out", tmp_path / "whole"
    convert(source, whole, Change("int8"))
    encode = lossy.encode_bits
    calls = 0

    def stopped(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 7:
            raise Interrupted(15)
        return encode(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module.lossy, "encode_bits", stopped)
        with pytest.raises(Interrupted):
            convert(source, out, Change("int8"))
    done = committed_shards(out)
    assert 0 < len(done) < len(committed_shards(source))
    assert code_of(source, out, Change("int4")) == "store-other-manifest"
    assert code_of(source, out, Change("int8", topk=1)) == "store-other-manifest"
    assert convert(source, out, Change("int8")).built == len(committed_shards(source)) - len(done)
    assert verify(out).findings == []
    for shard in committed_shards(out):
        digests = {read_shard(StorePaths(root).shard(shard))["content_digest"] for root in (out, whole)}
        assert len(digests) == 1
    assert not list(StorePaths(out).staging.iterdir())
    assert convert(source, out, Change("int8")).built == 0


def test_the_source_itself_is_not_written_to(tmp_path: Path) -> None:
    source = little(tmp_path)
    assert code_of(source, source, Change("int8")) == "store-other-manifest"
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    assert code_of(source, tmp_path / "folder", Change("int8")) == "store-exists"
    assert verify(source).findings == []


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["hscache", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0), *capsys.readouterr()

    source, out = little(tmp_path), tmp_path / "out"
    status, stdout, stderr = run("convert", source, "--out", out, "--codec", "int4", "--taps", "0,3", "--json")
    assert status == 0
    assert json.loads(stdout)["codecs"] == ["raw", "int4"]
    assert "raw -> int4" in stderr
    status, stdout, _ = run("info", out)
    assert "worst token's cosine" in stdout
    assert "lossy" in stdout
    assert json.loads(run("info", out, "--json")[1])["codec_error"]["kl_rows"] > 0
    status, stdout, stderr = run("convert", out, "--out", tmp_path / "back", "--codec", "raw")
    assert "their decoded values are kept" in stderr
    assert run("convert", source, "--out", tmp_path / "x", "--taps", "one")[0] == 2
