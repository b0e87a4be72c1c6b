"""Measure a drafter on real prompts: tokens per step, speed, and whether the text is still the target's.

Every prompt is completed with and without the drafter, and two greedy texts must be equal token for token. In float32
they are. In bf16 a pass over several rows rounds differently from a pass over a single row, so the texts may differ
where the two most likely tokens are closer than the rounding. The two runs alone cannot show whether rounding explains
a difference. So at the first one, the target reads the common text once more, in one pass with a fresh cache; if the
logits of a run differ from that pass by more than the precision explains, it is a fault.

With a serving engine's texts as references, the drafter is also scored on these. The places where our texts differ from
them are reported, but are not faults.

``tau`` is tokens per step, over all steps of all prompts, as a server would measure it. For the same texts it equals
the walk over a store's samples.

With several numbers of drafted tokens, each completes the same prompts, and its speed stands beside the one that
``hstrain eval --cost`` predicts: from the walk over these texts, the costs of the longest draft, and what a row costs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hscache.console import Column, Progress, counted, counts, facts, figures, say, table
from hscache.device import Dtype
from hscache.errors import ConfigError, ConflictError, InputError
from hscache.store.head import TargetHead
from hstrain.drafter.model import Drafter
from hstrain.live.decode import Decoded, Draft, decode
from hstrain.live.reference import Reference, fetch_references, first_difference, score_reference, score_text
from hstrain.live.server import Server
from hstrain.live.target import (
    LiveTarget,
    Prompt,
    Sampling,
    end_token_ids,
    kernel_fallback,
    kernel_path,
    load_tokenizer,
    open_target,
    read_prompts,
)
from hstrain.score.walk import Cost, SampleScore, check_finite, speed_by_length

_HEAD_ROWS = 64
_ROUNDING = {"bfloat16": 4 * 2.0**-7, "float32": 1e-3}
"""Precision -> largest difference of a text's logits between two passes, relative to the largest logit."""


