"""Write a drafter for serving engines: ``config.json``, ``model.safetensors``, a model card and its provenance.

The card says what the drafter is, its tau if an evaluation of these weights is at hand, how engines serve it, and what
it was trained on.

An engine that misreads a checkpoint reports nothing and accepts fewer tokens. So our importer reads the folder back
before it gets its final name, and compares every weight and the logits of a seeded input bit by bit. ``tests/oracle``
compares such folders with the dflash and speculators packages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import functional_call

from hscache.console import counted
from hscache.errors import ConfigError, ConflictError, IntegrityError
from hscache.store.durable import Staging, disk_errors, publish_directory, write_file
from hscache.store.head import TargetHead
from hscache.store.layout import json_digest
from hstrain.drafter.attention import Blocks
from hstrain.drafter.model import Drafter, DrafterConfig, block_inputs
from hstrain.exchange.importer import CONFIG_FILE, WEIGHTS_FILE, read_checkpoint
from hstrain.exchange.layouts import LARGEST, Layout, speculators_config, zlab_config
from hstrain.run.checkpoint import weights_digest
from hstrain.run.folder import RunPaths, read_lines

Dtype = Literal["bfloat16", "float32"]
PROVENANCE_FILE, CARD_FILE = "provenance.json", "README.md"
_CHECK_TOKENS, _CHECK_VOCAB = 24, 8192
_LISTED = 4
"""Most files whose digests the card lists one by one."""


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
    yarn: tuple[float, int | None] | None = None,
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
        provenance: JSON-plain facts for the card: at least ``target``, its path or hub name; ``store`` and
            ``manifest`` as a checkpoint has them; ``evaluation``, from :func:`evaluation_of`.
        dtype: Type of the weights in the file.
        yarn: Factor by which engines stretch the rotary embedding, and the positions that are stretched, None for the
            drafter's ``max_position_embeddings``; the exported one is their product. None changes nothing.

    Raises:
        ConfigError: ``export-unsupported`` when the layout cannot express the drafter; for ``speculators`` also without
            a name of the target, and for a mix of sliding and full layers; for ``yarn`` that cannot be.
        ConflictError: ``export-exists``.
        IntegrityError: ``export-differs`` when the folder reads back as another drafter; it is removed.
        EnvironmentFault: ``disk-full``, ``disk-error``.
    """
    from safetensors.torch import save

    if yarn is not None:
        drafter = _stretched(drafter, *yarn, out)
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


