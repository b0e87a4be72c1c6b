"""Harm a store in every small way, one at a time, and see that nothing goes unseen.

::

    python tools/faults/mutate.py [--store STORE] [--codec raw] [--cuts 400] [--json FILE]

A copy of a small store (default: one of two shards, made for this) gets, one after the other,

* ``flip``: a bit of every byte of every file flipped, the bit drawn with a seed;
* ``cut``: every file cut at every chunk boundary and at ``--cuts`` lengths drawn with a seed (all, of shorter files);
* ``delete``: every file and every shard deleted;
* ``swap``: every two shards swapped; ``double``: a shard under another's number, and under a new one;
* ``foreign``: a shard of another store in a shard's place, and under a new number;
* ``extra``: a file, link or folder that nothing names, in every folder of the store.

After each, ``verify`` (full) must find something or refuse, and a reader must give each sample as it was or raise an
error of ours, both as it reads by default and with ``verify=True``. With files deleted, zarr-python, which knows no
records, must give fill values (NaN, or an impossible id) for what is gone; our reader without any verification must not
give other values either. Exit status 1 if anything went unseen.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import zarr

import hscache
from hscache.audit.verify import verify
from hscache.console import say, table
from hscache.errors import HscacheError
from hscache.store.index import committed_shards
from hscache.store.layout import StorePaths, data_file_name
from hscache.store.reader import Sample, specs_of

ROOT = Path(__file__).resolve().parents[2]
_LISTED = 100

Values = dict[str, dict[str, bytes]]


@dataclass
class Tally:
    """What one kind of harm to one part of the store came to.

    Attributes:
        tried: Mutations.
        found: Of them, by ``verify``.
        refused: With which the reader raised an error of ours for at least one sample.
        missed: What went wrong, in words.
        slowest_s: Slowest ``verify``.
    """

    tried: int = 0
    found: int = 0
    refused: int = 0
    missed: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


class Mutations:
    """All mutations of one store, counted as they are judged.

    Args:
        store: Store to harm; it is whole again afterwards.
        foreign: Another store of the same shape.
        seed: Of bits, lengths and samples of positions.
    """

    def __init__(self, store: Path, foreign: Path, seed: int = 0) -> None:
        self.store, self.foreign = store, foreign
        self.tallies: dict[tuple[str, str], Tally] = {}
        self._rng = np.random.default_rng(seed)
        self._truth = self._read("digest")
        self._paths = StorePaths(store)
        self.shards = committed_shards(store)
        self.files = sorted(path for path in store.rglob("*") if path.is_file())

    def flips(self, per_file: int | None = None) -> None:
        """Flip a bit of every byte of every file, or of so many bytes of each."""
        for path in self.files:
            good = path.read_bytes()
            for at in self._some(len(good), per_file):
                bad = bytearray(good)
                bad[at] ^= 1 << int(self._rng.integers(8))
                with self._content(path, good, bytes(bad)):
                    self._judge("flip", self._part(path), f"{self._name(path)} byte {at}")

    def cuts(self, per_file: int) -> None:
        """Cut every file at its chunk boundaries and at so many other lengths."""
        for path in self.files:
            good = path.read_bytes()
            for n in sorted({*self._some(len(good), per_file), *self._boundaries(path, len(good))}):
                with self._content(path, good, good[:n]):
                    self._judge("cut", self._part(path), f"{self._name(path)} to {n} of {len(good)}")

    def deletions(self) -> None:
        """Delete every file, then every shard."""
        for path in self.files:
            good = path.read_bytes()
            path.unlink()
            self._judge("delete", self._part(path), self._name(path))
            self._fill_values(path)
            path.write_bytes(good)
        for shard in self.shards:
            with self._moved(self._paths.shard(shard)):
                self._judge("delete", "shard", str(shard))

    def swaps(self) -> None:
        """Swap every two shards."""
        for a, b in combinations(self.shards, 2):
            self._swap(a, b)
            self._judge("swap", "shard", f"{a} and {b}")
            self._swap(a, b)

    def strangers(self) -> None:
        """Put a shard where another one belongs, or where none does: one of this store, or of another."""
        new = max(self.shards) + 1
        for kind, source in (("double", self._paths), ("foreign", StorePaths(self.foreign))):
            for shard in self.shards:
                for other in [*self.shards, new]:
                    if kind == "double" and other == shard:
                        continue
                    with self._moved(self._paths.shard(other)):
                        shutil.copytree(source.shard(shard), self._paths.shard(other))
                        self._judge(kind, "shard", f"{shard} as {other}")
                        shutil.rmtree(self._paths.shard(other))

    def extras(self) -> None:
        """Add a file, an empty file and a folder in every folder of the store."""
        folders = [self.store, *(path for path in sorted(self.store.rglob("*")) if path.is_dir())]
        for folder in folders:
            if folder == self._paths.staging:
                continue  # work in progress: whatever lies there is swept by the next build
            for name, content in (("c.9", b"more"), ("zarr.json.orig", b""), ("notes.parquet", b"PAR1")):
                (folder / name).write_bytes(content)
                self._judge("extra", "file", self._name(folder / name))
                (folder / name).unlink()
            shutil.copytree(self._paths.target, folder / "copy")
            self._judge("extra", "folder", self._name(folder / "copy"))
            shutil.rmtree(folder / "copy")
            (folder / "empty").mkdir()
            self._judge("extra", "folder", self._name(folder / "empty"))
            (folder / "empty").rmdir()
            (folder / "link").symlink_to("nowhere")
            self._judge("extra", "link", self._name(folder / "link"))
            (folder / "link").unlink()

    def result(self) -> dict[str, Any]:
        """Return all counts as plain JSON; the store must be whole by now."""
        report = _quietly(lambda: verify(self.store))
        assert report.ok, report.findings
        rows = [
            {
                "harm": kind, "part": part, "tried": t.tried, "found": t.found, "refused_by_reader": t.refused,
                "missed": len(t.missed), "misses": t.missed[:_LISTED], "slowest_verify_s": round(t.slowest_s, 3),
            }
            for (kind, part), t in self.tallies.items()
        ]  # fmt: skip
        return {
            "files": len(self.files),
            "bytes": sum(path.stat().st_size for path in self.files),
            "shards": len(self.shards),
            "tried": sum(t.tried for t in self.tallies.values()),
            "missed": sum(len(t.missed) for t in self.tallies.values()),
            "rows": rows,
        }

    def _judge(self, kind: str, part: str, what: str) -> None:
        tally = self.tallies.setdefault((kind, part), Tally())
        tally.tried += 1
        started = time.perf_counter()
        try:
            found = not _quietly(lambda: verify(self.store)).ok
        except HscacheError:
            found = True
        except Exception as error:  # to be told, not to end the run
            tally.missed.append(f"{what}: verify raised {type(error).__name__}: {error}")
            found = True
        tally.slowest_s = max(tally.slowest_s, time.perf_counter() - started)
        tally.found += found
        if not found:
            tally.missed.append(f"{what}: verify found nothing")
        refused = []
        for how in ("crc", "digest"):
            try:
                refused.append(self._wrong_or_refused(how))
            except Exception as error:
                tally.missed.append(f"{what}: the reader, {how}: {type(error).__name__}: {error}")
        tally.refused += any(refused)

    def _wrong_or_refused(self, how: str) -> bool:
        """Read all samples; return whether any was refused, and raise if one is not as it was."""
        try:
            values = self._read(how)
        except HscacheError:
            return True
        if values.keys() != self._truth.keys():
            raise ValueError(f"gives samples {sorted(values)}")
        refused = [sample_id for sample_id, arrays in values.items() if not arrays]
        for sample_id, arrays in values.items():
            if arrays and arrays != self._truth[sample_id]:
                raise ValueError(f"gives other values for {sample_id}")
        return bool(refused)

    def _read(self, how: str) -> Values:
        """Return sample id -> array -> bytes, with no arrays for a sample that is refused.

        Args:
            how: What is checked: ``nothing``, ``crc`` (the default of readers), or ``digest`` of the sample as well.
        """
        store, out = hscache.open(self.store, decode_threads=1), {}
        for i, sample_id in enumerate(store.sample_ids):
            try:
                out[sample_id] = _bytes(store.sample(i, kind="bits", verify=how == "digest", crc=how != "nothing"))
            except HscacheError:
                out[sample_id] = {}
        store.close()
        return out

    def _fill_values(self, gone: Path) -> None:
        """Without this file: nothing of ours unverified gives other values, and zarr gives fill values."""
        tally = self.tallies["delete", self._part(gone)]
        try:
            self._wrong_or_refused("nothing")
        except Exception as error:
            tally.missed.append(f"{self._name(gone)}: the reader without verification: {error}")
        if self._part(gone) != "array data":
            return
        spec = next(s for s in specs_of(hscache.open(self.store).manifest) if s.name == gone.parent.name)
        values = np.asarray(zarr.open_array(str(gone.parent), mode="r")[:])
        if values.tobytes() != np.full(values.shape, spec.fill_scalar, spec.dtype).tobytes():
            tally.missed.append(f"{self._name(gone)}: zarr gives something else than fill values")

    def _some(self, n: int, most: int | None) -> list[int]:
        return list(range(n)) if most is None or n <= most else sorted(self._rng.permutation(n)[:most].tolist())

    def _boundaries(self, path: Path, size: int) -> set[int]:
        """Return where the chunks of an array's data file begin and end, with and without their checksums."""
        for spec in specs_of(hscache.open(self.store).manifest):
            if path.parent.name == spec.name and path.name == data_file_name(spec):
                metadata = json.loads((path.parent / "zarr.json").read_bytes())
                n = metadata["chunk_grid"]["configuration"]["chunk_shape"][0] // spec.chunk_rows
                index = np.frombuffer(path.read_bytes()[-16 * n - 4 : -4], "<u8").reshape(-1, 2)
                ends = {int(at + length) for at, length in index}
                return {n for n in {*index[:, 0].tolist(), *ends, *(end - 4 for end in ends)} if n < size}
        return set()

    @contextlib.contextmanager
    def _content(self, path: Path, good: bytes, bad: bytes) -> Iterator[None]:
        path.write_bytes(bad)
        yield
        path.write_bytes(good)

    @contextlib.contextmanager
    def _moved(self, path: Path) -> Iterator[None]:
        aside = self.store.parent / "aside"
        if path.exists():
            path.rename(aside)
        yield
        if aside.exists():
            aside.rename(path)

    def _swap(self, a: int, b: int) -> None:
        with self._moved(self._paths.shard(a)):
            self._paths.shard(b).rename(self._paths.shard(a))
            (self.store.parent / "aside").rename(self._paths.shard(b))

    def _name(self, path: Path) -> str:
        return path.relative_to(self.store).as_posix()

    def _part(self, path: Path) -> str:
        if path.parent == self.store:
            return path.name
        if path.is_relative_to(self._paths.target):
            return "target/"
        if path.name != "zarr.json":
            return "array data"
        return "shard zarr.json" if path.parent.suffix == ".zarr" else "array zarr.json"


