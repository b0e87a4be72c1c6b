"""What each rank of a test runs: ``python -m tests.made.ranks JOBS OUT``, under torchrun's variables.

A job is JSON: its name; ``fit``, ``step`` or ``leave``; sections of :func:`tests.made.trainers.train_manifest`; a
store, and a port.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hstrain.manifest import TrainManifest
from hstrain.train import step as step_module
from hstrain.train.fit import fit
from hstrain.train.parallel import World, distribute, whole_tensors
from hstrain.train.step import Trainer

from hscache.errors import HscacheError
from tests.made.trainers import train_manifest

ALONE = World(0, 1, torch.device("cpu"))
VALIDATE = Trainer.validate
TIMES: list[int] = []
UNCLIPPED = {"optim": {"clip": 1e9, "warmup": 0.0}}


def same_step(a: dict[str, Any], b: dict[str, Any], rel: float = 1e-5) -> None:
    """Compare loss, accuracies, norm and gradients of two steps, up to rounding."""
    for key in ("loss", "grad_norm", "tau"):
        assert a["record"][key] == pytest.approx(b["record"][key], rel=rel), key
    for key in ("acc", "blocks", "bad", "lr"):
        assert a["record"][key] == b["record"][key], key
    assert a["record"]["loss"] > 0.5
    largest = max(float(grad.abs().max()) for grad in b["grads"].values())
    assert largest > 1e-4
    for name, grad in b["grads"].items():
        torch.testing.assert_close(
            a["grads"][name], grad, atol=rel * largest, rtol=10 * rel, msg=lambda t, n=name: f"{n}: {t}"
        )


def whole(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of tensors as one process would have them, on every rank."""
    return {name: tensor.clone() for name, tensor in whole_tensors(tensors.items(), ALONE).items()}


def first_step(manifest: TrainManifest, store: Path, world: World) -> dict[str, Any]:
    """Do the first step of a run; return what it logs, its gradients and the weights behind it, all whole."""
    trainer = Trainer(manifest, store, world)
    trainer.begin()
    trainer.distribute()
    found: dict[str, Any] = {}
    scale = step_module.scale_and_clip

    def noting(parameters: Any, factor: float, largest: float) -> Any:
        norm = scale(parameters, factor, largest)
        grads = {name: p.grad for name, p in trainer.drafter.named_parameters()}
        found["grads"] = whole({name: torch.zeros(()) if grad is None else grad for name, grad in grads.items()})
        return norm

    step_module.scale_and_clip = noting  # type: ignore[assignment]
    try:
        with trainer.stream(0) as stream:
            packs = next(stream)
            found["samples"] = [pack.sample_ids for pack in packs]
            found["record"] = trainer.step(0, packs)
    finally:
        step_module.scale_and_clip = scale
    found["weights"] = whole(dict(trainer.drafter.named_parameters()))
    found["validation"] = trainer.validate()
    return found


def validation_of_its_own(trainer: Trainer) -> dict[str, Any]:
    """Return a validation whose tau rises with every call on the first rank, and falls on all others."""
    TIMES.append(len(TIMES))
    return {**VALIDATE(trainer), "tau": 2 + TIMES[-1] * (1 if trainer.world.main else -1) / 100}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Do a job as one of its ranks."""
    os.environ["MASTER_PORT"] = str(job["port"])
    manifest, store = train_manifest(**job["sections"]), Path(job["store"])
    if job["what"] == "leave":
        world = World.join("cpu")
        module = distribute(Trainer(manifest, store, ALONE).drafter, world, "ddp", "fp32")
        ranks = world.gather(world.rank)
        world.leave()
        del module
        return {"ranks": ranks}
    if job["what"] == "step":
        world = World.join("cpu")
        try:
            return first_step(manifest, store, world)
        finally:
            world.leave()
    if job.get("apart"):
        Trainer.validate = validation_of_its_own  # type: ignore[method-assign]
    try:
        return asdict(fit(manifest, store, Path(job["out"]), device="cpu"))
    except HscacheError as error:
        return {"error": error.code, "message": error.message}
    finally:
        Trainer.validate = VALIDATE  # type: ignore[method-assign]


def main() -> None:
    torch.set_num_threads(1)
    # {rank} in a path makes it each rank's own
    jobs, out = json.loads(Path(sys.argv[1]).read_text().replace("{rank}", os.environ["RANK"])), Path(sys.argv[2])
    for job in jobs:
        torch.save(run(job), out / f"{job['name']}-{os.environ['RANK']}.pt")
        print(job["name"], file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
