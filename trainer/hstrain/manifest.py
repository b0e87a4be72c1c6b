"""The declaration of a training run: TOML in ``manifests/train/``, read into frozen, strict models.

It says what is trained and how; where it runs (store, output, device, processes) is given on the command line. The
target's shape and the taps come from the store and need not be repeated. Every field is explained in
``manifests/README.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from hscache.errors import ConfigError
from hscache.manifest import Count, Section, Taps, check_fields, load_toml
from hscache.store.head import TargetHead
from hscache.store.reader import Store
from hstrain.drafter.losses import Kind, Weights, default_gamma
from hstrain.drafter.model import DrafterConfig, LayerType

Number = Annotated[float, Field(allow_inf_nan=False)]
"""A float that may be written as a whole number (strict floats take integers); text such as ``"6e-4"`` is refused."""
Fraction = Annotated[float, Field(ge=0, lt=1)]


class DrafterSpec(Section):
    """The drafter's shape; width and vocabulary are the target's."""

    layer_types: Annotated[tuple[LayerType, ...], Strict(False), Field(min_length=1)]
    """One entry per layer: ``full_attention`` or ``sliding_attention``."""
    intermediate_size: Count
    """Width of the feed-forward layers."""
    num_heads: Count
    """Query heads."""
    num_kv_heads: Count
    """Key and value heads."""
    head_dim: Annotated[Count, Field(multiple_of=2)]
    """Width of a head."""
    block_size: Annotated[Count, Field(gt=1)]
    """Anchor and drafted slots: B."""
    mask_token_id: int = Field(ge=0, lt=1 << 31)
    """Input id of the drafted slots: an id of the target's vocabulary that its text does not use."""
    taps: Taps | None = None
    """Decoder blocks of the target that make the context; default: all taps of the store."""
    rope_theta: Number = Field(default=1e6, gt=0)
    """Base of the drafter's own rotary embedding."""
    rms_norm_eps: Number = Field(default=1e-6, gt=0)
    """Epsilon of the norms."""
    sliding_window: Count | None = None
    """Tokens that a sliding layer sees."""
    max_position_embeddings: Count = 32768
    """Written to exports."""
    start: Annotated[str, Field(min_length=1)] | None = None
    """Run, checkpoint or released drafter whose weights training starts with (``~`` is expanded); default: random."""
    logit_std: Number = Field(default=0.25, ge=0)
    """Calibrated random start: standard deviation of the first logits; 0 starts with norms of one."""


_SHAPE_FIELDS = DrafterSpec.model_fields.keys() - {"start", "logit_std"}
"""Fields of the drafter's shape that the manifest gives; the others follow from the store."""


class DataSpec(Section):
    """The data that is read, and how much of it makes a step."""

    validation: Fraction = 0.05
    """Share of the samples held out for validation, chosen by a hash of their ids."""
    test: Fraction = 0.0
    """Share of the samples also held out, which no validation reads: for ``hstrain eval`` after training."""
    max_tokens: Annotated[Count, Field(gt=2)] = 4096
    """Longest part of a sample that is trained on: in a longer sample a window, drawn anew each epoch."""
    pack_tokens: Annotated[Count, Field(gt=1)] = 4096
    """Context tokens that go through the drafter together."""
    packs_per_step: Count = 1
    """Packs of one optimizer step, shared among ranks; a rank with several accumulates their gradients."""
    anchors: Count = 512
    """Most blocks drawn from a sample in an epoch."""
    noise: Number = Field(default=0.0, ge=0)
    """Normal noise on the drafter's copy of the context, relative to each state's RMS; never on targets."""
    max_bad_samples: int = Field(default=10, ge=0, lt=1 << 31)
    """Most unreadable samples that a run skips, recorded in ``skipped.jsonl``, before it stops."""


class LossSpec(Section):
    """The loss of a slot."""

    kind: Kind = "ce"
    """``ce``, ``ce-argmax``, ``kl-topk``, ``kl-exact`` or ``tv``."""
    weights: Weights = "exp"
    """Weight of a slot: ``exp``, ``dpace`` or ``none``."""
    gamma: Annotated[Number, Field(gt=0)] | None = None
    """Decay of ``exp``, in slots; default 7, 5, 4 for a block size near 16, 10, 8."""


