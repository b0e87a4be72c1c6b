"""Measure a drafter on real prompts: tokens per step, speed, and whether the text is still the target's.

Every prompt is completed with the drafter and, greedily, without it; the two texts must be equal token for token. In
float32 they are. In bf16 a pass over several rows rounds differently from a pass over a single row, and where the two
most likely tokens are closer than that, the texts may differ. A faulty run cannot show how large its rounding may be.
So at each such place the target reads the common text once more, in one pass with a fresh cache; logits that are
further from that pass than the precision explains are a fault.

With a serving engine's texts as references, the drafter is also scored on these. Where our texts differ from them is
reported, but does not count as a fault.

``tau`` is tokens per step, over all steps of all prompts: what a server would see. It equals the walk over a store's
samples when these are the same texts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hscache.console import Progress, counts, facts, figures, say
from hscache.device import Dtype
from hscache.errors import ConfigError, ConflictError, InputError
from hscache.store.head import TargetHead
from hstrain.drafter.model import Drafter
from hstrain.live.decode import Decoded, Draft, decode
from hstrain.live.reference import Reference, fetch_references, first_difference, score_reference
from hstrain.live.server import Server
from hstrain.live.target import (
    LiveTarget,
    Prompt,
    Sampling,
    kernel_fallback,
    kernel_path,
    load_tokenizer,
    open_target,
    read_prompts,
)
from hstrain.score.walk import check_finite

_HEAD_ROWS = 64
_ROUNDING = {"bfloat16": 4 * 2.0**-7, "float32": 1e-3}
"""Precision -> how much logits of one text may differ between passes: a share of the largest of them."""


def speculate_prompts(
    drafter: Drafter,
    head: TargetHead,
    target: str,
    prompts: list[Path],
    sampling: Sampling,
    *,
    tree_size: int | None = None,
    raw: bool = False,
    limit: int | None = None,
    plain: bool = True,
    reference: Server | None = None,
    dtype: Dtype = "auto",
    attn_implementation: str = "sdpa",
    device: str | None = None,
    allow_fallback: bool = False,
) -> dict[str, Any]:
    """Complete prompts with a drafter and without, and report how that went.

    Args:
        drafter: The drafter.
        head: Of the store that it was fitted from.
        target: Checkpoint directory or hub id.
        prompts: Files as ``hscache generate`` takes them.
        sampling: How tokens are chosen; temperature 0 for greedy. The seed of a prompt follows from its place.
        tree_size: Nodes of a draft tree; None for a chain.
        raw: Continue texts as they are, without the chat template.
        limit: First N prompts of each file.
        plain: Decode without the drafter too.
        reference: Serving engine whose greedy texts are scored too.
        dtype: Precision of the target; ``auto`` is bfloat16 where the device has it, else float32.
        attn_implementation: Of the target, as transformers names it.
        device: Such as ``cuda:0``; None for CUDA if there is one.
        allow_fallback: Decode on a GPU without the kernels that exist for the target, too.

    Returns:
        JSON-plain: ``prompts`` (one entry each), ``rejected``, ``tau``, ``streaks`` (histogram), ``tokens_per_s``,
        ``lossless``, ``kernels``, ``kernel_fallback``, ``reference`` (None without one), and what was asked for.

    Raises:
        ConfigError: ``taps-invalid``; ``reference-sampled`` for a reference with a temperature above 0.
        ConflictError: ``target-other``.
        EnvironmentFault: ``kernel-fallback``, what else loading, kernels and rollback raise, ``not-finite``, and
            ``server-...`` as the server does.
        InputError: ``corpus-missing``, ``corpus-format``, ``corpus-empty``, ``template-missing``.
    """
    if reference is not None and sampling.temperature > 0:
        raise ConfigError(
            "reference-sampled",
            f"temperature {sampling.temperature:g} with a reference, which is greedy text",
            hint="leave out --temperature or --reference",
        )
    taps = drafter.config.taps
    opened = open_target(
        target, taps, dtype=dtype, attn_implementation=attn_implementation, device=device, allow_fallback=allow_fallback
    )
    with opened as (live, observation):
        check_same_target(live, drafter, head)
        tokenizer = load_tokenizer(live.directory)
        if not live.eos_ids and tokenizer.eos_token_id is not None:
            live.eos_ids = {tokenizer.eos_token_id}
        draft = Draft(drafter.to(live.device), head, live.device)
        ready, rejected = _ready(live, tokenizer, draft, prompts, sampling, raw=raw, limit=limit)
        texts: list[Reference | None] = [None] * len(ready)
        faults: list[dict[str, str]] = []
        if reference is not None:
            texts, faults = fetch_references(reference, live, tokenizer, ready, sampling.max_new_tokens)
        # the first pass of everything is slower: kernels are chosen, compiled and tuned
        for side in (draft, None)[: 2 if plain else 1]:
            decode(live, ready[0].ids, dataclasses.replace(sampling, max_new_tokens=3), side, tree_size)
        progress, entries, greedy = Progress("speculate", len(ready), "prompts"), [], sampling.temperature <= 0
        for place, prompt in enumerate(ready):
            seeded = dataclasses.replace(sampling, seed=sampling.seed * 1_000_003 + place)
            drafted = decode(live, prompt.ids, seeded, draft, tree_size)
            peer = decode(live, prompt.ids, seeded) if plain else None
            apart = None
            if greedy and peer is not None:
                apart = difference(drafted, peer, partial(_alone, live, prompt.ids), live.dtype)
            entry = _entry(prompt, drafted, peer, apart, greedy=greedy)
            if (text := texts[place]) is not None:
                scored = score_reference(live, drafter, draft, prompt, text, peer or drafted, tree_size)
                entry["reference"] = {**scored, "tau": _mean(scored["accepted"])}
            entries.append(entry)
            progress.advance(1, f"tau {_tau(entries) or 0:.2f}")
        progress.close()
        if fallback := kernel_fallback(observation, live):
            say(f"torch stood in for kernels on this GPU ({kernel_path(observation)}): no server is so slow")
        return {
            "target": target,
            "device": str(live.device),
            "dtype": live.dtype,
            "kernels": kernel_path(observation),
            "kernel_fallback": fallback,
            "sampling": dataclasses.asdict(sampling),
            "block_size": draft.block_size,
            "tree_size": tree_size,
            **summary(entries),
            "reference": reference and {**reference_summary(entries, reference), "rejected": faults},
            "rejected": rejected,
            "prompts": entries,
        }


def check_same_target(live: LiveTarget, drafter: Drafter, head: TargetHead) -> None:
    """Check that a loaded target is the one whose states and head the drafter knows.

    Raises:
        ConflictError: ``target-other``.
    """
    model: Any = live.loaded.model
    found, wanted = live.loaded.shape, drafter.config
    here = (found.num_layers, found.hidden_size, found.vocab_size)
    there = (wanted.num_target_layers, wanted.hidden_size, wanted.vocab_size)
    if here != there:
        raise ConflictError(
            "target-other", f"the target has (layers, width, vocabulary) {here}, the drafter's had {there}"
        )
    lm_head: Any = live.loaded.head
    weights = (
        ("embedding", model.get_input_embeddings().weight, head.embed),
        ("head", lm_head.weight, head.lm_head),
    )
    for name, here_VH, there_VH in weights:
        if here_VH.shape != there_VH.shape:
            raise ConflictError("target-other", f"{name}: {list(here_VH.shape)}, the store's {list(there_VH.shape)}")
        some = torch.linspace(0, len(there_VH) - 1, _HEAD_ROWS).long()
        pair = (here_VH[some.to(here_VH.device)].cpu().bfloat16(), there_VH[some].bfloat16())
        if not torch.equal(*pair):
            raise ConflictError(
                "target-other",
                f"the target's {name} is not that of the store from which the drafter was fitted",
                hint="give the checkpoint that hscache info names as the store's target",
            )


def difference(
    drafted: Decoded, peer: Decoded, alone: Callable[[list[int]], Tensor], dtype: str
) -> dict[str, Any] | None:
    """Return where two greedy completions of one prompt part first, or None where they do not.

    Args:
        drafted: With a drafter.
        peer: Without one.
        alone: Gives the target's logits [V] after the prompt and these tokens, by a pass of their own.
        dtype: The target's precision.

    Returns:
        ``position`` in the completion; of both sides the ``token``, and the two most likely tokens with their logits;
        ``gap``, the smaller distance between those two logits; ``noise``, how far a side is from ``alone`` at most: in
        the logits of its two tokens, or by what its own token is less likely there than the best; ``limit``, what the
        precision explains of it; ``kind``: ``unexplained`` where the noise is above the limit, which is a fault of
        ours, else ``tie`` where one side has just these two tokens as its best, without a gap, else ``noise``.
    """
    at = first_difference(drafted.ids, peer.ids)
    if at is None:
        return None
    if at >= min(len(drafted.ids), len(peer.ids)):
        return {"position": at, "kind": "unexplained", "lengths": [len(drafted.ids), len(peer.ids)]}
    truth_V = alone(drafted.ids[:at]).cpu()
    limit = _ROUNDING[dtype] * float(truth_V.abs().max())
    noise = max(_off(side, at, truth_V) for side in (drafted, peer))
    gap = min(logits[at][0] - logits[at][1] for logits in (drafted.top_logits, peer.top_logits))
    pair = {drafted.ids[at], peer.ids[at]}
    # an equal pair of other tokens says nothing of these two
    tied = any(s.top_logits[at][0] == s.top_logits[at][1] and set(s.top_ids[at]) == pair for s in (drafted, peer))
    kind = "unexplained" if noise > limit else "tie" if tied else "noise"
    sides = {
        name: {"token": side.ids[at], "top_ids": side.top_ids[at], "top_logits": side.top_logits[at]}
        for name, side in (("drafted", drafted), ("plain", peer))
    }
    return {"position": at, "kind": kind, "gap": gap, "noise": noise, "limit": limit, **sides}


def _off(side: Decoded, at: int, truth_V: Tensor) -> float:
    """Return how far a side's two best logits are from the truth at most, or its token from the truth's best."""
    there = truth_V[side.top_ids[at]]
    moved = (torch.tensor(side.top_logits[at]) - there).abs().max()
    return float(torch.maximum(moved, truth_V.max() - truth_V[side.ids[at]]))


def summary(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures over all prompts."""
    histogram = _histogram(entries)
    compared = [entry for entry in entries if entry["lossless"] is not None]
    differing = [entry["difference"]["kind"] for entry in compared if entry["difference"]]
    speeds = {side: _speed(entries, side) for side in ("drafted", "plain")}
    with_drafter, without = speeds["drafted"], speeds["plain"]
    return {
        "tau": _tau(entries),
        "tau_by_tag": {
            tag: _tau([entry for entry in entries if entry["tag"] == tag])
            for tag in sorted({entry["tag"] for entry in entries} - {None})
        },
        "steps": sum(histogram),
        "streaks": histogram,
        "tokens_per_s": speeds,
        "speedup": with_drafter / without if with_drafter and without else None,
        "step_s": {
            part: sum(entry["drafted"]["step_s"][part] for entry in entries) / max(sum(histogram), 1)
            for part in ("draft", "verify", "keep")
        },
        "lossless": {
            "compared": len(compared),
            "equal": len(compared) - len(differing),
            **{kind: differing.count(kind) for kind in ("tie", "noise", "unexplained")},
        },
    }


