"""kill -9 at random moments: after a resume nothing is lost, wrong or left over."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from hscache.store.index import committed_shards
from hscache.verify import verify
from tests.test_build import COMMAND, contents, manifest_file, reference, short_corpus  # noqa: F401  (fixtures)

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


pytestmark = pytest.mark.usefixtures("smollm2")


def build_args(manifest: Path, store: Path) -> list[str]:
    return [*COMMAND, "build", str(manifest), "--out", str(store)]


def kill_at(seconds: float, manifest: Path, store: Path) -> bool:
    """Start a build and kill it after a time; return whether it was still running."""
    process = subprocess.Popen(build_args(manifest, store), stderr=subprocess.DEVNULL, env=ENV)
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
        return True
    return False


def check_resume(manifest: Path, store: Path, reference: Path) -> None:
    done = subprocess.run(build_args(manifest, store), capture_output=True, text=True, env=ENV)
    assert done.returncode == 0, done.stderr
    assert contents(store) == contents(reference)
    assert list((store / "staging").iterdir()) == []
    report = verify(store)
    assert report.ok, report.findings
    assert report.samples == 24


def run_time(manifest: Path, store: Path) -> float:
    started = time.monotonic()
    subprocess.run(build_args(manifest, store), check=True, capture_output=True, env=ENV)
    return time.monotonic() - started


def kill_and_resume(n_kills: int, manifest: Path, reference: Path, tmp_path: Path, seed: int) -> None:
    whole = run_time(manifest, tmp_path / "whole")
    moments, killed_inside = random.Random(seed), 0
    for kill in range(n_kills):
        store = tmp_path / f"store-{kill}"
        # from the first import to past the end, so that start-up, every shard and the index are hit
        if kill_at(moments.uniform(0.1, 1.05) * whole, manifest, store):
            done = len(committed_shards(store)) if store.exists() else 0
            killed_inside += done > 0
            print(f"kill {kill}: {done} shards were committed")
        check_resume(manifest, store, reference)
    assert killed_inside, "no kill fell between two commits: the test saw nothing"


def test_builds_killed_at_random_moments_resume_to_the_same_store(
    manifest_file: Path,
    reference: Path,
    tmp_path: Path,
) -> None:
    kill_and_resume(3, manifest_file, reference, tmp_path, seed=3)


@pytest.mark.crash
def test_twenty_kills(manifest_file: Path, reference: Path, tmp_path: Path) -> None:
    kill_and_resume(20, manifest_file, reference, tmp_path, seed=20)
