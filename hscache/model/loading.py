"""Load the target and check, rather than assume, its weights, backbone, head and norm.

Faults that are silent elsewhere are errors here:

- transformers fills a key that the checkpoint lacks with a *random* tensor and only logs it: missing and mismatched
  keys are an error.
- A weight of the language model that is not used means that another model runs than the one that was trained: an error.
  Only draft layers (mtp) and the vision or audio parts of a model may be left over.
- If a model's logits are not simply ``lm_head(final_state)`` (soft capping, scaling), a store's ``target/`` folder
  would be wrong: the relation is found by comparison on a short input, or the model is refused.

Two differences between model families are measured and recorded: the final norm scales by ``w`` or by ``1 + w``, and
the rows of the embedding reach the first decoder block unchanged or multiplied (Gemma, Granite, Falcon-H1, MiniCPM).
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from hscache.console import say
from hscache.device import pick_dtype
from hscache.errors import EnvironmentFault
from hscache.kernels.observe import Force, observe_kernels, planned_records
from hscache.manifest import TargetShape, TargetSpec

_PROBE_TOKENS = 8
_SCALES = (
    ("logit_scale", 1), ("logits_scaling", -1), ("logits_scaling", 1), ("lm_head_multiplier", 1),
    ("output_multiplier", 1),
)  # fmt: skip
"""Config fields that scale logits, each with its exponent: Cohere, Granite, HyperCLOVA X, Falcon-H1, ..."""
_SOFTCAPS = (("final_logit_softcapping", 1), ("logits_soft_cap", 1))
_EMBED_SCALES = (("embedding_multiplier", 1), ("scale_emb", 1), ("hidden_size", 0.5))
"""Config fields that scale embeddings: Granite and Falcon-H1, MiniCPM, Gemma."""
_OTHER_PARTS = re.compile(r"(^|[._])(mtp|visual|vision|image|video|audio)")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class HeadRelation:
    """How the model's logits follow from ``lm_head(final_state)``.

    Attributes:
        scale: Factor on the head's output.
        softcap: ``softcap * tanh(x / softcap)`` after scaling, or None.
    """

    scale: float = 1.0
    softcap: float | None = None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the model's logits from the head's output, in float32, any shape."""
        logits = logits.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


@dataclass(frozen=True)
class LoadedTarget:
    """A loaded target, ready for capture.

    Attributes:
        shape: Layers, width, vocabulary.
        model: The causal language model in eval mode, without gradients.
        backbone: The module that turns ids into the final state.
        layers: Its decoder blocks.
        norm: Its final norm.
        head: Output embedding, ``lm_head``.
        relation: How logits follow from the head.
        norm_kind: ``w``, ``1+w`` or ``other``.
        embed_scale: The first decoder block reads the embedding's rows times this; None if it reads something else.
        device: Device of the model.
        dtype: Requested precision.
        report: Load report as plain JSON: class, keys, parameter dtypes.
    """

    shape: TargetShape
    model: nn.Module
    backbone: nn.Module
    layers: nn.ModuleList
    norm: nn.Module
    head: nn.Module
    relation: HeadRelation
    norm_kind: str
    embed_scale: float | None
    device: torch.device
    dtype: torch.dtype
    report: dict[str, Any]


def load_target(spec: TargetSpec, shape: TargetShape, directory: Path, device: torch.device) -> LoadedTarget:
    """Load a checkpoint and find its parts.

    Args:
        spec: Target section of the manifest.
        shape: Facts that the loaded model must agree with.
        directory: Local checkpoint.
        device: Where to put it.

    Raises:
        EnvironmentFault: ``target-keys``, ``target-structure``, ``target-head``, ``target-missing``.
    """
    dtype = getattr(torch, pick_dtype(spec.dtype, device))
    model: Any
    model, info = load_model(directory, dtype, spec.attn_implementation)
    model.to(device)
    backbone, layers, norm, head = _find_parts(model, shape)
    ids = torch.arange(1, 1 + _PROBE_TOKENS, device=device)[None]
    entered, final, logits = _probe(model, backbone, layers[0], ids)
    relation, embed_scale = _head_relation(model, head, final, logits), _embed_scale(model, ids, entered)
    if embed_scale is None:
        say(
            f"{type(model).__name__}: the first block reads something other than a multiple of the embedding's rows; "
            "drafters of this target read the rows unchanged"
        )
    report = {
        "class": type(model).__name__,
        "unexpected_keys": sorted(str(key) for key in info["unexpected_keys"]),
        "parameters": sum(p.numel() for p in model.parameters()),
        "parameter_dtypes": dict(Counter(str(p.dtype).removeprefix("torch.") for p in model.parameters())),
        "attn_implementation": getattr(model.config.get_text_config(), "_attn_implementation", None),
        "head": {"scale": relation.scale, "softcap": relation.softcap},
        "embed_scale": embed_scale,
        "norm_kind": _norm_kind(norm, device),
        "norm_eps": float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)) or 0.0),
    }
    kind = str(report["norm_kind"])
    return LoadedTarget(
        shape, model, backbone, layers, norm, head, relation, kind, embed_scale, device, dtype, report
    )  # fmt: skip


