"""Checkpoints of a run: whole or absent, without pickle, and enough to go on bit by bit.

::

    RUN/
      manifest.json               the resolved training manifest, its store and what it began from; never changed
      metrics.jsonl               one line a logged step or validation
      skipped.jsonl               samples that could not be read, if any
      best.json                   the checkpoint with the best validation tau
      lock                        held while a session trains, and who holds it
      checkpoints/step-000500/
        drafter.safetensors       float32 weights, named as the serving engines name them
        drafter.json              shape of the drafter, provenance
        optimizer.safetensors     moments by parameter name
        state.json                step and counters, digests of the other files, and one of itself

A checkpoint is written beside its place, synced and renamed. Order, anchors and noise are functions of the seed and
the step, so no random state is kept. Tensors go to their file, and come back from it, without a second copy of them in
memory: a checkpoint is three times as large as the weights that it is made of.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
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
_READ_BYTES = 1 << 24


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

    @property
    def lock(self) -> Path:
        """Locked while a session trains."""
        return self.root / "lock"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, ascending; a copy under another name is none."""
        numbers = (path.name.removeprefix("step-") for path in self.checkpoints.glob("step-*"))
        steps = {int(number) for number in numbers if number.isdecimal()}
        return sorted(step for step in steps if self.checkpoint(step).is_dir())

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


@contextmanager
def hold_run(paths: RunPaths) -> Iterator[None]:
    """Keep other sessions out of a run; the kernel lets go of it with the process, kill -9 included.

    Args:
        paths: The run; its directory is made, and goes again unless a run was begun in it.

    Raises:
        ConflictError: ``run-in-use``, naming the process that holds it.
        EnvironmentFault: ``disk-full``, ``disk-error``.
    """
    with disk_errors(paths.root):
        made = not paths.root.exists()
        paths.root.mkdir(parents=True, exist_ok=True)
        fd = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        with disk_errors(paths.root):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConflictError(
                    "run-in-use",
                    f"{paths.root}: {os.pread(fd, 256, 0).decode(errors='replace').strip() or 'another process'} "
                    "trains here",
                    hint="wait for it or stop it, or take another --out",
                ) from None
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        try:
            yield
        finally:
            if not paths.manifest.exists():  # refused before it was begun: nothing stays behind
                paths.lock.unlink(missing_ok=True)
                with suppress(OSError):
                    paths.root.rmdir() if made else None
    finally:
        os.close(fd)


def claim_run(paths: RunPaths, document: dict[str, Any]) -> dict[str, Any]:
    """Begin a run, or take up one that was begun with the same manifest, store and start.

    Args:
        paths: The run.
        document: JSON-plain; ``manifest``, ``store``, and ``start`` unless a checkpoint has made that history; and
            ``hscache``, the version that began it, which another one may take up.

    Returns:
        The document on record.

    Raises:
        ConflictError: ``run-other-manifest``, naming the fields that differ.
        EnvironmentFault: ``disk-full``, ``disk-error``.
        IntegrityError: ``checkpoint-damaged`` for a record that is none.
    """
    with disk_errors(paths.root):
        paths.root.mkdir(parents=True, exist_ok=True)
        text = canonical_json(document)
        if not paths.manifest.exists():
            with Staging(paths.staging) as staging:
                replace_file(paths.manifest, text, staging.path)
            return document
    before = _record(paths.manifest, "put it back, or take another --out")
    now = {"start": before.get("start"), **json.loads(text), "hscache": before.get("hscache")}
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

    The tensors lie in the mapped files: whoever keeps one copies it.

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


def keep_best(paths: RunPaths, step: int, tau: float) -> bool:
    """Record a validation; return whether it is the best so far.

    Args:
        paths: The run.
        step: Its step, which has a checkpoint.
        tau: Validation tau.

    Raises:
        EnvironmentFault: ``disk-full``, ``disk-error``.
        IntegrityError: ``checkpoint-damaged`` for a ``best.json`` that says nothing.
    """
    best = _best(paths)
    if best is not None and best[1] >= tau:
        return False
    with disk_errors(paths.root), Staging(paths.staging) as staging:
        replace_file(paths.best, canonical_json({"step": step, "tau": tau}), staging.path)
    return True


def drop_old(paths: RunPaths, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints and the best one, which has to be on record by now.

    Raises:
        EnvironmentFault: ``disk-error``.
        IntegrityError: ``checkpoint-damaged``, as :func:`keep_best`.
    """
    best = _best(paths)
    for step in paths.steps()[:-keep]:
        if best is None or step != best[0]:
            with disk_errors(paths.root):
                shutil.rmtree(paths.checkpoint(step))


def forget_after(paths: RunPaths, path: Path, step: int) -> None:
    """Drop the lines of a JSONL file that lie behind a step: they will be written again.

    Args:
        paths: The run.
        path: The file; it is left alone unless a line must go, and replaced as a whole then.
        step: The last one that stays.

    Raises:
        EnvironmentFault: ``disk-full``, ``disk-error``; the file is then as it was.
        IntegrityError: ``checkpoint-damaged``.
    """
    if not path.exists():
        return
    kept = b"".join(line for line, record in read_lines(path) if record["step"] <= step)
    if len(kept) != path.stat().st_size:
        with disk_errors(paths.root), Staging(paths.staging) as staging:
            replace_file(path, kept, staging.path)


def read_lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Return the lines of ``metrics.jsonl`` or ``skipped.jsonl``: bytes with their end, and what they say.

    A last line that is not finished, as a kill or a run that goes on may leave it, is left out.

    Raises:
        IntegrityError: ``checkpoint-damaged`` for a line that is none of ours.
    """
    found = []
    # at line feeds alone: text may hold other characters that str.splitlines takes for a line's end
    for n, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            record = json.loads(line)
            int(record["step"])
        except (ValueError, KeyError, TypeError) as error:
            raise IntegrityError(
                "checkpoint-damaged", f"{path}: line {n} is no record of a step: {error}", hint="remove that line"
            ) from error
        found.append((line + b"\n", record))
    return found


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append a JSON object as one line.

    Raises:
        EnvironmentFault: ``disk-full``, ``disk-error``.
    """
    with disk_errors(path.parent), open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")


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


def _best(paths: RunPaths) -> tuple[int, float] | None:
    """Return step and tau of the best checkpoint on record."""
    if not paths.best.exists():
        return None
    hint = "remove it: the newest checkpoint is taken for the best one until a validation is better"
    best = _record(paths.best, hint)
    try:
        return int(best["step"]), float(best["tau"])
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError("checkpoint-damaged", f"{paths.best}: {error!r}", hint=hint) from error


def _record(path: Path, hint: str) -> dict[str, Any]:
    """Return a JSON object that a run keeps about itself."""
    try:
        record = json.loads(path.read_bytes())
    except ValueError as error:
        raise IntegrityError("checkpoint-damaged", f"{path}: {error}", hint=hint) from error
    if not isinstance(record, dict):
        raise IntegrityError("checkpoint-damaged", f"{path}: not a record of a run", hint=hint)
    return record


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
    best = _best(run)
    return run.checkpoint(best[0] if best is not None and best[0] in steps else steps[-1])


def _differences(before: Any, now: Any, where: str = "") -> Iterable[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            yield from _differences(before.get(key), now.get(key), f"{where}.{key}" if where else key)
    elif before != now:
        yield f"{where} was {before!r}, is {now!r}"


def _damaged(folder: Path, what: str) -> IntegrityError:
    return IntegrityError(
        "checkpoint-damaged",
        f"{folder}: {what}",
        hint="remove this checkpoint; the newest one that its run still has is used then",
    )
