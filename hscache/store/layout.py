"""Format v1: names, shapes, element types and exact sizes of everything in a store.

::

    STORE/
      manifest.json            resolved manifest, target, corpus and plan; written first, never changed afterwards
      plan.parquet             one row per corpus row: which shard, which place in it, or why it was rejected
      shards/00000.zarr/       one standalone Zarr v3 group per shard; its zarr.json is written last
        hidden_states          [T, L, H] uint16 (bf16 bits)   T = tokens of the shard, L = taps
        final_state            [T, H]    uint16 (bf16 bits)   after the final norm
        *_scales               [T, L, C], [T, C] uint16       codecs int8 and int4 only, see below
        input_ids              [T] int32
        loss_mask              [T] uint8
        logit_ids              [S, k] int32                   S = supervised tokens of the shard
        logit_logprobs         [S, k] float16                 relative to the full softmax, never renormalised
        logit_lse              [S] float32                    logsumexp of the full logits
      target/                  embedding, head, final norm, config and tokenizer of the target
      index.parquet            derived from the shards: where each sample lies, its digest and status
      staging/                 work in progress

The two parquet files carry a digest of their own bytes (:mod:`hscache.store.sealed`); older files without one are read
as well.

The token axis is flat and unpadded; a sample is a row range. A *supervised* token is one with ``loss_mask`` 1 and a
predecessor (position 0 has no state that could predict it); row r of the logit arrays is the distribution that
predicted the r-th supervised token, computed at the position before it.

With the lossy codecs a state array holds codes, uint8 ``[T, L, W]``, and ``hidden_states_scales`` or
``final_state_scales`` holds the scales that turn codes into states; the attribute ``codec`` of both says how to decode
them (:mod:`hscache.store.lossy`).

The fill value of every array is NaN (or an impossible id or code), because every Zarr reader returns the fill value for
a missing chunk, without an error.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hscache.errors import IntegrityError
from hscache.store import lossy

FORMAT_VERSION = 1
BF16_NAN = 0x7FC0
ATTRIBUTES_KEY = "hscache"
INPUT_IDS, LOSS_MASK = "input_ids", "loss_mask"
STATE_ARRAYS = HIDDEN_STATES, FINAL_STATE = "hidden_states", "final_state"
LOGIT_ARRAYS = LOGIT_IDS, LOGIT_LOGPROBS, LOGIT_LSE = "logit_ids", "logit_logprobs", "logit_lse"
"""Names of the arrays of a shard; a lossy store has :func:`scales_name` of the states too."""
CRC_BYTES = 4
CHUNK_ALIGN_BYTES = 64
"""Every chunk begins at a multiple of this in its file. Without it, each chunk's checksum would shift the next one by
four bytes, and the kernel copies to and from unaligned addresses at two thirds of the speed. Zarr's shard index gives
offsets, so every reader skips the padding."""
_INDEX_ENTRY_BYTES = 16
_SMALL_CHUNK_ROWS = 4096
_LOGIT_CHUNK_ROWS = 256


@dataclass(frozen=True)
class ArraySpec:
    """One array of a shard.

    Attributes:
        name: Directory name inside the group.
        dtype: Stored element type.
        inner: Shape after the row axis.
        axis: ``tokens``: a row per token; ``loss``: a row per supervised token.
        chunk_rows: Rows of one inner chunk.
        fill: Zarr ``fill_value`` as metadata JSON holds it.
        logical_dtype: ``bfloat16`` where the stored integers are bf16 bits; ``int8``, ``int4`` and ``scales`` where the
            attribute ``codec`` defines their meaning.
        packed: Whether the store's codec applies as a Zarr codec; small arrays and lossy codes stay raw.
        scheme: For an array of codes or scales, how the states are encoded; None for plain values.
    """

    name: str
    dtype: np.dtype[Any]
    inner: tuple[int, ...]
    axis: Literal["tokens", "loss"]
    chunk_rows: int
    fill: int | str
    logical_dtype: str
    packed: bool
    scheme: lossy.Scheme | None = None

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one unpacked row."""
        return math.prod(self.inner) * self.dtype.itemsize

    @cached_property
    def by_tap(self) -> bool:
        """Whether the axis after the rows is the tap axis."""
        return self.name.startswith(HIDDEN_STATES)

    @property
    def fill_scalar(self) -> Any:
        """The fill value as a scalar of the stored element type."""
        return self.dtype.type(float("nan") if self.fill == "NaN" else self.fill)

    def n_chunks(self, rows: int) -> int:
        """Inner chunks that hold ``rows`` rows."""
        return -(-rows // self.chunk_rows)

    def raw_file_bytes(self, rows: int) -> int:
        """Exact size of the data file without packing: whole chunks with checksum and padding, then the index."""
        n = self.n_chunks(rows)
        if n == 0:
            return 0
        chunk_bytes = self.chunk_rows * self.row_bytes + CRC_BYTES
        return n * (chunk_bytes + padding_bytes(chunk_bytes)) + n * _INDEX_ENTRY_BYTES + CRC_BYTES


def padding_bytes(size: int) -> int:
    """Return how many zero bytes follow a chunk and its checksum, which together have ``size`` bytes."""
    return -size % CHUNK_ALIGN_BYTES


def array_specs(
    *, n_taps: int, hidden_size: int, final_state: bool, topk: int, chunk_tokens: int, codec: str = "raw"
) -> list[ArraySpec]:
    """Return the arrays of a store, in the order in which sample digests take them.

    Args:
        n_taps: Number of tapped decoder blocks.
        hidden_size: Width H of a state.
        final_state: Whether the post-norm state is kept.
        topk: Log-probabilities per supervised token; 0 for no logit arrays.
        chunk_tokens: Rows of a chunk of the state arrays.
        codec: Name of the store's codec; the lossless ones change no array.
    """
    u16, i32, u8 = np.dtype("<u2"), np.dtype("<i4"), np.dtype("u1")
    small = {"chunk_rows": _SMALL_CHUNK_ROWS, "packed": False}
    specs = [
        ArraySpec(INPUT_IDS, i32, (), "tokens", fill=-1, logical_dtype="int32", **small),  # type: ignore[arg-type]
        ArraySpec(LOSS_MASK, u8, (), "tokens", fill=255, logical_dtype="uint8", **small),  # type: ignore[arg-type]
    ]
    states = {HIDDEN_STATES: (n_taps, hidden_size)} | ({FINAL_STATE: (hidden_size,)} if final_state else {})
    for name, inner in states.items():
        if codec in lossy.NAMES:
            specs += _lossy_specs(name, inner, chunk_tokens, lossy.scheme(codec, hidden_size))
        else:
            specs.append(ArraySpec(name, u16, inner, "tokens", chunk_tokens, BF16_NAN, "bfloat16", True))
    if topk:
        f16, f32, rows = np.dtype("<f2"), np.dtype("<f4"), _LOGIT_CHUNK_ROWS
        specs += [
            ArraySpec(LOGIT_IDS, i32, (topk,), "loss", rows, -1, "int32", False),
            ArraySpec(LOGIT_LOGPROBS, f16, (topk,), "loss", rows, "NaN", "float16", False),
            ArraySpec(LOGIT_LSE, f32, (), "loss", rows, "NaN", "float32", False),
        ]
    return specs


def scales_name(name: str) -> str:
    """Return the name of the array of scales for ``hidden_states`` or ``final_state``."""
    return f"{name}_scales"


def _lossy_specs(name: str, inner: tuple[int, ...], chunk_tokens: int, scheme: lossy.Scheme) -> list[ArraySpec]:
    u16, u8, lead = np.dtype("<u2"), np.dtype("u1"), inner[:-1]
    codes, scales = (*lead, scheme.code_bytes), (*lead, scheme.columns)
    return [
        ArraySpec(name, u8, codes, "tokens", chunk_tokens, 0, scheme.name, False, scheme),
        ArraySpec(scales_name(name), u16, scales, "tokens", chunk_tokens, BF16_NAN, "scales", False, scheme),
    ]


def array_metadata(spec: ArraySpec, rows: int, inner_codecs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the array's ``zarr.json``: one Zarr shard object for all its rows, chunk keys with "."."""
    tail = list(spec.inner)
    outer = [max(1, spec.n_chunks(rows)) * spec.chunk_rows, *tail]
    crc_index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    sharding = {
        "chunk_shape": [spec.chunk_rows, *tail],
        "codecs": inner_codecs,
        "index_codecs": crc_index,
        "index_location": "end",
    }
    attributes: dict[str, Any] = {"logical_dtype": spec.logical_dtype}
    if spec.scheme is not None:
        attributes["codec"] = spec.scheme.attributes()
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [rows, *tail],
        "data_type": spec.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": outer}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": spec.fill,
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": attributes,
        "storage_transformers": [],
    }


def group_metadata(body: dict[str, Any]) -> dict[str, Any]:
    """Return a shard's ``zarr.json``: its record as attributes, and a digest over it."""
    attributes = {ATTRIBUTES_KEY: body, "hscache_digest": json_digest(body)}
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


def data_file_name(spec: ArraySpec) -> str:
    """Return the name of the array's only data file: ``c.0.0.0`` for three dimensions."""
    return "c" + ".0" * (1 + len(spec.inner))


def shard_name(shard: int) -> str:
    """Return the directory name of a shard below ``shards/``."""
    return f"{shard:05d}.zarr"


def is_committed(shard: Path) -> bool:
    """Return whether a shard's folder holds a whole shard: its ``zarr.json`` is written last."""
    return (shard / "zarr.json").exists()


def damaged(path: Path, what: str, *, hint: str | None = None) -> IntegrityError:
    """Return the error for a damaged part of a store.

    Args:
        path: A file below the store's directory, a committed shard, or an array or file of one.
        what: The damage.
        hint: The next step; None for ``hscache verify``.
    """
    shard = next((p for p in (path, *path.parents) if p.suffix == ".zarr" and p.stem.isdecimal()), None)
    where, root = (path, path.parent) if shard is None else (path.relative_to(shard.parent), shard.parent.parent)
    return IntegrityError("store-damaged", f"{where}: {what}", hint=hint or f"hscache verify {root} --level full")


def canonical_json(value: object) -> bytes:
    """Return the canonical JSON text of a value: sorted keys, no spaces, so that equal values have equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def json_digest(value: object) -> str:
    """Return the sha256 of a value's canonical JSON, in hex."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


@dataclass(frozen=True)
class StorePaths:
    """Paths of the parts of a store."""

    root: Path

    @property
    def manifest(self) -> Path:
        """Resolved manifest, the first file of a store."""
        return self.root / "manifest.json"

    @property
    def plan(self) -> Path:
        """One row per corpus row."""
        return self.root / "plan.parquet"

    @property
    def index(self) -> Path:
        """Derived by ``finalize``."""
        return self.root / "index.parquet"

    @property
    def shards(self) -> Path:
        """Committed shards."""
        return self.root / "shards"

    @property
    def staging(self) -> Path:
        """Work in progress."""
        return self.root / "staging"

    @property
    def target(self) -> Path:
        """The parts of the target that a trainer needs."""
        return self.root / "target"

    def shard(self, shard: int) -> Path:
        """Group directory of one shard."""
        return self.shards / shard_name(shard)