def reference_summary(entries: Sequence[dict[str, Any]], server: Server) -> dict[str, Any]:
    """Return the figures over all prompts that have a reference; ``tau_live`` is that of our own texts of the same."""
    with_one = [entry for entry in entries if entry["reference"] is not None]
    texts = [entry["reference"] for entry in with_one]
    histogram = _histogram(texts)
    return {
        "url": server.url,
        "model": server.model,
        "prompts": len(texts),
        "tokens": sum(len(text["ids"]) for text in texts),
        "tau": _tau(texts),
        "tau_live": _tau(with_one),
        "steps": sum(histogram),
        "streaks": histogram,
        "equal": sum(text["parts"] is None for text in texts),
        "ids_from": {how: sum(text["ids_from"] == how for text in texts) for how in ("server", "text")},
        "unstable": sum(not text["stable"] for text in texts),
    }


def print_speculation(found: dict[str, Any]) -> None:
    """Print what :func:`speculate_prompts` returned."""
    speeds, lossless = found["tokens_per_s"], found["lossless"]
    shape = f"tree of {found['tree_size']} nodes" if found["tree_size"] else f"blocks of {found['block_size']}"
    pairs: list[tuple[str, object]] = [
        ("prompts", f"{len(found['prompts'])} ({len(found['rejected'])} rejected)"),
        ("tau", f"{found['tau']:.3f} tokens a step, {found['steps']:,} steps" if found["steps"] else "no steps"),
        ("streaks", " ".join(f"{n}:{count}" for n, count in enumerate(found["streaks"]))),
        ("kernels", found["kernels"]),
    ]
    by_tag = {tag: tau for tag, tau in found["tau_by_tag"].items() if tau is not None}
    pairs.append(("by tag", figures(by_tag, ".2f") if len(by_tag) > 1 else None))
    if found["speedup"]:
        speed = f"{speeds['drafted']:.1f} tokens/s, {speeds['plain']:.1f} without a drafter"
        # in tokens of plain decoding: what a step must yield to pay
        parts = {part: seconds * speeds["plain"] for part, seconds in found["step_s"].items()}
        cost = f"costs {sum(parts.values()):.2f} tokens without a drafter: {figures(parts, '.2f')}"
        pairs += [("speed", f"{speed}: {found['speedup']:.2f} times as fast"), ("step", cost)]
    if lossless["compared"]:
        other = {kind: lossless[kind] for kind in ("tie", "noise", "unexplained") if lossless[kind]}
        apart = f"; parted: {counts(other)}" if other else ""
        pairs.append(("lossless", f"{lossless['equal']} of {lossless['compared']} texts as without a drafter{apart}"))
    if found["reference"]:
        pairs += _reference_facts(found["reference"])
    facts(f"{found['target']}: {found['dtype']} on {found['device']}, {shape}", pairs)
    for entry in found["prompts"]:
        if entry.get("difference"):
            say(f"{entry['id']}: {entry['difference']}")
        if entry["reference"] and entry["reference"]["parts"]:
            say(f"{entry['id']}: parts from the reference: {entry['reference']['parts']}")
    for fault in (found["reference"] or {}).get("rejected", ()):
        say(f"{fault['id']}: no reference: {fault['reason']}: {fault['detail']}")


