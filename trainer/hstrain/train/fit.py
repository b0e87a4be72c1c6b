"""The training loop: steps, validations, checkpoints, and when to stop."""

from __future__ import annotations

import math
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from hscache import __version__
from hscache.console import Interrupted, counted, duration, say, stop_on_signal
from hscache.errors import EnvironmentFault, InputError, IntegrityError, TrainingFault
from hstrain.data.anchors import sample_with
from hstrain.data.packs import Pack
from hstrain.manifest import TrainManifest, with_precision
from hstrain.run import checkpoint as ckpt
from hstrain.run import folder as run_folder
from hstrain.score.walk import score_store
from hstrain.train.parallel import World, optimizer_tensors, restore_optimizers, whole_tensors
from hstrain.train.progress import Board, Log
from hstrain.train.step import Trainer, settled

_OVERFIT_EVERY = 10
_EXPLODED = 4.0
"""Times the loss of guessing, or the first step's loss if that is larger."""
_RECENT = 7
"""Number of last steps whose median loss is judged: a step may be a single sample, which proves nothing."""


@dataclass
class FitReport:
    """The result of a run.

    Attributes:
        run: Its directory.
        steps: Steps done in all sessions.
        tau: Validation tau at the end.
        best_tau: The best validation tau.
        first_tau: Validation tau before the first step.
        train_tau_all: Mean ``tau_all`` of this session's last steps; None where they drafted no block.
        skipped: Number of skipped samples.
        seconds: Wall time of this session.
        wait: Share of this time that the loop waited for data.
        overfit_at: Step at which the samples were learnt by heart; None if that was not reached or not requested.
        validation: All figures of the last validation.
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
    train_tau_all: float | None = None
    validation: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """Return a line for people."""
        done = f"{counted(self.steps, 'step')} in {duration(self.seconds)}"
        parts = [f"{self.run}: {done}, {self.wait:.1%} of it waiting for data"]
        if self.tau is not None:
            before = "" if self.first_tau is None else f" (before training {self.first_tau:.3f})"
            best = "" if self.best_tau is None else f", best {self.best_tau:.3f}"
            parts.append(f"validation tau {self.tau:.3f}{before}{best}")
            if self.train_tau_all is not None:
                pair = f"{self.train_tau_all:.3f} in the last steps, {self.validation['tau_all']:.3f} in validation"
                parts.append(f"tau_all {pair}")
        if self.overfit_at is not None:
            parts.append(f"learnt by heart at step {self.overfit_at}")
        if self.skipped:
            parts.append(f"{counted(self.skipped, 'sample')} skipped")
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
    """Train a drafter, or continue a stopped run.

    Args:
        manifest: Settings of the run.
        store_path: A complete store.
        out: Run directory; new, or started with the same manifest and store.
        device: Such as ``cpu``; None for CUDA if there is one.
        overfit: Overfit this many samples, as a check; 0 trains on all.
        tensorboard: Also write the figures for TensorBoard.

    Raises:
        HscacheError: For errors that a user can fix, the same on all ranks; ``training-diverged`` when the loss
            explodes or is not a number.
        Interrupted: After SIGINT or SIGTERM, once a checkpoint is written.
    """
    world = World.join(device)
    try:
        with stop_on_signal() as stop:
            chosen = with_precision(manifest, world.on_main(lambda: _precision(manifest, out, world.device)))
            run = world.together(lambda: _Run(Trainer(chosen, store_path, world, overfit=overfit), out, stop))
            return run.go(tensorboard=tensorboard)
    finally:
        world.leave()


def _precision(manifest: TrainManifest, out: Path, device: torch.device) -> str:
    """Return the precision of a run: the recorded one, else that of the manifest, else the device's best."""
    begun = run_folder.recorded_precision(run_folder.RunPaths(out)) if manifest.run.precision == "auto" else None
    return begun or settled(manifest, device).run.precision


