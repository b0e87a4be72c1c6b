"""Optimizers and schedules: torch's own, put together for a drafter.

Muon takes the matrices (all of them are hidden weights: embedding and head are frozen and elsewhere) with updates
rescaled to AdamW's size, so that one learning rate means the same for both; AdamW takes the norms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from trainer.manifest import OptimSpec

_WSD_DECAY = 0.2


def make_optimizers(drafter: nn.Module, spec: OptimSpec) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a run; a learning rate is set before every step.

    Args:
        drafter: Its parameters are float32 masters.
        spec: The manifest's part.
    """
    parameters = [p for p in drafter.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.ndim == 2]
    vectors = [p for p in parameters if p.ndim != 2]
    if spec.name == "muon":
        muon = torch.optim.Muon(
            matrices, lr=spec.lr, weight_decay=spec.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        )
        return [muon, torch.optim.AdamW(vectors, lr=spec.lr, weight_decay=0.0, fused=True)]
    groups = [{"params": matrices, "weight_decay": spec.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, lr=spec.lr, fused=True)]


def learning_rate(step: int, total: int, spec: OptimSpec) -> float:
    """Return the learning rate of a step, 0-based, of a run of ``total`` steps."""
    warmup = max(1, round(spec.warmup * total))
    if step < warmup:
        return spec.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, total - warmup)
    shape = {
        "constant": 1.0,
        "linear": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
        "wsd": min(1.0, (1 - done) / _WSD_DECAY),
    }
    return spec.lr * shape[spec.schedule]


def set_learning_rate(optimizers: Iterable[torch.optim.Optimizer], lr: float) -> None:
    """Set the learning rate of all groups."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr


@torch.no_grad()
def scale_and_clip(parameters: Iterable[Tensor], factor: float, largest: float) -> Tensor:
    """Multiply all gradients by a factor, then cut their common norm.

    Args:
        parameters: Those with gradients.
        factor: From a sum over slots to a mean.
        largest: Norm that stays.

    Returns:
        The norm before the cut, float32 [].
    """
    parameters = [p for p in parameters if p.grad is not None]
    grads = [p.grad for p in parameters if p.grad is not None]
    torch._foreach_mul_(grads, factor)
    norm = torch.nn.utils.clip_grad_norm_(parameters, largest)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
