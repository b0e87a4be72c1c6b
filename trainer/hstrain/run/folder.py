"""The folder of a training run: what lies in it, who may write there, and its records.

::

    RUN/
      manifest.json               the resolved training manifest, its store and what it began from; never changed
      metrics.jsonl               one line a logged step or validation
      skipped.jsonl               samples that could not be read, if any
      best.json                   the checkpoint with the best validation tau
      lock                        held while a session trains, and who holds it
      checkpoints/step-000500/    see checkpoint.py
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hscache.errors import ConflictError, IntegrityError
from hscache.store.durable import Staging, disk_errors, lock_file, replace_file
from hscache.store.layout import canonical_json


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
        """Return the steps that have a checkpoint, ascending; a copy under another name does not count."""
        numbers = (path.name.removeprefix("step-") for path in self.checkpoints.glob("step-*"))
        steps = {int(number) for number in numbers if number.isdecimal()}
        return sorted(step for step in steps if self.checkpoint(step).is_dir())

    def checkpoint(self, step: int) -> Path:
        """Folder of a step's checkpoint."""
        return self.checkpoints / f"step-{step:06d}"


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
                lock_file(fd, paths.root)
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
            if not paths.manifest.exists():  # refused before it was begun: remove what was made
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
        IntegrityError: ``checkpoint-damaged`` for a record that is not valid.
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


def recorded_precision(paths: RunPaths) -> str | None:
    """Return ``run.precision`` of a run that was begun, None before.

    Raises:
        IntegrityError: ``checkpoint-damaged`` for a record that is not valid.
    """
    if not paths.manifest.exists():
        return None
    hint = "put it back, or take another --out"
    try:
        return str(_record(paths.manifest, hint)["manifest"]["run"]["precision"])
    except (KeyError, TypeError) as error:
        raise IntegrityError("checkpoint-damaged", f"{paths.manifest}: {error!r}", hint=hint) from error


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
    best = read_best(paths)
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
    best = read_best(paths)
    for step in paths.steps()[:-keep]:
        if best is None or step != best[0]:
            with disk_errors(paths.root):
                shutil.rmtree(paths.checkpoint(step))


def forget_after(paths: RunPaths, path: Path, step: int) -> None:
    """Drop the lines of a JSONL file that come after a step: they will be written again.

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
        IntegrityError: ``checkpoint-damaged`` for a line that is not a valid record.
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


def read_best(paths: RunPaths) -> tuple[int, float] | None:
    """Return step and tau of the best checkpoint on record, or None.

    Raises:
        IntegrityError: ``checkpoint-damaged``.
    """
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


def _differences(before: Any, now: Any, where: str = "") -> Iterable[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            yield from _differences(before.get(key), now.get(key), f"{where}.{key}" if where else key)
    elif before != now:
        yield f"{where} was {before!r}, is {now!r}"
