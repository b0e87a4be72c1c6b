"""Find the places where a transformers model may run an optional kernel, and which implementation is bound there.

Linear-attention and state-space layers exist twice: as a readable torch reference inside transformers, and as kernels
of other packages (fla, causal-conv1d, mamba-ssm, or kernels from the hub). transformers decides which one runs when it
is imported, op by op, and no public function reports the choice. It is made in two places:

``closure``  The layer calls a global function of its module. A decorator made that function and keeps the chosen
             implementation in its closure, so a function called ``torch_...`` may run fla's kernel.
``module``   A whole submodule comes from another package, or ``kernelize`` replaced its ``forward``.

A recurrent layer in which neither is found is reported with the implementation ``unknown``, never left out: an empty
list must mean "nothing to choose". Finding the sites takes one pass over the modules and runs nothing.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from torch import nn

Wiring = Literal["closure", "module", "unknown"]
Implementation = Literal["torch", "fla", "causal_conv1d", "mamba_ssm", "hub", "unknown"]
Phase = Literal["prefill", "decode", "training"]
Function = Callable[..., Any]


@dataclass(frozen=True)
class OpFacts:
    """Which package implements an op, where it keeps it, and when a layer calls it."""

    package: Literal["fla", "causal_conv1d", "mamba_ssm"]
    module: str
    phase: Phase = "prefill"


OPS: dict[str, OpFacts] = {
    "chunk_gated_delta_rule": OpFacts("fla", "fla.ops.gated_delta_rule"),
    "fused_recurrent_gated_delta_rule": OpFacts("fla", "fla.ops.gated_delta_rule", "decode"),
    "chunk_kda": OpFacts("fla", "fla.ops.kda"),
    "fused_recurrent_kda": OpFacts("fla", "fla.ops.kda", "decode"),
    "causal_conv1d_fn": OpFacts("causal_conv1d", "causal_conv1d"),
    "causal_conv1d_update": OpFacts("causal_conv1d", "causal_conv1d", "decode"),
    "selective_scan_fn": OpFacts("mamba_ssm", "mamba_ssm.ops.selective_scan_interface"),
    "mamba_chunk_scan_combined": OpFacts("mamba_ssm", "mamba_ssm.ops.triton.ssd_combined"),
    "selective_state_update": OpFacts("mamba_ssm", "mamba_ssm.ops.triton.selective_state_update", "decode"),
    "mamba_inner_fn": OpFacts("mamba_ssm", "mamba_ssm.ops.selective_scan_interface", "training"),
    "mamba_split_conv1d_scan_combined": OpFacts("mamba_ssm", "mamba_ssm.ops.triton.ssd_combined", "training"),
}
"""Ops by the name that their kernel package gives them. Only ``prefill`` ops run while states are cached."""

_IMPLEMENTATIONS: dict[str, Implementation] = {
    "transformers": "torch", "torch": "torch", "fla": "fla", "causal_conv1d": "causal_conv1d", "mamba_ssm": "mamba_ssm",
    "kernels": "hub",
}  # fmt: skip
"""What a callable is, by the package that defines it."""
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|$)")
_ATTENTION_TYPES = re.compile(r"attention$|^attn$|^moe$|^mlp$")
_LINEAR_ATTENTION = re.compile(r"linear|lightning|delta|kda")


@dataclass(frozen=True)
class KernelRecord:
    """One optional op of one layer, what implements it there, and how often that ran."""

    layer: str
    """Name of the mixer below the backbone, such as ``layers.0.linear_attn``: the same under every Auto class."""
    layer_index: int | None
    op: str
    wiring: Wiring
    implementation: Implementation
    source: str
    """``module:qualname`` of what runs."""
    source_hash: str | None
    """First 16 hex digits of the sha256 of its source; None where there is no Python source."""
    calls: int = 0

    @property
    def phase(self) -> Phase:
        """When a layer calls the op; ops that are not in :data:`OPS` count as prefill."""
        return OPS[self.op].phase if self.op in OPS else "prefill"

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Site:
    """A place in a loaded model from which an optional op is called: its facts, and what is needed to replace the op.

    Attributes:
        layer: Name of the mixer below the backbone.
        layer_index: Index of the decoder layer; None outside the stack of layers.
        op: Name of the op, a key of :data:`OPS`; for a whole module, the module's own name.
        wiring: How the layer finds the implementation.
        module: The mixer, or the module that is itself the optional part.
        holder: The dictionary in which the layer looks ``key`` up at each call: the globals of transformers' module,
            or a module's ``__dict__``.
        key: See ``holder``.
        value: What the look-up gave when the site was found, before anything replaced it.
        reference: The torch implementation; None where there is none.
    """

    layer: str
    layer_index: int | None
    op: str
    wiring: Wiring
    module: nn.Module = field(repr=False, compare=False)
    holder: dict[str, Any] = field(repr=False, compare=False)
    key: str
    value: Function = field(repr=False, compare=False)
    reference: Function | None = field(repr=False, compare=False)

    def bound(self) -> Function:
        """Return the implementation that transformers chose."""
        if self.wiring != "closure":
            return self.value
        wrapper, hub = _peel(self.value)
        chosen: Function = _nonlocals(wrapper)["implementation"] if hub is None else hub
        return chosen

    def record(self, function: Function, calls: int = 0) -> KernelRecord:
        """Return the record of ``function`` running at this site."""
        implementation, source = classify(function)
        if self.wiring == "unknown":
            implementation, function, source = "unknown", type(self.module), _name(type(self.module))
        return KernelRecord(
            self.layer, self.layer_index, self.op, self.wiring, implementation, source, source_hash(function), calls
        )


def find_sites(model: nn.Module) -> list[Site]:
    """Return every optional-kernel site of ``model``'s backbone, in the order of its modules.

    Args:
        model: A loaded transformers model (any Auto class), or one on the meta device.

    Returns:
        Sites; empty for a dense model, which has nothing to choose. A recurrent layer in which no op is found, and a
        module whose code is neither transformers' nor a kernel package's, gives one site with the wiring ``unknown``.
    """
    whole: Any = model
    backbone: nn.Module = whole.get_decoder()
    sites: list[Site] = []
    foreign: list[str] = []  # what lies inside a module that is itself a site is not looked at
    for name, module in backbone.named_modules():
        if not name.startswith(tuple(foreign)):
            of_module = _module_site(name, module)
            sites += [*_mixer_sites(name, module), *of_module]
            foreign += [f"{name}." for _ in of_module]
    return sites + _unexplained_layers(backbone, {site.layer_index for site in sites})


def classify(function: Function) -> tuple[Implementation, str]:
    """Return which kind of implementation a callable is, and its ``module:qualname``."""
    target = inspect.unwrap(function)
    target = getattr(target, "__func__", target)
    module = _module(target)
    implementation = _IMPLEMENTATIONS.get(module.split(".")[0], "unknown")
    file = str(getattr(sys.modules.get(module), "__file__", ""))
    if implementation == "unknown" and ("kernels-community" in file or "/kernels--" in file):
        implementation = "hub"  # imported from the hub's cache under a made-up name
    return implementation, _name(target)


def source_hash(function: Function) -> str | None:
    """Return the first 16 hex digits of the sha256 of a callable's Python source, None where it has none.

    The hash covers the op's entry point alone; the package versions in the path's digest cover what that calls.
    """
    try:
        text = _source(inspect.unwrap(function))
    except (OSError, TypeError):
        return None
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache  # every shard asks again for every layer, and for each answer Python tokenizes the file
def _source(code: Any) -> str:
    return inspect.getsource(code)


def _peel(value: object) -> tuple[Function | None, Function | None]:
    """Split a module global into the decorator's function and the hub kernel that replaced it.

    Returns:
        The function whose closure holds ``implementation`` (None when ``value`` is no such function), and the forward
        that ``kernelize`` put over it (None when it did not).
    """
    hub: Function | None = None
    if isinstance(value, nn.Module):
        # the `kernels` package turns the function into a module of the whole process; kernelize replaces its forward
        own = value.__dict__.get("forward")
        own = getattr(own, "__func__", own)
        if own is not None and own is not type(value).forward:
            hub = own
        value = _nonlocals(type(value).forward).get("func")
    if isinstance(value, types.FunctionType) and {"implementation", "func_name"} <= set(value.__code__.co_freevars):
        return value, hub
    return None, hub


def _mixer_sites(name: str, module: nn.Module) -> Iterator[Site]:
    """Yield the sites of the optional ops that a module's ``forward`` calls."""
    cls = type(module)
    if not isinstance(cls.forward, types.FunctionType) or cls.__module__.split(".")[0] == "torch":
        return
    globals_ = inspect.unwrap(cls.forward).__globals__
    for key in sorted(_names_in_forward(cls)):
        wrapper: Any = _peel(globals_.get(key))[0]
        if wrapper is not None:
            op = str(_nonlocals(wrapper)["func_name"])
            index, reference = _layer_index(name, module), wrapper.__wrapped__
            yield Site(name, index, op, "closure", module, globals_, key, globals_[key], reference)


