"""Write a drafter for serving engines: ``config.json``, ``model.safetensors``, a model card and its provenance.

An engine that misreads a checkpoint reports nothing and accepts fewer tokens. So our importer reads the folder back
before it gets its final name, and compares every weight and the logits of a seeded input bit by bit. ``tests/oracle``
compares such folders with the dflash and speculators packages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import functional_call

from hscache.errors import ConfigError, ConflictError, IntegrityError
from hscache.store.durable import Staging, disk_errors, publish_directory, write_file
from hscache.store.head import TargetHead
from hstrain.drafter.attention import Blocks
from hstrain.drafter.model import Drafter, DrafterConfig, block_inputs
from hstrain.exchange.importer import CONFIG_FILE, WEIGHTS_FILE, read_checkpoint
from hstrain.exchange.layouts import Layout, speculators_config, zlab_config

Dtype = Literal["bfloat16", "float32"]
PROVENANCE_FILE, CARD_FILE = "provenance.json", "README.md"
_CHECK_TOKENS, _CHECK_VOCAB = 24, 8192


@dataclass(frozen=True)
class Exported:
    """The folder that was written.

    Attributes:
        path: The folder.
        layout: Its layout.
        dtype: Type of the weights.
        parameters: Number of the parameters.
        size_bytes: Size of all files together.
    """

    path: Path
    layout: Layout
    dtype: Dtype
    parameters: int
    size_bytes: int


def export_drafter(
    layout: Layout,
    drafter: Drafter,
    head: TargetHead,
    out: Path,
    *,
    provenance: Mapping[str, Any],
    dtype: Dtype = "bfloat16",
) -> Exported:
    """Write a drafter in a layout that serving engines read.

    SGLang, vLLM and the dflash package read ``zlab``; vLLM and speculators 0.9 read ``speculators``. Neither has the
    target's embedding and head. Readers of ``speculators`` take them from the target that the config names,
    ``provenance["target"]``.

    Args:
        layout: The layout.
        drafter: The drafter, of any float type, on any device.
        head: Head of its target.
        out: Folder to write; must not exist.
        provenance: JSON-plain facts for the card: at least ``target``, its path or hub name.
        dtype: Type of the weights in the file.

    Raises:
        ConfigError: ``export-unsupported`` when the layout cannot express the drafter; for ``speculators`` also without
            a name of the target, and for a mix of sliding and full layers.
        ConflictError: ``export-exists``.
        IntegrityError: ``export-differs`` when the folder reads back as another drafter; it is removed.
        EnvironmentFault: ``disk-full``, ``disk-error``.
    """
    from safetensors.torch import save

    config = _config(layout, drafter.config, head, out, provenance["target"], dtype)
    if out.exists():
        raise ConflictError("export-exists", f"{out} exists already", hint="give another folder")
    weights = {
        name: tensor.detach().to("cpu", getattr(torch, dtype)).contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    with disk_errors(out):
        staging = out.with_name(f".{out.name}.staging")
        try:
            with Staging(staging) as place:
                folder = place.path / out.name
                folder.mkdir()
                write_file(folder / CONFIG_FILE, _json(config))
                write_file(folder / WEIGHTS_FILE, save(weights, metadata={"format": "pt"}))
                write_file(folder / PROVENANCE_FILE, _json(provenance))
                write_file(folder / CARD_FILE, _card(layout, drafter.config, out, provenance, dtype).encode())
                _read_back(folder, drafter, weights, head)
                size_bytes = sum(file.stat().st_size for file in folder.iterdir())
                if not publish_directory(folder, out):
                    raise ConflictError(
                        "export-exists", f"another process has made {out} meanwhile", hint="give another folder"
                    )
        finally:
            with suppress(OSError):  # not empty: another process exports to the same path
                staging.rmdir()
    return Exported(out, layout, dtype, sum(tensor.numel() for tensor in weights.values()), size_bytes)


def _config(
    layout: Layout, drafter: DrafterConfig, head: TargetHead, out: Path, target: object, dtype: Dtype
) -> dict[str, Any]:
    if layout == "zlab":
        return zlab_config(drafter, head, dtype)
    if not target:
        raise ConfigError(
            "export-unsupported",
            f"{out}: the target's name is missing; readers of speculators' layout take embedding and head from it",
            hint="export in z-lab's layout: --format zlab",
        )
    return speculators_config(drafter, head, dtype, str(target))


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _read_back(folder: Path, drafter: Drafter, weights: Mapping[str, Tensor], head: TargetHead) -> None:
    read, _ = read_checkpoint(folder, head)
    if read.config != drafter.config:
        raise _differs(folder, f"config {read.config}, exported {drafter.config}")
    for name, tensor in read.state_dict().items():
        if not torch.equal(tensor, weights[name].float()):
            raise _differs(folder, f"weight {name}")
    expected = {name: tensor.float() for name, tensor in weights.items()}
    inputs = _seeded_input(drafter.config, head)
    # rows of the head are independent: a part of them proves as much as all
    lm_head = head.lm_head[:_CHECK_VOCAB].float()
    with torch.no_grad():
        logits = [
            torch.nn.functional.linear(functional_call(drafter, state, inputs), lm_head)
            for state in (expected, dict(read.state_dict()))
        ]
    if not (torch.equal(*logits) and logits[0].isfinite().all()):
        raise _differs(folder, "logits of a seeded input")


def _seeded_input(config: DrafterConfig, head: TargetHead) -> tuple[Tensor, Tensor, Tensor, Blocks]:
    made, T = torch.Generator().manual_seed(0), _CHECK_TOKENS
    states_TLH = torch.randn(T, len(config.taps), config.hidden_size, generator=made)
    anchors = torch.tensor([T // 2, T])
    ids = torch.randint(0, config.vocab_size, (2,), generator=made)
    blocks = Blocks(anchors, torch.zeros_like(anchors), anchors, config.block_size, T)
    return states_TLH, torch.arange(T), block_inputs(ids, head.embed, config).float(), blocks


def _differs(folder: Path, what: str) -> IntegrityError:
    return IntegrityError(
        "export-differs",
        f"{folder.name}: the folder reads back as another drafter: {what}",
        hint="this is a bug in hstrain: please report it",
    )


def _card(layout: Layout, config: DrafterConfig, out: Path, provenance: Mapping[str, Any], dtype: Dtype) -> str:
    target, slots = str(provenance["target"]), config.block_size - 1
    sliding = config.layer_types.count("sliding_attention")
    window = f", window {config.sliding_window:,} tokens" if sliding else ""
    rows = "\n".join(f"| {name} | `{_inline(value)}` |" for name, value in provenance.items())
    return f"""---
