"""Read facts about a target from its directory without loading weights: shape, taps, and digests of its files.

A plan needs only the shape; a build must also know that the weights and the tokenizer are those of the store that it
continues. Digests are sha256 of file contents; hashing 54 GB takes a minute or two, and ``fast`` uses size and
modification time instead.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from hscache.console import say
from hscache.errors import ConfigError, EnvironmentFault
from hscache.manifest import (
    BuildManifest,
    ResolvedManifest,
    ResolvedStates,
    ResolvedTarget,
    TargetShape,
    TargetSpec,
)

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "merges.txt", "tokenizer.model", "tiktoken.model",
)  # fmt: skip


def resolve_path(spec: TargetSpec, *, download: bool) -> Path | None:
    """Return the target's local directory.

    Args:
        spec: Target section of a manifest; ``path`` is a directory, or else a hub id.
        download: Fetch a hub id that is not in the local cache; otherwise return None for it.

    Raises:
        EnvironmentFault: ``target-missing``.
    """
    local = Path(spec.path).expanduser()
    if local.is_dir():
        return local
    is_hub_id = spec.path.count("/") == 1 and not spec.path.startswith((".", "/", "~"))
    if not is_hub_id:
        if not download:
            return None
        raise EnvironmentFault(
            "target-missing", f"{local}: no such target directory", hint="make assets fetches the demo's target"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(spec.path, revision=spec.revision, local_files_only=not download))
    except Exception as error:  # the hub client raises many kinds of errors, network errors among them
        if not download:
            return None
        raise EnvironmentFault(
            "target-missing",
            f"{spec.path}: neither a directory nor a hub repository that can be fetched ({error})",
            hint="set target.path to a local checkpoint: --set target.path=DIR",
        ) from error


def config_shape(directory: Path) -> TargetShape:
    """Return layers, width and vocabulary of a checkpoint's language model; see :func:`config_numbers`.

    Raises:
        EnvironmentFault: ``target-config``.
    """
    found = config_numbers(directory, "num_hidden_layers", "hidden_size", "vocab_size")
    try:
        return TargetShape(**dict(zip(TargetShape.model_fields, found, strict=True)))
    except ValueError as error:
        raise EnvironmentFault("target-config", f"{directory}/config.json: {error}") from error


def config_numbers(directory: Path, *keys: str) -> list[int]:
    """Return numbers of the config of a checkpoint's language model.

    They are in ``config.json``, or in its ``text_config`` where the language model is a part. Where one is missing,
    because the family has a default or another name for it, transformers' class of the config decides.

    Raises:
        EnvironmentFault: ``target-config``.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        text = config.get("text_config", config)
        found = [text.get(key) for key in keys]
        if None in found:
            from transformers import AutoConfig  # seconds; the usual config needs none of it

            read = AutoConfig.from_pretrained(str(directory)).get_text_config()
            found = [getattr(read, key) for key in keys]
        if wrong := [f"{key} is {value!r}" for key, value in zip(keys, found, strict=True) if type(value) is not int]:
            raise ValueError(", ".join(wrong))
    except Exception as error:  # config classes of transformers raise many kinds
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise EnvironmentFault("target-config", f"{path}: not the config of a language model: {what}") from error
    return found


def read_shape(spec: TargetSpec, directory: Path | None) -> TargetShape:
    """Return a target's shape from the checkpoint's config, or as declared when there is no checkpoint.

    Raises:
        ConfigError: ``target-facts-mismatch`` when both exist and differ.
        EnvironmentFault: ``target-missing`` when neither exists; ``target-config``.
    """
    if directory is None:
        if spec.shape is None:
            raise EnvironmentFault(
                "target-missing",
                f"{spec.path}: no local checkpoint, and the manifest declares no target.shape",
                hint="--set target.path=DIR, or declare target.shape to plan without weights",
            )
        return spec.shape
    found = config_shape(directory)
    if spec.shape is not None and spec.shape != found:
        differing = [
            f"{name}: manifest {value}, checkpoint {getattr(found, name)}"
            for name, value in spec.shape
            if value != getattr(found, name)
        ]
        raise ConfigError(
            "target-facts-mismatch",
            f"target.shape differs from {directory}/config.json: {'; '.join(differing)}",
            hint="is target.path the checkpoint that this manifest is for?",
        )
    return found


