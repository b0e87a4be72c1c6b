"""Estimate what a run needs before it starts: parameters, memory, steps, tokens, and hours from a few real steps.

The memory is the peak of one process of the run. It is computed from the shapes, term by term, so that it also works
for shapes that do not fit into this machine; a test compares it with measured peaks. With CUDA, the memory of the
device and of the host are separate sums.

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
    """Return the terms of a training process's peak memory, without interpreter and libraries.

    All tensors that exist at the peak are counted; the allocator of a small process may hold a fifth more. With CUDA
    this is the device's memory; for the host's see :func:`host_memory_bytes`.

    Args:
        config: The drafter's shape.
        manifest: Gives the optimizer, the precision and the packs per step.
        T: Context rows of a pack.
        N: Blocks of a pack.
        keys: On a CPU, the sum of the context rows and slots that each group of blocks sees; None for anchors that are
            spread evenly over one sample.
        world: Number of ranks, among which FSDP divides the weights.
        device: ``cpu`` or ``cuda``, which differ in attention, norms and head.
        head_bytes: Size of embedding and head in memory; None for a tied bf16 head.
    """
    total, _ = count_parameters(config)
    fsdp = world > 1 and manifest.run.parallel == "fsdp"
    P = total // world if fsdp else total
    e, cpu = 2 if manifest.run.precision == "bf16" else 4, device == "cpu"
    # a checkpoint is written from the existing tensors; only tensors that are divided among the ranks are copied for it
    saving = _checkpoint(total, manifest) if fsdp and cpu else 0
    activations = _activations(config, manifest, T=T, N=N, keys=keys, device=device, gradients=4 * P)
    casts = e * total if e == 2 and not fsdp else 0
    return {
        "weights": 4 * P,
        "moments": _checkpoint(P, manifest) - 4 * P,
        "head": head_bytes if head_bytes is not None else 2 * config.vocab_size * config.hidden_size,
        # a device has the pack that trains and the one before it
        "packs": _packs(config, manifest, T=T, world=world)
        if cpu
        else 2 * T * len(config.taps) * config.hidden_size * 2,
        # gradients grow while activations are freed, so the peak is before or after the backward pass, or at the save
        "activations, gradients or checkpoint": max(activations + casts, 4 * P, saving),
        "communication": _communication(config, total, e, fsdp=fsdp) if world > 1 else 0,
    }


def _activations(
    config: DrafterConfig, manifest: TrainManifest, *, T: int, N: int, keys: int | None, device: str, gradients: int
) -> int:
    """Return the bytes kept for the backward pass; ``gradients`` are those of all weights."""
    H, B, L, F = config.hidden_size, config.block_size, len(config.taps), config.intermediate_size
    A, AD, KD = config.num_heads, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    Q, cpu = N * B, device == "cpu"
    e = 2 if manifest.run.precision == "bf16" else 4
    blocks_a_group = max(1, GROUP_QUERIES // B)
    if keys is None:
        keys = T * (-(-N // blocks_a_group) + 1) // 2 + Q
    # the norms' inputs, and on a CPU also their results before the weight
    norms = 4 * (2 if cpu else 1) * (2 * Q * H + Q * AD + Q * KD + T * KD)
    # inputs of the matrix products, and of the feed-forward layer's product and SiLU
    products = e * (2 * Q * H + Q * AD + 4 * Q * F)
    # queries and output; keys and values, on a CPU repeated for every query head and group, with the group's mask
    seen = 2 * keys * AD + keys * min(Q, blocks_a_group * B) if cpu else 2 * (T + Q) * KD
    layer = norms + products + e * (2 * Q * AD + seen) + 4 * Q * A
    logits = min(chunk_rows(config.vocab_size, B - 1, device), N * (B - 1)) * config.vocab_size * 4 * 4
    ends = (8 if cpu else 4) * (T + Q) * H + 2 * 4 * Q * H + e * T * H + (0 if e == 2 else 4 * T * L * H)
    if not manifest.run.gradient_checkpointing:
        return layer * config.num_layers + logits + ends
    # when the last layer is recomputed, the gradients of all others exist, and those of its feed-forward layer
    return 4 * Q * H * config.num_layers + max(layer + 2 * e * Q * F + gradients, logits) + ends


def host_memory_bytes(config: DrafterConfig, manifest: TrainManifest, *, T: int, world: int = 1) -> dict[str, int]:
    """Return the terms of the host's peak memory if the device has its own memory.

    This is the memory of the first rank, which holds a whole checkpoint while it writes it; the others hold only packs.
    When a run is resumed, every rank maps the checkpoint's files, whose memory the system can reclaim.

    Args:
        config: The drafter's shape.
        manifest: Gives the optimizer and the packs per step.
        T: Context rows of a pack.
        world: Number of ranks.
    """
    total, _ = count_parameters(config)
    return {"packs": _packs(config, manifest, T=T, world=world), "checkpoint": _checkpoint(total, manifest)}


def _packs(config: DrafterConfig, manifest: TrainManifest, *, T: int, world: int) -> int:
    """Return the bytes of the packs of a step, the queued packs, and the ring of samples."""
    L, H = len(config.taps), config.hidden_size
    packs = -(-manifest.data.packs_per_step // world)
    return 4 * packs * T * L * H * 2 + 4 * min(T, manifest.data.max_tokens) * (L + 1) * H * 2


def _checkpoint(parameters: int, manifest: TrainManifest) -> int:
    """Return the bytes of weights and moments together."""
    return 4 * parameters * (2 if manifest.optim.name == "muon" else 3)


def _communication(config: DrafterConfig, parameters: int, e: int, *, fsdp: bool) -> int:
    """Return the bytes of DDP's buckets, or of the two layers that FSDP gathers and the one that it reduces."""
    return (2 * e + 4) * parameters // (config.num_layers + 1) if fsdp else 4 * parameters


def dry_run(manifest: TrainManifest, store_path: Path, *, device: str | None = None) -> dict[str, Any]:
    """Return what a run would need, as plain JSON; a few steps are run and their result is discarded.

    ``memory_bytes`` is the memory of one process. With CUDA it is the device's, and ``host_memory_bytes`` the host's,
    which is otherwise 0.

    Args:
        manifest: Settings of the run.
        store_path: A complete store.
        device: Such as ``cpu``; None for CUDA if there is one.
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
    cuda = world.device.type == "cuda"
    host = host_memory_bytes(trainer.config, manifest, T=T, world=world.size) if cuda else {}
    return {
        "parameters": parameters,
        "tensors": tensors,
        "train_samples": len(trainer.train),
        "validation_samples": len(trainer.held),
        "test_samples": len(trainer.test),
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
    """Return the sum of the keys that each group of blocks sees, the context rows, and the blocks."""
    groups = pack.blocks(block_size, "sdpa").groups
    keys = sum(rows.stop - rows.start + (some.stop - some.start) * block_size for some, rows in groups)
    return keys, len(pack.positions_T), len(pack.anchors_N)
