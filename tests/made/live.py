"""Live targets, random drafters and an oracle that knows the text, for the tests of decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import tiny_targets
import torch
import transformers
from hstrain.drafter.model import Drafter, DrafterConfig, initialise
from hstrain.live.target import LiveTarget, open_target
from torch import Tensor

from hscache.store.head import TargetHead
from tests.conftest import TINY_HYBRID

PROMPT = [5, 17, 99, 4, 230, 77, 31, 8, 120, 65, 3, 44, 201, 9, 12, 13, 80, 2, 7, 150, 61, 62, 63, 300, 19, 20]
TAPS = (0, 2)

_DENSE = {**tiny_targets._dense(), "head_dim": 16}
FAMILIES: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "llama": lambda: tiny_targets.llama(),
    "qwen3": lambda: tiny_targets.qwen3(),
    "qwen3-sliding": lambda: tiny_targets.qwen3(use_sliding_window=True, sliding_window=16, max_window_layers=2),
    "qwen3_5": lambda: tiny_targets.qwen3_5(),
    "mamba2": lambda: tiny_targets.mamba2(),
    "gemma2": lambda: tiny_targets._init(
        0,
        lambda: transformers.Gemma2ForCausalLM(
            transformers.Gemma2Config(**_DENSE, sliding_window=16, query_pre_attn_scalar=16)
        ),
    ),
    "falcon_h1": lambda: tiny_targets._init(
        0,
        lambda: transformers.FalconH1ForCausalLM(
            transformers.FalconH1Config(
                vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
                num_key_value_heads=2, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1,
                mamba_d_state=16, mamba_chunk_size=16,
            )
        ),
    ),
}  # fmt: skip
"""Every kind of cache: keys and values, sliding ones, recurrent states, both in one model, both in one layer."""
EAGER = ("mamba2", "gemma2")
"""Families for which transformers has no sdpa."""


def checkpoint(name: str, root: Path) -> Path:
    """Return the checkpoint of the trained hybrid, or that of a family, written below ``root``."""
    if name == "tiny-hybrid":
        return TINY_HYBRID
    FAMILIES[name]().save_pretrained(root / name)
    return root / name


@contextmanager
def live(directory: Path, taps: Sequence[int] = TAPS) -> Iterator[LiveTarget]:
    """Open a target in float32 on the CPU."""
    eager = directory.name in EAGER
    opened = open_target(
        str(directory), taps, dtype="float32", device="cpu", attn_implementation="eager" if eager else "sdpa"
    )
    with opened as (target, _):
        yield target


def head_of(target: LiveTarget) -> TargetHead:
    """Return what a store's ``target/`` would hold of a target."""
    embed = target.loaded.model.get_input_embeddings().weight
    relation = target.loaded.relation
    facts = {
        "head": {"scale": relation.scale, "softcap": relation.softcap},
        "embed_scale": target.loaded.embed_scale,
        "shape": target.loaded.shape.model_dump(),
    }
    return TargetHead(embed, target.loaded.head.weight, target.loaded.norm.weight, facts)


def random_drafter(target: LiveTarget, *, block_size: int = 6, seed: int = 0) -> Drafter:
    """Return a drafter of two layers, one of them sliding, with random weights."""
    shape = target.loaded.shape
    config = DrafterConfig(
        hidden_size=shape.hidden_size, vocab_size=shape.vocab_size, taps=target.taps,
        num_target_layers=shape.num_layers, layer_types=("sliding_attention", "full_attention"),
        intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=16, block_size=block_size, mask_token_id=1,
        sliding_window=12, embed_scale=head_of(target).embed_scale,
    )  # fmt: skip
    drafter = Drafter(config)
    initialise(drafter, seed)
    return drafter


class Oracle:
    """Stands in for a drafter with its context: proposes the text it was told, with errors at places it was told.

    Args:
        text: Prompt and completion.
        vocab_size: V.
        streaks: Tokens to propose rightly, step by step, over and over.
        block_size: B.
    """

    def __init__(self, text: Sequence[int], vocab_size: int, streaks: Sequence[int], block_size: int = 6) -> None:
        self.text, self.vocab_size, self.streaks, self.block_size = list(text), vocab_size, streaks, block_size
        self.length = self.steps = 0
        self.states: list[Tensor] = []

    def begin(self) -> None:
        self.length, self.steps, self.states = 0, 0, []

    def extend(self, states_TLH: Tensor) -> None:
        self.length += len(states_TLH)
        self.states.append(states_TLH)

    def propose(self, anchor: int) -> Tensor:
        assert anchor == self.text[self.length], "the context ends right before the anchor"
        right = self.streaks[self.steps % len(self.streaks)]
        self.steps += 1
        logits_kV = torch.zeros(self.block_size - 1, self.vocab_size)
        for slot in range(self.block_size - 1):
            at = self.length + 1 + slot
            token = self.text[at] if at < len(self.text) else 0
            logits_kV[slot, token] = 8.0
            if slot == right:
                logits_kV[slot, (token + 1) % self.vocab_size] = 9.0
        return logits_kV