def speculate_prompts(
    drafter: Drafter,
    head: TargetHead,
    target: str,
    prompts: list[Path],
    sampling: Sampling,
    *,
    draft_tokens: Sequence[int] = (),
    tree_size: int | None = None,
    raw: bool = False,
    limit: int | None = None,
    plain: bool = True,
    reference: Server | None = None,
    dtype: Dtype = "auto",
    device: str | None = None,
    allow_fallback: bool = False,
) -> dict[str, Any]:
    """Complete prompts with and without a drafter, and return figures and texts.

    Args:
        drafter: The drafter.
        head: Head of the store that it was fitted from.
        target: Checkpoint directory or hub id.
        prompts: Files in the formats of ``hscache generate``.
        sampling: How tokens are chosen; temperature 0 for greedy. Every prompt gets its own seed, from its place.
        draft_tokens: Numbers of drafted tokens that a step verifies, each for all prompts; empty for all that a block
            has. The drafter drafts a whole block each time, as in training.
        tree_size: Nodes of a draft tree; None for a chain.
        raw: Continue texts as they are, without the chat template.
        limit: Take only the first N prompts of each file.
        plain: Also decode without the drafter.
        reference: Serving engine whose greedy texts are also scored.
        dtype: Precision of the target; ``auto`` is bfloat16 where the device has it, else float32.
        device: Such as ``cuda:0``; None for CUDA if there is one.
        allow_fallback: Allow torch references on a GPU although kernels exist.

    Returns:
        JSON-plain: ``prompts`` (an entry for each), ``rejected``, ``tau``, ``streaks`` (histogram), ``tokens_per_s``,
        ``lossless``, ``kernels``, ``kernel_fallback``, ``reference`` (None without one), and the settings. These are
        figures of the largest number of drafted tokens; ``by_draft_tokens`` has a row for every number, as
        :func:`length_rows` returns them.

    Raises:
        ConfigError: ``taps-invalid``; ``reference-sampled`` for a reference with a temperature above 0; ``usage`` for
            more drafted tokens than a block has.
        ConflictError: ``target-other``.
        EnvironmentFault: ``kernel-fallback``, other errors of loading, kernels and rollback, ``not-finite``, and the
            ``server-...`` errors of the reference.
        InputError: ``corpus-missing``, ``corpus-format``, ``corpus-empty``, ``template-missing``.
    """
    if reference is not None and sampling.temperature > 0:
        raise ConfigError(
            "reference-sampled",
            f"temperature {sampling.temperature:g} with a reference, which is greedy text",
            hint="leave out --temperature or --reference",
        )
    most = drafter.config.block_size - 1
    lengths = sorted(set(draft_tokens)) or [most]
    if lengths[-1] > most:
        what = f"--draft-tokens {lengths[-1]}: this drafter drafts {counted(most, 'token')} a step"
        raise ConfigError("usage", what, hint=f"give at most {most}")
    opened = open_target(target, drafter.config.taps, dtype=dtype, device=device, allow_fallback=allow_fallback)
    with opened as (live, observation):
        check_same_target(live, drafter, head)
        tokenizer = load_tokenizer(live.directory)
        live.eos_ids = end_token_ids(live.directory, tokenizer)
        draft = Draft(drafter.to(live.device), head, live.device)
        ready, rejected = _ready(live, tokenizer, draft, prompts, sampling, raw=raw, limit=limit)
        texts: list[Reference | None] = [None] * len(ready)
        faults: list[dict[str, str]] = []
        if reference is not None:
            texts, faults = fetch_references(reference, live, tokenizer, ready, sampling.max_new_tokens)
        # warm up: in their first pass, kernels are chosen, compiled and tuned
        for draft.tokens in lengths:
            decode(live, ready[0].ids, dataclasses.replace(sampling, max_new_tokens=3), draft, tree_size)
        if plain:
            decode(live, ready[0].ids, dataclasses.replace(sampling, max_new_tokens=3))
        progress = Progress("speculate", len(ready), "prompts")
        entries: dict[int, list[dict[str, Any]]] = {n: [] for n in lengths}
        scores: list[SampleScore] = []
        for place, (prompt, text) in enumerate(zip(ready, texts, strict=True)):
            seeded = dataclasses.replace(sampling, seed=sampling.seed * 1_000_003 + place)
            for n, entry in _complete(live, draft, prompt, seeded, text, tree_size, lengths, plain=plain).items():
                entries[n].append(entry)
            if len(lengths) > 1 and plain and sampling.temperature <= 0:
                scores.append(score_text(live, draft, prompt, entries[lengths[-1]][-1]["ids"]))
            progress.advance(1, f"tau {_tau(entries[lengths[-1]]) or 0:.2f}")
        progress.close()
        if fallback := kernel_fallback(observation, live):
            say(f"torch replaced kernels on this GPU ({kernel_path(observation)}): a server would be faster")
        return {
            "target": target,
            "device": str(live.device),
            "dtype": live.dtype,
            "kernels": kernel_path(observation),
            "kernel_fallback": fallback,
            "sampling": dataclasses.asdict(sampling),
            "block_size": draft.block_size,
            "draft_tokens": lengths[-1],
            "tree_size": tree_size,
            **summary(entries[lengths[-1]]),
            "by_draft_tokens": length_rows(entries, scores),
            "reference": reference and {**reference_summary(entries[lengths[-1]], reference), "rejected": faults},
            "rejected": rejected,
            "prompts": entries[lengths[-1]],
        }


def check_same_target(live: LiveTarget, drafter: Drafter, head: TargetHead) -> None:
    """Check that a loaded target is the one that the drafter was trained for.

    Raises:
        ConflictError: ``target-other``.
    """
    model: Any = live.loaded.model
    found, wanted = live.loaded.shape, drafter.config
    here = (found.num_layers, found.hidden_size, found.vocab_size)
    there = (wanted.num_target_layers, wanted.hidden_size, wanted.vocab_size)
    if here != there:
        raise ConflictError(
            "target-other", f"(layers, width, vocabulary) of the target are {here}, of the drafter's target {there}"
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
                f"the target's {name} differs from that of the store from which the drafter was fitted",
                hint="give the checkpoint that hscache info shows as the store's target",
            )


