"""Make tiny random targets on disk, one directory per family: ``python tools/targets/tiny_targets.py OUT [KIND ...]``.

They exercise every way in which a target can be wired (dense, hybrid, hybrid inside a vision-language checkpoint,
state space) at a few hundred kilobytes. The weights are a function of the seed alone.

The decay of the recurrent layers is set slow, ``A_log = log(U(0.001, 0.1))``: with transformers' own init a gated
delta layer forgets within a token, and no test across chunks would test anything.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 512


def qwen3_5_text_config(**changes: Any) -> Qwen3_5TextConfig:
    """Return the tiny hybrid: 8 layers, every fourth with full attention, two value heads per key head."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "initializer_range": 0.12,
    }
    return Qwen3_5TextConfig(**(fields | changes))


def qwen3_5(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return the tiny hybrid text model; ``changes`` override its config."""
    return _init(seed, lambda: Qwen3_5ForCausalLM(qwen3_5_text_config(**changes)))


def qwen3_5_vlm(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return the tiny hybrid as a vision-language checkpoint holds it, with the smallest vision tower."""
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 4,
        "num_position_embeddings": 16,
    }
    text = qwen3_5_text_config(**changes).to_dict()
    tokens = {"image_token_id": 500, "video_token_id": 501, "vision_start_token_id": 502, "vision_end_token_id": 503}
    config = Qwen3_5Config(text_config=text, vision_config=vision, **tokens)
    return _init(seed, lambda: Qwen3_5ForConditionalGeneration(config))


def qwen3(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a tiny dense Qwen3."""
    fields = _dense() | {"head_dim": 16} | changes
    return _init(seed, lambda: Qwen3ForCausalLM(Qwen3Config(**fields)))


def llama(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a tiny dense Llama."""
    return _init(seed, lambda: LlamaForCausalLM(LlamaConfig(**(_dense() | changes))))


def mamba2(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a tiny Mamba-2: a conv and a scan in every layer, no attention."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 3, "num_heads": 4, "head_dim": 16,
        "expand": 2, "state_size": 16, "n_groups": 1, "chunk_size": 16,
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    return _init(seed, lambda: Mamba2ForCausalLM(Mamba2Config(**(fields | changes))))


KINDS: dict[str, Callable[..., PreTrainedModel]] = {
    "qwen3_5": qwen3_5,
    "qwen3_5_vlm": qwen3_5_vlm,
    "qwen3": qwen3,
    "llama": llama,
    "mamba2": mamba2,
}


def save(kind: str, directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Write a tiny target as transformers does (``config.json``, safetensors) and return its directory.

    Args:
        kind: A key of :data:`KINDS`.
        directory: Created if need be.
        seed: Decides every weight.
        dtype: Of the stored weights.
        changes: Overrides of the (text) config.
    """
    KINDS[kind](seed, **changes).to(dtype).save_pretrained(directory)
    return directory


def _dense() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.12,
    }  # fmt: skip


def _init(seed: int, make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("A_log"):
                    parameter.copy_(torch.empty_like(parameter).uniform_(0.001, 0.1).log())
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory that gets one checkpoint directory per kind")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    for kind in options.kinds or KINDS:
        if kind not in KINDS:
            parser.error(f"no kind {kind!r}; there are {', '.join(KINDS)}")
        print(save(kind, options.out / kind, seed=options.seed, dtype=getattr(torch, options.dtype)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
