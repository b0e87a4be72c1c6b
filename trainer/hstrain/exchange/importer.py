"""Read a drafter: one of ours, or a checkpoint that z-lab, speculators or our own export wrote.

A released one's ``config.json`` settles the shape (:mod:`hstrain.exchange.layouts`), and the weights must be those of
that shape, no more and no fewer. speculators' files may carry weights of the target as well; with a target at hand they
are compared with it, without one they are noted. The files are safetensors, whole or in shards; pickles are not opened.

``hstrain import`` compares a released drafter with a store, and writes the manifest of a run that fine-tunes it.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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
from hstrain.exchange.layouts import Layout, other_target, read_config
from hstrain.manifest import TrainManifest, check_start, drafter_in, tuning_manifest
from hstrain.run.checkpoint import load_drafter, weights_digest

CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"
_OF_TARGET = {
    "embed_tokens.weight": "embed",
    "lm_head.weight": "lm_head",
    "verifier_lm_head.weight": "lm_head",
    "verifier_norm.weight": "norm",
}
"""Weights of the target that speculators' files may carry -> their names in :class:`TargetHead`."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Imported:
    """What a checkpoint said about itself.

    Attributes:
        layout: Whose layout it is in.
        taps: 0-based decoder blocks of the target, from its config.
        logits: How logits follow from the head, from its config: ``scale`` and ``softcap``.
        dtypes: Of the weights in the file; the drafter has them in float32.
        tensors: Number of the drafter's weights.
        verifier: Name of the target, where the config has it.
        notes: What was read but not used, and what was filled in.
        apart: Differences from the target that it was compared with: name of a fact or weight -> in words.
        vllm_causal: Whether vLLM makes all layers causal inside the block, or none; None when it goes by their types.
    """

    layout: Layout
    taps: tuple[int, ...]
    logits: dict[str, Any]
    dtypes: tuple[str, ...]
    tensors: int
    verifier: str | None
    notes: tuple[str, ...]
    apart: dict[str, str]
    vllm_causal: bool | None


def open_drafter(
    path: Path, head: TargetHead, *, quiet: bool = False, any_target: bool = False
) -> tuple[Drafter, dict[str, Any]]:
    """Load a drafter of ours or a released one.

    Args:
        path: A run, one of its checkpoints, or a folder in the z-lab or speculators layout.
        head: Of the store that it is used with.
        quiet: Do not print what a released one says of itself.
        any_target: Take a released drafter that is not for this target, too.

    Returns:
        The drafter, in float32 on the CPU, and what is known of it: ``path``; for one of ours ``provenance``, for a
        released one ``imported``, an :class:`Imported`.

    Raises:
        InputError: ``not-a-checkpoint`` and what :func:`read_checkpoint` raises.
        IntegrityError: ``checkpoint-damaged``, ``drafter-damaged``.
    """
    if (path / CONFIG_FILE).exists():
        read = read_checkpoint if quiet else import_checkpoint
        drafter, imported = read(path, head, any_target=any_target)
        return drafter, {"path": str(path), "imported": imported}
    return load_drafter(path)


