"""Find the places where a transformers model may run an optional kernel, and what is bound there.

Linear-attention and state-space layers exist twice: as a readable torch reference inside transformers, and as kernels
of other packages (fla, causal-conv1d, mamba-ssm, or kernels from the hub). Which one runs is decided by transformers
when it is imported, op by op, and no public function tells. It has done so in four ways, all of them found here:

``closure``    (>= 5.15) the layer calls a module global made by a decorator that froze its choice in a closure. The
               global may be called ``torch_...`` and run fla.
``attribute``  (<= 5.14) the mixer carries callables; ``None`` in the place of the conv means "inline torch".
``method``     (<= 5.14) the mixer has ``cuda_kernels_forward`` and a slow method, and ``forward`` picks one.
``module``     a whole submodule is another package's (fla's gated norm), or its ``forward`` was replaced by
               ``kernelize``.

A layer that looks recurrent and matches none of these is reported with the implementation ``unknown``, never left out:
an empty list must mean "nothing to choose". Finding sites costs one pass over the modules and calls nothing.
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

import torch
from torch import nn

Wiring = Literal["closure", "attribute", "method", "module", "unknown"]
Implementation = Literal["torch", "fla", "causal_conv1d", "mamba_ssm", "hub", "absent", "unknown"]
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
"""Ops by the name that the kernel package gives them. Only ``prefill`` ops run while states are cached."""

_ALIASES = {
    "recurrent_gated_delta_rule": "fused_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention": "chunk_kda",
    "recurrent_kimi_delta_attention": "fused_recurrent_kda",
    "mamba_selective_scan": "selective_scan_fn",
    "mamba_selective_state_update": "selective_state_update",
    "mamba2_selective_state_update": "selective_state_update",
    "mamba2_chunk_scan": "mamba_chunk_scan_combined",
    "mamba2_split_conv1d_scan_combined": "mamba_split_conv1d_scan_combined",
}
"""transformers' names for ops; needed where the wrapper's closure does not tell the package's name (5.15, 5.16)."""
SLOW_METHODS = ("slow_forward", "torch_forward")
"""What a mixer of transformers <= 5.14 may call the method that runs without kernels."""
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
    """A place in a loaded model from which an optional op is called: the record plus the handles to change it."""

    layer: str
    layer_index: int | None
    op: str
    wiring: Wiring
    module: nn.Module = field(repr=False, compare=False)
    holder: dict[str, Any] = field(repr=False, compare=False)
    """The dictionary in which ``key`` is looked up at each call: a module's globals, or the mixer's ``__dict__``."""
    key: str
    value: Any = field(repr=False, compare=False)
    """What ``holder[key]`` was when the site was found, before anything replaced it."""
    reference: Function | None = field(repr=False, compare=False)
    """The torch implementation; None where it is inline code of the mixer or does not exist."""

    def bound(self) -> Function | None:
        """Return the implementation that transformers chose."""
        if self.wiring == "closure":
            wrapper, hub = peel(self.value)
            return hub if hub is not None else _nonlocals(wrapper).get("implementation")
        if self.wiring == "method":
            fast: Function = vars(type(self.module))["cuda_kernels_forward"]
            return fast if _method_kernels(fast) else self.reference
        value: Function | None = self.value
        return value

    def record(self, function: Function | None, calls: int = 0) -> KernelRecord:
        """Return the record of ``function`` running at this site."""
        if self.wiring == "unknown":
            return KernelRecord(
                self.layer, self.layer_index, self.op, "unknown", "unknown", _name(type(self.module)),
                source_hash(type(self.module)), calls,
            )  # fmt: skip
        if function is None and self.op == "causal_conv1d_fn":
            # <= 5.14: a conv slot of None selects `F.silu(self.conv1d(x))` inside the mixer's own forward
            inline = undecorated(type(self.module).forward)
            return KernelRecord(
                self.layer, self.layer_index, self.op, self.wiring, "torch", _name(inline), source_hash(inline), calls
            )
        implementation, source = classify(function)
        if self.wiring == "method" and function is not self.reference:
            # the method is transformers' own; the kernels are what it calls
            implementation = next(iter(sorted(_method_kernels(function), reverse=True)), "unknown")
        return KernelRecord(
            self.layer, self.layer_index, self.op, self.wiring, implementation, source, source_hash(function), calls
        )