def _module_site(name: str, module: nn.Module) -> list[Site]:
    """Return the one site of a module that is another package's or whose forward was replaced; else none."""
    index = _layer_index(name, module)
    replaced = "forward" in module.__dict__
    kind, _ = classify(module.forward)
    # the forward that accelerate's hooks put in place unwraps to transformers' own
    if index is None or kind == "torch":
        return []
    if kind == "unknown" and not replaced and isinstance(module, nn.Linear | nn.Embedding):
        return []  # quantised weights: the loader's business
    wiring: Wiring = "unknown" if kind == "unknown" else "module"
    reference = types.MethodType(type(module).forward, module) if replaced and kind != "unknown" else None
    op = name.rsplit(".", 1)[-1]
    return [Site(name, index, op, wiring, module, module.__dict__, "forward", module.forward, reference)]


def _unexplained_layers(backbone: nn.Module, explained: set[int | None]) -> list[Site]:
    """Return an ``unknown`` site for each recurrent decoder layer in which no site was found."""
    config: Any = getattr(backbone, "config", None)
    layer_types = list(getattr(config, "layer_types", None) or [])
    sites = []
    for name, module in backbone.named_modules():
        match = _LAYER.search(name)
        if match is None or match.end() != len(name) or int(match[1]) in explained:
            continue
        index = int(match[1])
        kind = str(layer_types[index]) if index < len(layer_types) else ""
        plain = bool(_ATTENTION_TYPES.search(kind)) and not _LINEAR_ATTENTION.search(kind)
        if not (plain if kind else _looks_plain(module)):
            sites.append(
                Site(name, index, kind or "mixer", "unknown", module, module.__dict__, "", module.forward, None)
            )
    return sites


