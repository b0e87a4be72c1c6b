"""``hstrain eval``: its figures are those of a direct computation, and what does not fit is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hstrain.data.packs import split
from hstrain.drafter.losses import Head
from hstrain.drafter.model import Drafter, DrafterConfig
from hstrain.exchange.export import export_drafter
from hstrain.run.checkpoint import load_drafter
from hstrain.score.ddtree import SIZES
from hstrain.score.report import evaluate, print_evaluation
from hstrain.score.walk import SampleScore, score_sample, summarise
from hstrain.train.fit import fit

import hscache
from hscache.console import counted
from hscache.errors import HscacheError
from hscache.store.head import TargetHead, load_head
from tests.made.stores import HIDDEN, VOCAB, Little, head_weights
from tests.made.trainers import train_manifest, training_store

TAPS = [0, 2]
"""Of the drafter: not the last block's, which no engine's layout can hold, and fewer than the store has."""
SHAPE = {"num_layers": 4, "hidden_size": HIDDEN, "vocab_size": VOCAB}


pytestmark = pytest.mark.usefixtures("no_disk")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def little(folder: Path) -> Little:
    return training_store(folder / "raw", says={"shape": SHAPE})


@pytest.fixture(scope="module")
def int8(folder: Path) -> Little:
    """The same corpus, its states through a lossy codec."""
    return training_store(folder / "int8", says={"shape": SHAPE}, store={"codec": "int8", "chunk_tokens": 4})


@pytest.fixture(scope="module")
def run(little: Little, folder: Path) -> Path:
    """A run whose drafter says some tokens rightly: its figures are not those of chance."""
    manifest = train_manifest(
        drafter={"taps": TAPS}, optim={"max_steps": 60, "lr": 3e-2, "epochs": 99}, run={"validate_every": 30}
    )
    fit(manifest, little.path, folder / "run", device="cpu")
    return folder / "run"


@pytest.fixture(scope="module")
def zlab(run: Path, little: Little, folder: Path) -> Path:
    """The run's drafter in float32, as others keep it."""
    drafter, _ = load_drafter(run)
    head = load_head(little.path / "target")
    export_drafter("zlab", drafter, head, folder / "zlab", provenance={"target": "little"}, dtype="float32")
    return folder / "zlab"


@pytest.fixture(scope="module")
def scores(run: Path, little: Little) -> list[SampleScore]:
    """The held-out samples, scored one by one."""
    drafter, _ = load_drafter(run)
    store, head = hscache.open(little.path), Head(load_head(little.path / "target"), "cpu", torch.float32)
    numbers = split(store, 0.3)[1]
    return [score_sample(drafter, head, store.sample(i, taps=drafter.config.taps), trees=SIZES) for i in numbers]


@pytest.fixture(scope="module")
def row(run: Path, little: Little) -> dict[str, Any]:
    found = evaluate([run], [little.path], device="cpu")
    assert (found["held_out"], found["precision"], len(found["rows"])) == (0.3, "fp32", 1)
    return dict(found["rows"][0])


def figures(row: dict[str, Any]) -> dict[str, Any]:
    """Return what a row says of the drafter, without the names and the comparison with another row."""
    names = ("checkpoint", "resolved", "store", "less_first", "trained_on", "test")
    return {key: value for key, value in row.items() if key not in names}


def refusal(*args: Any, **options: Any) -> HscacheError:
    with pytest.raises(HscacheError) as caught:
        evaluate(*args, device="cpu", **options)
    return caught.value


def test_figures_are_those_of_the_samples_that_training_held_out(
    row: dict[str, Any], scores: list[SampleScore], run: Path, little: Little
) -> None:
    walks = [score.walk(score.streak) for score in scores]
    assert row["tau"] == sum(map(sum, walks)) / sum(map(len, walks)) > 1
    assert row["samples"] == len(scores) > 2
    assert row["anchors"] == sum(len(score.anchors_N) for score in scores)
    for i, size in enumerate(SIZES):
        trees = [score.walk(score.tree_Ns[:, i]) for score in scores]
        assert row["ddtree"][str(size)] == sum(map(sum, trees)) / sum(map(len, trees))
    assert (row["checkpoint"], row["store"]) == (str(run), str(little.path))
    assert row["resolved"].startswith(f"{run}/checkpoints/step-")
    assert json.loads(json.dumps(row)) == row


