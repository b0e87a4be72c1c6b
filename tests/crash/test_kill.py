"""kill -9 at random moments: after a resume nothing is lost, wrong or left over."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from faults import contents

from hscache.audit.verify import verify
from hscache.store.index import committed_shards
from tests.build.test_build import COMMAND, manifest_file, reference, short_corpus  # noqa: F401  (fixtures)

pytestmark = pytest.mark.usefixtures("smollm2")


def build_args(manifest: Path, store: Path) -> list[str]:
    return [*COMMAND, "build", str(manifest), "--out", str(store)]


def kill_after(shards: int, seconds: float, manifest: Path, store: Path) -> int | None:
    """Start a build and kill it some time after its n-th commit; return the shards there, None if it was faster."""
    process = subprocess.Popen(build_args(manifest, store), stderr=subprocess.DEVNULL)
    while process.poll() is None and len(committed_shards(store)) < shards:
        time.sleep(0.002)
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
        return len(committed_shards(store))
    return None


def check_resume(manifest: Path, store: Path, reference: Path) -> None:
    done = subprocess.run(build_args(manifest, store), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert contents(store) == contents(reference)
    assert list((store / "staging").iterdir()) == []
    report = verify(store)
    assert report.ok, report.findings
    assert report.samples == 24


def kill_and_resume(n_kills: int, manifest: Path, reference: Path, tmp_path: Path, seed: int) -> None:
    """Kill at random moments: after a random commit (0: before the first, in the start-up too) and a random while."""
    moments, total, killed = random.Random(seed), len(committed_shards(reference)), []
    for kill in range(n_kills):
        store = tmp_path / f"store-{kill}"
        after = moments.randrange(total)
        done = kill_after(after, moments.uniform(0, 0.4 if after else 6.0), manifest, store)
        print(f"kill {kill}: {'too late' if done is None else f'{done} of {total} shards were committed'}")
        killed += [] if done is None else [done]
        check_resume(manifest, store, reference)
    assert any(0 < done < total for done in killed), "no kill fell between two commits: the test saw nothing"


@pytest.mark.thorough
def test_builds_killed_at_random_moments_resume_to_the_same_store(
    manifest_file: Path,
    reference: Path,
    tmp_path: Path,
) -> None:
    kill_and_resume(3, manifest_file, reference, tmp_path, seed=3)


@pytest.mark.crash
def test_twenty_kills(manifest_file: Path, reference: Path, tmp_path: Path) -> None:
    kill_and_resume(20, manifest_file, reference, tmp_path, seed=20)
