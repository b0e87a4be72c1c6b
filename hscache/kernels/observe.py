"""Observe and force the optional kernels of a loaded model while it runs.

The states that a drafter is trained on must come from one known implementation per op. A model shows what transformers
*would* run (:mod:`hscache.kernels.sites`); provenance records what *did* run. Inside :func:`observe_kernels` every call
of an optional op is counted by layer, op and implementation.

An op is forced by replacing the callable where the layer looks it up. That is a global of transformers' module, shared
by every model of the process, so only one observation runs at a time. When it ends, also by an exception, everything
is put back. The cost is one Python call and one dictionary look-up for each op and layer.

``auto`` keeps what transformers bound, except for Triton and CUDA kernels of a model on the CPU: there the torch
reference runs, and is counted as such. ``fla`` never falls back.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
from torch import nn

from hscache.errors import ConfigError, EnvironmentFault
from hscache.kernels.guards import guard_findings, import_op
from hscache.kernels.sites import OPS, Function, Implementation, KernelRecord, Site, classify, find_sites

Choice = Literal["auto", "torch", "fla", "bound"]
Force = Choice | Mapping[str, Choice]
"""One choice for all ops, or one for each op name with ``default`` for the others. ``bound`` is what transformers
bound, even on a device where it cannot run."""
Plans = dict[tuple[str, str], Function]
"""The implementation of each (layer, op)."""
Route = Callable[[Site, tuple[Any, ...], dict[str, Any]], Any]
"""Called in place of an op, with its site, positional and keyword arguments; returns the op's output."""

_CHOICES = get_args(Choice)
_exclusive = threading.Lock()


class KernelObservation:
    """Counts of an active :func:`observe_kernels`."""

    def __init__(self, sites: Sequence[Site], planned: Plans) -> None:
        self._sites, self._planned = sites, planned
        self._counts: Counter[tuple[str, str, int]] = Counter()
        self._seen: dict[tuple[str, str, int], tuple[Site, Function]] = {}

    def count(self, site: Site, function: Function) -> None:
        """Count one call of ``function`` at ``site``."""
        # by id, since a kernel need not be hashable; _seen keeps the function alive, so no other gets its id
        key = (site.layer, site.op, id(function))
        self._counts[key] += 1
        self._seen.setdefault(key, (site, function))

    def records(self) -> list[KernelRecord]:
        """Return what ran since the start or the last :meth:`take`, and with 0 calls what was planned but did not run.

        An op that ran in two implementations in one layer has two records.
        """
        ran: dict[tuple[str, str], list[KernelRecord]] = defaultdict(list)
        for key, (site, function) in self._seen.items():
            ran[site.layer, site.op].append(site.record(function, self._counts[key]))
        records = []
        for site in self._sites:
            at = (site.layer, site.op)
            records += ran.pop(at, []) or [site.record(self._planned[at])]
        return records + [record for stray in ran.values() for record in stray]

    def take(self) -> list[KernelRecord]:
        """Return :meth:`records` and start counting from zero: one call per shard."""
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
        guard: Refuse combinations of versions that are known to give wrong states. Only what must run in spite of a
            fault, such as the comparison that shows it, turns this off.

    Raises:
        ConfigError: ``kernel-choice`` for a choice or op that does not exist.
        EnvironmentFault: ``kernel-missing`` when a forced kernel cannot be imported, ``kernel-device`` when it cannot
            run on the model's device, ``kernel-fixed`` when a part has no torch implementation,
            ``kernel-wrong-states`` by a guard.
    """
    sites = find_sites(model)
    wants = _read_force(force, sites)
    planned = plans(sites, force)
    if guard:
        for finding in guard_findings(sites, planned):
            raise EnvironmentFault("kernel-wrong-states", finding.message, hint=finding.mend)
    observation = KernelObservation(sites, planned)
    chosen: dict[tuple[str, str, str], Function] = {}

    def route(site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # chosen at each call by where its tensors are, which need not be where the module's parameters are
        tensor = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)), None)
        key = (site.layer, site.op, tensor.device.type if tensor is not None else "cpu")
        if key not in chosen:
            chosen[key] = _choose(site, wants, key[2])
        function = chosen[key]
        observation.count(site, function)
        return call(site, function, args, kwargs)

    with intercept(sites, route, observation.count):
        yield observation


@contextmanager
def intercept(sites: Sequence[Site], route: Route, ran: Callable[[Site, Function], None]) -> Iterator[None]:
    """Send every call of an optional op inside the block through ``route``.

    Args:
        sites: What :func:`find_sites` returned, before any interception.
        route: Called instead of the op, with the site in the layer that is running.
        ran: Called after a module that cannot be replaced has run.
    """
    alone = _exclusive.acquire(blocking=False)
    assert alone, "kernel observations do not nest: transformers' globals are shared by the whole process"
    running: list[str] = []
    with ExitStack() as undo:
        undo.callback(_exclusive.release)
        for layer, module in {site.layer: site.module for site in sites}.items():
            _track(layer, module, running, undo)
        shared: dict[tuple[int, str], dict[str, Site]] = defaultdict(dict)
        for site in sites:
            if site.reference is None:
                hook = site.module.register_forward_hook(lambda *_, site=site: ran(site, site.bound()))
                undo.callback(hook.remove)
            else:
                shared[id(site.holder), site.key][site.layer] = site
        for by_layer in shared.values():
            _replace(by_layer, running, route, undo)
        yield


def call(site: Site, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an implementation of ``site``'s op with those keyword arguments that it takes, as transformers does."""
    if isinstance(site.value, nn.Module) and function is site.bound():
        return site.value(*args, **kwargs)  # a hub kernel: kernelize put it into the module that replaced the function
    if classify(function)[0] == "torch" and (kwargs.get("cu_seqlens") is not None or kwargs.get("seq_idx") is not None):
        # transformers' wrapper, which this call passes by, refuses them too; a build never packs
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
    """Return the implementation that would run at each site."""
    wants = _read_force(force, sites)
    return {(site.layer, site.op): _choose(site, wants, device or _device(site.module)) for site in sites}


