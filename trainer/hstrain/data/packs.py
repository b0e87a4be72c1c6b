"""Read samples from a store into packs on the training device.

The samples of an epoch are put into an order that depends on (seed, epoch) alone and cut into *packs* of at most
``data.pack_tokens`` tokens; ``data.packs_per_step`` packs make an optimizer step. Rank r of W takes packs r, r + W, ...
of each step. A resumed run may therefore use another W: the step's loss, a mean over all its slots, does not change.
Threads read the samples ahead into a ring of reused buffers; another thread draws anchors, copies the rows that any
block sees into a pack, and releases the buffer. The training loop takes finished packs from a short queue.

A sample that cannot be read is left out of its pack and reported with it, so every rank still takes the same number of
steps. A sample longer than ``data.max_tokens`` is read only around this epoch's anchors, which are drawn before
reading.

Shapes: T context rows, L taps, H width, N blocks, B block size, K = B - 1.
"""

from __future__ import annotations

import contextlib
import queue
import re
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hscache.errors import HscacheError, IntegrityError
from hscache.store.reader import Sample, Store
from hscache.store.ring import ReadAhead, Span
from hstrain.data.anchors import choose_anchors, choose_window, random_of, slot_tokens
from hstrain.drafter.attention import Backend, Blocks
from hstrain.drafter.losses import SlotTargets
from hstrain.manifest import DataSpec

_ANSWER = re.compile(r"#\d+$")
_READ_THREADS = 2
_QUEUED_PACKS = 2


@dataclass(frozen=True)
class Pack:
    """Samples that go through the drafter together.

    Attributes:
        sample_ids: Samples in the pack, in order.
        states_TLH: bf16 [T, L, H] of the rows that some block sees.
        positions_T: int64 [T] position of a row in its sample.
        anchor_ids_N: int64 [N] token of each anchor.
        anchors_N: int64 [N] position of each anchor in its sample.
        lo_N: int64 [N] first context row of the block's sample.
        hi_N: int64 [N] end of the context rows before the anchor.
        targets: What the slots should predict.
        bad: Samples that could not be read: id and error message.
    """

    sample_ids: list[str]
    states_TLH: Tensor
    positions_T: Tensor
    anchor_ids_N: Tensor
    anchors_N: Tensor
    lo_N: Tensor
    hi_N: Tensor
    targets: SlotTargets
    bad: list[tuple[str, str]] = field(default_factory=list)

    def blocks(self, block_size: int, backend: Backend) -> Blocks:
        """Return what each block sees."""
        return Blocks(self.anchors_N, self.lo_N, self.hi_N, block_size, len(self.positions_T), backend)

    def to(self, device: torch.device) -> Pack:
        """Return the pack on a device; from page-locked memory, the copy runs in the background."""
        if device.type == "cpu":
            return self
        changes: dict[str, Any] = {
            **_moved(self, device),
            "targets": replace(self.targets, **_moved(self.targets, device)),
        }
        return replace(self, **changes)


@dataclass(frozen=True)
class PackShape:
    """The parts of a sample that go into a pack.

    Attributes:
        taps: Decoder blocks read, in this order.
        block_size: B.
        top: Keep the stored top-k distribution.
        final: Keep final states.
    """

    taps: tuple[int, ...]
    block_size: int
    top: bool = False
    final: bool = False


def split(store: Store, validation: float, test: float = 0.0) -> tuple[list[int], list[int], list[int]]:
    """Return the numbers of the training, the validation and the test samples.

    The hash of a sample's id alone decides where it belongs: two stores of one corpus have the same split, and no
    sample changes sides when a corpus grows. The lowest hashes are tested on, the next are validated on. There are two
    exceptions for a corpus that is too small for the shares, which may end as it grows: with a share above zero and
    enough samples, at least one sample has that part (the one with the next lowest hash), and at least one is left to
    train on.

    With a test share, the answers of one conversation stay together: ``hscache tokenize`` names them ``id#0``,
    ``id#1``, ..., and each has the others before it as its prompt. Without one they do not, as before it existed.

    Args:
        store: An opened store.
        validation: Share of the samples for validation.
        test: Share of the samples for the test.
    """
    ids = (_ANSWER.sub("", sample_id) for sample_id in store.sample_ids) if test else store.sample_ids
    draws = np.array([random_of("split", sample_id).random() for sample_id in ids])
    order = np.argsort(draws, kind="stable")
    ascending = draws[order]
    last = int(np.searchsorted(ascending, ascending[-1])) if len(draws) else 0  # its conversation is trained on

    def end(share: float, least: int) -> int:
        n = min(max(int(np.searchsorted(ascending, share)), least), last)
        return int(np.searchsorted(ascending, ascending[n - 1], side="right")) if n else 0

    tested = end(test, int(test > 0))
    held = end(validation + test, tested + (validation > 0))
    return sorted(order[held:].tolist()), sorted(order[tested:held].tolist()), sorted(order[:tested].tolist())


