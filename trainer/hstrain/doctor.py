"""``hstrain doctor``: compare what a drafter was trained on with what it is used on.

A drafter that is served with other states, another tokenizer or another shape than in training still runs without an
error, but accepts fewer tokens. So the doctor compares every fact that is known to affect acceptance in three places:
the checkpoint, the store and the live target. The last check is the strongest: it runs a stored sample through the live
target and compares the states with the stored ones.
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
from hstrain.data.anchors import sample_with
from hstrain.exchange.importer import open_drafter
from hstrain.exchange.layouts import Released
from hstrain.run.checkpoint import store_facts

_SCALE_APART = 1e-2
"""Relative; bf16 rounds the embedding's scale by up to half of that."""

EFFECTS: dict[str, str] = {
    "taps": "other layers feed the drafter: up to 3-5 % lower acceptance when off by one, nothing when far off",
    "target weights": "another target writes the text: acceptance falls, at worst to chance",
    "target shape": "another architecture: the drafter cannot be used with it",
    "tokenizer": "other token ids or another chat template: prompts differ from those in training",
    "logits": "another scale or cap of the logits: the drafter's most likely tokens stay the same, its probabilities "
    "change",
    "embedding scale": "engines that take the target's embeddings feed other block inputs than in training: lower "
    "acceptance",
    "norm kind": "w read as 1+w, or the other way round: 6-33 % lower acceptance",
    "kernel path": "usually within noise; hscache verify --kernels shows whether these paths agree. "
    "If torch replaces kernels on a GPU, decoding is slow as well",
    "target precision": "usually within noise: states are stored in bf16 either way",
    "codec": "lossy states: tools/bench/measure_tau.py measures what they cost",
    "mask token": "it must be in the vocabulary and in no text, or blocks look like text",
    "block size": "a block after the longest text must fit the drafter's positions, or engines refuse it",
    "causal layers": "vLLM makes other layers causal inside the block than training did: lower acceptance. Export the "
    "folder again with --format zlab, which vLLM reads correctly",
    "rope": "the drafter rotates whole heads with its own theta, whatever the target does",
    "live states": "the live target computes other states than the drafter was trained on: acceptance falls",
}
"""Fact -> known effect of a difference."""


@dataclass(frozen=True)
class Fact:
    """One fact in three places.

    Attributes:
        name: A key of :data:`EFFECTS`.
        trained: Its value in the checkpoint; None if unknown.
        store: Its value in the store; None if unknown.
        live: Its value in the live target, or, for causal layers, as vLLM reads the folder; None if unknown.
        same: Whether the known values agree.
        grave: Whether a difference is a finding; if not, it is a remark.
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
        target: Checkpoint directory or hub id of the live target; None for no live target.
        dtype: Precision of the live target, as in :func:`hscache.device.pick_dtype`.
        device: Such as ``cuda:0``; None for CUDA if there is one.

    Raises:
        HscacheError: For errors that a user can fix.
    """
    store, head = hscache.open(store_path), load_head(StorePaths(store_path).target)
    drafter, known = open_drafter(checkpoint, head, any_target=True)
    config, stored = drafter.config, store_facts(store)
    released: Released | None = known.get("imported")
    before: Mapping[str, Any] = known.get("provenance", {}).get("store", {})
    live = _live(target, store, config.taps, dtype, device) if target is not None else {}
    shape, mask = store.manifest["target"]["shape"], config.mask_token_id
    used = sample_with(store, mask)
    wanted = {
        "num_layers": config.num_target_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
    }
    yarn = "" if config.yarn_positions is None else f", YaRN by {config.yarn_factor:g}"
    facts = [
        _same("target shape", wanted, {key: shape[key] for key in wanted}, live.get("shape")),
        _weights(released, before.get("weights"), stored["weights"], live.get("weights")),
        _same("tokenizer", before.get("tokenizer"), stored["tokenizer"], live.get("tokenizer"), short=True),
        _taps(config.taps, store.taps, live),
        _same("logits", released and released.logits, head.facts["head"], live.get("head")),
        _scales(config.embed_scale, head.embed_scale, live.get("embed_scale")),
        _same("norm kind", before.get("norm_kind"), stored["norm_kind"], live.get("norm_kind")),
        _kernels(before.get("kernel_path"), stored["kernel_path"], live),
        _same("target precision", before.get("target_dtype"), stored["target_dtype"], live.get("dtype"), grave=False),
        _same("codec", before.get("codec"), stored["codec"], grave=False),
        Fact("mask token", mask, used, same=mask < config.vocab_size and used is None),
        _block(config.block_size, config.max_position_embeddings, int(store.n_tokens.max())),
        _causal(config.layer_types, released),
        Fact("rope", f"theta {config.rope_theta:g}, whole head of {config.head_dim}{yarn}"),
    ]
    if live:
        distance, same = live["apart"]
        facts.append(Fact("live states", None, "stored", distance, same=same))
    return facts


def print_diagnosis(facts: list[Fact]) -> None:
    """Print the facts as a table, followed by the effect of each difference."""
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
    existing = tuple(tap for tap in taps if tap < layers) or (0,)
    with open_target(target, existing, dtype=dtype, device=device, allow_fallback=True) as (live, observation):
        found = {
            **file_facts(live.directory),
            "shape": live.loaded.shape.model_dump(),
            "norm_kind": live.loaded.norm_kind,
            "head": live.loaded.report["head"],
            "embed_scale": live.loaded.embed_scale or 1.0,
            "dtype": live.dtype,
            "kernel_path": None,
            "apart": ("not comparable", False),
        }
        # another shape and missing taps are findings of their own
        if found["shape"] == store.manifest["target"]["shape"] and set(taps) <= set(store.taps):
            # a sample of median length: in a short one, a state that is lost between chunks of tokens does not show
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


def _weights(released: Released | None, trained: object, store: object, live: object) -> Fact:
    """Compare the target's weights; a released drafter has no digests, but may contain some of the weights."""
    carried = [name for name in (released.differences if released else {}) if name.endswith(".weight")]
    if carried:
        return Fact("target weights", f"contains other {', '.join(carried)}", store, live, same=False)
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
    """Compare the kernel paths: a difference is a remark; torch references on a GPU are a finding."""
    fact = _same("kernel path", trained, store, live.get("kernel_path"), grave=False)
    if not live.get("kernel_fallback"):
        return fact
    return replace(fact, live=f"{fact.live or 'not run'}: a fallback on this GPU", same=False, grave=True)


def _block(block_size: int, positions: int, longest: int) -> Fact:
    fits = longest + block_size <= positions
    return Fact(
        "block size", f"{block_size} tokens, {positions:,} positions", f"texts up to {longest:,} tokens", same=fits
    )


def _causal(layer_types: Sequence[str], released: Released | None) -> Fact:
    """Compare which layers are causal inside the block; what vLLM makes of them is known for released folders only."""
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
        text = "same files" if len(known) > 1 else "known"
        trained, store, live = (value and text for value in (trained, store, live))
    return Fact(name, trained, store, live, same, grave)


def _mark(fact: Fact) -> str:
    """Return the result of the comparison in a word; a single known value proves no agreement."""
    alone = fact.trained is None and (fact.store is None or fact.live is None)
    return "DIFFERS" if not fact.same else "unknown" if alone else "same"


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {str(item)[:12]}" for key, item in value.items())
    return "" if value is None else str(value)
