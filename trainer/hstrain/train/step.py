"""The trainer: store, head, drafter and optimizers, and one optimizer step.

For each pack of a step, all blocks are drafted, and the gradient of the *sum* of the slots' losses is computed. The
slots' weights are summed over all ranks, and the gradient is divided by that sum. So the loss of a step is the mean
over its slots, no matter how the samples are divided into packs and the packs among ranks.
"""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hscache
from hscache.device import pick_dtype
from hscache.errors import InputError
from hscache.store.head import load_head
from hscache.store.layout import FINAL_STATE, LOGIT_IDS, StorePaths
from hscache.store.reader import Store
from hstrain.data.anchors import anchor_candidates, random_of
from hstrain.data.packs import Pack, PackShape, PackStream, Schedule, split
from hstrain.drafter.attention import Backend
from hstrain.drafter.losses import NEEDS, BlockLoss, Head, head_loss, logit_std
from hstrain.drafter.model import Drafter, block_inputs, initialise
from hstrain.exchange.importer import open_drafter, warn_of_other_target
from hstrain.manifest import TrainManifest, check_start, drafter_in, with_precision
from hstrain.run.checkpoint import weights_digest
from hstrain.score.walk import by_tag, score_store, summarise
from hstrain.train.optim import learning_rate, make_optimizers, scale_and_clip, set_learning_rate
from hstrain.train.parallel import World, accumulating, distribute

OVERFIT_STEPS = 300


class Trainer:
    """The store, head, drafter and optimizers of a run.

    Args:
        manifest: Settings of the run.
        store_path: A complete store.
        world: The ranks.
        overfit: Train and validate only on the first samples, this many; 0 for all.
    """

    def __init__(self, manifest: TrainManifest, store_path: Path, world: World, *, overfit: int = 0) -> None:
        self.world, self.overfit = world, overfit
        self.manifest = manifest = settled(manifest, world.device)
        self.store: Store = hscache.open(store_path)
        if not self.store.complete:
            raise InputError(
                "store-unfinished", f"{store_path}: not all shards are built", hint="run hscache build again"
            )
        head = load_head(StorePaths(store_path).target)
        self.config = drafter_in(manifest.drafter, self.store, head)
        self.pack_shape = _pack_shape(manifest, self.store, self.config.taps)
        self.train, self.held, self.test = split(self.store, manifest.data.validation, manifest.data.test)
        if overfit:
            learnable = (i for i in self.train if len(anchor_candidates(self.store.loss_mask(i))))
            self.train = self.held = list(islice(learnable, overfit))
            self.test = []
        if not self.train:
            raise InputError(
                "no-anchors",
                f"{store_path}: in none of the samples to train on can a block begin",
                hint="hscache info shows how many tokens are supervised",
            )
        self.held_out = len(self.held)
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
        self.unreadable: dict[str, str] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        self.model: torch.nn.Module = self.drafter

    def _total_steps(self) -> int:
        if self.overfit:
            return OVERFIT_STEPS
        if self.manifest.optim.max_steps is not None:
            return self.manifest.optim.max_steps
        return sum(len(self.schedule.steps(epoch)) for epoch in range(self.manifest.optim.epochs))

    def stream(self, start: int) -> PackStream:
        """Return this rank's packs, beginning with a step."""
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

    def begin(self) -> dict[str, Any] | None:
        """Load the weights of ``drafter.start`` on every rank, or calibrate random ones.

        Returns:
            The run's record of its starting drafter, as plain JSON: ``path``, ``weights`` (a digest), and the
            ``start`` of that drafter's own run; None for random weights.

        Raises:
            ConfigError: ``start-other-shape``.
            InputError: As :func:`hstrain.exchange.importer.open_drafter`.
            IntegrityError: As :func:`hstrain.exchange.importer.open_drafter`.
        """
        if self.manifest.drafter.start is None:
            self.calibrate()
            return None
        path = Path(self.manifest.drafter.start).expanduser()
        drafter, facts = open_drafter(path, load_head(StorePaths(self.store.path).target), quiet=not self.world.main)
        check_start(path, drafter.config, self.config)
        if self.world.main:
            warn_of_other_target(path, facts, self.store)
        weights = drafter.state_dict()
        self.drafter.load_state_dict(weights)
        before = facts.get("provenance", {}).get("start")
        return {"path": facts["path"], "weights": weights_digest(weights), "start": before}

    def calibrate(self) -> None:
        """Scale the last norm so that the first logits have the standard deviation ``drafter.logit_std``.

        Without this, a head with large weights makes extreme logits of random states: a drafter for SmolLM2 starts with
        a loss of 22, while guessing costs 10.8.
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
        """Return a context in which matrix products have the manifest's precision."""
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def hidden(self, pack: Pack, step: int) -> Tensor:
        """Return the drafter's states of every slot, [N, B, H], which the head reads."""
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
        """Do one optimizer step and return its figures for the log, the same on every rank."""
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
        """Return tau, tau_all and DDTree-8 of the held-out samples, which the ranks share.

        Samples that cannot be read are left out and added to ``unreadable``.
        """
        if not self.held:
            return {"samples": 0}
        shared = self.manifest.run.parallel == "fsdp"  # all ranks must take part in every forward pass
        mine = self.held if shared else self.held[self.world.rank :: self.world.size]
        with self.autocast():
            scores = score_store(
                self.drafter, self.head, self.store, mine, backend=self.backend, trees=(8,), unreadable=self.unreadable
            )
        self.unreadable = self.world.merge(self.unreadable)
        if not shared:
            scores = [score for part in self.world.gather(scores) for score in part]
        return {**summarise(scores), "by_tag": by_tag(scores)}

    def _noisy(self, pack: Pack, step: int) -> Tensor:
        """Return the drafter's copy of the context, with noise; the targets keep the clean states."""
        noise = self.manifest.data.noise
        if not noise:
            return pack.states_TLH
        seed = int(random_of("noise", self.manifest.run.seed, step, *pack.sample_ids).integers(1 << 62))
        made = torch.Generator(self.world.device).manual_seed(seed)
        rms_TL1 = pack.states_TLH.float().square().mean(-1, keepdim=True).sqrt()
        random = torch.randn(pack.states_TLH.shape, generator=made, device=pack.states_TLH.device)
        return (pack.states_TLH + noise * rms_TL1 * random).to(pack.states_TLH.dtype)