class Schedule:
    """The assignment of samples to packs, and of packs to steps.

    Args:
        numbers: Numbers of the training samples.
        n_tokens: Tokens of every sample of the store.
        spec: The manifest's section ``data``.
        seed: Seed of the order.
    """

    def __init__(self, numbers: Sequence[int], n_tokens: NDArray[np.int64], spec: DataSpec, seed: int) -> None:
        self._numbers, self._spec, self._seed = list(numbers), spec, seed
        self._tokens = np.minimum(n_tokens, spec.max_tokens)

    def packs(self, epoch: int) -> list[list[int]]:
        """Return the packs of an epoch, each a list of sample numbers."""
        order = random_of("order", self._seed, epoch).permutation(np.array(self._numbers, np.int64))
        packs: list[list[int]] = []
        room = 0
        for i in order.tolist():
            n = int(self._tokens[i])
            if n > room:
                packs.append([])
                room = self._spec.pack_tokens
            packs[-1].append(i)
            room -= n
        return packs

    def steps(self, epoch: int) -> list[list[list[int]]]:
        """Return the steps of an epoch, each a list of packs; the last one may be shorter."""
        packs, size = self.packs(epoch), self._spec.packs_per_step
        return [packs[k : k + size] for k in range(0, len(packs), size)]

    def from_step(self, step: int) -> Iterator[tuple[int, list[list[int]]]]:
        """Yield (epoch, packs) of every step from a global step number on, endlessly."""
        epoch = 0
        while True:
            for packs in self.steps(epoch):
                if step == 0:
                    yield epoch, packs
                else:
                    step -= 1
            epoch += 1


