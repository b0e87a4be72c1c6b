"""Every file operation of a build: killed there, failing there, or cut off from power there.

A forked child builds a store of three shards and stops at its k-th operation (write, sync, link, rename): by SIGKILL,
or by an error that the operation raises. For a power cut the parent then takes away what was never synced: files lose
all or half of their unsynced bytes, and renames whose folder was not synced are undone. After each, a second build must
end in exactly the store of an undisturbed one.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import contents, fault_points, interpose, killed_at, one_target, small_manifest

from hscache.audit.verify import verify
from hscache.build.run import build
from hscache.errors import EnvironmentFault
from hscache.manifest import BuildManifest


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> BuildManifest:
    """Three shards of real completions, cut short."""
    return small_manifest(tmp_path_factory.mktemp("operations"))


@pytest.fixture(scope="module", autouse=True)
def _one_target() -> Iterator[None]:
    with one_target():
        yield


@pytest.fixture(scope="module")
def reference(manifest: BuildManifest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("operations-reference") / "store"
    assert build(manifest, out).shards == 3
    return out


def cut_power(store: Path, journal: list[dict[str, Any]], keep: float) -> None:
    """Take away what was never synced: ``keep`` of each file's unsynced bytes stay, unsynced renames are undone."""
    synced = {line["sync"]: line["size"] for line in journal if "sync" in line}
    for path in [p for p in store.rglob("*") if p.is_file()]:
        stat = path.stat()
        safe = synced.get(stat.st_ino, 0)
        if stat.st_size > safe:
            os.truncate(path, safe + int((stat.st_size - safe) * keep))
    for i, line in enumerate(journal):
        if "moved" in line and not any(later.get("sync") == line["folder"] for later in journal[i:]):
            path = Path(line["moved"])
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def check(manifest: BuildManifest, store: Path, reference: Path) -> None:
    build(manifest, store)
    assert contents(store) == contents(reference)
    assert list((store / "staging").iterdir()) == []
    report = verify(store)
    assert report.ok, report.findings


def sweep(points: range, manifest: BuildManifest, reference: Path, tmp_path: Path) -> None:
    assert len(points) > 3
    for k in points:
        for keep in (None, 0.0, 0.5):
            store = tmp_path / f"kill-{k}-{keep}"
            journal = killed_at(k, manifest, store)
            if keep is not None and store.exists():
                cut_power(store, journal, keep)
            check(manifest, store, reference)
            shutil.rmtree(store)
        for code in (errno.EIO, errno.ENOSPC):
            store = tmp_path / f"error-{k}-{code}"
            fail_at(k, code, manifest, store)
            check(manifest, store, reference)
            shutil.rmtree(store)


def fail_at(k: int, code: int, manifest: BuildManifest, store: Path) -> None:
    """Build with an error in the k-th operation: it must be told in words."""

    def fail(number: int, _name: str, _args: tuple[Any, ...]) -> None:
        if number == k:
            raise OSError(code, os.strerror(code))

    with interpose(fail, lambda *_: None), pytest.raises(EnvironmentFault) as caught:
        build(manifest, store)
    assert caught.value.code == {errno.ENOSPC: "disk-full", errno.EIO: "disk-error"}[code], f"operation {k}"


@pytest.mark.thorough
def test_a_build_survives_a_stop_at_a_sample_of_its_operations(
    manifest: BuildManifest, reference: Path, tmp_path: Path
) -> None:
    total = len(fault_points(manifest, tmp_path / "count"))
    sweep(range(1, total + 1, max(1, total // 6)), manifest, reference, tmp_path)


@pytest.mark.crash
def test_a_build_survives_a_stop_at_every_operation(manifest: BuildManifest, reference: Path, tmp_path: Path) -> None:
    sweep(range(1, len(fault_points(manifest, tmp_path / "count")) + 1), manifest, reference, tmp_path)
