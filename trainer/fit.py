"""The training loop, read from top to bottom.

A step: for each pack, draft all blocks and take the gradient of the *sum* of the slots' losses; over all ranks, add up
the weights of the slots; divide the gradient by them, clip, move. So the loss of a step is the mean over its slots,
however it is cut into packs, and packs into ranks.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hscache
from hscache import __version__
from hscache.console import Interrupted, duration, say, size, stop_on_signal
from hscache.errors import InputError, IntegrityError, TrainingFault
from hscache.store.head import load_head
from hscache.store.index import read_shard
from hscache.store.layout import StorePaths
from hscache.store.reader import Store
from trainer import checkpoint as ckpt
from trainer.anchors import random_of
from trainer.data import Pack, PackShape, PackStream, Schedule, split
from trainer.drafter import Drafter, block_inputs, initialise
from trainer.evaluate import score_store, summarise
from trainer.losses import BlockLoss, Head, head_loss, logit_std
from trainer.manifest import TrainManifest, drafter_config
from trainer.masks import Backend
from trainer.optim import learning_rate, make_optimizers, scale_and_clip, set_learning_rate
from trainer.parallel import World, accumulating, distribute, full, optimizer_tensors, restore_optimizers

_OVERFIT_STEPS = 300
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


class Trainer:
    """What a run holds: store, head, drafter, optimizers. ``fit`` is its only user outside of tests and benchmarks.

    Args:
        manifest: What is trained.
        store_path: A complete store.
        world: The ranks.
        overfit: Train on the first so many samples only, and validate on them.
    """

    def __init__(self, manifest: TrainManifest, store_path: Path, world: World, *, overfit: int = 0) -> None:
        self.manifest, self.world, self.overfit = manifest, world, overfit
        self.store: Store = hscache.open(store_path)
        if not self.store.complete:
            raise InputError(
                "store-unfinished", f"{store_path}: not all shards are built", hint="run hscache build again"
            )
        head = load_head(StorePaths(store_path).target)
        shape = self.store.manifest["target"]["shape"]
        self.config = drafter_config(
            manifest.drafter,
            taps=self.store.taps,
            hidden_size=shape["hidden_size"],
            vocab_size=head.lm_head.shape[0],
            num_layers=shape["num_layers"],
        )
        self.pack_shape = _pack_shape(manifest, self.store, self.config.taps)
        self.train, self.held = split(self.store, manifest.data.validation)
        if overfit:
            self.train = self.held = self.train[:overfit]
        if not self.train:
            raise InputError("store-unfinished", f"{store_path}: no samples to train on")
        self.held = self.held[: manifest.run.validation_samples]
        self.schedule = Schedule(self.train, self.store.n_tokens, manifest.data, manifest.run.seed)
        self.total_steps = self._total_steps()
        self.backend: Backend = "flex" if world.device.type == "cuda" else "sdpa"
        self.dtype = torch.bfloat16 if manifest.run.precision == "bf16" else torch.float32
        self.head = Head(head, world.device, self.dtype)
        self.drafter = Drafter(self.config)
        self.drafter.gradient_checkpointing = manifest.run.gradient_checkpointing
        initialise(self.drafter, manifest.run.seed)
        self.drafter.to(world.device)
        self.optimizers: list[torch.optim.Optimizer] = []
        self.model: torch.nn.Module = self.drafter

    def _total_steps(self) -> int:
        if self.overfit:
            return _OVERFIT_STEPS
        if self.manifest.optim.max_steps is not None:
            return self.manifest.optim.max_steps
        return sum(len(self.schedule.steps(epoch)) for epoch in range(self.manifest.optim.epochs))

    def stream(self, start: int) -> PackStream:
        """Return this rank's packs from a step on."""
        return PackStream(
            self.store,
            self.schedule,
            self.pack_shape,
            self.manifest.data,
            seed=self.manifest.run.seed,
            start=start,
            stop=self.total_steps,
            rank=self.world.rank,
            world=self.world.size,
        )

    def calibrate(self) -> None:
        """Scale the last norm so that the first logits have the standard deviation that the manifest asks for.

        A fresh drafter through a wide-spread head is far off: SmolLM2 begins at a loss of 22, where guessing is 10.8.
        """
        wanted = self.manifest.drafter.logit_std
        if not wanted:
            return
        schedule = self.schedule.steps(0)[0][:1]  # the same samples on every rank
        spec, seed = self.manifest.data, self.manifest.run.seed
        one = Schedule(schedule[0], self.store.n_tokens, spec, seed)
        with PackStream(self.store, one, self.pack_shape, spec, seed=seed, start=0, stop=1) as packs:
            for pack in next(packs):
                with torch.no_grad(), self.autocast():
                    hidden_QH = self.hidden(pack.to(self.world.device), 0)[:64, 1]
                self.drafter.norm.weight.data *= wanted / max(logit_std(hidden_QH, self.head), 1e-6)

    def distribute(self) -> None:
        """Share the drafter among the ranks and make its optimizers."""
        run = self.manifest.run
        self.model = distribute(self.drafter, self.world, run.parallel, run.precision)
        self.optimizers = make_optimizers(self.drafter, self.manifest.optim)

    def autocast(self) -> torch.autocast:
        """Return the context in which matrix products take the manifest's precision."""
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def hidden(self, pack: Pack, step: int) -> Tensor:
        """Return what the head reads of every slot, [N, B, H]."""
        states_TLH = self._noisy(pack, step)
        inputs = block_inputs(pack.anchor_ids_N, self.head.embed_VH, self.config)
        blocks = pack.blocks(self.config.block_size, self.backend)
        hidden_QH: Tensor = self.model(states_TLH, pack.positions_T, inputs, blocks)
        return hidden_QH.view(-1, self.config.block_size, self.config.hidden_size)

    def loss(self, pack: Pack, step: int) -> BlockLoss:
        """Return the summed loss of a pack on the device."""
        loss = self.manifest.loss
        with self.autocast():
            hidden_NBH = self.hidden(pack, step)
        return head_loss(
            hidden_NBH[:, 1:], self.head, pack.targets, kind=loss.kind, weights=loss.weights, gamma=self.manifest.gamma
        )

    def step(self, step: int, packs: list[Pack]) -> dict[str, Any]:
        """Do one optimizer step and return what is logged of it; the same on every rank."""
        device, K = self.world.device, self.config.block_size - 1
        sums = torch.zeros(5 + 2 * K, dtype=torch.float64, device=device)
        for n, pack in enumerate(packs):
            with accumulating(self.model, last=n == len(packs) - 1):
                result = self.loss(pack.to(device), step)
                result.loss_sum.backward()
            sums += _counts(result, len(pack.bad))
        loss_sum, weight, n_blocks, bad, streak = (values := self.world.sum(sums).tolist())[:5]
        factor, loss = self.world.size / max(weight, 1e-30), loss_sum / max(weight, 1e-30)
        norm = float(scale_and_clip(self.drafter.parameters(), factor, self.manifest.optim.clip))
        lr = learning_rate(step, self.total_steps, self.manifest.optim)
        if math.isfinite(norm) and math.isfinite(loss) and weight > 0:
            set_learning_rate(self.optimizers, lr)
            for optimizer in self.optimizers:
                optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        right, trained = values[5 : 5 + K], values[5 + K :]
        return {
            "loss": loss,
            "acc": [r / max(n, 1) for r, n in zip(right, trained, strict=True)],
            "tau": 1 + streak / max(n_blocks, 1),
            "lr": lr,
            "grad_norm": norm,
            "blocks": int(n_blocks),
            "bad": int(bad),
        }

    def validate(self) -> dict[str, Any]:
        """Return tau, tau_all and DDTree-8 of the held-out samples; every rank takes its share."""
        if not self.held:
            return {"samples": 0}
        shared = self.manifest.run.parallel == "fsdp"  # its ranks must make every forward pass together
        mine = self.held if shared else self.held[self.world.rank :: self.world.size]
        with self.autocast():
            scores = score_store(self.drafter, self.head, self.store, mine, backend=self.backend, trees=(8,))
        if not shared:
            scores = [score for part in self.world.gather(scores) for score in part]  # type: ignore[attr-defined]
        return summarise(scores)

    def _noisy(self, pack: Pack, step: int) -> Tensor:
        """Return the drafter's copy of the context; targets keep the clean states."""
        noise = self.manifest.data.noise
        if not noise:
            return pack.states_TLH
        seed = int(random_of("noise", self.manifest.run.seed, step, *pack.sample_ids).integers(1 << 62))
        made = torch.Generator(self.world.device).manual_seed(seed)
        rms_TL1 = pack.states_TLH.float().square().mean(-1, keepdim=True).sqrt()
        random = torch.randn(pack.states_TLH.shape, generator=made, device=pack.states_TLH.device)
        return (pack.states_TLH + noise * rms_TL1 * random).to(pack.states_TLH.dtype)


