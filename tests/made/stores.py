"""Complete little stores without a model: random states, and a head that really gives the stored top-k."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import google_crc32c
import numpy as np
import torch
from numpy.typing import NDArray

from hscache.build.plan import Plan, make_plan, manifest_specs
from hscache.distance import CodecError, RowErrors, compare_rows
from hscache.health import Health, RowStats, reduce_rows
from hscache.manifest import BuildManifest, parse_manifest
from hscache.rows import Sample, supervised_positions
from hscache.store import lossy
from hscache.store.durable import Staging
from hscache.store.head import write_target
from hscache.store.index import finalize, table_digest
from hscache.store.layout import FORMAT_VERSION, StorePaths, canonical_json, json_digest, scales_name
from hscache.store.sealed import sealed_bytes
from hscache.store.shard_writer import ShardWriter

HIDDEN, VOCAB, TAPS, TOPK = 8, 32, (0, 2, 3), 4
Arrays = dict[str, NDArray[Any]]
Edit = Callable[[Sample, Arrays], None]


@dataclass
class Little:
    """A store and what was put into it."""

    path: Path
    manifest: BuildManifest
    plan: Plan
    arrays: dict[str, Arrays]
    """Sample id -> arrays as stored."""
    rows: list[Sample]
    """Planned samples in corpus order."""


def little_manifest(**sections: dict[str, Any]) -> BuildManifest:
    """Return a manifest for a target of 4 layers, width 8, vocabulary 32; sections are merged over the defaults."""
    raw: dict[str, dict[str, Any]] = {
        "target": {"path": "little", "shape": {"num_layers": 4, "hidden_size": HIDDEN, "vocab_size": VOCAB}},
        "states": {"taps": list(TAPS)},
        "corpus": {"path": "corpus.parquet"},
        "logits": {"topk": TOPK},
        "limits": {"max_tokens": 64, "batch_tokens": 24},
        "store": {"chunk_tokens": 4, "shard_bytes": 1600},
    }
    for name, fields in sections.items():
        raw[name] = {**raw.get(name, {}), **fields}
    return parse_manifest(raw, "little")


def corpus_rows(lengths: Sequence[int] = (5, 9, 1, 12, 3, 7, 8), seed: int = 0) -> list[Sample]:
    """Return rows of these lengths; a row of one token has nothing to supervise and is rejected by the plan."""
    rng = np.random.default_rng(seed)
    rows = []
    for i, n in enumerate(lengths):
        mask = rng.integers(0, 2, n).astype(np.uint8)
        mask[-1] = 1
        ids = rng.integers(0, VOCAB, n).astype(np.int32)
        rows.append(Sample(i, f"s{i}", ids, mask, tag=("math", "code", None)[i % 3]))
    return rows


def head_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return embedding, head and norm of the little target."""
    made = torch.Generator().manual_seed(seed)
    embed, lm_head = (torch.randn(VOCAB, HIDDEN, generator=made).bfloat16() for _ in range(2))
    return {"embed": embed, "lm_head": lm_head, "norm": torch.ones(HIDDEN).bfloat16()}


def little_arrays(row: Sample, manifest: BuildManifest, scale: float = 1.0) -> Arrays:
    """Return what capture would hand over for a row: a function of the sample's id alone."""
    made = torch.Generator().manual_seed(sum(row.sample_id.encode()))
    n, taps, topk = len(row.input_ids), manifest.states.taps, manifest.logits.topk
    states = (torch.randn(n, len(taps), HIDDEN, generator=made) * scale).bfloat16()
    final = torch.randn(n, HIDDEN, generator=made).bfloat16()
    arrays: Arrays = {"input_ids": row.input_ids, "loss_mask": row.loss_mask, "hidden_states": _bits(states)}
    if manifest.states.final_state:
        arrays["final_state"] = _bits(final)
    if topk:
        before = supervised_positions(row.loss_mask) - 1
        logits = final[before].float() @ head_weights()["lm_head"].float().T
        lse = torch.logsumexp(logits, -1)
        top, ids = logits.topk(topk, -1)
        arrays["logit_ids"] = ids.int().numpy()
        arrays["logit_logprobs"] = (top - lse[:, None]).half().numpy()
        arrays["logit_lse"] = lse.numpy()
    return arrays


