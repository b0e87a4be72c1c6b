"""What a drafter learns in a number of steps: our trainer, and speculators' model and loss on the same batches.

Both take samples, order, anchors, first weights, optimizer, learning rates and clipping from one training manifest. The
peer keeps its own masks, targets and loss, and its weights are scored by our evaluation: serving sees no difference.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from hstrain.data.anchors import choose_anchors, random_of
from hstrain.manifest import load_train_manifest
from hstrain.train.optim import learning_rate, make_optimizers, set_learning_rate
from hstrain.train.parallel import World
from hstrain.train.step import Trainer

from hscache.store.head import load_head
from hscache.store.layout import StorePaths

OURS, THEIRS, THEIR_START = "hscache", "speculators", "speculators, own start"
"""The last one begins with norms of one, as its own training does, not with our calibrated last norm."""


def learn(side: str, manifest: str, overrides: list[str], store: str, at: list[int]) -> dict[str, Any]:
    """Train one side and score it.

    Args:
        side: Of the constants above.
        manifest: Training manifest.
        overrides: ``key=value`` for it.
        store: A complete store with final states and samples no longer than ``data.max_tokens``.
        at: Steps at which to score, ascending.
    """
    trainer = Trainer(load_train_manifest(Path(manifest), overrides), Path(store), World.join("cpu"))
    if int(trainer.store.n_tokens.max()) > trainer.manifest.data.max_tokens:
        raise SystemExit(f"{store}: samples longer than data.max_tokens, of which the peer would see other windows")
    if side != THEIR_START:
        trainer.calibrate()
    trainer.distribute()
    run = _Ours(trainer) if side == OURS else _Theirs(trainer, Path(store))
    scores, losses, seconds = [], [], 0.0
    for step in range(at[-1] + 1):
        if step in at:
            run.give_weights()
            found = trainer.validate()
            names = ("tau", "tau_interval", "tau_all", "acc", "samples")
            scores.append({"step": step, "seconds": seconds, **{name: found[name] for name in names}})
        if step < at[-1]:
            started = time.process_time()
            losses.append(run.step(step))
            seconds += time.process_time() - started
    run.close()
    return {"scores": scores, "losses": losses, "seconds": seconds}


class _Ours:
    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._stream = trainer, trainer.stream(0)

    def step(self, step: int) -> float:
        return float(self._trainer.step(step, next(self._stream))["loss"])

    def give_weights(self) -> None:
        pass

    def close(self) -> None:
        self._stream.close()


class _Theirs:
    def __init__(self, trainer: Trainer, store: Path) -> None:
        from trainer_peer import Speculators

        self._trainer = trainer
        head = load_head(StorePaths(store).target)
        gamma = trainer.manifest.gamma
        self._peer = Speculators(trainer.drafter, head, attention="sdpa", loss="ce", weights="dpace", gamma=gamma)
        self._optimizers = make_optimizers(self._peer.model, trainer.manifest.optim)
        self._batches = trainer.schedule.from_step(0)

    def step(self, step: int) -> float:
        trainer, parameters, total = self._trainer, self._peer.parameters(), 0.0
        epoch, packs = next(self._batches)
        for pack in packs:
            batch = self._batch(pack, epoch)
            with trainer.autocast():
                loss = self._peer.loss(batch) / len(packs)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(parameters, trainer.manifest.optim.clip)
        set_learning_rate(self._optimizers, learning_rate(step, trainer.total_steps, trainer.manifest.optim))
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return total

    def _batch(self, numbers: list[int], epoch: int) -> Any:
        from trainer_peer import join

        trainer, parts = self._trainer, []
        for i in numbers:
            sample = trainer.store.sample(i, taps=trainer.config.taps)
            random = random_of("anchors", trainer.manifest.run.seed, epoch, sample.sample_id)
            anchors = choose_anchors(sample.loss_mask.numpy(), trainer.manifest.data.anchors, random)
            if len(anchors):
                states = (sample.hidden_states, sample.final_state, sample.input_ids, sample.loss_mask)
                parts.append((*states, torch.from_numpy(anchors)))
        return join(parts, trainer.config.block_size)

    def give_weights(self) -> None:
        self._trainer.drafter.load_state_dict(self._peer.drafter_weights())

    def close(self) -> None:
        pass
