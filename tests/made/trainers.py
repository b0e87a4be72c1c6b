"""Little drafters, packs and runs for the tests of ``trainer``, over the stores of :mod:`tests.made.stores`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hstrain.data.packs import Pack, PackBuilder, PackShape
from hstrain.drafter.attention import Backend
from hstrain.drafter.losses import Head
from hstrain.drafter.model import Drafter, DrafterConfig, block_inputs
from hstrain.manifest import DrafterSpec, TrainManifest, drafter_config
from torch import Tensor

import hscache
from hscache.errors import IntegrityError
from hscache.manifest import check_fields, to_toml
from hscache.rows import Sample as CorpusSample
from hscache.store.head import TargetHead
from hscache.store.index import load_index
from hscache.store.layout import StorePaths, padding_bytes
from hscache.store.reader import Sample, Store, TopLogits
from tests.made.stores import HIDDEN, TAPS, VOCAB, Edit, Little, flip, head_weights, little_manifest, make_store

BLOCK, WINDOW, MASK = 4, 6, VOCAB - 1
SHAPE: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "intermediate_size": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "rope_theta": 1e4,
    "sliding_window": WINDOW,
}
LENGTHS = (20, 31, 18, 44, 26, 37, 15, 29, 40, 23, 33, 19)


def train_manifest(**sections: dict[str, Any]) -> TrainManifest:
    """Return a manifest for the little target; sections are merged over a run of a few short steps in float32."""
    raw: dict[str, dict[str, Any]] = {
        "drafter": SHAPE,
        "data": {"validation": 0.3, "max_tokens": 64, "pack_tokens": 64, "anchors": 8},
        "optim": {"lr": 1e-2, "epochs": 2},
        "run": {"precision": "fp32", "log_every": 1, "validate_every": 3, "checkpoint_every": 3},
    }
    for name, fields in sections.items():
        raw[name] = {**raw.get(name, {}), **fields}
    return check_fields(raw, TrainManifest, "test")


def write_manifest(path: Path, **sections: dict[str, Any]) -> Path:
    """Write :func:`train_manifest` as TOML."""
    path.write_text(to_toml(train_manifest(**sections)), encoding="utf-8")
    return path


def turn_rows(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[CorpusSample]:
    """Return rows of one to three supervised turns, each after a stretch of prompt."""
    rng = np.random.default_rng(seed)
    rows = []
    for i, n in enumerate(lengths):
        cuts = np.sort(rng.choice(np.arange(1, n), size=min(2 * (1 + i % 3) - 1, n - 1), replace=False))
        mask = (np.searchsorted(cuts, np.arange(n), side="right") % 2).astype(np.uint8)
        rows.append(
            CorpusSample(i, f"t{i}", rng.integers(0, MASK, n).astype(np.int32), mask, tag=("math", "code")[i % 2])
        )
    return rows


def training_store(
    path: Path,
    lengths: Sequence[int] = LENGTHS,
    *,
    edit: Edit | None = None,
    edit_stored: Edit | None = None,
    says: Mapping[str, Any] | None = None,
    **sections: Any,
) -> Little:
    """Write a little store whose samples are long enough to train on, in several shards; see :func:`make_store`."""
    manifest = little_manifest(
        limits={"max_tokens": 1024, "batch_tokens": 64},
        **{"store": {"chunk_tokens": 4, "shard_bytes": 6000}, **sections},
    )
    return make_store(path, turn_rows(lengths), manifest=manifest, edit=edit, edit_stored=edit_stored, says=says)


def little_config(**changes: Any) -> DrafterConfig:
    """Return the shape of a drafter for the little target."""
    spec = check_fields({**SHAPE, **changes}, DrafterSpec, "test")
    return drafter_config(spec, taps=TAPS, hidden_size=HIDDEN, vocab_size=VOCAB, num_layers=4)


def little_drafter(config: DrafterConfig | None = None, seed: int = 0) -> Drafter:
    """Return a drafter with weights large enough that every input shows in every output."""
    drafter = Drafter(config or little_config())
    made = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=made)
            parameter.copy_(1 + 0.1 * noise if parameter.ndim == 1 else 0.5 * noise)
    return drafter


def little_head(seed: int = 0, **head: Any) -> Head:
    """Return the little target's head in float32; ``scale`` and ``softcap`` on demand."""
    facts = {"head": {"scale": 1.0, "softcap": None, **head}}
    return Head(TargetHead(**head_weights(seed), facts=facts), "cpu", torch.float32)