def _bytes(sample: Sample) -> dict[str, bytes]:
    arrays = {name: getattr(sample, name) for name in ("input_ids", "loss_mask", "hidden_states", "final_state")}
    if sample.logits is not None:
        arrays |= {name: getattr(sample.logits, name) for name in ("positions", "ids", "logprobs", "lse")}
    return {name: array.tobytes() for name, array in arrays.items() if array is not None}


def _quietly(work: Callable[[], Any]) -> Any:
    with contextlib.redirect_stderr(io.StringIO()):  # a progress line per mutation
        return work()


def make_stores(folder: Path, codec: str) -> tuple[Path, Path]:
    """Make a store of two shards with all arrays, and another one of the same shape."""
    sys.path.insert(0, str(ROOT))
    from tests.made.stores import corpus_rows, little_manifest, make_store

    manifest = little_manifest(store={"codec": codec, "shard_bytes": 2500})
    stores = [
        make_store(folder / name, corpus_rows((12, 9, 1, 7, 5, 3), seed=seed), manifest=manifest).path
        for seed, name in enumerate(("store", "foreign"))
    ]
    assert len(committed_shards(stores[0])) == len(committed_shards(stores[1])) == 2
    return stores[0], stores[1]


def show(result: dict[str, Any]) -> None:
    counted = [(name, ",") for name in ("tried", "found", "reader refused", "missed")]
    keys = ("harm", "part", "tried", "found", "refused_by_reader", "missed")
    rows = [[*(r[key] for key in keys), f"{r['slowest_verify_s']:.2f} s"] for r in result["rows"]]
    store = f"{result['shards']} shards, {result['files']} files, {result['bytes']:,} bytes"
    table(f"{result['tried']:,} mutations of {store}", ["harm", "part", *counted, ("slowest verify", ">")], rows)
    for row in result["rows"]:
        for miss in row["misses"]:
            say(f"MISSED: {row['harm']}: {miss}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, help="small store to take a copy of; needs --foreign")
    parser.add_argument("--foreign", type=Path, help="another store with the same shard numbers")
    parser.add_argument("--codec", default="raw", help="of the store that is made otherwise")
    parser.add_argument("--flips", type=int, help="bytes to flip in each file; default: all")
    parser.add_argument("--cuts", type=int, default=400, help="lengths that each file is cut to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if (args.store is None) != (args.foreign is None):
        parser.error("--store and --foreign go together")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        if args.store:
            store, foreign = Path(folder) / "store", args.foreign
            shutil.copytree(args.store, store)
        else:
            store, foreign = make_stores(Path(folder), args.codec)
        mutations = Mutations(store, foreign, args.seed)
        steps: dict[str, Callable[[], None]] = {
            "deletions": mutations.deletions,
            "swaps": mutations.swaps,
            "strangers": mutations.strangers,
            "extras": mutations.extras,
            "cuts": lambda: mutations.cuts(args.cuts),
            "flips": lambda: mutations.flips(args.flips),
        }
        for name, step in steps.items():
            step()
            say(f"{name} done after {time.monotonic() - started:.0f} s")
        result = {"codec": args.codec, "seed": args.seed, **mutations.result()}
    result["seconds"] = round(time.monotonic() - started, 1)
    show(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
