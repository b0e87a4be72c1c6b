"""Do the cache and live decoding tell the same acceptance lengths, sample by sample?

    python tools/bench/compare_walks.py runs/demo/store runs/demo/drafter --target tools/targets/tiny_hybrid
        [--dtype float32] [--peer dflash]

For every held-out sample whose text the target wrote greedily, the serving walk from the cache is laid beside live
greedy decoding of the same prompt. In float32 both lists must be the same, and the live text must be the stored one.
Where they part, it is shown which token parted, and the two best logits there: the target's where the text itself
parted, else the drafter's on both sides.

With ``--peer dflash`` the drafter is exported, and the DFlash authors' own package decodes the same prompts with it
(``python tools/bench/oracle_env.py`` installs it; its targets are those whose cache can be cropped, no hybrids). It
must take the same steps, too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hstrain.data.packs import split
from hstrain.drafter.losses import Head
from hstrain.drafter.model import Drafter
from hstrain.exchange.importer import open_drafter
from hstrain.live.decode import Decoded, Draft, decode
from hstrain.live.target import LiveTarget, Sampling, open_target
from hstrain.score.report import smallest_share
from hstrain.score.walk import score_sample
from torch import Tensor

import hscache
from hscache.console import say
from hscache.store.head import TargetHead, load_head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--held-out", type=float, help="share; default: as in training; 1 compares every sample")
    parser.add_argument("--samples", type=int, default=None)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--peer", choices=["dflash"], default=None)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    found = compare(args)
    if not found:
        sys.exit(f"{args.store}: no sample held out has one turn of two tokens or more; name another --held-out")
    lists = sum(entry["same"] for entry in found)
    steps = {side: [n for entry in found for n in entry[side]] for side in ("cache", "live")}
    # a live text that ends with its first token has no step
    cached, live = (sum(steps[side]) / max(len(steps[side]), 1) for side in ("cache", "live"))
    other = sum(not entry["same_text"] for entry in found)
    what = "held-out samples" if args.held_out is None else "samples"
    print(
        f"{len(found)} {what}, {args.dtype}: {lists} lists of acceptance lengths are equal, "
        f"{len(found) - lists} are not; {other} live texts are not the stored ones; "
        f"tau {cached:.4f} from the cache, {live:.4f} live ({live / cached - 1:+.2%})"
    )
    if args.peer:
        same = sum(entry["peer"] == entry["live"] for entry in found)
        print(f"{args.peer}, decoding with our export: {same} of {len(found)} lists are those of our live decoding")
    for entry in found:
        if "why" in entry:
            print(f"{entry['sample_id']}: {entry['why']}")
        if args.peer and entry["peer"] != entry["live"]:
            print(f"{entry['sample_id']}: {args.peer} {entry['peer']}, live {entry['live']}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    bad = lists < len(found) or other > 0 or any(entry["peer"] not in (None, entry["live"]) for entry in found)
    sys.exit(int(args.dtype == "float32" and bad))


class Recorded(Draft):
    """A draft that keeps the two best tokens and logits of each slot it proposed, step by step."""

    def begin(self) -> None:
        """Forget the context and what was proposed."""
        super().begin()
        self.best: list[Tensor] = []

    def propose(self, anchor: int) -> Tensor:
        """Propose as a draft does."""
        logits_kV = super().propose(anchor)
        self.best.append(torch.stack([x.double() for x in logits_kV.topk(2, -1)]))  # [2: logits, ids; B - 1; 2]
        return logits_kV


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    store, target = hscache.open(args.store), load_head(args.store / "target")
    drafter, _ = open_drafter(args.checkpoint, target)
    head = Head(target, "cpu", torch.float32)
    found = []
    opened = open_target(args.target, drafter.config.taps, dtype=args.dtype, device="cpu")
    with tempfile.TemporaryDirectory() as scratch, opened as (live, _):
        draft = Recorded(drafter, target, live.device)
        peer = open_peer(drafter, target, live, Path(scratch) / "export") if args.peer else None
        share = smallest_share([args.checkpoint]) if args.held_out is None else args.held_out
        held = split(store, share)[1] if share < 1 else list(range(len(store)))
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
            entry["peer"] = peer(ids[:first], len(out.ids)) if peer else None
            if not entry["same_text"]:
                entry["why"] = other_text(out, ids[first:])
            elif not entry["same"]:
                step = next(k for k, (a, b) in enumerate(zip(walk, lengths, strict=False)) if a != b)
                at = first + sum(walk[:step])
                cached = Recorded(drafter, target, live.device)
                cached.begin()
                cached.extend(sample.hidden_states[:at])
                cached.propose(ids[at])
                entry["why"] = other_step(walk, lengths, step, cached.best[0], draft.best[step])
            found.append(entry)
            say(f"{sample.sample_id}: {entry.get('why', 'same')}")
    return found


def open_peer(
    drafter: Drafter, head: TargetHead, live: LiveTarget, folder: Path
) -> Callable[[list[int], int], list[int]]:
    """Return a function that gives the acceptance lengths of dflash's own decoding of a prompt, for so many tokens."""
    import oracle_env
    from dflash_peer import generate
    from hstrain.exchange.export import export_drafter

    oracle_env.import_oracles()
    import dflash.model

    export_drafter("zlab", drafter, head, folder, provenance={"target": "compared"}, dtype="float32")

    def lengths(prompt: list[int], tokens: int) -> list[int]:
        # room for a whole block behind the last token: dflash shortens its blocks towards the end, and drafts otherwise
        room = tokens + drafter.config.block_size
        made = generate(
            dflash.model,
            folder,
            live.loaded.model,
            torch.tensor([prompt]),
            max_new_tokens=room,
            stop_token_ids=sorted(live.eos_ids),
        )
        steps: list[int] = []
        for accepted in made.acceptance_lengths:
            if (left := tokens - 1 - sum(steps)) <= 0:
                break
            steps.append(min(accepted, left))
        return steps

    return lengths


def other_text(out: Decoded, ids: list[int]) -> str:
    """Say where the live text parts from the stored one, and how close the target's two best tokens are there."""
    pairs = zip(out.ids, ids, strict=False)
    at = next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(out.ids), len(ids)))
    text = f"the live text parts from the stored one at token {at} of {len(ids)}"
    if at == min(len(out.ids), len(ids)):
        return text
    (a, b), (x, y) = out.top_ids[at], out.top_logits[at]
    return f"{text}: stored {ids[at]}, live {out.ids[at]}; live logits {a}: {x:.4f}, {b}: {y:.4f}"


def other_step(cache: list[int], live: list[int], step: int, cache_best: Tensor, live_best: Tensor) -> str:
    """Say which step differs, and the drafter's two best tokens on both sides in the first slot where they differ."""
    text = (
        f"step {step} (anchor {sum(cache[:step])} of the answer): {cache[step]} from the cache, {live[step]} live; "
        f"the drafter's two best"
    )
    apart = (cache_best[1, :, 0] != live_best[1, :, 0]).nonzero().flatten().tolist()
    if not apart:
        return f"{text} are the same in all slots, which is a fault"
    k = apart[0]
    sides = (
        f"{name}: {', '.join(f'{int(i)}: {x:.4f}' for x, i in zip(best[0, k], best[1, k], strict=True))}"
        for name, best in (("cache", cache_best), ("live", live_best))
    )
    return f"{text} in slot {k + 1}: {'; '.join(sides)}"


if __name__ == "__main__":
    main()
