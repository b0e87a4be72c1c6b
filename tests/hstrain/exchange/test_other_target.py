"""A drafter of another target of the same shape: eval, fit and speculate warn, export refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hstrain.exchange.importer import target_differences
from hstrain.score.report import evaluate

from tests.made.runs import manifest, run
from tests.made.stores import HIDDEN, VOCAB, Little
from tests.made.trainers import MASK, SHAPE, training_store

pytestmark = pytest.mark.usefixtures("no_disk")
OURS = {
    "weights": {"model.safetensors": "0a"},
    "tokenizer": {"tokenizer.json": "0b"},
    "shape": {"num_layers": 4, "hidden_size": HIDDEN, "vocab_size": VOCAB},
}
OTHER = {**OURS, "weights": {"model.safetensors": "ff"}}


@pytest.fixture
def ours(tmp_path: Path) -> Little:
    return training_store(tmp_path / "ours", says=OURS)


@pytest.fixture
def other(tmp_path: Path) -> Little:
    return training_store(tmp_path / "other", says=OTHER)


@pytest.fixture
def trained(ours: Little, tmp_path: Path) -> Path:
    run(ours, tmp_path / "run", manifest(drafter={**SHAPE, "taps": [0, 2]}, optim={"max_steps": 1}))
    return tmp_path / "run"


def test_eval_warns(trained: Path, ours: Little, other: Little, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    evaluate([trained], [ours.path], device="cpu")
    assert "warning" not in capsys.readouterr().err
    evaluate([trained], [other.path], device="cpu")
    assert "was trained for another target, little: its weights differ from those of" in capsys.readouterr().err


def test_a_start_of_another_target_is_a_warning(
    trained: Path, ours: Little, other: Little, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start: dict[str, Any] = {"drafter": {"start": str(trained), "taps": [0, 2]}, "optim": {"max_steps": 1}}
    for store, warned in ((ours, False), (other, True)):
        capsys.readouterr()
        run(store, tmp_path / store.path.name / "again", manifest(**start))
        assert ("trained for another target" in capsys.readouterr().err) == warned


def test_export_refuses(trained: Path, ours: Little, other: Little, hstrain: Any, tmp_path: Path) -> None:
    answer = hstrain("export", trained, "--store", other.path, "--out", tmp_path / "x")
    assert (answer.status, answer.code, (tmp_path / "x").exists()) == (4, "target-other", False)
    assert "its weights differ" in answer.err
    assert hstrain("export", trained, "--store", ours.path, "--out", tmp_path / "x").status == 0


@pytest.mark.parametrize(
    ("trained_on", "store", "differing"),
    [
        ("0a", "0a", []),
        ("0a", "0b", ["weights"]),
        ("size-mtime:7-1", "size-mtime:7-2", []),  # a copy of the same file has another time
        ("size-mtime:7-1", "size-mtime:8-1", ["weights"]),
        ("size-mtime:7-1", "0a", []),  # cannot be compared
    ],
)
def test_digests_are_compared_as_far_as_they_can_be(trained_on: str, store: str, differing: list[str]) -> None:
    def target(digest: str) -> dict[str, Any]:
        return {"weights": {"w": digest}, "tokenizer": {"t": "1"}}

    facts = {"provenance": {"store": target(trained_on)}}
    assert target_differences(facts, {"target": target(store)}) == differing
    assert target_differences({"imported": object()}, {"target": target(store)}) == []


def test_a_mask_token_that_texts_have_is_reported_before_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def put(row: Any, arrays: Any) -> None:
        arrays["input_ids"][0] = MASK

    for name, edit in (("clean", None), ("used", put)):
        store = training_store(tmp_path / name, edit=edit)
        capsys.readouterr()
        run(store, tmp_path / name / "run", manifest(optim={"max_steps": 1}))
        assert (f"the mask token {MASK} is in sample" in capsys.readouterr().err) == (name == "used")