def find_sites(model: nn.Module) -> list[Site]:
    """Return every optional-kernel site of ``model``'s backbone, in the order of its modules.

    Args:
        model: A loaded transformers model (any Auto class), or one on the meta device.

    Returns:
        Sites; empty for a dense model, which has nothing to choose. A recurrent layer whose wiring is not known, and
        a layer of code that is not transformers', yields one site with the wiring ``unknown``.
    """
    backbone = find_backbone(model)
    sites: list[Site] = []
    foreign: list[str] = []
    parents = {
        f"{name}.{child}".lstrip("."): m for name, m in backbone.named_modules() for child, _ in m.named_children()
    }
    for name, module in backbone.named_modules():
        if any(name.startswith(prefix) for prefix in foreign):
            continue
        found = list(_mixer_sites(name, module)) + list(_module_sites(name, module, parents.get(name)))
        if any(site.wiring == "unknown" or site.key == "forward" for site in found):
            foreign.append(name + ".")
        sites += found
    return sites + _unexplained_layers(backbone, {site.layer_index for site in sites})


def find_backbone(model: nn.Module) -> nn.Module:
    """Return the stack of decoder layers inside ``model``; ``model`` itself where it does not name one."""
    get_decoder = getattr(model, "get_decoder", None)
    decoder = get_decoder() if callable(get_decoder) else None
    return decoder if isinstance(decoder, nn.Module) else model


def classify(function: object) -> tuple[Implementation, str]:
    """Return the implementation class of a callable and its ``module:qualname``."""
    if function is None:
        return "absent", "None"
    target = inspect.unwrap(function) if callable(function) else function
    target = getattr(target, "__func__", target)
    module = getattr(target, "__module__", None) or type(target).__module__
    root = module.split(".")[0]
    file = str(getattr(sys.modules.get(module), "__file__", ""))
    implementation: Implementation = "unknown"
    if root in ("transformers", "torch"):
        implementation = "torch"
    elif root == "fla":
        implementation = "fla"
    elif root == "causal_conv1d":
        implementation = "causal_conv1d"
    elif root == "mamba_ssm":
        implementation = "mamba_ssm"
    elif root == "kernels" or "kernels-community" in file or "/kernels--" in file:
        # hub kernels are imported under made-up names from the hub's cache
        implementation = "hub"
    return implementation, _name(target)


def source_hash(function: object) -> str | None:
    """Return the first 16 hex digits of the sha256 of a callable's Python source, None where it has none.

    Only the op's own entry point is covered; what it calls is pinned by the package versions in the path's digest.
    """
    code: Any = inspect.unwrap(function) if callable(function) else type(function)
    try:
        text = _source(code)
    except (OSError, TypeError):
        return None
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache  # every shard's record asks again for every layer, and Python tokenizes the file for each answer
def _source(code: Any) -> str:
    return inspect.getsource(code)


def peel(value: object) -> tuple[Function | None, Function | None]:
    """Split a module global into the fallback decorator's wrapper and a hub kernel that replaced it.

    Returns:
        The function whose closure holds ``implementation`` (None when ``value`` is no such thing), and the forward
        that ``kernelize`` put over it (None when it did not).
    """
    hub: Function | None = None
    if isinstance(value, nn.Module):
        # the `kernels` package turns the function into a process-wide module; kernelize() replaces its forward
        own = value.__dict__.get("forward")
        own = getattr(own, "__func__", own)
        if own is not None and own is not type(value).forward:
            hub = own
        value = _nonlocals(type(value).forward).get("func")
    if isinstance(value, types.FunctionType) and "implementation" in value.__code__.co_freevars:
        return value, hub
    return None, hub


def undecorated(function: Function) -> types.FunctionType:
    """Return the function that decorators stand in front of, also those that leave no ``__wrapped__``."""
    inner: Any = inspect.unwrap(function)
    while "<locals>" in inner.__qualname__:
        # transformers 5.7 to 5.14 decorates forward with a closure over it that does not name what it wraps
        cells = [value for value in _nonlocals(inner).values() if isinstance(value, types.FunctionType)]
        if len(cells) != 1:
            break
        inner = inspect.unwrap(cells[0])
    result: types.FunctionType = inner
    return result


