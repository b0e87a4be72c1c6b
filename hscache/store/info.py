"""What a store is, from its records: origin, shape, counts, sizes, provenance, the error of a lossy codec."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from hscache.errors import IntegrityError
from hscache.store.index import committed_shards, load_index, read_manifest, read_shard
from hscache.store.layout import StorePaths
from hscache.store.reader import codecs_of


def store_info(root: Path) -> dict[str, Any]:
    """Return what a store is: origin, shape, counts, sizes, provenance."""
    document, paths = read_manifest(root), StorePaths(root)
    index = load_index(root)
    good = index.filter(pc.equal(index["status"], "ok"))
    rejected = index.filter(pc.equal(index["status"], "rejected"))
    shards = committed_shards(root)
    records = [read_shard(paths.shard(shard), whole=True) for shard in shards]
    first = records[0] if records else None
    return {
        "store": str(root),
        "format_version": document["format_version"],
        "created": document["created"],
        "target": {"path": document["manifest"]["target"]["path"], **document["target"]["shape"]},
        "dtype": document["manifest"]["target"]["dtype"],
        "taps": document["manifest"]["states"]["taps"],
        "final_state": document["manifest"]["states"]["final_state"],
        "topk": document["manifest"]["logits"]["topk"],
        "codec": document["manifest"]["store"]["codec"],
        "codecs_before": codecs_of(document)[1:],
        "corpus": {"path": document["manifest"]["corpus"]["path"], **document["corpus"]},
        "shards": len(shards),
        "shards_planned": document["plan"]["shards"],
        "samples": good.num_rows,
        "tokens": pc.sum(good["n_tokens"]).as_py() or 0,
        "loss_tokens": pc.sum(good["n_loss"]).as_py() or 0,
        # as planned; a store that was begun before they were counted has none
        "repeated_tokens": document["plan"].get("repeated_tokens"),
        "cut": document["plan"].get("cut"),
        "tags": dict(Counter(tag for tag in good["tag"].to_pylist() if tag).most_common()),
        "rejected": dict(Counter(rejected["reason"].to_pylist())),
        "shard_bytes": sum(entry["bytes"] for record in records for entry in record["files"].values()),
        "target_bytes": sum(p.stat().st_size for p in paths.target.glob("*")) if paths.target.exists() else 0,
        "kernel_paths": sorted({record["provenance"]["kernels"]["path_id"] for record in records}),
        "provenance": first["provenance"] if first else None,
        "typical_rms": first["health"]["typical_rms"] if first else None,
        "codec_error": _codec_error([record["health"]["codec"] for record in records if record["health"].get("codec")]),
    }


def _codec_error(records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the error of a lossy codec over all shards; the 99th percentile is that of the worst shard."""
    records = [record for record in records if record["tokens"]]
    if not records:
        return None
    columns_of = {len(record["rel_l2"]) for record in records}
    if len(columns_of) > 1:
        raise IntegrityError(
            "store-damaged",
            f"shards record the codec's error for different numbers of taps: {sorted(columns_of)}",
            hint="hscache verify STORE --level full",
        )
    tokens, kl_rows = (sum(record[name] for record in records) for name in ("tokens", "kl_rows"))

    def columns(name: str) -> list[tuple[float, ...]]:
        return list(zip(*(record[name] for record in records), strict=True))

    weights = [record["tokens"] / tokens for record in records]
    kl = [record["kl_nats"] * record["kl_rows"] / kl_rows for record in records if record["kl_rows"]]
    return {
        "tokens": tokens,
        "rel_l2": [sum(x * w for x, w in zip(column, weights, strict=True)) for column in columns("rel_l2")],
        "rel_l2_p99": [max(column) for column in columns("rel_l2_p99")],
        "worst_cosine": [min(column) for column in columns("worst_cosine")],
        "kl_nats": sum(kl) if kl else None,
        "kl_rows": kl_rows,
    }
