"""Check the JSON records of a store before they are used.

A digest shows that a record is unchanged since it was written, not that it was written correctly: another tool, a later
version or a person may have written it. So each of the three records (``manifest.json``, a shard's attributes,
``target.json``) is checked against the fields that reading, ``verify`` and ``info`` use: types, ranges, and lists of
equal length. Other fields are ignored. Bounds are wider than any real store's, and narrow enough that no number makes a
reader spend memory or time on something impossible.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from hscache.manifest import Codec

_Count = Annotated[int, Field(ge=0, le=1 << 48)]
_Row = Annotated[int, Field(ge=-1, le=1 << 48)]
_Number = Annotated[float, Field(allow_inf_nan=False)]
_Width = Annotated[int, Field(gt=0, le=1 << 24)]
_Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
_ShardFile = Annotated[str, StringConstraints(pattern=r"^[a-z_]+/(zarr\.json|c(\.0){1,3})$")]
_TargetFile = Annotated[str, StringConstraints(pattern=r"^[^/\x00]*[^/\x00.][^/\x00]*$", max_length=255)]


class _Part(BaseModel):
    # readers do not use the fields that are not named here
    model_config = ConfigDict(strict=True, extra="ignore")


class _Shape(_Part):
    num_layers: Annotated[int, Field(gt=0, le=1 << 16)]
    hidden_size: _Width
    vocab_size: Annotated[int, Field(gt=0, le=1 << 31)]


class _States(_Part):
    taps: Annotated[list[Annotated[int, Field(ge=0, le=1 << 16)]], Field(min_length=1, max_length=1 << 12)]
    final_state: bool


class _Logits(_Part):
    topk: Annotated[int, Field(ge=0, le=1 << 24)]


class _Store(_Part):
    codec: Codec
    chunk_tokens: Annotated[int, Field(gt=0, le=1 << 32)]


class _Target(_Part):
    path: str
    dtype: str


class _Corpus(_Part):
    path: str


class _Resolved(_Part):
    target: _Target
    states: _States
    corpus: _Corpus
    logits: _Logits
    store: _Store


class _Origin(_Part):
    shape: _Shape


class _CorpusFacts(_Part):
    rows: _Count
    digest: str


class _Plan(_Part):
    digest: str
    shards: Annotated[int, Field(gt=0, le=1 << 32)]
    tokens: _Count
    # absent in stores from before they were counted
    repeated_tokens: _Count | None = None
    cut: _Count | None = None


class _Manifest(_Part):
    format_version: int
    digest: str
    manifest: _Resolved
    target: _Origin
    corpus: _CorpusFacts
    plan: _Plan
    created: dict[str, str]


class _File(_Part):
    bytes: _Count
    xxh3_128: _Digest


class _Samples(_Part):
    model_config = ConfigDict(strict=True, extra="forbid")
    sample_id: list[str]
    corpus_row: list[_Count]
    start: list[_Row]
    n_tokens: list[_Count]
    loss_start: list[_Row]
    n_loss: list[_Count]
    digest: list[str]
    reason: list[str]
    detail: list[str]

    @model_validator(mode="after")
    def _rows(self) -> _Samples:
        columns = [getattr(self, name) for name in type(self).model_fields]
        if len({len(column) for column in columns}) > 1:
            raise ValueError("columns of different lengths")
        for n, start, loss_start, reason in zip(self.n_tokens, self.start, self.loss_start, self.reason, strict=True):
            if not reason and (n < 1 or start < 0 or loss_start < 0):
                raise ValueError("a stored sample without rows")
        return self


class _Head(_Part):
    scale: _Number
    softcap: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None


class _Load(_Part):
    attn_implementation: str
    norm_kind: str
    head: _Head


class _Kernels(_Part):
    path_id: str
    path: str


class _Provenance(_Part):
    kernels: _Kernels
    accepted_path: str | None
    versions: dict[str, str | None]
    device: str
    load: _Load


class _CodecError(_Part):
    tokens: _Count
    rel_l2: list[_Number]
    rel_l2_p99: list[_Number]
    worst_cosine: list[_Number]
    kl_nats: _Number | None
    kl_rows: _Count

    @model_validator(mode="after")
    def _columns(self) -> _CodecError:
        if len({len(self.rel_l2), len(self.rel_l2_p99), len(self.worst_cosine)}) > 1:
            raise ValueError("columns of different lengths")
        if (self.kl_nats is None) != (self.kl_rows == 0):
            raise ValueError("kl_nats without kl_rows, or kl_rows without kl_nats")
        return self


class _Health(_Part):
    rms: list[_Number]
    typical_rms: list[_Number]
    max_abs: list[_Number]
    codec: _CodecError | None = None


class _Shard(_Part):
    format_version: int
    shard: _Count
    manifest_digest: str
    samples: _Samples
    files: dict[_ShardFile, _File]


class _WholeShard(_Shard):
    provenance: _Provenance
    health: _Health


class _TargetRecord(_Part):
    files: dict[_TargetFile, _File]
    tied: bool
    head: _Head
    norm_kind: str
    embed_scale: _Number | None = None  # absent in the first stores of format v1


def check_manifest(document: dict[str, Any]) -> None:
    """Check ``manifest.json``.

    Raises:
        ValueError: Naming the first field that is not as it must be.
    """
    _check(_Manifest.model_validate, document)


def check_shard(body: dict[str, Any], *, whole: bool) -> None:
    """Check a shard's attributes.

    Args:
        body: The attributes.
        whole: Also check its origin (provenance, health), not only the fields that reading needs.

    Raises:
        ValueError: Naming the first field that is not as it must be.
    """
    _check((_WholeShard if whole else _Shard).model_validate, body)


def check_target_record(facts: dict[str, Any]) -> None:
    """Check ``target.json``.

    Raises:
        ValueError: Naming the first field that is not as it must be.
    """
    _check(_TargetRecord.model_validate, facts)


def _check(validate: Callable[[dict[str, Any]], object], value: dict[str, Any]) -> None:
    try:
        validate(value)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part)[:80] for part in fault["loc"])
        raise ValueError(f"{place}: {fault['msg']}") from error