class _Run:
    """One session of a run: its progress and its records."""

    def __init__(self, trainer: Trainer, out: Path, stop: list[int]) -> None:
        self.t, self.stop, self.paths = trainer, stop, run_folder.RunPaths(out)
        self.main = trainer.world.main
        self.report = FitReport(str(out))
        self.first_loss: float | None = None
        self.recent: deque[float] = deque(maxlen=_RECENT)
        self.taus: deque[float] = deque(maxlen=_RECENT)
        self.skipped: set[str] = set()
        self.saved: int | None = None
        self.board: Board | None = None
        self.store_facts = ckpt.store_facts(trainer.store)
        self.start: dict[str, Any] | None = None

    def go(self, *, tensorboard: bool) -> FitReport:
        started = time.monotonic()
        with ExitStack() as held:
            self.t.world.on_main(lambda: held.enter_context(run_folder.hold_run(self.paths)))
            step = self._resume()
            if tensorboard:
                self.t.world.on_main(self._open_board)
            self._train(step)
        self.report.seconds = time.monotonic() - started
        self.report.wait /= max(self.report.seconds, 1e-9)
        self.report.skipped = len(self.skipped)
        return self.report

    def _train(self, step: int) -> None:
        """Train from a step to the end; a finished run is left as it is."""
        t, run = self.t, self.t.manifest.run
        if step == 0:
            self._validate(0)
        log = Log(t, step)
        finished = step == t.total_steps or self.report.overfit_at is not None
        with t.stream(step) as stream:
            while not finished:
                asked = time.monotonic()
                packs = next(stream)
                log.waited += (waiting := time.monotonic() - asked)
                self.report.wait += waiting
                record = t.step(step, packs)
                step += 1
                self._watch(step, record, packs)
                log.add(record, packs)
                finished = step == t.total_steps
                if t.overfit and step % _OVERFIT_EVERY == 0:
                    with log.paused():
                        finished |= self._learnt(step)
                if step % run.log_every == 0 or finished:
                    line = log.line(step, record) if self.main else {}
                    t.world.on_main(lambda line=line: self._record(line))  # type: ignore[misc]
                stopping = t.world.sum(torch.tensor([len(self.stop)], device=t.world.device)).item() > 0
                with log.paused():
                    if finished or (step % run.validate_every == 0 and not t.overfit):
                        self._validate(step)
                    if finished or stopping or step % run.checkpoint_every == 0:
                        self._save(step)
                if stopping and not finished:
                    raise Interrupted(self.stop[0] if self.stop else 15)
        self.report.steps = step
        self.report.train_tau_all = fmean(self.taus) if self.taus else None

    def _document(self) -> dict[str, Any]:
        return {
            "hscache": __version__,
            "manifest": self.t.manifest.record(),
            "overfit": self.t.overfit,
            "store": self.store_facts,
        }

    def _resume(self) -> int:
        """Start a run, or load the newest checkpoint that the first rank sees; return the number of steps done."""
        t, world = self.t, self.t.world
        self._same("store", self.store_facts["digest"])
        newest = world.on_main(lambda: ckpt.newest_checkpoint(self.paths))
        # a checkpoint has its own weights, so the starting drafter need not exist any more
        begun = {"start": self._begin()} if newest is None else {}
        self.start = world.on_main(lambda: run_folder.claim_run(self.paths, self._document() | begun).get("start"))
        if newest is None:
            t.distribute()
            mask = t.config.mask_token_id
            if self.main and (where := sample_with(t.store, mask)):
                say(f"warning: the mask token {mask} is {where}: there, drafted slots look like text; set "
                    "drafter.mask_token_id to a token that no text has")  # fmt: skip
            if self.main:
                say(_samples(t))
            if self.main and self.start is not None:
                say(f"starting from the weights of {self.start['path']}")
            world.on_main(lambda: self._forget_after(-1))
            return 0
        weights, moments, state = world.together(lambda: self._load(*newest))
        t.drafter.load_state_dict(weights)
        t.distribute()
        restore_optimizers(t.drafter, t.optimizers, moments)
        self.saved = step = int(state["step"])
        self.first_loss, self.skipped = state["first_loss"], set(state["skipped"])
        self.report.first_tau, self.report.tau, self.report.best_tau = state["taus"]
        # checkpoints from before these fields existed lack them
        self.recent.extend(state.get("recent", ()))
        self.report.overfit_at = state.get("overfit_at")
        world.on_main(lambda: self._forget_after(step))
        if self.main:
            say(f"continuing at step {step} of {t.total_steps}")
        return step

    def _begin(self) -> dict[str, Any] | None:
        """Load the starting weights, the same on all ranks; return what is recorded about them."""
        start = self.t.world.together(self.t.begin)
        self._same("drafter.start", None if start is None else start["weights"])
        return start

    def _same(self, what: str, digest: str | None) -> None:
        """Stop all ranks if their digests differ: a path may lead to other files on another machine."""
        seen = self.t.world.gather(digest)
        for rank, one in enumerate(seen):
            if one != seen[0]:
                raise EnvironmentFault(
                    "run-not-shared",
                    f"{what}: the first rank sees {seen[0]}, rank {rank} sees {one}",
                    hint="make the same files available to every rank under this path",
                )

    def _load(self, step: int, digest: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
        """Return a checkpoint, after checking that this rank sees the same one as the first rank."""
        folder = self.paths.checkpoint(step)
        try:
            found = ckpt.state_digest(folder)
        except IntegrityError:  # the first rank has read it without an error
            found = "no readable checkpoint"
        if found != digest:
            raise EnvironmentFault(
                "run-not-shared",
                f"{folder}: the first rank continues from checkpoint {digest}, this rank sees {found}",
                hint="give an --out that all ranks see, or copy the first rank's run to every machine",
            )
        return ckpt.load_state(folder)

    def _forget_after(self, step: int) -> None:
        """Return the run's files to the state they had at a checkpoint."""
        if self.report.best_tau is not None and self.report.best_tau == self.report.tau:
            # the process may have been killed after writing this checkpoint and before recording it as the best one
            run_folder.keep_best(self.paths, step, self.report.best_tau)
        run_folder.drop_old(self.paths, self.t.manifest.run.keep)
        run_folder.forget_after(self.paths, self.paths.metrics, step)
        run_folder.forget_after(self.paths, self.paths.skipped, step)

    def _open_board(self) -> None:
        self.board = Board(self.paths.root / "tensorboard")

    def _watch(self, step: int, record: dict[str, Any], packs: list[Pack]) -> None:
        """Record unreadable samples, and stop the run if they are too many or the loss diverges."""
        if record["bad"]:
            self._skip(step, self.t.world.merge(dict(bad for pack in packs for bad in pack.bad)))
        if record["blocks"]:
            self.first_loss = record["loss"] if self.first_loss is None else self.first_loss
            self.recent.append(record["loss"])
            self.taus.append(record["tau"])
        if self.first_loss is None and step == min(self.t.total_steps, len(self.t.schedule.steps(0))):
            seen = sum(len(pack) for packs in self.t.schedule.steps(0)[:step] for pack in packs)
            raise InputError(
                "no-anchors",
                f"{self.t.store.path}: no block could begin anywhere in {step} steps: of their {seen} samples "
                f"(of {len(self.t.train)} to train on), {len(self.skipped)} could not be read, and no other "
                "has two supervised tokens in a row after its first token",
                hint="hscache info shows how many tokens are supervised; look at the loss masks of the corpus",
            )
        sound = math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"])
        usual = max(self.first_loss or 0.0, math.log(self.t.config.vocab_size))
        exploded = len(self.recent) == _RECENT and median(self.recent) > _EXPLODED * usual
        if exploded or not sound:
            ids = [sample_id for pack in packs for sample_id in pack.sample_ids]
            raise TrainingFault(
                "training-diverged",
                f"step {step}: loss {record['loss']:.4g}, median {median(self.recent or [math.nan]):.4g} over the last "
                f"{len(self.recent)} steps, gradient norm {record['grad_norm']:.4g}; samples of the step on this rank: "
                f"{', '.join(ids[:16])}{' ...' if len(ids) > 16 else ''}",
                hint="lower optim.lr, or look at these samples with hscache verify --recompute",
            )

    def _skip(self, step: int, bad: dict[str, str]) -> None:
        """Record samples that some rank could not read, each once per run, and stop if they are too many."""
        if new := sorted(bad.keys() - self.skipped):
            self.t.world.on_main(lambda: self._record_skipped(step, {sample_id: bad[sample_id] for sample_id in new}))
        self.skipped |= bad.keys()
        if len(self.skipped) > self.t.manifest.data.max_bad_samples:
            raise IntegrityError(
                "too-many-bad-samples",
                f"{len(self.skipped)} samples could not be read (data.max_bad_samples is "
                f"{self.t.manifest.data.max_bad_samples}); {self.paths.skipped} lists them",
                hint=f"run hscache verify {self.t.store.path}, then hscache repair",
            )

    def _record_skipped(self, step: int, bad: dict[str, str]) -> None:
        for sample_id, error in bad.items():
            run_folder.append_line(self.paths.skipped, {"step": step, "sample_id": sample_id, "error": error})
            say(f"skipped {sample_id}: {error}")

    def _validate(self, step: int) -> None:
        began = time.monotonic()
        # all ranks use the first rank's figures: kernels may round differently on another, and decisions follow
        found = self.t.world.gather(self.t.validate())[0]
        self._skip(step, self.t.unreadable)
        if not found["samples"]:
            return
        tau = found["tau"]
        self.report.validation, self.report.tau = found, tau
        self.report.first_tau = tau if step == 0 else self.report.first_tau
        record = {"step": step, "kind": "validation", **found, "seconds": time.monotonic() - began}
        self.t.world.on_main(lambda: self._record(record))
        if self.main:
            low, high = found["tau_interval"]
            say(
                f"validation at step {step}: tau {tau:.3f} [{low:.2f}, {high:.2f}], tau_all {found['tau_all']:.3f}, "
                f"ddtree-8 {found['ddtree']['8']:.3f}, {counted(found['samples'], 'sample')}"
            )
        if step and (self.report.best_tau is None or tau > self.report.best_tau):
            self.report.best_tau = tau
            self._save(step, best=True)

    def _record(self, record: dict[str, Any]) -> None:
        run_folder.append_line(self.paths.metrics, record)
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
        learnt = t.world.gather(first == wanted)[0]
        if learnt:
            self.report.overfit_at = step
        return learnt

    def _save(self, step: int, *, best: bool = False) -> None:
        """Write a checkpoint unless the step has one; all ranks must call this, the first one writes."""
        if step == self.saved:
            return
        t = self.t
        weights = whole_tensors(t.drafter.state_dict().items(), t.world)
        moments = whole_tensors(optimizer_tensors(t.drafter, t.optimizers), t.world)
        t.world.on_main(lambda: self._write(step, weights, moments, best=best))
        self.saved = step

    def _write(self, step: int, weights: dict[str, Tensor], moments: dict[str, Tensor], *, best: bool) -> None:
        state = {
            "first_loss": self.first_loss,
            "recent": list(self.recent),
            "skipped": sorted(self.skipped),
            "taus": [self.report.first_tau, self.report.tau, self.report.best_tau],
            "overfit_at": self.report.overfit_at,
        }
        provenance = {"store": self.store_facts, "manifest": self.t.manifest.record()}
        provenance |= {"start": self.start} if self.start is not None else {}
        ckpt.save_checkpoint(self.paths, step, weights, self.t.config, provenance, moments, state)
        if best:
            assert self.report.best_tau is not None
            run_folder.keep_best(self.paths, step, self.report.best_tau)
        run_folder.drop_old(self.paths, self.t.manifest.run.keep)  # last, since the previous best one may be dropped


def _samples(t: Trainer) -> str:
    """Return in words how many samples each part of the split has."""
    if t.overfit:
        return f"{counted(len(t.train), 'sample')} to train and to validate on"
    some = f" ({len(t.held):,} read)" if len(t.held) < t.held_out else ""
    held = f"{t.held_out:,} to validate on{some}, {len(t.test):,} to test on"
    return f"{counted(len(t.train), 'sample')} to train on, {held}"
