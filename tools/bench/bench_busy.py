"""What fit and build keep of their speed beside other work, by how long OpenMP's threads spin while they wait.

At the end of each product two threads wait for each other. libgomp lets them spin for a while; on a busy machine a
spinning thread keeps its core from the very thread that it waits for. Every setting is timed on the quiet machine and
beside busy processes, the settings in turn within a round.

    python tools/bench/bench_busy.py runs/demo        # after `make demo`; 15 minutes, otherwise quiet

A fair share is what the scheduler owes: our threads, of all threads that want a core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq

from hscache.console import table

SETTINGS: dict[str, dict[str, str]] = {
    "as installed": {},
    "libgomp's default": {"GOMP_SPINCOUNT": "300000"},
    "spin 10,000": {"GOMP_SPINCOUNT": "10000"},
    "spin 1,000": {"GOMP_SPINCOUNT": "1000"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
BUSY = "while True: pass"
STEPS, ROWS = 15, 60


def fit(demo: Path, scratch: Path, env: dict[str, str]) -> float:
    """Return supervised and context tokens a second of the last steps of a short fit."""
    sets = (f"optim.max_steps={STEPS}", "run.log_every=5", "run.validation_samples=1", "run.validate_every=100000")
    words = ["fit", "manifests/train/demo.toml", "--store", demo / "store", "--out", scratch / "run"]
    command("hstrain", [*words, *(word for one in sets for word in ("--set", one))], env)
    lines = map(json.loads, (scratch / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return statistics.median(line["tokens_per_s"] for line in lines if line["kind"] == "train")


def build(demo: Path, scratch: Path, env: dict[str, str]) -> float:
    """Return tokens a second from the first forward batch to the last commit of a short build."""
    corpus = scratch / "corpus.parquet"
    pq.write_table(pq.read_table(demo / "corpus.parquet").slice(0, ROWS), corpus)
    words = [
        "build",
        "manifests/build/demo.toml",
        "--set",
        f"corpus.path={corpus}",
        "--out",
        scratch / "store",
        "--json",
    ]
    report = json.loads(command("hscache", words, env))
    return float(report["tokens"] / report["capture_seconds"])


def command(name: str, words: list[str | Path], env: dict[str, str]) -> str:
    done = subprocess.run(
        [Path(sys.executable).with_name(name), *words], env={**os.environ, **env}, capture_output=True, text=True
    )
    if done.returncode > 1:
        raise SystemExit(f"{name} {' '.join(map(str, words))}: exit status {done.returncode}\n{done.stderr}")
    return done.stdout


@contextmanager
def busy(processes: int) -> Iterator[None]:
    running = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", type=Path, help="output of `make demo`")
    parser.add_argument("--busy", type=int, default=4, help="busy processes beside it")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--setting", action="append", choices=SETTINGS, help="all by default")
    args = parser.parse_args()
    found: dict[tuple[str, str, int], list[float]] = {}
    for others in (0, args.busy):
        with busy(others):
            for _ in range(args.rounds):
                for name in args.setting or SETTINGS:
                    for job in (fit, build):
                        with tempfile.TemporaryDirectory() as scratch:
                            speed = job(args.demo, Path(scratch), SETTINGS[name])
                        found.setdefault((name, job.__name__, others), []).append(speed)
    rows = []
    for name in args.setting or SETTINGS:
        cells: list[object] = [name]
        for job in ("fit", "build"):
            quiet, loaded = (statistics.median(found[name, job, others]) for others in (0, args.busy))
            cells += [quiet, loaded, loaded / quiet]
        rows.append(cells)
    cores = len(os.sched_getaffinity(0))
    fair = f"{cores} threads of {cores + args.busy}: {min(1.0, cores / (cores + args.busy)):.2f}"
    columns = [
        column
        for job in ("fit", "build")
        for column in ((f"{job}, tokens/s", ",.0f"), ("busy", ",.0f"), ("kept", ".2f"))
    ]
    table(f"{cores} cores, {args.busy} busy processes; fair share of {fair}", columns, rows)


if __name__ == "__main__":
    main()
