"""The index of where each sample lies, derived from the shards.

A shard's own ``zarr.json`` is the authoritative record of its content. ``finalize`` gathers those records into
``index.parquet``, so that opening a store of thousands of shards reads one file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from hscache.errors import FormatError, InputError, IntegrityError
from hscache.store.durable import replace_file
from hscache.store.layout import (
    ATTRIBUTES_KEY,
    FORMAT_VERSION,
    StorePaths,
    canonical_json,
    damaged,
    group_metadata,
    is_committed,
    json_digest,
    shard_name,
)
from hscache.store.records import check_manifest, check_shard
from hscache.store.sealed import read_sealed, sealed_bytes

PLAN_SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("corpus_row", pa.int64()),
        ("shard", pa.int32()),
        ("batch", pa.int32()),
        ("order", pa.int32()),
        ("n_tokens", pa.int64()),
        ("n_loss", pa.int64()),
        ("status", pa.string()),
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("tag", pa.string()),
    ]
)
"""``plan.parquet``: a row per corpus row, placed or rejected."""

SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("corpus_row", pa.int64()),
        ("shard", pa.int32()),
        ("start", pa.int64()),
        ("n_tokens", pa.int64()),
        ("loss_start", pa.int64()),
        ("n_loss", pa.int64()),
        ("digest", pa.string()),
        ("status", pa.string()),
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("tag", pa.string()),
    ]
)


def read_manifest(root: Path) -> dict[str, Any]:
    """Read ``STORE/manifest.json``.

    Raises:
        InputError: ``not-a-store``.
        FormatError: ``format-version``.
        IntegrityError: ``store-damaged``.
    """
    path = StorePaths(root).manifest
    try:
        text = path.read_bytes()
        document = dict(json.loads(text))
        version = document["format_version"]
        sealed = {key: value for key, value in document.items() if key != "digest"}
        whole = canonical_json({**sealed, "digest": json_digest(sealed)}) == text
        # this version does not know the fields of another one
        if version == FORMAT_VERSION:
            check_manifest(document)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(
            "not-a-store",
            f"{root}: no hscache store here (no manifest.json)",
            hint="hscache build MANIFEST --out STORE",
        ) from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(path, f"not readable as a manifest: {error}") from error
    if type(version) is not int or version < 1:
        raise damaged(path, "not readable as a manifest: format_version is not a whole number")
    if version > FORMAT_VERSION:
        raise FormatError(
            "format-version",
            f"{root}: format version {version}; this hscache reads up to {FORMAT_VERSION}",
            hint="upgrade hscache",
        )
    if not whole:
        raise damaged(path, "content differs from its digest")
    return document


def read_shard(path: Path, *, whole: bool = False) -> dict[str, Any]:
    """Read and check the attributes of one committed shard.

    Args:
        path: ``STORE/shards/NNNNN.zarr``.
        whole: Also check its origin (provenance, health), not only the fields that reading needs.

    Returns:
        The ``hscache`` attributes: sample table, files, digests, provenance, health.

    Raises:
        IntegrityError: ``store-damaged``: the group's ``zarr.json`` is missing, not JSON, or differs from its digest.
    """
    try:
        text = (path / "zarr.json").read_bytes()
        body = dict(json.loads(text)["attributes"][ATTRIBUTES_KEY])
        sealed = canonical_json(group_metadata(body)) == text
        check_shard(body, whole=whole)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise damaged(path / "zarr.json", "missing") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(path / "zarr.json", f"not readable: {error}") from error
    if not sealed:
        raise damaged(path / "zarr.json", "content differs from its digest")
    return body


def committed_shards(root: Path) -> list[int]:
    """Return the numbers of the committed shards, ascending."""
    names = [path for path in StorePaths(root).shards.glob("*.zarr") if path.stem.isdecimal() and is_committed(path)]
    return sorted(int(path.stem) for path in names if path.name == shard_name(int(path.stem)))


def missing_shards(root: Path, n_shards: int) -> list[int]:
    """Return the numbers of the planned shards that are not committed, ascending."""
    return sorted(set(range(n_shards)) - set(committed_shards(root)))


def read_plan(root: Path) -> pa.Table:
    """Read ``plan.parquet``; the caller checks its digest against the manifest.

    Raises:
        IntegrityError: ``store-damaged``.
    """
    return _read_parquet(StorePaths(root).plan, PLAN_SCHEMA)


def build_index(root: Path, *, skip_damaged: bool = False) -> pa.Table:
    """Gather the sample tables of all committed shards, and the plan's rejections, in corpus order.

    Args:
        root: Store.
        skip_damaged: Leave out shards whose record cannot be read instead of raising.
    """
    plan = read_plan(root)
    tags = dict(zip(plan["corpus_row"].to_pylist(), plan["tag"].to_pylist(), strict=True))
    columns: dict[str, list[Any]] = {field.name: [] for field in SCHEMA}
    for shard in committed_shards(root):
        try:
            samples = read_shard(StorePaths(root).shard(shard))["samples"]
        except IntegrityError:
            if skip_damaged:
                continue
            raise
        n = len(samples["sample_id"])
        for name, values in samples.items():
            columns[name] += values
        columns["shard"] += [shard] * n
        columns["status"] += ["rejected" if reason else "ok" for reason in samples["reason"]]
        columns["tag"] += [tags.get(row) for row in samples["corpus_row"]]
    rejected = plan.filter(pc.equal(plan["status"], "rejected")).to_pydict()
    n = len(rejected["sample_id"])
    for name in ("sample_id", "corpus_row", "n_tokens", "status", "reason", "detail", "tag"):
        columns[name] += rejected[name]
    for name, value in (("shard", -1), ("start", -1), ("loss_start", -1), ("n_loss", 0), ("digest", "")):
        columns[name] += [value] * n
    return pa.table(columns, schema=SCHEMA).sort_by("corpus_row")


def finalize(root: Path, staging: Path) -> pa.Table:
    """Derive ``index.parquet`` from the shards and return it.

    Raises:
        IntegrityError: ``store-damaged``: a shard has other samples than were planned for it.
    """
    index = build_index(root)
    _require_planned(root, index)
    replace_file(StorePaths(root).index, sealed_bytes(index), staging)
    return index


def _require_planned(root: Path, index: pa.Table) -> None:
    """Check that the committed shards have the samples that the plan gave them."""
    plan, present = read_plan(root), pa.array(committed_shards(root), PLAN_SCHEMA.field("shard").type)
    planned = plan.filter(pc.is_in(plan["shard"], present)).select(["corpus_row", "shard"])
    there = index.filter(pc.greater_equal(index["shard"], 0)).select(["corpus_row", "shard"])
    pairs = [
        set(zip(*(table[name].to_pylist() for name in table.schema.names), strict=True)) for table in (planned, there)
    ]
    if pairs[0] != pairs[1]:
        shard = min(shard for _, shard in pairs[0] ^ pairs[1])
        has, wanted = (sum(s == shard for _, s in pair) for pair in reversed(pairs))
        what = f"{has} samples, but {wanted} were planned"
        raise damaged(StorePaths(root).shard(shard), what, hint=f"hscache repair {root} rebuilds it")


def table_digest(table: pa.Table) -> str:
    """Return the digest of a table's values, independent of how a file encodes them."""
    return json_digest({name: table[name].to_pylist() for name in table.schema.names})


def load_index(root: Path) -> pa.Table:
    """Return the index from ``index.parquet``, or from the shards while a build is unfinished.

    Raises:
        IntegrityError: ``store-damaged``.
    """
    path = StorePaths(root).index
    return _read_parquet(path, SCHEMA) if path.exists() else build_index(root)


def _read_parquet(path: Path, schema: pa.Schema) -> pa.Table:
    """Read a table of this schema; damaged bytes make Arrow raise many kinds of errors."""
    try:
        table = read_sealed(path.read_bytes())
    except (pa.ArrowException, OSError, ValueError, KeyError, MemoryError) as error:
        raise damaged(path, f"not readable: {error}") from error
    if not table.schema.equals(schema):
        raise damaged(path, f"columns {table.schema.names}, expected {schema.names}")
    return table
