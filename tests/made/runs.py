"""Runs of a few steps on a little store, and ways to stop them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hstrain.manifest import TrainManifest
from hstrain.run.folder import RunPaths
from hstrain.train.fit import fit
from hstrain.train.step import Trainer

from hscache.errors import ConflictError
from tests.made.stores import Little
from tests.made.trainers import train_manifest

TIMES = {"tokens_per_s", "blocks_per_s", "wait", "peak_memory_bytes", "seconds"}
STEPS = 8


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


def refused(little: Little, out: Path, one: TrainManifest, **options: Any) -> ConflictError:
    with pytest.raises(ConflictError) as caught:
        run(little, out, one, **options)
    assert caught.value.code == "run-other-manifest"
    return caught.value
