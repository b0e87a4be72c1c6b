"""Read a drafter: a run of ours, or a folder that z-lab, speculators or our own export wrote.

The ``config.json`` of a released drafter gives the shape (:mod:`hstrain.exchange.layouts`), and the weights must be
exactly those of that shape. speculators' files may also contain weights of the target; these are compared with the
target if there is one, else noted. The files are safetensors, whole or in shards; pickles are not opened.

``hstrain import`` compares a released drafter with a store, and writes the manifest of a run that fine-tunes it.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hscache
from hscache.console import say
from hscache.errors import ConfigError, ConflictError, InputError, IntegrityError
from hscache.manifest import check_fields, to_toml
from hscache.store.durable import disk_errors, write_file
from hscache.store.head import TargetHead, load_head
from hscache.store.layout import StorePaths
from hscache.store.reader import Store
from hstrain.drafter.model import Drafter, DrafterConfig
from hstrain.exchange.layouts import Released, other_target, read_config
from hstrain.manifest import TrainManifest, check_start, drafter_in, tuning_manifest
from hstrain.run.checkpoint import load_drafter, weights_digest

CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"
_OF_TARGET = {
    "embed_tokens.weight": "embed",
    "lm_head.weight": "lm_head",
    "verifier_lm_head.weight": "lm_head",
    "verifier_norm.weight": "norm",
}
"""Weights of the target that a drafter's files may contain -> their names in :class:`TargetHead`."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_FAST = "size-mtime:"


def open_drafter(
    path: Path, head: TargetHead, *, quiet: bool = False, any_target: bool = False
) -> tuple[Drafter, dict[str, Any]]:
    """Load a drafter of ours or a released one.

    Args:
        path: A run, one of its checkpoints, or a folder in the z-lab or speculators layout.
        head: Head of the store that the drafter is used with.
        quiet: Do not print the taps and notes of a released drafter to stderr.
        any_target: Also accept a released drafter of another target.

    Returns:
        The drafter, in float32 on the CPU, and its facts: ``path``, and ``provenance`` of a drafter of ours, or
        ``imported`` (:class:`hstrain.exchange.layouts.Released`) of a released one.

    Raises:
        InputError: ``not-a-checkpoint`` and what :func:`read_checkpoint` raises.
        IntegrityError: ``checkpoint-damaged``, ``drafter-damaged``.
    """
    if not (path / CONFIG_FILE).exists():
        return load_drafter(path)
    drafter, imported = read_checkpoint(path, head, any_target=any_target)
    if not quiet:
        say(f"{path}: a drafter in the {imported.layout} layout, taps {list(imported.config.taps)}")
        for note in imported.notes:
            say(f"{path}: {note}")
    return drafter, {"path": str(path), "imported": imported}


def check_store(path: Path, config: DrafterConfig, store: Store) -> None:
    """Refuse a store that is of another target or lacks a drafter's taps.

    Args:
        path: The drafter's, for messages.
        config: The drafter's shape.
        store: The store that the drafter is to be used with.

    Raises:
        InputError: ``drafter-other-target``.
        ConfigError: ``taps-invalid``.
    """
    shape = store.manifest["target"]["shape"]
    pairs = (
        ("hidden_size", config.hidden_size),
        ("vocab_size", config.vocab_size),
        ("num_layers", config.num_target_layers),
    )
    for key, ours in pairs:
        if ours != shape[key]:
            raise other_target(path, f"the {key} of its target is {ours}, that of {store.path} is {shape[key]}")
    if missing := sorted(set(config.taps) - set(store.taps)):
        raise ConfigError(
            "taps-invalid",
            f"{path} reads taps {list(config.taps)}, of which {store.path} lacks {missing}: it has {list(store.taps)}",
            hint=f"build a store with states.taps = {list(config.taps)}",
        )