def load_model(
    directory: Path, dtype: torch.dtype, attn_implementation: str | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """Load a complete checkpoint: no weight is missing, left over or of another shape.

    Args:
        directory: Local checkpoint.
        dtype: Precision.
        attn_implementation: As transformers names it; None for its own choice.

    Returns:
        The causal language model in eval mode, without gradients, on the CPU; and transformers' loading info.

    Raises:
        EnvironmentFault: ``target-keys``, ``target-missing``.
    """
    import transformers

    # its loading bar and advice would break the progress line; what matters of it is in the report
    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            str(directory),
            dtype=dtype,
            attn_implementation=attn_implementation,
            output_loading_info=True,
            use_safetensors=True,  # the files whose digests say which weights these are
            ignore_mismatched_sizes=True,  # else a bare RuntimeError that names no key; refused below
        )
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        choice = "--set target.attn_implementation=eager" if "attention implementation" in str(error) else None
        raise EnvironmentFault(
            "target-missing", f"{directory}: transformers cannot load it: {error}", hint=choice
        ) from error
    _refuse_bad_keys(directory, info, model.config.get_text_config())
    return model.eval().requires_grad_(False), info


def _refuse_bad_keys(directory: Path, info: dict[str, Any], config: Any) -> None:
    unplaced = [key for key in info["unexpected_keys"] if not _may_be_left_over(str(key), config)]
    faults = []
    kinds = (
        (info["missing_keys"], "missing"),
        (info["mismatched_keys"], "of another shape"),
        (unplaced, "that the model does not use"),
    )
    for keys, what in kinds:
        names = sorted(_key_and_shapes(key) for key in keys)
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            faults.append(f"weights {what}: {', '.join(names[:3])}{more}")
    if info["error_msgs"]:
        faults.append(str(info["error_msgs"][0]))
    if not faults:
        return
    tied = "is tie_word_embeddings set on the level of config.json that the text model reads?"
    other = "do config.json and the weights belong together, and does this transformers know the model?"
    raise EnvironmentFault(
        "target-keys",
        f"{directory}: {'; '.join(faults)}; another model would run than the one in these files",
        hint=tied if any("lm_head" in str(key) for key in info["missing_keys"]) else other,
    )


def _may_be_left_over(key: str, config: Any) -> bool:
    """Return whether an unused weight belongs to draft layers or to a part other than the language model."""
    layer = _LAYER.search(key)
    drafts = getattr(config, "num_nextn_predict_layers", None) or 0
    beyond = layer is not None and 0 <= int(layer[1]) - config.num_hidden_layers < drafts
    return beyond or _OTHER_PARTS.search(key) is not None


def _key_and_shapes(key: Any) -> str:
    if isinstance(key, tuple):
        name, found, wanted = key
        return f"{name} {list(found)}, expected {list(wanted)}"
    return str(key)


def _find_parts(model: nn.Module, shape: TargetShape) -> tuple[nn.Module, nn.ModuleList, nn.Module, nn.Module]:
    get_decoder: Any = model.get_decoder
    get_head: Any = model.get_output_embeddings
    backbone, head = get_decoder(), get_head()
    layers = getattr(backbone, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) != shape.num_layers or not isinstance(head, nn.Module):
        n = len(layers) if isinstance(layers, nn.ModuleList) else "no"
        raise EnvironmentFault(
            "target-structure",
            f"{type(model).__name__}: {n} decoder layers found in {type(backbone).__name__}, "
            f"{shape.num_layers} expected; head {type(head).__name__}",
        )
    for name in ("norm", "final_layernorm", "norm_f", "embedding_norm"):
        norm = getattr(backbone, name, None)
        if isinstance(norm, nn.Module) and isinstance(getattr(norm, "weight", None), torch.Tensor):
            return backbone, layers, norm, head
    raise EnvironmentFault("target-structure", f"{type(backbone).__name__}: no final norm with a weight found")