def evaluation_of(drafter: Drafter, facts: Mapping[str, Any], file: Path | None = None) -> dict[str, Any] | None:
    """Return what is known of a drafter's tau.

    Args:
        drafter: The drafter, on the CPU.
        facts: As :func:`hstrain.exchange.importer.open_drafter` returns them.
        file: What ``hstrain eval --out`` wrote; None to take the validation of the checkpoint's step from its run.

    Returns:
        JSON-plain: ``by`` (``eval`` or ``validation``), ``part`` of the samples, ``tau``, ``tau_interval``,
        ``samples``, of which ``chose`` so many the checkpoint, ``trained_on`` (None if that is unknown) and
        ``precision``. None if nothing is known.

    Raises:
        ConfigError: ``usage`` if the file has no evaluation of these weights.
        IntegrityError: ``checkpoint-damaged``.
    """
    names = ("tau", "tau_interval", "samples")
    if file is None:
        metrics = RunPaths(Path(facts["path"]).parent.parent).metrics
        records = [record for _, record in read_lines(metrics)] if "step" in facts and metrics.exists() else []
        for record in records:
            if (record["kind"], record["step"]) == ("validation", facts["step"]):
                precision = facts["provenance"]["manifest"]["run"]["precision"]
                known = {"by": "validation", "part": "validation", "precision": precision, "trained_on": 0}
                return {**known, "chose": record["samples"], **{name: record[name] for name in names}}
        return None
    weights = weights_digest(drafter.state_dict())
    try:
        found = json.loads(file.read_bytes())
        row = next(row for row in found["rows"] if row["weights"] == weights)
        chose = 0 if row["test"] is None else row["samples"] - row["test"]["samples"]
        part = found["part"] if found["held_out"] < 1 else "all"
        known = {"by": "eval", "part": part, "precision": found["precision"], "trained_on": row["trained_on"]}
        return {**known, "chose": chose, **{name: row[name] for name in names}}
    except StopIteration:
        what = f"--eval {file}: it has no evaluation of the weights of {facts['path']}"
        raise ConfigError("usage", what, hint=f"hstrain eval {facts['path']} --store STORE --out {file}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"--eval {file}: expected what hstrain eval --out writes: {error!r}"
        raise ConfigError("usage", what, hint=f"hstrain eval {facts['path']} --store STORE --out {file}") from error


def _stretched(drafter: Drafter, factor: float, positions: int | None, out: Path) -> Drafter:
    """Return a drafter with the same weights whose rotary embedding YaRN stretches."""
    config, positions = drafter.config, positions or drafter.config.max_position_embeddings
    if config.yarn_positions is not None or config.rope_theta <= 1 or not 1 < factor <= LARGEST / positions:
        raise ConfigError(
            "export-unsupported",
            f"{out}: {positions:,} positions times {factor:g}, of a drafter with rope_theta {config.rope_theta:g} and "
            f"a factor of {config.yarn_factor:g} of its own; expected a factor above 1 that gives at most {LARGEST:,} "
            "positions, a rope_theta above 1, and no factor before",
        )
    longer = round(factor * positions)
    with torch.device("meta"):
        made = Drafter(replace(config, yarn_factor=factor, yarn_positions=positions, max_position_embeddings=longer))
    made.load_state_dict(drafter.state_dict(), assign=True)
    return made


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
    target, slots = str(provenance["target"]), counted(config.block_size - 1, "token")
    sliding = config.layer_types.count("sliding_attention")
    window = f", window {config.sliding_window:,} tokens" if sliding else ""
    rows = "\n".join(f"| {name} | `{_inline(value)}` |" for name, value in _facts(provenance))
    return f"""---
base_model: {json.dumps(target)}
tags: [dflash, speculative-decoding]
---
# {out.name}

A DFlash drafter (arXiv 2602.06036) for `{target}`: from the target's states it drafts {slots} in one pass, which the
target then verifies. It makes the target's answers faster and leaves their content as it is.

| | |
|---|---|
| context | outputs of the target's decoder blocks {list(config.taps)} (counted from 0), of {config.num_target_layers} |
| block | {config.block_size}: the last known token and {config.block_size - 1} drafted |
| mask token | {config.mask_token_id} |
| layers | {config.num_layers}, {sliding} of them with sliding attention{window} |
| weights | {dtype}; embedding and head are the target's |{_scaled(config)}{_long(config)}

## How good it is

{_quality(provenance.get("evaluation"))}

## Serving

{_serving(layout, config, target, out.name)}
## Where it comes from

{_origin(provenance)}

| | |
|---|---|
{rows}

`{PROVENANCE_FILE}` has all of it{", with every setting of the training" if "manifest" in provenance else ""}.
"""


def _quality(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "No evaluation of these weights was at hand when they were exported."
    low, high = found["tau_interval"]
    kind = "" if found["part"] == "all" else f"{found['part']} "
    what = f"tau **{found['tau']:.3f}** (95 % interval {low:.2f} .. {high:.2f}) over "
    what += counted(found["samples"], f"{kind}sample")
    doubts = []
    if found["trained_on"] is None:
        doubts.append("It is unknown whether it was trained on these samples.")
    elif found["trained_on"]:
        doubts.append(f"It was trained on {found['trained_on']} of these samples, so this is too high.")
    if found["chose"]:
        some = "The same" if found["chose"] == found["samples"] else f"{found['chose']} of these"
        doubts.append(f"{some} samples chose this checkpoint, so this may be too high.")
    source = "hstrain eval" if found["by"] == "eval" else "the validation of this step in training"
    meaning = "tau is the number of tokens that one pass of the target yields when it decodes greedily"
    return "\n".join([f"{what}, by {source} in {found['precision']}.", *doubts, f"Here {meaning}."])


def _facts(provenance: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield the rows of the card's last table."""
    for name, value in provenance.items():
        if name == "store" and isinstance(value, Mapping):
            yield "target's weights", _digests(value["weights"])
            yield "target's tokenizer", _digests(value["tokenizer"])
            yield "store", f"{value['digest']}, codec {value['codec']}, taps {value['taps']}"
            yield "corpus", f"{value['corpus']['digest']}, {counted(value['corpus']['rows'], 'sample')}"
            yield "states", f"computed in {value['target_dtype']}; kernels: {value['kernel_path']}"
        elif name not in ("manifest", "evaluation"):
            yield name, value


def _digests(files: Mapping[str, str]) -> str:
    """Return digests of files by name, or of the whole list if it is long."""
    if len(files) > _LISTED:
        return f"{len(files)} files, digest of their digests {json_digest(dict(files))}"
    return ", ".join(f"{name} {digest}" for name, digest in files.items())


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


def _long(config: DrafterConfig) -> str:
    if config.yarn_positions is None:
        return ""
    return (
        f"\n| positions | {config.max_position_embeddings:,}: YaRN stretches {config.yarn_positions:,} by "
        f"{config.yarn_factor:g}, in short texts too; the drafter was trained and evaluated without it |"
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