def target_differences(facts: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[str]:
    """Return in what the target that a drafter of ours was trained for differs from a store's: weights, tokenizer.

    Args:
        facts: As :func:`open_drafter` returns them; those of a released drafter know no target.
        manifest: Content of the store's ``manifest.json``.
    """
    before: Mapping[str, Any] = facts.get("provenance", {}).get("store", {})
    return [
        part
        for part in ("weights", "tokenizer")
        if part in before and not _same_files(before[part], manifest["target"][part])
    ]


def warn_of_other_target(path: Path, facts: Mapping[str, Any], store: Store) -> None:
    """Report a drafter that was trained for another target of the same shape than a store's."""
    if parts := target_differences(facts, store.manifest):
        there = facts["provenance"]["store"]["target"]
        say(f"warning: {path} was trained for another target, {there}: its {' and '.join(parts)} differ from those of "
            f"{store.path}; acceptance falls, at worst to chance")  # fmt: skip


def _same_files(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Compare digests of files by name; a size with a time, of ``build --fast-digest``, shows only another size."""
    if one.keys() != other.keys():
        return False
    pairs = [(one[name], other[name]) for name in one]
    fast = [[digest.removeprefix(_FAST).split("-")[0] for digest in pair] for pair in pairs if all(map(_is_fast, pair))]
    return all(a == b for a, b in fast) and all(a == b for a, b in pairs if not _is_fast(a) and not _is_fast(b))


def _is_fast(digest: str) -> bool:
    return digest.startswith(_FAST)


def import_drafter(
    path: Path, store_path: Path, out: Path | None = None, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Compare a released drafter with a store, and write the manifest of a run that fine-tunes it.

    The manifest is written only if it and the store together reproduce every field of the drafter's shape.

    Args:
        path: Folder in the z-lab or speculators layout.
        store_path: A store of its target with its taps.
        out: TOML file to write, which names the drafter by its absolute path; None to write none.
        overrides: ``key.path=value`` strings for the manifest, except its section ``drafter``.

    Returns:
        JSON-plain: ``checkpoint``, ``store``, ``layout``, ``verifier``, ``dtypes``, ``notes``, ``parameters``,
        ``tensors``, ``weights`` (the digest that a run records of its start), ``drafter`` (its whole shape), and
        ``manifest``, the file that was written.

    Raises:
        InputError: As :func:`read_checkpoint`; ``not-a-store``.
        ConfigError: ``taps-invalid``, ``start-other-shape``, and for overrides what
            :func:`hstrain.manifest.load_train_manifest` raises.
        ConflictError: ``manifest-exists``.
        IntegrityError: ``drafter-damaged``, ``store-damaged``.
        EnvironmentFault: ``disk-full``, ``disk-error``.
    """
    store = hscache.open(store_path)
    head = load_head(StorePaths(store_path).target)
    drafter, found = read_checkpoint(path, head)
    check_store(path, drafter.config, store)
    text = to_toml(tuning_manifest(drafter.config, path.absolute(), overrides))
    again = check_fields(tomllib.loads(text), TrainManifest, str(out or path))
    check_start(path, drafter.config, drafter_in(again.drafter, store, head))
    if out is not None:
        with disk_errors(out):
            try:
                write_file(out, text.encode())
            except FileExistsError:
                raise ConflictError("manifest-exists", f"{out} exists already", hint="give another file") from None
    return {
        "checkpoint": str(path),
        "store": str(store_path),
        "layout": found.layout,
        "verifier": found.verifier,
        "dtypes": list(found.dtypes),
        "notes": list(found.notes),
        "parameters": sum(weight.numel() for weight in drafter.parameters()),
        "tensors": found.tensors,
        "weights": weights_digest(drafter.state_dict()),
        "drafter": asdict(drafter.config),
        "manifest": None if out is None else str(out),
    }


def read_checkpoint(
    path: Path, head: TargetHead | None = None, *, any_target: bool = False
) -> tuple[Drafter, Released]:
    """Load a released drafter, in float32 on the CPU.

    Args:
        path: Folder with ``config.json`` and safetensors.
        head: Head of the target, with which the drafter is compared. It is needed if the config does not give the
            number of the target's layers, as speculators' does not.
        any_target: Also accept a drafter of another target; ``differences`` lists what differs.

    Raises:
        InputError: ``drafter-missing``, ``drafter-config``, ``drafter-unsupported``, ``drafter-weights``,
            ``drafter-shape`` or ``drafter-other-target``.
        IntegrityError: ``drafter-damaged``.
    """
    raw = _read_json(path / CONFIG_FILE)
    read = read_config(path, raw, head)
    if (path / "mask_embedding.pt").exists():
        raise InputError(
            "drafter-unsupported",
            f"{path}/mask_embedding.pt: a separate embedding for the mask, expected the target's row of the mask id",
        )
    tensors = _read_weights(path)
    weights = {name: tensor for name, tensor in tensors.items() if name not in _OF_TARGET}
    with torch.device("meta"):
        drafter = Drafter(read.config)
    _check_weights(path, weights, drafter)
    notes, differences = list(read.notes), dict(read.differences)
    for name in sorted(tensors.keys() - weights.keys()):
        same, note = _compare_with_target(path, name, tensors[name], read.config, head)
        if same:
            notes.append(note)
        else:
            differences[name] = note
    if differences and not any_target:
        raise other_target(path, "; ".join(differences.values()))
    drafter.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, assign=True)
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()})
    return drafter, replace(
        read, notes=tuple(notes), differences=differences, dtypes=tuple(dtypes), tensors=len(weights)
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            "drafter-missing", f"{path} does not exist", hint="give the folder that has config.json and safetensors"
        ) from None
    except (OSError, ValueError) as error:
        raise _damaged(path, f"not readable: {error}") from error
    if not isinstance(content, dict):
        raise _damaged(path, "not a JSON object")
    return content


