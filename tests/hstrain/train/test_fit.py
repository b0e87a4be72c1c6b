"""Runs go on bit by bit where they were stopped, and refuse what is not theirs."""

from __future__ import annotations

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
from hstrain import cli
from hstrain.data.packs import PackBuilder, split
from hstrain.manifest import load_train_manifest
from hstrain.plot import read_metrics
from hstrain.run import checkpoint as ckpt
from hstrain.run import folder as run_folder
from hstrain.run.checkpoint import load_drafter
from hstrain.run.folder import RunPaths
from hstrain.train import step
from hstrain.train.fit import fit
from hstrain.train.parallel import World
from hstrain.train.step import Trainer

import hscache
import hscache.device
from hscache.console import Interrupted
from hscache.errors import ConflictError, InputError
from tests.made.hybrid import DRAFTER, Hybrid
from tests.made.runs import (
    STEPS,
    Killed,
    cut_line,
    die,
    during_step,
    last,
    manifest,
    metrics,
    refused,
    run,
    same_checkpoint,
    terminate,
)
from tests.made.stores import Little, little_manifest, make_store
from tests.made.trainers import LENGTHS, train_manifest, training_store, turn_rows, write_manifest

pytestmark = pytest.mark.usefixtures("no_disk")


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


def test_the_parts_of_the_split_are_counted_first(
    little: Little, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = manifest(optim={"max_steps": 1}, data={"test": 0.2}, run={"validation_samples": 1})
    run(little, tmp_path / "run", one)
    train, held, test = map(len, split(hscache.open(little.path), one.data.validation, 0.2))
    assert held > 1
    wanted = f"{train} samples to train on, {held} to validate on (1 read), {test} to test on"
    assert capsys.readouterr().err.splitlines()[0] == wanted


def test_a_run_without_a_test_share_records_none(little: Little, tmp_path: Path) -> None:
    """So a run from before that field existed has the same record, and goes on."""
    run(little, tmp_path / "run", manifest(optim={"max_steps": 1}))
    assert "test" not in json.loads((tmp_path / "run/manifest.json").read_bytes())["manifest"]["data"]
    run(little, tmp_path / "other", manifest(optim={"max_steps": 1}, data={"test": 0.1}))
    assert json.loads((tmp_path / "other/manifest.json").read_bytes())["manifest"]["data"]["test"] == 0.1


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


@pytest.mark.thorough
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


def test_a_run_goes_on_where_the_file_system_has_no_locks(
    little: Little, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    run(little, tmp_path / "run")
    assert RunPaths(tmp_path / "run").steps()
    assert capsys.readouterr().err.count(f"{tmp_path / 'run'}: its file system has no file locks") == 1


def test_another_version_of_ours_goes_on(little: Little, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(little, tmp_path / "run")
    began = json.loads(RunPaths(tmp_path / "run").manifest.read_bytes())["hscache"]
    monkeypatch.setattr("hstrain.train.fit.__version__", "99.0")
    run(little, tmp_path / "run")
    assert json.loads(RunPaths(tmp_path / "run").manifest.read_bytes())["hscache"] == began == hscache.__version__
    with pytest.raises(ConflictError) as caught:
        run(little, tmp_path / "run", manifest(run={"seed": 1}))
    assert "99.0" not in caught.value.message


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
    command = [sys.executable, "-m", "hstrain", "fit", toml, "--store", little.path, "--out", tmp_path / "run"]
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
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}


def test_training_needs_neither_transformers_nor_the_target(little: Little, tmp_path: Path) -> None:
    assert not Path(little.manifest.target.path).exists()
    toml = write_manifest(tmp_path / "m.toml", optim={"max_steps": 2})
    code = f"""
import sys
from pathlib import Path
from hstrain.train.fit import fit
from hstrain.manifest import load_train_manifest
report = fit(load_train_manifest(Path({str(toml)!r})), Path({str(little.path)!r}), Path({str(tmp_path / "run")!r}))
assert report.steps == 2 and report.tau is not None
unwanted = ("transformers", "datasets", "hscache.model", "hscache.kernels", "hscache.corpus")
print(sorted(name for name in unwanted if name in sys.modules))
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
    from hstrain.train.optim import learning_rate

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


def test_a_run_keeps_the_precision_that_its_machine_chose(
    little: Little, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = manifest(run={"precision": "auto"})
    monkeypatch.setattr(hscache.device, "fast_bf16", lambda kind: False)
    with during_step(2, terminate), pytest.raises(Interrupted):
        run(little, tmp_path / "run", one)
    monkeypatch.setattr(hscache.device, "fast_bf16", lambda kind: True)  # it goes on where bf16 is fast
    run(little, tmp_path / "run", one)
    run(little, tmp_path / "whole", manifest(run={"precision": "fp32"}))
    assert same_checkpoint(last(tmp_path / "run"), last(tmp_path / "whole"))
    assert run_folder.recorded_precision(RunPaths(tmp_path / "run")) == "fp32"
    run(little, tmp_path / "fast", one)
    assert run_folder.recorded_precision(RunPaths(tmp_path / "fast")) == "bf16"
    assert not same_checkpoint(last(tmp_path / "fast"), last(tmp_path / "whole"))
