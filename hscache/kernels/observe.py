"""Observe and force the optional kernels of a loaded model while it runs.

The states that a drafter is trained on must come from one known implementation per op. What transformers *would* run
can be read from the model (:mod:`hscache.kernels.sites`), but provenance records what *did* run: inside
:func:`observe_kernels` every call of an optional op is counted per layer, op and implementation.

Forcing works by replacing the callable at the place where the layer looks it up. For transformers >= 5.15 that is a
module global, shared by every model of the process; so an observation is exclusive, and everything is put back when
it ends, also after an exception. The cost is one Python call and a dictionary look-up per op and layer.

``auto`` keeps what transformers bound, except that Triton and CUDA kernels get no CPU tensors: those go to the torch
reference, and are counted as such. ``fla`` never falls back.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import nn

from hscache.errors import ConfigError, EnvironmentFault
from hscache.kernels.guards import guard_findings, import_op
from hscache.kernels.sites import OPS, Function, Implementation, KernelRecord, Site, classify, find_sites, op_name

Choice = Literal["auto", "torch", "fla", "bound"]
Force = Choice | Mapping[str, Choice]
"""One choice for all ops, or one per op name, with ``default`` for the others. ``bound`` is what transformers bound,
even on a device where it cannot run."""
Plans = dict[tuple[str, str], Function | None]
Route = Callable[[Site, tuple[Any, ...], dict[str, Any]], Any]

_CHOICES = ("auto", "torch", "fla", "bound")
_active = False


class KernelObservation:
    """Counts of an active :func:`observe_kernels`."""

    def __init__(self, sites: Sequence[Site], plan: Callable[[Site], Function | None]) -> None:
        self._sites, self._plan = sites, plan
        self._counts: Counter[tuple[str, str, int]] = Counter()
        self._seen: dict[tuple[str, str, int], tuple[Site, Function | None]] = {}

    def count(self, site: Site, function: Function | None) -> None:
        """Count one call of ``function`` at ``site``."""
        # keyed by identity, since a kernel need not be hashable; _seen keeps it alive, so that the id stays its own
        key = (site.layer, site.op, id(function))
        self._counts[key] += 1
        self._seen.setdefault(key, (site, function))

    def records(self) -> list[KernelRecord]:
        """Return what ran since the start or the last :meth:`take`; what is planned, with 0 calls, where nothing ran.

        A layer's op that ran in two implementations has two records.
        """
        ran: dict[tuple[str, str], list[KernelRecord]] = defaultdict(list)
        for key, (site, function) in self._seen.items():
            ran[site.layer, site.op].append(site.record(function, self._counts[key]))
        records = []
        for site in self._sites:
            records += ran.pop((site.layer, site.op), []) or [site.record(self._plan(site))]
        return records + [record for stray in ran.values() for record in stray]

    def take(self) -> list[KernelRecord]:
        """Return :meth:`records` and begin to count anew: one call per shard."""
        records = self.records()
        self._counts.clear()
        self._seen.clear()
        return records


@contextmanager
def observe_kernels(model: nn.Module, force: Force = "auto", *, guard: bool = True) -> Iterator[KernelObservation]:
    """Count, and where asked force, the optional kernels that ``model`` runs inside the block.

    Args:
        model: A loaded transformers model, on the device on which it will run.
        force: ``auto`` | ``torch`` | ``fla`` | ``bound``, or a mapping from op names to one of these.
        guard: Refuse combinations of versions that are known to give wrong states. Only a comparison that is meant
            to show the fault turns this off.

    Raises:
        ConfigError: ``kernel-choice`` for a choice or op that does not exist.
        EnvironmentFault: ``kernel-missing`` when a forced kernel cannot be imported, ``kernel-device`` when it cannot
            run where the model is, ``kernel-fixed`` when a part's implementation cannot be changed,
            ``kernel-wrong-states`` by a guard.
    """
    sites = find_sites(model)
    wants = _read_force(force, sites)
    planned = plans(sites, force)
    if guard:
        for finding in guard_findings(sites, planned):
            raise EnvironmentFault("kernel-wrong-states", finding.message, hint=finding.mend)
    observation = KernelObservation(sites, lambda site: planned[site.layer, site.op])
    chosen: dict[tuple[str, str, str], Function | None] = {}

    def route(site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)), None)
        key = (site.layer, site.op, tensor.device.type if tensor is not None else "cpu")
        if key not in chosen:
            chosen[key] = _choose(site, wants, key[2])
        function = chosen[key]
        observation.count(site, function)
        return call(site, function, args, kwargs)

    with intercept(model, sites, route, observation.count, inline={s.layer for s in sites if _inline(s, planned)}):
        yield observation


@contextmanager
def intercept(
    model: nn.Module,
    sites: Sequence[Site],
    route: Route,
    ran: Callable[[Site, Function | None], None],
    *,
    inline: Collection[str] = (),
) -> Iterator[None]:
    """Send every call of an optional op inside the block through ``route``.

    Args:
        model: The model whose modules hold the sites.
        sites: What :func:`find_sites` returned, before any interception.
        route: Called with the site (of the layer that is running), positional and keyword arguments.
        ran: Called with implementations that are not called through a site (inline conv, whole modules).
        inline: Layers whose conv runs inline, as transformers <= 5.14 does for a slot of None.
    """
    global _active
    assert not _active, "kernel observations do not nest: the globals of transformers are shared by the process"
    running: list[str] = []
    with ExitStack() as undo:
        _active = True
        undo.callback(_deactivate)
        for layer, module in {site.layer: site.module for site in sites}.items():
            _track(layer, module, running, undo)
        shared: dict[tuple[int, str], dict[str, Site]] = defaultdict(dict)
        for site in sites:
            if site.wiring == "closure" or (site.wiring == "attribute" and site.bound() is not None):
                shared[id(site.holder), site.key][site.layer] = site
            elif site.wiring == "method":
                _replace(site.holder, "cuda_kernels_forward", _tap({site.layer: site}, running, route), undo)
                assert site.reference is not None
                _replace(site.holder, site.reference.__name__, _tap_slow(site, ran), undo)
            elif site.wiring == "module" and site.reference is not None:
                _replace(site.holder, site.key, _tap({site.layer: site}, running, route), undo)
            elif site.wiring in ("module", "unknown"):
                undo.callback(_count_module(site, ran).remove)
            if site.wiring == "attribute" and site.op == "causal_conv1d_fn":
                conv = getattr(site.module, "conv1d", None)
                if isinstance(conv, nn.Module):
                    undo.callback(_count_inline(conv, site, ran).remove)
        for (_, key), by_layer in shared.items():
            site = next(iter(by_layer.values()))
            to_inline = site.wiring == "attribute" and site.op == "causal_conv1d_fn" and site.layer in inline
            _replace(site.holder, key, None if to_inline else _tap(by_layer, running, route), undo)
        yield


def call(site: Site, function: Function | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an implementation of ``site``'s op with the arguments that it knows, as transformers' wrapper does."""
    assert function is not None, f"{site.layer}: {site.op} has no such implementation"
    if isinstance(site.value, nn.Module) and function is site.bound():
        return site.value(*args, **kwargs)  # a hub kernel: kernelize put it into the module that replaced the function
    if site.wiring == "method":
        return function(site.module, *args, **kwargs)
    if classify(function)[0] == "torch" and (kwargs.get("cu_seqlens") is not None or kwargs.get("seq_idx") is not None):
        # older wrappers drop these silently and mix the samples; a build never packs
        raise AssertionError(f"{site.layer}: {site.op}: the torch reference does not separate packed samples")
    known = _parameters(function)
    return function(*args, **{name: value for name, value in kwargs.items() if name in known})


