"""Do the cache and live decoding tell the same acceptance lengths, sample by sample?

    python tools/compare_walks.py runs/demo/store runs/demo/drafter --target tools/tiny_hybrid [--dtype float32]

For every held-out sample whose text the target wrote greedily, the serving walk from the cache is laid beside live
greedy decoding of the same prompt. In float32 both lists must be the same; where they part, it is shown where, and
whether the target's text itself parted there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import hscache
from hscache.console import say
from hscache.store.head import load_head
from trainer.data import split
from trainer.decode import Draft, decode
from trainer.evaluate import score_sample
from trainer.importer import open_drafter
from trainer.live_target import Sampling, open_target
from trainer.losses import Head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--held-out", type=float, default=0.1, help="share held out; 1 compares every sample")
    parser.add_argument("--samples", type=int, default=None)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    found = compare(args)
    if not found:
        sys.exit(f"{args.store}: no sample held out has one turn of two tokens or more; name another --held-out")
    lists = sum(entry["same"] for entry in found)
    cached, live = (
        sum(map(sum, (e[side] for e in found))) / sum(len(e[side]) for e in found) for side in ("cache", "live")
    )
    other = sum(not entry["same_text"] for entry in found)
    print(
        f"{len(found)} held-out samples, {args.dtype}: {lists} lists of acceptance lengths are equal, "
        f"{len(found) - lists} are not ({other} of them because the live text differs); "
        f"tau {cached:.4f} from the cache, {live:.4f} live ({live / cached - 1:+.2%})"
    )
    for entry in found:
        if not entry["same"]:
            print(f"{entry['sample_id']}: {entry['why']}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.exit(int(args.dtype == "float32" and lists < len(found)))


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    store, target = hscache.open(args.store), load_head(args.store / "target")
    drafter, _ = open_drafter(args.checkpoint, target)
    head = Head(target, "cpu", torch.float32)
    found = []
    with open_target(args.target, drafter.config.taps, dtype=args.dtype, device="cpu") as (live, _):
        draft = Draft(drafter, target, live.device)
        held = split(store, args.held_out)[1] if args.held_out < 1 else list(range(len(store)))
        for i in held[: args.samples]:
            sample = store.sample(i, taps=drafter.config.taps)
            ids, first = sample.input_ids.tolist(), int(sample.loss_mask.argmax())
            score = score_sample(drafter, head, sample)
            if len(ids) - first < 2 or not bool(sample.loss_mask[first:].all()):
                continue
            walk = score.walk(score.streak)
            out = decode(live, ids[:first], Sampling(max_new_tokens=len(ids) - first), draft)
            lengths = [step.accepted for step in out.steps]
            entry = {"sample_id": sample.sample_id, "cache": walk, "live": lengths, "same": walk == lengths}
            entry["same_text"] = out.ids == ids[first:]
            if not entry["same"]:
                entry["why"] = explain(entry, score, out.ids, ids[first:])
            found.append(entry)
            say(f"{sample.sample_id}: {'same' if entry['same'] else entry['why']}")
    return found


def explain(entry: dict[str, Any], score: Any, live_ids: list[int], ids: list[int]) -> str:
    if not entry["same_text"]:
        at = next(
            (k for k, pair in enumerate(zip(live_ids, ids, strict=False)) if pair[0] != pair[1]),
            min(len(live_ids), len(ids)),
        )
        return f"the live text parts from the stored one at token {at} of {len(ids)}"
    step = next(k for k, pair in enumerate(zip(entry["cache"], entry["live"], strict=False)) if pair[0] != pair[1])
    at = sum(entry["cache"][:step])
    return f"step {step} (anchor {at} of the answer): {entry['cache'][step]} from the cache, {entry['live'][step]} live"


if __name__ == "__main__":
    main()
