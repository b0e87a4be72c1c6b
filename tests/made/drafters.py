"""Small drafters and the head of a target, for tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hstrain.drafter.model import Drafter, DrafterConfig, initialise
from hstrain.exchange.export import export_speculators, export_zlab
from safetensors.torch import load_file, save_file

from hscache.store.head import TargetHead

EXPORTS = {"zlab": export_zlab, "speculators": export_speculators}
Change = Callable[[dict[str, Any]], object]
FULL, SLIDING = "full_attention", "sliding_attention"
KINDS = {"full": (FULL, FULL), "sliding": (SLIDING, SLIDING), "mixed": (SLIDING, FULL, SLIDING)}


def config(kind: str = "mixed", **changes: Any) -> DrafterConfig:
    """A drafter for the targets of tools/targets/tiny_targets.py; its window is shorter than the tests' contexts."""
    fields: dict[str, Any] = {
        "hidden_size": 64, "vocab_size": 512, "taps": (0, 1, 2), "num_target_layers": 4, "layer_types": KINDS[kind],
        "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "block_size": 8,
        "mask_token_id": 7, "rope_theta": 10000.0, "sliding_window": None if kind == "full" else 11,
    }  # fmt: skip
    return DrafterConfig(**(fields | changes))


def drafter(kind: str = "mixed", seed: int = 0, **changes: Any) -> Drafter:
    """A drafter with weights large enough that its attention is not flat."""
    made = Drafter(config(kind, **changes))
    initialise(made, seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name) + seed))
            parameter.copy_(parameter * 8 if parameter.ndim == 2 else 1 + 0.2 * noise)
    return made


def rewrite(folder: Path, config: Change | None = None, weights: Change | None = None) -> Path:
    """Change the config and the weights of a folder that was exported; return the folder."""
    content, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    if config is not None:
        config(content)
    if weights is not None:
        weights(tensors)
    (folder / "config.json").write_text(json.dumps(content))
    save_file(tensors, folder / "model.safetensors")
    return folder


def head(seed: int = 1, *, tied: bool = False, scale: float = 1.0, softcap: float | None = None) -> TargetHead:
    """Embedding, head and norm of a random target of that width."""
    made = torch.Generator().manual_seed(seed)
    embed = torch.randn(512, 64, generator=made)
    lm_head = embed if tied else torch.randn(512, 64, generator=made)
    facts = {
        "class": "Qwen3ForCausalLM", "head": {"scale": scale, "softcap": softcap}, "norm_kind": "w", "norm_eps": 1e-6,
        "tied": tied, "shape": {"num_layers": 4, "hidden_size": 64, "vocab_size": 512},
    }  # fmt: skip
    return TargetHead(embed, lm_head, torch.rand(64, generator=made) + 0.5, facts)
