"""Does llama.cpp get the same from a drafter of ours as we do?

    python tools/bench/serve_llama_cpp.py runs/demo-smollm2/drafter --store runs/demo-smollm2/store --target DIR
        --prompts FILE [--limit 8] [--max-new-tokens 96]

The drafter is exported (layout ``zlab``) and converted to GGUF like its target, and ``llama-server``, which
``python tools/bench/llama_cpp_env.py`` builds, decodes the prompts greedily in float32, with the drafter and without.
For every prompt

- the text with the drafter must be the text without it, and
- the steps must be as many as our own serving walk takes over that text, from float32 states as in the server. The walk
  from states rounded to bfloat16, as a store has them, is printed beside it.

Either may differ where two tokens are equally likely within float32's rounding; it is printed where. Any other
difference gives the exit status 1.

llama.cpp has one flag for all layers of a drafter that says whether a slot sees the slots after it. An export sets it
where all layers are sliding ones, which are causal. A drafter with both kinds of layers cannot be served as it was
trained.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp_env
import torch
from hstrain.drafter.model import Drafter
from hstrain.exchange.export import export_drafter
from hstrain.exchange.importer import open_drafter
from hstrain.live.decode import Draft
from hstrain.live.target import LiveTarget, load_tokenizer, open_target, read_prompts
from torch import Tensor

from hscache.console import say, table
from hscache.store.head import TargetHead, load_head

TIE = 1e-3
"""Logits in float32 that are closer than this may change places from one implementation to another."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a run, one of its checkpoints, or a released drafter")
    parser.add_argument("--store", type=Path, required=True, help="the drafter's")
    parser.add_argument("--target", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--target-gguf", type=Path, help="the target in float32, if it has been converted before")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL")
    parser.add_argument("--limit", type=int, default=None, help="the first prompts only")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    found = compare(args)
    if not found:
        sys.exit(f"{args.prompts}: no prompt")
    report(found)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.exit(int(any(row["wrong"] for row in found)))


def report(found: Sequence[dict[str, Any]]) -> None:
    """Print a row for each prompt, the totals, and what differs."""
    columns = ["prompt", ("tokens", ""), ("steps", ""), ("our steps", ""), ("from bf16 states", ""), ("tau", ".3f")]
    columns += [("tokens/s", ".1f"), ("without", ".1f")]
    counts = ("tokens", "steps", "our_steps", "stored_steps")
    sums = (*counts, "by_steps", "seconds", "plain_tokens", "plain_seconds")
    total = {"prompt": "all", **{name: sum(row[name] for row in found) for name in sums}}
    cells = [
        [
            row["prompt"],
            *(row[name] for name in counts),
            row["by_steps"] / row["steps"] if row["steps"] else None,
            row["tokens"] / row["seconds"],
            row["plain_tokens"] / row["plain_seconds"],
        ]
        for row in (*found, total)
    ]
    table(f"{len(found)} prompts, float32", columns, cells)
    for row in found:
        for text in row["differs"]:
            print(f"{row['prompt']}: {text}")


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what is known of each prompt: texts, steps, seconds, and what differs."""
    head = load_head(args.store / "target")
    drafter, _ = open_drafter(args.checkpoint, head)
    rows = read_prompts([args.prompts], load_tokenizer(args.target), _refuse, limit=args.limit)
    prompts = {prompt.sample_id: prompt.ids for prompt in rows}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        say(f"converting {args.checkpoint} and its target")
        target = args.target_gguf or llama_cpp_env.convert(args.target, scratch / "target.gguf")
        draft = to_gguf(drafter, head, args.target, scratch)
        slot_tokens = max(map(len, prompts.values()), default=0) + args.max_new_tokens + drafter.config.block_size
        if len(set(drafter.config.layer_types)) > 1:
            say("llama.cpp lets the sliding layers see a whole block, but they were trained to see only earlier slots")
        plain = serve(target, None, prompts, args.max_new_tokens, slot_tokens, scratch)
        drafted = serve(target, (draft, drafter.config.block_size), prompts, args.max_new_tokens, slot_tokens, scratch)
    found = []
    with open_target(str(args.target), drafter.config.taps, dtype="float32", device="cpu") as (live, _):
        for name, ids in prompts.items():
            found.append(judge(name, ids, plain[name], drafted[name], live, drafter, head))
            say(f"{name}: {'; '.join(found[-1]['differs']) or 'same'}")
    return found


def _refuse(path: str, row: int, reason: str, detail: str) -> None:
    sys.exit(f"{path}, row {row}: {reason}: {detail}")


def to_gguf(drafter: Drafter, head: TargetHead, target: Path, folder: Path) -> Path:
    """Export a drafter in float32 and convert it."""
    export_drafter("zlab", drafter, head, folder / "export", provenance={"target": str(target)}, dtype="float32")
    return llama_cpp_env.convert(folder / "export", folder / "drafter.gguf", target=target)


def serve(
    target: Path,
    drafter: tuple[Path, int] | None,
    prompts: dict[str, list[int]],
    max_new_tokens: int,
    slot_tokens: int,
    folder: Path,
) -> dict[str, dict[str, Any]]:
    """Return the server's answer to each prompt, with a drafter (its file and block size) or without."""
    options: list[str] = []
    if drafter is not None:
        options = ["--model-draft", str(drafter[0]), "--spec-type", "draft-dflash"]
        options += ["--spec-draft-n-max", str(drafter[1] - 1), "--spec-draft-threads", "1"]
        options += ["--spec-draft-type-k", "f32", "--spec-draft-type-v", "f32"]
    with llama_cpp_env.serving(target, folder / "log", slot_tokens=slot_tokens, options=options) as url:
        return {name: llama_cpp_env.complete(url, ids, max_new_tokens) for name, ids in prompts.items()}


