"""Runs go on bit by bit where they were stopped, refuse what is not theirs, and stop when it is in vain."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

import hscache
from hscache.console import Interrupted
from hscache.errors import ConflictError, EnvironmentFault, InputError, IntegrityError, TrainingFault
from hscache.store import durable
from tests.hybrid import DRAFTER, Hybrid
from tests.stores import Little, flip, little_manifest, make_store
from tests.trainers import LENGTHS, SHAPE, damage, train_manifest, training_store, turn_rows, write_manifest
from trainer import checkpoint as ckpt
from trainer import cli, progress, run_folder, step
from trainer.checkpoint import load_drafter, load_state
from trainer.data import PackBuilder
from trainer.drafter import Drafter
from trainer.fit import fit
from trainer.manifest import TrainManifest, load_train_manifest
from trainer.parallel import World
from trainer.plot import read_metrics
from trainer.run_folder import RunPaths
from trainer.step import Trainer

TIMES = {"tokens_per_s", "blocks_per_s", "wait", "peak_memory_bytes", "seconds"}
STEPS = 8


@pytest.fixture(scope="module")
def little(tmp_path_factory: pytest.TempPathFactory) -> Little:
    return training_store(tmp_path_factory.mktemp("fit") / "store")


pytestmark = pytest.mark.usefixtures("no_disk")


def manifest(**sections: dict[str, Any]) -> TrainManifest:
    sections["optim"] = {"max_steps": STEPS, **sections.get("optim", {})}
    return train_manifest(**sections)


def run(little: Little, out: Path, one: TrainManifest | None = None, **options: Any) -> Any:
    return fit(one or manifest(), little.path, out, device="cpu", **options)


def metrics(out: Path) -> list[dict[str, Any]]:
    """Return the lines of ``metrics.jsonl`` without what depends on the clock."""
    lines = RunPaths(out).metrics.read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in lines]


def last(out: Path) -> Path:
    paths = RunPaths(out)
    return paths.checkpoint(paths.steps()[-1])


def cut_line(out: Path) -> None:
    """Append a line that is not finished."""
    with RunPaths(out).metrics.open("a") as file:
        file.write('{"step": 9')


def same_checkpoint(a: Path, b: Path) -> bool:
    names = ("drafter.safetensors", "optimizer.safetensors", "state.json")
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in names)


@contextlib.contextmanager
def during_step(number: int, act: Any) -> Any:
    """Let something happen once the steps of this session reach a number, after the step's own work."""
    done, original = 0, Trainer.step

    def acting(self: Trainer, at: int, packs: Any) -> Any:
        nonlocal done
        record = original(self, at, packs)
        done += 1
        if done == number:
            act()
        return record

    Trainer.step = acting  # type: ignore[method-assign]
    try:
        yield
    finally:
        Trainer.step = original  # type: ignore[method-assign]


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Killed(BaseException):
    """Stands for kill -9: nothing may be done on the way out."""


def die() -> None:
    raise Killed


KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "adamw": {},
    "muon": {"optim": {"name": "muon", "weight_decay": 0.1}, "loss": {"weights": "dpace"}},
    "noise": {"data": {"noise": 0.2, "packs_per_step": 2, "max_tokens": 24}, "loss": {"kind": "kl-topk"}},
    "bf16": {"run": {"precision": "bf16", "gradient_checkpointing": True}, "loss": {"kind": "kl-exact"}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_run_goes_on_bit_by_bit(little: Little, tmp_path: Path, kind: str) -> None:
    one = manifest(**{name: dict(fields) for name, fields in KINDS[kind].items()})
    whole = run(little, tmp_path / "whole", one)
    for at in (2, 3):
        with during_step(at, terminate), pytest.raises(Interrupted) as caught:
            run(little, tmp_path / "cut", one)
        assert caught.value.signum == signal.SIGTERM
    assert RunPaths(tmp_path / "cut").steps()[-1] == 5
    report = run(little, tmp_path / "cut", one)
    assert same_checkpoint(last(tmp_path / "whole"), last(tmp_path / "cut"))
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert (report.steps, report.tau, report.best_tau, report.first_tau) == (
        STEPS, whole.tau, whole.best_tau, whole.first_tau,
    )  # fmt: skip
    before = Trainer(one, little.path, World.join("cpu"))
    after, _ = load_drafter(last(tmp_path / "whole"))
    assert not torch.equal(before.drafter.fc.weight, after.fc.weight)


def test_a_killed_run_goes_on_bit_by_bit_from_its_last_checkpoint(little: Little, tmp_path: Path) -> None:
    run(little, tmp_path / "whole")
    for at in (1, 5, 2):  # before the first checkpoint; then at 5 of 8; then at once again
        with during_step(at, die), pytest.raises(Killed):
            run(little, tmp_path / "cut")
    lines = metrics(tmp_path / "cut")
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2, 3, 4]
    cut_line(tmp_path / "cut")  # as a kill may do
    run(little, tmp_path / "cut")
    assert same_checkpoint(last(tmp_path / "whole"), last(tmp_path / "cut"))
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    steps = [(line["kind"], line["step"]) for line in metrics(tmp_path / "cut")]
    assert len(set(steps)) == len(steps)
    assert [at for kind, at in steps if kind == "train"] == list(range(1, STEPS + 1))
    assert [at for kind, at in steps if kind == "validation"] == [0, 3, 6, 8]


