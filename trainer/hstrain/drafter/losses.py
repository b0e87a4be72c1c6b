"""Compute a loss from the drafter's states through the frozen head, without ever holding all logits.

At V = 248,320 the logits of 8,192 queries are 8 GB. So the head works on a few blocks at a time, and the gradients with
respect to their states are computed at once, while their logits exist. That takes two matrix products per block and
keeps nothing; checkpointing would take three. Only slots that train are computed: not slot 0, and not slots after the
end of a turn.

Losses, per slot (``loss.kind``), with q the drafter's distribution and t the target's for that slot:

- ``ce``: -log q(token), the sample's own next token;
- ``ce-argmax``: -log q(argmax t), for text that the target did not write;
- ``kl-topk``: KL(t || q) over the k stored tokens and one bucket for all others;
- ``kl-exact``: KL(t || q) over the whole vocabulary, t from the stored final state;
- ``tv``: total variation, half the L1 distance of t and q: one minus the chance that sampling accepts.

Weights, per slot (``loss.weights``): ``exp`` is exp(-(k-1)/gamma), arXiv 2602.06036; ``dpace`` is
w_j = sum over m >= j of prod over i <= m of (1-a) q_i(token) + a with a = 1/2, detached, arXiv 2605.18810; or ``none``.

The result is the *sum* over slots and the sum of the weights. The caller computes the mean over the whole step, with
all ranks and accumulated packs: a mean of means would depend on how the step is divided.

Shapes: N blocks, K = B - 1 slots, R rows that train, V vocabulary, H width, k stored logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from hscache.store.head import TargetHead
from hscache.store.layout import FINAL_STATE, LOGIT_IDS

Kind = Literal["ce", "ce-argmax", "kl-topk", "kl-exact", "tv"]
NEEDS: dict[Kind, str | None] = {
    "ce": None,
    "ce-argmax": LOGIT_IDS,
    "kl-topk": LOGIT_IDS,
    "kl-exact": FINAL_STATE,
    "tv": FINAL_STATE,
}
"""Loss -> the array of the store that it needs in addition to tokens and states."""
Weights = Literal["exp", "dpace", "none"]
_DPACE_ALPHA = 0.5
_CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Number of logits that exist at once: enough for the matrix product to run at full speed."""


class Head:
    """The target's frozen embedding and head on the training device.

    Args:
        target: Embedding and head from the store.
        device: The training device.
        dtype: Type of the matrix product; the logits are float32.
    """

    def __init__(self, target: TargetHead, device: torch.device | str, dtype: torch.dtype) -> None:
        self.embed_VH = target.embed.to(device)
        self.lm_head_VH = target.lm_head.to(device, dtype)
        softcap = target.facts["head"]["softcap"]
        self.scale, self.softcap = float(target.facts["head"]["scale"]), None if softcap is None else float(softcap)
        self.vocab_size = self.lm_head_VH.shape[0]

    def logits(self, x_RH: Tensor) -> Tensor:
        """Return the logits that the target would compute from these final states, float32 [R, V]."""
        with torch.autocast(x_RH.device.type, enabled=False):
            logits = (x_RH.to(self.lm_head_VH.dtype) @ self.lm_head_VH.T).float()
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


@dataclass(frozen=True)
class SlotTargets:
    """What the slots of N blocks should predict.

    Attributes:
        tokens_NK: int64, the sample's token of each slot, -1 where nothing trains.
        rows_NK: int64, row of the following tables with the target's distribution for the slot.
        top_ids: int32 [rows, k], most likely first; for ``kl-topk`` and ``ce-argmax``.
        top_logprobs: float [rows, k].
        final_states: [rows, H]; for ``kl-exact`` and ``tv``.
    """

    tokens_NK: Tensor
    rows_NK: Tensor
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None
    final_states: Tensor | None = None


@dataclass(frozen=True)
class BlockLoss:
    """Sums over the slots that train; on the device.

    Attributes:
        loss_sum: Weighted sum of losses; differentiable.
        weight_sum: Sum of the weights.
        correct_NK: bool, whether the drafter's most likely token is the sample's; False where nothing trains.
        trained_NK: bool, whether the slot trains.
    """

    loss_sum: Tensor
    weight_sum: Tensor
    correct_NK: Tensor
    trained_NK: Tensor


def default_gamma(block_size: int) -> float:
    """Return the decay that the paper uses for the nearest block size: 7, 5, 4 for 16, 10, 8."""
    return {16: 7.0, 10: 5.0, 8: 4.0}[min((16, 10, 8), key=lambda size: abs(size - block_size))]