def sample(n: int, turns: Sequence[tuple[int, int]] = ((3, 99),), seed: int = 0, taps: int = len(TAPS)) -> Sample:
    """Return a sample in memory, of kind ``torch``, supervised in the given token ranges."""
    made = torch.Generator().manual_seed(seed)
    mask = torch.zeros(n, dtype=torch.uint8)
    for start, stop in turns:
        mask[start:stop] = 1
    ids = torch.randint(0, MASK, (n,), generator=made, dtype=torch.int32)
    states = torch.randn(n, taps, HIDDEN, generator=made).bfloat16()
    final = torch.randn(n, HIDDEN, generator=made).bfloat16()
    positions = (1 + mask[1:].nonzero().flatten()).numpy()
    logprobs = (final[positions - 1].float() @ head_weights()["lm_head"].float().T).log_softmax(-1)
    top, top_ids = logprobs.topk(4, -1)
    logits = TopLogits(positions, top_ids.int(), top.half(), torch.zeros(len(positions)))
    return Sample(f"m{seed}", None, ids, mask, states, final, logits)


def pack_of(parts: Sequence[tuple[Sample, Sequence[int]]], *, start: int = 0, **shape: Any) -> Pack:
    """Return a pack of samples with the anchors given."""
    builder = PackBuilder(PackShape(TAPS, **{"block_size": BLOCK, **shape}))
    for one, anchors in parts:
        builder.add(one, np.array(anchors, np.int64), start)
    return builder.pack(len(TAPS), HIDDEN)


def draft(drafter: Drafter, head: Head, pack: Pack, backend: Backend = "sdpa") -> Tensor:
    """Return the logits of every slot of every block, float32 [N, B, V]."""
    B = drafter.config.block_size
    inputs = block_inputs(pack.anchor_ids_N, head.embed_VH.float(), drafter.config)
    hidden = drafter(pack.states_TLH, pack.positions_T, inputs, pack.blocks(B, backend))
    return head.logits(hidden).unflatten(0, (-1, B))


def packs_differ_from_store(packs: Iterable[Pack], store: Store, windows: dict[int, tuple[int, int]]) -> list[str]:
    """Return where rows, positions, visible ranges, labels or distributions of packs are not what the store says."""
    faults = []
    for pack in packs:
        block = 0
        for sample_id in pack.sample_ids:
            i = store.index_of(sample_id)
            start, stop = windows.get(i, (0, int(store.n_tokens[i])))
            whole = store.sample(i)
            lo = int(pack.lo_N[block])
            while block < len(pack.lo_N) and int(pack.lo_N[block]) == lo:
                a, hi = int(pack.anchors_N[block]), int(pack.hi_N[block])
                context = {
                    "positions": pack.positions_T[lo:hi].tolist() == list(range(start, a)),
                    "states": torch.equal(pack.states_TLH[lo:hi], whole.hidden_states[start:a]),
                    "anchor": int(pack.anchor_ids_N[block]) == int(whole.input_ids[a]),
                }
                faults += [f"{sample_id} at {a}: {name}" for name, right in context.items() if not right]
                for k in range(1, BLOCK):
                    at = a + k
                    going = at < stop and bool(whole.loss_mask[a : at + 1].all())
                    label = int(pack.targets.tokens_NK[block, k - 1])
                    if label != (int(whole.input_ids[at]) if going else -1):
                        faults.append(f"{sample_id} at {a}: slot {k} says {label}")
                    row = int(pack.targets.rows_NK[block, k - 1])
                    if going and pack.targets.top_ids is not None:
                        of = list(whole.logits.positions).index(at)
                        if not torch.equal(pack.targets.top_ids[row], whole.logits.ids[of]):
                            faults.append(f"{sample_id} at {a}: slot {k} has another token's distribution")
                        if not torch.equal(pack.targets.top_logprobs[row], whole.logits.logprobs[of]):
                            faults.append(f"{sample_id} at {a}: slot {k} has other log-probabilities")
                    final = pack.targets.final_states
                    if going and final is not None and not torch.equal(final[row], whole.final_state[at - 1]):
                        faults.append(f"{sample_id} at {a}: slot {k} has another token's final state")
                block += 1
    return faults


def damage(path: Path, sample_id: str) -> None:
    """Flip a byte of one sample's states in a store of raw arrays, and of no other sample."""
    index = {row["sample_id"]: row for row in load_index(path).to_pylist()}
    row, shard = index[sample_id], StorePaths(path).shard(index[sample_id]["shard"])
    (file,) = [file for file in (shard / "hidden_states").iterdir() if file.name.startswith("c.")]
    spec = hscache.open(path).specs["hidden_states"]
    span = spec.row_bytes * spec.chunk_rows + 4
    span += padding_bytes(span)
    middle = (row["start"] + row["n_tokens"] // 2) // spec.chunk_rows
    flip(file, middle * span + 3)
    store = hscache.open(path)
    for i, one in enumerate(store.sample_ids):
        try:
            store.sample(i)
        except IntegrityError:
            assert one == sample_id, f"{one} is damaged, too"
        else:
            assert one != sample_id, f"{one} is whole"