base_model: {json.dumps(target)}
tags: [dflash, speculative-decoding]
---
# {out.name}

A DFlash drafter (arXiv 2602.06036) for `{target}`: from the target's states it drafts {slots} tokens in one pass, which
the target then verifies. It makes the target's answers faster and leaves their content as it is.

| | |
|---|---|
| context | outputs of the target's decoder blocks {list(config.taps)} (counted from 0), of {config.num_target_layers} |
| block | {config.block_size}: the last known token and {slots} drafted |
| mask token | {config.mask_token_id} |
| layers | {config.num_layers}, {sliding} of them with sliding attention{window} |
| weights | {dtype}; embedding and head are the target's |{_scaled(config)}

## Serving

{_serving(layout, config, target, out.name)}
## Where it comes from

{_origin(provenance)}

| | |
|---|---|
{rows}
"""


def _origin(provenance: Mapping[str, Any]) -> str:
    if "store" not in provenance:
        return "Written by hstrain, which did not train it."
    trained = "offline by hstrain from an hscache store of the target's hidden states."
    if provenance.get("start"):
        return f"Fine-tuned from the drafter `{_inline(provenance['start']['path'])}`, {trained}"
    return f"Trained {trained}"


def _scaled(config: DrafterConfig) -> str:
    if config.embed_scale == 1:
        return ""
    return (
        f"\n| block input | the embedding's rows times {config.embed_scale:g} (`input_embedding_scale`); an engine "
        "that does not multiply them, or multiplies them twice, accepts fewer tokens |"
    )


def _inline(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
    return text.replace("|", "\\|").replace("`", "'").replace("\n", " ")


def _serving(layout: Layout, config: DrafterConfig, target: str, name: str) -> str:
    method = json.dumps({"method": "dflash", "model": name, "num_speculative_tokens": config.block_size - 1})
    mixed = "" if len(set(config.layer_types)) == 1 else "VLLM_USE_V2_MODEL_RUNNER=1 "
    vllm = f"    {mixed}vllm serve {target} --speculative-config '{method}'\n"
    if layout == "speculators":
        return f"vLLM (not tried by the program that wrote this card):\n\n{vllm}"
    sglang = (
        f"    python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH "
        f"--speculative-draft-model-path {name}\n"
    )
    llama_cpp = f"""    python convert_hf_to_gguf.py {name} --target-model-dir {target} --outfile {name}.gguf
    llama-server -m TARGET.gguf -md {name}.gguf --spec-type draft-dflash --spec-draft-n-max {config.block_size - 1}
"""
    if mixed:
        llama_cpp = "llama.cpp makes no layer causal, the sliding ones either: it would accept fewer tokens.\n"
    return f"""vLLM and SGLang (neither tried by the program that wrote this card):

{vllm}{sglang}
llama.cpp:

{llama_cpp}"""