@torch.inference_mode()
def _probe(
    model: nn.Module, backbone: nn.Module, first: nn.Module, ids: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Run a short input, [1, T], and return what the first block read, the final state, and the model's logits.

    One forward pass gives all three. It takes the reference path where there is a choice, because the kernels that
    transformers bound may not run here, or may be wrong; other checks find that.
    """
    entered: list[torch.Tensor | None] = []
    seen: list[torch.Tensor] = []
    hooks = [
        first.register_forward_pre_hook(
            lambda _module, args, kwargs: entered.append(args[0] if args else kwargs.get("hidden_states")),
            with_kwargs=True,
        ),
        backbone.register_forward_hook(lambda _module, _args, output: seen.append(output.last_hidden_state)),
    ]
    try:
        with observe_kernels(model, _reference_choice(model), guard=False):
            logits = model(input_ids=ids, use_cache=False).logits.float()
    finally:
        for hook in hooks:
            hook.remove()
    return entered[0], seen[0], logits


@torch.inference_mode()
def _embed_scale(model: nn.Module, ids: torch.Tensor, entered: torch.Tensor | None) -> float | None:
    """Return the factor between the embedding's rows of ids [1, T] and what the first block read of them.

    The measured factor is exact except for rounding. If the config has that factor, as it is or rounded to the
    embedding's type as in Gemma, the config's number is returned, since it reproduces the target's rows bit by bit.
    None where the rows are not simply multiplied but, for example, normed or added to positions.
    """
    get_embedding: Any = model.get_input_embeddings
    rows = get_embedding().weight[ids]
    if entered is None or entered.shape != rows.shape:
        return None
    text: Any = model.config.get_text_config()  # type: ignore[operator,union-attr]
    measured = float((entered.double() * rows.double()).sum() / rows.double().square().sum())
    exact = (measured, *_declared(text, _EMBED_SCALES))
    factors = [factor for x in exact for factor in (float(torch.tensor(x, dtype=rows.dtype)), x)]
    errors = [float((rows * factor - entered).abs().max()) for factor in factors]
    best = factors[errors.index(min(errors))]
    return best if torch.allclose(rows * best, entered, rtol=0.02, atol=1e-6) else None


@torch.inference_mode()
def _head_relation(model: nn.Module, head: nn.Module, final: torch.Tensor, logits: torch.Tensor) -> HeadRelation:
    """Find how the model's own logits, [1, T, V], follow from its head and the final state, [1, T, H]."""
    # target/ stores only the head's weight, without a bias that the head may have
    weight: Any = head.weight
    plain = nn.functional.linear(final, weight)
    text: Any = model.config.get_text_config()  # type: ignore[operator,union-attr]
    scales, caps = _declared(text, _SCALES), _declared(text, _SOFTCAPS)
    relations = [HeadRelation(scale, cap) for scale in (1.0, *scales) for cap in (None, *caps)]
    # small logits pass under a cap unchanged: the closest relation is taken, not the first that is close
    errors = [float((relation.apply(plain) - logits).abs().max()) for relation in relations]
    best = relations[errors.index(min(errors))]
    # both sides ran in the model's precision: a wrong relation is off by far more than its rounding
    if torch.allclose(best.apply(plain), logits, rtol=0.02, atol=0.02):
        return best
    raise EnvironmentFault(
        "target-head",
        f"{type(model).__name__}: logits are not lm_head(final state), nor scaled nor soft-capped as its config says "
        f"(largest difference {min(errors):.3g})",
    )


def _declared(config: Any, names: Sequence[tuple[str, float]]) -> list[float]:
    """Return the numbers that a config gives for these fields, each raised to the power given with its name."""
    found = [(getattr(config, name, None), power) for name, power in names]
    return [float(value) ** power for value, power in found if isinstance(value, int | float) and value]


def _reference_choice(model: nn.Module) -> Force:
    """Return ``torch``, or ``auto`` for a model with a part whose implementation cannot be changed."""
    try:
        planned_records(model, "torch")
    except EnvironmentFault:
        return "auto"
    return "torch"


@torch.inference_mode()
def _norm_kind(norm: nn.Module, device: torch.device) -> str:
    """Tell by a probe whether the norm scales by w or by 1 + w."""
    weight: Any = norm.weight
    # a mean other than zero, else a LayerNorm would pass for an RMSNorm
    x = torch.linspace(-1, 2, weight.numel(), device=device, dtype=torch.float32)[None]
    unit = x * torch.rsqrt(x.square().mean() + 1e-6)
    got = norm(x.to(weight.dtype)).float()
    for kind, scale in (("w", weight.float()), ("1+w", 1 + weight.float())):
        if torch.allclose(got, unit * scale, rtol=0.02, atol=0.02):
            return kind
    return "other"