def _read_weights(path: Path) -> dict[str, Tensor]:
    if (path / WEIGHTS_FILE).exists():
        return _read_file(path / WEIGHTS_FILE)
    if not (path / INDEX_FILE).exists():
        raise InputError(
            "drafter-missing",
            f"{path} has neither {WEIGHTS_FILE} nor {INDEX_FILE}",
            hint="pickled weights are not opened: convert them to safetensors",
        )
    places = _read_json(path / INDEX_FILE).get("weight_map")
    if not isinstance(places, dict):
        raise _damaged(path / INDEX_FILE, "weight_map is missing or not an object")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(places.values())):
        if Path(str(name)).name != name:
            raise _damaged(path / INDEX_FILE, f"a shard outside the folder: {name!r}")
        found = _read_file(path / name)
        if found.keys() != {key for key, place in places.items() if place == name}:
            raise _damaged(path / name, f"its tensors differ from those that {INDEX_FILE} lists")
        tensors |= found
    return tensors


def _read_file(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(path))
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, f"not readable: {error}") from error


def _check_weights(path: Path, weights: Mapping[str, Tensor], drafter: Drafter) -> None:
    expected = drafter.state_dict()
    missing, unexpected = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing or unexpected:
        raise InputError(
            "drafter-weights",
            f"{path}: {len(missing)} weights are missing {missing[:4]}, {len(unexpected)} unexpected {unexpected[:4]}",
            hint="all of a drafter's weights must be known and used: this may be another kind of drafter",
        )
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape or tensor.dtype not in _FLOATS:
            raise InputError(
                "drafter-shape",
                f"{path}: {name} is {tensor.dtype} {list(tensor.shape)}, "
                f"expected floats {list(expected[name].shape)} by its config",
            )
        if not tensor.isfinite().all():
            raise _damaged(path, f"{name} contains NaN or infinities")


def _compare_with_target(
    path: Path, name: str, tensor: Tensor, config: DrafterConfig, head: TargetHead | None
) -> tuple[bool, str]:
    shape = [config.hidden_size] if name == "verifier_norm.weight" else [config.vocab_size, config.hidden_size]
    if list(tensor.shape) != shape:
        raise InputError("drafter-shape", f"{path}: {name} is {list(tensor.shape)}, expected {shape} by its config")
    if head is None:
        return True, f"{name} is the target's: not used, and no target to compare it with"
    if not torch.equal(getattr(head, _OF_TARGET[name]).to(tensor.dtype), tensor):
        return False, f"{name} differs from the target's"
    return True, f"{name} equals the target's: not used"


def _damaged(path: Path, what: str) -> IntegrityError:
    return IntegrityError("drafter-damaged", f"{path}: {what}", hint="copy or export the checkpoint again")