def difference(
    drafted: Decoded, peer: Decoded, alone: Callable[[list[int]], Tensor], dtype: str
) -> dict[str, Any] | None:
    """Return the first difference of two greedy completions of one prompt, or None if they are equal.

    Args:
        drafted: Completion with a drafter.
        peer: Completion without one.
        alone: Returns the target's logits [V] after the prompt and the given tokens, from a pass over all of them.
        dtype: The target's precision.

    Returns:
        ``position`` in the completion; of both sides the ``token``, and the two most likely tokens with their logits;
        ``gap``, the smaller distance between those two logits; ``noise``, the largest error of a side against
        ``alone``: of the logits of its two tokens, or the amount by which ``alone`` gives its token a lower logit than
        the best; ``limit``, the largest error that the precision explains; ``kind``: ``unexplained`` if the noise is
        above the limit, which is a fault, else ``tie`` if on one side these two tokens are the best and have equal
        logits, else ``noise``.
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
    # a tie between other tokens does not explain this difference
    tied = any(s.top_logits[at][0] == s.top_logits[at][1] and set(s.top_ids[at]) == pair for s in (drafted, peer))
    kind = "unexplained" if noise > limit else "tie" if tied else "noise"
    sides = {
        name: {"token": side.ids[at], "top_ids": side.top_ids[at], "top_logits": side.top_logits[at]}
        for name, side in (("drafted", drafted), ("plain", peer))
    }
    return {"position": at, "kind": kind, "gap": gap, "noise": noise, "limit": limit, **sides}


def _off(side: Decoded, at: int, truth_V: Tensor) -> float:
    """Return the largest error of a side's two best logits, or the logit that its token lacks to the true best one."""
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


def length_rows(
    entries: Mapping[int, Sequence[dict[str, Any]]], scores: Sequence[SampleScore] = ()
) -> list[dict[str, Any]]:
    """Return the figures of each number of drafted tokens.

    Args:
        entries: Number of drafted tokens -> an entry for each prompt, ascending.
        scores: The drafter's predictions over the same texts; empty to predict nothing.

    Returns:
        JSON-plain rows: ``draft_tokens``, all of :func:`summary`; ``cost``, of a step in tokens without a drafter, None
        if the speeds are not known; ``predicted``, the speed-up that :func:`hstrain.score.walk.speed_by_length` gives
        with the cost of the last row, None without scores; and ``differences``, of the prompts whose text is not that
        without a drafter, by id. The last cost has ``row``, the slope of a line through it along the other costs.
    """
    rows: list[dict[str, Any]] = [
        {
            "draft_tokens": n,
            **summary(some),
            "differences": {entry["id"]: entry["difference"] for entry in some if entry["difference"]},
            "predicted": None,
        }
        for n, some in entries.items()
    ]
    for row in rows:
        row["cost"] = _costs(row) if row["speedup"] else None
    last = rows[-1]
    if scores and last["speedup"]:
        fewer = np.array([last["draft_tokens"] - row["draft_tokens"] for row in rows])
        less = np.array([sum(last["cost"][part] - row["cost"][part] for part in ("verify", "keep")) for row in rows])
        last["cost"]["row"] = max(0.0, float(fewer @ less / (fewer @ fewer)))
        for row, speed in zip(rows, speed_by_length(scores, Cost(**last["cost"]), lengths=list(entries)), strict=True):
            row["predicted"] = speed
    return rows


def _costs(found: Mapping[str, Any]) -> dict[str, float]:
    """Return the cost of a step by part, in tokens of plain decoding."""
    return {part: seconds * found["tokens_per_s"]["plain"] for part, seconds in found["step_s"].items()}


