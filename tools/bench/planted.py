"""Plant a fault into what a build computes, so that it can be seen who finds it and what it costs.

Each fault is a context manager: a build inside it stores wrong states with right checksums and a right-looking record,
as a fault in somebody's modelling code or kernel would. Three places are enough: the target after it was loaded, what
its blocks show to the capture, and a call of an optional kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from hscache.kernels import observe as kernels
from hscache.model import loading
from hscache.model.loading import LoadedTarget

Change = Callable[[LoadedTarget], LoadedTarget]
Fault = Callable[[], AbstractContextManager[Any]]

CHUNK = 64
"""Tokens after which a kernel without a carried state begins anew."""


def loader(change: Change) -> Callable[..., LoadedTarget]:
    """Return what can stand for :func:`hscache.model.loading.load_target`: it changes what that loads."""
    load = loading.load_target
    return lambda *args: change(load(*args))


def in_target(change: Change) -> AbstractContextManager[Any]:
    """Change every target that is loaded inside."""
    return mock.patch.object(loading, "load_target", loader(change))


def shifted(by: int) -> Change:
    """Tap t shows the output of block t + ``by``."""

    def change(target: LoadedTarget) -> LoadedTarget:
        last = len(target.layers) - 1
        layers = [target.layers[min(max(i + by, 0), last)] for i in range(last + 1)]
        return dataclasses.replace(target, layers=nn.ModuleList(layers))

    return change


def reversed_taps(taps: Sequence[int]) -> Change:
    """The first tap shows the output of the last one's block, and so on."""

    def change(target: LoadedTarget) -> LoadedTarget:
        layers = list(target.layers)
        for tap, other in zip(taps, reversed(taps), strict=True):
            layers[tap] = target.layers[other]
        return dataclasses.replace(target, layers=nn.ModuleList(layers))

    return change


def shown(change: Callable[[LoadedTarget, Tensor], Tensor]) -> Change:
    """Taps show changed states [B, S, H], while the blocks behind them read the true ones."""

    def plant(target: LoadedTarget) -> LoadedTarget:
        stands = nn.ModuleList(nn.Identity() for _ in target.layers)
        for block, stand in zip(target.layers, stands, strict=True):

            def show(_module: nn.Module, _args: Any, output: Any, stand: nn.Module = stand) -> None:
                stand(change(target, output[0] if isinstance(output, tuple) else output))

            block.register_forward_hook(show)
        return dataclasses.replace(target, layers=stands)

    return plant


def unit(x: Tensor) -> Tensor:
    """Return [..., H] divided by its root mean square."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def one_late(states: Tensor) -> Tensor:
    """Return states [B, S, H] whose row t is that of token t - 1."""
    return torch.cat([states[:, :1], states[:, :-1]], 1)


def noise(states: Tensor) -> Tensor:
    """Return noise of the size of each state, the same in every run: nothing is left of what the target knew."""
    drawn = torch.randn(states.shape, generator=torch.Generator().manual_seed(0)).to(states)
    return drawn * states.square().mean(-1, keepdim=True).sqrt()


def norms_by_w(*, all_of_them: bool) -> Change:
    """The final norm, or every norm of its class, scales by w instead of 1 + w, and the record says so."""

    def change(target: LoadedTarget) -> LoadedTarget:
        final = target.norm
        final.forward = lambda x: (unit(x.float()) * final.weight.float()).type_as(x)  # type: ignore[method-assign,operator]
        if all_of_them:
            for norm in (m for m in target.model.modules() if type(m) is type(final) and m is not final):
                norm.weight -= 1  # the same, but a replaced forward inside a block is a kernel that a build refuses
        return dataclasses.replace(target, norm_kind="w", report={**target.report, "norm_kind": "w"})

    return change


def other_embedding(token: int, other: int) -> Change:
    """A token's embedding is that of another token."""

    def change(target: LoadedTarget) -> LoadedTarget:
        weight: Tensor = target.model.get_input_embeddings().weight  # type: ignore[operator]
        weight[token] = weight[other]
        return target

    return change


def in_kernel(op: str, wrong: Callable[..., Any], layer: int | None = None) -> AbstractContextManager[Any]:
    """Let calls of an optional op compute something else, under the right one's name.

    Args:
        op: A key of :data:`hscache.kernels.sites.OPS`.
        wrong: Takes a function that calls the true kernel, then the arguments.
        layer: The only decoder block where it does; None for all.
    """
    call = kernels.call

    def planted(site: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def true(*args: Any, **kwargs: Any) -> Any:
            return call(site, function, args, kwargs)

        here = site.op == op and layer in (None, site.layer_index)
        return wrong(true, *args, **kwargs) if here else true(*args, **kwargs)

    return mock.patch.object(kernels, "call", planted)


def without_l2norm(true: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The delta rule on queries and keys that were not normalised."""
    return true(*args, **{**kwargs, "use_qk_l2norm_in_kernel": False})


def state_lost(true: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The delta rule without the state that a chunk hands to the next: q, k, v, g and beta are [B, S, ...]."""
    sequences = {name: value for name, value in kwargs.items() if name in ("g", "beta")}
    parts = zip(*(x.split(CHUNK, 1) for x in (*args, *sequences.values())), strict=True)
    outputs = [
        true(*part[: len(args)], **{**kwargs, **dict(zip(sequences, part[len(args) :], strict=True))}) for part in parts
    ]
    return torch.cat([output for output, _ in outputs], 1), outputs[-1][1]


def conv_state_lost(true: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The convolution without the last tokens of the chunk before: x is [B, C, S]."""
    return torch.cat([true(part, *args, **kwargs) for part in x.split(CHUNK, -1)], -1)


def without_guards() -> AbstractContextManager[Any]:
    """Let a build run versions that are known to compute wrong states."""
    return mock.patch.object(kernels, "guard_findings", return_value=[])
