"""Read samples ahead of their consumer, in the consumer's order, into a ring of reused buffers.

::

    with ReadAhead(store, order, buffers=4, threads=2) as ring:
        for lease in ring:
            with lease as sample:           # views of one buffer of the ring
                train(sample)               # the buffer is refilled only after this block

Threads of this process do the reading, since the kernel's copy, checksums and decoding all run without the
interpreter's lock; worker processes would have to copy every sample through shared memory once more. A reading thread
first takes a free buffer and then the next sample of the order. So the earliest outstanding sample always has a buffer,
and ``buffers`` bounds the memory whatever the consumer does.

A sample that cannot be read raises an error that names it, at its place in the order; the iteration can continue after
it.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hscache.errors import HscacheError
from hscache.store.buffers import Buffers

if TYPE_CHECKING:
    from hscache.store.reader import Kind, Sample, Store

Span = tuple[int, int, int | None]
"""Number of a sample, first token, end of the token range (None: the sample's end)."""

_EXIT_WAIT = 5.0
"""Seconds that the exiting interpreter waits for the threads of rings that were never closed."""


class Lease:
    """A sample in a buffer of the ring, until it is released.

    Attributes:
        sample: The sample; its arrays are views of the buffer, so copy what must outlive the lease.
    """

    def __init__(self, sample: Sample, buffers: Buffers, ring: _Ring) -> None:
        self.sample = sample
        self._buffers: Buffers | None = buffers
        self._ring = ring

    def release(self) -> None:
        """Give the buffer back to be refilled; may be repeated. Wait for asynchronous copies out of it first."""
        buffers, self._buffers = self._buffers, None
        if buffers is not None:
            self._ring.release(buffers)

    def __enter__(self) -> Sample:
        return self.sample

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class ReadAhead:
    """Iterates over leases of samples, in the order given.

    Args:
        store: An opened store.
        order: Numbers of samples, or spans (see :data:`Span`); may be endless. The reading threads advance it, one of
            them at a time.
        buffers: Samples in memory at once: those that the consumer holds and those read ahead.
        threads: Reading threads.
        max_tokens: Longest range of the order; None for the store's longest sample.
        pinned: Page-lock the buffers; None: if CUDA is available and ``kind`` is ``torch``.
        taps: As for :meth:`Store.sample`.
        kind: As for :meth:`Store.sample`.
        verify: As for :meth:`Store.sample`.
        crc: As for :meth:`Store.sample`.

    Raises:
        HscacheError: From the iteration, as raised by :meth:`Store.sample`, with the sample's id in front.
        RuntimeError: From the iteration: the consumer holds all buffers and asks for one more sample.
    """

    def __init__(
        self,
        store: Store,
        order: Iterable[int | Span],
        *,
        buffers: int = 4,
        threads: int = 2,
        max_tokens: int | None = None,
        pinned: bool | None = None,
        taps: Sequence[int] | None = None,
        kind: Kind = "torch",
        verify: bool = False,
        crc: bool = True,
    ) -> None:
        assert buffers > 0
        assert threads > 0
        if pinned is None:
            pinned = kind == "torch" and _cuda()
        n_taps = None if taps is None else len(taps)
        rooms = [store.buffers(max_tokens, taps=n_taps, pinned=pinned) for _ in range(buffers)]
        arguments = {"taps": taps, "kind": kind, "verify": verify, "crc": crc}
        self.nbytes = sum(room.nbytes for room in rooms)
        self._ring = _Ring(store, iter(order), rooms, arguments)
        # the threads refer to the ring, not to this object: when the consumer drops this object, they end
        weakref.finalize(self, self._ring.stop)
        self._ring.start(threads)

    def __iter__(self) -> ReadAhead:
        return self

    def __next__(self) -> Lease:
        return self._ring.next()

    def close(self) -> None:
        """End the threads and wait for them. Samples that are still leased stay as they are."""
        self._ring.stop()
        self._ring.join()

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Ring:
    """State that consumer and threads share, protected by one condition."""

    def __init__(
        self, store: Store, order: Iterator[int | Span], rooms: list[Buffers], arguments: dict[str, Any]
    ) -> None:
        self._store, self._order, self._arguments = store, order, arguments
        self._changed = threading.Condition()
        self._drawing = threading.Lock()
        self._free, self._n_rooms = deque(rooms), len(rooms)
        self._done: dict[int, Lease | BaseException] = {}
        self._drawn = 0  # samples taken from the order
        self._given = 0  # samples handed to the consumer
        self._leased = 0
        self._exhausted = self._stopped = False
        self._threads: list[threading.Thread] = []
        _RUNNING.add(self)

    def start(self, n: int) -> None:
        self._threads = [threading.Thread(target=self._work, name=f"hscache-read-{i}", daemon=True) for i in range(n)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ask the threads to end, without waiting: a finalizer may run in any thread, even in one of them."""
        with self._changed:
            self._stopped = True
            self._done.clear()
            self._free.clear()
            self._changed.notify_all()

    def join(self, timeout: float | None = None) -> None:
        for thread in self._threads:
            thread.join(timeout)

    def release(self, room: Buffers) -> None:
        with self._changed:
            self._leased -= 1
            self._return(room)

    def next(self) -> Lease:
        with self._changed:
            while self._given not in self._done:
                if self._stopped or (self._exhausted and self._given == self._drawn):
                    raise StopIteration
                if self._leased == self._n_rooms:
                    raise RuntimeError(f"all {self._n_rooms} buffers are held by the consumer: release a lease first")
                self._changed.wait()
            done = self._done.pop(self._given)
            self._given += 1
            if isinstance(done, Lease):
                self._leased += 1
                return done
        try:
            raise done
        finally:
            del done  # or the error's traceback and this frame hold each other

    def _work(self) -> None:
        while (room := self._take_room()) is not None:
            number, item = self._draw(room)
            if number < 0:
                return
            done: Lease | BaseException
            try:
                if isinstance(item, BaseException):
                    raise item
                done = self._read(item, room)
            except BaseException as error:  # whatever it is, it is raised where the sample is asked for
                done = error
            with self._changed:
                if self._stopped:
                    return
                self._done[number] = done
                if isinstance(done, BaseException):
                    self._return(room)
                self._changed.notify_all()
            del done, item

    def _take_room(self) -> Buffers | None:
        with self._changed:
            while not self._free and not self._stopped:
                self._changed.wait()
            return None if self._stopped else self._free.popleft()

    def _draw(self, room: Buffers) -> tuple[int, int | Span | BaseException]:
        """Return the place in the order and the sample there, or a negative place at the end."""
        item: int | Span | BaseException
        # two locks: a slow order must not keep the consumer from samples that are already read
        with self._drawing:
            try:
                item, ended = (-1, True) if self._exhausted else (next(self._order), False)
            except StopIteration:
                item, ended = -1, True
            except BaseException as error:  # also errors of the consumer's order, and its end
                item, ended = error, True
            with self._changed:
                self._exhausted = self._exhausted or ended
                if ended and not isinstance(item, BaseException):
                    self._return(room)
                    return -1, -1
                self._drawn += 1
                return self._drawn - 1, item

    def _return(self, room: Buffers) -> None:
        if not self._stopped:
            self._free.append(room)
        self._changed.notify_all()

    def _read(self, item: int | Span, room: Buffers) -> Lease:
        i, start, stop = item if isinstance(item, tuple) else (int(item), 0, None)
        try:
            sample = self._store.sample(i, start=start, stop=stop, out=room, **self._arguments)
        except HscacheError as error:
            raise type(error)(error.code, f"{self._name(i)}: {error.message}", hint=error.hint) from error
        except Exception as error:
            error.add_note(f"while reading {self._name(i)}, tokens {start}:{stop}")
            raise
        return Lease(sample, room, self)

    def _name(self, i: int) -> str:
        inside = -len(self._store) <= i < len(self._store)
        return f"sample {self._store.sample_ids[i]!r}" if inside else f"sample {i}"


_RUNNING: weakref.WeakSet[_Ring] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End all threads before the interpreter exits: a thread that is still in C++ code then aborts the process."""
    rings = list(_RUNNING)
    for ring in rings:
        ring.stop()
    for ring in rings:
        ring.join(_EXIT_WAIT)


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()
