"""The live target: it reads a prompt, verifies drafts, and rolls back rejected tokens.

This is the only module of the trainer that opens the target; fitting and evaluating need only the store.

A draft of n rows (the anchor and the tokens drafted after it, as a chain or a tree) goes through the target in one
forward pass. Then only the accepted rows may stay in its cache. How the others are removed depends on what a layer
keeps:

- keys and values: the other rows are dropped. In a tree, a mask lets every row see its ancestors only; a target with
  layers that cannot be masked like this (recurrent or sliding ones) gets one batch row per root-to-leaf path.
- keys and values of a sliding window: transformers keeps those that leave the window until the kept length is given.
- a recurrent state and the last inputs of a convolution (gated DeltaNet, Mamba): earlier states cannot be computed from
  them, and transformers cannot crop them. They are copied before the draft and restored after it, and only the layer's
  token mixer runs again on the accepted rows, with inputs recorded during the draft. The inputs of an accepted row
  depend on accepted rows only, so attention, feed-forward and the other layers need not run again.

The cache is then that of a target which never saw the rejected rows, except for rounding, since the text is split into
other calls: in float32 it is within 1e-6 of a fresh prefill of the accepted text
(``tests/hstrain/live/test_live_target.py``).

Shapes: T tokens, n rows of a draft, P paths, W tokens of the longest path, L taps, H width, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hscache.corpus.generate import Prompt, Sampling, read_prompts
from hscache.corpus.tokenize import load_tokenizer
from hscache.device import Dtype, pick_device
from hscache.errors import ConfigError, EnvironmentFault
from hscache.kernels.observe import KernelObservation, observe_kernels, planned_records
from hscache.kernels.path import describe_path, is_fallback
from hscache.kernels.provenance import refuse_fallback
from hscache.kernels.sites import find_sites
from hscache.manifest import TargetShape, TargetSpec
from hscache.model.facts import end_token_ids, file_digests, read_shape, resolve_path
from hscache.model.loading import LoadedTarget, load_target

__all__ = [
    "LiveTarget", "Prompt", "Rows", "Sampling", "end_token_ids", "file_facts", "kernel_fallback", "kernel_path",
    "load_tokenizer", "open_target", "read_prompts", "target_shape",
]  # fmt: skip

_LINEAR_STATES = ("conv_states", "recurrent_states")


@dataclass(frozen=True)
class Rows:
    """The target's output for the rows that it was given.

    Attributes:
        logits: float32 [n, V]; row r is the distribution of the token after row r. For a prompt, the last row only.
        states: [n, L, H] outputs of the tapped blocks, in the target's precision.
    """

    logits: Tensor
    states: Tensor


@dataclass(frozen=True)
class _Draft:
    """A draft that was verified and of which no rows have been accepted yet."""

    paths: list[list[int]]
    """Rows of each path, from the anchor; one path for a chain and for a masked tree."""
    masked: bool
    linear: dict[int, dict[str, Any]]
    """Copies of the recurrent layers' states from before the draft."""
    inputs: dict[int, tuple[Tensor, dict[str, Any]]]
    """Inputs of the recurrent layers' mixers: [P, W, H] and the other arguments."""


