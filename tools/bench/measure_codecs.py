"""Measure lossy schemes on the states of a store: the table that leads to the codecs ``int8`` and ``int4``.

::

    python tools/bench/measure_codecs.py runs/demo-smollm2/store runs/demo/store [--json OUT.json]

Every scheme works per (token, tap) and is tried with 8, 6 and 4 bits:

* ``absmax``: one scale, the largest magnitude over the largest number;
* ``channel rms``: each channel is divided by its RMS over the store first; ``/32``: a scale for each 32 channels;
* ``rotated``: a Hadamard rotation in blocks of 64 channels first;
* ``rotated, 8 channels exact``: the tap's 8 largest channels, the same for all tokens, are kept in bf16;
* ``rotated, large tokens exact``: state vectors beyond 20 times the median are kept in bf16;
* ``rotated, top H/128 exact``: the vector's own largest elements are kept, with their channel; ``/256`` half as many;
* ``..., clipped``: the best of three clips of the scale, by squared error.

``int8`` and ``int4`` are the product's own functions. Errors are over all taps and the final state: ``rel L2`` is the
mean relative L2 error; ``worst cos`` the smallest cosine of any state vector, first tokens included; ``channel`` the
error with each channel divided by its RMS over all tokens, of the worst tap; ``KL`` in nats through ``lm_head`` where
the final state is replaced, of supervised tokens. Speed is bf16 bytes per second of processor time on one thread, 512
vectors at a time; that of the product's functions includes what makes their results the same everywhere.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

import hscache
from hscache.console import say, table
from hscache.distance import compare_rows, kl_nats
from hscache.rows import supervised_positions
from hscache.store import lossy
from hscache.store.head import load_head

Tensors = dict[str, torch.Tensor]
KL_ROWS = 512


@dataclass(frozen=True)
class Line:
    """A scheme's figures."""

    scheme: str
    bits: int
    rel_l2: float
    worst_cosine: float
    channel_error: float
    bytes_per_element: float
    kl_nats: float
    encode_mb_s: float
    decode_mb_s: float


@dataclass(frozen=True)
class Way:
    """One scheme: float32 [N, H] of one tap to what is stored, and back."""

    name: str
    bits: int
    encode: Callable[[torch.Tensor, int], Tensors]
    decode: Callable[[Tensors, int], torch.Tensor]
    side_bytes: float
    """Bytes of a vector beside its codes."""


class States:
    """All state vectors of a store, bf16 [N, C, H], the final state last, and what a scheme may know of them."""

    def __init__(self, path: Path) -> None:
        store = hscache.open(path)
        samples = [store[i] for i in range(len(store))]
        self.bf16 = torch.cat([torch.cat([s.hidden_states, s.final_state[:, None]], dim=1) for s in samples])
        self.rms_CH = torch.stack([self.bf16[:, c].float().square().mean(0).sqrt() for c in range(self.bf16.shape[1])])
        starts = np.cumsum([0, *store.n_tokens[:-1]])
        before = np.concatenate(
            [n + supervised_positions(s.loss_mask) - 1 for n, s in zip(starts, samples, strict=True)]
        )
        self.before = torch.from_numpy(before[np.unique(np.linspace(0, len(before) - 1, KL_ROWS).astype(int))])
        self.head = load_head(path / "target")
        self.logits = self.head.logits(self.bf16[self.before, -1])