def _counts(result: BlockLoss, bad: int) -> Tensor:
    """Return float64 [5 + 2 K]: loss, weight, blocks, bad samples, streak; right and trained slots, by slot."""
    right_NK, trained_NK = result.correct_NK, result.trained_NK
    head = [result.loss_sum.detach(), result.weight_sum, trained_NK.any(1).sum()]
    head += [torch.tensor(bad, device=right_NK.device), right_NK.cumprod(1).sum()]
    return torch.cat((torch.stack([x.double() for x in head]), right_NK.sum(0).double(), trained_NK.sum(0).double()))


def settled(manifest: TrainManifest, device: torch.device) -> TrainManifest:
    """Return a manifest in which the precision ``auto`` is replaced by the one that suits the device."""
    return with_precision(manifest, {"bfloat16": "bf16", "float32": "fp32"}[pick_dtype("auto", device)])


def _pack_shape(manifest: TrainManifest, store: Store, taps: tuple[int, ...]) -> PackShape:
    kind = manifest.loss.kind
    needed = NEEDS[kind]
    if needed is not None and needed not in store.specs:
        remedy = {LOGIT_IDS: "logits.topk = 64", FINAL_STATE: "states.final_state"}[needed]
        raise InputError(
            "array-absent",
            f"loss.kind = {kind} needs the array {needed}, which {store.path} lacks",
            hint=f"build a store with {remedy}, or set loss.kind = ce",
        )
    return PackShape(taps, manifest.drafter.block_size, needed == LOGIT_IDS, needed == FINAL_STATE)