def _reference_facts(found: dict[str, Any]) -> list[tuple[str, object]]:
    tau, live = (f"{found[name]:.3f}" if found["steps"] else "none" for name in ("tau", "tau_live"))
    texts, tokens = found["prompts"], found["tokens"]
    count = f"{texts} ({len(found['rejected'])} without), {tokens:,} tokens of {found['model']} at {found['url']}"
    unstable = f"; {found['unstable']} not as prompt and text are tokenized together" if found["unstable"] else ""
    ids = ", ".join(f"{n} by {how}" for how, n in found["ids_from"].items() if n)
    return [
        ("references", count),
        ("their tau", f"{tau} over {found['steps']:,} steps; {live} live on the same prompts"),
        ("their ids", ids + unstable),
        ("their text", f"{found['equal']} of {texts} as the target's own greedy text here"),
    ]


def _ready(
    live: LiveTarget,
    tokenizer: Any,
    draft: Draft,
    paths: list[Path],
    sampling: Sampling,
    *,
    raw: bool,
    limit: int | None,
) -> tuple[list[Prompt], list[dict[str, Any]]]:
    rejected: list[dict[str, Any]] = []

    def reject(source: str, row: int, reason: str, detail: str) -> None:
        rejected.append({"source": source, "row": row, "reason": reason, "detail": detail})

    ready = []
    room = live.max_positions - sampling.max_new_tokens - draft.block_size
    for prompt in read_prompts(paths, tokenizer, reject, raw=raw, limit=limit):
        if not 0 < len(prompt.ids) <= room:
            reject(prompt.source, prompt.row, "too-long", f"{len(prompt.ids)} prompt tokens, room for {room}")
        else:
            ready.append(prompt)
    if not ready:
        raise InputError(
            "corpus-empty", f"{', '.join(map(str, paths))}: no prompt can be used ({len(rejected)} rejected)"
        )
    if rejected:
        say(f"{len(rejected)} prompts rejected, {len(ready)} used")
    return ready, rejected


