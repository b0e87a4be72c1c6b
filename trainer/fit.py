"""The training loop: steps, validations, checkpoints, and when to stop."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hscache import __version__
from hscache.console import Interrupted, duration, say, stop_on_signal
from hscache.errors import InputError, IntegrityError, TrainingFault
from trainer import checkpoint as ckpt
from trainer.data import Pack
from trainer.evaluate import score_store
from trainer.manifest import TrainManifest
from trainer.parallel import World, full, optimizer_tensors, restore_optimizers
from trainer.progress import Board, Log
from trainer.step import Trainer

_OVERFIT_EVERY = 10
_EXPLODED = 4.0
"""Times the first step's loss."""


@dataclass
class FitReport:
    """What a run did.

    Attributes:
        run: Its directory.
        steps: Steps done, all sessions.
        tau: Validation tau at the end.
        best_tau: The best one.
        first_tau: Validation tau before the first step.
        skipped: Samples passed over.
        seconds: Wall time of this session.
        wait: Share of it that the loop waited for data.
        overfit_at: Step at which one sample was learnt by heart, None when that was not asked for or not reached.
    """

    run: str
    steps: int = 0
    tau: float | None = None
    best_tau: float | None = None
    first_tau: float | None = None
    skipped: int = 0
    seconds: float = 0.0
    wait: float = 0.0
    overfit_at: int | None = None
    validation: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """Return a line for people."""
        parts = [f"{self.run}: {self.steps} steps in {duration(self.seconds)}, {self.wait:.1%} of it waiting for data"]
        if self.tau is not None:
            before = "" if self.first_tau is None else f" (before training {self.first_tau:.3f})"
            best = "" if self.best_tau is None else f", best {self.best_tau:.3f}"
            parts.append(f"validation tau {self.tau:.3f}{before}{best}")
        if self.overfit_at is not None:
            parts.append(f"learnt by heart at step {self.overfit_at}")
        if self.skipped:
            parts.append(f"{self.skipped} samples skipped")
        return "; ".join(parts)


def fit(
    manifest: TrainManifest,
    store_path: Path,
    out: Path,
    *,
    device: str | None = None,
    overfit: int = 0,
    tensorboard: bool = False,
) -> FitReport:
    """Train a drafter, or go on with one.

    Args:
        manifest: What is trained.
        store_path: A complete store.
        out: Run directory; new, or begun with the same manifest and store.
        device: Such as ``cpu``; None for CUDA where it is.
        overfit: Learn so many samples by heart, as a check; 0 trains.
        tensorboard: Write the figures for TensorBoard too.

    Raises:
        HscacheError: For what a user can mend; ``training-diverged`` when the loss is no number any more.
        Interrupted: After SIGINT or SIGTERM, when a checkpoint is written.
    """
    world = World.join(device)
    try:
        with stop_on_signal() as stop:
            run = _Run(Trainer(manifest, store_path, world, overfit=overfit), out, stop)
            if tensorboard and world.main:
                run.board = Board(run.paths.root / "tensorboard")
            return run.go()
    finally:
        world.leave()


