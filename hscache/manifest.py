"""The declaration of a build: TOML in, frozen and fully typed models out.

A manifest says *what* to cache (target, taps, logits, corpus, limits, codec), never *where it runs*: device, output
path and process count are options of the command. Unknown keys and wrong types are errors that name the key's path and
the nearest known name, because a mistyped ``batch_token`` that is silently ignored costs a night of GPU time.

``--set limits.max_tokens=2048`` overrides one key; the value is read as TOML and, failing that, as a string.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, ValidationError

from hscache.errors import ConfigError

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(B|KB|MB|GB|TB|KiB|MiB|GiB|TiB)\s*$")
_TOML_ESCAPED = re.compile(r'[\x00-\x1f\x7f"\\]')
_UNIT = {
    unit: base**power
    for base, suffix in ((1000, "B"), (1024, "iB"))
    for power, unit in enumerate(["", *(letter + suffix for letter in "KMGT")])
    if unit
} | {"B": 1}


def _read_size(value: object) -> object:
    """Turn "1GiB" into bytes; leave anything else to the type check."""
    if isinstance(value, str) and (match := _SIZE.match(value)):
        return int(Decimal(match[1]) * _UNIT[match[2]])
    return value


Count = Annotated[int, Field(gt=0, lt=1 << 31)]
"""A number that fits wherever torch and NumPy keep sizes and positions."""
Size = Annotated[int, BeforeValidator(_read_size), Field(gt=0, lt=1 << 63)]
Taps = Annotated[tuple[Annotated[int, Strict(), Field(ge=0, lt=1 << 31)], ...], Strict(False), Field(min_length=1)]

Packed = Literal["lz4", "zstd"]
"""Lossless codecs that make the states smaller (:mod:`hscache.store.codecs`)."""
Lossy = Literal["int8", "int4"]
"""Codecs that change the states (:mod:`hscache.store.lossy`), the coarsest last."""
Codec = Literal["raw", Packed, Lossy]
PACKED: tuple[Packed, ...] = get_args(Packed)
LOSSY: tuple[Lossy, ...] = get_args(Lossy)


class Section(BaseModel):
    """A table of a manifest: frozen, strict, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TargetShape(Section):
    """Facts of the target, declared so that a plan needs no checkpoint; they are checked when there is one."""

    num_layers: Count
    hidden_size: Count
    vocab_size: Count


class TargetSpec(Section):
    """The frozen model whose states are cached."""

    path: str
    """Checkpoint directory (``~`` is expanded) or hub id."""
    revision: str | None = None
    """Commit of the hub repository; ignored for a directory."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Precision of the forward pass; ``auto`` is bfloat16 where the device has it in hardware, else float32.

    The store records which. States are stored as bf16 either way.
    """
    attn_implementation: str = "sdpa"
    """As transformers names it: ``sdpa``, ``eager``, ``flash_attention_2``, ..."""
    shape: TargetShape | None = None


class StatesSpec(Section):
    """The states to keep."""

    taps: Taps | Literal["default"]
    """0-based decoder blocks whose *output* is kept, ascending; ``"default"`` is the five-tap rule, printed."""
    final_state: bool = True
    """Keep the state after the final norm, from which ``target/`` recomputes exact logits."""


class LogitsSpec(Section):
    """The part of the target's distribution to keep with the states."""

    topk: int = Field(default=64, ge=0, lt=1 << 31)
    """Log-probabilities kept for each supervised token, with the logsumexp; 0 keeps none."""


class CorpusSpec(Section):
    """The tokenized completions."""

    path: str
    """File, folder or glob pattern with ``input_ids`` and a mask or labels; see :mod:`hscache.corpus.readers`."""


class LimitsSpec(Section):
    """Conditions that a row must meet, and the tokens of one forward pass."""

    max_tokens: Annotated[Count, Field(gt=1)] = 4096
    """Longer rows are rejected as ``too-long``."""
    min_loss_tokens: Count = 1
    """Rows with fewer supervised tokens are rejected as ``too-few-supervised``."""
    repeats: float = Field(default=1.0, gt=0.0, le=1.0)
    """Samples with a larger share of repeated tokens are rejected as ``repeats``; 1 keeps all.

    A supervised token is repeated when it ends a sequence of four tokens that its sample had before.
    """
    drop_cut: bool = False
    """Reject samples whose ``finish_reason`` says that a limit of length cut the answer off (``cut-answer``)."""
    batch_tokens: Count = 8192
    """Padded tokens of one forward pass; part of the plan, since it decides which samples share a batch."""


class StoreSpec(Section):
    """How states are written."""

    codec: Codec = "raw"
    """``raw``, ``lz4`` and ``zstd`` keep every bit; ``int8`` and ``int4`` are lossy, with a measured error."""
    shard_bytes: Size = 1 << 30
    """A new shard begins when the next batch would make this one larger."""
    chunk_tokens: Count = 64
    """Rows of one Zarr chunk: the unit of checksum and compression."""


