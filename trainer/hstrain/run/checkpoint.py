"""Checkpoints of a run: complete or absent, without pickle, and sufficient to continue bit by bit.

::

    RUN/checkpoints/step-000500/
      drafter.safetensors       float32 weights, named as the serving engines name them
      drafter.json              shape of the drafter and provenance
      optimizer.safetensors     moments by parameter name
      state.json                step and counters, digests of the other files and of itself

A checkpoint is written to a staging folder, synced and renamed. Order, anchors and noise are functions of the seed and
the step, so no random state is kept. Tensors are written and read without a second copy in memory: a checkpoint is
three times as large as the weights.
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
    """Return what a run records of its store, so that a reader can see later what a drafter was trained on."""
    shard = read_shard(StorePaths(store.path).shard(0))
    manifest = store.manifest["manifest"]
    target = json.loads((StorePaths(store.path).target / "target.json").read_bytes())
    # left out if it changes nothing, so that runs from before this field existed can continue
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
    """Return a digest of the names, types and values of weights on the CPU; it does not depend on their files."""
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
    """Write a checkpoint, unless the step has one.

    Args:
        paths: The run.
        step: Number of steps done.
        weights: Weights of the drafter by name, on the CPU, contiguous.
        config: Shape of the drafter.
        provenance: JSON-plain; written to ``drafter.json``.
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
        OSError: The file system's error.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with open(path, "xb") as file:
        mode = os.fstat(file.fileno()).st_mode
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        if (reason := re.search(r"os error (\d+)", str(error))) is None:  # the number is only in the text
            raise
        raise OSError(int(reason[1]), os.strerror(int(reason[1])), str(path)) from error
    with open(path, "rb") as file:
        os.fchmod(file.fileno(), mode)  # safetensors makes files that other users cannot read
        os.fsync(file.fileno())
    return _digest(path)


def newest_checkpoint(paths: RunPaths) -> tuple[int, str] | None:
    """Return step and digest of a run's newest checkpoint; None if the run has no checkpoint.

    Raises:
        IntegrityError: ``checkpoint-damaged``.
    """
    steps = paths.steps()
    return (steps[-1], state_digest(paths.checkpoint(steps[-1]))) if steps else None


def state_digest(folder: Path) -> str:
    """Return a checkpoint's own digest, which covers its counters and the digests of its files.

    Raises:
        IntegrityError: ``checkpoint-damaged``.
    """
    _, digest, _ = _read_state(folder)
    return digest


def load_state(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Return weights, optimizer tensors and counters of a checkpoint after comparing them with their digests.

    The tensors are views of the mapped files: copy those that you keep.

    Raises:
        IntegrityError: ``checkpoint-damaged``.
    """
    state = _checked(folder, (_WEIGHTS, _OPTIMIZER, _SHAPE))
    return _tensors(folder, _WEIGHTS), _tensors(folder, _OPTIMIZER), state


def load_drafter(path: Path) -> tuple[Drafter, dict[str, Any]]:
    """Load a trained drafter in float32.

    Args:
        path: Folder of a checkpoint, or of a run: then its best checkpoint, or the last one if none was validated.

    Returns:
        The drafter, and the content of ``drafter.json`` with the ``path`` of the checkpoint.

    Raises:
        InputError: ``not-a-checkpoint``.
        IntegrityError: ``checkpoint-damaged``.
    """
    folder = _resolve(path)
    _checked(folder, (_WEIGHTS, _SHAPE))  # not the moments, which are twice as large
    try:
        facts = json.loads((folder / _SHAPE).read_bytes())
        with torch.device("meta"):
            drafter = Drafter(_config(facts["drafter"]))
        # copied out of the mapped file: a run that is still training may remove the checkpoint
        weights = {name: tensor.clone() for name, tensor in _tensors(folder, _WEIGHTS).items()}
        drafter.load_state_dict(weights, assign=True)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise _damaged(folder, str(error)) from error
    return drafter, {**facts, "path": str(folder)}


def _checked(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """Compare files of a checkpoint with their digests and return its counters."""
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
    """Return from ``state.json`` the counters, its own digest, and the digests of the files."""
    try:
        state = json.loads((folder / _STATE).read_bytes())
        digest, files = state.pop("digest"), dict(state["files"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(folder, str(error)) from error
    if json_digest(state) != digest:
        raise _damaged(folder, f"{_STATE} differs from its digest")
    return state, digest, files


def _digest(path: Path) -> str:
    """Return the digest of a file, read in parts."""
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
            "not-a-checkpoint", f"{path}: neither a checkpoint nor a run that has one", hint="hstrain fit writes them"
        )
    best = read_best(run)
    return run.checkpoint(best[0] if best is not None and best[0] in steps else steps[-1])


def _damaged(folder: Path, what: str) -> IntegrityError:
    return IntegrityError(
        "checkpoint-damaged",
        f"{folder}: {what}",
        hint="remove this checkpoint; the run then continues from the newest one that is left",
    )
