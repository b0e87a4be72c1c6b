"""Write a store of any shape without a target: for benchmarks of the format and for tests of memory.

The states are given, or random bf16 numbers; everything else that a reader looks at is as a build writes it. There is
no plan and no ``target/``, so ``hscache verify`` would object.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hscache.store.index import SCHEMA, read_shard
from hscache.store.layout import (
    FORMAT_VERSION,
    StorePaths,
    array_specs,
    canonical_json,
    group_metadata,
    json_digest,
)
from hscache.store.sealed import sealed_bytes
from hscache.store.shard_writer import ShardWriter

Arrays = dict[str, NDArray[Any]]


def random_states(n_values: int, seed: int = 0) -> NDArray[np.uint16]:
    """Return normally distributed bf16 numbers as bits, uint16 [n_values]."""
    normal = np.random.default_rng(seed).standard_normal(n_values, np.float32)
    return (normal.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def real_states(path: Path, n_values: int) -> NDArray[np.uint16]:
    """Return the taps of a store as one stream of bf16 bits, uint16 [n_values], over again when it is too short."""
    import hscache

    store = hscache.open(path)
    found: list[NDArray[np.uint16]] = []
    missing, i = n_values, 0
    while missing > 0:
        found.append(store.sample(i % len(store), kind="bits").hidden_states.reshape(-1)[:missing])
        missing -= len(found[-1])
        i += 1
    return np.concatenate(found)


def make_samples(lengths: Sequence[int], taps: int, hidden: int, stream: NDArray[np.uint16]) -> list[Arrays]:
    """Cut a stream of bf16 bits into samples of these lengths, with final states, ids and masks."""
    samples, at = [], 0
    rng = np.random.default_rng(0)
    for n in lengths:
        values = n * (taps + 1) * hidden
        piece = stream[at : at + values]
        assert len(piece) == values, "the stream is too short"
        at += values
        samples.append(
            {
                "input_ids": rng.integers(0, 32000, n).astype("i4"),
                "loss_mask": np.ones(n, "u1"),
                "hidden_states": piece[: n * taps * hidden].reshape(n, taps, hidden),
                "final_state": piece[n * taps * hidden :].reshape(n, hidden),
            }
        )
    return samples


def write_store(path: Path, samples: Sequence[Arrays], *, codec: str = "raw", chunk_tokens: int = 64) -> None:
    """Write samples as a store of one shard.

    Args:
        path: Store directory, new.
        samples: From :func:`make_samples`.
        codec: Of the state arrays.
        chunk_tokens: Rows of a chunk.
    """
    _, taps, hidden = samples[0]["hidden_states"].shape
    paths = StorePaths(path)
    paths.shards.mkdir(parents=True)
    specs = array_specs(n_taps=taps, hidden_size=hidden, final_state=True, topk=0, chunk_tokens=chunk_tokens)
    body = {
        "format_version": FORMAT_VERSION,
        "manifest": {
            "target": {"path": "synthetic", "dtype": "bfloat16"},
            "states": {"taps": list(range(taps)), "final_state": True},
            "corpus": {"path": "synthetic"},
            "logits": {"topk": 0},
            "store": {"codec": codec, "chunk_tokens": chunk_tokens},
        },
        "target": {"shape": {"num_layers": taps, "hidden_size": hidden, "vocab_size": 32000}},
        "corpus": {"rows": len(samples), "digest": ""},
        "plan": {"digest": "", "shards": 1, "tokens": sum(len(arrays["input_ids"]) for arrays in samples)},
        "created": {},
    }
    digest = json_digest(body)
    paths.manifest.write_bytes(canonical_json({**body, "digest": digest}))
    writer = ShardWriter(path / "staged", specs, codec)
    for i, arrays in enumerate(samples):
        writer.add(f"0-{i}", i, arrays)
    writer.commit(paths.shard(0), {"shard": 0, "manifest_digest": digest})
    _write_index(path, 1)


def repeat_store(source: Path, destination: Path, times: int) -> None:
    """Make a store of ``times`` shards whose data files are hard links to those of a store of one shard."""
    new, first = StorePaths(destination), StorePaths(source).shard(0)
    new.shards.mkdir(parents=True)
    new.manifest.write_bytes(StorePaths(source).manifest.read_bytes())
    body = read_shard(first)
    for shard in range(times):
        for name in body["files"]:
            (new.shard(shard) / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(first / name, new.shard(shard) / name)
        n = len(body["samples"]["sample_id"])
        samples = {
            **body["samples"],
            "sample_id": [f"{shard}-{i}" for i in range(n)],
            "corpus_row": [shard * n + i for i in range(n)],
        }
        text = canonical_json(group_metadata({**body, "shard": shard, "samples": samples}))
        (new.shard(shard) / "zarr.json").write_bytes(text)
    _write_index(destination, times)


def _write_index(path: Path, shards: int) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        for shard in range(shards):
            samples = read_shard(StorePaths(path).shard(shard))["samples"]
            for values in zip(*samples.values(), strict=True):
                yield {**dict(zip(samples, values, strict=True)), "shard": shard, "status": "ok", "tag": None}

    StorePaths(path).index.write_bytes(sealed_bytes(pa.Table.from_pylist(list(rows()), schema=SCHEMA)))
