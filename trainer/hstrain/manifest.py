"""The declaration of a training run: TOML in ``manifests/train/``, read into frozen, strict models.

It says what is trained and how; where it runs (store, output, device, processes) is given on the command line. The
target's shape and the taps come from the store and need not be repeated. Every field is explained in
``manifests/README.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

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
    """One entry a layer: ``full_attention`` or ``sliding_attention``."""
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
    """Decoder blocks of the target that make the context; default: all that the store has."""
    rope_theta: Number = Field(default=1e6, gt=0)
    """Base of the drafter's own rotary embedding."""
    rms_norm_eps: Number = Field(default=1e-6, gt=0)
    """Epsilon of the norms."""
    sliding_window: Count | None = None
    """Tokens that a sliding layer sees."""
    max_position_embeddings: Count = 32768
    """Written to exports."""
    start: Annotated[str, Field(min_length=1)] | None = None
    """Run, checkpoint or released drafter whose weights training begins from (``~`` is expanded); none: random ones."""
    logit_std: Number = Field(default=0.25, ge=0)
    """Calibrated random start: standard deviation of the first logits; 0 starts with norms of one."""


class DataSpec(Section):
    """What is read, and how much of it makes a step."""

    validation: Fraction = 0.05
    """Share of the samples held out, chosen by a hash of their ids."""
    max_tokens: Annotated[Count, Field(gt=2)] = 4096
    """Of a longer sample a window of at most this length is trained on, drawn anew each epoch."""
    pack_tokens: Annotated[Count, Field(gt=1)] = 4096
    """Context tokens that go through the drafter together."""
    packs_per_step: Count = 1
    """Packs of one optimizer step, shared among ranks; what a rank has more than one of, it accumulates."""
    anchors: Count = 512
    """Blocks drawn from a sample, each epoch, at most."""
    noise: Number = Field(default=0.0, ge=0)
    """Normal noise on the drafter's copy of the context, relative to each state's RMS; never on targets."""
    max_bad_samples: int = Field(default=10, ge=0, lt=1 << 31)
    """Unreadable samples that a run passes over, recorded in ``skipped.jsonl``, before it stops."""


class LossSpec(Section):
    """What a slot learns."""

    kind: Kind = "ce"
    """``ce``, ``ce-argmax``, ``kl-topk``, ``kl-exact`` or ``tv``."""
    weights: Weights = "exp"
    """Weight of a slot: ``exp``, ``dpace`` or ``none``."""
    gamma: Annotated[Number, Field(gt=0)] | None = None
    """Decay of ``exp``, in slots; default 7, 5, 4 for a block size near 16, 10, 8."""


