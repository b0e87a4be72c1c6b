"""A tiny target and six samples of different lengths, in three shards, for builds that others finish."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import tiny_targets

SHARDS = 3


def six_samples(target: str, root: Path) -> Path:
    """Write target, corpus and manifest below ``root`` and return the manifest.

    Args:
        target: A name of :mod:`tiny_targets`.
        root: A directory of their own.
    """
    directory = tiny_targets.save(target, root / "target")
    rows = [
        {"id": f"r{i}", "input_ids": [(7 * i + k) % 500 for k in range(n)], "loss_mask": [0] * 4 + [1] * (n - 4)}
        for i, n in enumerate((20, 22, 70, 24, 68, 26))
    ]
    pq.write_table(pa.Table.from_pylist(rows), root / "corpus.parquet")
    path = root / "manifest.toml"
    path.write_text(
        f"""
        target = {{ path = "{directory}", dtype = "float32" }}
        states = {{ taps = [0, 3, 7] }}
        corpus = {{ path = "{root}/corpus.parquet" }}
        logits = {{ topk = 4 }}
        limits = {{ batch_tokens = 72 }}
        store = {{ shard_bytes = "56KiB" }}
        """
    )
    return path
