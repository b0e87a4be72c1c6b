"""Speculative decoding by the dflash package, to compare live decoding with."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Generated:
    """What ``dflash_generate`` gives.

    Attributes:
        output_ids: int64 [1, tokens], prompt and continuation; a stop token ends it and is kept.
        acceptance_lengths: Tokens that each step yields: accepted ones and the target's own, 1 .. B. The prefill's
            token is not counted, so they sum to the continuation's tokens minus one. The last step counts only what
            ``max_new_tokens`` and the stop token leave of it. Towards ``max_new_tokens`` blocks are shortened to what
            is left, which changes what full layers draft: compare steps before that, or leave room.
    """

    output_ids: Tensor
    acceptance_lengths: list[int]


def generate(
    dflash: Any,
    drafter: Path,
    target: nn.Module,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    stop_token_ids: list[int] | None = None,
    temperature: float = 0.0,
) -> Generated:
    """Let ``dflash.model`` decode one prompt, in float32 on the CPU.

    Args:
        dflash: The module ``dflash.model``.
        drafter: A checkpoint in z-lab's layout.
        target: A transformers model whose cache can be cropped.
        input_ids: int64 [1, tokens].
        max_new_tokens: Longest continuation.
        stop_token_ids: What ends it.
        temperature: 0 is greedy; else rejection sampling from the global generator.
    """
    clock, dflash._cuda_time = dflash._cuda_time, time.perf_counter  # its clock waits for a GPU
    try:
        with warnings.catch_warnings(action="ignore"):
            model = dflash.DFlashDraftModel.from_pretrained(drafter, dtype=torch.float32).eval()
            found = dflash.dflash_generate(
                model, target, input_ids, max_new_tokens, stop_token_ids, temperature, return_stats=True
            )
    finally:
        dflash._cuda_time = clock
    return Generated(found.output_ids, found.acceptance_lengths)