def resolve_manifest(manifest: BuildManifest, *, download: bool) -> tuple[ResolvedManifest, Path | None]:
    """Return the manifest with everything that its target decides filled in, and the checkpoint's directory.

    Args:
        manifest: As the user wrote it.
        download: Fetch a hub repository; without it the directory may be None, if the manifest declares the shape.

    Raises:
        ConfigError: ``taps-invalid``, ``manifest-value``, ``target-facts-mismatch``.
        EnvironmentFault: ``target-missing``, ``target-config``.
    """
    directory = resolve_path(manifest.target, download=download)
    return resolve_taps(manifest, read_shape(manifest.target, directory)), directory


def resolve_taps(manifest: BuildManifest, shape: TargetShape) -> ResolvedManifest:
    """Return the manifest with its taps as numbers and its shape filled in, checked against the target.

    The default rule is ``round(linspace(1, L-3, 5))``. Most released drafters use other taps, named in their config.

    Raises:
        ConfigError: ``taps-invalid``, ``manifest-value``.
    """
    taps = manifest.states.taps
    if taps == "default":
        taps = tuple(int(i) for i in np.round(np.linspace(1, shape.num_layers - 3, 5)))
        say(f"taps by the default rule: {list(taps)}; most released drafters use others, named in their config")
    if list(taps) != sorted(set(taps)) or max(taps) >= shape.num_layers or min(taps) < 0:
        raise ConfigError(
            "taps-invalid",
            f"states.taps {list(taps)}: expected ascending, distinct blocks from 0 to {shape.num_layers - 1}",
            hint="tap i is the output of decoder block i (HF hidden_states[i+1])",
        )
    if manifest.logits.topk > shape.vocab_size:
        raise ConfigError(
            "manifest-value", f"logits.topk: {manifest.logits.topk}, but the vocabulary has {shape.vocab_size} tokens"
        )
    return ResolvedManifest(
        **dict(manifest)
        | {
            "states": ResolvedStates(**dict(manifest.states) | {"taps": taps}),
            "target": ResolvedTarget(**dict(manifest.target) | {"shape": shape}),
        }
    )


def file_digests(directory: Path, *, fast: bool) -> dict[str, dict[str, str]]:
    """Return digests of the files that decide a target's states and its token ids.

    Args:
        directory: Checkpoint directory.
        fast: Size and modification time instead of sha256 for the weights.

    Returns:
        ``{"weights": {file: digest}, "config": {...}, "tokenizer": {...}}``.

    Raises:
        EnvironmentFault: ``target-missing`` when there are no safetensors weights.
    """
    weights = sorted(directory.glob("*.safetensors"))
    if not weights:
        raise EnvironmentFault(
            "target-missing",
            f"{directory}: no *.safetensors weights",
            hint="convert the checkpoint with save_pretrained",
        )
    return {
        "weights": {path.name: _fast(path) if fast else _sha256(path) for path in weights},
        "config": {"config.json": _sha256(directory / "config.json")},
        "tokenizer": {path.name: _sha256(path) for path in tokenizer_files(directory)},
    }


def end_token_ids(directory: Path, tokenizer: Any = None) -> set[int]:
    """Return the tokens at which a serving engine stops.

    Args:
        directory: Checkpoint directory; the ``eos_token_id`` of ``config.json``, of its ``text_config`` and of
            ``generation_config.json`` count, each a number, a list or null. A file that is not there gives none.
        tokenizer: The target's; its end token counts, too.

    Raises:
        EnvironmentFault: ``target-config`` when a file is not valid, or an id is not a number.
    """
    ends = set() if tokenizer is None or tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    for name in ("config.json", "generation_config.json"):
        path = directory / name
        if not path.is_file():
            continue
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
            parts = [config, config.get("text_config") or {}]
            found = [part["eos_token_id"] for part in parts if part.get("eos_token_id") is not None]
        except (OSError, ValueError, AttributeError) as error:
            raise EnvironmentFault("target-config", f"{path}: {error}") from error
        for ids in found:
            listed = ids if isinstance(ids, list) else [ids]
            if not all(type(one) is int for one in listed):
                raise EnvironmentFault("target-config", f"{path}: eos_token_id is {ids!r}, expected ids")
            ends.update(listed)
    return ends


def tokenizer_files(directory: Path) -> list[Path]:
    """Return the tokenizer's files of a checkpoint directory."""
    return [directory / name for name in _TOKENIZER_FILES if (directory / name).exists()]


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fast(path: Path) -> str:
    stat = path.stat()
    return f"size-mtime:{stat.st_size}-{stat.st_mtime_ns}"
