"""llama.cpp's server writes what we write, and accepts of a drafter's tokens what our own walk accepts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp_env
import pyarrow.parquet as pq
import pytest
import serve_llama_cpp
from hstrain.exchange.importer import open_drafter
from hstrain.live.target import end_token_ids, open_target
from serve_llama_cpp import TIE, judge, parting

from hscache.cli import main
from hscache.corpus.generate import Sampling, generate_corpus
from hscache.store.head import load_head
from tests.engines.conftest import LEARNT, SLOTS, overfit
from tests.made.commands import Answer, runner

pytestmark = pytest.mark.engines
EACH, NEW_TOKENS = 12, 64


@pytest.fixture
def hscache(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    return runner("hscache", main, capsys, monkeypatch)


def completions(corpus: Path) -> dict[str, tuple[list[int], list[int]]]:
    """Return prompt and completion of each sample."""
    rows = pq.read_table(corpus).to_pylist()
    first = {row["sample_id"]: row["loss_mask"].index(1) for row in rows}
    return {
        row["sample_id"]: (row["input_ids"][: (k := first[row["sample_id"]])], row["input_ids"][k:]) for row in rows
    }


def test_the_server_writes_what_transformers_writes(
    hscache: Callable[..., Answer],
    endpoint: str,
    smollm2: Path,
    prompts: list[Path],
    tmp_path: Path,
) -> None:
    served, local = tmp_path / "served.parquet", tmp_path / "local.parquet"
    how = ["--target", smollm2, "--out", served, "--limit", EACH, "--max-new-tokens", NEW_TOKENS]
    answer = hscache("generate", *prompts, *how, "--endpoint", endpoint, "--concurrency", SLOTS)
    assert answer.status == 0, answer.err
    assert "llama.cpp" in answer.err
    sampling = Sampling(NEW_TOKENS)
    generate_corpus(prompts, smollm2, local, sampling, limit=EACH, batch_size=4, dtype="float32", device="cpu")
    theirs, ours = completions(served), completions(local)
    assert list(theirs) == list(ours)
    parted = []
    with open_target(str(smollm2), (0,), dtype="float32", device="cpu") as (live, _):
        for name, (prompt, ids) in ours.items():
            assert theirs[name][0] == prompt
            if (found := parting(live, prompt, ids, theirs[name][1])) is not None:
                parted.append(found[1])
                print(f"{name}: {found[0]}")
    assert len(ours) == 2 * EACH
    assert len(parted) <= 0.05 * len(ours)
    assert all(gap <= TIE for gap in parted)


def test_an_answer_contains_its_end_token(endpoint: str, corpus: Path, smollm2: Path) -> None:
    for name in LEARNT:
        prompt, ids = completions(corpus)[name]
        whole = llama_cpp_env.complete(endpoint, prompt, len(ids) + 1)
        assert (whole["tokens"], whole["stop_type"], whole["tokens_predicted"]) == (ids, "eos", len(ids))
        assert ids[-1] in end_token_ids(smollm2)
        exact = llama_cpp_env.complete(endpoint, prompt, len(ids))
        assert (exact["tokens"], exact["stop_type"]) == (ids, "eos"), "the end token is the last one allowed"
        cut = llama_cpp_env.complete(endpoint, prompt, len(ids) - 1)
        assert (cut["tokens"], cut["stop_type"], cut["tokens_predicted"]) == (ids[:-1], "limit", len(ids) - 1)


@pytest.fixture(scope="module", params=["full_attention", "sliding_attention"])
def run(store: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return overfit(store, tmp_path_factory.mktemp("run") / "run", [request.param] * 2)


@pytest.fixture(scope="module")
def compared(gguf: Path, smollm2: Path, store: Path, run: Path, learnt_prompts: Path) -> list[dict[str, Any]]:
    """What the tool finds."""
    out = run.parent / "found.json"
    options = ["--store", store, "--target", smollm2, "--target-gguf", gguf, "--prompts", learnt_prompts, "--json", out]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["serve_llama_cpp.py", str(run), *map(str, options)])
        with pytest.raises(SystemExit) as stop:
            serve_llama_cpp.main()
    found: list[dict[str, Any]] = json.loads(out.read_text())
    assert stop.value.code == 0, [row["differs"] for row in found]
    return found


def test_a_drafter_changes_no_text_and_takes_our_steps(compared: list[dict[str, Any]]) -> None:
    assert not any(row["wrong"] for row in compared)
    learnt = [row for row in compared if row["prompt"] in LEARNT]
    assert len(learnt) == len(LEARNT) < len(compared)
    assert all(len(set(row["walk"])) > 2 for row in learnt), "with steps of one length, a comparison would see little"
    assert all(sum(row["walk"]) == row["tokens"] - 1 for row in compared)


def test_another_number_of_steps_and_another_text_are_wrong(
    compared: list[dict[str, Any]], corpus: Path, smollm2: Path, store: Path, run: Path
) -> None:
    head, name = load_head(store / "target"), LEARNT[0]
    drafter, _ = open_drafter(run, head)
    prompt, ids = completions(corpus)[name]
    steps = next(row["steps"] for row in compared if row["prompt"] == name)

    def answer(tokens: list[int], accepted: int) -> dict[str, Any]:
        times = {"predicted_n": len(tokens), "predicted_ms": 1.0, "draft_n_accepted": accepted}
        return {"tokens": tokens, "timings": times}

    accepted = len(ids) - 1 - steps
    others = {"same": (ids, accepted), "step": (ids, accepted - 1), "short": (ids[:-1], accepted - 1)}
    others["text"] = ([*ids[:-2], 11, ids[-1]], accepted)
    with open_target(str(smollm2), drafter.config.taps, dtype="float32", device="cpu") as (live, _):
        found = {
            key: judge(name, prompt, answer(ids, 0), answer(*other), live, drafter, head)
            for key, other in others.items()
        }
    assert {key: row["wrong"] for key, row in found.items()} == {
        "same": False,
        "step": True,
        "short": True,
        "text": True,
    }
    assert "tokens instead of" in found["short"]["differs"][0]
    assert f"token {len(ids) - 2} of {len(ids)} is 11 instead of" in found["text"]["differs"][0]