def ways(states: States, bits: int) -> Iterator[Way]:
    """Yield the schemes to compare, at so many bits."""
    width = states.bf16.shape[-1]
    scheme = lossy.scheme("int8", width)
    matrix = lossy._matrix(scheme)
    largest = 2 ** (bits - 1) - 1

    def rotate(x: torch.Tensor) -> torch.Tensor:
        return (x.view(-1, scheme.block) @ matrix.T).view(x.shape) / scheme.block**0.5

    def back(y: torch.Tensor) -> torch.Tensor:
        return (y.view(-1, scheme.block) @ matrix).view(y.shape) / scheme.block**0.5

    def same(x: torch.Tensor) -> torch.Tensor:
        return x

    def rounded(x: torch.Tensor, group: int | None = None, clips: tuple[float, ...] = (1.0,)) -> Tensors:
        grouped = x.view(len(x), -1, group or width)
        best: Tensors = {}
        for clip in clips:
            step = (grouped.abs().amax(-1, keepdim=True) * (clip / largest)).clamp_min(1e-30).bfloat16().float()
            numbers = (grouped / step).round_().clamp_(-largest, largest)
            error = (numbers * step - grouped).square().sum(-1, keepdim=True) if len(clips) > 1 else step
            better = error < best["error"] if best else torch.ones_like(error, dtype=torch.bool)
            now = {"numbers": numbers, "step": step, "error": error}
            best = {name: torch.where(better, now[name], best[name]) for name in now} if best else now
        return {"numbers": best["numbers"].to(torch.int8), "step": best["step"]}

    def restored(stored: Tensors) -> torch.Tensor:
        return (stored["numbers"].float() * stored["step"]).flatten(1)

    def plain(
        name: str,
        there: Callable[[torch.Tensor], torch.Tensor] = same,
        again: Callable[[torch.Tensor], torch.Tensor] = same,
    ) -> Way:
        return Way(name, bits, lambda x, c: rounded(there(x)), lambda s, c: again(restored(s)), 2)

    def exact(name: str, keep: Callable[[torch.Tensor, int], torch.Tensor], side: float, **how: object) -> Way:
        """Keep elements, by channel [N, k], and rotate the rest."""

        def encode(x: torch.Tensor, column: int) -> Tensors:
            channels = keep(x, column)
            rest = x.scatter(-1, channels, 0.0)
            return {**rounded(rotate(rest), **how), "channels": channels, "values": x.gather(-1, channels)}  # type: ignore[arg-type]

        return Way(name, bits, encode, lambda s, c: back(restored(s)).scatter(-1, s["channels"], s["values"]), side)

    def large(x: torch.Tensor) -> torch.Tensor:
        size = torch.linalg.vector_norm(x, dim=-1)
        return size > 20 * size.median()

    def largest_elements(count: int) -> Callable[[torch.Tensor, int], torch.Tensor]:
        return lambda x, column: x.abs().topk(count, dim=-1).indices

    def tokens_encode(x: torch.Tensor, column: int) -> Tensors:
        return {**rounded(rotate(x)), "large": large(x), "values": x[large(x)]}

    def tokens_decode(stored: Tensors, column: int) -> torch.Tensor:
        x = back(restored(stored))
        x[stored["large"]] = stored["values"]
        return x

    def channel_rms(name: str, group: int | None) -> Way:
        side = 2 if group is None else 2 * width / group
        return Way(
            name,
            bits,
            lambda x, c: rounded(x / states.rms_CH[c], group),
            lambda s, c: restored(s) * states.rms_CH[c],
            side,
        )

    yield plain("absmax")
    yield channel_rms("channel rms", None)
    yield channel_rms("channel rms /32", 32)
    yield plain("rotated", rotate, back)
    yield Way("rotated, large tokens exact", bits, tokens_encode, tokens_decode, 2)
    yield exact(
        "rotated, 8 channels exact",
        lambda x, c: states.rms_CH[c].topk(8).indices.expand(len(x), 8),
        2 + 16,
    )
    for divisor in (128, 256):
        count = max(1, width // divisor)
        name = f"rotated, top H/{divisor} exact"
        yield exact(name, largest_elements(count), 2 + 4 * count)
        yield exact(f"{name}, clipped", largest_elements(count), 2 + 4 * count, clips=(1.0, 0.85, 0.7))


def product(states: States, name: str) -> Way:
    """Return one of the codecs that a store can have."""
    scheme = lossy.scheme(name, states.bf16.shape[-1])

    def encode(x: torch.Tensor, column: int) -> Tensors:
        return dict(zip(("codes", "scales"), lossy.encode(x.bfloat16(), scheme), strict=True))

    def decode(stored: Tensors, column: int) -> torch.Tensor:
        return lossy.decode(stored["codes"], stored["scales"], scheme)

    return Way(f"{name} (the product's)", scheme.bits, encode, decode, 2 * scheme.columns)


def measure(way: Way, states: States) -> Line:
    """Encode and decode every state and return the figures."""
    n, columns, width = states.bf16.shape
    decoded, seconds, extra = torch.empty_like(states.bf16), [0.0, 0.0], 0.0
    for column in range(columns):
        for start in range(0, n, 512):
            x = states.bf16[start : start + 512, column].float()
            begin = time.process_time()
            stored = way.encode(x, column)
            middle = time.process_time()
            decoded[start : start + 512, column] = way.decode(stored, column)
            seconds = [seconds[0] + middle - begin, seconds[1] + time.process_time() - middle]
            if "large" in stored:  # whole vectors: their size depends on the data
                extra += 2 * stored["values"].numel()
    rel_l2, apart = compare_rows(states.bf16, decoded)
    wrong = [(decoded[:, c].float() - states.bf16[:, c].float()) / states.rms_CH[c] for c in range(columns)]
    return Line(
        way.name,
        way.bits,
        float(rel_l2.mean()),
        1 - float(apart.max()),
        max(float(part.square().mean().sqrt()) for part in wrong),
        way.bits / 8 + way.side_bytes / width + extra / states.bf16.numel(),
        float(kl_nats(states.logits, states.head.logits(decoded[states.before, -1])).mean()),
        *(states.bf16.nbytes / 1e6 / s for s in seconds),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stores", nargs="+", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    out: dict[str, list[dict[str, object]]] = {}
    for path in arguments.stores:
        states = States(path)
        lines = []
        for bits in (8, 6, 4):
            name = {8: "int8", 4: "int4"}.get(bits)
            for way in [*ways(states, bits), *([product(states, name)] if name else [])]:
                say(f"{path}: {way.name}, {bits} bits")
                lines.append(measure(way, states))
        out[str(path)] = [asdict(line) for line in lines]
        forms = {
            "rel L2": ".2%", "worst cos": ".5f", "channel": ".2%", "bytes/el": ".3f", "smaller": ".2f",
            "KL nats": ".1e", "encode MB/s": ".0f", "decode MB/s": ".0f",
        }  # fmt: skip
        rows = [
            (
                line.bits, line.scheme, line.rel_l2, line.worst_cosine, line.channel_error, line.bytes_per_element,
                2 / line.bytes_per_element, line.kl_nats, line.encode_mb_s, line.decode_mb_s,
            )
            for line in lines
        ]  # fmt: skip
        title = f"{path}: {states.bf16.shape[0]} tokens, {states.bf16.shape[1]} columns"
        table(title, ["bits", "scheme", *forms.items()], rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