def fit(
    manifest: TrainManifest, store_path: Path, out: Path, *, device: str | None = None, overfit: int = 0
) -> FitReport:
    """Train a drafter, or go on with one.

    Args:
        manifest: What is trained.
        store_path: A complete store.
        out: Run directory; new, or begun with the same manifest and store.
        device: Such as ``cpu``; None for CUDA where it is.
        overfit: Learn so many samples by heart, as a check; 0 trains.

    Raises:
        HscacheError: For what a user can mend; ``training-diverged`` when the loss is no number any more.
        Interrupted: After SIGINT or SIGTERM, when a checkpoint is written.
    """
    world = World.join(device)
    try:
        with stop_on_signal() as stop:
            return _Run(Trainer(manifest, store_path, world, overfit=overfit), out, stop).go()
    finally:
        world.leave()


class _Run:
    """One session of a run: where it stands, and what it writes."""

    def __init__(self, trainer: Trainer, out: Path, stop: list[int]) -> None:
        self.t, self.stop, self.paths = trainer, stop, ckpt.RunPaths(out)
        self.main = trainer.world.main
        self.report = FitReport(str(out))
        self.first_loss: float | None = None
        self.skipped = 0
        self.store_facts = store_facts(trainer.store)

    def go(self) -> FitReport:
        t, run, started = self.t, self.t.manifest.run, time.monotonic()
        if self.main:
            ckpt.claim_run(self.paths, self._document())
        t.world.barrier()
        step = self._resume()
        if step == 0:
            self._validate(0)
        log = _Log(t, step)
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
                    ckpt.append_line(self.paths.metrics, log.line(step, record))
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
        self.report.skipped = self.skipped
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
            t.calibrate()
            t.distribute()
            if self.main:
                ckpt.forget_after(self.paths.metrics, -1)
            return 0
        weights, moments, state = ckpt.load_state(self.paths.checkpoint(steps[-1]))
        t.drafter.load_state_dict(weights)
        t.distribute()
        restore_optimizers(t.drafter, t.optimizers, moments)
        self.first_loss, self.skipped = state["first_loss"], state["skipped"]
        self.report.first_tau, self.report.tau, self.report.best_tau = state["taus"]
        if self.main:
            ckpt.forget_after(self.paths.metrics, state["step"])
            say(f"going on at step {state['step']} of {t.total_steps}")
        return int(state["step"])

    def _watch(self, step: int, record: dict[str, Any], packs: list[Pack]) -> None:
        """Record unreadable samples and stop where going on would waste time."""
        for pack in packs:
            for sample_id, what in pack.bad:
                ckpt.append_line(self.paths.skipped, {"step": step, "sample_id": sample_id, "error": what})
                say(f"skipped {sample_id}: {what}")
        self.skipped += record["bad"]
        if self.skipped > self.t.manifest.data.max_bad_samples:
            raise IntegrityError(
                "too-many-bad-samples",
                f"{self.skipped} samples could not be read (data.max_bad_samples is "
                f"{self.t.manifest.data.max_bad_samples}); they are named in {self.paths.skipped}",
                hint=f"hscache verify {self.t.store.path}, then hscache repair",
            )
        self.first_loss = record["loss"] if self.first_loss is None else self.first_loss
        sound = math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"])
        if not sound or record["loss"] > _EXPLODED * max(self.first_loss, 1.0):
            ids = [sample_id for pack in packs for sample_id in pack.sample_ids]
            raise TrainingFault(
                "training-diverged",
                f"step {step}: loss {record['loss']:.4g}, gradient norm {record['grad_norm']:.4g}; samples of the step "
                f"on this rank: {', '.join(ids[:16])}{' ...' if len(ids) > 16 else ''}",
                hint="lower optim.lr, or look at these samples with hscache verify --recompute",
            )

    def _validate(self, step: int) -> None:
        began = time.monotonic()
        found = self.t.validate()
        if not found["samples"]:
            return
        tau = found["tau"]
        self.report.validation, self.report.tau = found, tau
        self.report.first_tau = tau if step == 0 else self.report.first_tau
        if self.main:
            record = {"step": step, "kind": "validation", **found, "seconds": time.monotonic() - began}
            ckpt.append_line(self.paths.metrics, record)
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
            state = {"first_loss": self.first_loss, "skipped": self.skipped, "taus": taus}
            provenance = {"store": self.store_facts, "manifest": t.manifest.model_dump(mode="json")}
            ckpt.save_checkpoint(self.paths, step, weights, t.config, provenance, moments, state)
            ckpt.drop_old(self.paths, t.manifest.run.keep)
        t.world.barrier()