def gpu_only(kind: Implementation) -> bool:
    """Return whether an implementation refuses CPU tensors; under Triton's interpreter, Triton kernels take them."""
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
        if op != "default" and op not in OPS:
            raise ConfigError("kernel-choice", f"kernels: {op} is not a known op; known: {', '.join(OPS)}")
        named = here if op == "default" else {op}
        if want == "fla" and here and not any(OPS[name].package == "fla" for name in named if name in OPS):
            raise ConfigError(
                "kernel-choice", f"kernels: fla implements none of {', '.join(sorted(named))}", hint="use auto or torch"
            )
    return wants


def _choose(site: Site, wants: Mapping[str, Choice], device: str) -> Function:
    want = wants.get(site.op, wants.get("default", "auto"))
    bound, reference = site.bound(), site.reference
    kind, source = classify(bound)
    if want == "fla" and site.op in OPS and OPS[site.op].package == "fla":
        if kind != "fla":
            bound = import_op(site.op)
        if device == "cpu" and gpu_only("fla"):
            raise EnvironmentFault(
                "kernel-device", f"{site.layer}: fla is forced for {site.op}, but the model is on the CPU",
                hint="run on a GPU, or use the torch reference",
            )  # fmt: skip
        return bound
    if want == "torch" and reference is None:
        raise EnvironmentFault(
            "kernel-fixed", f"{site.layer}: torch is forced, but this part is {source} and has no other implementation",
            hint="uninstall the package that provides it, or use auto",
        )  # fmt: skip
    if reference is not None and (want == "torch" or (want != "bound" and device == "cpu" and gpu_only(kind))):
        return reference
    return bound


def _device(module: nn.Module) -> str:
    parameter = next(module.parameters(), None)
    return parameter.device.type if parameter is not None else "cpu"


def _replace(by_layer: Mapping[str, Site], running: Sequence[str], route: Route, undo: ExitStack) -> None:
    """Put one function in the place that the layers of ``by_layer`` share; it routes calls by the running layer."""
    first = next(iter(by_layer.values()))
    stray = dataclasses.replace(first, layer="?", layer_index=None)
    holder, key = first.holder, first.key

    def routed(*args: Any, **kwargs: Any) -> Any:
        site = by_layer.get(running[-1], stray) if running else stray
        return route(site, args, kwargs)

    undo.callback(holder.__setitem__, key, holder[key])
    holder[key] = routed


def _track(layer: str, module: nn.Module, running: list[str], undo: ExitStack) -> None:
    """Keep the name of the layer whose forward is running on top of ``running``."""
    enter = module.register_forward_pre_hook(lambda *_: running.append(layer))
    leave = module.register_forward_hook(lambda *_: running.pop() and None, always_call=True)
    undo.callback(enter.remove)
    undo.callback(leave.remove)