def _alone(live: LiveTarget, prompt: list[int], ids: list[int]) -> Tensor:
    """Return the logits [V] after a text that is read at once: nothing was drafted in it, nothing put back."""
    logits_1V = live.prefill([*prompt, *ids]).logits
    check_finite("the target", logits_1V)
    return logits_1V[0]


def _entry(
    prompt: Prompt, drafted: Decoded, peer: Decoded | None, apart: dict[str, Any] | None, *, greedy: bool
) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "id": prompt.sample_id,
        "tag": prompt.tag,
        "prompt_tokens": len(prompt.ids),
        "ids": drafted.ids,
        "finish_reason": drafted.finish_reason,
        "anchors": [step.anchor for step in drafted.steps],
        "accepted": [step.accepted for step in drafted.steps],
        "streaks": [step.streak for step in drafted.steps],
        "tau": _mean(step.accepted for step in drafted.steps),
        "lossless": apart is None if peer is not None and greedy else None,
        "difference": apart,
        "reference": None,
    }
    for name, side in (("drafted", drafted), ("plain", peer)):
        entry[name] = side and {"tokens": len(side.ids), "prefill_s": side.prefill_s, "decode_s": side.decode_s}
    entry["drafted"]["step_s"] = drafted.step_s
    return entry


def _speed(entries: Sequence[dict[str, Any]], side: str) -> float | None:
    """Return tokens per second after the first token of each prompt."""
    times = [entry[side] for entry in entries if entry[side] is not None and entry[side]["tokens"] > 1]
    seconds = sum(time["decode_s"] for time in times)
    return sum(time["tokens"] - 1 for time in times) / seconds if seconds else None


def _histogram(entries: Sequence[dict[str, Any]]) -> list[int]:
    """Return how many steps had a streak of 0, 1, ..."""
    streaks = [streak for entry in entries for streak in entry["streaks"]]
    return [streaks.count(n) for n in range(max(streaks, default=-1) + 1)]


def _tau(entries: Sequence[dict[str, Any]]) -> float | None:
    return _mean(accepted for entry in entries for accepted in entry["accepted"])


def _mean(numbers: Iterable[int]) -> float | None:
    values = list(numbers)
    return sum(values) / len(values) if values else None