class OptimSpec(Section):
    """Optimizer and schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    """``muon`` updates the matrices, and AdamW the other parameters."""
    lr: Number = Field(default=6e-4, gt=0)
    """Peak learning rate."""
    weight_decay: Number = Field(default=0.0, ge=0)
    """Decoupled weight decay of the matrices."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """``wsd`` decays over the last fifth of the steps."""
    warmup: Fraction = 0.04
    """Share of the steps over which the learning rate rises."""
    clip: Number = Field(default=1.0, gt=0)
    """Largest norm of the gradient."""
    epochs: Count = 6
    """Passes over the data."""
    max_steps: Count | None = None
    """Length of run and schedule in steps, instead of epochs."""


class RunSpec(Section):
    """How a run proceeds and what it writes."""

    seed: int = Field(default=0, ge=-(1 << 63), lt=1 << 63)
    """Seed of weights, order and anchors."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Precision of matrix products; ``auto`` is bf16 where the device has it in hardware, else fp32; a run keeps the
    precision it started with. Weights and optimizer state are always float32."""
    log_every: Count = 10
    """Steps between log lines."""
    validate_every: Count = 200
    """Steps between validations; the first and the last step have one, too."""
    validation_samples: Count = 64
    """Most held-out samples of a validation."""
    checkpoint_every: Count = 500
    """Steps between checkpoints; the end and an interruption write one, too."""
    keep: Count = 2
    """Checkpoints that are kept, in addition to the best one."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun: whole copies, or weights cut over the ranks (``fully_shard``)."""


class TrainManifest(Section):
    """All settings of a run."""

    drafter: DrafterSpec
    data: DataSpec = DataSpec()
    loss: LossSpec = LossSpec()
    optim: OptimSpec = OptimSpec()
    run: RunSpec = RunSpec()

    @property
    def gamma(self) -> float:
        """Decay of the slot weights."""
        return self.loss.gamma or default_gamma(self.drafter.block_size)

    def record(self) -> dict[str, Any]:
        """Return the manifest as JSON has it, as a run records it."""
        found = self.model_dump(mode="json")
        if not self.data.test:  # left out if it changes nothing, so that runs from before it existed can continue
            del found["data"]["test"]
        return found


def with_precision(manifest: TrainManifest, precision: str) -> TrainManifest:
    """Return a manifest in which the precision ``auto`` is replaced by ``bf16`` or ``fp32``."""
    if manifest.run.precision != "auto":
        return manifest
    return manifest.model_copy(update={"run": manifest.run.model_copy(update={"precision": precision})})


def load_train_manifest(path: Path, overrides: Sequence[str] = ()) -> TrainManifest:
    """Read a training manifest.

    Args:
        path: TOML file.
        overrides: ``key.path=value`` strings, applied in order.

    Raises:
        ConfigError: As :func:`hscache.manifest.load_toml`; ``manifest-value`` also for contradicting fields.
    """
    return _consistent(load_toml(path, TrainManifest, overrides), str(path))


def tuning_manifest(config: DrafterConfig, start: Path, overrides: Sequence[str] = ()) -> TrainManifest:
    """Return the manifest of a run that continues the training of a drafter.

    Args:
        config: Shape of the drafter; the manifest gets the fields that do not follow from the store.
        start: Path of its weights.
        overrides: ``key.path=value`` strings for the other sections, applied in order.

    Raises:
        ConfigError: As :func:`load_train_manifest`; ``start-other-shape`` for an override of the drafter.
    """
    shape = {name: getattr(config, name) for name in _SHAPE_FIELDS}
    raw = {"drafter": {**shape, "start": str(start), "logit_std": 0.0}}
    manifest = _consistent(check_fields(raw, TrainManifest, str(start), overrides), str(start))
    if manifest.drafter != check_fields(raw["drafter"], DrafterSpec, str(start)):
        raise ConfigError(
            "start-other-shape",
            f"--set {' '.join(overrides)}: [drafter] is the shape of {start} and cannot be changed",
            hint="set only fields of data, loss, optim and run",
        )
    return manifest