def op_name(key: str) -> str:
    """Return the kernel package's name of an op from the name of the attribute or global that holds it."""
    key = key.removeprefix("torch_")
    return _ALIASES.get(key, key)


def _mixer_sites(name: str, module: nn.Module) -> Iterator[Site]:
    cls = type(module)
    if not isinstance(getattr(cls, "forward", None), types.FunctionType) or cls.__module__.split(".")[0] == "torch":
        return
    index, globals_ = _layer_index(name, module), undecorated(cls.forward).__globals__
    for key in sorted(_names_in_forward(cls)):
        wrapper, _ = peel(globals_.get(key))
        if wrapper is not None:
            op = str(_nonlocals(wrapper).get("func_name") or op_name(key))
            reference = getattr(wrapper, "__wrapped__", None)
            yield Site(name, index, op, "closure", module, globals_, key, globals_[key], reference)
    for key, value in list(module.__dict__.items()):
        if op_name(key) in OPS and (value is None or callable(value)):
            reference = globals_.get(f"torch_{key}")
            yield Site(name, index, op_name(key), "attribute", module, module.__dict__, key, value, reference)
    slow = next((vars(cls)[method] for method in SLOW_METHODS if method in vars(cls)), None)
    if slow is not None and "cuda_kernels_forward" in vars(cls):
        yield Site(name, index, "mixer_forward", "method", module, module.__dict__, "cuda_kernels_forward", None, slow)


def _module_sites(name: str, module: nn.Module, parent: nn.Module | None) -> Iterator[Site]:
    """Yield the site of a module that is another package's, or whose forward was replaced."""
    index = _layer_index(name, module)
    if index is None:
        return
    replaced = "forward" in module.__dict__
    kind, _ = classify(module.forward)
    if kind == "torch" or (kind == "unknown" and not replaced and isinstance(module, nn.Linear | nn.Embedding)):
        return  # accelerate's hooks unwrap to transformers' forward; quantised Linears are the loader's business
    op = name.rsplit(".", 1)[-1]
    wiring: Wiring = "unknown" if kind == "unknown" else "module"
    reference = types.MethodType(type(module).forward, module) if replaced else _reference_norm(module, parent)
    yield Site(name, index, op, wiring, module, module.__dict__, "forward", module.forward, reference)


def _reference_norm(module: nn.Module, parent: nn.Module | None) -> Function | None:
    """Return the forward of transformers' own gated norm over the weight of fla's (<= 5.14), None for other modules."""
    if parent is None or type(module).__name__ != "FusedRMSNormGated":
        return None
    fused: Any = module
    names = undecorated(type(parent).forward).__globals__
    cls = next(
        (value for name, value in names.items() if name.endswith("RMSNormGated") and value is not type(module)), None
    )
    if cls is None:
        return None
    with torch.device("meta"):
        norm = cls(fused.weight.shape[0], eps=fused.eps)
    norm.weight = fused.weight
    forward: Function = norm.forward
    return forward


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
            sites.append(Site(name, index, kind or "mixer", "unknown", module, module.__dict__, "", None, None))
    return sites


def _looks_plain(layer: nn.Module) -> bool:
    """Return whether a layer whose type the config does not tell is attention, or a feed-forward block alone.

    It must show that it is: what a layer of an unknown kind computes with is not known.
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
    """Return the names that ``forward`` and the methods it calls use: mixers split their forward into helpers."""
    names: set[str] = set()
    todo, done = ["forward"], set()
    while todo:
        method = todo.pop()
        done.add(method)
        function = inspect.getattr_static(cls, method, None)
        if isinstance(function, types.FunctionType):
            used = set(undecorated(function).__code__.co_names)
            names |= used
            todo += sorted(used - done - set(nn.Module.__dict__))
    return names


def _method_kernels(fast: object) -> set[Implementation]:
    """Return what implements the ops that a ``cuda_kernels_forward`` calls; empty when one of them is missing."""
    if not isinstance(fast, types.FunctionType):
        return set()
    function = undecorated(fast)
    names = [name for name in function.__code__.co_names if name in OPS]
    kernels = {classify(function.__globals__.get(name))[0] for name in names}
    return set() if "absent" in kernels else kernels


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


def _name(target: object) -> str:
    module = getattr(target, "__module__", None) or type(target).__module__
    return f"{module}:{getattr(target, '__qualname__', type(target).__qualname__)}"
