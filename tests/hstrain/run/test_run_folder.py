"""The files of a run: checkpoints are whole or none, history is never lost, and what is damaged is named."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hstrain.drafter.model import Drafter
from hstrain.plot import read_metrics
from hstrain.run import checkpoint as ckpt
from hstrain.run import folder as run_folder
from hstrain.run.checkpoint import load_drafter, load_state
from hstrain.run.folder import RunPaths
from hstrain.train.parallel import World
from hstrain.train.step import Trainer
from safetensors import SafetensorError

import hscache
from hscache.console import Interrupted
from hscache.errors import ConflictError, EnvironmentFault, InputError, IntegrityError
from hscache.store import durable
from tests.made.runs import (
    STEPS,
    Killed,
    die,
    during_step,
    last,
    manifest,
    metrics,
    run,
    same_checkpoint,
    terminate,
)
from tests.made.stores import Little, flip, little_manifest, make_store
from tests.made.trainers import SHAPE, train_manifest, turn_rows

pytestmark = pytest.mark.usefixtures("no_disk")


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
        with pytest.raises(IntegrityError, match="line 5 is not the record") as caught:
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
    assert "the newest one that is left" in str(caught.value.hint)
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