class PackStream:
    """Iterates over the packs of one rank, a list per optimizer step.

    Args:
        store: An opened store.
        schedule: The order.
        shape: The parts of a sample that go into a pack.
        spec: The manifest's section ``data``.
        seed: Seed of anchors and windows.
        start: First step.
        stop: End of the steps, exclusive.
        rank: This rank.
        world: Number of ranks.
    """

    def __init__(
        self,
        store: Store,
        schedule: Schedule,
        shape: PackShape,
        spec: DataSpec,
        *,
        seed: int,
        start: int,
        stop: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self._store, self._shape, self._spec, self._seed = store, shape, spec, seed
        self._range, self._rank, self._world = (start, stop), rank, world
        self._schedule = schedule
        self._spans: deque[tuple[int, NDArray[np.int64] | None]] = deque()
        self._queue: queue.Queue[list[Pack] | BaseException | None] = queue.Queue(_QUEUED_PACKS)
        self._stopped = threading.Event()
        self._pinned = torch.cuda.is_available()
        longest = int(min(spec.max_tokens, store.n_tokens.max(initial=1)))
        self._ring = ReadAhead(
            store, self._order(), buffers=_READ_THREADS + 2, threads=_READ_THREADS, max_tokens=longest, taps=shape.taps
        )
        self._thread = threading.Thread(target=self._work, name="hstrain-pack", daemon=True)
        self._thread.start()

    def __iter__(self) -> PackStream:
        return self

    def __next__(self) -> list[Pack]:
        item = self._queue.get()
        if item is None:
            raise StopIteration
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        """End the threads."""
        self._stopped.set()
        self._ring.close()
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._queue.get(timeout=0.05)

    def __enter__(self) -> PackStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _mine(self) -> Iterator[tuple[int, list[list[int]]]]:
        """Yield (epoch, packs of this rank); every rank gets the same number of packs, some of which may be empty."""
        start, stop = self._range
        for _, (epoch, packs) in zip(range(start, stop), self._schedule.from_step(start), strict=False):
            share = packs[self._rank :: self._world]
            yield epoch, share + [[]] * (-(-len(packs) // self._world) - len(share))

    def _order(self) -> Iterator[Span]:
        for epoch, packs in self._mine():
            for i in (i for pack in packs for i in pack):
                start, stop, anchors = self._window(i, epoch)
                self._spans.append((start, anchors))
                yield i, start, stop

    def _window(self, i: int, epoch: int) -> tuple[int, int, NDArray[np.int64] | None]:
        """Return the token range of a sample to read, and for a long sample its anchors."""
        n = int(self._store.n_tokens[i])
        if n <= self._spec.max_tokens:
            return 0, n, None
        try:
            mask = self._store.loss_mask(i)
        except HscacheError:  # reading the sample will raise it again, when its turn comes
            return 0, self._spec.max_tokens, None
        random = random_of("window", self._seed, epoch, self._store.sample_ids[i])
        return choose_window(mask, self._spec.max_tokens, self._spec.anchors, random)

    def _work(self) -> None:
        try:
            for epoch, packs in self._mine():
                self._put([self._assemble(pack, epoch) for pack in packs])
            self._put(None)
        except BaseException as error:  # __next__ raises it in the training loop
            self._put(error)

    def _put(self, item: list[Pack] | BaseException | None) -> None:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=0.2)
            except queue.Full:
                continue
            return

    def _assemble(self, numbers: list[int], epoch: int) -> Pack:
        builder = PackBuilder(self._shape, pinned=self._pinned)
        for i in numbers:
            sample_id = self._store.sample_ids[i]
            try:
                with next(self._ring) as sample:
                    start, chosen = self._spans.popleft()
                    if chosen is None:
                        random = random_of("anchors", self._seed, epoch, sample_id)
                        anchors = choose_anchors(sample.loss_mask.numpy(), self._spec.anchors, random)
                    else:
                        anchors = chosen - start
                    builder.add(sample, anchors, start)
            except IntegrityError as error:
                self._spans.popleft()
                builder.bad.append((sample_id, f"{error.code}: {error.message}"))
        return builder.pack(len(self._shape.taps), self._store.manifest["target"]["shape"]["hidden_size"])


class PackBuilder:
    """Collect samples into a pack.

    Args:
        shape: The parts of a sample that are kept.
        pinned: Page-lock the memory.
    """

    def __init__(self, shape: PackShape, *, pinned: bool = False) -> None:
        self._shape, self._pinned = shape, pinned
        self._parts: dict[str, list[Any]] = {}
        self._rows = self._table_rows = 0
        self.sample_ids: list[str] = []
        self.bad: list[tuple[str, str]] = []

    def add(self, sample: Sample, anchors: NDArray[np.int64], start: int = 0) -> None:
        """Add a sample, or a token range of one, with its anchors.

        Args:
            sample: Of kind ``torch``; the parts that are kept are copied.
            anchors: int64 [n], counted from the range's first token, ascending; without anchors nothing is added.
            start: Position of the range's first token in the sample.
        """
        if not len(anchors):
            return
        self.sample_ids.append(sample.sample_id)
        ids, seen = sample.input_ids.numpy(), int(anchors[-1])
        tokens = slot_tokens(ids, sample.loss_mask.numpy(), anchors, self._shape.block_size)
        self._keep("states_TLH", sample.hidden_states[:seen].clone())
        self._keep("positions_T", torch.arange(start, start + seen))
        self._keep("anchor_ids_N", torch.from_numpy(ids[anchors].astype(np.int64)))
        self._keep("anchors_N", torch.from_numpy(anchors + start))
        self._keep("lo_N", torch.full((len(anchors),), self._rows))
        self._keep("hi_N", torch.from_numpy(anchors + self._rows))
        self._keep("tokens_NK", torch.from_numpy(tokens))
        self._keep("rows_NK", torch.from_numpy(self._table(sample, anchors, tokens)))
        self._rows += seen

    def pack(self, n_taps: int, hidden_size: int) -> Pack:
        """Return the collected pack; if it is empty, one block that sees a zero row and trains nothing."""
        if not self._parts:
            K, one = self._shape.block_size - 1, torch.ones(1, dtype=torch.int64)
            states = torch.zeros(1, n_taps, hidden_size, dtype=torch.bfloat16)
            nothing = SlotTargets(torch.full((1, K), -1), torch.zeros(1, K, dtype=torch.int64))
            return Pack([], states, one * 0, one * 0, one, one * 0, one, nothing, self.bad)
        joined = {name: self._pin(torch.cat(parts)) for name, parts in self._parts.items()}
        names = ("tokens_NK", "rows_NK", "top_ids", "top_logprobs", "final_states")
        targets = SlotTargets(**{name: joined.pop(name) for name in names if name in joined})
        return Pack(self.sample_ids, **joined, targets=targets, bad=self.bad)

    def _table(self, sample: Sample, anchors: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Keep the target's distributions and return each slot's row in them, 0 where nothing trains."""
        predicted = anchors[:, None] + np.arange(1, self._shape.block_size)
        rows = predicted - 1  # the state that predicts a token is the one before it
        if self._shape.top:
            assert sample.logits is not None
            self._keep("top_ids", sample.logits.ids.clone())
            self._keep("top_logprobs", sample.logits.logprobs.clone())
            row_of = np.zeros(len(sample.input_ids) + self._shape.block_size, np.int64)
            row_of[np.asarray(sample.logits.positions)] = np.arange(len(sample.logits.positions))
            rows = row_of[np.minimum(predicted, len(row_of) - 1)]
        if self._shape.final:
            assert sample.final_state is not None
            _assert_no_tap_is_final(sample)
            self._keep("final_states", sample.final_state.clone())
        rows = np.where(tokens >= 0, rows + self._table_rows, 0)
        if self._shape.top:
            self._table_rows += len(sample.logits.positions)  # type: ignore[union-attr]
        elif self._shape.final:
            self._table_rows += len(sample.input_ids)
        return rows

    def _keep(self, name: str, part: Tensor) -> None:
        self._parts.setdefault(name, []).append(part)

    def _pin(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self._pinned else tensor


def _assert_no_tap_is_final(sample: Sample) -> None:
    """A drafter that reads the state from which its targets are computed would learn to copy it."""
    assert sample.final_state is not None
    for tap in range(sample.hidden_states.shape[1]):
        assert not torch.equal(sample.hidden_states[:, tap], sample.final_state), "a tap is the target's final state"


def _moved(record: Any, device: torch.device) -> dict[str, Tensor]:
    return {
        name: value.to(device, non_blocking=True) for name, value in vars(record).items() if isinstance(value, Tensor)
    }