def reference_summary(entries: Sequence[dict[str, Any]], server: Server) -> dict[str, Any]:
    """Return the figures over all prompts that have a reference; ``tau_live`` is tau of our own texts for them."""
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
    shape = (
        f"tree of {counted(found['tree_size'], 'node')}" if found["tree_size"] else f"blocks of {found['block_size']}"
    )
    if (verified := found["draft_tokens"]) < found["block_size"] - 1:
        shape += f", of which {counted(verified, 'drafted token')} verified"
    pairs: list[tuple[str, object]] = [
        ("prompts", f"{len(found['prompts'])} ({len(found['rejected'])} rejected)"),
        (
            "tau",
            f"{found['tau']:.3f} tokens a step, {counted(found['steps'], 'step')}" if found["steps"] else "no steps",
        ),
        ("streaks", " ".join(f"{n}:{count}" for n, count in enumerate(found["streaks"]))),
        ("kernels", found["kernels"]),
    ]
    by_tag = {tag: tau for tag, tau in found["tau_by_tag"].items() if tau is not None}
    pairs.append(("by tag", figures(by_tag, ".2f") if len(by_tag) > 1 else None))
    if found["speedup"]:
        speed = f"{speeds['drafted']:.1f} tokens/s, {speeds['plain']:.1f} without a drafter"
        # the costs in tokens of plain decoding: a step must yield more than this to save time
        parts = _costs(found)
        cost = f"costs {sum(parts.values()):.2f} tokens without a drafter: {figures(parts, '.2f')}"
        pairs += [("speed", f"{speed}: {found['speedup']:.2f} times as fast"), ("step", cost)]
    if lossless["compared"]:
        other = {kind: lossless[kind] for kind in ("tie", "noise", "unexplained") if lossless[kind]}
        apart = f"; differences: {counts(other)}" if other else ""
        pairs.append(("lossless", f"{lossless['equal']} of {lossless['compared']} texts as without a drafter{apart}"))
    if found["reference"]:
        pairs += _reference_facts(found["reference"])
    facts(f"{found['target']}: {found['dtype']} on {found['device']}, {shape}", pairs)
    rows = found["by_draft_tokens"]
    if len(rows) > 1:
        _print_lengths(rows, whole=found["draft_tokens"] == found["block_size"] - 1)
    for row in rows:
        which = f" with {row['draft_tokens']} drafted" if len(rows) > 1 else ""
        for name, apart in row["differences"].items():
            say(f"{name}{which}: {apart}")
    for entry in found["prompts"]:
        if entry["reference"] and entry["reference"]["parts"]:
            say(f"{entry['id']}: differs from the reference: {entry['reference']['parts']}")
    for fault in (found["reference"] or {}).get("rejected", ()):
        say(f"{fault['id']}: no reference: {fault['reason']}: {fault['detail']}")


def _print_lengths(rows: Sequence[Mapping[str, Any]], *, whole: bool) -> None:
    """Print a table by drafted tokens; if ``whole`` blocks were verified, with the costs that ``eval`` takes."""
    parts = ("draft", "verify", "keep")
    columns: list[Column] = [("drafted", "d"), ("tau", ".3f"), ("times as fast", ".2f"), ("predicted", ".2f"),
                             ("off by", "+.0%"), *((part, ".2f") for part in parts), "lossless"]  # fmt: skip
    body = []
    for row in rows:
        speed, predicted, lossless = row["speedup"], row["predicted"], row["lossless"]
        off = predicted / speed - 1 if predicted and speed else None
        costs = row["cost"] or {}
        texts = f"{lossless['equal']} of {lossless['compared']}" if lossless["compared"] else None
        body.append([row["draft_tokens"], row["tau"], speed, predicted, off, *map(costs.get, parts), texts])
    terms = ",".join(f"{part}={cost:.2f}" for part, cost in (rows[-1]["cost"] or {}).items())
    same = f"; eval --cost {terms} predicts the same from a store" if whole and rows[-1]["predicted"] else ""
    table(f"by drafted tokens, costs in tokens without a drafter{same}", columns, body)