def test_a_kill_between_the_best_checkpoint_and_its_entry_loses_nothing(
    little: Little, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = manifest(optim={"lr": 3e-2}, run={"validate_every": 2})
    run(little, tmp_path / "whole", one)
    entered = run_folder.keep_best

    def dying(paths: RunPaths, at: int, tau: float) -> bool:
        raise Killed

    monkeypatch.setattr(run_folder, "keep_best", dying)
    with pytest.raises(Killed):
        run(little, tmp_path / "cut", one)
    monkeypatch.setattr(run_folder, "keep_best", entered)
    assert RunPaths(tmp_path / "cut").steps() == [2]
    assert not RunPaths(tmp_path / "cut").best.exists()
    with during_step(1, die), pytest.raises(Killed):
        run(little, tmp_path / "cut", one)
    assert json.loads(RunPaths(tmp_path / "cut").best.read_bytes())["step"] == 2
    run(little, tmp_path / "cut", one)
    assert RunPaths(tmp_path / "cut").best.read_bytes() == RunPaths(tmp_path / "whole").best.read_bytes()


def test_a_finished_run_is_left_as_it_is(little: Little, tmp_path: Path) -> None:
    first = run(little, tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    again = run(little, tmp_path / "run")
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    assert (again.steps, again.tau, again.best_tau) == (first.steps, first.tau, first.best_tau)


def test_the_seed_and_nothing_else_decides_a_run(little: Little, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.manual_seed(ord(name))
        run(little, tmp_path / name, manifest(run={"seed": seed}))
    assert same_checkpoint(last(tmp_path / "a"), last(tmp_path / "b"))
    assert not same_checkpoint(last(tmp_path / "a"), last(tmp_path / "c"))


# learning


def test_it_learns(little: Little, tmp_path: Path) -> None:
    one = train_manifest(
        optim={"name": "muon", "lr": 5e-2, "max_steps": 80}, run={"validate_every": 1000, "log_every": 5}
    )
    run(little, tmp_path / "run", one)
    losses = [line["loss"] for line in metrics(tmp_path / "run") if line["kind"] == "train"]
    assert np.mean(losses[-5:]) < 0.7 * losses[0]
    train, _ = read_metrics(tmp_path / "run")
    assert np.mean([line["tau"] for line in train[-5:]]) > 1.3 > train[0]["tau"]
    assert all(line["lr"] > 0 for line in train[:-1])


@pytest.mark.parametrize("logit_std", [0.25, 1.0])
def test_the_start_is_calibrated(little: Little, logit_std: float) -> None:
    trainer = Trainer(manifest(drafter={"logit_std": logit_std}), little.path, World.join("cpu"))
    trainer.calibrate()
    with trainer.stream(0) as stream:
        (pack,) = next(stream)
    with torch.no_grad():
        logits = trainer.head.logits(trainer.hidden(pack, 0)[:, 1])
    assert float(logits.std(-1).mean()) == pytest.approx(logit_std, rel=0.25)


def test_a_run_starts_calibrated(little: Little, tmp_path: Path) -> None:
    for logit_std in (0.25, 4.0):
        run(little, tmp_path / str(logit_std), manifest(drafter={"logit_std": logit_std}, optim={"max_steps": 1}))
    narrow, wide = (metrics(tmp_path / str(logit_std))[1]["loss"] for logit_std in (0.25, 4.0))
    assert narrow == pytest.approx(np.log(32), rel=0.05)
    assert wide > 1.5 * narrow


def test_a_step_without_slots_moves_nothing(little: Little) -> None:
    trainer = Trainer(manifest(), little.path, World.join("cpu"))
    trainer.distribute()
    with trainer.stream(0) as stream:
        trainer.step(0, next(stream))  # from now on there is momentum
    before = [p.clone() for p in trainer.drafter.parameters()]
    empty = PackBuilder(trainer.pack_shape).pack(3, 8)
    record = trainer.step(1, [empty])
    assert (record["loss"], record["blocks"], record["bad"]) == (0.0, 0, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.drafter.parameters(), strict=True))


def test_one_sample_is_learnt_by_heart(little: Little, tmp_path: Path) -> None:
    report = run(little, tmp_path / "run", train_manifest(optim={"lr": 2e-2}, data={"anchors": 64}), overfit=1)
    assert report.overfit_at is not None
    assert report.overfit_at % 10 == 0
    assert report.steps == report.overfit_at
    drafter, facts = load_drafter(tmp_path / "run")
    assert facts["step"] == report.overfit_at
    trainer = Trainer(train_manifest(), little.path, World.join("cpu"), overfit=1)
    assert len(trainer.train) == 1
    (score,) = step.score_store(drafter, trainer.head, trainer.store, trainer.train)
    assert score.streak[0] == min(3, score.left_N[0])


def test_a_completion_of_the_trained_hybrid_is_learnt_by_heart(
    hybrid: Hybrid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    toml = write_manifest(
        tmp_path / "m.toml",
        drafter=DRAFTER,
        data={"max_tokens": 256, "pack_tokens": 512, "anchors": 64},
        optim={"name": "muon", "lr": 1e-2},
        run={"log_every": 100},
    )
    fitting = ("fit", toml, "--store", hybrid.store, "--out", tmp_path / "run", "--device", "cpu", "--overfit", 1)
    assert main(monkeypatch, *fitting, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["overfit_at"] <= 300
    drafter, _ = load_drafter(tmp_path / "run")
    trainer = Trainer(load_train_manifest(toml), hybrid.store, World.join("cpu"), overfit=1)
    (score,) = step.score_store(drafter, trainer.head, trainer.store, trainer.train)
    assert score.streak[0] == DRAFTER["block_size"] - 1 <= score.left_N[0]  # the first block is accepted whole


def test_a_run_that_learnt_by_heart_ends_with_a_validation_and_is_left_as_it_is(
    little: Little, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, lr, steps in (("learnt", 2e-2, 300), ("not", 1e-9, 10)):
        monkeypatch.setattr(step, "OVERFIT_STEPS", steps)
        one, out = train_manifest(optim={"lr": lr}, data={"anchors": 64}), tmp_path / name
        report = run(little, out, one, overfit=1)
        assert (report.overfit_at is not None) == (name == "learnt")
        held = [line for line in metrics(out) if line["kind"] == "validation"]
        assert [line["step"] for line in held] == [0, report.steps]
        assert report.tau == held[1]["tau"]
        before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        again = run(little, out, one, overfit=1)
        assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
        assert (again.steps, again.tau, again.overfit_at) == (report.steps, report.tau, report.overfit_at)
    assert held[1]["tau"] == held[0]["tau"]  # of the one that moved no weight


def test_validations_and_checkpoints_do_not_count_as_training(
    little: Little, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validate, write = Trainer.validate, ckpt.save_checkpoint

    def slow(act: Any) -> Any:
        def acting(*args: Any) -> Any:
            time.sleep(1.5)
            return act(*args)

        return acting

    monkeypatch.setattr(Trainer, "validate", slow(validate))
    monkeypatch.setattr(ckpt, "save_checkpoint", slow(write))
    run(little, tmp_path / "run", manifest(optim={"max_steps": 4}, run={"validate_every": 2, "checkpoint_every": 3}))
    lines = [json.loads(line) for line in RunPaths(tmp_path / "run").metrics.read_text().splitlines()]
    speeds = [line["tokens_per_s"] for line in lines if line["kind"] == "train"]
    assert min(speeds) > 64 / 1.5  # a pack in that time


# what does not belong to a run


def test_two_sessions_in_one_run_are_refused(
    little: Little, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(little, tmp_path / "run", manifest(optim={"max_steps": 2}))
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    met = []

    def again() -> None:
        with pytest.raises(ConflictError) as caught:
            run(little, tmp_path / "new")
        met.append(caught.value)

    with during_step(2, again):
        run(little, tmp_path / "new")
    (error,) = met
    assert error.code == "run-in-use"
    assert f"process {os.getpid()} on " in error.message
    assert str(tmp_path / "new") in error.message
    toml = write_manifest(tmp_path / "m.toml", optim={"max_steps": 2})
    with run_folder.hold_run(RunPaths(tmp_path / "run")):
        fitting = ("fit", toml, "--store", little.path, "--out", tmp_path / "run", "--device", "cpu")
        assert main(monkeypatch, *fitting) == 4
    assert "error[run-in-use]" in capsys.readouterr().err
    assert main(monkeypatch, *fitting) == 0
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_another_version_of_ours_goes_on(little: Little, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(little, tmp_path / "run")
    began = json.loads(RunPaths(tmp_path / "run").manifest.read_bytes())["hscache"]
    monkeypatch.setattr("trainer.fit.__version__", "99.0")
    run(little, tmp_path / "run")
    assert json.loads(RunPaths(tmp_path / "run").manifest.read_bytes())["hscache"] == began == hscache.__version__
    with pytest.raises(ConflictError) as caught:
        run(little, tmp_path / "run", manifest(run={"seed": 1}))
    assert "99.0" not in caught.value.message


def refused(little: Little, out: Path, one: TrainManifest, **options: Any) -> ConflictError:
    with pytest.raises(ConflictError) as caught:
        run(little, out, one, **options)
    assert caught.value.code == "run-other-manifest"
    return caught.value


def test_another_manifest_or_store_is_refused_by_name(little: Little, tmp_path: Path) -> None:
    run(little, tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert (
        "manifest.optim.lr was 0.01, is 0.02" in refused(little, tmp_path / "run", manifest(optim={"lr": 2e-2})).message
    )
    assert "manifest.run.seed was 0, is 1" in refused(little, tmp_path / "run", manifest(run={"seed": 1})).message
    assert "overfit was 0, is 1" in refused(little, tmp_path / "run", manifest(), overfit=1).message
    other = training_store(tmp_path / "other", LENGTHS[:-1])
    assert "store.digest" in refused(other, tmp_path / "run", manifest()).message
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_a_store_that_moved_is_the_same_store(little: Little, tmp_path: Path) -> None:
    run(little, tmp_path / "run")
    shutil.copytree(little.path, tmp_path / "moved")
    fit(manifest(), tmp_path / "moved", tmp_path / "run", device="cpu")


@pytest.mark.parametrize(
    ("sections", "code"),
    [
        ({"logits": {"topk": 0}}, "kl-topk"),
        ({"logits": {"topk": 0}}, "ce-argmax"),
        ({"states": {"final_state": False}}, "tv"),
    ],
)
def test_a_loss_that_the_store_cannot_feed_is_refused(tmp_path: Path, sections: Any, code: str) -> None:
    little = training_store(tmp_path / "store", [9, 12], **sections)
    with pytest.raises(InputError) as caught:
        run(little, tmp_path / "run", manifest(loss={"kind": code}))
    assert caught.value.code == "array-absent"
    assert not (tmp_path / "run").exists()


def test_a_store_that_is_not_finished_is_refused(tmp_path: Path) -> None:
    rows = turn_rows()
    little = make_store(tmp_path / "store", rows, manifest=little_manifest(), shards=[0, 1])
    with pytest.raises(InputError) as caught:
        run(little, tmp_path / "run")
    assert caught.value.code == "store-unfinished"


# the files of a run


@pytest.fixture(scope="module")
def odd_text(tmp_path_factory: pytest.TempPathFactory) -> Little:
    """A store whose tags hold what ``str.splitlines`` takes for the end of a line."""
    rows = [dataclasses.replace(row, tag="caf\u00e9\u2028of\u2029the\x85day\x0b") for row in turn_rows()]
    limits = {"max_tokens": 1024, "batch_tokens": 64}
    return make_store(tmp_path_factory.mktemp("odd") / "store", rows, manifest=little_manifest(limits=limits))


@pytest.mark.parametrize("left", [b"", b'{"step": 9', '{"step": 9, "tag": "caf\u00e9'.encode()[:-1]])
def test_text_with_other_line_ends_and_a_cut_line_are_no_obstacle(
    odd_text: Little, tmp_path: Path, left: bytes
) -> None:
    run(odd_text, tmp_path / "whole")
    with during_step(5, die), pytest.raises(Killed):
        run(odd_text, tmp_path / "cut")
    with RunPaths(tmp_path / "cut").metrics.open("ab") as file:
        file.write(left)
    assert len(read_metrics(tmp_path / "cut")[0]) == 4
    run(odd_text, tmp_path / "cut")
    whole, cut = (read_metrics(tmp_path / name) for name in ("whole", "cut"))
    assert [[r["step"] for r in records] for records in cut] == [[r["step"] for r in records] for records in whole]
    assert "\u2028" in next(iter(cut[1][0]["by_tag"]))


def test_history_is_rewritten_only_where_a_line_must_go_and_then_as_a_whole(
    little: Little, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, paths = manifest(), RunPaths(tmp_path / "run")
    with during_step(3, terminate), pytest.raises(Interrupted):
        run(little, tmp_path / "run", one)
    inode = paths.metrics.stat().st_ino
    with during_step(2, die), pytest.raises(Killed):  # one more line, behind the checkpoint
        run(little, tmp_path / "run", one)
    assert paths.metrics.stat().st_ino == inode
    before = paths.metrics.read_bytes()

    def full(path: Path, data: bytes, staging: Path) -> None:
        raise OSError(errno.ENOSPC, "no space", str(path))

    monkeypatch.setattr(run_folder, "replace_file", full)
    with pytest.raises(EnvironmentFault) as caught:
        run(little, tmp_path / "run", one)
    assert caught.value.code == "disk-full"
    assert paths.metrics.read_bytes() == before
    monkeypatch.undo()
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    run(little, tmp_path / "run", one)
    assert [r["step"] for r in read_metrics(tmp_path / "run")[0]] == list(range(1, STEPS + 1))


def test_a_line_that_is_no_record_is_named(little: Little, tmp_path: Path) -> None:
    run(little, tmp_path / "run", manifest(optim={"max_steps": 2}))
    with RunPaths(tmp_path / "run").metrics.open("ab") as file:
        file.write(b"\0\0\0\n")
    for act in (
        lambda: run(little, tmp_path / "run", manifest(optim={"max_steps": 2})),
        lambda: read_metrics(tmp_path / "run"),
    ):
        with pytest.raises(IntegrityError, match="line 5 is no record") as caught:
            act()
        assert caught.value.code == "checkpoint-damaged"


def test_a_copy_of_a_checkpoint_beside_it_is_none(little: Little, tmp_path: Path) -> None:
    run(little, tmp_path / "run")
    folder = last(tmp_path / "run")
    shutil.copytree(folder, folder.with_name(f"{folder.name}-backup"))
    steps = RunPaths(tmp_path / "run").steps()
    assert steps[-1] == STEPS
    run(little, tmp_path / "run")
    load_drafter(tmp_path / "run")


@pytest.mark.parametrize("name", ["best.json", "manifest.json"])
@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step": "x", "tau": 1}', "{"])
def test_an_empty_or_foreign_record_is_refused(little: Little, tmp_path: Path, name: str, text: str) -> None:
    run(little, tmp_path / "run", manifest(optim={"max_steps": 2}))
    (tmp_path / "run" / name).write_text(text)
    acts = [lambda: run(little, tmp_path / "run", manifest(optim={"max_steps": 2}))]
    if name == "best.json":
        acts.append(lambda: load_drafter(tmp_path / "run"))
    for act in acts:
        with pytest.raises((IntegrityError, ConflictError)) as caught:
            act()
        assert caught.value.code in ("checkpoint-damaged", "run-other-manifest")
        assert str(tmp_path / "run") in caught.value.message
        assert caught.value.hint


def test_without_its_damaged_best_checkpoint_a_run_is_its_newest_one(little: Little, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    run(little, tmp_path / "run", manifest(optim={"lr": 3e-2}, run={"checkpoint_every": 1, "keep": 9}))
    paths.best.write_text('{"step": 4, "tau": 9.0}')
    flip(paths.checkpoint(4) / "drafter.safetensors", 400)
    with pytest.raises(IntegrityError) as caught:
        load_drafter(tmp_path / "run")
    assert "the newest one that its run still has" in str(caught.value.hint)
    shutil.rmtree(paths.checkpoint(4))
    assert load_drafter(tmp_path / "run")[1]["step"] == STEPS


def test_a_checkpoint_from_before_the_first_slot_has_no_moments_and_goes_on(tmp_path: Path) -> None:
    rows = turn_rows()
    for i, row in enumerate(rows):
        if i not in (4, 7):
            row.loss_mask[:-1] = 0
    little = make_store(tmp_path / "store", rows, manifest=little_manifest())
    for seed in range(99):
        one = train_manifest(
            data={"pack_tokens": 2, "validation": 0.0},
            optim={"max_steps": 12},
            run={"seed": seed, "checkpoint_every": 1},
        )
        if Trainer(one, little.path, World.join("cpu")).schedule.packs(0)[0] not in ([4], [7]):
            break
    run(little, tmp_path / "whole", one)
    with during_step(1, terminate), pytest.raises(Interrupted):
        run(little, tmp_path / "cut", one)
    assert load_state(last(tmp_path / "cut"))[1] == {}
    run(little, tmp_path / "cut", one)
    assert same_checkpoint(last(tmp_path / "whole"), last(tmp_path / "cut"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG])
def test_what_the_disk_says_of_tensors_is_passed_on(
    little: Little, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    import safetensors.torch

    def failing(tensors: Any, path: Path) -> None:
        Path(path).write_bytes(b"half")
        raise SafetensorError(f"Error while serializing: I/O error: whatever (os error {number})")

    monkeypatch.setattr(safetensors.torch, "save_file", failing)
    with pytest.raises(EnvironmentFault) as caught:
        run(little, tmp_path / "run", manifest(optim={"max_steps": 2}))
    assert caught.value.code == ("disk-full" if number == errno.ENOSPC else "disk-error")
    assert os.strerror(number) in caught.value.message
    assert RunPaths(tmp_path / "run").steps() == []


# checkpoints


@pytest.mark.parametrize("name", ["drafter.safetensors", "optimizer.safetensors", "drafter.json", "state.json"])
def test_a_flipped_byte_of_a_checkpoint_is_refused(little: Little, tmp_path: Path, name: str) -> None:
    run(little, tmp_path / "run", manifest(optim={"max_steps": 2}))
    folder = last(tmp_path / "run")
    size = (folder / name).stat().st_size
    loads = [lambda path: load_state(last(path)), lambda path: run(little, path, manifest(optim={"max_steps": 2}))]
    if name != "optimizer.safetensors":  # of no concern to who only uses the drafter
        loads.append(load_drafter)
    for position in {1, 20, size // 3, size // 2, size - 2}:
        flip(folder / name, position)
        for load in loads:
            with pytest.raises(IntegrityError) as caught:
                load(tmp_path / "run")
            assert caught.value.code == "checkpoint-damaged"
            assert str(folder) in caught.value.message
        flip(folder / name, position)
    load_drafter(tmp_path / "run")


@pytest.mark.parametrize("name", ["drafter.safetensors", "drafter.json"])
def test_a_missing_file_of_a_checkpoint_is_refused(little: Little, tmp_path: Path, name: str) -> None:
    run(little, tmp_path / "run", manifest(optim={"max_steps": 2}))
    (last(tmp_path / "run") / name).unlink()
    with pytest.raises(IntegrityError) as caught:
        load_drafter(tmp_path / "run")
    assert caught.value.code == "checkpoint-damaged"


def test_without_its_moments_a_checkpoint_is_a_drafter_but_no_state_to_go_on_from(
    little: Little, tmp_path: Path
) -> None:
    run(little, tmp_path / "run", manifest(optim={"max_steps": 2}))
    (last(tmp_path / "run") / "optimizer.safetensors").unlink()
    load_drafter(tmp_path / "run")
    with pytest.raises(IntegrityError) as caught:
        run(little, tmp_path / "run", manifest(optim={"max_steps": 2}))
    assert caught.value.code == "checkpoint-damaged"


def test_without_its_damaged_checkpoint_a_run_goes_on_from_the_one_before(little: Little, tmp_path: Path) -> None:
    for name in ("whole", "cut"):
        run(little, tmp_path / name, manifest(run={"keep": 9}))
    shutil.rmtree(last(tmp_path / "cut"))  # what the hint says
    run(little, tmp_path / "cut", manifest(run={"keep": 9}))
    assert same_checkpoint(last(tmp_path / "whole"), last(tmp_path / "cut"))
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "cut")


@pytest.mark.parametrize("files", [0, 1, 3])
def test_a_checkpoint_that_was_cut_while_it_was_written_is_none(
    little: Little, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int
) -> None:
    run(little, tmp_path / "whole")
    written = 0

    def dying(write: Any) -> Any:
        def act(path: Path, data: Any) -> Any:
            nonlocal written
            found = write(path, data)
            if path.parent.name == "checkpoint" and RunPaths(tmp_path / "cut").steps():
                if written == files:
                    os.truncate(path, path.stat().st_size // 2)
                    raise Killed
                written += 1
            return found

        return act

    for name in ("write_file", "write_tensors"):
        monkeypatch.setattr(ckpt, name, dying(getattr(ckpt, name)))
    monkeypatch.setattr(durable.Staging, "__exit__", lambda self, *args: os.close(self._lock))  # kill -9 tidies nothing
    with pytest.raises(Killed):
        run(little, tmp_path / "cut")
    monkeypatch.undo()
    paths = RunPaths(tmp_path / "cut")
    assert paths.steps() == [3]
    assert [path for path in paths.staging.iterdir() if path.is_dir()]
    load_drafter(tmp_path / "cut")
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    run(little, tmp_path / "cut")
    assert not list(paths.staging.iterdir())
    assert same_checkpoint(last(tmp_path / "whole"), last(tmp_path / "cut"))
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "cut")


def test_the_newest_checkpoints_and_the_best_one_stay(
    little: Little, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taus = iter([1.0, 1.2, 1.7, 1.5, 1.7, 1.3, 1.6])
    found = {"samples": 1, "tau_interval": [1, 2], "tau_all": 1.0, "ddtree": {"8": 1.0}, "acc": [], "by_tag": {}}
    monkeypatch.setattr(Trainer, "validate", lambda self: {**found, "tau": next(taus)})
    one = manifest(optim={"max_steps": 6}, run={"validate_every": 1, "checkpoint_every": 1, "keep": 2})
    report = run(little, tmp_path / "run", one)
    paths = RunPaths(tmp_path / "run")
    assert json.loads(paths.best.read_bytes()) == {"step": 2, "tau": 1.7}  # the first of equals
    assert paths.steps() == [2, 5, 6]
    assert (report.first_tau, report.best_tau, report.tau) == (1.0, 1.7, 1.6)
    _, facts = load_drafter(tmp_path / "run")
    assert facts["step"] == 2
    _, facts = load_drafter(paths.checkpoint(5))
    assert facts["step"] == 5
    paths.best.unlink()
    assert load_drafter(tmp_path / "run")[1]["step"] == 6


def test_what_was_the_best_checkpoint_goes_when_the_last_step_is_better(
    little: Little, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taus = iter([1.0, 1.7, 1.2, 1.2, 1.2, 1.2, 1.9])
    found = {"samples": 1, "tau_interval": [1, 2], "tau_all": 1.0, "ddtree": {"8": 1.0}, "acc": [], "by_tag": {}}
    monkeypatch.setattr(Trainer, "validate", lambda self: {**found, "tau": next(taus)})
    run(little, tmp_path / "run", manifest(optim={"max_steps": 6}, run={"validate_every": 1, "keep": 2}))
    assert json.loads(RunPaths(tmp_path / "run").best.read_bytes())["step"] == 6
    assert RunPaths(tmp_path / "run").steps() == [3, 6]


def test_the_first_of_equally_good_checkpoints_is_the_best(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert [run_folder.keep_best(paths, at, tau) for at, tau in ((1, 1.5), (2, 1.5), (3, 1.4), (4, 1.6))] == [
        True, False, False, True,
    ]  # fmt: skip
    assert json.loads(paths.best.read_bytes()) == {"step": 4, "tau": 1.6}


def test_the_best_checkpoint_is_that_of_the_best_validation(little: Little, tmp_path: Path) -> None:
    run(little, tmp_path / "run", manifest(optim={"lr": 3e-2}, run={"validate_every": 1}))
    held = [line for line in metrics(tmp_path / "run") if line["kind"] == "validation" and line["step"]]
    best = json.loads(RunPaths(tmp_path / "run").best.read_bytes())
    assert best["tau"] == max(line["tau"] for line in held)
    assert best["step"] == next(line["step"] for line in held if line["tau"] == best["tau"])


def test_a_checkpoint_says_what_it_was_trained_on(little: Little, tmp_path: Path) -> None:
    run(little, tmp_path / "run", manifest(optim={"max_steps": 1}))
    drafter, facts = load_drafter(tmp_path / "run")
    assert isinstance(drafter, Drafter)
    assert drafter.config.mask_token_id == SHAPE["mask_token_id"]
    store = facts["provenance"]["store"]
    assert store["digest"] == hscache.open(little.path).manifest["digest"]
    assert (store["taps"], store["kernel_path_id"]) == ([0, 2, 3], "dense-0")
    assert facts["provenance"]["manifest"]["optim"]["lr"] == 1e-2
    assert not [path for path in (tmp_path / "run").rglob("*") if path.suffix in (".pt", ".pkl", ".bin")]


def test_all_files_of_a_checkpoint_may_be_read_by_the_same_users(little: Little, tmp_path: Path) -> None:
    run(little, tmp_path / "run", manifest(optim={"max_steps": 1}))
    (tmp_path / "ours").touch()
    modes = {path.stat().st_mode for path in last(tmp_path / "run").iterdir()}
    assert modes == {(tmp_path / "ours").stat().st_mode}


def test_a_path_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(InputError) as caught:
            load_drafter(path)
        assert caught.value.code == "not-a-checkpoint"


# when going on is in vain


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
    assert "1 samples skipped" in report.text()
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
        assert f"of the {sum(map(len, seen))} samples" in refused.value.message
        assert f"({len(trainer.train)} are there to train on)" in refused.value.message
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


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA L40S", 362),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA RTX A1000 Laptop GPU", None),
        ("NVIDIA A100X", None),
        ("NVIDIA L40", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
    ],
)
def test_the_peak_is_that_of_the_very_device(monkeypatch: pytest.MonkeyPatch, name: str, teraflops: int | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    found = progress.peak_flops(torch.device("cuda"))
    assert found == (None if teraflops is None else teraflops * 1e12)


# on the command line


def main(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    """Run hstrain in this process and return its exit status."""
    monkeypatch.setattr(sys, "argv", ["hstrain", *map(str, args)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


def test_exit_statuses_of_fit(
    little: Little, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    toml = write_manifest(tmp_path / "m.toml", optim={"max_steps": 3})
    fitting = ("fit", toml, "--store", little.path, "--out", tmp_path / "run", "--device", "cpu")
    assert main(monkeypatch, *fitting, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["steps"], report["run"]) == (3, str(tmp_path / "run"))
    assert main(monkeypatch, *fitting, "--set", "optim.lr=5e-3") == 4
    err = capsys.readouterr().err
    assert "error[run-other-manifest]" in err
    assert "hint: " in err
    assert main(monkeypatch, *fitting, "--set", 'optim.lr="6e-4"') == 2
    assert main(monkeypatch, "fit", toml, "--store", tmp_path / "nothing", "--out", tmp_path / "x") == 2
    assert main(monkeypatch, "fit", toml, "--store", little.path) == 2
    heart = ("fit", toml, "--store", little.path, "--device", "cpu", "--overfit", "1", "--out")
    assert main(monkeypatch, *heart, tmp_path / "a", "--set", "optim.lr=2e-2", "--set", "data.anchors=64") == 0
    monkeypatch.setattr(step, "OVERFIT_STEPS", 10)
    assert main(monkeypatch, *heart, tmp_path / "b", "--set", "optim.lr=1e-9") == 1


def test_interruption_gives_the_signals_status(little: Little, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toml = write_manifest(tmp_path / "m.toml")
    fitting = ("fit", toml, "--store", little.path, "--out", tmp_path / "run", "--device", "cpu")
    with during_step(2, lambda: os.kill(os.getpid(), signal.SIGINT)):
        assert main(monkeypatch, *fitting) == 130
    assert RunPaths(tmp_path / "run").steps() == [2]


def test_sigterm_writes_a_checkpoint_and_exits_with_143(little: Little, tmp_path: Path) -> None:
    toml = write_manifest(
        tmp_path / "m.toml", optim={"max_steps": 100_000}, run={"checkpoint_every": 10**6, "validate_every": 10**6}
    )
    command = [sys.executable, "-m", "trainer", "fit", toml, "--store", little.path, "--out", tmp_path / "run"]
    process = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True, env=clean_environment())
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step 5/"):
            process.send_signal(signal.SIGTERM)
            break
    with process.stderr:
        rest = process.stderr.read()
    assert process.wait(timeout=60) == 143, rest
    assert "a checkpoint is written" in rest
    _, facts = load_drafter(tmp_path / "run")
    assert facts["step"] >= 5
    assert not list(RunPaths(tmp_path / "run").staging.iterdir())


def clean_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}


def test_training_needs_neither_transformers_nor_the_target(little: Little, tmp_path: Path) -> None:
    assert not Path(little.manifest.target.path).exists()
    toml = write_manifest(tmp_path / "m.toml", optim={"max_steps": 2})
    code = f"""
import sys
from pathlib import Path
from trainer.fit import fit
from trainer.manifest import load_train_manifest
report = fit(load_train_manifest(Path({str(toml)!r})), Path({str(little.path)!r}), Path({str(tmp_path / "run")!r}))
assert report.steps == 2 and report.tau is not None
print(sorted(name for name in ("transformers", "datasets", "hscache.target", "hscache.corpus") if name in sys.modules))
"""
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=clean_environment()
    )
    assert answer.stdout == "[]\n", answer.stderr


def test_dry_run_plot_and_config(
    little: Little, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    toml = write_manifest(tmp_path / "m.toml")
    assert main(monkeypatch, "fit", toml, "--store", little.path, "--dry-run", "--json", "--device", "cpu") == 0
    numbers = json.loads(capsys.readouterr().out)
    trainer = Trainer(train_manifest(), little.path, World.join("cpu"))
    assert numbers["parameters"] == sum(p.numel() for p in trainer.drafter.parameters())
    assert (numbers["train_samples"], numbers["validation_samples"]) == (len(trainer.train), len(trainer.held))
    assert numbers["steps"] == trainer.total_steps
    assert numbers["packs_an_epoch"] == len(trainer.schedule.packs(0))
    assert numbers["tokens_an_epoch"] == int(trainer.store.n_tokens[trainer.train].sum())
    assert numbers["memory_bytes"] == sum(numbers["memory"].values())
    assert numbers["hours"] == pytest.approx(numbers["seconds_a_step"] * numbers["steps"] / 3600)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.toml"]  # nothing is written
    assert main(monkeypatch, "fit", toml, "--store", little.path, "--dry-run", "--device", "cpu") == 0
    assert f"{numbers['parameters']:,} parameters" in capsys.readouterr().out

    assert main(monkeypatch, "config", toml, "--set", "optim.lr=1") == 0
    text = capsys.readouterr().out
    (tmp_path / "resolved.toml").write_text(text)
    assert "lr = 1" in text
    assert main(monkeypatch, "config", tmp_path / "resolved.toml") == 0
    assert capsys.readouterr().out == text

    run(little, tmp_path / "run")
    cut_line(tmp_path / "run")  # a run may be in the middle of a line
    assert main(monkeypatch, "plot", tmp_path / "run") == 0
    assert (tmp_path / "run/curves.png").read_bytes()[:4] == b"\x89PNG"
    assert main(monkeypatch, "plot", tmp_path / "run", "-o", tmp_path / "other.png") == 0
    assert (tmp_path / "other.png").exists()
    assert main(monkeypatch, "plot", tmp_path / "nothing") == 2


def test_learning_rates_follow_their_schedules() -> None:
    from trainer.optim import learning_rate

    def rates(**fields: Any) -> list[float]:
        one = train_manifest(optim={"lr": 1.0, **fields}).optim
        return [learning_rate(at, 100, one) for at in range(100)]

    for schedule in ("cosine", "linear", "wsd", "constant"):
        got = rates(schedule=schedule, warmup=0.1)
        assert got[:10] == pytest.approx([(at + 1) / 10 for at in range(10)])
        assert max(got) == 1.0
        assert sorted(got[10:], reverse=True) == got[10:]
        assert min(got) > 0
    assert rates(schedule="constant", warmup=0.1)[-1] == 1.0
    assert rates(schedule="linear", warmup=0.0)[50] == pytest.approx(0.5, abs=0.01)
    assert rates(schedule="cosine", warmup=0.0)[25] == pytest.approx((1 + np.cos(np.pi / 4)) / 2, abs=0.01)
    wsd = rates(schedule="wsd", warmup=0.1)
    assert wsd[:82][10:] == [1.0] * 72
    assert wsd[91] == pytest.approx(0.5, abs=0.03)