def _consistent(manifest: TrainManifest, where: str) -> TrainManifest:
    """Return the manifest, after checking that its fields do not contradict one another."""
    drafter = manifest.drafter
    sliding = "sliding_attention" in drafter.layer_types
    faults = {
        "drafter.num_heads: not a multiple of drafter.num_kv_heads": drafter.num_heads % drafter.num_kv_heads,
        "drafter.sliding_window: needed by sliding layers": sliding and drafter.sliding_window is None,
        "data.test: with data.validation, it leaves no sample to train on": (
            manifest.data.validation + manifest.data.test >= 1
        ),
        "optim.name: muon needs whole matrices, which run.parallel = fsdp cuts": (
            manifest.optim.name == "muon" and manifest.run.parallel == "fsdp"
        ),
    }
    for fault, found in faults.items():
        if found:
            raise ConfigError("manifest-value", f"{where}: {fault}", hint="see manifests/README.md for every field")
    return manifest


def check_start(path: Path, found: DrafterConfig, wanted: DrafterConfig) -> None:
    """Refuse a starting drafter of another shape.

    Args:
        path: The starting drafter's.
        found: Its shape.
        wanted: The shape that manifest and store give.

    Raises:
        ConfigError: ``start-other-shape``, naming every field that differs.
    """
    theirs, ours = asdict(found), asdict(wanted)
    differing = [f"{name} is {theirs[name]!r}, expected {ours[name]!r}" for name in ours if theirs[name] != ours[name]]
    if differing:
        raise ConfigError(
            "start-other-shape",
            f"{path}: its shape differs from that of manifest and store: {'; '.join(differing)}",
            hint="use the drafter's shape: hstrain import writes the manifest of a released drafter, and a run has its "
            "own in manifest.json",
        )


def drafter_in(spec: DrafterSpec, store: Store, head: TargetHead) -> DrafterConfig:
    """Return the full shape of a drafter for a store; see :func:`drafter_config`."""
    shape = store.manifest["target"]["shape"]
    return drafter_config(
        spec,
        taps=store.taps,
        hidden_size=shape["hidden_size"],
        vocab_size=head.lm_head.shape[0],
        num_layers=shape["num_layers"],
        embed_scale=head.embed_scale,
    )


def drafter_config(
    spec: DrafterSpec,
    *,
    taps: Sequence[int],
    hidden_size: int,
    vocab_size: int,
    num_layers: int,
    embed_scale: float = 1.0,
) -> DrafterConfig:
    """Return the drafter's full shape.

    Args:
        spec: The manifest's section ``drafter``.
        taps: Taps of the store; all are used if the manifest gives none.
        hidden_size: Of the target.
        vocab_size: Of the target.
        num_layers: Of the target.
        embed_scale: Of the target.

    Raises:
        ConfigError: ``taps-invalid`` for a tap that the store lacks, or taps out of order; ``manifest-value`` for a
            mask token outside the vocabulary.
    """
    chosen = tuple(spec.taps or taps)
    if not set(chosen) <= set(taps):
        raise ConfigError(
            "taps-invalid",
            f"drafter.taps {list(chosen)}: the store has {list(taps)}",
            hint="choose from these, or build a store that has the others",
        )
    if list(chosen) != sorted(set(chosen)):
        raise ConfigError("taps-invalid", f"drafter.taps {list(chosen)}: expected ascending, distinct taps")
    if spec.mask_token_id >= vocab_size:
        raise ConfigError(
            "manifest-value",
            f"drafter.mask_token_id: {spec.mask_token_id}, the target's vocabulary has {vocab_size} tokens",
            hint="use an id of the vocabulary that the target's text does not contain",
        )
    given = {name: getattr(spec, name) for name in _SHAPE_FIELDS} | {"taps": chosen}
    return DrafterConfig(
        **given,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        num_target_layers=num_layers,
        embed_scale=embed_scale,
    )
