"""Checkpoints of a run: whole or absent, without pickle, and enough to go on bit by bit.

::

    RUN/
      manifest.json               the resolved training manifest, its store and what it began from; never changed
      metrics.jsonl               one line a logged step or validation
      skipped.jsonl               samples that could not be read, if any
      best.json                   the checkpoint with the best validation tau
      checkpoints/step-000500/
        drafter.safetensors       float32 weights, named as the serving engines name them
        drafter.json              shape of the drafter, provenance
        optimizer.safetensors     moments by parameter name
        state.json                step and counters, digests of the other files, and one of itself

A checkpoint is written beside its place, synced and renamed. Order, anchors and noise are functions of the seed and
the step, so no random state is kept.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from hscache.errors import ConflictError, InputError, IntegrityError
from hscache.store.durable import Staging, disk_errors, publish_directory, replace_file, write_file
from hscache.store.index import read_shard
from hscache.store.layout import StorePaths, canonical_json, json_digest
from hscache.store.reader import Store
from trainer.drafter import Drafter, DrafterConfig

_WEIGHTS, _SHAPE, _OPTIMIZER, _STATE = "drafter.safetensors", "drafter.json", "optimizer.safetensors", "state.json"


@dataclass(frozen=True)
class RunPaths:
    """Where the parts of a run lie."""

    root: Path

    @property
    def manifest(self) -> Path:
        """Resolved manifest and store."""
        return self.root / "manifest.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a line."""
        return self.root / "metrics.jsonl"

    @property
    def skipped(self) -> Path:
        """Samples that could not be read."""
        return self.root / "skipped.jsonl"

    @property
    def best(self) -> Path:
        """Names the best checkpoint."""
        return self.root / "best.json"

    @property
    def checkpoints(self) -> Path:
        """All checkpoints."""
        return self.root / "checkpoints"

    @property
    def staging(self) -> Path:
        """Work in progress."""
        return self.root / "staging"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, ascending."""
        return sorted(int(path.name.removeprefix("step-")) for path in self.checkpoints.glob("step-*"))

    def checkpoint(self, step: int) -> Path:
        """Folder of a step's checkpoint."""
        return self.checkpoints / f"step-{step:06d}"


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


def claim_run(paths: RunPaths, document: dict[str, Any]) -> dict[str, Any]:
    """Begin a run, or take up one that was begun with the same manifest, store and start.

    Args:
        paths: The run.
        document: JSON-plain; ``manifest``, ``store``, and ``start`` unless a checkpoint has made that history.

    Returns:
        The document on record.

    Raises:
        ConflictError: ``run-other-manifest``, naming the fields that differ.
    """
    with disk_errors(paths.root):
        paths.root.mkdir(parents=True, exist_ok=True)
        text = canonical_json(document)
        if not paths.manifest.exists():
            with Staging(paths.staging) as staging:
                replace_file(paths.manifest, text, staging.path)
            return document
    before: dict[str, Any] = json.loads(paths.manifest.read_bytes())
    now = {"start": before.get("start"), **json.loads(text)}
    differing = list(_differences(before, now))
    if differing:
        raise ConflictError(
            "run-other-manifest",
            f"{paths.root}: this run was begun otherwise: {'; '.join(differing[:5])}",
            hint="take another --out, or the old manifest, store and start",
        )
    return before


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
        weights: State of the drafter, on the CPU.
        config: Its shape.
        provenance: JSON-plain; goes into ``drafter.json``.
        optimizer: Tensors by "name of parameter/name of moment".
        state: JSON-plain counters.

    Raises:
        EnvironmentFault: ``disk-full``, ``disk-error``.
    """
    from safetensors.torch import save

    destination = paths.checkpoint(step)
    with disk_errors(paths.root), Staging(paths.staging) as staging:
        folder = staging.path / "checkpoint"
        folder.mkdir()
        shape = {"drafter": asdict(config), "provenance": provenance, "step": step}
        files = {_WEIGHTS: save(weights), _OPTIMIZER: save(optimizer), _SHAPE: canonical_json(shape)}
        digests = {name: xxhash.xxh3_128_hexdigest(data) for name, data in files.items()}
        body = {**state, "step": step, "files": digests}
        files[_STATE] = canonical_json({**body, "digest": json_digest(body)})
        for name, data in files.items():
            write_file(folder / name, data)
        publish_directory(folder, destination)
    return destination


def load_state(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Return weights, optimizer tensors and counters of a checkpoint, compared with their digests.

    Raises:
        IntegrityError: ``checkpoint-damaged``.
    """
    from safetensors.torch import load

    data = _read(folder, (_WEIGHTS, _OPTIMIZER, _SHAPE))
    return load(data[_WEIGHTS]), load(data[_OPTIMIZER]), json.loads(data[_STATE])


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
    from safetensors.torch import load

    folder = _resolve(path)
    data = _read(folder, (_WEIGHTS, _SHAPE))  # without the moments, which are twice as large
    try:
        facts = json.loads(data[_SHAPE])
        with torch.device("meta"):
            drafter = Drafter(_config(facts["drafter"]))
        drafter.load_state_dict(load(data[_WEIGHTS]), assign=True)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise _damaged(folder, str(error)) from error
    return drafter, {**facts, "path": str(folder)}


def keep_best(paths: RunPaths, step: int, tau: float) -> bool:
    """Record a validation; return whether it is the best so far.

    Args:
        paths: The run.
        step: Its step, which has a checkpoint.
        tau: Validation tau.
    """
    best = json.loads(paths.best.read_bytes()) if paths.best.exists() else None
    if best is not None and best["tau"] >= tau:
        return False
    with disk_errors(paths.root), Staging(paths.staging) as staging:
        replace_file(paths.best, canonical_json({"step": step, "tau": tau}), staging.path)
    return True


def drop_old(paths: RunPaths, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints and the best one."""
    best = {json.loads(paths.best.read_bytes())["step"]} if paths.best.exists() else set()
    for step in paths.steps()[:-keep]:
        if step not in best:
            shutil.rmtree(paths.checkpoint(step))


def forget_after(path: Path, step: int) -> None:
    """Drop the lines of a JSONL file that lie behind a step: they will be written again."""
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        # a kill may have cut the last line
        whole = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        path.write_text("".join(whole), encoding="utf-8")


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append a JSON object as one line."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _read(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Return files of a checkpoint by name, and ``state.json``, compared with their digests."""
    try:
        data = {name: (folder / name).read_bytes() for name in (_STATE, *names)}
        state = json.loads(data[_STATE])
        digest, wanted = state.pop("digest"), {name: state["files"][name] for name in names}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(folder, str(error)) from error
    if json_digest(state) != digest:
        raise _damaged(folder, f"{_STATE} differs from its digest")
    for name in names:
        if xxhash.xxh3_128_hexdigest(data[name]) != wanted[name]:
            raise _damaged(folder, f"{name} differs from its digest")
    return data


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
    if run.best.exists() and (step := json.loads(run.best.read_bytes())["step"]) in steps:
        return run.checkpoint(step)
    return run.checkpoint(steps[-1])


def _differences(before: Any, now: Any, where: str = "") -> Iterable[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            yield from _differences(before.get(key), now.get(key), f"{where}.{key}" if where else key)
    elif before != now:
        yield f"{where} was {before!r}, is {now!r}"


def _damaged(folder: Path, what: str) -> IntegrityError:
    return IntegrityError(
        "checkpoint-damaged", f"{folder}: {what}", hint="remove this checkpoint; the one before it is used then"
    )
