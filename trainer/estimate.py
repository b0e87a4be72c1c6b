"""What a run will need, before it begins: parameters, memory, steps, tokens, and hours from a few real steps.

The memory is what one process of a run on this machine holds at its peak. It is counted from the shapes, term by term,
so that it can be asked for shapes that do not fit here; a test holds it against measured peaks.

Shapes: see :mod:`trainer.drafter`; P parameters of one rank.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from trainer.data import Pack
from trainer.drafter import DrafterConfig, count_parameters
from trainer.losses import chunk_rows
from trainer.manifest import TrainManifest
from trainer.parallel import World
from trainer.progress import peak_memory_bytes
from trainer.step import Trainer

_PROBE_STEPS = 3


def memory_bytes(
    config: DrafterConfig, manifest: TrainManifest, *, T: int, N: int, world: int = 1, head_bytes: int | None = None
) -> dict[str, int]:
    """Return the terms of a training process's memory, without interpreter and libraries.

    Args:
        config: The drafter's shape.
        manifest: Optimizer and precision decide.
        T: Context rows of a pack.
        N: Blocks of a pack.
        world: Ranks, over which FSDP cuts the weights.
        head_bytes: Of embedding and head as they are held; None for a tied bf16 head.
    """
    parameters, _ = count_parameters(config)
    P = parameters // world if manifest.run.parallel == "fsdp" else parameters
    H, Q, L = config.hidden_size, N * config.block_size, len(config.taps)
    AD, KD, F = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.intermediate_size
    e = 2 if manifest.run.precision == "bf16" else 4
    moments = 1 if manifest.optim.name == "muon" else 2
    # of a layer, kept for its backward pass: norms' inputs, queries, keys and values before and behind norm and
    # rotation, the attention's output, the feed-forward's four inner tensors
    layer = Q * (4 * 4 * H + e * (2 * H + 3 * AD + 3 * KD + 4 * F) + 4 * 2 * AD) + T * KD * (3 * e + 8)
    kept = 4 * Q * H * config.num_layers + layer if manifest.run.gradient_checkpointing else layer * config.num_layers
    pack = T * L * H * 2
    return {
        "weights": 4 * P,
        "gradients": 4 * P,
        "moments": 4 * P * moments,
        "casts": e * P if e == 2 else 0,
        "head": head_bytes if head_bytes is not None else 2 * config.vocab_size * H,
        "context": T * H * (4 * 3 + e) + (0 if e == 2 else 2 * pack),
        "layers": kept,
        "packs": 4 * pack,
        "logits": chunk_rows(config.vocab_size, config.block_size - 1, "cpu") * config.vocab_size * 4 * 4,
    }


def dry_run(manifest: TrainManifest, store_path: Path, *, device: str | None = None) -> dict[str, Any]:
    """Return what a run would take, JSON-plain; a few steps are run and thrown away.

    Args:
        manifest: What would be trained.
        store_path: A complete store.
        device: Such as ``cpu``; None for CUDA where it is.
    """
    world = World.join(device)
    trainer = Trainer(manifest, store_path, world)
    trainer.calibrate()
    trainer.distribute()
    parameters, tensors = count_parameters(trainer.config)
    steps = [trainer.schedule.steps(epoch) for epoch in range(manifest.optim.epochs)]
    largest, seconds = (0, 0), []
    with trainer.stream(0) as stream:
        for step, packs in zip(range(min(_PROBE_STEPS, trainer.total_steps)), stream, strict=False):
            largest = max(largest, *(_size(pack) for pack in packs))
            began = time.perf_counter()
            trainer.step(step, packs)
            seconds.append(time.perf_counter() - began)
    tensors_held = {t.data_ptr(): t.nbytes for t in (trainer.head.embed_VH, trainer.head.lm_head_VH)}
    memory = memory_bytes(
        trainer.config, manifest, T=largest[0], N=largest[1], world=world.size, head_bytes=sum(tensors_held.values())
    )
    world.leave()
    return {
        "parameters": parameters,
        "tensors": tensors,
        "train_samples": len(trainer.train),
        "validation_samples": len(trainer.held),
        "steps": trainer.total_steps,
        "epochs": manifest.optim.epochs,
        "tokens_an_epoch": int(trainer.store.n_tokens[trainer.train].clip(max=manifest.data.max_tokens).sum()),
        "packs_an_epoch": sum(map(len, steps[0])),
        "memory_bytes": sum(memory.values()),
        "memory": memory,
        "measured_peak_bytes": peak_memory_bytes(world.device),
        "seconds_a_step": min(seconds),
        "hours": min(seconds) * trainer.total_steps / 3600,
    }


def _size(pack: Pack) -> tuple[int, int]:
    return len(pack.positions_T), len(pack.anchors_N)
