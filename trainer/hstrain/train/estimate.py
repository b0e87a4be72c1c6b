"""Estimate what a run needs before it begins: parameters, memory, steps, tokens, and hours from a few real steps.

The memory is what one process of a run on this machine holds at its peak. It is counted from the shapes, term by term,
so that it also works for shapes that do not fit here; a test compares it with measured peaks. With CUDA the device's
memory is one sum and the host's another.

Shapes: see :mod:`hstrain.drafter.model`; P parameters of one rank.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hstrain.data.packs import Pack
from hstrain.drafter.attention import GROUP_QUERIES
from hstrain.drafter.losses import chunk_rows
from hstrain.drafter.model import DrafterConfig, count_parameters
from hstrain.manifest import TrainManifest
from hstrain.train.parallel import World
from hstrain.train.progress import peak_memory_bytes
from hstrain.train.step import Trainer

_PROBE_STEPS = 3


def memory_bytes(
    config: DrafterConfig,
    manifest: TrainManifest,
    *,
    T: int,
    N: int,
    keys: int | None = None,
    world: int = 1,
    device: str = "cpu",
    head_bytes: int | None = None,
) -> dict[str, int]:
    """Return the terms of a training process's memory at its peak, without interpreter and libraries.

    What lives at the peak is counted, tensor by tensor; a small process's allocator may hold a fifth more. With CUDA it
    is the device's memory; for the host's see :func:`host_memory_bytes`.

    Args:
        config: The drafter's shape.
        manifest: Optimizer, precision and packs a step decide.
        T: Context rows of a pack.
        N: Blocks of a pack.
        keys: On a CPU, context rows and slots that groups of blocks see, added up; None for anchors that are spread
            evenly over one sample.
        world: Ranks, over which FSDP cuts the weights.
        device: ``cpu`` or ``cuda``: how attention, norms and the head work.
        head_bytes: Of embedding and head as they are held; None for a tied bf16 head.
    """
    total, _ = count_parameters(config)
    fsdp = world > 1 and manifest.run.parallel == "fsdp"
    P = total // world if fsdp else total
    H, B, L, F = config.hidden_size, config.block_size, len(config.taps), config.intermediate_size
    A, AD, KD = config.num_heads, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    Q, cpu = N * B, device == "cpu"
    e = 2 if manifest.run.precision == "bf16" else 4
    blocks_a_group = max(1, GROUP_QUERIES // B)
    if keys is None:
        keys = T * (-(-N // blocks_a_group) + 1) // 2 + Q
    # kept for a layer's backward pass. Norms: their input, and on a CPU what they made of it, before the weight
    norms = 4 * (2 if cpu else 1) * (2 * Q * H + Q * AD + Q * KD + T * KD)
    # inputs of the matrix products, and what the feed-forward layer's product and SiLU need
    products = e * (2 * Q * H + Q * AD + 4 * Q * F)
    # queries and output; keys and values, on a CPU repeated for every query head and group, with the group's mask
    seen = 2 * keys * AD + keys * min(Q, blocks_a_group * B) if cpu else 2 * (T + Q) * KD
    layer = norms + products + e * (2 * Q * AD + seen) + 4 * Q * A
    logits = min(chunk_rows(config.vocab_size, B - 1, device), N * (B - 1)) * config.vocab_size * 4 * 4
    ends = (8 if cpu else 4) * (T + Q) * H + 2 * 4 * Q * H + e * T * H + (0 if e == 2 else 4 * T * L * H)
    if manifest.run.gradient_checkpointing:
        # the last layer to be recomputed meets the gradients of all others, and its feed-forward's own
        forward = 4 * Q * H * config.num_layers + max(layer + 2 * e * Q * F + 4 * P, logits) + ends
    else:
        forward = layer * config.num_layers + logits + ends
    casts = e * total if e == 2 and not fsdp else 0
    # a checkpoint is written from the tensors that are there; what is cut over the ranks is put together for it
    saving = _checkpoint(total, manifest) if fsdp and cpu else 0
    return {
        "weights": 4 * P,
        "moments": _checkpoint(P, manifest) - 4 * P,
        "head": head_bytes if head_bytes is not None else 2 * config.vocab_size * H,
        # a device has the pack that trains and the one before it
        "packs": _packs(config, manifest, T=T, world=world) if cpu else 2 * T * L * H * 2,
        # gradients grow while what was kept for them goes, so the peak is at one end or the other, or after both
        "activations, gradients or checkpoint": max(forward + casts, 4 * P, saving),
        "communication": _communication(config, total, e, fsdp=fsdp) if world > 1 else 0,
    }


def host_memory_bytes(config: DrafterConfig, manifest: TrainManifest, *, T: int, world: int = 1) -> dict[str, int]:
    """Return the terms of the host's memory at its peak where the device has its own memory.

    It is that of the first rank, which holds a whole checkpoint while it is written; the others hold the packs alone.
    When a run is resumed, every rank maps the checkpoint's files, which the system can take back.

    Args:
        config: The drafter's shape.
        manifest: Optimizer and packs a step decide.
        T: Context rows of a pack.
        world: Ranks.
    """
    total, _ = count_parameters(config)
    return {"packs": _packs(config, manifest, T=T, world=world), "checkpoint": _checkpoint(total, manifest)}


def _packs(config: DrafterConfig, manifest: TrainManifest, *, T: int, world: int) -> int:
    """Return what the packs of a step, those that wait, and the ring of samples take."""
    L, H = len(config.taps), config.hidden_size
    packs = -(-manifest.data.packs_per_step // world)
    return 4 * packs * T * L * H * 2 + 4 * min(T, manifest.data.max_tokens) * (L + 1) * H * 2


def _checkpoint(parameters: int, manifest: TrainManifest) -> int:
    """Return what weights and moments take together."""
    return 4 * parameters * (2 if manifest.optim.name == "muon" else 3)


def _communication(config: DrafterConfig, parameters: int, e: int, *, fsdp: bool) -> int:
    """Return what DDP keeps in buckets, or what FSDP gathers of two layers and reduces of one."""
    return (2 * e + 4) * parameters // (config.num_layers + 1) if fsdp else 4 * parameters


def dry_run(manifest: TrainManifest, store_path: Path, *, device: str | None = None) -> dict[str, Any]:
    """Return what a run would take, as plain JSON; a few steps are run and their result is discarded.

    ``memory_bytes`` is one process's, with CUDA on its device; ``host_memory_bytes`` is beside it, and else 0.

    Args:
        manifest: What would be trained.
        store_path: A complete store.
        device: Such as ``cpu``; None for CUDA where it is.
    """
    world = World.join(device)
    try:
        return _probe(world.together(lambda: Trainer(manifest, store_path, world)))
    finally:
        world.leave()


def _probe(trainer: Trainer) -> dict[str, Any]:
    world, manifest = trainer.world, trainer.manifest
    world.together(trainer.begin)
    trainer.distribute()
    parameters, tensors = count_parameters(trainer.config)
    largest, seconds = (0, 0, 0), []
    with trainer.stream(0) as stream:
        for step, packs in zip(range(min(_PROBE_STEPS, trainer.total_steps)), stream, strict=False):
            largest = max(largest, *(pack_size(pack, trainer.config.block_size) for pack in packs))
            began = time.perf_counter()
            trainer.step(step, packs)
            seconds.append(time.perf_counter() - began)
    keys, T, N = largest
    tensors_held = {t.data_ptr(): t.nbytes for t in (trainer.head.embed_VH, trainer.head.lm_head_VH)}
    memory = memory_bytes(
        trainer.config,
        manifest,
        T=T,
        N=N,
        keys=keys,
        world=world.size,
        device=world.device.type,
        head_bytes=sum(tensors_held.values()),
    )
    apart = world.device.type == "cuda"
    host = host_memory_bytes(trainer.config, manifest, T=T, world=world.size) if apart else {}
    return {
        "parameters": parameters,
        "tensors": tensors,
        "train_samples": len(trainer.train),
        "validation_samples": len(trainer.held),
        "steps": trainer.total_steps,
        "epochs": manifest.optim.epochs,
        "tokens_an_epoch": int(trainer.store.n_tokens[trainer.train].clip(max=manifest.data.max_tokens).sum()),
        "packs_an_epoch": len(trainer.schedule.packs(0)),
        "memory_bytes": sum(memory.values()),
        "memory": memory,
        "host_memory_bytes": sum(host.values()),
        "host_memory": host,
        "measured_peak_bytes": peak_memory_bytes(world.device),
        "seconds_a_step": min(seconds),
        "hours": min(seconds) * trainer.total_steps / 3600,
    }


def pack_size(pack: Pack, block_size: int) -> tuple[int, int, int]:
    """Return the keys that groups of blocks see, added up; context rows; and blocks."""
    groups = pack.blocks(block_size, "sdpa").groups
    keys = sum(rows.stop - rows.start + (some.stop - some.start) * block_size for some, rows in groups)
    return keys, len(pack.positions_T), len(pack.anchors_N)
