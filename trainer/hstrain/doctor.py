"""``hstrain doctor``: compare what a drafter was trained on with what it is used on.

A drafter that is served with other states, another tokenizer or another shape than in training still runs, but badly,
and without an error. So every fact known to affect acceptance is listed side by side: as recorded in the checkpoint, in
the store, and as the live target has it. The last check is the strongest: a stored sample runs through the live target,
and its states are compared with the stored ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hscache
from hscache.console import table
from hscache.device import Dtype
from hscache.distance import SAME_NORM, compare, same_mean
from hscache.store.head import load_head
from hscache.store.layout import StorePaths
from hscache.store.reader import Store
from hstrain.exchange.importer import Imported, open_drafter
from hstrain.run.checkpoint import store_facts

_SCALE_APART = 1e-2
"""Relative; bf16 rounds the embedding's scale by up to half of that."""

EFFECTS: dict[str, str] = {
    "taps": "other layers feed the drafter: up to 3-5 % lower acceptance when off by one, nothing when far off",
    "target weights": "another target writes the text: acceptance falls, down to chance",
    "target shape": "another architecture: the drafter cannot be used with it",
    "tokenizer": "other token ids, or another chat template: prompts begin otherwise than in training",
    "logits": "another scale or cap of logits: the drafter's most likely tokens stay, its probabilities do not",
    "embedding scale": "other block inputs than in training, in engines that feed the target's: lower acceptance",
    "norm kind": "w read as 1+w, or the other way round: 6-33 % lower acceptance",
    "kernel path": "usually within noise; hscache verify --kernels says whether these paths agree. "
    "Where torch stands in for kernels on a GPU, decoding is slow as well",
    "target precision": "usually within noise: states are stored in bf16 either way",
    "codec": "lossy states: tools/bench/measure_tau.py measures what they cost",
    "mask token": "must lie in the vocabulary and stand in no text, or blocks look like text",
    "block size": "a block after the longest text must fit the drafter's positions, or engines refuse it",
    "causal layers": "vLLM makes other layers causal inside the block than in training: lower acceptance. Export the "
    "folder again with --format zlab, which vLLM reads right",
    "rope": "the drafter rotates whole heads with its own theta, whatever the target does",
    "live states": "the live target computes other states than the drafter was trained on: acceptance falls",
}
"""Fact -> what a mismatch is known to do."""


@dataclass(frozen=True)
class Fact:
    """One fact in three places.

    Attributes:
        name: A key of :data:`EFFECTS`.
        trained: As the checkpoint remembers it.
        store: As the store has it; None when no store was given, or it does not say.
        live: As the live target has it, or, of causal layers, as vLLM reads the folder; None likewise.
        same: Whether all that is known agrees.
        grave: Whether a difference is a finding, or a remark.
    """

    name: str
    trained: object
    store: object = None
    live: object = None
    same: bool = True
    grave: bool = True


