"""What the way of storing states costs in acceptance length: same samples, same steps, several seeds.

    python tools/bench/measure_tau.py runs/demo/store --manifest manifests/train/demo.toml --codecs int8 int4 --seeds 3

Each codec's store is converted from STORE, so all have the same samples, split, order and anchors. A drafter is trained
on each, for every seed, and all are scored on the *clean* states of STORE, which are what a serving engine has. Printed
are tau and tau_all, mean over seeds, and the difference from STORE's own codec, paired by seed, with its 95 % interval
(Student's t over the seeds). For a lossless codec one seed is run and every loss must be equal, bit by bit.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from hstrain.drafter.losses import Head
from hstrain.manifest import load_train_manifest
from hstrain.plot import read_metrics
from hstrain.run.checkpoint import load_drafter
from hstrain.score.walk import score_store, summarise
from hstrain.train.fit import fit

import hscache
from hscache.build.convert import Change, convert
from hscache.console import say, table

LOSSLESS = ("raw", "lz4", "zstd")
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
FIGURES = ("tau", "tau_all")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, help="a store whose codec is lossless")
    parser.add_argument("--manifest", type=Path, required=True, help="training manifest")
    parser.add_argument("--set", action="append", default=[], help="override one key of the manifest")
    parser.add_argument("--codecs", nargs="+", default=["zstd", "int8", "int4"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=None, help="held-out samples to score (default all)")
    parser.add_argument("--scratch", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        stores = {"stored": args.store}
        for codec in args.codecs:
            stores[codec] = Path(scratch) / codec
            convert(args.store, stores[codec], Change(codec=codec))
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in stores}
        for seed in range(args.seeds):
            for name, store in stores.items():
                if name in LOSSLESS and seed:
                    continue
                found[name].append(one_run(args, store, Path(scratch) / "run", seed))
                say(f"{name}, seed {seed}: " + ", ".join(f"{f} {found[name][-1][f]:.3f}" for f in FIGURES))
    report(found, args)


def one_run(args: argparse.Namespace, store: Path, run: Path, seed: int) -> dict[str, Any]:
    shutil.rmtree(run, ignore_errors=True)
    overrides = [*args.set, f"run.seed={seed}", "run.validate_every=1000000", "run.checkpoint_every=1000000"]
    manifest = load_train_manifest(args.manifest, [*overrides, "run.validation_samples=1"])
    done = fit(manifest, store, run, device="cpu")
    drafter, _ = load_drafter(run / "checkpoints" / f"step-{done.steps:06d}")
    clean = hscache.open(args.store)
    from hstrain.data.packs import split

    from hscache.store.head import load_head

    held = split(clean, manifest.data.validation, manifest.data.test)[1][: args.samples]
    head = Head(load_head(args.store / "target"), "cpu", torch.float32)
    scored = summarise(score_store(drafter, head, clean, held))
    losses = [record["loss"] for record in read_metrics(run)[0]]
    return {**{name: scored[name] for name in FIGURES}, "samples": scored["samples"], "losses": losses, "seed": seed}


def report(found: dict[str, list[dict[str, Any]]], args: argparse.Namespace) -> None:
    base, rows, numbers = found["stored"], [], {}
    for name, runs in found.items():
        cells = [name]
        numbers[name] = {"runs": [{k: v for k, v in run.items() if k != "losses"} for run in runs]}
        if name in LOSSLESS:
            equal = runs[0]["losses"] == base[0]["losses"]
            numbers[name]["identical"] = equal
            rows.append(
                [name, *(runs[0][f] for f in FIGURES), "losses equal, bit by bit" if equal else "DIFFERS", None]
            )
            continue
        cells += [statistics.mean(run[figure] for run in runs) for figure in FIGURES]
        for figure in FIGURES:
            differences = [run[figure] - b[figure] for run, b in zip(runs, base, strict=True)]
            mean = statistics.mean(differences)
            half = T_95[len(runs)] * statistics.stdev(differences) / math.sqrt(len(runs)) if len(runs) > 1 else math.nan
            numbers[name][f"{figure}_cost"] = {"mean": mean, "half_width": half}
            cells.append("" if name == "stored" else f"{mean:+.3f} ± {half:.3f}")
        rows.append(cells)
    title = f"{args.store}, {len(base)} seeds, {base[0]['samples']} held-out samples, clean states"
    less = [(f"{figure}, less stored", ">") for figure in FIGURES]
    table(title, ["states", *((figure, ".3f") for figure in FIGURES), *less], rows)
    if args.json:
        args.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    if any(entry.get("identical") is False for entry in numbers.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
