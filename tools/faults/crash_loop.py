"""Kill builds with SIGKILL, at random moments and at every file operation; finish them, and compare.

::

    python tools/faults/crash_loop.py [--kills 200] [--rows 24] [--minutes 20] [--json FILE]

Every store is built by ``hscache build`` from real completions and the trained tiny hybrid, in a forked process that
gets SIGKILL (``tools/faults/faults.py`` says why forked; ``make crash`` kills processes that start from nothing). A
quarter of the kills hits the build that resumes after another kill. Then ``hscache build`` runs to the end, and the
result is compared with an uninterrupted build:

* lost: samples that the uninterrupted build has;
* wrong: other bytes in any array file or shard table, any finding of ``verify`` (full), or a committed shard that was
  touched again;
* litter: files that the uninterrupted build does not have, work in progress included;
* redone: shards that were begun, but not committed, when the kill came. One at most can be. (The target may have run
  the next one's first batch, of which nothing is written yet.)

Exit status 1 if anything was lost, wrong or left, or more shards were built again than were not committed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from faults import contents, fault_points, killed_at, one_target, small_manifest, start_command

from hscache.audit.verify import verify
from hscache.console import say, table
from hscache.manifest import BuildManifest, to_toml
from hscache.store.index import committed_shards, load_index
from hscache.store.layout import StorePaths

_ROWS_AT_POINTS = 6  # three shards: each kind of operation, first, middle and last
_AGAIN = 0.25
"""How often the build that resumes is killed, too."""


@dataclass
class Outcome:
    """What became of one store.

    Attributes:
        point: ``random``, or the name of the file operation.
        where: State of the store at each kill that landed.
        late: Kills that came after the build's end.
        redone: Shards that were in progress at each kill that landed.
        lost: Samples.
        wrong: What differs, in words.
        litter: Paths.
    """

    point: str
    where: list[str] = field(default_factory=list)
    late: int = 0
    redone: list[int] = field(default_factory=list)
    lost: int = 0
    wrong: list[str] = field(default_factory=list)
    litter: list[str] = field(default_factory=list)


class Loop:
    """Kills builds of one manifest and compares what comes of them.

    Args:
        folder: Scratch.
        rows: Samples of the corpus.
        seed: Of the moments.
    """

    def __init__(self, folder: Path, rows: int, seed: int) -> None:
        folder.mkdir()
        self._folder = folder
        self._manifest: BuildManifest = small_manifest(folder, rows)
        (folder / "manifest.toml").write_text(to_toml(self._manifest))
        reference = folder / "reference"
        self.points = fault_points(self._manifest, reference)
        self._contents, self._files = contents(reference), _files(reference)
        self._samples = set(load_index(reference)["sample_id"].to_pylist())
        self.shards = len(committed_shards(reference))
        self._moments = random.Random(seed)
        self.build_s = statistics.median(self._uninterrupted(k) for k in range(3))

    def random_kills(self, kills: int, until: float) -> Iterator[Outcome]:
        """Kill so many builds at random moments, or as many as there is time for."""
        done = 0
        while done < kills and time.monotonic() < until:
            outcome, store = Outcome("random"), self._folder / "store"
            again = True
            while again and done < kills:
                left = 1 - len(committed_shards(store)) / self.shards if store.exists() else 1.0
                self._kill(store, self._moments.uniform(0, self.build_s * max(left, 0.2)), outcome)
                done += 1
                again = self._moments.random() < _AGAIN
            self._finish(store, outcome)
            yield outcome

    def kills_at_points(self, points: range, until: float) -> Iterator[Outcome]:
        """Kill a build before each of these file operations."""
        for k in points:
            if time.monotonic() > until:
                return
            outcome, store = Outcome(self.points[k - 1]), self._folder / "store"
            killed_at(k, self._manifest, store)
            self._note(store, outcome)
            self._finish(store, outcome)
            yield outcome

    def _command(self, store: Path) -> list[str]:
        return ["build", str(self._folder / "manifest.toml"), "--out", str(store), "--json"]

    def _uninterrupted(self, k: int) -> float:
        started, store = time.monotonic(), self._folder / f"timed-{k}"
        _, status = os.waitpid(start_command(self._command(store), self._folder / "out.json"), 0)
        assert status == 0, status
        shutil.rmtree(store)
        return time.monotonic() - started

    def _kill(self, store: Path, after_s: float, outcome: Outcome) -> None:
        child = start_command(self._command(store), self._folder / "out.json")
        time.sleep(after_s)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            self._note(store, outcome)
        else:
            outcome.late += 1

    def _note(self, store: Path, outcome: Outcome) -> None:
        outcome.where.append(_where(store, self.shards))
        begun = list(StorePaths(store).staging.glob("*/*/input_ids"))
        outcome.redone.append(len(begun))
        if len(begun) > 1:
            outcome.wrong.append(f"{len(begun)} shards were in progress")

    def _finish(self, store: Path, outcome: Outcome) -> None:
        """Build to the end, compare, remove."""
        before = {shard: _stamps(StorePaths(store).shard(shard)) for shard in committed_shards(store)}
        _, status = os.waitpid(start_command(self._command(store), self._folder / "out.json"), 0)
        if status != 0:
            outcome.wrong.append(f"the resuming build ended with wait status {status}")
        else:
            built = json.loads((self._folder / "out.json").read_text())["built"]
            if built != self.shards - len(before):
                outcome.wrong.append(f"{built} shards built again, {self.shards - len(before)} were not committed")
        for shard, stamps in before.items():
            if _stamps(StorePaths(store).shard(shard)) != stamps:
                outcome.wrong.append(f"shard {shard} was committed, and touched again")
        found = contents(store)
        outcome.wrong += [
            f"differs: {name}" for name in sorted(self._contents) if found.get(name) != self._contents[name]
        ]
        with contextlib.redirect_stderr(io.StringIO()):
            outcome.wrong += [f"{f.code}: {f.where}: {f.detail}" for f in verify(store).findings]
        outcome.lost = len(self._samples - set(load_index(store)["sample_id"].to_pylist()))
        outcome.litter = sorted(_files(store) - self._files)
        shutil.rmtree(store)


def _where(store: Path, shards: int) -> str:
    paths = StorePaths(store)
    done = len(committed_shards(store))
    if not paths.manifest.exists():
        return "before the manifest"
    if not paths.plan.exists():
        return "manifest, no plan"
    if not paths.target.exists():
        return "plan, no target/"
    if done < shards:
        return f"{done} of {shards} shards"
    return "all shards, no index" if not paths.index.exists() else "index there, sweeping"


def _files(store: Path) -> set[str]:
    return {path.relative_to(store).as_posix() for path in store.rglob("*")}


def _stamps(shard: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_ino, p.stat().st_mtime_ns) for p in shard.rglob("*") if p.is_file()}


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    """Return the counts of all outcomes as plain JSON."""
    bad = [asdict(o) for o in outcomes if o.lost or o.wrong or o.litter]
    return {
        "stores": len(outcomes),
        "kills_landed": sum(len(o.where) for o in outcomes),
        "kills_too_late": sum(o.late for o in outcomes),
        "where": dict(sorted(Counter(where for o in outcomes for where in o.where).items())),
        "in_progress_when_killed": dict(sorted(Counter(n for o in outcomes for n in o.redone).items())),
        "lost": sum(o.lost for o in outcomes),
        "wrong": sum(len(o.wrong) for o in outcomes),
        "litter": sum(len(o.litter) for o in outcomes),
        "bad": bad,
    }


def show(result: dict[str, Any]) -> None:
    names = ("random", "points")
    few, many = result["shards"]
    print(f"random moments: {many} shards, {result['build_s']:.2f} s a build, a quarter of the kills while resuming")
    print(f"file operations: all {result['points_named']} of a build of {few} shards")
    rows = [[key, *(result[name][key] for name in names)] for key in (
        "stores", "kills_landed", "kills_too_late", "lost", "wrong", "litter",
    )]  # fmt: skip
    for key in ("where", "in_progress_when_killed"):
        for label in dict.fromkeys([*result["random"][key], *result["points"][key]]):
            text = label if key == "where" else f"{label} shards begun"
            rows.append([f"killed: {text}", *(result[name][key].get(label, 0) for name in names)])
    table("kill -9, then built to the end", ["", ("random moments", "d"), ("file operations", "d")], rows)
    for name in names:
        for bad in result[name]["bad"]:
            say(f"BAD: {json.dumps(bad)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="at random moments")
    parser.add_argument("--rows", type=int, default=24, help="samples of the corpus; two fill a shard")
    parser.add_argument("--minutes", type=float, default=20.0, help="stop after about so long; said when it happens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    until = started + 60 * args.minutes
    with tempfile.TemporaryDirectory() as folder, one_target():
        loops = [Loop(Path(folder) / str(rows), rows, args.seed) for rows in (_ROWS_AT_POINTS, args.rows)]
        every = range(1, len(loops[0].points) + 1)
        # with too little time, of each a part
        at_random = list(loops[1].random_kills(args.kills, started + 45 * args.minutes))
        say(f"kills at random moments done after {time.monotonic() - started:.0f} s")
        at_points = list(loops[0].kills_at_points(every, until))
        result = {
            "shards": [loop.shards for loop in loops],
            "points_named": len(every),
            "build_s": loops[1].build_s,
            "kills_asked": args.kills,
            "seed": args.seed,
            "random": summary(at_random),
            "points": summary(at_points),
            "points_tried": [outcome.point for outcome in at_points],
            "seconds": round(time.monotonic() - started, 1),
        }
    show(result)
    kills = result["random"]["kills_landed"] + result["random"]["kills_too_late"]
    if kills < args.kills or len(at_points) < len(every):
        say(f"stopped for time: {kills} of {args.kills} kills, {len(at_points)} of {len(every)} file operations")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if any(result[name][what] for name in ("random", "points") for what in ("lost", "wrong", "litter")) else 0


if __name__ == "__main__":
    sys.exit(main())