def diagnose(
    checkpoint: Path,
    store_path: Path,
    *,
    target: str | None = None,
    dtype: Dtype = "auto",
    device: str | None = None,
) -> list[Fact]:
    """Return the facts of a drafter, the store that it is evaluated on, and a live target.

    Args:
        checkpoint: As :func:`hstrain.exchange.importer.open_drafter` takes it.
        store_path: Store.
        target: Checkpoint directory or hub id of the live target; None to leave it out.
        dtype: Precision of the live target, as :func:`hscache.device.pick_dtype` takes it.
        device: Such as ``cuda:0``; None for CUDA if there is one.

    Raises:
        HscacheError: For errors that a user can fix.
    """
    store, head = hscache.open(store_path), load_head(StorePaths(store_path).target)
    drafter, known = open_drafter(checkpoint, head, any_target=True)
    config, there = drafter.config, store_facts(store)
    released: Imported | None = known.get("imported")
    before: Mapping[str, Any] = known.get("provenance", {}).get("store", {})
    live = _live(target, store, config.taps, dtype, device) if target is not None else {}
    shape, mask = store.manifest["target"]["shape"], config.mask_token_id
    used = _uses(store, mask)
    wanted = {
        "num_layers": config.num_target_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
    }
    facts = [
        _same("target shape", wanted, {key: shape[key] for key in wanted}, live.get("shape")),
        _weights(released, before.get("weights"), there["weights"], live.get("weights")),
        _same("tokenizer", before.get("tokenizer"), there["tokenizer"], live.get("tokenizer"), short=True),
        _taps(config.taps, store.taps, live),
        _same("logits", released and released.logits, head.facts["head"], live.get("head")),
        _scales(config.embed_scale, head.embed_scale, live.get("embed_scale")),
        _same("norm kind", before.get("norm_kind"), there["norm_kind"], live.get("norm_kind")),
        _kernels(before.get("kernel_path"), there["kernel_path"], live),
        _same("target precision", before.get("target_dtype"), there["target_dtype"], live.get("dtype"), grave=False),
        _same("codec", before.get("codec"), there["codec"], grave=False),
        Fact("mask token", mask, used, same=mask < config.vocab_size and used is None),
        _block(config.block_size, config.max_position_embeddings, int(store.n_tokens.max())),
        _causal(config.layer_types, released),
        Fact("rope", f"theta {config.rope_theta:g}, whole head of {config.head_dim}"),
    ]
    if live:
        apart = live["apart"]
        facts.append(Fact("live states", None, "stored", apart[0] or "not comparable", same=apart[1]))
    return facts


def print_diagnosis(facts: list[Fact]) -> None:
    """Print the facts as a table, and below it what each difference does."""
    rows = [[f.name, *map(_text, (f.trained, f.store, f.live)), _mark(f)] for f in facts]
    table("what the drafter was trained on, and what it is used on", ["fact", "trained", "store", "live", ""], rows)
    for fact in facts:
        if not fact.same:
            print(f"{fact.name}: {EFFECTS[fact.name]}")


def to_json(facts: list[Fact]) -> list[dict[str, Any]]:
    """Return the facts as plain JSON, each with the effect of a difference."""
    return [{**asdict(fact), "effect": EFFECTS[fact.name]} for fact in facts]