def _looks_plain(layer: nn.Module) -> bool:
    """Return whether a layer without a type in the config is plain attention, or a feed-forward block alone.

    Only a layer that shows its kind passes: what a layer of an unknown kind computes with is not known.
    """
    leaves = {name.rsplit(".", 1)[-1] for name, _ in layer.named_parameters()}
    if leaves & {"A_log", "dt_bias", "time_decay"} or any(isinstance(module, nn.Conv1d) for module in layer.modules()):
        return False
    parts = [f"{name} {type(child).__name__}".lower() for name, child in layer.named_children()]
    parts = [part for part in parts if "norm" not in part and "dropout" not in part]
    return any("attention" in part or "attn" in part for part in parts) or all(
        "mlp" in part or "moe" in part for part in parts
    )


def _names_in_forward(cls: type[nn.Module]) -> set[str]:
    """Return the names that ``forward`` uses, itself or in the methods that it calls."""
    names: set[str] = set()
    todo, done = ["forward"], set()
    while todo:
        method = todo.pop()
        done.add(method)
        function = inspect.getattr_static(cls, method, None)
        if isinstance(function, types.FunctionType):
            used = set(inspect.unwrap(function).__code__.co_names)
            names |= used
            todo += sorted(used - done - set(nn.Module.__dict__))
    return names


def _layer_index(name: str, module: nn.Module) -> int | None:
    match = _LAYER.search(name)
    if match is not None:
        return int(match[1])
    index = getattr(module, "layer_idx", None)
    return index if isinstance(index, int) else None


def _nonlocals(function: object) -> dict[str, Any]:
    if not isinstance(function, types.FunctionType):
        return {}
    return dict(inspect.getclosurevars(function).nonlocals)


def _module(target: object) -> str:
    return getattr(target, "__module__", None) or type(target).__module__


def _name(target: object) -> str:
    return f"{_module(target)}:{getattr(target, '__qualname__', type(target).__qualname__)}"
