"""vLLM's own reading of the folders that we export: each layer's window, and whether it is causal inside the block."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hstrain.drafter.attention import Blocks
from hstrain.drafter.model import DrafterConfig
from hstrain.exchange.export import export_drafter
from hstrain.exchange.importer import read_checkpoint

from hscache.errors import ConfigError
from tests.made import drafters
from tests.made.drafters import FULL, SLIDING

pytestmark = pytest.mark.oracle
UNIFORM = {"full": [FULL] * 5, "sliding": [SLIDING] * 5}
MIXED = {"headline": [SLIDING] * 4 + [FULL], "alternating": [FULL, SLIDING] * 2}
FACTS = {"target": "some/target"}


def config(layers: list[str]) -> DrafterConfig:
    return drafters.config(layer_types=tuple(layers), sliding_window=11 if SLIDING in layers else None)


def written(layers: list[str], layout: str, folder: Path) -> dict[str, Any]:
    drafter = drafters.drafter(layer_types=tuple(layers), sliding_window=11 if SLIDING in layers else None)
    export_drafter(layout, drafter, drafters.head(), folder, provenance=FACTS)
    return dict(json.loads((folder / "config.json").read_text()))


def trained(config: DrafterConfig) -> list[tuple[int | None, bool]]:
    """Return window and causality of each layer, by the mask under which it is trained."""
    anchor, B = torch.tensor([4]), config.block_size
    blocks = Blocks(anchor, torch.zeros_like(anchor), anchor, B, 4)
    found = []
    for layer in range(config.num_layers):
        (mask,) = blocks.group_masks(config.window(layer))
        inside = mask[:, 4:]
        causal = not bool(inside.triu(1).any())
        assert torch.equal(inside, torch.ones(B, B).tril().bool() if causal else torch.ones(B, B).bool())
        found.append((config.window(layer), causal))
    return found


def served(vllm: Any, content: dict[str, Any]) -> list[tuple[int | None, bool]]:
    """Return window and causality of each layer, by vLLM."""
    if "speculators_model_type" in content:
        layers = content["transformer_layer_config"]
        vllm.update_dflash(content, layers)
        read = transformers.PreTrainedConfig(**layers)
    else:
        read = transformers.Qwen3Config(**content)
    return [vllm.resolve_layer_attention(read, layer) for layer in range(read.num_hidden_layers)]


@pytest.mark.parametrize(
    ("layout", "layers"), [("zlab", name) for name in UNIFORM | MIXED] + [("speculators", name) for name in UNIFORM]
)
def test_what_is_exported_is_served_as_it_was_trained(vllm: Any, tmp_path: Path, layout: str, layers: str) -> None:
    types = (UNIFORM | MIXED)[layers]
    found = served(vllm, written(types, layout, tmp_path / "out"))
    assert found == trained(config(types)) == [(11, True) if kind == SLIDING else (None, False) for kind in types]


@pytest.mark.parametrize("layers", MIXED)
def test_what_vllm_would_serve_wrongly_is_not_exported(tmp_path: Path, layers: str) -> None:
    with pytest.raises(ConfigError) as refused:
        written(MIXED[layers], "speculators", tmp_path / "out")
    assert (refused.value.code, list(tmp_path.iterdir())) == ("export-unsupported", [])


FLAGS = [(layers, flag) for layers in UNIFORM | MIXED for flag in (False, "absent")]
FLAGS += [("full", True), ("full", "is_causal"), ("sliding", "is_causal")]
"""Layers of a speculators config and what it says of them, as far as our importer reads it."""


@pytest.mark.parametrize(("layers", "flag"), FLAGS)
def test_a_note_says_where_vllm_serves_another_drafter(
    vllm: Any, tmp_path: Path, layers: str, flag: bool | str
) -> None:
    types = (UNIFORM | MIXED)[layers]
    folder = tmp_path / "theirs"
    content = written([types[0]] * len(types), "speculators", folder)
    content["transformer_layer_config"].update(layer_types=types, sliding_window=11, use_sliding_window=True)
    if flag == "is_causal":
        content["transformer_layer_config"]["is_causal"] = types[0] == SLIDING
        content["sliding_window_non_causal"] = False
    elif flag == "absent":
        del content["sliding_window_non_causal"]
    else:
        content["sliding_window_non_causal"] = flag
    (folder / "config.json").write_text(json.dumps(content))
    drafter, facts = read_checkpoint(folder, drafters.head())
    theirs = [causal for _, causal in served(vllm, content)]
    assert theirs == [facts.vllm_causal] * len(types)
    assert (facts.notes == ()) is (theirs == [causal for _, causal in trained(drafter.config)])
    if layers in MIXED:
        assert facts.notes, "whatever the flag says"
