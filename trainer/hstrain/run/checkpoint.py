"""Checkpoints of a run: whole or absent, without pickle, and enough to go on bit by bit.

::

    RUN/checkpoints/step-000500/
      drafter.safetensors       float32 weights, named as the serving engines name them
      drafter.json              shape of the drafter, provenance
      optimizer.safetensors     moments by parameter name
      state.json                step and counters, digests of the other files, and one of itself

A checkpoint is written beside its place, synced and renamed. Order, anchors and noise are functions of the seed and
the step, so no random state is kept. Tensors go to their file, and come back from it, without a second copy of them in
memory: a checkpoint is three times as large as the weights that it is made of.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from hscache.errors import InputError, IntegrityError
from hscache.store.durable import Staging, disk_errors, publish_directory, write_file
from hscache.store.index import read_shard
from hscache.store.layout import StorePaths, canonical_json, json_digest
from hscache.store.reader import Store
from hstrain.drafter.model import Drafter, DrafterConfig
from hstrain.run.folder import RunPaths, read_best

_WEIGHTS, _SHAPE, _OPTIMIZER, _STATE = "drafter.safetensors", "drafter.json", "optimizer.safetensors", "state.json"
_READ_BYTES = 1 << 24


def store_facts(store: Store) -> dict[str, Any]:
    """Return what a run records of its store: enough to tell later what a drafter was trained on."""
    shard = read_shard(StorePaths(store.path).shard(0))
    manifest, target = (
        store.manifest["manifest"],
        json.loads((StorePaths(store.path).target / "target.json").read_bytes()),
    )
    # left out where it changes nothing: runs begun before it was known go on
    scale = target.get("embed_scale") or 1.0
    return {
        **({} if scale == 1.0 else {"embed_scale": scale}),
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


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """Return a digest of names, types and values; the same for a drafter in whatever files it lies.

    Args:
        weights: On the CPU.
    """
    digest = xxhash.xxh3_128()
    for name in sorted(weights):
        tensor = weights[name].detach().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save_checkpoint(
    paths: RunPaths,
    step: int,
    weights: dict[str, Tensor],
    config: DrafterConfig,
    provenance: dict[str, Any],
    optimizer: dict[str, Tensor],
    state: dict[str, Any],
) -> Path:
    """Write a checkpoint; one that exists for the step is kept as it is.

    Args:
        paths: The run.
        step: Steps done.
        weights: State of the drafter, on the CPU, contiguous.
        config: Its shape.
        provenance: JSON-plain; goes into ``drafter.json``.
        optimizer: Tensors by "name of parameter/name of moment".
        state: JSON-plain counters.

    Raises:
        EnvironmentFault: ``disk-full``, ``disk-error``.
    """
    destination = paths.checkpoint(step)
    if destination.exists():
        return destination
    with disk_errors(paths.root), Staging(paths.staging) as staging:
        folder = staging.path / "checkpoint"
        folder.mkdir()
        shape = canonical_json({"drafter": asdict(config), "provenance": provenance, "step": step})
        digests = {
            _WEIGHTS: write_tensors(folder / _WEIGHTS, weights),
            _OPTIMIZER: write_tensors(folder / _OPTIMIZER, optimizer),
            _SHAPE: xxhash.xxh3_128_hexdigest(shape),
        }
        body = {**state, "step": step, "files": digests}
        write_file(folder / _SHAPE, shape)
        write_file(folder / _STATE, canonical_json({**body, "digest": json_digest(body)}))
        publish_directory(folder, destination)
    return destination


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write a new safetensors file, sync it, and return its digest. The caller syncs the directory.

    Args:
        path: The file.
        tensors: On the CPU, contiguous; they are not copied.

    Raises:
        OSError: As the file system gave it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with open(path, "xb") as file:
        mode = os.fstat(file.fileno()).st_mode
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        if (reason := re.search(r"os error (\d+)", str(error))) is None:  # its text is all that it keeps of it
            raise
        raise OSError(int(reason[1]), os.strerror(int(reason[1])), str(path)) from error
    with open(path, "rb") as file:
        os.fchmod(file.fileno(), mode)  # safetensors lets nobody else read its files, other users' evaluations included
        os.fsync(file.fileno())
    return _digest(path)


def newest_checkpoint(paths: RunPaths) -> tuple[int, str] | None:
    """Return step and digest of a run's newest checkpoint; None for a run without one.

    Raises:
        IntegrityError: ``checkpoint-damaged``.
    """
    steps = paths.steps()
    return (steps[-1], state_digest(paths.checkpoint(steps[-1]))) if steps else None


def state_digest(folder: Path) -> str:
    """Return the digest that a checkpoint gives of itself: of its counters and of the digests of its files.

    Raises:
        IntegrityError: ``checkpoint-damaged``.
    """
    _, digest, _ = _read_state(folder)
    return digest


def load_state(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Return weights, optimizer tensors and counters of a checkpoint, compared with their digests.

    The tensors lie in the mapped files: copy one to keep it.

    Raises:
        IntegrityError: ``checkpoint-damaged``.
    """
    state = _checked(folder, (_WEIGHTS, _OPTIMIZER, _SHAPE))
    return _tensors(folder, _WEIGHTS), _tensors(folder, _OPTIMIZER), state