def check_store(path: Path, config: DrafterConfig, store: Store) -> None:
    """Refuse a store of another target, or without a drafter's taps.

    Args:
        path: Of the drafter, for messages.
        config: Its shape.
        store: What it is used with.

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
            raise other_target(path, f"its target's {key} is {ours}, that of {store.path} is {shape[key]}")
    if missing := sorted(set(config.taps) - set(store.taps)):
        raise ConfigError(
            "taps-invalid",
            f"{path} reads taps {list(config.taps)}, of which {store.path} lacks {missing}: it has {list(store.taps)}",
            hint=f"build a store with states.taps = {list(config.taps)}",
        )


def import_drafter(
    path: Path, store_path: Path, out: Path | None = None, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Compare a released drafter with a store, and write the manifest of a run that fine-tunes it.

    The manifest and the store together must give back the shape that was read, every field of it; else nothing is
    written.

    Args:
        path: Folder in the z-lab or speculators layout.
        store_path: A store of its target with its taps.
        out: TOML file to make; None for none. It names the drafter by its absolute path.
        overrides: ``key.path=value`` strings for the manifest, but for its drafter.

    Returns:
        JSON-plain: ``checkpoint``, ``store``, ``layout``, ``verifier``, ``dtypes``, ``notes``, ``parameters``,
        ``tensors``, ``weights`` (the digest that a run records of its start), ``drafter`` (all of its shape), and
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


def import_checkpoint(
    path: Path, head: TargetHead | None = None, *, any_target: bool = False
) -> tuple[Drafter, Imported]:
    """Load a drafter as :func:`read_checkpoint` does, and print its taps and notes to stderr.

    Args:
        path: As there.
        head: As there.
        any_target: As there.

    Raises:
        HscacheError: As there.
    """
    drafter, facts = read_checkpoint(path, head, any_target=any_target)
    say(f"{path}: a drafter in the {facts.layout} layout, taps {list(facts.taps)}")
    for note in facts.notes:
        say(f"{path}: {note}")
    return drafter, facts


def read_checkpoint(
    path: Path, head: TargetHead | None = None, *, any_target: bool = False
) -> tuple[Drafter, Imported]:
    """Load a drafter, in float32 on the CPU.

    Args:
        path: Folder with ``config.json`` and safetensors.
        head: The target's; the checkpoint is compared with it. A config that does not say how many layers the target
            has (speculators') needs it.
        any_target: Also accept a drafter of another target; ``apart`` lists the differences.

    Raises:
        InputError: ``drafter-missing``, ``drafter-config``, ``drafter-unsupported``, ``drafter-weights``,
            ``drafter-shape`` or ``drafter-other-target``.
        IntegrityError: ``drafter-damaged``.
    """
    raw = _read_json(path / CONFIG_FILE)
    said = read_config(path, raw, head)
    if (path / "mask_embedding.pt").exists():
        raise InputError(
            "drafter-unsupported",
            f"{path}/mask_embedding.pt: a separate embedding for the mask, expected the target's row of the mask id",
        )
    tensors = _read_weights(path)
    weights = {name: tensor for name, tensor in tensors.items() if said.layout == "zlab" or name not in _OF_TARGET}
    with torch.device("meta"):
        drafter = Drafter(said.config)
    _check_weights(path, weights, drafter)
    notes, apart = said.notes, said.apart
    for name in sorted(tensors.keys() - weights.keys()):
        same, note = _compare_with_target(path, name, tensors[name], said.config, head)
        if same:
            notes.append(note)
        else:
            apart[name] = note
    if apart and not any_target:
        raise other_target(path, "; ".join(apart.values()))
    drafter.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, assign=True)
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()})
    return drafter, Imported(
        said.layout,
        said.config.taps,
        said.logits,
        tuple(dtypes),
        len(weights),
        said.verifier,
        tuple(notes),
        apart,
        said.vllm_causal,
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
        raise _damaged(path / INDEX_FILE, "no weight_map")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(places.values())):
        if Path(str(name)).name != name:
            raise _damaged(path / INDEX_FILE, f"a shard outside the folder: {name!r}")
        found = _read_file(path / name)
        if found.keys() != {key for key, place in places.items() if place == name}:
            raise _damaged(path / name, f"its tensors are not those that {INDEX_FILE} names")
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
            hint="a weight that nobody reads would change nothing and cost acceptance: is it another kind of drafter?",
        )
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape or tensor.dtype not in _FLOATS:
            raise InputError(
                "drafter-shape",
                f"{path}: {name} is {tensor.dtype} {list(tensor.shape)}, "
                f"expected floats {list(expected[name].shape)} by its config",
            )
        if not tensor.isfinite().all():
            raise _damaged(path, f"{name} has NaN or infinities")


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