def test_tau_by_tag_is_that_of_the_tags_samples_and_adds_up(row: dict[str, Any], scores: list[SampleScore]) -> None:
    tags = {little_tag: [s for s in scores if s.tag == little_tag] for little_tag in ("math", "code")}
    walks = {tag: [step for s in some for step in s.walk(s.streak)] for tag, some in tags.items()}
    assert row["by_tag"] == {tag: np.mean(walk) for tag, walk in walks.items()}
    steps = {tag: len(walk) for tag, walk in walks.items()}
    whole = sum(row["by_tag"][tag] * steps[tag] for tag in steps) / sum(steps.values())
    assert whole == pytest.approx(row["tau"])


def test_tau_all_by_position_adds_up(run: Path, little: Little) -> None:
    # of samples that it learnt, too: there a draft may reach the end of a turn, beyond which nothing is yielded
    (row,) = evaluate([run], [little.path], held_out=1, device="cpu")["rows"]
    drafter, _ = load_drafter(run)
    store, head = hscache.open(little.path), Head(load_head(little.path / "target"), "cpu", torch.float32)
    bins: dict[str, list[int]] = {}
    ends = 0
    for i in range(len(store)):
        score = score_sample(drafter, head, store.sample(i, taps=drafter.config.taps))
        for place, (streak, left) in enumerate(zip(score.streak.tolist(), score.left_N.tolist(), strict=True)):
            bins.setdefault("0 .. 15" if place < 16 else "16 .. 63", []).append(min(streak + 1, left))
            ends += streak == left
    assert len(bins) == 2
    assert ends
    assert row["by_position"] == pytest.approx({name: np.mean(yields) for name, yields in bins.items()})
    whole = sum(row["by_position"][name] * len(yields) for name, yields in bins.items()) / row["anchors"]
    assert whole == pytest.approx(row["tau_all"])


def test_an_exported_folder_of_the_same_drafter_has_the_same_figures(
    row: dict[str, Any], run: Path, zlab: Path, little: Little
) -> None:
    ours, theirs = evaluate([run, zlab], [little.path], device="cpu")["rows"]  # the run says what was held out
    assert theirs["checkpoint"] == theirs["resolved"] == str(zlab)
    assert figures(ours) == figures(theirs) == figures(row)


def test_an_exported_folder_alone_needs_to_be_told_what_was_held_out(
    row: dict[str, Any], zlab: Path, little: Little
) -> None:
    refused = refusal([zlab], [little.path])
    assert (refused.code, refused.exit_code) == ("not-a-checkpoint", 2)
    assert "which samples it was trained on" in refused.message
    assert "--held-out" in str(refused.hint)
    (alone,) = evaluate([zlab], [little.path], held_out=0.3, device="cpu")["rows"]
    assert figures(alone) == figures(row)


def again(little: Little, out: Path, share: float, start: Path | None = None) -> Path:
    """Train for a step with another share held out, from another drafter or from none."""
    drafter = {"taps": TAPS} | ({"start": str(start), "logit_std": 0} if start else {})
    fit(
        train_manifest(drafter=drafter, optim={"max_steps": 1}, data={"validation": share}),
        little.path,
        out,
        device="cpu",
    )
    return out