def load_drafter(path: Path) -> tuple[Drafter, dict[str, Any]]:
    """Load a trained drafter in float32.

    Args:
        path: A checkpoint's folder; or a run's, for its best checkpoint, or its last when none was validated.

    Returns:
        The drafter, and ``drafter.json``.

    Raises:
        InputError: ``not-a-checkpoint``.
        IntegrityError: ``checkpoint-damaged``.
    """
    folder = _resolve(path)
    _checked(folder, (_WEIGHTS, _SHAPE))  # without the moments, which are twice as large
    try:
        facts = json.loads((folder / _SHAPE).read_bytes())
        with torch.device("meta"):
            drafter = Drafter(_config(facts["drafter"]))
        # copied out of the mapped file, which a run that goes on may remove
        weights = {name: tensor.clone() for name, tensor in _tensors(folder, _WEIGHTS).items()}
        drafter.load_state_dict(weights, assign=True)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise _damaged(folder, str(error)) from error
    return drafter, {**facts, "path": str(folder)}


def _checked(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """Return the counters of a checkpoint whose files have been compared with their digests."""
    state, _, wanted = _read_state(folder)
    for name in names:
        try:
            same = _digest(folder / name) == wanted[name]
        except (OSError, KeyError) as error:
            raise _damaged(folder, str(error)) from error
        if not same:
            raise _damaged(folder, f"{name} differs from its digest")
    return state


def _read_state(folder: Path) -> tuple[dict[str, Any], str, dict[str, str]]:
    """Return counters, the digest over them and those of the files, from a ``state.json`` that has its own digest."""
    try:
        state = json.loads((folder / _STATE).read_bytes())
        digest, files = state.pop("digest"), dict(state["files"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(folder, str(error)) from error
    if json_digest(state) != digest:
        raise _damaged(folder, f"{_STATE} differs from its digest")
    return state, digest, files


def _digest(path: Path) -> str:
    """Return the digest of a file that need not fit into memory."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
    return digest.hexdigest()


def _tensors(folder: Path, name: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = load_file(folder / name)
    return tensors


def _config(shape: dict[str, Any]) -> DrafterConfig:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in shape.items()}
    return DrafterConfig(**fields)


def _resolve(path: Path) -> Path:
    run = RunPaths(path)
    if (path / _STATE).exists():
        return path
    steps = run.steps()
    if not steps:
        raise InputError(
            "not-a-checkpoint", f"{path}: neither a checkpoint nor a run with one", hint="hstrain fit writes them"
        )
    best = read_best(run)
    return run.checkpoint(best[0] if best is not None and best[0] in steps else steps[-1])


def _damaged(folder: Path, what: str) -> IntegrityError:
    return IntegrityError(
        "checkpoint-damaged",
        f"{folder}: {what}",
        hint="remove this checkpoint; the newest one that its run still has is used then",
    )