def _reference_facts(found: dict[str, Any]) -> list[tuple[str, object]]:
    tau, live = (f"{found[name]:.3f}" if found["steps"] else "none" for name in ("tau", "tau_live"))
    texts, tokens = found["prompts"], found["tokens"]
    count = f"{texts} ({len(found['rejected'])} without), {tokens:,} tokens of {found['model']} at {found['url']}"
    unstable = f"; {found['unstable']} differ if prompt and text are tokenized together" if found["unstable"] else ""
    ids = ", ".join(f"{n} from the {how}" for how, n in found["ids_from"].items() if n)
    return [
        ("references", count),
        ("their tau", f"{tau} over {counted(found['steps'], 'step')}; {live} live on the same prompts"),
        ("their ids", ids + unstable),
        ("their text", f"{found['equal']} of {texts} equal to the target's own greedy text here"),
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
    """Return the prompts that fit into the target with their completion, and the rejected rows."""
    rejected: list[dict[str, Any]] = []

    def reject(source: str, row: int, reason: str, detail: str) -> None:
        rejected.append({"source": source, "row": row, "reason": reason, "detail": detail})

    ready = []
    room = live.max_positions - sampling.max_new_tokens - draft.block_size
    for prompt in read_prompts(paths, tokenizer, reject, raw=raw, limit=limit):
        if not 0 < len(prompt.ids) <= room:
            reject(prompt.source, prompt.row, "too-long", f"{len(prompt.ids)} prompt tokens, expected at most {room}")
        else:
            ready.append(prompt)
    if not ready:
        raise InputError(
            "corpus-empty", f"{', '.join(map(str, paths))}: no prompt can be used ({len(rejected)} rejected)"
        )
    if rejected:
        say(f"{counted(len(rejected), 'prompt')} rejected, {len(ready)} used")
    return ready, rejected


def _alone(live: LiveTarget, prompt: list[int], ids: list[int]) -> Tensor:
    """Return the logits [V] after a text that is read in one pass, without drafts and rollbacks."""
    logits_1V = live.prefill([*prompt, *ids]).logits
    check_finite("the target", logits_1V)
    return logits_1V[0]


def _complete(
    live: LiveTarget,
    draft: Draft,
    prompt: Prompt,
    sampling: Sampling,
    reference: Reference | None,
    tree_size: int | None,
    lengths: Sequence[int],
    *,
    plain: bool,
) -> dict[int, dict[str, Any]]:
    """Complete a prompt with each number of drafted tokens and, if ``plain``, without a drafter; return the entries.

    The reference is scored with the last number.
    """
    peer, made = decode(live, prompt.ids, sampling) if plain else None, {}
    for draft.tokens in lengths:
        drafted = decode(live, prompt.ids, sampling, draft, tree_size)
        made[draft.tokens] = _entry(live, prompt, sampling, drafted, peer)
    if reference is not None:
        scored = score_reference(live, draft, prompt, reference, peer or drafted, tree_size)
        made[draft.tokens]["reference"] = {**scored, "tau": _mean(scored["accepted"])}
    return made


def _entry(
    live: LiveTarget, prompt: Prompt, sampling: Sampling, drafted: Decoded, peer: Decoded | None
) -> dict[str, Any]:
    """Return what the report says of one completion with the drafter."""
    compared = peer is not None and sampling.temperature <= 0
    differing = difference(drafted, peer, partial(_alone, live, prompt.ids), live.dtype) if peer and compared else None
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
        "lossless": differing is None if compared else None,
        "difference": differing,
        "reference": None,
    }
    for name, side in (("drafted", drafted), ("plain", peer)):
        entry[name] = side and {"tokens": len(side.ids), "prefill_s": side.prefill_s, "decode_s": side.decode_s}
    entry["drafted"]["step_s"] = drafted.step_s
    return entry


def _speed(entries: Sequence[dict[str, Any]], side: str) -> float | None:
    """Return tokens per second, without the first token of each prompt."""
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
