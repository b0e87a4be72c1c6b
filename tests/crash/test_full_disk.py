"""A disk that is really full: a small tmpfs, on which the kernel refuses in the midst of each part of a build.

``free_bytes`` says that there is room, as it does when somebody else takes it after the question.
"""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faults import contents, one_target, small_manifest

from hscache.audit.verify import verify
from hscache.build import space
from hscache.build.run import build
from hscache.cli import main
from hscache.manifest import to_toml
from hscache.store.index import committed_shards

ROOM = "64m"


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full")
    (folder / "manifest.toml").write_text(to_toml(small_manifest(folder)))
    return folder / "manifest.toml"


@pytest.fixture(scope="module")
def reference(manifest: Path) -> Iterator[Path]:
    with one_target():
        build(small_manifest(manifest.parent), manifest.parent / "reference")
        yield manifest.parent / "reference"


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Return a function that gives the same small disk this size."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = False

    def sized(size: str) -> Path:
        nonlocal mounted
        options = f"remount,size={size}" if mounted else f"size={size}"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
        mounted = True
        return folder / "store"

    if shutil.which("mount") is None:
        pytest.skip("no mount command here")
    yield sized
    if mounted:
        gc.collect()  # the traceback of the refused build held its open files
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def run(manifest: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run ``hscache build``; return its exit status."""
    monkeypatch.setattr(sys, "argv", ["hscache", "build", str(manifest), "--out", str(store)])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


@pytest.mark.parametrize("tenths", range(0, 10))
def test_a_build_on_a_full_disk_ends_with_3_and_goes_on_when_there_is_room(
    tenths: int,
    manifest: Path,
    reference: Path,
    mount: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    total = sum(path.stat().st_size for path in reference.rglob("*") if path.is_file())
    store = mount(str(max(4096, total * tenths // 10)))
    monkeypatch.setattr(space, "free_bytes", lambda path: 1 << 40)
    assert run(manifest, store, monkeypatch) == 3
    assert "error[disk-full]" in capsys.readouterr().err
    if (store / "manifest.json").exists():
        done = committed_shards(store)
        for finding in verify(store).findings:
            assert finding.shard not in done, finding
            assert finding.code in {"shard-missing", "target-damaged", "plan-damaged"}, finding
    mount(ROOM)
    assert run(manifest, store, monkeypatch) == 0
    assert contents(store) == contents(reference)
    assert verify(store).ok
    assert list((store / "staging").iterdir()) == []


def test_a_build_that_cannot_fit_is_refused_before_it_begins(
    manifest: Path,
    reference: Path,
    mount: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = mount("2m")
    assert run(manifest, store, monkeypatch) == 3
    assert "error[disk-full]" in capsys.readouterr().err
    assert committed_shards(store) == []