class _Run:
    """One session of a run: where it stands, and what it writes."""

    def __init__(self, trainer: Trainer, out: Path, stop: list[int]) -> None:
        self.t, self.stop, self.paths = trainer, stop, ckpt.RunPaths(out)
        self.main = trainer.world.main
        self.report = FitReport(str(out))
        self.first_loss: float | None = None
        self.skipped: set[str] = set()
        self.board: Board | None = None
        self.store_facts = ckpt.store_facts(trainer.store)
        self.start: dict[str, Any] | None = None

    def go(self) -> FitReport:
        t, run, started = self.t, self.t.manifest.run, time.monotonic()
        # a checkpoint has weights of its own: what the run began from need not be there any more
        begun = {} if self.paths.steps() else {"start": t.begin()}
        if self.main:
            self.start = ckpt.claim_run(self.paths, self._document() | begun).get("start")
        t.world.barrier()
        step = self._resume()
        if step == 0:
            self._validate(0)
        log = Log(t, step)
        waited = 0.0
        with t.stream(step) as stream:
            while step < t.total_steps:
                asked = time.monotonic()
                packs = next(stream)
                log.waited += (waiting := time.monotonic() - asked)
                waited += waiting
                record = t.step(step, packs)
                step += 1
                self._watch(step, record, packs)
                log.add(record, packs)
                last = step == t.total_steps
                if self.main and (step % run.log_every == 0 or last):
                    self._record(log.line(step, record))
                if t.overfit:
                    if step % _OVERFIT_EVERY == 0 and self._learnt(step):
                        break
                elif step % run.validate_every == 0 or last:
                    self._validate(step)
                stopping = t.world.sum(torch.tensor([len(self.stop)], device=t.world.device)).item() > 0
                if step % run.checkpoint_every == 0 or last or stopping:
                    self._save(step)
                if stopping and not last:
                    raise Interrupted(self.stop[0] if self.stop else 15)
        if t.overfit:
            self._save(step)
        self.report.steps, self.report.seconds = step, time.monotonic() - started
        self.report.wait = waited / max(self.report.seconds, 1e-9)
        self.report.skipped = len(self.skipped)
        return self.report

    def _document(self) -> dict[str, Any]:
        return {
            "hscache": __version__,
            "manifest": self.t.manifest.model_dump(mode="json"),
            "overfit": self.t.overfit,
            "store": self.store_facts,
        }

    def _resume(self) -> int:
        """Begin, or load the newest checkpoint; return the steps done."""
        t, steps = self.t, self.paths.steps()
        if not steps:
            t.distribute()
            if self.main:
                if self.start is not None:
                    say(f"beginning from {self.start['path']}")
                ckpt.forget_after(self.paths.metrics, -1)
                ckpt.forget_after(self.paths.skipped, -1)
            return 0
        weights, moments, state = ckpt.load_state(self.paths.checkpoint(steps[-1]))
        t.drafter.load_state_dict(weights)
        t.distribute()
        restore_optimizers(t.drafter, t.optimizers, moments)
        self.first_loss, self.skipped = state["first_loss"], set(state["skipped"])
        self.report.first_tau, self.report.tau, self.report.best_tau = state["taus"]
        if self.main:
            if self.report.best_tau is not None and self.report.best_tau == self.report.tau:
                # a kill may have come between this checkpoint and its entry as the best one
                ckpt.keep_best(self.paths, state["step"], self.report.best_tau)
            ckpt.forget_after(self.paths.metrics, state["step"])
            ckpt.forget_after(self.paths.skipped, state["step"])
            say(f"going on at step {state['step']} of {t.total_steps}")
        return int(state["step"])

    def _watch(self, step: int, record: dict[str, Any], packs: list[Pack]) -> None:
        """Record unreadable samples and stop where going on would waste time."""
        if record["bad"]:
            self._skip(step, self.t.world.merge(dict(bad for pack in packs for bad in pack.bad)))
        if self.first_loss is None and record["blocks"]:
            self.first_loss = record["loss"]
        if self.first_loss is None and step == min(self.t.total_steps, len(self.t.schedule.steps(0))):
            raise InputError(
                "no-anchors",
                f"{self.t.store.path}: no sample has two supervised tokens in a row behind a first token, so no block "
                f"can begin anywhere ({step} steps looked)",
                hint="hscache info shows how many tokens are supervised; see the loss masks of the corpus",
            )
        sound = math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"])
        if not sound or record["loss"] > _EXPLODED * max(self.first_loss or 0.0, 1.0):
            ids = [sample_id for pack in packs for sample_id in pack.sample_ids]
            raise TrainingFault(
                "training-diverged",
                f"step {step}: loss {record['loss']:.4g}, gradient norm {record['grad_norm']:.4g}; samples of the step "
                f"on this rank: {', '.join(ids[:16])}{' ...' if len(ids) > 16 else ''}",
                hint="lower optim.lr, or look at these samples with hscache verify --recompute",
            )

    def _skip(self, step: int, bad: dict[str, str]) -> None:
        """Record samples that some rank could not read, each once a run, and stop when they are too many."""
        for sample_id in sorted(bad.keys() - self.skipped) if self.main else ():
            ckpt.append_line(self.paths.skipped, {"step": step, "sample_id": sample_id, "error": bad[sample_id]})
            say(f"skipped {sample_id}: {bad[sample_id]}")
        self.skipped |= bad.keys()
        if len(self.skipped) > self.t.manifest.data.max_bad_samples:
            raise IntegrityError(
                "too-many-bad-samples",
                f"{len(self.skipped)} samples could not be read (data.max_bad_samples is "
                f"{self.t.manifest.data.max_bad_samples}); they are named in {self.paths.skipped}",
                hint=f"hscache verify {self.t.store.path}, then hscache repair",
            )

    def _validate(self, step: int) -> None:
        began = time.monotonic()
        found = self.t.validate()
        self._skip(step, self.t.unreadable)
        if not found["samples"]:
            return
        tau = found["tau"]
        self.report.validation, self.report.tau = found, tau
        self.report.first_tau = tau if step == 0 else self.report.first_tau
        if self.main:
            record = {"step": step, "kind": "validation", **found, "seconds": time.monotonic() - began}
            self._record(record)
            low, high = found["tau_interval"]
            say(
                f"validation at step {step}: tau {tau:.3f} [{low:.2f}, {high:.2f}], tau_all {found['tau_all']:.3f}, "
                f"ddtree-8 {found['ddtree']['8']:.3f}, {found['samples']} samples"
            )
        if step and (self.report.best_tau is None or tau > self.report.best_tau):
            self.report.best_tau = tau
            self._save(step)
            if self.main:
                ckpt.keep_best(self.paths, step, tau)

    def _record(self, record: dict[str, Any]) -> None:
        ckpt.append_line(self.paths.metrics, record)
        if self.board is not None:
            self.board.add(record)

    def _learnt(self, step: int) -> bool:
        """Return whether the first block of every sample is accepted whole."""
        t = self.t
        with t.autocast():
            scores = score_store(t.drafter, t.head, t.store, t.train, backend=t.backend)
        first = [int(score.streak[0]) for score in scores]
        wanted = [min(t.config.block_size - 1, int(score.left_N[0])) for score in scores]
        if self.main:
            say(f"overfit at step {step}: first blocks accepted {first} of {wanted}")
        if first == wanted:
            self.report.overfit_at = step
        return first == wanted

    def _save(self, step: int) -> None:
        """Write a checkpoint; every rank takes part, the first one writes."""
        t = self.t
        weights = {name: full(value) for name, value in t.drafter.state_dict().items()}
        moments = optimizer_tensors(t.drafter, t.optimizers)
        if self.main and step not in self.paths.steps():
            taus = [self.report.first_tau, self.report.tau, self.report.best_tau]
            state = {"first_loss": self.first_loss, "skipped": sorted(self.skipped), "taus": taus}
            provenance = {"store": self.store_facts, "manifest": t.manifest.model_dump(mode="json")}
            provenance |= {"start": self.start} if self.start is not None else {}
            ckpt.save_checkpoint(self.paths, step, weights, t.config, provenance, moments, state)
            ckpt.drop_old(self.paths, t.manifest.run.keep)
        t.world.barrier()
