"""The command line: exit statuses, what goes to stdout and what to stderr, and that output can be used again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hscache
from hscache.cli import main
from hscache.manifest import load_manifest
from tests.conftest import DATA, TINY_HYBRID
from tests.made.commands import Answer, runner
from tests.made.stores import Little, flip, make_store

MANIFESTS = Path(__file__).parents[1] / "manifests" / "build"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs ``hscache ARGUMENTS`` in this process."""
    return runner("hscache", main, capsys, monkeypatch)


@pytest.fixture(scope="module")
def little(tmp_path_factory: pytest.TempPathFactory) -> Little:
    return make_store(tmp_path_factory.mktemp("cli") / "store", reject=["s3"])


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Return a corpus of three good rows of 100 tokens and one bad one."""
    rows = [{"id": f"r{i}", "input_ids": list(range(100)), "loss_mask": [0] * 40 + [1] * 60} for i in range(3)]
    rows.append({"id": "bad", "input_ids": [1, 2], "loss_mask": [0]})
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "corpus.parquet")
    return tmp_path / "corpus.parquet"


def qwen(corpus: Path, *more: str) -> list[object]:
    # a path that is neither a directory nor like a hub id: the plan needs the declared shape alone
    settings = [f"corpus.path={corpus}", "target.path=./no-checkpoint", *more]
    return [MANIFESTS / "qwen3.6-27b.toml", *(word for setting in settings for word in ("--set", setting))]


def test_version_and_help(run: Any) -> None:
    assert run("--version") == Answer(0, f"hscache {hscache.__version__}\n", "")
    answer = run("--help")
    assert (answer.status, answer.err) == (0, "")
    for command in ("config", "tokenize", "generate", "plan", "build", "verify", "info"):
        assert command in answer.out


@pytest.mark.parametrize(
    "arguments",
    [["--no-such-option"], ["no-such-command"], ["verify"], ["verify", "x", "--level", "deep"], ["plan", "m", "--set"]],
)
def test_wrong_usage_exits_with_2_and_says_so_on_stderr(run: Any, arguments: list[str]) -> None:
    answer = run(*arguments)
    assert (answer.status, answer.out) == (2, "")
    assert answer.err.startswith("error[usage]: ")
    assert "\nhint: " in answer.err


def test_config_prints_a_manifest_that_loads_again(run: Any, tmp_path: Path) -> None:
    overrides = ["limits.max_tokens=77", 'corpus.path=a "quoted" path', "states.taps=[3, 5]"]
    words = [word for text in overrides for word in ("--set", text)]
    answer = run("config", MANIFESTS / "demo.toml", *words)
    assert (answer.status, answer.err) == (0, "")
    (tmp_path / "resolved.toml").write_text(answer.out)
    assert load_manifest(tmp_path / "resolved.toml") == load_manifest(MANIFESTS / "demo.toml", overrides)
    assert "chunk_tokens = 64" in answer.out  # a default, written out


def test_an_error_is_one_message_and_a_hint_on_stderr(run: Any) -> None:
    answer = run("config", MANIFESTS / "demo.toml", "--set", "limits.max_token=3")
    assert (answer.status, answer.out) == (2, "")
    message, hint = answer.err.splitlines()
    assert message.startswith("error[manifest-unknown-key]: ")
    assert hint == "hint: did you mean limits.max_tokens?"


@pytest.mark.parametrize(
    ("arguments", "status", "code"),
    [
        (["config", "nowhere.toml"], 2, "manifest-missing"),
        (["config", MANIFESTS / "demo.toml", "--set", "x"], 2, "set-syntax"),
        (["info", "nowhere"], 2, "not-a-store"),
        (["verify", "nowhere"], 2, "not-a-store"),
        (["plan", MANIFESTS / "demo.toml", "--set", "corpus.path=nowhere", "--set", "target.path=./no"], 2,
         "corpus-missing"),
        (["build", MANIFESTS / "demo.toml", "--set", "target.path=./no", "--out", "store"], 3, "target-missing"),
        (["tokenize", "a.jsonl", "--target", "./no", "-o", "c.parquet"], 3, "target-missing"),
        (["generate", "a.jsonl", "--target", "./no", "-o", "c.parquet"], 3, "target-missing"),
    ],
)  # fmt: skip
def test_errors_exit_with_the_status_of_their_kind(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[object], status: int, code: str
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = run(*arguments)
    assert (answer.status, answer.code, answer.out) == (status, code, "")
    assert not list(tmp_path.iterdir())


def test_an_output_that_holds_something_else_is_a_conflict(run: Any, tmp_path: Path, corpus: Path) -> None:
    target, out = tmp_path / "target", tmp_path / "out"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({"num_hidden_layers": 8, "hidden_size": 256, "vocab_size": 2048}))
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    settings = [f"target.path={target}", f"corpus.path={corpus}"]
    words = [word for text in settings for word in ("--set", text)]
    answer = run("build", MANIFESTS / "demo.toml", *words, "--out", out)
    assert (answer.status, answer.code) == (4, "store-exists")
    assert "thesis.tex" in answer.err
    assert [p.name for p in out.iterdir()] == ["thesis.tex"]


def test_a_bug_shows_its_traceback_and_exits_with_70(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("hscache.manifest.load_manifest", broken)
    answer = run("config", MANIFESTS / "demo.toml")
    assert (answer.status, answer.code, answer.out) == (70, "bug", "")
    assert "ZeroDivisionError: planted" in answer.err


@pytest.mark.parametrize("device", ["banana", "cuda:99"])
def test_a_device_that_is_not_there_is_one_clear_error(run: Any, tmp_path: Path, device: str) -> None:
    words = ("--set", f"corpus.path={DATA / 'tiny-hybrid-completions.parquet'}", "--set", f"target.path={TINY_HYBRID}")
    answer = run("build", MANIFESTS / "demo.toml", *words, "--out", tmp_path / "store", "--device", device)
    assert (answer.status, answer.code) == (3, "device-missing")
    assert device in answer.err
    assert "hint: " in answer.err


def test_plan_of_the_27b_target_counts_51200_bytes_a_token(run: Any, corpus: Path, tmp_path: Path) -> None:
    answer = run("plan", *qwen(corpus), "--out", tmp_path / "store", "--json")
    assert (answer.status, answer.err) == (0, f"{corpus}: input_ids + loss_mask\n")
    plan = answer.json
    assert plan["bytes_per_token"] == {"hidden_states": 51_200, "final_state": 10_240, "input_ids": 4, "loss_mask": 1}
    assert (plan["taps"], plan["samples"], plan["tokens"], plan["loss_tokens"]) == ([1, 16, 31, 46, 61], 3, 300, 180)
    assert plan["rejected_reasons"] == {"length-mismatch": 1}
    arrays = {entry["name"]: entry for entry in plan["arrays"]}
    assert arrays["hidden_states"]["bytes"] == 300 * 51_200
    assert arrays["logit_ids"]["bytes"] == 180 * 64 * 4
    assert plan["total_bytes"] == sum(entry["bytes"] for entry in plan["arrays"])
    assert not (tmp_path / "store").exists()


def test_plan_as_a_table_shows_the_same(run: Any, corpus: Path, tmp_path: Path) -> None:
    answer = run("plan", *qwen(corpus), "--out", tmp_path)
    assert answer.status == 0
    for text in ("51,200", "15,360,000", "300, 180 supervised", "1 length-mismatch", "taps [1, 16, 31, 46, 61]"):
        assert text in answer.out


def test_plan_refuses_what_does_not_fit_after_showing_it(
    run: Any, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(1 << 30, 1 << 30, 20 << 20))
    answer = run("plan", *qwen(corpus), "--out", tmp_path, "--json")
    assert (answer.status, answer.code) == (3, "disk-full")
    assert answer.json["bytes_per_token"]["hidden_states"] == 51_200
    assert answer.json["free_bytes"] == 20 << 20
    assert "20.0 MiB free" in answer.err
    assert "hint: build elsewhere" in answer.err


def test_plan_says_when_no_row_can_be_used(run: Any, corpus: Path) -> None:
    answer = run("plan", *qwen(corpus, "limits.min_loss_tokens=61"))
    assert (answer.status, answer.code) == (2, "corpus-empty")
    assert "3 too-few-supervised, 1 length-mismatch" in answer.err


@pytest.mark.parametrize("level", ["quick", "full"])
def test_verify_of_a_good_store_exits_with_0(run: Any, little: Little, level: str) -> None:
    answer = run("verify", little.path, "--level", level, "--json")
    assert answer.status == 0
    assert (answer.json["ok"], answer.json["findings"], answer.json["level"]) == (True, [], level)
    assert f"whole and right ({level})" in answer.err
    assert run("verify", little.path, "--level", level).out == ""


@pytest.mark.parametrize("option", [["--recompute", "2"], ["--against", "other"]])
def test_the_findings_are_told_when_states_cannot_be_compared(run: Any, tmp_path: Path, option: list[str]) -> None:
    store = make_store(tmp_path / "store").path
    make_store(tmp_path / "other")
    for shard in (0, 1, 2):
        flip(store / f"shards/{shard:05d}.zarr/final_state/c.0.0", 3)
    arguments = [str(tmp_path / part) if part == "other" else part for part in option]
    answer = run("verify", store, *arguments, "--target", TINY_HYBRID, "--json")
    assert (answer.status, answer.json["ok"]) == (1, False)
    assert "file-content" in {finding["code"] for finding in answer.json["findings"]}
    assert "states were not compared" in answer.err


def test_nothing_can_be_compared_of_a_store_without_samples(run: Any, tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", shards=[]).path
    answer = run("verify", store, "--level", "quick", "--recompute", "2", "--target", TINY_HYBRID)
    assert (answer.status, "states were not compared: no sample is stored yet" in answer.err) == (1, True)


def test_a_wrong_choice_of_kernels_is_refused_before_the_store_is_read(run: Any, little: Little) -> None:
    answer = run("verify", little.path, "--kernels", "torch,cuda")
    assert (answer.status, answer.code) == (2, "kernel-choice")
    assert "verify:" not in answer.err


def test_a_picture_without_matplotlib_is_refused_before_the_store_is_read(
    run: Any, little: Little, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    answer = run("verify", little.path, "--kernels", "torch,bound", "--plot", tmp_path / "a.png")
    assert (answer.status, answer.code) == (3, "dependency-missing")
    assert "verify:" not in answer.err


def test_verify_of_a_damaged_store_exits_with_1_and_lists_the_findings(run: Any, tmp_path: Path) -> None:
    store = make_store(tmp_path / "store").path
    flip(store / "shards/00001.zarr/final_state/c.0.0", 3)
    answer = run("verify", store, "--json")
    assert (answer.status, answer.json["ok"]) == (1, False)
    assert {"file-content", "array-unreadable"} == {finding["code"] for finding in answer.json["findings"]}
    assert "file-content: 00001.zarr/final_state/c.0.0: " in answer.err
    (store / "plan.parquet").unlink()
    assert run("verify", store, "--level", "quick").status == 1


def test_a_damaged_manifest_exits_with_1(run: Any, tmp_path: Path) -> None:
    store = make_store(tmp_path / "store").path
    flip(store / "manifest.json", 40)
    for command in ("verify", "info"):
        answer = run(command, store)
        assert (answer.status, answer.code) == (1, "store-damaged")


def test_info_shows_the_store_on_one_screen_and_as_json(run: Any, little: Little) -> None:
    answer = run("info", little.path)
    assert (answer.status, answer.err) == (0, "")
    assert len(answer.out.splitlines()) <= 24
    for text in ("format v1, complete", "H 8, V 32", "5 (1 non-finite, 1 too-few-supervised)", "math 2, code 2"):
        assert text in answer.out
    facts = run("info", little.path, "--json").json
    assert (facts["samples"], facts["taps"], facts["rejected"]) == (
        5, [0, 2, 3], {"too-few-supervised": 1, "non-finite": 1},
    )  # fmt: skip
    tokens = sum(len(arrays["input_ids"]) for arrays in little.arrays.values())
    assert facts["tokens"] == tokens


@pytest.mark.parametrize("shards", [[], [1]])
def test_info_of_an_unfinished_store_says_so(run: Any, tmp_path: Path, shards: list[int]) -> None:
    answer = run("info", make_store(tmp_path / "store", shards=shards).path)
    assert answer.status == 0
    assert "UNFINISHED" in answer.out
    assert f"{len(shards)} of 3" in answer.out


SCRIPT = "import sys; from hscache.cli import main; main()"


def in_a_process(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, arguments)],
        capture_output=True, text=True, check=False, env={**os.environ, **environment},
    )  # fmt: skip


def test_as_a_process_streams_and_status_are_the_same(little: Little) -> None:
    good = in_a_process("info", little.path, "--json")
    assert (good.returncode, good.stderr) == (0, "")
    assert json.loads(good.stdout)["samples"] == 5
    bad = in_a_process("info", "nowhere")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("error[not-a-store]: nowhere: ")


def test_a_reader_that_stops_early_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "config", str(MANIFESTS / "demo.toml")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    err = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait() != 70
    assert err == ""