def head_loss(
    hidden_NKH: Tensor, head: Head, targets: SlotTargets, *, kind: Kind, weights: Weights, gamma: float
) -> BlockLoss:
    """Return the losses and weights of all slots, summed, computing a few blocks at a time.

    Args:
        hidden_NKH: [N, K, H] the drafter's states of slots 1 .. B-1.
        head: The frozen head.
        targets: What the slots should predict.
        kind: See the module's text.
        weights: See the module's text.
        gamma: Decay of the weights ``exp``, in slots.
    """
    trained_NK = targets.tokens_NK >= 0
    correct_NK = torch.zeros_like(trained_NK)
    differentiable = hidden_NKH.requires_grad and torch.is_grad_enabled()
    grad_NKH = torch.zeros_like(hidden_NKH) if differentiable else None
    zero = torch.zeros((), dtype=torch.float32, device=hidden_NKH.device)
    loss_sum, weight_sum = zero.clone(), zero.clone()
    for some in _chunks(hidden_NKH, head.vocab_size):
        trained = trained_NK[some]
        if not trained.any():
            continue
        tokens_R, rows_R = targets.tokens_NK[some][trained], targets.rows_NK[some][trained]
        x_RH = hidden_NKH[some].detach()[trained].requires_grad_(differentiable)
        with torch.set_grad_enabled(differentiable):
            logits_RV = head.logits(x_RH)
            losses_R = _losses(logits_RV, tokens_R, rows_R, head, targets, kind)
        w_R = _weights(logits_RV, tokens_R, trained, weights, gamma)
        correct_NK[some] = correct_NK[some].masked_scatter(trained, logits_RV.detach().argmax(-1) == tokens_R)
        with torch.set_grad_enabled(differentiable):
            part = (losses_R * w_R).sum()
        if grad_NKH is not None:
            (grad_RH,) = torch.autograd.grad(part, x_RH)
            grad_NKH[some] = grad_NKH[some].masked_scatter(trained[..., None], grad_RH.to(grad_NKH.dtype))
        loss_sum += part.detach()
        weight_sum += w_R.sum()
    if grad_NKH is not None:
        loss_sum = _WithGradient.apply(hidden_NKH, loss_sum, grad_NKH)  # type: ignore[no-untyped-call]
    return BlockLoss(loss_sum, weight_sum, correct_NK, trained_NK)


class _WithGradient(torch.autograd.Function):
    """Return a value whose gradient has already been computed."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, value: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = ctx.saved_tensors
        return grad * grad_outputs[0], None, None


def chunk_rows(vocab_size: int, slots: int, device: str) -> int:
    """Return how many slots have logits at once; they are whole blocks, since D-PACE needs all slots of a block."""
    return max(1, _CHUNK_ELEMENTS[device] // (vocab_size * slots)) * slots


def _chunks(hidden_NKH: Tensor, vocab_size: int) -> Iterator[slice]:
    N, K, _ = hidden_NKH.shape
    step = chunk_rows(vocab_size, K, "cuda" if hidden_NKH.is_cuda else "cpu") // K
    return (slice(n, n + step) for n in range(0, N, step))


def _losses(
    logits_RV: Tensor, tokens_R: Tensor, rows_R: Tensor, head: Head, targets: SlotTargets, kind: Kind
) -> Tensor:
    """Return float32 [R]."""
    if kind == "ce":
        return F.cross_entropy(logits_RV, tokens_R, reduction="none")
    if kind == "ce-argmax":
        assert targets.top_ids is not None
        return F.cross_entropy(logits_RV, targets.top_ids[rows_R, 0].long(), reduction="none")
    if kind == "kl-topk":
        assert targets.top_ids is not None
        assert targets.top_logprobs is not None
        return _kl_topk(logits_RV, targets.top_ids[rows_R].long(), targets.top_logprobs[rows_R].float())
    assert targets.final_states is not None
    with torch.no_grad():
        log_t_RV = head.logits(targets.final_states[rows_R]).log_softmax(-1)
    log_q_RV = logits_RV.log_softmax(-1)
    if kind == "kl-exact":
        return F.kl_div(log_q_RV, log_t_RV, reduction="none", log_target=True).sum(-1)
    return (log_t_RV.exp() - log_q_RV.exp()).abs().sum(-1) / 2


def _kl_topk(logits_RV: Tensor, ids_Rk: Tensor, log_t_Rk: Tensor) -> Tensor:
    """Return KL over the stored tokens and one bucket for the rest of each distribution."""
    log_q_Rk = logits_RV.log_softmax(-1).gather(1, ids_Rk)  # logsumexp takes ten times as long on a CPU
    kl_R = (log_t_Rk.exp() * (log_t_Rk - log_q_Rk)).sum(-1)
    rest_t_R = _rest(log_t_Rk)
    return kl_R + rest_t_R * (rest_t_R.log() - _rest(log_q_Rk).log())


def _rest(logprobs_Rk: Tensor) -> Tensor:
    # rounded to float16, the probabilities of k tokens can sum to slightly more than one
    return (1 - logprobs_Rk.exp().sum(-1)).clamp_min(1e-6)


@torch.no_grad()
def _weights(logits_RV: Tensor, tokens_R: Tensor, trained_nK: Tensor, weights: Weights, gamma: float) -> Tensor:
    """Return float32 [R], the weight of every slot that trains."""
    slot = torch.arange(trained_nK.shape[1], device=trained_nK.device)
    if weights == "none":
        return torch.ones(len(tokens_R), device=trained_nK.device)
    if weights == "exp":
        return torch.exp(-slot.float() / gamma).expand_as(trained_nK)[trained_nK]
    p_R = torch.exp(-F.cross_entropy(logits_RV, tokens_R, reduction="none"))
    q_nK = torch.zeros(trained_nK.shape, device=p_R.device)
    q_nK[trained_nK] = (1 - _DPACE_ALPHA) * p_R + _DPACE_ALPHA
    reach_nK = q_nK.cumprod(1)  # zero after the end of a block, so that those slots add nothing
    return reach_nK.flip(1).cumsum(1).flip(1)[trained_nK]


def logit_std(hidden_RH: Tensor, head: Head) -> float:
    """Return the standard deviation over the vocabulary of the logits of a few states, for the calibrated start."""
    with torch.no_grad():
        std = float(head.logits(hidden_RH).std(-1).mean())
    assert math.isfinite(std)
    return std
