"""Run batches through the target and return the arrays that the store keeps, sample by sample.

::

    rows of one forward batch
      -> right-padded ids with an explicit mask, one forward pass, hooks on the tapped blocks
      -> valid rows of each tap, rounded to bf16, packed [N, L, H]; final state; top-k of supervised tokens
      -> for a lossy codec: codes and scales instead of states, and the error of decoding them
      -> host copy on a side stream (CUDA), while the next batch runs
      -> per sample: arrays, or a reason

Taps come from forward hooks, the only way to get the last block's output (HF replaces it by the post-norm state).
Samples are never packed into one sequence: linear-attention state would leak from one into the next. No tensor of
[all tokens, vocabulary] exists: the head runs on supervised rows only, a slice at a time.

Shape suffixes: B batch, S padded width, N valid tokens, L taps, H hidden size, R supervised rows, K top-k,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hscache.console import say
from hscache.distance import RowErrors, compare_rows, kl_nats, spread
from hscache.health import RowStats, find_fault, reduce_rows
from hscache.model.loading import LoadedTarget
from hscache.rows import Sample, supervised_positions
from hscache.store.layout import (
    FINAL_STATE,
    HIDDEN_STATES,
    INPUT_IDS,
    LOGIT_ARRAYS,
    LOGIT_LSE,
    LOSS_MASK,
    STATE_ARRAYS,
    scales_name,
)
from hscache.store.lossy import Scheme, decode, encode

_HEAD_SLICE_ELEMENTS = 1 << 26  # 256 MiB of float32 logits at a time
_KL_ROWS = 32  # rows per forward batch; not all, since the head costs as much as a layer or two


@dataclass(frozen=True)
class Captured:
    """One sample with its arrays as the store keeps them, or the reason why it was rejected.

    Attributes:
        row: The corpus row.
        arrays: Array name -> host array in the stored element type; empty when rejected.
        stats: Row statistics of taps and final state; None when rejected.
        reason: Reason code, empty when the sample is good.
        detail: What was seen.
        errors: Errors that a lossy codec made in the states; None for other codecs.
    """

    row: Sample
    arrays: dict[str, NDArray[Any]]
    stats: RowStats | None
    reason: str = ""
    detail: str = ""
    errors: RowErrors | None = None


class Pending:
    """A forward batch whose results are on their way to the host.

    Args:
        rows: Its samples.
        taps: Tapped blocks, for messages.
        tensors: Results on the host, possibly still being written.
        fault: Reason and detail that apply to the whole batch.
        event: Set when the copies are done; None on the CPU.
    """

    def __init__(
        self,
        rows: list[Sample],
        taps: tuple[int, ...],
        tensors: dict[str, torch.Tensor],
        fault: tuple[str, str] = ("", ""),
        event: torch.cuda.Event | None = None,
    ) -> None:
        self._rows, self._taps, self._tensors, self._fault, self._event = rows, taps, tensors, fault, event

    def samples(self, *, check: bool = True) -> Iterator[Captured]:
        """Wait for the copies, check each sample, and yield it. Safe to call from another thread.

        Args:
            check: Reject samples that fail the health battery; turn it off to look at broken states.
        """
        if self._event is not None:
            self._event.synchronize()
        if self._fault[0]:
            yield from (Captured(row, {}, None, *self._fault) for row in self._rows)
            return
        stats = RowStats.join(*(self._reductions(prefix) for prefix in ("taps", "final")))
        errors = None
        if "error.kl_nats" in self._tensors:
            errors = RowErrors(*(self._tensors[f"error.{name}"].numpy() for name in RowErrors.__dataclass_fields__))
        start, loss_start = 0, 0
        for row in self._rows:
            stop, loss_stop = start + len(row.input_ids), loss_start + row.n_loss
            arrays: dict[str, NDArray[Any]] = {INPUT_IDS: row.input_ids, LOSS_MASK: row.loss_mask}
            for name, tensor in self._tensors.items():
                if name.startswith("logit_"):
                    arrays[name] = tensor[loss_start:loss_stop].numpy()
                elif name.startswith(STATE_ARRAYS):
                    arrays[name] = _stored(tensor[start:stop])
            sample = Captured(
                row, arrays, stats.rows(start, stop), errors=None if errors is None else errors.rows(start, stop)
            )
            yield self._checked(sample) if check else sample
            start, loss_start = stop, loss_stop

    def _reductions(self, prefix: str) -> list[torch.Tensor]:
        return [self._tensors[f"{prefix}.{name}"] for name in RowStats.__dataclass_fields__]

    def _checked(self, sample: Captured) -> Captured:
        assert sample.stats is not None
        reason, detail = find_fault(sample.stats, self._taps)
        if not reason and LOGIT_LSE in sample.arrays and not np.isfinite(sample.arrays[LOGIT_LSE]).all():
            reason, detail = "non-finite", "logits"
        return Captured(sample.row, {}, None, reason, detail) if reason else sample


class Capturer:
    """Run forward batches through a loaded target.

    Args:
        target: The target.
        taps: 0-based decoder blocks.
        final_state: Keep the state after the final norm.
        topk: Log-probabilities per supervised token; 0 for none.
        dtype: Element type of captured states: bfloat16 for a store, float32 to compare states before rounding.
        scheme: Lossy codec that encodes the states on their device, before they are copied; None for no encoding.
    """

    def __init__(
        self,
        target: LoadedTarget,
        taps: tuple[int, ...],
        *,
        final_state: bool,
        topk: int,
        dtype: torch.dtype = torch.bfloat16,
        scheme: Scheme | None = None,
    ) -> None:
        self._target, self._taps, self._final_state, self._topk = target, taps, final_state, topk
        self._dtype, self._scheme = dtype, scheme
        self._copy_stream = torch.cuda.Stream(target.device) if target.device.type == "cuda" else None
        self.oom_splits = 0
        """How often a batch was halved for lack of memory."""
        self.forwards = 0
        """Number of finished forward passes."""

    def start(self, rows: list[Sample], width: int | None = None) -> list[Pending]:
        """Run one forward batch; halve it until it fits into memory.

        The halves keep the batch's padded width: on CPU the states do not depend on how many samples share a batch, but
        their last bits depend on the width, so a machine with less memory writes the same store.

        Args:
            rows: Samples in plan order.
            width: Padded width; None for the longest sample's.

        Returns:
            The batch, or its parts in order; a single sample that does not fit is rejected as ``out-of-memory``.
        """
        longest = max(len(row.input_ids) for row in rows)
        try:
            return [self._forward(rows, width or longest)]
        except (RuntimeError, MemoryError) as error:
            if not _out_of_memory(error):
                raise
            message = str(error).splitlines()[0]
        # here, not in the handler, where the exception's frames still hold the tensors that did not fit
        if self._target.device.type == "cuda":
            torch.cuda.empty_cache()
        if len(rows) == 1:
            if (width or 0) > longest:
                return self.start(rows)  # better without the padding than not at all
            return [Pending(rows, self._taps, {}, ("out-of-memory", message))]
        self.oom_splits += 1
        half = (len(rows) + 1) // 2
        say(f"out of memory with {len(rows)} samples in a batch: continuing with {half}")
        return self.start(rows[:half], width or longest) + self.start(rows[half:], width or longest)

    @torch.inference_mode()
    def _forward(self, rows: list[Sample], width: int) -> Pending:
        device = self._target.device
        lengths = [len(row.input_ids) for row in rows]
        ids_BS = np.zeros((len(rows), width), np.int64)
        mask_BS = np.zeros_like(ids_BS)
        for i, row in enumerate(rows):
            ids_BS[i, : lengths[i]], mask_BS[i, : lengths[i]] = row.input_ids, 1
        flat_N = np.flatnonzero(mask_BS)
        valid_N = torch.from_numpy(flat_N).to(device)
        states_NLH = torch.empty(
            (len(flat_N), len(self._taps), self._target.shape.hidden_size), dtype=self._dtype, device=device
        )
        with self._hooks(states_NLH, valid_N, ids_BS.shape) as seen:
            final_BSH = self._target.backbone(
                input_ids=torch.from_numpy(ids_BS).to(device),
                attention_mask=torch.from_numpy(mask_BS).to(device),
                use_cache=False,
            ).last_hidden_state
        self.forwards += 1
        if short := self._length_fault(seen, final_BSH, ids_BS.shape):
            return Pending(rows, self._taps, {}, ("length-mismatch", short))
        final_NH = final_BSH.flatten(0, 1).index_select(0, valid_N)
        results = {HIDDEN_STATES: states_NLH}
        if self._final_state:
            results[FINAL_STATE] = final_NH.to(self._dtype)
        if self._topk:
            results.update(self._top_logits(final_NH, rows))
        for prefix, states in (("taps", states_NLH), ("final", final_NH[:, None].to(self._dtype))):
            reductions = zip(RowStats.__dataclass_fields__, reduce_rows(states), strict=True)
            results.update({f"{prefix}.{name}": tensor for name, tensor in reductions})
        if self._scheme is not None:
            results.update(self._encoded(results, rows, self._scheme))
        return self._to_host(rows, results)

    @contextmanager
    def _hooks(
        self, states_NLH: torch.Tensor, valid_N: torch.Tensor, shape: tuple[int, ...]
    ) -> Iterator[dict[int, tuple[int, ...]]]:
        """Make each tapped block write its valid rows into its column; yields block -> [B, S] of its output."""
        seen: dict[int, tuple[int, ...]] = {}

        def hook(column: int, tap: int, output: Any) -> None:
            block_BSH = output[0] if isinstance(output, tuple) else output
            seen[tap] = tuple(block_BSH.shape[:2])
            if seen[tap] == tuple(shape):
                states_NLH[:, column] = block_BSH.flatten(0, 1).index_select(0, valid_N)

        handles = [
            self._target.layers[tap].register_forward_hook(
                lambda _module, _args, output, column=column, tap=tap: hook(column, tap, output)
            )
            for column, tap in enumerate(self._taps)
        ]
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()

    def _length_fault(self, seen: dict[int, tuple[int, ...]], final_BSH: torch.Tensor, shape: tuple[int, ...]) -> str:
        for tap in self._taps:
            if seen.get(tap) != tuple(shape):
                return f"tap {tap}: states of shape {seen.get(tap, 'none')}, ids of shape {tuple(shape)}"
        if tuple(final_BSH.shape[:2]) != tuple(shape):
            return f"final state: shape {tuple(final_BSH.shape[:2])}, ids of shape {tuple(shape)}"
        return ""

    def _top_logits(self, final_NH: torch.Tensor, rows: list[Sample]) -> dict[str, torch.Tensor]:
        """Return the distribution that predicted each supervised token: row t-1 through the head."""
        before_R = torch.from_numpy(_before_supervised(rows)).to(final_NH.device)
        rows_per_slice = max(1, _HEAD_SLICE_ELEMENTS // self._target.shape.vocab_size)
        parts: list[tuple[torch.Tensor, ...]] = []
        for slice_R in before_R.split(rows_per_slice):
            logits_RV = self._target.relation.apply(self._target.head(final_NH.index_select(0, slice_R)))
            lse_R = torch.logsumexp(logits_RV, dim=-1)
            top_RK, ids_RK = logits_RV.topk(self._topk, dim=-1)
            parts.append((ids_RK.to(torch.int32), (top_RK - lse_R[:, None]).to(torch.float16), lse_R))
        return {name: torch.cat(column) for name, column in zip(LOGIT_ARRAYS, zip(*parts, strict=True), strict=True)}

    def _encoded(self, results: dict[str, torch.Tensor], rows: list[Sample], scheme: Scheme) -> dict[str, torch.Tensor]:
        """Return codes and scales in place of the states, and the errors of decoding them (:class:`RowErrors`)."""
        encoded: dict[str, torch.Tensor] = {}
        errors = []
        for name in (name for name in STATE_ARRAYS if name in results):
            states = results[name]
            codes, scales = encode(states, scheme)
            encoded |= {name: codes, scales_name(name): scales}
            decoded = decode(codes, scales, scheme)
            shape = (len(states), -1, scheme.hidden_size)
            errors.append(compare_rows(states.view(shape), decoded.view(shape)))
        encoded["error.rel_l2"], encoded["error.apart"] = (torch.cat(part, 1) for part in zip(*errors, strict=True))
        kl_N = encoded["error.kl_nats"] = torch.full_like(encoded["error.apart"][:, 0], torch.nan)
        if FINAL_STATE in results:
            picks_R = torch.from_numpy(spread(_before_supervised(rows), _KL_ROWS)).to(kl_N.device)
            weights: Any = self._target.head.weight.dtype
            true, other = (
                self._target.relation.apply(self._target.head(final_NH[picks_R].to(weights)))
                for final_NH in (results[FINAL_STATE], decoded)
            )
            kl_N[picks_R] = kl_nats(true, other)
        return encoded

    def _to_host(self, rows: list[Sample], results: dict[str, torch.Tensor]) -> Pending:
        if self._copy_stream is None:
            return Pending(rows, self._taps, results)
        self._copy_stream.wait_stream(torch.cuda.current_stream(self._target.device))
        host = {}
        with torch.cuda.stream(self._copy_stream):
            for name, tensor in results.items():
                host[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                host[name].copy_(tensor, non_blocking=True)
                tensor.record_stream(self._copy_stream)  # its memory must outlive the copy
            event = torch.cuda.Event()
            event.record(self._copy_stream)
        return Pending(rows, self._taps, host, event=event)


def _stored(states: torch.Tensor) -> NDArray[Any]:
    """Return states, codes or scales as stored: as uint16 in numpy, which has no bfloat16."""
    if states.dtype in (torch.bfloat16, torch.int16):
        return states.view(torch.int16).numpy().view(np.uint16)
    return states.numpy()


def _before_supervised(rows: list[Sample]) -> NDArray[np.int64]:
    """Return the tokens of a batch that come right before a supervised token."""
    before, start = [], 0
    for row in rows:
        before.append(start + supervised_positions(row.loss_mask) - 1)
        start += len(row.loss_mask)
    return np.concatenate(before)


def _out_of_memory(error: BaseException) -> bool:
    """Return whether an error means lack of memory; the CPU's allocator raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
