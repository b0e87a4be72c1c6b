"""``config.json`` of a drafter in the two layouts that others read: z-lab's (SGLang, vLLM, dflash) and speculators'.

Both are a Qwen3 config plus the drafter's own facts. z-lab: ``block_size`` at the top and in
``dflash_config``, with ``mask_token_id`` and ``target_layer_ids`` = taps. speculators: the Qwen3 config inside
``transformer_layer_config``, and ``aux_hidden_state_layer_ids`` = taps + 1.

The type of a layer decides whether it is causal inside the block (:mod:`hstrain.drafter.attention`). Readers of z-lab's
layout and speculators' own class follow it. But vLLM derives one flag for all layers from speculators'
``sliding_window_non_causal`` (``tests/oracle/test_vllm.py``), and no value of that key is right for a drafter that has
both sliding and full layers.

Engines ignore keys that they do not know, and a config that is misread shows only as a low acceptance length. So the
reader here takes every value from the file, as the engines do (transformers fills in what it left out when it wrote the
file), and refuses keys that our drafter does not implement and keys with different values in two places.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hscache.errors import ConfigError, InputError
from hscache.store.head import TargetHead
from hstrain.drafter.model import DrafterConfig

Layout = Literal["zlab", "speculators"]

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "add_swa_attention_sink_bias": (False,),
    "attention_bias": (False,),
    "attention_sink_bias": (False,),
    "hidden_act": ("silu",),
    "is_neox_style": (True,),
    "logit_scale": (1,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1,),
    "quantization_config": (),
    "sample_from_anchor": (False,),
    "use_aux_hidden_state": (True,),
    "use_swa": (False,),
}
"""Keys that change what a drafter computes -> values, besides null, for which it computes the same as ours."""
_ARCHITECTURES = ("DFlashDraftModel", "Qwen3DFlashDraftModel")
"""Names under which DFlash drafters are published; the second is that of NeMo Automodel."""
_NESTED = {"block_size", "causal", "final_logit_softcapping", "input_embedding_scale", "is_causal", "mask_token_id",
           "num_target_layers", "output_multiplier", "swa_window_size", "target_layer_ids"}  # fmt: skip
"""Keys of ``dflash_config`` that are read, besides the neutral ones."""
_SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
          "head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings")  # fmt: skip
LARGEST, _LARGEST_BLOCK = 1 << 24, 1 << 12
"""Largest widths or counts, and largest block, that are accepted: no tensor of a larger shape can be made."""
_YARN = ("factor", "original_max_position_embeddings")
"""Keys of a rotary embedding that YaRN stretches; its other parameters must be absent."""
_SPECULATORS = "0.9.0"
"""The version of speculators whose keys are written; its format has no version number."""


def qwen3_config(config: DrafterConfig) -> dict[str, Any]:
    """Return the Qwen3 part of both layouts, with a value for every key so that no reader's default counts.

    ``use_sliding_window`` must be set with a window: transformers drops the window without it. ``rope_theta`` is in two
    places, because versions of transformers differ in where they look, and so are the parameters of YaRN.
    """
    rope: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if config.yarn_positions is not None:
        stretched = {"factor": config.yarn_factor, "original_max_position_embeddings": config.yarn_positions}
        rope |= {"rope_type": "yarn", **stretched}
    return {
        **({} if config.yarn_positions is None else {"rope_scaling": dict(rope)}),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "layer_types": list(config.layer_types),
        "max_position_embeddings": config.max_position_embeddings,
        "max_window_layers": config.num_layers,
        "model_type": "qwen3",
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope,
        "rope_theta": config.rope_theta,
        "sliding_window": config.sliding_window,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": config.sliding_window is not None,
        "vocab_size": config.vocab_size,
    }


def zlab_config(config: DrafterConfig, head: TargetHead, dtype: str) -> dict[str, Any]:
    """Return ``config.json`` of z-lab's layout.

    Raises:
        ConfigError: ``export-unsupported``.
    """
    _check_taps(config)
    relation = head.facts["head"]
    nested = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.taps),
    }
    if relation["scale"] != 1:
        nested["output_multiplier"] = relation["scale"]
    if relation["softcap"] is not None:
        nested["final_logit_softcapping"] = relation["softcap"]
    if config.embed_scale != 1:
        nested["input_embedding_scale"] = config.embed_scale
    # llama.cpp has one flag for all layers, false where the key is absent; other engines go by the types of the layers
    causal = {"is_causal": True} if set(config.layer_types) == {"sliding_attention"} else {}
    return qwen3_config(config) | {
        **causal,
        "architectures": ["DFlashDraftModel"],
        "block_size": config.block_size,
        "dflash_config": nested,
        "dtype": dtype,
        "num_target_layers": config.num_target_layers,
    }


def speculators_config(config: DrafterConfig, head: TargetHead, dtype: str, verifier: str) -> dict[str, Any]:
    """Return ``config.json`` of speculators' layout.

    Args:
        config: The drafter's.
        head: Its target's.
        dtype: Of the weights in the file.
        verifier: Path or hub name under which a reader finds the target.

    Raises:
        ConfigError: ``export-unsupported``.
    """
    _check_taps(config)
    relation = head.facts["head"]
    if relation["scale"] != 1 or relation["softcap"] is not None or config.embed_scale != 1:
        raise ConfigError(
            "export-unsupported",
            f"the target's logits are scaled or capped ({relation}) or its embeddings multiplied "
            f"({config.embed_scale:g}), which speculators' layout cannot express",
            hint="export in z-lab's layout: --format zlab",
        )
    sliding = config.layer_types.count("sliding_attention")
    if 0 < sliding < config.num_layers:
        raise ConfigError(
            "export-unsupported",
            f"{sliding} of {config.num_layers} layers are sliding, expected all or none: vLLM has one causal flag for "
            "all layers of a speculators config (vllm#56692), but in training only sliding layers are causal inside "
            "the block",
            hint="export in z-lab's layout: --format zlab",
        )
    proposal = {
        "accept_tolerance": 0.0,
        "proposal_type": "greedy",
        "speculative_tokens": config.block_size - 1,
        "verifier_accept_k": 1,
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.taps],
        "block_size": config.block_size,
        "draft_vocab_size": config.vocab_size,
        "dtype": dtype,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": not sliding,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": [head.facts["class"]], "name_or_path": verifier},
        },
        "speculators_model_type": "dflash",
        "speculators_version": _SPECULATORS,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": qwen3_config(config),
    }


def _check_taps(config: DrafterConfig) -> None:
    if config.num_target_layers - 1 in config.taps:
        raise ConfigError(
            "export-unsupported",
            f"tap {config.taps[-1]} is the target's last block: the drafter was trained on its output, but engines "
            "that follow transformers give the state after the final norm",
            hint="train without the last tap: set drafter.taps to the other taps of the store",
        )


@dataclass(frozen=True)
class Released:
    """What a released drafter's files say.

    Attributes:
        layout: Layout of the folder.
        config: The drafter's shape.
        logits: How logits follow from the head: ``scale`` and ``softcap``.
        verifier: Name of the target; None if the config does not give one.
        notes: Values that were read but not used, and values that were filled in.
        differences: From the target that it was compared with: name of a fact or weight -> both values, in words.
        vllm_causal: Whether vLLM makes all layers causal inside the block, or none; None if it follows their types.
        dtypes: Types of the weights in the files; the drafter has them in float32.
        tensors: Number of the drafter's weights.
    """

    layout: Layout
    config: DrafterConfig
    logits: dict[str, Any]
    verifier: str | None
    notes: tuple[str, ...]
    differences: dict[str, str]
    vllm_causal: bool | None
    dtypes: tuple[str, ...] = ()
    tensors: int = 0


def read_config(path: Path, raw: Mapping[str, Any], head: TargetHead | None) -> Released:
    """Read a ``config.json``; the weights remain to be read.

    Args:
        path: The folder, for messages.
        raw: Content of the file.
        head: Head of the target. Without it, a config that lacks ``num_target_layers`` is refused.

    Raises:
        InputError: ``drafter-config`` when a value is missing, wrong or contradicts another one;
            ``drafter-unsupported`` when our drafter does not implement the architecture.
    """
    layout = _layout(path, raw)
    nested = raw.get("dflash_config") or {} if layout == "zlab" else {}
    qwen3 = raw if layout == "zlab" else raw.get("transformer_layer_config")
    if not isinstance(qwen3, Mapping) or not isinstance(nested, Mapping):
        raise _wrong(path, "transformer_layer_config and dflash_config must be objects")
    places = [nested, raw] if qwen3 is raw else [raw, qwen3]
    for place in places:
        _refuse_other(path, place)
    if unknown := sorted(nested.keys() - _NESTED - _NEUTRAL.keys()):
        raise InputError("drafter-unsupported", f"{path}: dflash_config has {unknown}, which are not implemented")
    filled = _as_transformers_reads(path, qwen3)
    notes = [f"{key} = {getattr(filled, key)} (absent: transformers' default)" for key in _SHAPE if key not in qwen3]
    if getattr(filled, "attention_dropout", 0):
        notes.append(f"attention_dropout {filled.attention_dropout} not used")
    taps = _taps(path, layout, places)
    config = DrafterConfig(
        hidden_size=filled.hidden_size,
        vocab_size=filled.vocab_size,
        taps=taps,
        num_target_layers=_target_layers(path, places, taps, head),
        layer_types=tuple(getattr(filled, "layer_types", None) or ["full_attention"] * filled.num_hidden_layers),
        intermediate_size=filled.intermediate_size,
        num_heads=filled.num_attention_heads,
        num_kv_heads=filled.num_key_value_heads,
        head_dim=filled.head_dim,
        block_size=_number(path, "block_size", places),
        mask_token_id=_number(path, "mask_token_id", places),
        **_rope(path, qwen3, filled, notes),
        rms_norm_eps=_real(path, "rms_norm_eps", filled.rms_norm_eps),
        sliding_window=getattr(filled, "sliding_window", None),
        max_position_embeddings=filled.max_position_embeddings,
        embed_scale=_embed_scale(path, places, head, notes),
    )
    _check_shape(path, config)
    _check_layers(path, config, places)
    vllm_causal = None
    if layout == "speculators":
        _check_speculators(path, raw, config)
        vllm_causal = _vllm_causal(raw, qwen3, config, notes)
    scale, softcap = (_value(path, key, places) for key in ("output_multiplier", "final_logit_softcapping"))
    logits = {
        "scale": 1 if scale is None else _real(path, "output_multiplier", scale),
        "softcap": None if softcap in (None, 0) else _real(path, "final_logit_softcapping", softcap),
    }
    if head is None and logits != {"scale": 1, "softcap": None}:
        notes.append(f"logits {logits}: not compared with a target")
    differences = {} if head is None else _differences(config, logits, head)
    return Released(layout, config, logits, _verifier(path, raw), tuple(notes), differences, vllm_causal)


def _layout(path: Path, raw: Mapping[str, Any]) -> Layout:
    if "speculators_model_type" in raw:
        if raw["speculators_model_type"] != "dflash":
            raise _unsupported(path, "speculators_model_type", raw["speculators_model_type"], "'dflash'")
        return "speculators"
    if raw.get("architectures") not in [[name] for name in _ARCHITECTURES]:
        raise _unsupported(path, "architectures", raw.get("architectures"), f"one of {_ARCHITECTURES}")
    return "zlab"


def _refuse_other(path: Path, place: Mapping[str, Any]) -> None:
    for key, neutral in _NEUTRAL.items():
        if place.get(key) is not None and place[key] not in neutral:
            raise _unsupported(path, key, place[key], f"one of {[*neutral, None]}")


def _as_transformers_reads(path: Path, qwen3: Mapping[str, Any]) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    kind = qwen3.get("model_type", "qwen3")
    if kind not in ("qwen3", "llama"):  # speculators uses both names for the same layers
        raise _unsupported(path, "model_type", kind, "'qwen3' or 'llama'")
    try:
        return AutoConfig.for_model(kind, **{k: v for k, v in deepcopy(dict(qwen3)).items() if k != "model_type"})
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _wrong(path, f"transformers refuses it: {error}") from error


def _value(path: Path, key: str, places: list[Mapping[str, Any]]) -> Any:
    """Return the value of a key, which must be the same in all places that have it; None if no place has it."""
    values = [place[key] for place in places if place.get(key) is not None]
    if any(value != values[0] for value in values):
        raise _wrong(path, f"{key} is {' and '.join(map(str, values))} in two places")
    return values[0] if values else None


def _number(path: Path, key: str, places: list[Mapping[str, Any]]) -> int:
    value = _value(path, key, places)
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong(path, f"{key} is {value!r}, expected a whole number")
    return value


def _real(path: Path, key: str, value: object) -> float:
    # a whole number in JSON may be larger than any float
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise _wrong(path, f"{key} is {value!r}, expected a number above 0")
    return float(value)


def _verifier(path: Path, raw: Mapping[str, Any]) -> str | None:
    said = raw.get("speculators_config") or {}
    verifier = (said.get("verifier") or {}) if isinstance(said, Mapping) else None
    name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else verifier
    if not isinstance(verifier, Mapping) or not isinstance(name, str | None):
        raise _wrong(path, f"speculators_config is {said!r}, expected an object with the verifier's name_or_path")
    return name


def _taps(path: Path, layout: Layout, places: list[Mapping[str, Any]]) -> tuple[int, ...]:
    key, offset = ("target_layer_ids", 0) if layout == "zlab" else ("aux_hidden_state_layer_ids", 1)
    ids = _value(path, key, places)
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise _wrong(path, f"{key} is {ids!r}, expected a list of whole numbers; taps cannot be derived otherwise")
    taps = tuple(i - offset for i in ids)
    if taps[0] < 0 or list(taps) != sorted(set(taps)):
        raise _unsupported(path, key, ids, "ascending, distinct decoder blocks")
    return taps


def _target_layers(path: Path, places: list[Mapping[str, Any]], taps: tuple[int, ...], head: TargetHead | None) -> int:
    if _value(path, "num_target_layers", places) is not None:
        return _number(path, "num_target_layers", places)
    if head is not None:
        # a target that is too small for these taps is another target: then take the least number that they need
        return max(int(head.facts["shape"]["num_layers"]), taps[-1] + 2)
    raise _wrong(path, "the number of the target's layers is missing", hint="name a store of its target")


def _embed_scale(path: Path, places: list[Mapping[str, Any]], head: TargetHead | None, notes: list[str]) -> float:
    scale = _value(path, "input_embedding_scale", places)
    if scale is None:
        if head is not None and head.embed_scale != 1:
            notes.append(
                f"input_embedding_scale = 1 (absent: as the dflash package reads it; the target multiplies its "
                f"embeddings by {head.embed_scale:g}, and some engines feed the drafter multiplied ones)"
            )
        return 1.0
    return _real(path, "input_embedding_scale", scale)


def _rope(path: Path, qwen3: Mapping[str, Any], filled: Any, notes: list[str]) -> dict[str, Any]:
    """Return ``rope_theta`` and, if it is stretched, the fields of YaRN."""
    rope = dict(filled.rope_parameters)
    if "rope_theta" not in rope:  # one set of parameters for each type of layer
        kinds = [dict(rope[kind]) for kind in sorted(set(filled.layer_types)) if isinstance(rope.get(kind), Mapping)]
        if not kinds or any(kind != kinds[0] for kind in kinds):
            raise _unsupported(path, "rope_parameters", rope, "one rope_theta for all layers")
        rope = kinds[0]
    yarn = rope.get("rope_type") == "yarn"
    known = {"rope_theta", "rope_type", "type", *_NEUTRAL, *(_YARN if yarn else ())}
    others = {name: value for name, value in rope.items() if name not in known and value is not None}
    if rope.get("rope_type", "default") not in ("default", "yarn") or others:
        raise _unsupported(path, "rope_parameters", rope, "a plain rotary embedding over the whole head, or plain YaRN")
    _refuse_other(path, rope)
    given = [qwen3[key] for key in ("rope_parameters", "rope_scaling") if isinstance(qwen3.get(key), Mapping)]
    for key in ("rope_type", *_YARN):
        if len({str(one[key]) for one in given if one.get(key) is not None}) > 1:
            raise _wrong(path, f"rope_parameters and rope_scaling have different values of {key}: {given}")
    if qwen3.get("rope_theta") not in (None, rope["rope_theta"]):
        raise _wrong(path, f"rope_theta is {qwen3['rope_theta']} and {rope['rope_theta']} in two places")
    if not qwen3.keys() & {"rope_theta", "rope_parameters", "rope_scaling"}:
        notes.append(f"rope_theta = {rope['rope_theta']} (absent: transformers' default)")
    theta = _real(path, "rope_theta", rope["rope_theta"])
    if not yarn:
        return {"rope_theta": theta}
    if not any("original_max_position_embeddings" in one for one in given):  # engines differ in what they then take
        raise _unsupported(path, "rope_parameters", given, "original_max_position_embeddings with yarn")
    factor, positions = _real(path, "factor", rope.get("factor")), rope["original_max_position_embeddings"]
    if factor <= 1 or theta <= 1 or type(positions) is not int or not 0 < positions <= LARGEST:
        raise _wrong(path, f"{rope}: expected a factor and a rope_theta above 1, and a whole number of positions")
    return {"rope_theta": theta, "yarn_factor": factor, "yarn_positions": positions}


def _check_shape(path: Path, config: DrafterConfig) -> None:
    numbers = {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "heads times head_dim": config.num_heads * config.head_dim,
        "num_target_layers": config.num_target_layers,
        "max_position_embeddings": config.max_position_embeddings,
        "sliding_window": 1 if config.sliding_window is None else config.sliding_window,
    }
    for key, value in numbers.items():
        if not 0 < value <= LARGEST:
            raise _wrong(path, f"{key} is {value!r}, expected a whole number from 1 to {LARGEST:,}")
    for what, fine in {
        f"block_size {config.block_size}, expected 2 to {_LARGEST_BLOCK:,}":
            2 <= config.block_size <= _LARGEST_BLOCK,
        f"mask_token_id {config.mask_token_id}, expected an id below vocab_size {config.vocab_size}":
            0 <= config.mask_token_id < config.vocab_size,
        f"taps {list(config.taps)} of a target with {config.num_target_layers} layers":
            config.taps[-1] < config.num_target_layers,
        f"{config.num_heads} heads share {config.num_kv_heads} key-value heads":
            config.num_heads % config.num_kv_heads == 0,
        f"head_dim {config.head_dim}, expected an even number": config.head_dim % 2 == 0,
    }.items():  # fmt: skip
        if not fine:
            raise _wrong(path, what)
    if config.taps[-1] == config.num_target_layers - 1:
        raise _unsupported(
            path, "taps", list(config.taps), "no tap at the last block: engines give its output after the final norm"
        )


def _check_layers(path: Path, config: DrafterConfig, places: list[Mapping[str, Any]]) -> None:
    """Refuse layers unlike those of :mod:`hstrain.drafter.attention`: full ones see both ways, sliding ones back."""
    kinds = set(config.layer_types)
    if other := kinds - {"full_attention", "sliding_attention"}:
        raise _unsupported(path, "layer_types", sorted(other), "full_attention, sliding_attention")
    if "sliding_attention" in kinds and config.sliding_window is None:
        raise _wrong(path, "sliding layers, but no window: sliding_window counts only if use_sliding_window is true")
    window = _value(path, "swa_window_size", places)
    if window is not None and "sliding_attention" in kinds and window != config.sliding_window:
        raise _wrong(path, f"swa_window_size {window} and sliding_window {config.sliding_window} differ")
    for key in ("is_causal", "causal"):
        causal = _value(path, key, places)
        if causal is not None and any(bool(causal) != (kind == "sliding_attention") for kind in config.layer_types):
            raise _unsupported(
                path, key, causal, f"null: sliding layers are causal and full ones are not: {config.layer_types}"
            )


def _check_speculators(path: Path, raw: Mapping[str, Any], config: DrafterConfig) -> None:
    if raw.get("draft_vocab_size") != config.vocab_size:
        raise _unsupported(path, "draft_vocab_size", raw.get("draft_vocab_size"), f"all {config.vocab_size} tokens")
    if raw.get("target_hidden_size") not in (None, config.hidden_size):
        raise _unsupported(path, "target_hidden_size", raw["target_hidden_size"], str(config.hidden_size))
    if raw.get("sliding_window_non_causal") and "sliding_attention" in config.layer_types:
        raise _unsupported(path, "sliding_window_non_causal", True, "sliding layers that are causal inside the block")


def _vllm_causal(raw: Mapping[str, Any], qwen3: Mapping[str, Any], config: DrafterConfig, notes: list[str]) -> bool:
    """Return whether vLLM makes all layers of a speculators config causal; add a note if training did otherwise."""
    causal = qwen3.get("is_causal")
    if causal is None:
        causal = not raw.get("sliding_window_non_causal", True)
    sliding = config.layer_types.count("sliding_attention")
    if sliding != (config.num_layers if causal else 0):
        value, served = raw.get("sliding_window_non_causal", "absent"), "all" if causal else "none"
        notes.append(
            f"sliding_window_non_causal is {value}: vLLM will serve {served} of the {config.num_layers} layers as "
            f"causal inside the block, but hstrain and speculators' own class read only sliding layers ({sliding}) as "
            "causal; export it again with --format zlab"
        )
    return bool(causal)


def _differences(config: DrafterConfig, logits: dict[str, Any], head: TargetHead) -> dict[str, str]:
    shape, relation = head.facts["shape"], head.facts["head"]
    pairs = {
        "hidden_size": (config.hidden_size, shape["hidden_size"]),
        "vocab_size": (config.vocab_size, shape["vocab_size"]),
        "layers of the target": (config.num_target_layers, shape["num_layers"]),
        "relation of logits to head": (logits, {"scale": relation["scale"], "softcap": relation["softcap"]}),
    }
    return {
        what: f"{what}: checkpoint {ours}, target {theirs}" for what, (ours, theirs) in pairs.items() if ours != theirs
    }


def other_target(path: Path, what: str) -> InputError:
    """Return the error for a drafter of another target."""
    return InputError(
        "drafter-other-target", f"{path}: {what}", hint="use a store of the target that the drafter was trained for"
    )


def _wrong(path: Path, what: str, *, hint: str | None = None) -> InputError:
    return InputError("drafter-config", f"{path}/config.json: {what}", hint=hint)


def _unsupported(path: Path, key: str, got: object, expected: str) -> InputError:
    return InputError("drafter-unsupported", f"{path}/config.json: {key} is {got!r}, expected {expected}")
