"""Load the target so that nothing about it is assumed: its weights, its backbone, its head, its norm.

Three silent faults are made loud here. A checkpoint that lacks a key leaves a *random* tensor with only a log line:
missing and mismatched keys are an error. A model class whose logits are not simply ``lm_head(final_state)`` (soft
capping, scaling) would make a store's ``target/`` folder wrong: the relation is found by comparison on a short input,
or the model is refused. And the final norm scales by ``w`` in some families and by ``1 + w`` in others: which one it is
gets measured and recorded.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hscache.errors import EnvironmentFault
from hscache.manifest import TargetShape, TargetSpec
from hscache.target.kernels import Force, observe_kernels, planned_records

_PROBE_TOKENS = 8


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
    """A target ready to capture from.

    Attributes:
        shape: Layers, width, vocabulary.
        model: The causal language model in eval mode, without gradients.
        backbone: What turns ids into the final state.
        layers: Its decoder blocks.
        norm: Its final norm.
        head: Output embedding, ``lm_head``.
        relation: How logits follow from the head.
        norm_kind: ``w``, ``1+w`` or ``other``.
        device: Where it lives.
        dtype: Precision asked for.
        report: Load report, JSON-plain: class, keys, parameter dtypes.
    """

    shape: TargetShape
    model: nn.Module
    backbone: nn.Module
    layers: nn.ModuleList
    norm: nn.Module
    head: nn.Module
    relation: HeadRelation
    norm_kind: str
    device: torch.device
    dtype: torch.dtype
    report: dict[str, Any]


def pick_device(name: str | None) -> torch.device:
    """Return the device named, or CUDA when there is one, else the CPU."""
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


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
    import transformers

    dtype = getattr(torch, spec.dtype)
    # its loading bar and advice would break the progress line; what matters of it is in the report
    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            str(directory), dtype=dtype, attn_implementation=spec.attn_implementation, output_loading_info=True
        )
    except (OSError, ValueError, ImportError) as error:
        raise EnvironmentFault("target-missing", f"{directory}: transformers cannot load it: {error}") from error
    _refuse_bad_keys(directory, info)
    model.eval().requires_grad_(False).to(device)
    backbone, layers, norm, head = _find_parts(model, shape)
    relation = _head_relation(model, backbone, head, device)
    report = {
        "class": type(model).__name__,
        "unexpected_keys": sorted(str(key) for key in info["unexpected_keys"]),
        "parameters": sum(p.numel() for p in model.parameters()),
        "parameter_dtypes": dict(Counter(str(p.dtype).removeprefix("torch.") for p in model.parameters())),
        "attn_implementation": getattr(model.config.get_text_config(), "_attn_implementation", None),
        "head": {"scale": relation.scale, "softcap": relation.softcap},
        "norm_kind": _norm_kind(norm, device),
        "norm_eps": float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)) or 0.0),
    }
    return LoadedTarget(
        shape, model, backbone, layers, norm, head, relation, str(report["norm_kind"]), device, dtype, report
    )


def _refuse_bad_keys(directory: Path, info: dict[str, Any]) -> None:
    faults = []
    for kind in ("missing_keys", "mismatched_keys"):
        keys = sorted(str(key) for key in info[kind])
        if keys:
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            faults.append(f"{kind.replace('_', ' ')}: {', '.join(keys[:3])}{more}")
    if info.get("error_msgs"):
        faults.append(str(info["error_msgs"][0]))
    if faults:
        raise EnvironmentFault(
            "target-keys",
            f"{directory}: {'; '.join(faults)}; these weights would be random",
            hint="is tie_word_embeddings set on the level of config.json that the text model reads?",
        )


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
        if isinstance(norm, nn.Module):
            return backbone, layers, norm, head
    raise EnvironmentFault("target-structure", f"{type(backbone).__name__}: no final norm found")


@torch.inference_mode()
def _head_relation(model: nn.Module, backbone: nn.Module, head: nn.Module, device: torch.device) -> HeadRelation:
    """Find how the model's own logits follow from its head, on a short input.

    One forward gives both sides, on the reference path where there is a choice: kernels that transformers bound may not
    run here, or may be wrong, which is not this probe's affair.
    """
    ids = torch.arange(1, 1 + _PROBE_TOKENS, device=device)[None]
    seen: list[torch.Tensor] = []
    hook = backbone.register_forward_hook(lambda _module, _args, output: seen.append(output.last_hidden_state))
    try:
        with observe_kernels(model, _reference_choice(model), guard=False):
            logits = model(input_ids=ids, use_cache=False).logits.float()
    finally:
        hook.remove()
    plain = head(seen[0])
    text: Any = model.config.get_text_config()  # type: ignore[operator,union-attr]
    softcap = getattr(text, "final_logit_softcapping", None)
    scales = {
        1.0,
        float(getattr(text, "logit_scale", None) or 1.0),
        1 / float(getattr(text, "logits_scaling", None) or 1.0),
    }
    for scale in scales:
        for cap in {None, softcap}:
            relation = HeadRelation(scale, cap)
            # both sides ran in the model's precision: a wrong relation is off by far more than its rounding
            if torch.allclose(relation.apply(plain), logits, rtol=0.02, atol=0.02):
                return relation
    raise EnvironmentFault(
        "target-head",
        f"{type(model).__name__}: logits are not lm_head(final state), nor scaled nor soft-capped as its config says "
        f"(largest difference {float((plain.float() - logits).abs().max()):.3g})",
    )


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
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return "other"
    x = torch.linspace(-1, 1, weight.numel(), device=device, dtype=torch.float32)[None]
    unit = x * torch.rsqrt(x.square().mean() + 1e-6)
    got = norm(x.to(weight.dtype)).float()
    for kind, scale in (("w", weight.float()), ("1+w", 1 + weight.float())):
        if torch.allclose(got, unit * scale, rtol=0.02, atol=0.02):
            return kind
    return "other"
