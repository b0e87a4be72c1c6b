"""Expensive things that are made once in a run of the tests, however many worker processes it has."""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], T]) -> T:
    """Return what ``make`` gives: the first worker that needs it calls it, and the others wait and read the result.

    Args:
        factory: Gives the temporary folder of the run.
        name: Key of the result, and name of its folder.
        make: Gets a new, empty folder; its result must be picklable. Tests must not change what it made.
    """
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # the folder of all workers
    folder, result = root / name, root / f"{name}.pickle"
    with open(root / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            shutil.rmtree(folder, ignore_errors=True)  # left by a worker that failed
            folder.mkdir()
            result.write_bytes(pickle.dumps(make(folder)))
        found: Any = pickle.loads(result.read_bytes())
        return found  # type: ignore[no-any-return]