class OptimSpec(Section):
    """How weights move."""

    name: Literal["adamw", "muon"] = "adamw"
    """``muon`` takes the matrices, and AdamW what is left."""
    lr: Number = Field(default=6e-4, gt=0)
    """Peak learning rate."""
    weight_decay: Number = Field(default=0.0, ge=0)
    """Decoupled weight decay of the matrices."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """``wsd`` decays over the last fifth."""
    warmup: Fraction = 0.04
    """Share of the steps."""
    clip: Number = Field(default=1.0, gt=0)
    """Largest norm of the gradient."""
    epochs: Count = 6
    """Passes over the data."""
    max_steps: Count | None = None
    """Stop, and end the schedule, earlier or later than the epochs say."""


class RunSpec(Section):
    """How a run proceeds and what it writes."""

    seed: int = Field(default=0, ge=-(1 << 63), lt=1 << 63)
    """Of weights, order and anchors."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Of matrix products; ``auto`` is bf16 where the device has it in hardware, else fp32; a run keeps what it
    began with. Weights and optimizer state are float32 in either case."""
    log_every: Count = 10
    """Steps between lines."""
    validate_every: Count = 200
    """Steps between validations; there is one at the beginning and one at the end, too."""
    validation_samples: Count = 64
    """Held-out samples of a validation, at most."""
    checkpoint_every: Count = 500
    """Steps between checkpoints; there is one at the end and at an interruption, too."""
    keep: Count = 2
    """Checkpoints that stay, the best one not counted."""
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


def with_precision(manifest: TrainManifest, precision: str) -> TrainManifest:
    """Return a manifest whose ``run.precision`` is settled, unless it was not ``auto``.

    Args:
        manifest: What is trained.
        precision: ``bf16`` or ``fp32``.
    """
    if manifest.run.precision != "auto":
        return manifest
    return manifest.model_copy(update={"run": manifest.run.model_copy(update={"precision": precision})})


def load_train_manifest(path: Path, overrides: Sequence[str] = ()) -> TrainManifest:
    """Read a training manifest.

    Args:
        path: TOML file.
        overrides: ``key.path=value`` strings, applied in order.

    Raises:
        ConfigError: As :func:`hscache.manifest.load_toml`; ``manifest-value`` also for fields that contradict.
    """
    return _consistent(load_toml(path, TrainManifest, overrides), str(path))


def tuning_manifest(config: DrafterConfig, start: Path, overrides: Sequence[str] = ()) -> TrainManifest:
    """Return the manifest of a run that goes on training a drafter.

    Args:
        config: Its shape; what the store does not settle goes into the manifest.
        start: Where its weights are.
        overrides: ``key.path=value`` strings for the other sections, applied in order.

    Raises:
        ConfigError: As :func:`load_train_manifest`; ``start-other-shape`` for an override of the drafter.
    """
    shape = {name: value for name, value in asdict(config).items() if name in DrafterSpec.model_fields}
    raw = {"drafter": {**shape, "start": str(start), "logit_std": 0.0}}
    manifest = _consistent(check_fields(raw, TrainManifest, str(start), overrides), str(start))
    if manifest.drafter != check_fields(raw["drafter"], DrafterSpec, str(start)):
        raise ConfigError(
            "start-other-shape",
            f"--set {' '.join(overrides)}: [drafter] is that of {start} and cannot be set",
            hint="set data, loss, optim and run",
        )
    return manifest


def _consistent(manifest: TrainManifest, where: str) -> TrainManifest:
    """Return a manifest whose fields do not contradict one another."""
    drafter = manifest.drafter
    sliding = "sliding_attention" in drafter.layer_types
    faults = {
        "drafter.num_heads: not a multiple of drafter.num_kv_heads": drafter.num_heads % drafter.num_kv_heads,
        "drafter.sliding_window: needed by sliding layers": sliding and drafter.sliding_window is None,
        "optim.name: muon needs whole matrices, which run.parallel = fsdp cuts": (
            manifest.optim.name == "muon" and manifest.run.parallel == "fsdp"
        ),
    }
    for fault, found in faults.items():
        if found:
            raise ConfigError("manifest-value", f"{where}: {fault}", hint="see manifests/README.md for every field")
    return manifest


def check_start(path: Path, found: DrafterConfig, wanted: DrafterConfig) -> None:
    """Refuse a drafter to begin from that is shaped otherwise.

    Args:
        path: Where it is.
        found: Its shape.
        wanted: What manifest and store say.

    Raises:
        ConfigError: ``start-other-shape``, naming every field that differs.
    """
    theirs, ours = asdict(found), asdict(wanted)
    differing = [f"{name} is {theirs[name]!r}, expected {ours[name]!r}" for name in ours if theirs[name] != ours[name]]
    if differing:
        raise ConfigError(
            "start-other-shape",
            f"{path}: not the drafter of the manifest and the store: {'; '.join(differing)}",
            hint="take its shape: hstrain import writes a released drafter's manifest, a run's is in its manifest.json",
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
        spec: The manifest's part.
        taps: Those of the store, used where the manifest names none.
        hidden_size: Of the target.
        vocab_size: Of the target.
        num_layers: Of the target.
        embed_scale: Of the target.

    Raises:
        ConfigError: ``taps-invalid`` for a tap that the store has not, or taps out of order; ``manifest-value`` for a
            mask token outside the vocabulary.
    """
    chosen = tuple(spec.taps or taps)
    if not set(chosen) <= set(taps):
        raise ConfigError(
            "taps-invalid",
            f"drafter.taps {list(chosen)}: the store has {list(taps)}",
            hint="take some of these, or build a store with the others",
        )
    if list(chosen) != sorted(set(chosen)):
        raise ConfigError("taps-invalid", f"drafter.taps {list(chosen)}: must ascend, without repetition")
    if spec.mask_token_id >= vocab_size:
        raise ConfigError(
            "manifest-value",
            f"drafter.mask_token_id: {spec.mask_token_id}, the target's vocabulary has {vocab_size}",
            hint="take an id of the vocabulary that the target's text does not use",
        )
    return DrafterConfig(
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        taps=chosen,
        num_target_layers=num_layers,
        layer_types=spec.layer_types,
        intermediate_size=spec.intermediate_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=spec.block_size,
        mask_token_id=spec.mask_token_id,
        rope_theta=spec.rope_theta,
        rms_norm_eps=spec.rms_norm_eps,
        sliding_window=spec.sliding_window,
        max_position_embeddings=spec.max_position_embeddings,
        embed_scale=embed_scale,
    )