def _live(target: str, store: Store, taps: tuple[int, ...], dtype: Dtype, device: str | None) -> dict[str, Any]:
    """Return the live target's facts, and how far its states of a stored sample are from the stored ones."""
    from hstrain.live.target import file_facts, kernel_fallback, kernel_path, open_target, target_shape

    layers = target_shape(target).num_layers
    there = tuple(tap for tap in taps if tap < layers) or (0,)
    with open_target(target, there, dtype=dtype, device=device, allow_fallback=True) as (live, observation):
        found = {
            **file_facts(live.directory),
            "shape": live.loaded.shape.model_dump(),
            "norm_kind": live.loaded.norm_kind,
            "head": live.loaded.report["head"],
            "embed_scale": live.loaded.embed_scale or 1.0,
            "dtype": live.dtype,
            "kernel_path": None,
            "apart": ("", False),
        }
        # token ids of another vocabulary, or taps that are not there, are findings of their own
        if found["shape"] == store.manifest["target"]["shape"] and set(taps) <= set(store.taps):
            # of median length: a state that is lost between chunks of tokens does not show in a short one
            sample = store.sample(int(store.n_tokens.argsort()[len(store) // 2]), taps=taps)
            rows = live.prefill(sample.input_ids.tolist())
            lossy = store.manifest["manifest"]["store"]["codec"]
            found["apart"] = _apart(sample.hidden_states, rows.states.cpu(), taps, lossy)
            found["kernel_path"] = kernel_path(observation)
        found["kernel_fallback"] = kernel_fallback(observation, live)
    return found


def _apart(stored_TLH: Tensor, fresh_TLH: Tensor, taps: tuple[int, ...], codec: str) -> tuple[str, bool]:
    """Return the distance of the states at the worst tap, in words, and whether they may be the same states."""
    limit, pairs = same_mean(codec), compare(stored_TLH, fresh_TLH)
    turned_L = pairs.apart.mean(0)
    # per token: an outlier token's norm would hide all the others
    grown_L = (pairs.other / pairs.reference).sqrt().log().mean(0).exp()
    # NaN is worse than anything
    worst = int(torch.maximum(turned_L / limit, (grown_L - 1).abs() / SAME_NORM).nan_to_num(torch.inf).argmax())
    turned, grown = float(turned_L[worst]), float(grown_L[worst])
    same = turned < limit and abs(grown - 1) < SAME_NORM
    return f"1-cos {turned:.1e}, norms {grown:.3f} times those stored, at tap {taps[worst]}", same


def _uses(store: Store, token: int) -> str | None:
    """Return the first stored sample that has the token, looking at a few hundred."""
    for i in range(min(len(store), 256)):
        if bool(torch.any(store.sample(i, taps=store.taps[:1]).input_ids == token)):
            return f"in sample {store.sample_ids[i]!r}"
    return None


def _weights(released: Imported | None, trained: object, store: object, live: object) -> Fact:
    """Return the fact of the target's weights; a released drafter may carry some of them, but no digests."""
    carried = [name for name in (released.apart if released else {}) if name.endswith(".weight")]
    if carried:
        return Fact("target weights", f"carries other {', '.join(carried)}", store, live, same=False)
    return _same("target weights", trained, store, live, short=True)


def _taps(trained: tuple[int, ...], store: tuple[int, ...] | list[int], live: Mapping[str, Any]) -> Fact:
    layers = live["shape"]["num_layers"] if live else None
    same = set(trained) <= set(store) and (layers is None or max(trained) < layers)
    return Fact("taps", list(trained), list(store), None if layers is None else f"{layers} blocks", same)


def _scales(trained: float, store: float, live: float | None) -> Fact:
    known = [scale for scale in (trained, store, live) if scale is not None]
    same = max(known) <= min(known) * (1 + _SCALE_APART)
    return Fact("embedding scale", trained, store, live, same)


def _kernels(trained: object, store: object, live: Mapping[str, Any]) -> Fact:
    """Return the fact of the kernel path: a remark, but where torch stands in for kernels on a GPU."""
    fact = _same("kernel path", trained, store, live.get("kernel_path"), grave=False)
    if not live.get("kernel_fallback"):
        return fact
    return replace(fact, live=f"{fact.live or 'not run'}: a fallback on this GPU", same=False, grave=True)


def _block(block_size: int, positions: int, longest: int) -> Fact:
    fits = longest + block_size <= positions
    return Fact(
        "block size", f"{block_size} tokens, {positions:,} positions", f"texts up to {longest:,} tokens", same=fits
    )


def _causal(layer_types: Sequence[str], released: Imported | None) -> Fact:
    """Return the fact of the layers that are causal inside the block; vLLM's side is known of released folders only."""
    layers, sliding = len(layer_types), layer_types.count("sliding_attention")
    trained = f"{sliding} of {layers}, the sliding ones"
    if released is None or released.vllm_causal is None:
        return Fact("causal layers", trained)
    served = layers if released.vllm_causal else 0
    return Fact("causal layers", trained, live=f"vLLM: {served} of {layers}", same=served == sliding)


def _same(
    name: str, trained: object, store: object, live: object = None, *, grave: bool = True, short: bool = False
) -> Fact:
    known = [value for value in (trained, store, live) if value is not None]
    same = all(value == known[0] for value in known)
    if short and same:  # digests only help a reader when they differ
        said = "same files" if len(known) > 1 else "known"
        trained, store, live = (value and said for value in (trained, store, live))
    return Fact(name, trained, store, live, same, grave)


def _mark(fact: Fact) -> str:
    """Describe how the facts compare; a single known value is not an agreement."""
    alone = fact.trained is None and (fact.store is None or fact.live is None)
    return "DIFFERS" if not fact.same else "not said" if alone else "same"


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {str(item)[:12]}" for key, item in value.items())
    return "" if value is None else str(value)