class BuildManifest(Section):
    """All settings that decide the content of a store."""

    target: TargetSpec
    states: StatesSpec
    corpus: CorpusSpec
    logits: LogitsSpec = LogitsSpec()
    limits: LimitsSpec = LimitsSpec()
    store: StoreSpec = StoreSpec()


class ResolvedTarget(TargetSpec):
    """A target whose shape is known."""

    shape: TargetShape


class ResolvedStates(StatesSpec):
    """Taps as numbers."""

    taps: Taps


class ResolvedManifest(BuildManifest):
    """A manifest that was checked against its target; plans, builds and stores use this one."""

    target: ResolvedTarget
    states: ResolvedStates


M = TypeVar("M", bound=BaseModel)


def load_manifest(path: Path, overrides: Sequence[str] = ()) -> BuildManifest:
    """Read a build manifest; see :func:`load_toml`."""
    return load_toml(path, BuildManifest, overrides)


def load_toml(path: Path, model: type[M], overrides: Sequence[str] = ()) -> M:
    """Read a manifest of any kind.

    Args:
        path: TOML file.
        model: Its fields.
        overrides: ``key.path=value`` strings, applied in order.

    Raises:
        ConfigError: ``manifest-missing``, ``manifest-syntax``, ``manifest-unknown-key``, ``manifest-value`` or
            ``set-syntax``.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            "manifest-missing", f"{path}: {error.strerror}", hint="the shipped ones are in manifests/"
        ) from error
    except ValueError as error:  # not TOML, not UTF-8, or a number of more than 4,300 digits
        raise ConfigError("manifest-syntax", f"{path}: not valid TOML: {error}") from error
    return check_fields(raw, model, str(path), overrides)


def parse_manifest(raw: Mapping[str, Any], where: str) -> BuildManifest:
    """Check a mapping against a build manifest's fields; see :func:`check_fields`."""
    return check_fields(raw, BuildManifest, where)


def check_fields(raw: Mapping[str, Any], model: type[M], where: str, overrides: Sequence[str] = ()) -> M:
    """Check a mapping against a manifest's fields.

    Args:
        raw: The parsed TOML or JSON.
        model: The fields.
        where: Name of the source in error messages.
        overrides: ``key.path=value`` strings, applied in order before the check.

    Raises:
        ConfigError: ``manifest-unknown-key`` or ``manifest-value``, for the first fault found; ``set-syntax``.
    """
    content = deepcopy(dict(raw))
    for text in overrides:
        _override(content, text)
    try:
        return model.model_validate(content)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        # an unknown key is the likelier cause when a typo also leaves a required key missing: report it first
        fault = next((f for f in faults if f["type"] == "extra_forbidden"), faults[0])
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        # pydantic puts the names of union members between the keys: keep only the keys that a user typed
        key = ".".join(str(part) for part in fault["loc"] if "[" not in str(part))
        if fault["type"] == "extra_forbidden":
            near = difflib.get_close_matches(
                str(fault["loc"][-1]), _fields_at(model, fault["loc"][:-1]), n=1, cutoff=0.4
            )
            prefix = ".".join(str(part) for part in fault["loc"][:-1])
            hint = f"did you mean {'.'.join(filter(None, [prefix, near[0]]))}?" if near else "see manifests/README.md"
            raise ConfigError("manifest-unknown-key", f"{where}: unknown key {key}{more}", hint=hint) from error
        got = "" if fault["type"] == "missing" else f", got {fault['input']!r}"
        message = fault["msg"][0].lower() + fault["msg"][1:]
        raise ConfigError(
            "manifest-value", f"{where}: {key}: {message}{got}{more}", hint="see manifests/README.md for every field"
        ) from error


def to_toml(manifest: BaseModel) -> str:
    """Return the resolved manifest as TOML, every default written out."""
    lines: list[str] = []
    for section, fields in manifest.model_dump(mode="json").items():
        _toml_table(section, fields, lines)
    return "\n".join(lines).strip() + "\n"


def _toml_table(name: str, fields: Mapping[str, Any], lines: list[str]) -> None:
    lines += ["", f"[{name}]"]
    lines += [
        f"{key} = {_toml_value(value)}"
        for key, value in fields.items()
        if value is not None and not isinstance(value, dict)
    ]
    for key, value in fields.items():
        if isinstance(value, dict):
            _toml_table(f"{name}.{key}", value, lines)


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, str):
        return '"' + _TOML_ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", value) + '"'
    return str(value)


def _override(raw: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError("set-syntax", f"--set {text!r}: expected key.path=value", hint="--set limits.max_tokens=2048")
    try:
        parsed: object = tomllib.loads(f"x = {value}")["x"]
    except ValueError:  # as above
        parsed = value
    node = raw
    for part in parts[:-1]:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise ConfigError("manifest-unknown-key", f"--set {key.strip()}: {part} is not a section")
        node = child
    node[parts[-1]] = parsed


def _fields_at(model: type[BaseModel], loc: Sequence[int | str]) -> list[str]:
    for part in loc:
        annotation = model.model_fields[str(part)].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return list(model.model_fields)
