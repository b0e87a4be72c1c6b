"""Every file operation of a build: killed there, failing there, or cut off from power there.

A forked child builds a store of three shards and stops at its k-th operation (write, sync, link, rename): by SIGKILL,
or by an error that the operation raises. For a power cut the parent then takes away what was never synced: files lose
all or half of their unsynced bytes, and renames whose folder was not synced are undone. After each, a second build must
end in exactly the store of an undisturbed one.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hscache.build import build
from hscache.errors import EnvironmentFault
from hscache.manifest import BuildManifest, parse_manifest
from hscache.target import loading
from hscache.verify import verify
from tests.conftest import DATA, TINY_HYBRID
from tests.test_build import contents

OPERATIONS = ("writev", "fsync", "link", "rename", "replace")


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> BuildManifest:
    """Three shards of real completions, cut short."""
    rows = pq.read_table(DATA / "tiny-hybrid-completions.parquet").to_pylist()[:6]
    for row in rows:
        row["input_ids"], row["loss_mask"] = row["input_ids"][-40:], [0] * 10 + [1] * 30
    corpus = tmp_path_factory.mktemp("operations") / "corpus.parquet"
    pq.write_table(pa.Table.from_pylist(rows), corpus)
    raw = {
        "target": {"path": str(TINY_HYBRID), "dtype": "float32"},
        "states": {"taps": [1, 7]},
        "corpus": {"path": str(corpus)},
        "limits": {"batch_tokens": 80},
        "store": {"shard_bytes": "150KiB", "chunk_tokens": 16},
    }
    return parse_manifest(raw, "test")


@pytest.fixture(scope="module", autouse=True)
def _one_target() -> Iterator[None]:
    """Load the target once: what is tested here are files."""
    load, loaded = loading.load_target, {}

    def cached(*args: Any) -> loading.LoadedTarget:
        if "target" not in loaded:
            loaded["target"] = load(*args)
        return loaded["target"]

    patch = pytest.MonkeyPatch()
    patch.setattr(loading, "load_target", cached)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def reference(manifest: BuildManifest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("operations-reference") / "store"
    assert build(manifest, out).shards == 3
    return out


@contextmanager
def interpose(before: Callable[[int, str], None], after: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """Call ``before`` and ``after`` around each file operation, with its number and name."""
    originals = {name: getattr(os, name) for name in OPERATIONS}
    count = 0

    def wrap(name: str) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            before(count, name)
            result = originals[name](*args, **kwargs)
            after(name, args)
            return result

        return operation

    for name in OPERATIONS:
        setattr(os, name, wrap(name))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(os, name, function)


def count_operations(manifest: BuildManifest, store: Path) -> int:
    seen: list[int] = []
    with interpose(lambda number, _name: seen.append(number), lambda *_: None):
        build(manifest, store)
    return len(seen)


def killed_at(k: int, manifest: BuildManifest, store: Path) -> list[dict[str, Any]]:
    """Build in a child that kills itself before its k-th operation; return what it had synced and renamed."""
    journal = store.parent / "journal.jsonl"
    child = os.fork()
    if child == 0:
        log = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC)

        def note(name: str, args: tuple[Any, ...]) -> None:
            if name == "fsync":
                stat = os.fstat(args[0])
                line: dict[str, Any] = {"sync": stat.st_ino, "size": stat.st_size}
            elif name == "writev":
                return
            else:
                line = {"moved": os.fspath(args[1]), "folder": Path(args[1]).parent.stat().st_ino}
            os.write(log, json.dumps(line).encode() + b"\n")

        def die(number: int, _name: str) -> None:
            if number == k:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            with interpose(die, note):
                build(manifest, store)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return [json.loads(line) for line in journal.read_text().splitlines()]


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

    def fail(number: int, _name: str) -> None:
        if number == k:
            raise OSError(code, os.strerror(code))

    with interpose(fail, lambda *_: None), pytest.raises(EnvironmentFault) as caught:
        build(manifest, store)
    assert caught.value.code == {errno.ENOSPC: "disk-full", errno.EIO: "disk-error"}[code], f"operation {k}"


def test_a_build_survives_a_stop_at_a_sample_of_its_operations(
    manifest: BuildManifest, reference: Path, tmp_path: Path
) -> None:
    total = count_operations(manifest, tmp_path / "count")
    sweep(range(1, total + 1, max(1, total // 6)), manifest, reference, tmp_path)


@pytest.mark.crash
def test_a_build_survives_a_stop_at_every_operation(manifest: BuildManifest, reference: Path, tmp_path: Path) -> None:
    sweep(range(1, count_operations(manifest, tmp_path / "count") + 1), manifest, reference, tmp_path)
