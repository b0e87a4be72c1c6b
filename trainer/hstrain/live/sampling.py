"""Choose tokens: temperature, nucleus, and the rejection rule that preserves the target's distribution.

A drafted token x ~ q is kept with probability min(1, p(x) / q(x)). The first token that is not kept is replaced by one
drawn from the normalised rest max(p - q, 0), and the tokens drafted after it are dropped. The text is then distributed
as if the target alone had written it (arXiv 2211.17192, theorem 1), whatever q is: a poor drafter costs time, not
quality. The q of a slot may depend on everything that is known before the block, so all slots may be drafted at once.

Probabilities are float64: for a quarter of a million tokens in float32, the rest p - q would contain rounding errors.
"""

from __future__ import annotations

import torch
from torch import Tensor


def distribution(logits_nV: Tensor, temperature: float, top_p: float = 1.0) -> Tensor:
    """Return the probabilities to sample from, float64 [n, V].

    Args:
        logits_nV: [n, V].
        temperature: Above 0.
        top_p: Keep the smallest number of most likely tokens whose probabilities sum to this much or more; at least
            one, so that 0 keeps the most likely token.
    """
    logits_nV = logits_nV.double()
    # subtract the largest before dividing: a temperature near 0 would otherwise make infinities
    p_nV = ((logits_nV - logits_nV.amax(-1, keepdim=True)) / temperature).softmax(-1)
    if top_p >= 1:
        return p_nV
    sorted_nV, order_nV = torch.sort(p_nV, dim=-1, descending=True, stable=True)
    before_nV = sorted_nV.cumsum(-1) - sorted_nV
    before_nV[:, 0] = -1
    kept_nV = sorted_nV.masked_fill(before_nV >= top_p, 0)
    p_nV = torch.zeros_like(p_nV).scatter(-1, order_nV, kept_nV)
    return p_nV / p_nV.sum(-1, keepdim=True)


def draw(p_nV: Tensor, generator: torch.Generator) -> Tensor:
    """Return one token of each distribution, int64 [n]."""
    return torch.multinomial(p_nV, 1, generator=generator)[:, 0]


def accept_drafted(p_BV: Tensor, q_kV: Tensor, drafted_k: Tensor, generator: torch.Generator) -> tuple[int, int]:
    """Return how many drafted tokens are kept and the token that follows them.

    Args:
        p_BV: float64 [B, V] the target's distribution after the anchor and after each drafted token; k = B - 1.
        q_kV: float64 [k, V] the distribution from which each token was drafted.
        drafted_k: int64 [k] tokens.
        generator: Source of random numbers, on the device of the tensors.
    """
    k = len(drafted_k)
    chosen = drafted_k[:, None]
    p_k, q_k = p_BV[:k].gather(1, chosen)[:, 0], q_kV.gather(1, chosen)[:, 0]
    chance_k = torch.rand(k, generator=generator, device=p_BV.device, dtype=torch.float64)
    kept = (chance_k * q_k < p_k).cumprod(0).sum()
    streak = int(kept)
    rest_V = p_BV[streak]
    if streak < k:
        # the token was not kept, so p < q at it, and p > q elsewhere
        rest_V = (rest_V - q_kV[streak]).clamp_min(0)
    return streak, int(draw(rest_V[None], generator))
