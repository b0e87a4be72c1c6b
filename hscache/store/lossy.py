"""The lossy codecs ``int8`` and ``int4``: rotate a state, round it, keep its few largest elements exactly.

A state vector of an LLM has a handful of channels a hundred times larger than the rest (and its first token's are a
thousand times larger still), so one scale per vector ruins the small channels, and one per channel ruins the large
vectors. Here, for each (token, tap):

1. the ``kept`` elements of largest magnitude are taken out and stored as they are;
2. the rest is rotated in blocks of 64 channels by a Hadamard matrix with fixed signs, which spreads what is still
   large over its block (QuaRot, arXiv 2404.00456, does this to a model's activations; here it is undone on reading);
3. the result is rounded to whole numbers of a step that is stored as bf16: the largest number over 127 for ``int8``;
   for ``int4`` the best of three clips, by squared error.

``tools/bench/measure_codecs.py`` prints the table of schemes that led here. In the shard (format in
:mod:`hscache.store.layout`) a state array is its codes, uint8, and beside it an array of ``scales``, uint16::

    codes   [T, L, H]          int8: number + 128, 1..255
            [T, L, W]          int4: number + 8, 1..15; W = ceil(H/2), byte j has channel j low and channel j + W high
    scales  [T, L, 1 + 2 kept] step (bf16 bits), channels of the kept elements, their values (bf16 bits)

No code is 0 and the fill value of ``scales`` is NaN: a row of which either part is missing decodes to NaN.

Decoding is exact integer arithmetic up to one float32 product and the rounding to bf16, so every library, device and
order of summation gives the same bits. Encoding sums in a fixed order, so a row's codes do not depend on its batch.
Cost on one core, in bf16 bytes: encoding 260 (``int8``) or 190 MB/s (``int4``), decoding 800 MB/s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hscache.errors import ConfigError
from hscache.manifest import LOSSY

if TYPE_CHECKING:
    import torch

NAMES = LOSSY
VERSION = 1
WORST_COSINE = {"int8": 0.9995, "int4": 0.97}
"""The least cosine of a decoded state with the true one that a codec promises; ``verify`` checks records against it."""
_BITS = {"int8": 8, "int4": 4}
_BLOCK = 64
_CHANNELS_PER_KEPT = {"int8": 128, "int4": 256}  # int8 stays 1.93 times smaller than bf16, int4 3.82 times
_CLIPS = {"int8": (1.0,), "int4": (1.0, 0.85, 0.7)}
_SIGNS = "753225895a4f7c5f"  # the first bytes of sha256("hscache rotation 1")
_SMALLEST_STEP = 2.0**-126
_MAX_HIDDEN = 1 << 15  # below the fill value of the scales, so that a missing channel number is never a valid one
# float32 elements processed at a time: as many as fit a core's cache; as many as keep a GPU busy
_TILE = {"cpu": 1 << 19}
_TILE_DEVICE = 1 << 24


@dataclass(frozen=True)
class Scheme:
    """The parameters of decoding.

    Attributes:
        name: ``int8`` or ``int4``.
        bits: Bits of a code.
        hidden_size: H.
        block: Channels rotated together: the largest power of two up to 64 that divides H.
        kept: Elements of a state vector that are stored exactly.
        signs: +1 or -1 for each channel of a block.
    """

    name: str
    bits: int
    hidden_size: int
    block: int
    kept: int
    signs: tuple[int, ...]

    @property
    def largest(self) -> int:
        """Largest number of a code: 127 or 7; ``largest + 1`` is added to make it a positive code."""
        return int(2 ** (self.bits - 1)) - 1

    @property
    def code_bytes(self) -> int:
        """Bytes of a state vector's codes."""
        return self.hidden_size if self.bits == 8 else -(-self.hidden_size // 2)

    @property
    def columns(self) -> int:
        """Entries of a row of ``scales``."""
        return 1 + 2 * self.kept

    def attributes(self) -> dict[str, Any]:
        """Return the array attribute ``codec``, from which any program can decode."""
        return {
            "name": self.name,
            "version": VERSION,
            "bits": self.bits,
            "hidden_size": self.hidden_size,
            "block": self.block,
            "kept": self.kept,
            "signs": list(self.signs),
        }


@cache
def scheme(name: str, hidden_size: int) -> Scheme:
    """Return the scheme of a lossy codec for states of width H.

    Raises:
        ConfigError: ``codec-unknown``: the codec is not lossy, or H is 32,768 or more.
    """
    if name not in NAMES or hidden_size >= _MAX_HIDDEN:
        raise ConfigError("codec-unknown", f"codec {name!r} for states of width {hidden_size}: no such scheme")
    block = min(_BLOCK, hidden_size & -hidden_size)
    bits = int(_SIGNS, 16)
    signs = tuple(-1 if bits >> i & 1 else 1 for i in range(block)) if block > 1 else (1,)
    kept = max(1, hidden_size // _CHANNELS_PER_KEPT[name])
    return Scheme(name, _BITS[name], hidden_size, block, kept, signs)


def encode(states: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack states, on the device where they are.

    Args:
        states: bfloat16 [..., H]. A vector with more than ``kept`` elements that are not finite, or with some above
            1e36, decodes to NaN.
        scheme: From :func:`scheme`.

    Returns:
        Codes uint8 [..., code_bytes] and scales int16 (the bits) [..., 1 + 2 kept].
    """
    import torch

    assert states.dtype == torch.bfloat16
    rows = states.reshape(-1, scheme.hidden_size)
    codes = torch.empty((len(rows), scheme.code_bytes), dtype=torch.uint8, device=rows.device)
    scales = torch.empty((len(rows), scheme.columns), dtype=torch.int16, device=rows.device)
    for part in _tiles(rows):
        x = rows[part].float()
        channels = x.abs().topk(scheme.kept, dim=-1).indices.sort(dim=-1).values
        scales[part, 1 : 1 + scheme.kept] = channels.to(torch.int16)
        scales[part, 1 + scheme.kept :] = x.gather(-1, channels).bfloat16().view(torch.int16)
        numbers, step = _round(_rotate(x.scatter_(-1, channels, 0.0), scheme), scheme)
        scales[part, :1] = step.bfloat16().view(torch.int16)
        # a row that is not finite has no numbers: code 0, which decodes to NaN
        positive = numbers.add_(scheme.largest + 1).nan_to_num_(nan=0.0).to(torch.uint8)
        codes[part] = positive if scheme.bits == 8 else _pack(positive, scheme)
    lead = states.shape[:-1]
    return codes.view(*lead, -1), scales.view(*lead, -1)


def decode(codes: torch.Tensor, scales: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Decode states, on the device of the codes; every device gives the same bits.

    Args:
        codes: uint8 [..., code_bytes].
        scales: int16 [..., 1 + 2 kept].
        scheme: From :func:`scheme`.

    Returns:
        bfloat16 [..., H]; NaN in rows of which codes or scales are missing.
    """
    import torch

    lead, width = codes.shape[:-1], scheme.hidden_size
    flat, side = codes.reshape(-1, scheme.code_bytes), scales.reshape(-1, scheme.columns)
    out = torch.empty((len(flat), width), dtype=torch.bfloat16, device=codes.device)
    rotation = _matrix(scheme).to(codes.device)
    for part in _tiles(out):
        positive = flat[part] if scheme.bits == 8 else _unpack(flat[part], scheme)
        step = side[part, :1].view(torch.bfloat16).float()
        channels = side[part, 1 : 1 + scheme.kept].long()
        missing = (positive.amin(-1, keepdim=True) == 0) | ((channels < 0) | (channels >= width)).any(-1, keepdim=True)
        numbers = positive.float().sub_(scheme.largest + 1)
        if scheme.block > 1:
            # whole numbers below 2^24 from factors that bf16 holds: exact in any order, and in TF32. Only autocast,
            # which a trainer may have on, would round the sums
            with torch.autocast(codes.device.type, enabled=False):
                numbers = (numbers.view(-1, scheme.block) @ rotation).view(-1, width)
        out[part] = numbers.mul_(step.masked_fill_(missing, torch.nan))
        exact = side[part, 1 + scheme.kept :].view(torch.bfloat16).masked_fill(missing, torch.nan)
        out[part].scatter_(-1, channels.clamp_(0, width - 1), exact)
    return out.view(*lead, width)


def decode_bits(codes: NDArray[np.uint8], scales: NDArray[np.uint16], scheme: Scheme) -> NDArray[np.uint16]:
    """Decode arrays as a shard holds them.

    Args:
        codes: uint8 [..., code_bytes].
        scales: uint16 [..., 1 + 2 kept].
        scheme: From :func:`scheme`.

    Returns:
        bf16 bits, uint16 [..., H].
    """
    import torch

    parts = [np.require(part, requirements=["C", "W"]) for part in (codes, scales.view(np.int16))]
    states = decode(torch.from_numpy(parts[0]), torch.from_numpy(parts[1]), scheme)
    return states.view(torch.int16).numpy().view(np.uint16)


def measure_codes(
    codes: NDArray[np.uint8], scales: NDArray[np.uint16], scheme: Scheme
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return mean of squares and largest magnitude of each state vector without decoding it.

    The rotation changes no length, and the largest element is one of the kept ones. The error is that of rounding at
    the kept channels, which decoding discards.

    Args:
        codes: uint8 [..., code_bytes].
        scales: uint16 [..., 1 + 2 kept].
        scheme: From :func:`scheme`.

    Returns:
        float32 [...] twice; the mean of squares is not finite where decoding gives something that is not.
    """
    import torch

    side = scales.reshape(-1, scheme.columns)
    step, exact = (_as_float32(part) for part in (side[:, 0], side[:, 1 + scheme.kept :]))
    missing: NDArray[np.bool_] = np.any(side[:, 1 : 1 + scheme.kept] >= scheme.hidden_size, axis=-1)
    rows = torch.from_numpy(np.require(codes.reshape(-1, scheme.code_bytes), requirements=["C", "W"]))
    norm = np.empty(len(rows), np.float32)
    for part in _tiles(rows):
        positive = rows[part] if scheme.bits == 8 else _unpack(rows[part], scheme)
        missing[part] |= positive.numpy().min(-1) == 0
        numbers = positive.float().sub_(scheme.largest + 1)
        norm[part] = torch.linalg.vector_norm(numbers, dim=-1).numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        step[missing] = np.nan
        square = (np.square(norm * step) * scheme.block + np.square(exact).sum(-1)) / np.float32(scheme.hidden_size)
        largest = np.abs(exact).max(-1)
    return square.reshape(codes.shape[:-1]), largest.reshape(codes.shape[:-1])


def _as_float32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def encode_bits(states: NDArray[np.uint16], scheme: Scheme) -> tuple[NDArray[np.uint8], NDArray[np.uint16]]:
    """Encode arrays as a shard holds them: bf16 bits, uint16 [..., H], to codes and scales (:func:`encode`)."""
    import torch

    tensor = torch.from_numpy(np.require(states.view(np.int16), requirements=["C", "W"])).view(torch.bfloat16)
    codes, scales = encode(tensor, scheme)
    return codes.numpy(), scales.numpy().view(np.uint16)


def _rotate(x: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Return float32 [n, H]: each block times signs and Hadamard matrix, which makes it sqrt(block) times as long.

    Computes sums and differences of pairs in a fixed order, since a matrix product's last bits would depend on the
    batch.
    """
    import torch

    if scheme.block == 1:
        return x
    signs = torch.tensor(scheme.signs, dtype=torch.float32, device=x.device)
    now = (x.view(-1, scheme.block) * signs).t().contiguous()  # blocks side by side: every sum runs along memory
    then = torch.empty_like(now)
    half = 1
    while half < scheme.block:
        pairs, sums = (part.view(scheme.block // (2 * half), 2, -1) for part in (now, then))
        torch.add(pairs[:, 0], pairs[:, 1], out=sums[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=sums[:, 1])
        now, then, half = then, now, 2 * half
    return now.t().reshape(x.shape)


def _round(y: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whole numbers, float32 [n, H], and the step, float32 [n, 1], exact in bf16; NaN where y is not finite."""
    import torch

    top = y.abs().amax(-1, keepdim=True)
    top.masked_fill_(~top.isfinite(), torch.nan)
    best: tuple[torch.Tensor, torch.Tensor] | None = None
    least = top
    for clip in _CLIPS[scheme.name]:
        # rounded up, so that nothing is clipped unless a clip is wanted
        step = _bf16_above((top * (clip / (scheme.largest * scheme.block))).clamp_min(_SMALLEST_STEP))
        scaled = step * scheme.block
        numbers = (y / scaled).round_().clamp_(-scheme.largest, scheme.largest)
        if len(_CLIPS[scheme.name]) == 1:
            return numbers, step
        error = torch.addcmul(y, numbers, scaled, value=-1).square_().sum(-1, keepdim=True)
        if best is None:
            best, least = (numbers, step), error
            continue
        better = error < least
        best = torch.where(better, numbers, best[0]), torch.where(better, step, best[1])
        least = torch.where(better, error, least)
    assert best is not None
    return best


def _bf16_above(positive: torch.Tensor) -> torch.Tensor:
    """Return the least bf16 numbers, as float32, that are not below these float32."""
    import torch

    return ((positive.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)


def _matrix(scheme: Scheme) -> torch.Tensor:
    """Return float32 [block, block] that undoes the rotation: the Hadamard matrix, its columns with signs."""
    import torch

    hadamard = np.ones((1, 1), np.float32)
    while len(hadamard) < scheme.block:
        hadamard = np.kron(np.array([[1, 1], [1, -1]], np.float32), hadamard)
    return torch.from_numpy(hadamard * np.array(scheme.signs, np.float32))


def _pack(codes: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    low = codes[:, : scheme.code_bytes].clone()
    low[:, : scheme.hidden_size - scheme.code_bytes] |= codes[:, scheme.code_bytes :] << 4
    return low


def _unpack(packed: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    import torch

    return torch.cat([packed & 15, packed >> 4], dim=-1)[:, : scheme.hidden_size]


def _tiles(rows: torch.Tensor) -> Iterator[slice]:
    count = max(1, _TILE.get(rows.device.type, _TILE_DEVICE) // rows.shape[-1])
    return (slice(start, start + count) for start in range(0, len(rows), count))
