"""The DFlash drafter (arXiv 2602.06036): from the target's states before an anchor to a block of tokens, in one pass.

The target's tapped states are mixed once, ``hidden_norm(fc(concat over taps))``, and every layer computes its keys and
values from that context and from the block with the same projections; queries come from the block alone. A block is the
embedding of the anchor followed by B - 1 times that of the mask token. :mod:`hstrain.drafter.attention` decides what a
query sees. The target's embedding and head are frozen and not part of the drafter, which has 11 tensors per layer and
three more.

Parameters are named as the serving engines name them (``layers.0.self_attn.q_proj.weight``, ...), so that a
``state_dict`` is the ``zlab`` checkpoint.

Shapes: T context tokens, L taps, H the target's width (and the drafter's), N blocks, B block size, Q = N * B queries,
A attention heads, K key-value heads, D head width. Nothing is padded and there is no batch axis: the samples of a pack
follow one another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812  (the name that torch's own code uses)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hstrain.drafter.attention import Blocks, attend

LayerType = Literal["full_attention", "sliding_attention"]
KeyValue = tuple[Tensor, Tensor]
"""[T, K, D] keys, rotated, and [T, K, D] values of one layer's context."""


@dataclass(frozen=True)
class DrafterConfig:
    """The shape of a drafter.

    Attributes:
        hidden_size: Width of the target and of the drafter.
        vocab_size: Of the target.
        taps: 0-based decoder blocks of the target whose outputs make the context, ascending.
        num_target_layers: Decoder blocks of the target.
        layer_types: One entry per layer; sliding layers are causal inside the block, full ones see all of it.
        intermediate_size: Width of the feed-forward layers.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of a head.
        block_size: Anchor and drafted slots, B.
        mask_token_id: Input id of the drafted slots; an ordinary row of the target's embedding.
        rope_theta: Base of the drafter's own rotary embedding, over the whole head.
        rms_norm_eps: Epsilon of every norm.
        sliding_window: Tokens that a query of a sliding layer sees, itself included; None without such layers.
        max_position_embeddings: Written to exports; rotary embeddings have no table.
        embed_scale: Factor on the embedding's rows in :func:`block_inputs`, the same as on the target's own input.
        yarn_factor: Times the positions to which YaRN (arXiv 2309.00071) stretches the rotary embedding; 1 for none.
            Only exports have another: nothing is trained with it.
        yarn_positions: Positions that YaRN stretches; None for none.
    """

    hidden_size: int
    vocab_size: int
    taps: tuple[int, ...]
    num_target_layers: int
    layer_types: tuple[LayerType, ...]
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    mask_token_id: int
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    sliding_window: int | None = None
    max_position_embeddings: int = 32768
    embed_scale: float = 1.0
    yarn_factor: float = 1.0
    yarn_positions: int | None = None

    @property
    def num_layers(self) -> int:
        """Decoder layers of the drafter."""
        return len(self.layer_types)

    def window(self, layer: int) -> int | None:
        """Return the sliding window of a layer, None for full attention."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm that computes in float32 and returns the input's type, as Qwen3's does."""

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., n], of the type of ``x``."""
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention of block queries over context and block, with per-head norms of queries and keys."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        H, D = config.hidden_size, config.head_dim
        self.head_dim = D
        self.q_proj = nn.Linear(H, config.num_heads * D, bias=False)
        self.k_proj = nn.Linear(H, config.num_kv_heads * D, bias=False)
        self.v_proj = nn.Linear(H, config.num_kv_heads * D, bias=False)
        self.o_proj = nn.Linear(config.num_heads * D, H, bias=False)
        self.q_norm = RMSNorm(D, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(D, eps=config.rms_norm_eps)

    def keys_values(self, x_TH: Tensor, rope: KeyValue) -> KeyValue:
        """Return rotated keys and values, [T, K, D] each."""
        k = self.k_norm(self._heads(self.k_proj(x_TH)))
        return rotate(k, rope), self._heads(self.v_proj(x_TH))

    def forward(self, x_QH: Tensor, rope: KeyValue, context: KeyValue, blocks: Blocks, window: int | None) -> Tensor:
        """Return [Q, H]."""
        q_QAD = rotate(self.q_norm(self._heads(self.q_proj(x_QH))), rope)
        mixed_QAD = attend(q_QAD, context, self.keys_values(x_QH, rope), blocks, window)
        mixed_QH: Tensor = self.o_proj(mixed_QAD.flatten(1))
        return mixed_QH

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        H, F_ = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(H, F_, bias=False)
        self.up_proj = nn.Linear(H, F_, bias=False)
        self.down_proj = nn.Linear(F_, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """A Qwen3 decoder layer. The context does not pass through ``input_layernorm``: it has its own norm."""

    def __init__(self, config: DrafterConfig, index: int) -> None:
        super().__init__()
        self.window = config.window(index)
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, x_QH: Tensor, rope_Q: KeyValue, context: Tensor | KeyValue, rope_T: KeyValue | None, blocks: Blocks
    ) -> Tensor:
        """Return [Q, H].

        Args:
            x_QH: Block states.
            rope_Q: Rotary embedding of the block slots.
            context: Mixed states [T, H], or the keys and values already computed from them.
            rope_T: Rotary embedding of the mixed states.
            blocks: What each block sees.
        """
        if isinstance(context, Tensor):
            assert rope_T is not None
            context = self.self_attn.keys_values(context, rope_T)
        x_QH = x_QH + self.self_attn(self.input_layernorm(x_QH), rope_Q, context, blocks, self.window)
        return x_QH + self.mlp(self.post_attention_layernorm(x_QH))  # type: ignore[no-any-return]


class Drafter(nn.Module):
    """The trainable model; see the module's text.

    Args:
        config: Its shape.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False
        self.fc = nn.Linear(len(config.taps) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([Layer(config, i) for i in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def mix(self, states_TLH: Tensor) -> Tensor:
        """Return the context [T, H] of tapped states [T, L, H]; row t belongs to token t."""
        states = states_TLH.flatten(1)
        if not torch.is_autocast_enabled(
            states.device.type
        ):  # under autocast the product takes bf16 states as they are
            states = states.to(self._input_dtype)
        return self.hidden_norm(self.fc(states).to(self._input_dtype))  # type: ignore[no-any-return]

    def context(self, states_TLH: Tensor, positions_T: Tensor) -> list[KeyValue]:
        """Return every layer's keys and values of context rows, for :meth:`draft`."""
        context_TH, rope = self.mix(states_TLH), self.rope(positions_T)
        return [layer.self_attn.keys_values(context_TH, rope) for layer in self._layers()]

    def draft(self, block_QH: Tensor, blocks: Blocks, context: list[KeyValue]) -> Tensor:
        """Return the normed states [Q, H] of block inputs, given :meth:`context`."""
        x_QH, rope = block_QH.to(self._input_dtype), self.rope(blocks.positions)
        for layer, keys_values in zip(self._layers(), context, strict=True):
            x_QH = layer(x_QH, rope, keys_values, None, blocks)
        return self.norm(x_QH)  # type: ignore[no-any-return]

    def forward(self, states_TLH: Tensor, positions_T: Tensor, block_QH: Tensor, blocks: Blocks) -> Tensor:
        """Return the states that the head reads for every query.

        Args:
            states_TLH: [T, L, H] tapped states of the target, of any float type.
            positions_T: int64 [T] position of each row in its sample.
            block_QH: [Q, H] embeddings of the block inputs, from :func:`block_inputs`.
            blocks: What each block sees.

        Returns:
            [Q, H]; the frozen head turns slot k of a block into the distribution of token anchor + k; slot 0 is unused.
        """
        context_TH, x_QH = self.mix(states_TLH), block_QH.to(self._input_dtype)
        rope_T, rope_Q = self.rope(positions_T), self.rope(blocks.positions)
        for layer in self._layers():
            x_QH = _call(layer, x_QH, rope_Q, context_TH, rope_T, blocks, recompute=self.gradient_checkpointing)
        return self.norm(x_QH)  # type: ignore[no-any-return]

    def rope(self, positions: Tensor) -> KeyValue:
        """Return cosines and sines [n, 1, D] of positions; always over the whole head, whatever the target does."""
        D = self.config.head_dim
        exponent = torch.arange(0, D, 2, dtype=torch.float32, device=positions.device) / D
        wavelengths, scale = self.config.rope_theta**exponent, 1.0
        if self.config.yarn_positions is not None:
            wavelengths, scale = _stretched(wavelengths, self.config)
        angle = positions[:, None].float() / wavelengths
        angle = torch.cat((angle, angle), -1)[:, None]
        return (angle.cos(), angle.sin()) if scale == 1.0 else (angle.cos() * scale, angle.sin() * scale)

    @property
    def _input_dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def _layers(self) -> list[Layer]:
        return list(self.layers)  # type: ignore[arg-type]


def _stretched(wavelengths: Tensor, config: DrafterConfig) -> tuple[Tensor, float]:
    """Return YaRN's wavelengths, and its factor on cosines and sines, as transformers and engines compute them.

    Wavelengths that go round at least 32 times in the trained positions stay, those that go round less than once are
    stretched, and those between are mixed.
    """
    positions, pairs = config.yarn_positions, len(wavelengths)
    assert positions is not None

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(positions / (times * 2 * math.pi)) / math.log(config.rope_theta)

    low = max(math.floor(pair_that_turns(32)), 0)
    high = min(math.ceil(pair_that_turns(1)), config.head_dim - 1)
    ramp = torch.arange(pairs, dtype=torch.float32, device=wavelengths.device) - low
    share = (ramp / (high - low if high != low else 0.001)).clamp(0, 1)
    frequencies = share / (config.yarn_factor * wavelengths) + (1 - share) / wavelengths
    return 1 / frequencies, 0.1 * math.log(config.yarn_factor) + 1.0


def rotate(x_nAD: Tensor, rope: KeyValue) -> Tensor:
    """Apply the rotary embedding, rotating the halves of each head as Qwen3 does."""
    cos, sin = rope
    left, right = x_nAD.chunk(2, -1)
    return (x_nAD * cos + torch.cat((-right, left), -1) * sin).to(x_nAD.dtype)


def block_inputs(anchor_ids_N: Tensor, embed_VH: Tensor, config: DrafterConfig) -> Tensor:
    """Return the block's input embeddings [N * B, H]: anchor, then B - 1 masks, of the embedding's type.

    They equal the input of the target's own first block for these tokens: the rows times ``embed_scale``, with the same
    rounding. Engines differ here: SGLang calls the target's embedding module (which multiplies in Gemma; in Granite the
    model multiplies, so SGLang does not), vLLM shares the weight alone (a proposed change, vllm#41703, multiplies for
    Gemma 4), and the dflash package takes raw rows times ``input_embedding_scale`` of the drafter's config, or on MLX
    the module's factor times that. Exports write the factor to that key (:mod:`hstrain.exchange.layouts`).
    """
    ids_NB = anchor_ids_N.new_full((len(anchor_ids_N), config.block_size), config.mask_token_id)
    ids_NB[:, 0] = anchor_ids_N
    rows_QH = F.embedding(ids_NB.flatten(), embed_VH)
    return rows_QH if config.embed_scale == 1.0 else rows_QH * config.embed_scale


def count_parameters(config: DrafterConfig) -> tuple[int, int]:
    """Return the numbers of parameters and of tensors, without allocating them."""
    with torch.device("meta"):
        parameters = list(Drafter(config).parameters())
    return sum(p.numel() for p in parameters), len(parameters)


def initialise(drafter: Drafter, seed: int) -> None:
    """Set weights from a seed: normal with std 0.02 for matrices, as in Qwen3, and ones for norms."""
    made = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=made) * 0.02)


def _call(function: Callable[..., Tensor], *args: object, recompute: bool) -> Tensor:
    if recompute and torch.is_grad_enabled():
        return checkpoint(function, *args, use_reentrant=False)  # type: ignore[no-any-return]
    return function(*args)