def planned_records(model: nn.Module, force: Force = "auto", *, device: str | None = None) -> list[KernelRecord]:
    """Return what :func:`observe_kernels` would run, without running it; every count is 0.

    Args:
        model: A loaded model, or one on the meta device.
        force: As for :func:`observe_kernels`.
        device: Device type to plan for (``cuda``, ``cpu``); by default the one the model is on.
    """
    sites = find_sites(model)
    planned = plans(sites, force, device)
    return [site.record(planned[site.layer, site.op]) for site in sites]


def plans(sites: Sequence[Site], force: Force = "auto", device: str | None = None) -> Plans:
    """Return the implementation that would run at each site, by (layer, op); None where it is inline code or none."""
    wants = _read_force(force, sites)
    return {(site.layer, site.op): _choose(site, wants, device or _device(site.module)) for site in sites}


def needs_gpu(function: object) -> bool:
    """Return whether a function refuses CPU tensors."""
    return gpu_only(classify(function)[0])


def gpu_only(kind: Implementation) -> bool:
    """Return whether an implementation refuses CPU tensors; Triton's interpreter is a CPU that it does not refuse."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return kind == "causal_conv1d" or (kind in ("fla", "mamba_ssm") and not interpreted)


@lru_cache(maxsize=256)
def _parameters(function: Function) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _read_force(force: Force, sites: Sequence[Site]) -> dict[str, Choice]:
    wants: dict[str, Choice] = {"default": force} if isinstance(force, str) else dict(force)
    here = {site.op for site in sites}
    for op, want in wants.items():
        if want not in _CHOICES:
            raise ConfigError("kernel-choice", f"kernels: {want!r} for {op}: expected one of {', '.join(_CHOICES)}")
        if op != "default" and op_name(op) not in OPS:
            raise ConfigError("kernel-choice", f"kernels: {op} is not a known op; known: {', '.join(OPS)}")
        named = here if op == "default" else {op}
        if want == "fla" and here and not any(OPS[name].package == "fla" for name in named if name in OPS):
            raise ConfigError(
                "kernel-choice", f"kernels: fla implements none of {', '.join(sorted(named))}", hint="use auto or torch"
            )
    return wants


def _choose(site: Site, wants: Mapping[str, Choice], device: str) -> Function | None:
    want = wants.get(site.op, wants.get("default", "auto"))
    bound = site.bound()
    if want == "fla" and site.op in OPS and OPS[site.op].package == "fla":
        function = bound if classify(bound)[0] == "fla" else import_op(site.op)
        if device == "cpu" and needs_gpu(function):
            raise EnvironmentFault(
                "kernel-device", f"{site.layer}: fla is forced for {site.op}, but the model is on the CPU",
                hint="run on a GPU, or use the torch reference",
            )  # fmt: skip
        return function
    if want == "torch" and (site.wiring == "unknown" or (site.wiring == "module" and site.reference is None)):
        raise EnvironmentFault(
            "kernel-fixed", f"{site.layer}: torch is forced, but this part is {classify(bound)[1]} and has no other",
            hint="uninstall the package that provides it, or use auto",
        )  # fmt: skip
    mendable = site.reference is not None or site.wiring == "attribute"  # an attribute of None runs inline torch
    if want == "torch" or (want != "bound" and device == "cpu" and mendable and needs_gpu(bound)):
        return site.reference
    if site.wiring == "method" and device != "cuda":
        return site.reference
    return bound


def _inline(site: Site, planned: Plans) -> bool:
    return site.wiring == "attribute" and site.op == "causal_conv1d_fn" and planned[site.layer, site.op] is None


def _device(module: nn.Module) -> str:
    parameter = next(module.parameters(), None)
    return parameter.device.type if parameter is not None else "cpu"


def _tap(by_layer: Mapping[str, Site], running: Sequence[str], route: Route) -> Function:
    first = next(iter(by_layer.values()))
    stray = dataclasses.replace(first, layer="?", layer_index=None)

    def tap(*args: Any, **kwargs: Any) -> Any:
        site = by_layer.get(running[-1], stray) if running else stray
        return route(site, args, kwargs)

    return tap


def _tap_slow(site: Site, ran: Callable[[Site, Function | None], None]) -> Function:
    """Return a stand-in for a mixer's slow method: transformers called it, so there is nothing left to choose."""

    def tap(*args: Any, **kwargs: Any) -> Any:
        ran(site, site.reference)
        return call(site, site.reference, args, kwargs)

    return tap


def _track(layer: str, module: nn.Module, running: list[str], undo: ExitStack) -> None:
    """Keep the name of the layer whose forward is running on top of ``running``."""
    enter = module.register_forward_pre_hook(lambda *_: running.append(layer))
    leave = module.register_forward_hook(lambda *_: running.pop() and None, always_call=True)
    undo.callback(enter.remove)
    undo.callback(leave.remove)


def _replace(holder: dict[str, Any], key: str, value: Any, undo: ExitStack) -> None:
    if key in holder:
        undo.callback(holder.__setitem__, key, holder[key])
    else:
        undo.callback(holder.pop, key)
    holder[key] = value


def _count_module(site: Site, ran: Callable[[Site, Function | None], None]) -> Any:
    return site.module.register_forward_hook(lambda *_: ran(site, site.bound()))


def _count_inline(conv: nn.Module, site: Site, ran: Callable[[Site, Function | None], None]) -> Any:
    return conv.register_forward_hook(lambda *_: ran(site, None))


def _deactivate() -> None:
    global _active
    _active = False