def make_store(
    path: Path,
    rows: Sequence[Sample] | None = None,
    *,
    manifest: BuildManifest | None = None,
    edit: Edit | None = None,
    edit_stored: Edit | None = None,
    reject: Sequence[str] = (),
    shards: Sequence[int] | None = None,
    scale: Callable[[int], float] = lambda shard: 1.0,
    time: str = "2026-01-01T00:00:00Z",
    says: Mapping[str, Any] | None = None,
) -> Little:
    """Write a store by hand, through the public parts of the format.

    Args:
        path: Store directory, new.
        rows: Corpus; default :func:`corpus_rows`.
        manifest: Default :func:`little_manifest`.
        edit: Changes a sample's arrays before they are encoded and written.
        edit_stored: Changes a sample's arrays as they are written.
        reject: Sample ids that capture rejects.
        shards: Shards to commit; None for all, with the index.
        scale: Shard -> magnitude of its taps.
        time: When it was made: provenance, without influence on the content.
        says: What the store says of its target otherwise: ``weights`` and ``tokenizer`` (digests by file),
            ``path`` (of kernels), and any fact of ``target.json``.
    """
    manifest, said = manifest or little_manifest(), dict(says or {})
    digests: dict[str, Any] = {name: said.pop(name, {}) for name in ("weights", "tokenizer")}
    kernels = {"path": said.pop("path")} if "path" in said else {}
    paths, batches = StorePaths(path), _Batches()
    rows = corpus_rows() if rows is None else list(rows)
    plan = make_plan(rows, manifest, hidden_size=HIDDEN, vocab_size=VOCAB, sink=batches)
    body = {
        "format_version": FORMAT_VERSION,
        "manifest": manifest.model_dump(mode="json"),
        "target": {"shape": manifest.target.shape.model_dump(), "config": {}, **digests},  # type: ignore[union-attr]
        "corpus": plan.corpus,
        "plan": {"digest": table_digest(plan.table), "shards": len(plan.batches), **plan.totals},
        "created": {"hscache": "0", "time": time},
    }
    document = {**body, "digest": json_digest(body)}
    path.mkdir()
    paths.manifest.write_bytes(canonical_json(document))
    paths.plan.write_bytes(sealed_bytes(plan.table))
    paths.shards.mkdir()
    made: dict[str, Arrays] = {}
    observed = provenance(time)
    # most of a little store's time would be the disk's: no power cut threatens it
    with patch("os.fsync"), Staging(paths.staging) as staging:
        config = staging.path / "config.json"
        config.write_text('{"model_type": "little"}')
        facts = {"head": {"scale": 1.0, "softcap": None}, "norm_kind": "w", "norm_eps": 1e-6, **said}
        write_target(paths.target, staging.path, head_weights(), facts, [config])
        for shard in range(len(plan.batches)) if shards is None else shards:
            writer = ShardWriter(staging.path / "shard", manifest_specs(manifest, HIDDEN), manifest.store.codec)
            health, error = Health(len(manifest.states.taps) + 1), CodecError()
            for number in plan.batches[shard]:
                for row in batches.all[number]:
                    if row.sample_id in reject:
                        writer.reject(row.sample_id, row.row, len(row.input_ids), "non-finite", "planted")
                        continue
                    arrays = little_arrays(row, manifest, scale(shard))
                    if edit is not None:
                        edit(row, arrays)
                    health.add(stats_of(arrays))
                    if manifest.store.codec in lossy.NAMES:
                        arrays, errors = encoded(arrays, manifest.store.codec)
                        error.add(errors)
                    if edit_stored is not None:
                        edit_stored(row, arrays)
                    writer.add(row.sample_id, row.row, arrays)
                    made[row.sample_id] = arrays
            attributes = {
                "shard": shard,
                "manifest_digest": document["digest"],
                "provenance": {**observed, "kernels": {**observed["kernels"], **kernels}},
                "health": health.to_json(),
            }
            if manifest.store.codec in lossy.NAMES:
                attributes["health"]["codec"] = error.to_json()
            writer.commit(paths.shard(shard), attributes)
        if shards is None:
            finalize(path, staging.path)
    rows = sorted((row for batch in batches.all for row in batch), key=lambda row: row.row)
    return Little(path, manifest, plan, made, rows)


def provenance(time: str = "") -> dict[str, Any]:
    """Return the provenance that ``info`` shows."""
    return {
        "versions": dict.fromkeys(("transformers", "torch", "flash-linear-attention", "causal-conv1d")),
        "device": "cpu",
        "kernels": {"path_id": "dense-0", "path": "dense"},
        "accepted_path": None,
        "load": {"attn_implementation": "eager", "norm_kind": "w", "head": {"scale": 1.0, "softcap": None}},
        "time": time,
    }


def stats_of(arrays: Arrays) -> RowStats:
    """Return the health statistics of a sample's states; the final state's column is there in any case."""
    states = torch.from_numpy(arrays["hidden_states"].view(np.int16)).view(torch.bfloat16)
    final = states[:, -1]
    if "final_state" in arrays:
        final = torch.from_numpy(arrays["final_state"].view(np.int16)).view(torch.bfloat16)
    return RowStats.join(reduce_rows(states), reduce_rows(final[:, None]))


def encoded(arrays: Arrays, codec: str) -> tuple[Arrays, RowErrors]:
    """Return a sample's arrays as a lossy store has them, and what that did to the states."""
    scheme, out, parts = lossy.scheme(codec, HIDDEN), dict(arrays), []
    for name in ("hidden_states", "final_state"):
        if name in arrays:
            out[name], out[scales_name(name)] = lossy.encode_bits(arrays[name], scheme)
            back = lossy.decode_bits(out[name], out[scales_name(name)], scheme)
            pair = (torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16) for bits in (arrays[name], back))
            parts.append(compare_rows(*(states.reshape(len(back), -1, HIDDEN) for states in pair)))
    rel_l2, apart = (torch.cat(part, 1).numpy() for part in zip(*parts, strict=True))
    return out, RowErrors(rel_l2, apart, np.full(len(rel_l2), np.nan, np.float32))


def same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Tell whether two arrays are equal in shape, type and every bit."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def flip(path: Path, position: int = -5, bit: int = 1) -> None:
    """Flip bits of one byte of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= bit
    path.write_bytes(data)


def change_token(root: Path) -> None:
    """Change a token in a shard and make all checksums agree again, but the digest of the sample."""
    path = root / "shards/00000.zarr/input_ids/c.0"
    data = bytearray(path.read_bytes())
    chunk = bytearray(data[: 4096 * 4])
    chunk[0] ^= 1
    data[: 4096 * 4] = chunk
    data[4096 * 4 : 4096 * 4 + 4] = google_crc32c.value(bytes(chunk)).to_bytes(4, "little")
    path.write_bytes(data)


class _Batches:
    def __init__(self) -> None:
        self.all: list[list[Sample]] = []

    def write_batch(self, rows: list[Sample]) -> None:
        self.all.append(rows)


def _bits(states: torch.Tensor) -> NDArray[np.uint16]:
    return states.contiguous().view(torch.int16).numpy().view(np.uint16)
