"""The folder of a training run: its files, the lock that protects it, and its records.

::

    RUN/
      manifest.json               the resolved training manifest, its store and its starting drafter; never changed
      metrics.jsonl               one line per logged step or validation
      skipped.jsonl               samples that could not be read, if any
      best.json                   the checkpoint with the best validation tau
      lock                        locked while a session trains; names the process that holds it
      staging/                    unfinished files
      checkpoints/step-000500/    see checkpoint.py
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from hscache.errors import ConflictError, IntegrityError
from hscache.store.durable import Staging, disk_errors, lock_file, replace_file
from hscache.store.layout import canonical_json

T = TypeVar("T")
_PUT_BACK = "put it back, or choose another --out"


class RunPaths:
    """Where the parts of a run are; the module's text says what each of them holds.

    Args:
        root: The run's folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifest, self.best = root / "manifest.json", root / "best.json"
        self.metrics, self.skipped = root / "metrics.jsonl", root / "skipped.jsonl"
        self.checkpoints, self.staging, self.lock = root / "checkpoints", root / "staging", root / "lock"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, ascending; copies under other names do not count."""
        numbers = (path.name.removeprefix("step-") for path in self.checkpoints.glob("step-*"))
        steps = {int(number) for number in numbers if number.isdecimal()}
        return sorted(step for step in steps if self.checkpoint(step).is_dir())

    def checkpoint(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self.checkpoints / f"step-{step:06d}"


@contextmanager
def hold_run(paths: RunPaths) -> Iterator[None]:
    """Lock a run against other sessions; the lock ends with the process, even after kill -9.

    Args:
        paths: The run; its directory is made, and removed again if no run was started in it.

    Raises:
        ConflictError: ``run-in-use``, naming the process that holds the lock.
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
                    hint="wait for it, stop it, or choose another --out",
                ) from None
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        try:
            yield
        finally:
            if not paths.manifest.exists():  # the run was refused before it started
                paths.lock.unlink(missing_ok=True)
                with suppress(OSError):
                    paths.root.rmdir() if made else None
    finally:
        os.close(fd)


def claim_run(paths: RunPaths, document: dict[str, Any]) -> dict[str, Any]:
    """Record a new run, or check that an existing one was started with the same manifest, store and starting drafter.

    Args:
        paths: The run.
        document: JSON-plain: ``manifest``, ``store``, ``hscache`` (the version, which may change), and ``start``,
            which is left out once the run has a checkpoint.

    Returns:
        The recorded document.

    Raises:
        ConflictError: ``run-other-manifest``, naming the fields that differ.
        EnvironmentFault: ``disk-full``, ``disk-error``.
        IntegrityError: ``checkpoint-damaged`` if the record is not valid.
    """
    with disk_errors(paths.root):
        paths.root.mkdir(parents=True, exist_ok=True)
        text = canonical_json(document)
        if not paths.manifest.exists():
            with Staging(paths.staging) as staging:
                replace_file(paths.manifest, text, staging.path)
            return document
    before = _record(paths.manifest, _PUT_BACK, dict[str, Any])
    now = {"start": before.get("start"), **json.loads(text), "hscache": before.get("hscache")}
    differing = list(_differences(before, now))
    if differing:
        raise ConflictError(
            "run-other-manifest",
            f"{paths.root}: this run was started with other settings: {'; '.join(differing[:5])}",
            hint="choose another --out, or use the old manifest, store and start",
        )
    return before


def recorded_precision(paths: RunPaths) -> str | None:
    """Return the recorded ``run.precision`` of a run, None if the run has not been started.

    Raises:
        IntegrityError: ``checkpoint-damaged`` if the record is not valid.
    """
    if not paths.manifest.exists():
        return None
    return _record(paths.manifest, _PUT_BACK, lambda record: str(record["manifest"]["run"]["precision"]))


def keep_best(paths: RunPaths, step: int, tau: float) -> bool:
    """Record a validation; return whether it is the best so far.

    Args:
        paths: The run.
        step: Step of the validation, which has a checkpoint.
        tau: Validation tau.

    Raises:
        EnvironmentFault: ``disk-full``, ``disk-error``.
        IntegrityError: ``checkpoint-damaged`` if ``best.json`` is not valid.
    """
    best = read_best(paths)
    if best is not None and best[1] >= tau:
        return False
    with disk_errors(paths.root), Staging(paths.staging) as staging:
        replace_file(paths.best, canonical_json({"step": step, "tau": tau}), staging.path)
    return True


def drop_old(paths: RunPaths, keep: int) -> None:
    """Remove all checkpoints except the newest ``keep`` and the best one, which must have been recorded before.

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
    """Remove the lines of a JSONL file that belong to later steps, which will be written again.

    Args:
        paths: The run.
        path: The file; it is replaced as a whole, and only if a line must be removed.
        step: The last step whose lines are kept.

    Raises:
        EnvironmentFault: ``disk-full``, ``disk-error``; the file is then unchanged.
        IntegrityError: ``checkpoint-damaged``.
    """
    if not path.exists():
        return
    kept = b"".join(line for line, record in read_lines(path) if record["step"] <= step)
    if len(kept) != path.stat().st_size:
        with disk_errors(paths.root), Staging(paths.staging) as staging:
            replace_file(path, kept, staging.path)


def read_lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Return the lines of ``metrics.jsonl`` or ``skipped.jsonl``: the bytes of each, and its record.

    An unfinished last line, which a killed or running process may leave, is left out.

    Raises:
        IntegrityError: ``checkpoint-damaged`` if a line is not a valid record.
    """
    found = []
    # not str.splitlines, which also splits at other characters, and text may contain them
    for n, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            record = json.loads(line)
            int(record["step"])
        except (ValueError, KeyError, TypeError) as error:
            raise IntegrityError(
                "checkpoint-damaged", f"{path}: line {n} is not the record of a step: {error}", hint="remove that line"
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
    """Return step and tau of the best recorded checkpoint, or None.

    Raises:
        IntegrityError: ``checkpoint-damaged``.
    """
    if not paths.best.exists():
        return None
    hint = "remove it: until the next validation, the newest checkpoint counts as the best one"
    return _record(paths.best, hint, lambda best: (int(best["step"]), float(best["tau"])))


def _record(path: Path, hint: str, read: Callable[[dict[str, Any]], T]) -> T:
    """Return what ``read`` finds in a JSON object that a run keeps about itself."""
    try:
        record = json.loads(path.read_bytes())
        if not isinstance(record, dict):
            raise TypeError("expected a JSON object")
        return read(record)
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError("checkpoint-damaged", f"{path}: not a record of a run: {error!r}", hint=hint) from error


def _differences(before: Any, now: Any, where: str = "") -> Iterable[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            yield from _differences(before.get(key), now.get(key), f"{where}.{key}" if where else key)
    elif before != now:
        yield f"{where} was {before!r}, is {now!r}"