class LiveTarget:
    """A loaded target with the cache of one text.

    Args:
        loaded: The target.
        directory: Its checkpoint.
        taps: 0-based decoder blocks whose outputs are returned.

    Raises:
        ConfigError: ``taps-invalid``.
    """

    def __init__(self, loaded: LoadedTarget, directory: Path, taps: Sequence[int]) -> None:
        if not taps or min(taps) < 0 or max(taps) >= loaded.shape.num_layers:
            raise ConfigError(
                "taps-invalid", f"taps {list(taps)}: expected blocks from 0 to {loaded.shape.num_layers - 1}"
            )
        self.loaded, self.directory, self.taps, self.device = loaded, directory, tuple(taps), loaded.device
        model: Any = loaded.model
        self.eos_ids = end_token_ids(directory)
        """Tokens that end a text, but for the tokenizer's."""
        self.max_positions = int(getattr(model.config.get_text_config(), "max_position_embeddings", 1 << 30))
        self.cache: Any = None
        """transformers' cache of the text so far; None before a prompt."""
        self.length = 0
        """Tokens in the cache."""
        self.dtype = str(loaded.dtype).removeprefix("torch.")
        """Precision of the forward pass, such as ``bfloat16``."""
        parameters = inspect.signature(loaded.backbone.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._mixers = _mixers(loaded.model)
        self._draft: _Draft | None = None

    def prefill(self, ids: Sequence[int]) -> Rows:
        """Start a new text; return the logits of its last row and the states of all rows, [T, L, H]."""
        self.cache, self.length, self._draft = None, 0, None
        rows = self.append(ids)
        for layer in self.cache.layers:
            if _is_sliding(layer):
                layer.activate_past_recording()
        return rows

    def append(self, ids: Sequence[int]) -> Rows:
        """Read tokens that are certain; return the states of all and the logits of the last one."""
        final_WH, states = self._forward(torch.tensor([list(ids)], device=self.device))
        self._settle(0)
        self.length += len(ids)
        return Rows(self._logits(final_WH[0, -1:]), states[0])

    def verify(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> Rows:
        """Run a draft through the target; :meth:`accept` must be called next.

        Args:
            tokens: Token ids, the anchor first.
            parents: Row of each token's parent, which comes before it; -1 for the anchor. None for a chain.

        Returns:
            One row per token.

        Raises:
            EnvironmentFault: ``target-rollback`` when a layer's state cannot be rolled back.
        """
        assert self._draft is None, "accept the last draft, or at least its anchor, before the next one"
        chain = parents is None or list(parents) == list(range(-1, len(tokens) - 1))
        masked = not chain and self._all_maskable()
        paths = [list(range(len(tokens)))] if chain or masked else _paths(parents or [])
        linear = {i: _copy_states(layer) for i, layer in enumerate(self.cache.layers) if _is_linear(layer)}
        self._refuse_unknown(linear)
        recorded: dict[int, tuple[Tensor, dict[str, Any]]] = {}
        with self._recording(linear, recorded):
            if masked:
                final, states = self._forward(torch.tensor([list(tokens)], device=self.device), parents)
            else:
                final, states = self._by_path(tokens, paths)
        self._draft = _Draft(paths, masked, linear, recorded)
        return Rows(self._logits(final), states)

    def accept(self, rows: Sequence[int]) -> None:
        """Keep these rows of the draft, a path from the anchor down, and drop the others."""
        draft, rows = self._draft, list(rows)
        assert draft is not None
        assert rows[:1] == [0], "the anchor is a known token and always kept"
        self._draft = None
        if draft.masked:
            keep = torch.tensor([*range(self.length), *(self.length + r for r in rows)], device=self.device)
            for layer in self.cache.layers:
                if getattr(layer, "keys", None) is not None:
                    layer.keys, layer.values = (x.index_select(2, keep) for x in (layer.keys, layer.values))
        else:
            self._keep_path(draft, rows)
        self.length += len(rows)

    def _keep_path(self, draft: _Draft, rows: list[int]) -> None:
        path = next(p for p, nodes in enumerate(draft.paths) if nodes[: len(rows)] == rows)
        width, batch = max(map(len, draft.paths)), len(draft.paths)
        if batch > 1:
            self.cache.reorder_cache(torch.tensor([path], device=self.device))
        self._settle(width - len(rows))
        if batch == 1 and len(rows) == width:
            return  # the recurrent states are those after the whole draft
        for index, states in draft.linear.items():
            layer = self.cache.layers[index]
            for name, value in states.items():
                setattr(layer, name, value)
            hidden_PWH, others = draft.inputs[index]
            self._mixers[index](hidden_PWH[path : path + 1, : len(rows)], **others)

    def _settle(self, drop: int) -> None:
        """Drop the last tokens from layers that keep keys and values."""
        for layer in self.cache.layers:
            if _is_sliding(layer):
                # also when nothing is dropped: it cuts the layer back to its window
                if layer.record_past:
                    layer.crop(-drop)
            elif drop and getattr(layer, "keys", None) is not None:
                layer.keys, layer.values = layer.keys[..., :-drop, :], layer.values[..., :-drop, :]

    def _by_path(self, tokens: Sequence[int], paths: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Run each path as a batch row; return final states [n, H] and tapped states [n, L, H] of the draft's rows."""
        width = max(map(len, paths))
        if len(paths) > 1:
            self.cache.reorder_cache(torch.zeros(len(paths), dtype=torch.long, device=self.device))
        # a short path is padded at its end, which no kept row sees
        ids_PW = [[tokens[row] for row in path] + [tokens[0]] * (width - len(path)) for path in paths]
        final_PWH, states = self._forward(torch.tensor(ids_PW, device=self.device))
        place = {row: p * width + w for p, path in enumerate(paths) for w, row in enumerate(path)}
        where_n = torch.tensor([place[row] for row in range(len(tokens))], device=self.device)
        return final_PWH.flatten(0, 1)[where_n], states.flatten(0, 1)[where_n]

    def _forward(self, ids_PW: Tensor, parents: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """Return final states [P, W, H] and tapped states [P, W, L, H] (without P for a masked tree)."""
        seen: dict[int, Tensor] = {}

        def keep(tap: int, output: Any) -> None:
            seen[tap] = output[0] if isinstance(output, tuple) else output

        handles = [
            self.loaded.layers[tap].register_forward_hook(lambda _m, _a, output, tap=tap: keep(tap, output))
            for tap in self.taps
        ]
        arguments: dict[str, Any] = {self._cache_name: self.cache}
        if parents is not None:
            arguments |= self._tree_arguments(parents)
        try:
            out = self.loaded.backbone(input_ids=ids_PW, use_cache=True, **arguments)
        finally:
            for handle in handles:
                handle.remove()
        self.cache = out[self._cache_name]
        final, states = out.last_hidden_state, torch.stack([seen[tap] for tap in self.taps], 2)
        return (final, states) if parents is None else (final[0], states[0])

    def _tree_arguments(self, parents: Sequence[int]) -> dict[str, Tensor]:
        n = len(parents)
        sees, depth = torch.eye(n, dtype=torch.bool), torch.zeros(n, dtype=torch.long)
        for row, parent in enumerate(parents):
            if parent >= 0:
                sees[row] |= sees[parent]
                depth[row] = depth[parent] + 1
        whole = torch.cat((torch.ones(n, self.length, dtype=torch.bool), sees), 1).to(self.device)
        # a mask that is added to the scores: every implementation that takes a mask accepts it
        mask = torch.zeros(whole.shape, dtype=self.loaded.dtype, device=self.device)
        mask.masked_fill_(~whole, torch.finfo(self.loaded.dtype).min)
        return {"attention_mask": mask[None, None], "position_ids": (self.length + depth).to(self.device)[None]}

    def _logits(self, final_nH: Tensor) -> Tensor:
        return self.loaded.relation.apply(self.loaded.head(final_nH))

    def _all_maskable(self) -> bool:
        implementation = self.loaded.report["attn_implementation"]
        return implementation in ("sdpa", "eager") and all(map(_is_plain, self.cache.layers))

    def _refuse_unknown(self, linear: dict[int, Any]) -> None:
        for index, layer in enumerate(self.cache.layers):
            known = _is_plain(layer) or _is_sliding(layer) != (index in linear and index in self._mixers)
            if not known:
                raise EnvironmentFault(
                    "target-rollback",
                    f"layer {index} of {type(self.loaded.model).__name__} keeps a {type(layer).__name__}, which cannot "
                    "be rolled back after a rejected draft",
                )

    @contextmanager
    def _recording(self, layers: dict[int, Any], into: dict[int, tuple[Tensor, dict[str, Any]]]) -> Iterator[None]:
        """Record the inputs of these layers' mixers."""

        def record(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            others = {name: value for name, value in kwargs.items() if name != "hidden_states"}
            into[index] = (args[0] if args else kwargs["hidden_states"], others)

        handles = [
            self._mixers[index].register_forward_pre_hook(
                lambda _m, args, kwargs, index=index: record(index, args, kwargs), with_kwargs=True
            )
            for index in layers
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def open_target(
    path: str,
    taps: Sequence[int],
    *,
    dtype: Dtype = "auto",
    attn_implementation: str = "sdpa",
    device: str | None = None,
    allow_fallback: bool = False,
) -> Iterator[tuple[LiveTarget, KernelObservation]]:
    """Load a target to decode with; its kernels are guarded and counted as in a build.

    Args:
        path: Checkpoint directory or hub id.
        taps: 0-based decoder blocks whose outputs the drafter reads.
        dtype: Precision; ``auto`` is bfloat16 where the device has it, else float32.
        attn_implementation: Its name in transformers. Trees are masked only with ``sdpa`` and ``eager``.
        device: Such as ``cuda:0``; None for CUDA if there is one.
        allow_fallback: Allow torch references on a GPU although kernels exist.

    Raises:
        ConfigError: ``taps-invalid``.
        EnvironmentFault: ``kernel-fallback``, and other errors of loading and kernels.
    """
    spec = TargetSpec(path=path, dtype=dtype, attn_implementation=attn_implementation)
    directory = resolve_path(spec, download=True)
    assert directory is not None
    loaded = load_target(spec, read_shape(spec, directory), directory, pick_device(device))
    target = LiveTarget(loaded, directory, taps)
    if not allow_fallback:
        refuse_fallback(planned_records(loaded.model), loaded.device, path)
    with torch.inference_mode(), observe_kernels(loaded.model) as observation:
        yield target, observation


def target_shape(path: str) -> TargetShape:
    """Return layers, width and vocabulary of a target from its config, without loading weights.

    Args:
        path: Checkpoint directory, or hub id, which is downloaded.

    Raises:
        EnvironmentFault: ``target-missing``, ``target-config``.
    """
    spec = TargetSpec(path=path)
    return read_shape(spec, resolve_path(spec, download=True))


def file_facts(directory: Path) -> dict[str, Any]:
    """Return digests of a checkpoint's weights and tokenizer files, as in a store's manifest."""
    digests = file_digests(directory, fast=False)
    return {"weights": digests["weights"], "tokenizer": digests["tokenizer"]}


def kernel_path(observation: KernelObservation) -> str:
    """Return a line that says which kernels ran."""
    return str(describe_path(observation.records()))


def kernel_fallback(observation: KernelObservation, live: LiveTarget) -> bool:
    """Return whether torch references ran on a GPU where kernels exist."""
    return is_fallback(observation.records(), live.device.type)


def _mixers(model: nn.Module) -> dict[int, nn.Module]:
    """Return the token mixer of each recurrent layer: the module that owns its optional kernels and takes a cache."""
    found = {}
    for site in find_sites(model):
        takes = inspect.signature(site.module.forward).parameters
        if site.layer_index is not None and {"cache", "cache_params", "past_key_values"} & takes.keys():
            found[site.layer_index] = site.module
    return found


def _is_linear(layer: Any) -> bool:
    return hasattr(layer, "recurrent_states")


def _is_sliding(layer: Any) -> bool:
    return bool(getattr(layer, "is_sliding", False)) and hasattr(layer, "activate_past_recording")


def _is_plain(layer: Any) -> bool:
    """Return whether a layer keeps nothing, or the keys and values of every token."""
    return type(layer).__name__ in ("DynamicLayer", "DummyLayer")


def _copy_states(layer: Any) -> dict[str, Any]:
    """Return copies of a recurrent layer's states, since transformers overwrites them in place."""
    return {
        name: {i: None if state is None else state.clone() for i, state in getattr(layer, name).items()}
        for name in _LINEAR_STATES
    }


def _paths(parents: Sequence[int]) -> list[list[int]]:
    """Return the rows from the anchor to each leaf."""
    inner = set(parents)
    paths = []
    for leaf in (row for row in range(len(parents)) if row not in inner):
        path = [leaf]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        paths.append(path[::-1])
    return paths