class _Log:
    """Figures between two log lines."""

    def __init__(self, trainer: Trainer, step: int) -> None:
        self._t, self._begin, self._first = trainer, time.monotonic(), step
        self._since, self.waited = self._begin, 0.0
        self._tokens = self._blocks = 0

    def add(self, record: dict[str, Any], packs: list[Pack]) -> None:
        self._tokens += sum(len(pack.positions_T) for pack in packs) * self._t.world.size
        self._blocks += record["blocks"]

    def line(self, step: int, record: dict[str, Any]) -> dict[str, Any]:
        """Say a line and return it as a record."""
        now = time.monotonic()
        spent = max(now - self._since, 1e-9)
        wait, tokens = self.waited / spent, self._tokens / spent
        left = (now - self._begin) / max(step - self._first, 1) * (self._t.total_steps - step)
        memory = peak_memory_bytes(self._t.world.device)
        acc = " ".join(f"{a:.2f}"[1:] if a < 1 else "1.0" for a in record["acc"][:7])
        say(
            f"step {step}/{self._t.total_steps} | loss {record['loss']:.4f} | tau {record['tau']:.3f} | acc {acc} | "
            f"lr {record['lr']:.2e} | norm {record['grad_norm']:.2f} | {tokens:,.0f} tok/s | wait {wait:.1%} | "
            f"{size(memory)} | ETA {duration(left)}"
        )
        out = {
            "step": step,
            "kind": "train",
            **record,
            "tokens_per_s": tokens,
            "blocks_per_s": self._blocks / spent,
            "wait": wait,
            "peak_memory_bytes": memory,
        }
        self._since, self.waited, self._tokens, self._blocks = time.monotonic(), 0.0, 0, 0
        return out


