"""Stop a build at any of its file operations or at any moment, and compare what comes of it; for tests and crash_loop.

A build runs in a forked child, so that a kill costs no start of Python and no loading of the target: what is killed is
the same program, only its imports are done.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hscache.build.run import build
from hscache.manifest import BuildManifest, parse_manifest
from hscache.model import loading
from hscache.store.index import committed_shards, read_shard

ROOT = Path(__file__).resolve().parents[2]
OPERATIONS = ("writev", "fsync", "link", "rename", "replace")
"""What a build does to the disk by way of ``os``: each call is a point at which it can be stopped."""

Before = Callable[[int, str, tuple[Any, ...]], None]
After = Callable[[str, tuple[Any, ...]], None]


def small_manifest(folder: Path, rows: int = 6) -> BuildManifest:
    """Return a manifest of real completions, cut short, for the trained tiny hybrid: three shards of six rows.

    Args:
        folder: Gets the corpus.
        rows: Samples; two of them fill a shard.
    """
    table = pq.read_table(ROOT / "tests/data/tiny-hybrid-completions.parquet").to_pylist()[:rows]
    for row in table:
        row["input_ids"], row["loss_mask"] = row["input_ids"][-40:], [0] * 10 + [1] * 30
    pq.write_table(pa.Table.from_pylist(table), folder / "corpus.parquet")
    raw = {
        "target": {"path": str(ROOT / "tools/targets/tiny_hybrid"), "dtype": "float32"},
        "states": {"taps": [1, 7]},
        "corpus": {"path": str(folder / "corpus.parquet")},
        "limits": {"batch_tokens": 80},
        "store": {"shard_bytes": "150KiB", "chunk_tokens": 16},
    }
    return parse_manifest(raw, "test")


@contextmanager
def one_target() -> Iterator[None]:
    """Load a target once for all builds inside: what is tested are files."""
    load, loaded = loading.load_target, {}

    def cached(*args: Any) -> loading.LoadedTarget:
        if "target" not in loaded:
            loaded["target"] = load(*args)
        return loaded["target"]

    loading.load_target = cached
    try:
        yield
    finally:
        loading.load_target = load


def contents(store: Path) -> dict[str, str]:
    """Every array file's digest and every shard's content digest: all but when and where it was made."""
    files = {
        str(path.relative_to(store)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (store / "shards").rglob("*")
        if path.is_file() and path.parent.suffix != ".zarr"
    }
    digests = {str(k): read_shard(store / f"shards/{k:05d}.zarr")["content_digest"] for k in committed_shards(store)}
    return {**files, **digests}


@contextmanager
def interpose(before: Before, after: After) -> Iterator[None]:
    """Call ``before`` and ``after`` around each file operation, with its number, name and arguments."""
    originals = {name: getattr(os, name) for name in OPERATIONS}
    count = 0

    def wrap(name: str) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            before(count, name, args)
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


def fault_points(manifest: BuildManifest, store: Path) -> list[str]:
    """Build a store; return the name of each file operation: what was done to which path."""
    points: list[str] = []

    def note(_number: int, name: str, args: tuple[Any, ...]) -> None:
        what = args[-1] if name not in ("writev", "fsync") else Path(f"/proc/self/fd/{args[0]}").readlink()
        path = os.path.relpath(os.fspath(what), store)
        points.append(f"{name} {re.sub('[0-9a-f]{32}', '*', path)}")

    with interpose(note, lambda *_: None):
        build(manifest, store)
    return points


def killed_at(k: int, manifest: BuildManifest, store: Path) -> list[dict[str, Any]]:
    """Build in a child that kills itself before its k-th operation; return what it had synced and renamed."""
    journal = store.parent / "journal.jsonl"
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
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

        def die(number: int, _name: str, _args: tuple[Any, ...]) -> None:
            if number == k:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            with interpose(die, note):
                build(manifest, store)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return [json.loads(line) for line in journal.read_text().splitlines()]


def start_command(args: list[str], output: Path) -> int:
    """Run ``hscache ARGS`` in a forked child whose stdout goes to a file; return its process id."""
    child = os.fork()
    if child == 0:
        status = 70
        try:
            # not the parent's objects: a test runner may have put its own in their place
            sys.stdout, sys.stderr = output.open("w"), Path(os.devnull).open("w")  # noqa: SIM115
            from hscache.cli import main

            sys.argv = ["hscache", *args]
            main()
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        finally:
            sys.stdout.flush()
            os._exit(status)
    return child
