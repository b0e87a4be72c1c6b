"""Optimizers and schedules: torch's own, put together for a drafter.

Muon updates the matrices, which are all hidden weights: the frozen embedding and head are not part of the drafter. Its
updates are rescaled to AdamW's size, so that one learning rate fits both. AdamW updates the norms.

torch's Muon orthogonalises in bfloat16. On a CPU that emulates bfloat16 this took 95 % of a step, so such devices use
:class:`Float32Muon`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hscache.device import fast_bf16
from hstrain.manifest import OptimSpec

_WSD_DECAY = 0.2


def make_optimizers(drafter: nn.Module, spec: OptimSpec) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a run; a learning rate is set before every step.

    Args:
        drafter: Its parameters are float32, on the device where they are trained.
        spec: The manifest's section ``optim``.
    """
    parameters = [p for p in drafter.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.ndim == 2]
    vectors = [p for p in parameters if p.ndim != 2]
    if spec.name == "muon":
        kind = torch.optim.Muon if fast_bf16(matrices[0].device.type) else Float32Muon
        muon = kind(matrices, lr=spec.lr, weight_decay=spec.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw")
        return [muon, torch.optim.AdamW(vectors, lr=spec.lr, weight_decay=0.0, fused=True)]
    groups = [{"params": matrices, "weight_decay": spec.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, lr=spec.lr, fused=True)]


class Float32Muon(torch.optim.Muon):
    """torch's Muon with every product in float32, for devices that emulate bfloat16; the same options and state."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon)."""
        for group in self.param_groups:
            shrink, momentum = 1 - group["lr"] * group["weight_decay"], group["momentum"]
            for weight in (p for p in group["params"] if p.grad is not None):
                state = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight.grad)
                average = state["momentum_buffer"].lerp_(weight.grad, 1 - momentum)
                update = weight.grad.lerp(average, momentum) if group["nesterov"] else average
                update = _orthogonalised(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
                # the root mean square of AdamW's updates, as with adjust_lr_fn="match_rms_adamw"
                weight.mul_(shrink).add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(weight.shape)))


def _orthogonalised(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return float32 [m, n] with the singular vectors of a matrix and singular values near 1, by Newton-Schulz."""
    a, b, c = coefficients
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


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
    """Multiply all gradients by a factor, then clip their common norm.

    Args:
        parameters: Parameters; those without a gradient are left out.
        factor: Turns the sum over slots into a mean.
        largest: Largest norm of the gradient.

    Returns:
        The norm before clipping, float32 [].
    """
    parameters = [p for p in parameters if p.grad is not None]
    grads = [p.grad for p in parameters if p.grad is not None]
    torch._foreach_mul_(grads, factor)
    norm = torch.nn.utils.clip_grad_norm_(parameters, largest)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
