"""Runs stop when going on is in vain, and pass over what is merely bad, with a record of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hstrain.run.checkpoint import load_state
from hstrain.run.folder import RunPaths
from hstrain.train.parallel import World
from hstrain.train.step import Trainer

from hscache.errors import InputError, IntegrityError, TrainingFault
from tests.made.runs import (
    Killed,
    die,
    during_step,
    manifest,
    run,
)
from tests.made.stores import Little, little_manifest, make_store
from tests.made.trainers import damage, train_manifest, training_store, turn_rows

pytestmark = pytest.mark.usefixtures("no_disk")


def test_states_that_are_no_numbers_stop_the_run_and_are_named(tmp_path: Path) -> None:
    def plant(row: Any, arrays: dict[str, Any]) -> None:
        if row.sample_id == "t3":
            arrays["hidden_states"][:] = 0x7FC0  # NaN

    little = training_store(tmp_path / "store", edit_stored=plant)
    with pytest.raises(TrainingFault) as caught:
        run(little, tmp_path / "run", train_manifest(data={"pack_tokens": 45}))
    assert caught.value.code == "training-diverged"
    assert "t3" in caught.value.message
    assert "loss nan" in caught.value.message
    for at in RunPaths(tmp_path / "run").steps():  # nothing that NaN has touched is kept
        weights, _, _ = load_state(RunPaths(tmp_path / "run").checkpoint(at))
        assert all(tensor.isfinite().all() for tensor in weights.values())


def test_targets_that_are_no_numbers_stop_the_run(tmp_path: Path) -> None:
    def plant(row: Any, arrays: dict[str, Any]) -> None:
        if row.sample_id == "t3":
            arrays["final_state"][:] = 0x7FC0

    little = training_store(tmp_path / "store", edit_stored=plant)
    with pytest.raises(TrainingFault, match="t3"):
        run(little, tmp_path / "run", train_manifest(loss={"kind": "kl-exact"}))


def test_a_loss_that_explodes_stops_the_run(little: Little, tmp_path: Path) -> None:
    one = train_manifest(optim={"lr": 300.0, "epochs": 20}, run={"validate_every": 1000})
    with pytest.raises(TrainingFault) as caught:
        run(little, tmp_path / "run", one)
    assert caught.value.code == "training-diverged"


def test_bad_samples_are_passed_over_counted_once_and_recorded(tmp_path: Path) -> None:
    little = training_store(tmp_path / "store")
    damage(little.path, "t3")
    one = train_manifest(data={"max_bad_samples": 1}, optim={"epochs": 3})  # three epochs meet it three times
    with during_step(9, die), pytest.raises(Killed):
        run(little, tmp_path / "run", one)
    report = run(little, tmp_path / "run", one)
    assert report.skipped == 1
    assert "1 sample skipped" in report.text()
    (line,) = [json.loads(line) for line in RunPaths(tmp_path / "run").skipped.read_text().splitlines()]
    assert line["sample_id"] == "t3"
    assert line["error"].startswith("store-damaged: ")
    assert line["step"] >= 1
    clean = training_store(tmp_path / "clean")
    assert report.steps == run(clean, tmp_path / "other", one).steps


def test_a_bad_sample_met_again_after_a_kill_is_recorded_once(tmp_path: Path) -> None:
    little = training_store(tmp_path / "store")
    damage(little.path, "t3")
    for seed in range(99):  # one whose first epoch meets it after a checkpoint and before the next
        one = train_manifest(run={"seed": seed, "checkpoint_every": 2, "validate_every": 99})
        trainer = Trainer(one, little.path, World.join("cpu"))
        (met,) = [i for i, pack in enumerate(trainer.schedule.packs(0), 1) if trainer.store.index_of("t3") in pack]
        if met % 2 and met > 2:
            break
    with during_step(met + 1, die), pytest.raises(Killed):
        run(little, tmp_path / "run", one)
    assert RunPaths(tmp_path / "run").steps()[-1] == met - 1
    assert run(little, tmp_path / "run", one).skipped == 1
    assert len(RunPaths(tmp_path / "run").skipped.read_text().splitlines()) == 1


def test_too_many_bad_samples_stop_the_run(tmp_path: Path) -> None:
    little = training_store(tmp_path / "store")
    damage(little.path, "t3")
    with pytest.raises(IntegrityError) as caught:
        run(little, tmp_path / "run", train_manifest(data={"max_bad_samples": 0}))
    assert caught.value.code == "too-many-bad-samples"
    assert "hscache repair" in str(caught.value.hint)
    assert "t3" in RunPaths(tmp_path / "run").skipped.read_text()


def test_a_held_out_sample_that_cannot_be_read_is_passed_over_too(tmp_path: Path) -> None:
    little = training_store(tmp_path / "store")
    trainer = Trainer(train_manifest(), little.path, World.join("cpu"))
    bad = trainer.store.sample_ids[trainer.held[0]]
    damage(little.path, bad)
    report = run(little, tmp_path / "run")
    assert report.skipped == 1
    assert report.validation["samples"] == len(trainer.held) - 1
    (line,) = [json.loads(line) for line in RunPaths(tmp_path / "run").skipped.read_text().splitlines()]
    assert (line["sample_id"], line["step"]) == (bad, 0)


def test_a_store_without_a_single_anchor_is_refused_after_an_epoch_has_looked(tmp_path: Path) -> None:
    rows = turn_rows()
    for row in rows:
        row.loss_mask[:] = 0
        row.loss_mask[3::2] = 1
    little = make_store(tmp_path / "store", rows, manifest=little_manifest())
    for name, how in (("short", {"optim": {"max_steps": 3}}), ("long", {})):
        with pytest.raises(InputError) as refused:
            run(little, tmp_path / name, manifest(**how))
        assert refused.value.code == "no-anchors"
        trainer = Trainer(manifest(**how), little.path, World.join("cpu"))
        seen = trainer.schedule.packs(0)[: 3 if name == "short" else None]
        assert f"of their {sum(map(len, seen))} samples" in refused.value.message
        assert f"(of {len(trainer.train)} to train on)" in refused.value.message
    with pytest.raises(InputError) as refused:
        run(little, tmp_path / "heart", overfit=1)
    assert refused.value.code == "no-anchors"


def test_first_steps_without_anchors_are_no_yardstick_for_an_exploding_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    little = training_store(tmp_path / "store")
    records = iter([(0.0, 0), (9.0, 4), (9.0, 4)])

    def step_of(self: Trainer, at: int, packs: Any) -> dict[str, Any]:
        loss, blocks = next(records)
        return {"loss": loss, "blocks": blocks, "bad": 0, "grad_norm": 1.0, "acc": [], "tau": 1.0, "lr": 0.0}

    monkeypatch.setattr(Trainer, "step", step_of)
    assert run(little, tmp_path / "run", manifest(optim={"max_steps": 2})).steps == 2


@pytest.mark.parametrize("losses", [[0.05] * 9 + [60.0] + [0.05] * 3 + [60.0] + [0.05] * 9, [0.01, *[5.0] * 20]])
def test_odd_samples_do_not_end_a_run(
    little: Little, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, losses: list[float]
) -> None:
    given = iter(losses)

    def step_of(self: Trainer, at: int, packs: Any) -> dict[str, Any]:
        return {"loss": next(given), "blocks": 4, "bad": 0, "grad_norm": 1.0, "acc": [], "tau": 1.0, "lr": 0.0}

    monkeypatch.setattr(Trainer, "step", step_of)
    assert run(little, tmp_path / "run", manifest(optim={"max_steps": len(losses)})).steps == len(losses)


def test_a_divergence_is_told_after_a_few_steps_and_nan_at_once(
    little: Little, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, losses, at in (("high", [0.05] * 9 + [60.0] * 9, 13), ("nan", [0.05, 0.05, float("nan")], 3)):
        given = iter(losses)

        def step_of(self: Trainer, at: int, packs: Any, given: Any = given) -> dict[str, Any]:
            return {"loss": next(given), "blocks": 4, "bad": 0, "grad_norm": 1.0, "acc": [], "tau": 1.0, "lr": 0.0}

        monkeypatch.setattr(Trainer, "step", step_of)
        one = manifest(optim={"max_steps": 30}, run={"checkpoint_every": 11})
        with pytest.raises(TrainingFault, match=f"step {at}: ") as caught:
            run(little, tmp_path / name, one)
        assert caught.value.code == "training-diverged"
    given = iter([60.0] * 9)  # the checkpoint at step 11 knows the losses before it
    monkeypatch.setattr(
        Trainer,
        "step",
        lambda self, at, packs: {
            "loss": next(given), "blocks": 4, "bad": 0, "grad_norm": 1.0, "acc": [], "tau": 1.0, "lr": 0.0
        },
    )  # fmt: skip
    with pytest.raises(TrainingFault, match="step 13: "):
        run(little, tmp_path / "high", one)
