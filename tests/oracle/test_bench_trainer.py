"""The benchmark compares like with like: both sides compute the same loss, and learn the same from it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import bench_trainer
import pytest
from bench_trainer import OURS, Work
from trainer_learning import THEIR_START, THEIRS, learn

from tests.made.trainers import SHAPE, training_store, write_manifest

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
SMALL = Work(
    hidden_size=64, vocab_size=512, layers=2, taps=3, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=16,
    anchors=12, tokens=64, lr=1e-3,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _keep_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_trainer, "forget_peak", lambda: None)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_both_sides_compute_the_same_loss_and_take_the_same_steps(attention: str, monkeypatch: Any) -> None:
    from speculators.models.dflash import core

    monkeypatch.setattr(core, "select_anchors", core.select_anchors)  # put back what the peer replaces
    theirs = f"speculators {attention}"
    turn = {side: bench_trainer.measure(side, SMALL, "kl", "fp32", 3) for side in (OURS, theirs)}
    bench_trainer.check_same_loss(SMALL, turn)
    assert turn[OURS]["trained"] == turn[theirs]["trained"]
    ours, other = turn[OURS]["losses"], turn[theirs]["losses"]
    # AdamW sees no constant factor, so after steps the losses are still the same but for it
    assert [loss / ours[0] for loss in ours] == pytest.approx([loss / other[0] for loss in other], rel=1e-3)
    assert ours[-1] < ours[0]


def test_another_loss_is_noticed() -> None:
    turn: dict[str, Any] = {side: bench_trainer.measure(side, SMALL, "default", "fp32", 1) for side in (OURS,)}
    turn["speculators sdpa"] = {"losses": [turn[OURS]["losses"][0]]}
    with pytest.raises(SystemExit):
        bench_trainer.check_same_loss(SMALL, turn)


def test_both_sides_train_from_a_store_and_are_scored_alike(tmp_path: Path) -> None:
    store = training_store(tmp_path / "store").path
    shape = {**SHAPE, "layer_types": ["full_attention"], "sliding_window": None}
    manifest = write_manifest(tmp_path / "train.toml", drafter=shape, optim={"max_steps": 6})
    sides = {side: learn(side, str(manifest), [], str(store), [0, 6]) for side in (OURS, THEIRS, THEIR_START)}
    first = {side: found["scores"][0] for side, found in sides.items()}
    assert first[OURS]["acc"] == first[THEIRS]["acc"]  # the same weights
    for found in sides.values():
        assert len(found["losses"]) == 6
        assert all(map(math.isfinite, found["losses"]))