def judge(
    name: str,
    prompt: list[int],
    plain: dict[str, Any],
    drafted: dict[str, Any],
    live: LiveTarget,
    drafter: Drafter,
    head: TargetHead,
) -> dict[str, Any]:
    """Compare the server's answers with each other and with our walk over the text with a drafter."""
    ids, timings = drafted["tokens"], drafted["timings"]
    # the first token comes from the prompt's pass, and each step gives one token more than it accepts
    steps = timings["predicted_n"] - 1 - timings.get("draft_n_accepted", 0)
    states_TLH = live.prefill(prompt + ids).states
    ours, closest = walk(Exact(drafter, head, live.device), states_TLH, prompt + ids, len(prompt))
    stored, _ = walk(Exact(drafter, head, live.device), states_TLH.bfloat16(), prompt + ids, len(prompt))
    differs, wrong = [], False
    if (parted := parting(live, prompt, plain["tokens"], ids)) is not None:
        differs.append(f"with the drafter, {parted[0]}")
        wrong |= parted[1] > TIE
    if steps != len(ours):
        differs.append(
            f"{steps} steps, {len(ours)} in our walk; our drafter's two best are {closest:.2g} apart at the closest"
        )
        wrong |= closest > TIE
    return {
        "prompt": name,
        "tokens": len(ids),
        "by_steps": len(ids) - 1,
        "plain_tokens": len(plain["tokens"]),
        "steps": steps,
        "our_steps": len(ours),
        "stored_steps": len(stored),
        "walk": ours,
        "seconds": timings["predicted_ms"] / 1e3,
        "plain_seconds": plain["timings"]["predicted_ms"] / 1e3,
        "differs": differs,
        "wrong": wrong,
    }


class Exact(Draft):
    """A drafter whose context is not rounded to bfloat16, unlike a store's: a server has the states themselves."""

    def read(self, states_TLH: Tensor) -> None:
        """Take the states of the whole text."""
        positions_T = torch.arange(len(states_TLH), device=states_TLH.device)
        self._whole = self.drafter.context(states_TLH.float(), positions_T)

    def cut(self, rows: int) -> None:
        """Let the context be the text's first rows."""
        self.length, self._context = rows, [(keys[:rows], values[:rows]) for keys, values in self._whole]


def walk(draft: Exact, states_TLH: Tensor, ids: Sequence[int], first: int) -> tuple[list[int], float]:
    """Return what each step of serving yields over a text, in tokens, and the closest of the choices that count.

    Args:
        draft: The drafter.
        states_TLH: The target's tapped states of the text.
        ids: Prompt and completion.
        first: Length of the prompt.
    """
    draft.read(states_TLH)
    steps, closest, at = [], float("inf"), first
    while at < len(ids) - 1:
        draft.cut(at)
        best = draft.propose(ids[at]).topk(2, -1)
        right = [a == b for a, b in zip(best.indices[:, 0].tolist(), ids[at + 1 :], strict=False)]
        streak = right.index(False) if False in right else len(right)
        gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
        # a token at the very end of the text may be accepted or be the target's own: both give the same step
        closest = min([closest, *gaps[: streak + 1]])
        steps.append(min(streak + 1, len(ids) - 1 - at))
        at += steps[-1]
    return steps, closest


def parting(live: LiveTarget, prompt: list[int], one: list[int], other: list[int]) -> tuple[str, float] | None:
    """Return where two completions of a prompt part, and how far their logits are apart there; None if equal.

    The difference is infinite where one of them only ends earlier.
    """
    if one == other:
        return None
    at = next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if at is None:
        return f"the text ends after {len(other)} tokens instead of {len(one)}", float("inf")
    (logits_V,) = live.prefill(prompt + one[:at]).logits
    a, b = one[at], other[at]
    gap = float((logits_V[a] - logits_V[b]).abs())
    return f"token {at} of {len(one)} is {b} instead of {a}, and their logits differ by {gap:.2g}", gap


if __name__ == "__main__":
    main()
