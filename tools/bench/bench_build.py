"""What does caching cost over the forward pass that it needs anyway?

One process builds a store and runs the bare forward of the very same batches, in turn, and prints the median of the
paired ratios. The bare forward is what no offline pipeline can avoid: the backbone on padded batches, and the head on
the supervised rows. A build adds hooks, bf16 rounding, top-k, checks, checksums, files and fsync.

    python tools/bench/bench_build.py manifests/build/demo-smollm2.toml [--repeats 5] [--set key=value ...] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from hscache.build.plan import plan_rows
from hscache.build.run import build
from hscache.build.spool import Spool, SpoolWriter
from hscache.corpus.readers import read_corpus
from hscache.device import pick_device
from hscache.manifest import load_manifest
from hscache.model.facts import resolve_manifest
from hscache.model.loading import LoadedTarget, load_target
from hscache.rows import supervised_positions


@torch.inference_mode()
def bare_forward(target: LoadedTarget, spool: Spool, n_batches: int) -> float:
    """Return the seconds of backbone and head over all batches."""
    started = time.perf_counter()
    for number in range(n_batches):
        rows = spool.batch(number)
        width = max(len(row.input_ids) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        attention = torch.zeros_like(ids)
        supervised = torch.zeros_like(ids, dtype=torch.bool)
        for i, row in enumerate(rows):
            n = len(row.input_ids)
            ids[i, :n], attention[i, :n] = torch.from_numpy(row.input_ids.astype(np.int64)), 1
            supervised[i, torch.from_numpy(supervised_positions(row.loss_mask) - 1)] = True
        ids, attention = ids.to(target.device), attention.to(target.device)
        final = target.backbone(input_ids=ids, attention_mask=attention, use_cache=False).last_hidden_state
        for rows_of_head in final[supervised.to(target.device)].split(1024):
            target.head(rows_of_head)
    if target.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--device")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    manifest = load_manifest(args.manifest, args.set)
    manifest, directory = resolve_manifest(manifest, download=True)
    target = load_target(manifest.target, manifest.target.shape, directory, pick_device(args.device))
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as scratch:
        spooled = Path(scratch) / "corpus.arrow"
        with SpoolWriter(spooled) as sink:
            rows = read_corpus(Path(manifest.corpus.path).expanduser())
            plan = plan_rows(rows, manifest, sink)
        n_batches = sum(len(batches) for batches in plan.batches)
        spool = Spool(spooled)
        bare_forward(target, spool, 1)  # the first pass pays for lazy initialisation
        pairs = []
        for repeat in range(args.repeats):
            # in turn, and in turn the other way round, so that a machine that drifts favours neither
            measured = {}
            for name in ("bare", "build") if repeat % 2 == 0 else ("build", "bare"):
                if name == "bare":
                    measured[name] = bare_forward(target, spool, n_batches)
                else:
                    store = Path(scratch) / f"store-{repeat}"
                    measured[name] = build(manifest, store, device=args.device, fast_digest=True).capture_seconds
            pairs.append(measured)
    ratios = sorted(pair["build"] / pair["bare"] for pair in pairs)
    result = {
        "tokens": plan.totals["tokens"],
        "loss_tokens": plan.totals["loss_tokens"],
        "threads": torch.get_num_threads(),
        "device": str(target.device),
        "bare_seconds": statistics.median(pair["bare"] for pair in pairs),
        "build_seconds": statistics.median(pair["build"] for pair in pairs),
        "ratio_median": statistics.median(ratios),
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
        "repeats": args.repeats,
    }
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        print(
            f"build / bare forward: {result['ratio_median']:.3f} (min {ratios[0]:.3f}, max {ratios[-1]:.3f}, "
            f"{args.repeats} pairs); {result['tokens']:,} tokens, {result['threads']} threads, {result['device']}"
        )


if __name__ == "__main__":
    main()