def test_what_another_checkpoint_held_out_was_held_out_by_all(
    row: dict[str, Any], run: Path, little: Little, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In whatever order they are named, none is scored on what it was trained on."""
    store, more = hscache.open(little.path), again(little, tmp_path / "more", 0.8)
    assert len(split(store, 0.3)[1]) < len(split(store, 0.8)[1])
    for order in ([more, run], [run, more]):
        found = evaluate(order, [little.path], device="cpu")
        assert found["held_out"] == 0.3
        assert {r["samples"] for r in found["rows"]} == {row["samples"]}
        assert {r["trained_on"] for r in found["rows"]} == {0}
    print_evaluation(found)
    assert "held-out samples" in capsys.readouterr().out
    # one that is asked for by name is marked
    found = evaluate([more, run], [little.path], held_out=0.8, device="cpu")
    n = len(split(store, 0.8)[1]) - len(split(store, 0.3)[1])
    assert [r["trained_on"] for r in found["rows"]] == [0, n]
    print_evaluation(found)
    out = capsys.readouterr().out
    assert "held-out samples" not in out
    assert f"{run}: it was trained on {n} of these samples" in out
    assert f"{more}: it " not in out


def test_what_a_run_began_from_was_trained_too(
    run: Path, zlab: Path, little: Little, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, tuned = hscache.open(little.path), again(little, tmp_path / "tuned", 0.8, run)
    last = again(little, tmp_path / "last", 0.9, tuned)
    for checkpoint in (tuned, last):
        found = evaluate([checkpoint], [little.path], device="cpu")
        assert (found["held_out"], found["rows"][0]["trained_on"]) == (0.3, 0)
    n = len(split(store, 0.8)[1]) - len(split(store, 0.3)[1])
    assert evaluate([last], [little.path], held_out=0.8, device="cpu")["rows"][0]["trained_on"] == n
    # what cannot be known any more, or never could, is said
    other = again(little, tmp_path / "other", 0.8, zlab)
    shutil.move(tuned, tmp_path / "gone")
    for checkpoint, share in ((other, 0.8), (last, 0.3)):
        found = evaluate([checkpoint], [little.path], device="cpu")
        assert (found["held_out"], found["rows"][0]["trained_on"]) == (share, None)
        print_evaluation(found)
        assert "it is unknown" in capsys.readouterr().out


def test_samples_of_another_corpus_may_have_been_trained_on_or_not(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh = training_store(tmp_path / "fresh", (20, 31, 18, 44), says={"shape": SHAPE})
    found = evaluate([run], [fresh.path], held_out=1, device="cpu")
    assert found["rows"][0]["trained_on"] is None
    print_evaluation(found)
    out = capsys.readouterr().out
    assert "held-out" not in out
    assert "it is unknown" in out


def test_every_sample_is_not_held_out(run: Path, little: Little, capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluate([run], [little.path], held_out=1, device="cpu")
    assert found["rows"][0]["trained_on"] == len(split(hscache.open(little.path), 0.3)[0])
    print_evaluation(found)
    assert "held-out" not in capsys.readouterr().out


def test_stores_of_one_corpus_are_scored_on_the_same_samples(
    row: dict[str, Any], run: Path, zlab: Path, little: Little, int8: Little
) -> None:
    rows = evaluate([run, zlab], [little.path, int8.path], device="cpu")["rows"]
    names = [(Path(r["checkpoint"]).name, Path(r["store"]).name) for r in rows]
    assert names == [("run", "raw"), ("zlab", "raw"), ("run", "int8"), ("zlab", "int8")]
    assert len({(r["samples"], r["anchors"]) for r in rows}) == 1
    assert figures(rows[0]) == figures(row)
    (lossy,) = evaluate([run], [int8.path], device="cpu")["rows"]
    assert figures(rows[2]) == figures(rows[3]) == figures(lossy)


def test_each_store_is_read_with_its_own_states(row: dict[str, Any], run: Path, little: Little, tmp_path: Path) -> None:
    def zero(_: Any, arrays: Any) -> None:
        arrays["hidden_states"][:, 1] = arrays["hidden_states"][:, 0]

    other = training_store(tmp_path / "other", edit=zero, says={"shape": SHAPE})
    rows = evaluate([run], [little.path, other.path], device="cpu")["rows"]
    assert figures(rows[0]) == figures(row)
    assert rows[1]["acc"] != row["acc"]


def test_rows_are_compared_with_the_first_one_over_the_same_samples(run: Path, little: Little, tmp_path: Path) -> None:
    def zero(_: Any, arrays: Any) -> None:
        arrays["hidden_states"][:, 1] = arrays["hidden_states"][:, 0]

    other = training_store(tmp_path / "other", edit=zero, says={"shape": SHAPE})
    first, again, apart = evaluate([run], [little.path, little.path, other.path], device="cpu")["rows"]
    assert first["less_first"] is None
    same = {"tau": 0.0, "interval": [0.0, 0.0], "samples": first["samples"], "other_walks": 0}
    assert again["less_first"] == same
    less = apart["less_first"]
    assert less["tau"] == apart["tau"] - first["tau"] != 0
    assert 0 < less["other_walks"] <= less["samples"] == first["samples"]


def test_more_or_fewer_samples(row: dict[str, Any], run: Path, little: Little, scores: list[SampleScore]) -> None:
    store = hscache.open(little.path)
    (every,) = evaluate([run], [little.path], held_out=1, device="cpu")["rows"]
    assert every["samples"] == len(store)
    assert every["tau"] > row["tau"]  # it learnt some of them
    (first,) = evaluate([run], [little.path], samples=1, device="cpu")["rows"]
    walk = scores[0].walk(scores[0].streak)
    assert (first["samples"], first["tau"]) == (1, np.mean(walk))


def test_bf16_is_said_and_near(row: dict[str, Any], run: Path, little: Little) -> None:
    found = evaluate([run], [little.path], precision="bf16", device="cpu")
    assert found["precision"] == "bf16"
    assert found["rows"][0]["tau_all"] == pytest.approx(row["tau_all"], abs=0.15)


def test_a_store_without_the_drafters_taps_is_refused(run: Path, tmp_path: Path) -> None:
    other = training_store(tmp_path / "taps", says={"shape": SHAPE}, states={"taps": [0, 3]})
    refused = refusal([run], [other.path])
    assert (refused.code, refused.exit_code) == ("taps-invalid", 2)
    assert str(run) in refused.message
    assert "[2]" in refused.message
    assert str(other.path) in refused.message


@pytest.mark.parametrize("key", ["num_layers", "vocab_size"])
def test_a_store_of_a_target_of_another_shape_is_refused(run: Path, tmp_path: Path, key: str) -> None:
    shape = {**SHAPE, key: SHAPE[key] + 8}
    other = training_store(tmp_path / "shape", says={"shape": shape}, target={"shape": shape})
    refused = refusal([run], [other.path])
    assert (refused.code, refused.exit_code) == ("drafter-other-target", 2)
    assert key in refused.message


def test_nothing_to_score_is_said(run: Path, little: Little, tmp_path: Path) -> None:
    assert refusal([run], [little.path], held_out=0).code == "sample-unknown"

    def alone(row: Any, arrays: Any) -> None:
        arrays["loss_mask"][:] = 0
        arrays["loss_mask"][-1] = 1
        for name in ("logit_ids", "logit_logprobs", "logit_lse"):
            arrays[name] = arrays[name][:1]

    lone = training_store(tmp_path / "lone", edit=alone, says={"shape": SHAPE})
    refused = refusal([run], [lone.path])
    assert refused.code == "sample-unknown"
    assert "two supervised tokens" in refused.message


def test_a_path_without_a_drafter_is_refused(little: Little, tmp_path: Path) -> None:
    assert refusal([tmp_path], [little.path]).code == "not-a-checkpoint"


# the command


def test_eval_as_json(hstrain: Any, row: dict[str, Any], run: Path, little: Little) -> None:
    answer = hstrain("eval", run, "--store", little.path, "--device", "cpu", "--json")
    assert answer.status == 0
    baselines = answer.json.pop("baselines")
    assert answer.json == {
        "held_out": 0.3, "part": "held-out", "precision": "fp32", "rows": [row], "baselines": baselines, "cost": None
    }  # fmt: skip
    assert [found["baseline"] for found in baselines] == ["bigram", "5-gram", "lookup", "lookup, 5-gram"]
    for found in baselines:
        assert (found["samples"], found["anchors"], found["ddtree"]) == (row["samples"], row["anchors"], {})
        assert found["less_first"]["tau"] == pytest.approx(found["tau"] - row["tau"])
    assert f"{row['samples']} samples" in answer.err


def test_eval_as_tables(
    hstrain: Any, row: dict[str, Any], run: Path, little: Little, int8: Little, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = hstrain("eval", run, "--store", little.path, "--device", "cpu")
    assert answer.status == 0
    assert f"{row['samples']} held-out samples, {row['anchors']} anchors, fp32" in answer.out
    for title in (
        "accuracy by slot",
        "expected when both sample at temperature 1",
        "tau by tag",
        "tau_all by place of the anchor in the answer",
    ):
        assert title in answer.out
    for name in ("tau", "tau_all", "streak", "DDTree-8", "DDTree-64", "code", "math", "0 .. 15", "16 .. 63"):
        assert name in answer.out
    numbers = (row["tau"], row["tau_all"], row["streak"], *row["ddtree"].values(), *row["acc"])
    assert all(f"{number:.3f}" in answer.out for number in (*numbers, *row["by_tag"].values()))
    assert str(little.path) not in answer.out  # one store needs no name
    for name in ("bigram", "5-gram", "lookup"):
        assert f"\n {name} " in answer.out
    monkeypatch.chdir(run.parent)  # names that are short enough to stay in one line
    both = hstrain("eval", run.name, "--store", little.path.name, "--store", int8.path.name, "--device", "cpu").out
    assert sum("run on int8" in line for line in both.splitlines()) == 7 + 1, "each table tells the stores apart"
    assert "tau less that of the first row, on the same samples" in both


def test_samples_that_chose_the_checkpoint_are_told_from_the_others(
    little: Little, hstrain: Any, run: Path, zlab: Path, tmp_path: Path
) -> None:
    manifest = train_manifest(drafter={"taps": TAPS}, optim={"max_steps": 2}, run={"validation_samples": 1})
    fit(manifest, little.path, tmp_path / "run", device="cpu")
    found = evaluate([tmp_path / "run", run, zlab], [little.path], held_out=0.3, device="cpu")["rows"]
    drafter, _ = load_drafter(tmp_path / "run")
    store, head = hscache.open(little.path), Head(load_head(little.path / "target"), "cpu", torch.float32)
    numbers = split(store, 0.3)[1]
    others = [score_sample(drafter, head, store.sample(i, taps=drafter.config.taps), trees=SIZES) for i in numbers[1:]]
    expected = summarise(others)
    assert (found[0]["test"]["samples"], found[0]["test"]["tau"]) == (len(numbers) - 1, expected["tau"])
    assert (found[1]["test"]["samples"], found[2]["test"]) == (0, None)
    text = hstrain("eval", tmp_path / "run", "--store", little.path, "--device", "cpu").out
    assert f"validation on 1 of these samples chose its checkpoint; on the other {len(numbers) - 1}, tau is" in text
    assert "chose its checkpoint; no other was scored" in hstrain("eval", run, "--store", little.path).out


def test_an_export_shows_what_eval_or_validation_found(
    hstrain: Any, row: dict[str, Any], run: Path, little: Little, tmp_path: Path
) -> None:
    def card(name: str, source: Path, *words: object) -> str:
        assert hstrain("export", source, "--store", little.path, "--out", tmp_path / name, *words).status == 0
        return (tmp_path / name / "README.md").read_text()

    said = tmp_path / "eval.json"
    assert hstrain("eval", run, "--store", little.path, "--device", "cpu", "--out", said).status == 0
    by_eval = card("one", run, "--eval", said)
    low, high = row["tau_interval"]
    wanted = f"tau **{row['tau']:.3f}** (95 % interval {low:.2f} .. {high:.2f}) over {row['samples']} held-out samples"
    assert f"{wanted}, by hstrain eval in fp32." in by_eval
    assert "The same samples chose this checkpoint" in by_eval
    provenance = json.loads((tmp_path / "one/provenance.json").read_text())
    assert provenance["evaluation"]["tau"] == row["tau"]
    for digest in (provenance["store"]["digest"], *provenance["store"]["weights"].values()):
        assert digest in by_eval
    # without a file, the validation of this step
    best = json.loads((run / "best.json").read_bytes())
    by_validation = card("two", run)
    assert f"tau **{best['tau']:.3f}**" in by_validation
    assert "validation samples, by the validation of this step in training in fp32." in by_validation
    # a copy without its run, and a released drafter, know nothing
    shutil.copytree(Path(row["resolved"]), tmp_path / "copy")
    for name, source in (("three", tmp_path / "copy"), ("four", tmp_path / "two")):
        assert "No evaluation of these weights" in card(name, source)
    assert f"**{row['tau']:.3f}**" in card("five", tmp_path / "copy", "--eval", said)  # the same weights
    # other weights, and no evaluation at all
    found = json.loads(said.read_text())
    found["rows"][0] |= {"weights": "0" * 32}
    (tmp_path / "other.json").write_text(json.dumps(found))
    (tmp_path / "none.json").write_text("{}")
    for wrong in ("other.json", "none.json", "gone.json"):
        answer = hstrain("export", run, "--store", little.path, "--out", tmp_path / "six", "--eval", tmp_path / wrong)
        assert (answer.status, answer.code) == (2, "usage")
        assert not (tmp_path / "six").exists()


def test_a_run_with_a_test_split_is_scored_on_it(
    little: Little, hstrain: Any, run: Path, zlab: Path, tmp_path: Path
) -> None:
    one = train_manifest(
        drafter={"taps": TAPS}, optim={"max_steps": 2}, data={"validation": 0.3, "test": 0.2}, run={"validate_every": 1}
    )
    fit(one, little.path, tmp_path / "run", device="cpu")
    store = hscache.open(little.path)
    _, validation, test = split(store, 0.3, 0.2)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert {line["samples"] for line in lines if line["kind"] == "validation"} == {len(validation)}

    def scored(*runs: Path, **how: Any) -> tuple[str, float, int]:
        found = evaluate(runs, [little.path], device="cpu", **how)
        assert {row["trained_on"] for row in found["rows"]} <= {0, None}
        assert len({row["samples"] for row in found["rows"]}) == 1
        return found["part"], found["held_out"], found["rows"][0]["samples"]

    assert scored(tmp_path / "run") == ("test", 0.5, len(test))
    assert scored(tmp_path / "run", zlab) == ("test", 0.5, len(test))
    assert scored(tmp_path / "run", part="validation") == ("validation", 0.5, len(validation))
    assert scored(tmp_path / "run", part="held-out") == ("held-out", 0.5, len(test + validation))
    assert scored(tmp_path / "run", held_out=0.2, part="test") == ("test", 0.2, len(test))
    # the other run validated on these samples, so no test is left
    assert scored(tmp_path / "run", run) == ("held-out", 0.3, len(split(store, 0.3)[1]))
    assert refusal([run], [little.path], part="test").code == "sample-unknown"
    # a run that began from it kept fewer
    tuned = train_manifest(
        drafter={"taps": TAPS, "start": str(tmp_path / "run"), "logit_std": 0}, optim={"max_steps": 1},
        data={"validation": 0.1, "test": 0.3},
    )  # fmt: skip
    fit(tuned, little.path, tmp_path / "tuned", device="cpu")
    assert scored(tmp_path / "tuned") == ("test", 0.4, len(test))
    answer = hstrain("eval", tmp_path / "run", "--store", little.path)
    assert answer.out.startswith(f"{counted(len(test), 'test sample')}, ")
    assert "chose its checkpoint" not in answer.out
    answer = hstrain("eval", tmp_path / "run", "--store", little.path, "--part", "validation")
    assert answer.out.startswith(f"{counted(len(validation), 'validation sample')}, ")
    assert f"validation on {len(validation)} of these samples chose its checkpoint" in answer.out


def test_eval_predicts_speeds_from_costs(hstrain: Any, row: dict[str, Any], run: Path, little: Little) -> None:
    words = (
        "eval",
        run,
        "--store",
        little.path,
        "--device",
        "cpu",
        "--cost",
        "draft=0.5,verify=1.25,keep=0.25,row=0.25",
    )
    answer = hstrain(*words, "--json")
    assert (answer.status, answer.json["cost"]) == (0, {"draft": 0.5, "verify": 1.25, "keep": 0.25, "row": 0.25})
    speeds = answer.json["rows"][0]["speed"]
    assert speeds.keys() == {"all", "code", "math"}
    assert speeds["all"][-1] == pytest.approx(row["tau"] / 2)
    assert speeds["code"][-1] == pytest.approx(row["by_tag"]["code"] / 2)
    text = hstrain(*words).out
    assert "predicted speed by drafted tokens" in text
    assert "(draft 0.5, verify 1.25, keep 0.25, row 0.25 tokens)" in text
    assert "/run, math " in text
    for wrong in ("draft=1", "draft=1,verify=0.5", "verify=2,draft=1", "draft=1.2.3,verify=2"):
        answer = hstrain(*words[:-1], wrong)
        assert (answer.status, answer.code) == (2, "usage")


def test_drafters_of_other_block_sizes_share_the_tables(capsys: pytest.CaptureFixture[str], row: Any) -> None:
    longer = {**row, "checkpoint": "longer", "acc": [*row["acc"], 0.123, None]}
    found = {"held_out": 0.3, "part": "held-out", "precision": "fp32", "baselines": [], "cost": None}
    print_evaluation({**found, "rows": [row, longer]})
    out = capsys.readouterr().out
    heads = [line.split()[1:] for line in out.splitlines() if line.split()[:3] == ["drafter", "1", "2"]]
    assert heads == 2 * [[str(k) for k in range(1, len(row["acc"]) + 3)]]  # plain, and where all before are right
    assert "0.123" in out


def test_eval_draws_a_picture(hstrain: Any, run: Path, zlab: Path, little: Little, tmp_path: Path) -> None:
    picture = tmp_path / "eval.png"
    answer = hstrain("eval", run, zlab, "--store", little.path, "--device", "cpu", "--plot", picture, "--json")
    assert (answer.status, len(answer.json["rows"])) == (0, 2)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_exit_statuses_of_eval(hstrain: Any, run: Path, zlab: Path, little: Little, tmp_path: Path) -> None:
    assert hstrain("eval", run).status == 2
    at = ("--store", little.path, "--device", "cpu")
    for wrong in ([tmp_path, *at], [zlab, *at], [run, "--store", tmp_path], [run, *at, "--held-out", "2"]):
        answer = hstrain("eval", *wrong)
        assert (answer.status, answer.out) == (2, "")
    answer = hstrain("eval", run, *at, "--plot", tmp_path / "x.jpeg2000")
    assert (answer.status, answer.out) == (2, "")
    assert ".png" in answer.err


def test_a_drafter_of_another_width_is_refused_before_anything_is_computed(little: Little, tmp_path: Path) -> None:
    config = DrafterConfig(
        hidden_size=16, vocab_size=VOCAB, taps=(0, 2), num_target_layers=4, layer_types=("full_attention",),
        intermediate_size=8, num_heads=2, num_kv_heads=1, head_dim=4, block_size=4, mask_token_id=1,
    )  # fmt: skip
    wide = {name: torch.randn(VOCAB, 16) for name in ("embed", "lm_head")}
    facts = {"head": {"scale": 1.0, "softcap": None}, "shape": {**SHAPE, "hidden_size": 16}}
    head = TargetHead(**wide, norm=head_weights()["norm"], facts=facts)
    export_drafter("zlab", Drafter(config), head, tmp_path / "wide", provenance={"target": "wide"})
    refused = refusal([tmp_path / "wide"], [little.path], held_out=1)
    assert (refused.code, refused.exit_code) == ("drafter-other-target", 2)