def _counts(result: BlockLoss, bad: int) -> Tensor:
    """Return float64 [5 + 2 K]: loss, weight, blocks, bad samples, streak; right and trained slots, by slot."""
    right_NK, trained_NK = result.correct_NK, result.trained_NK
    head = [result.loss_sum.detach(), result.weight_sum, trained_NK.any(1).sum()]
    head += [torch.tensor(bad, device=right_NK.device), right_NK.cumprod(1).sum()]
    return torch.cat((torch.stack([x.double() for x in head]), right_NK.sum(0).double(), trained_NK.sum(0).double()))


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that this process had: of the device, or its resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def store_facts(store: Store) -> dict[str, Any]:
    """Return what a run records of its store: enough to tell later what a drafter was trained on."""
    shard = read_shard(StorePaths(store.path).shard(0))
    manifest, target = (
        store.manifest["manifest"],
        json.loads((StorePaths(store.path).target / "target.json").read_bytes()),
    )
    return {
        "digest": store.manifest["digest"],
        "target": manifest["target"]["path"],
        "weights": store.manifest["target"]["weights"],
        "tokenizer": store.manifest["target"]["tokenizer"],
        "corpus": store.manifest["corpus"],
        "taps": list(store.taps),
        "codec": manifest["store"]["codec"],
        "norm_kind": target["norm_kind"],
        "kernel_path": shard["provenance"]["kernels"].get("path"),
        "kernel_path_id": shard["provenance"]["kernels"].get("path_id"),
        "target_dtype": manifest["target"]["dtype"],
    }


def _pack_shape(manifest: TrainManifest, store: Store, taps: tuple[int, ...]) -> PackShape:
    kind = manifest.loss.kind
    top, final = kind in ("ce-argmax", "kl-topk"), kind in ("kl-exact", "tv")
    for needed, array, remedy in ((top, "logit_ids", "logits.topk = 64"), (final, "final_state", "states.final_state")):
        if needed and array not in store.specs:
            raise InputError(
                "array-absent",
                f"loss.kind = {kind} needs {array}, which {store.path} was built without",
                hint=f"build with {remedy}, or take loss.kind = ce",
            )
    return PackShape(taps, manifest.drafter.block_size, top, final)
