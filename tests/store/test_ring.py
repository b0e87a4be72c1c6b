"""Reading ahead: order, reuse of buffers, errors at their place, and threads that end."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hscache
from hscache.errors import InputError, IntegrityError
from hscache.store.reader import Sample, Store
from hscache.store.ring import Lease, ReadAhead, Span
from tests.made.stores import Little, corpus_rows, flip, make_store, same_bits


@pytest.fixture(scope="module")
def little(tmp_path_factory: pytest.TempPathFactory) -> Little:
    return make_store(tmp_path_factory.mktemp("ring") / "store", corpus_rows([2 + 5 * i % 13 for i in range(20)]))


@pytest.fixture(scope="module")
def store(little: Little) -> Store:
    return hscache.open(little.path)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 5
    while alive():
        assert time.monotonic() < deadline, alive()
        time.sleep(0.01)


def alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hscache-read")]


def assert_is(sample: Sample, little: Little, start: int = 0, stop: int | None = None) -> None:
    arrays = little.arrays[sample.sample_id]
    for name in ("input_ids", "loss_mask", "hidden_states", "final_state"):
        assert same_bits(getattr(sample, name), arrays[name][start:stop]), (sample.sample_id, name)


@settings(max_examples=25)
@given(
    order=st.lists(st.integers(0, 19), max_size=40),
    buffers=st.integers(1, 5),
    threads=st.integers(1, 4),
)
def test_samples_come_in_order_and_whole(
    little: Little, store: Store, order: list[int], buffers: int, threads: int
) -> None:
    got = []
    with ReadAhead(store, order, buffers=buffers, threads=threads, kind="bits", verify=True) as ring:
        for lease in ring:
            with lease as sample:
                assert_is(sample, little)
                got.append(sample.sample_id)
        assert list(ring) == []
    assert got == [store.sample_ids[i] for i in order]


def test_ranges_and_numpy_numbers_are_taken(little: Little, store: Store) -> None:
    spans: list[Any] = [(3, 1, None), (4, 0, 2), np.int64(7), (-1, 2, 3)]
    with ReadAhead(store, spans, kind="bits", max_tokens=16) as ring:
        for lease, (i, start, stop) in zip(ring, [(3, 1, None), (4, 0, 2), (7, 0, None), (19, 2, 3)], strict=True):
            with lease as sample:
                assert sample.sample_id == store.sample_ids[i]
                assert_is(sample, little, start, stop)


def test_tensors_of_some_taps_are_views_of_the_ring(little: Little, store: Store) -> None:
    import torch

    with ReadAhead(store, [0, 1], taps=[3], buffers=1) as ring:
        for i, lease in enumerate(ring):
            assert torch.equal(lease.sample.hidden_states, store.sample(i, taps=[3]).hidden_states)
            assert lease.sample.hidden_states.dtype == torch.bfloat16
            lease.release()


def test_a_buffer_is_not_refilled_before_it_is_released(little: Little, store: Store) -> None:
    with ReadAhead(store, itertools.cycle(range(20)), buffers=4, threads=3, kind="bits") as ring:
        held: list[Lease] = []
        for _ in range(60):
            held.append(next(ring))
            time.sleep(0.001)  # the threads read what they can
            for lease in held:
                assert_is(lease.sample, little)
            if len(held) == 3:
                held.pop(1).release()
        pointers = {lease.sample.hidden_states.ctypes.data for lease in held}
        assert len(pointers) == len(held)


def test_the_ring_reuses_as_many_buffers_as_it_was_given(store: Store) -> None:
    pointers = set()
    with ReadAhead(store, [*range(20)] * 3, buffers=3, kind="bits") as ring:
        for lease in ring:
            with lease as sample:
                pointers.add(sample.hidden_states.ctypes.data)
        assert ring.nbytes == 3 * store.buffers().nbytes
    assert len(pointers) == 3


def test_no_more_is_read_ahead_than_there_are_buffers(store: Store) -> None:
    drawn = []

    def order() -> Iterator[int]:
        for i in itertools.cycle(range(20)):
            drawn.append(i)
            yield i

    with ReadAhead(store, order(), buffers=3, threads=2, kind="bits") as ring:
        time.sleep(0.1)
        assert len(drawn) == 3
        next(ring).release()
        time.sleep(0.1)
        assert len(drawn) == 4


def test_a_consumer_that_holds_everything_is_told_so(store: Store) -> None:
    with ReadAhead(store, range(20), buffers=2, kind="bits") as ring:
        held = [next(ring), next(ring)]
        with pytest.raises(RuntimeError, match="release"):
            next(ring)
        held[0].release()
        held[0].release()  # once more is no error, and frees nothing that belongs to another lease
        third = next(ring)
        with pytest.raises(RuntimeError, match="release"):
            next(ring)
        third.release()


def test_a_damaged_sample_raises_at_its_place_and_the_others_come(tmp_path: Path) -> None:
    little = make_store(tmp_path / "store", corpus_rows((4, 4, 4, 4, 4, 4)))
    flip(little.path / "shards/00000.zarr/hidden_states/c.0.0.0", position=3)
    store, got, failed = hscache.open(little.path), [], []
    with ReadAhead(store, range(len(store)), buffers=2, kind="bits") as ring:
        for _ in range(len(store)):
            try:
                with next(ring) as sample:
                    assert_is(sample, little)
                    got.append(sample.sample_id)
            except IntegrityError as error:
                failed.append(error)
        with pytest.raises(StopIteration):
            next(ring)
    assert len(failed) == 1
    assert failed[0].code == "store-damaged"
    missing = set(store.sample_ids) - set(got)
    assert f"sample {missing.pop()!r}: 00000.zarr/hidden_states: chunk 0" in failed[0].message
    assert failed[0].hint


@pytest.mark.parametrize(("item", "named"), [(99, "sample 99"), ((2, 5, 4), "sample 's2'")])
def test_a_sample_that_does_not_exist_is_refused_at_its_place(store: Store, item: int | Span, named: str) -> None:
    with ReadAhead(store, [0, item, 1], kind="bits") as ring:
        next(ring).release()
        with pytest.raises(InputError, match=named):
            next(ring)
        next(ring).release()


def test_any_other_error_of_a_thread_reaches_the_consumer_with_the_sample_named(store: Store) -> None:
    with ReadAhead(store, [1], kind="bits", max_tokens=1) as ring:
        with pytest.raises(ValueError, match="do not fit") as caught:
            next(ring)
        assert caught.value.__notes__ == ["while reading sample 's1', tokens 0:None"]


def test_an_error_of_the_order_ends_it_behind_what_was_drawn(store: Store) -> None:
    def order() -> Iterator[int]:
        yield 5
        raise LookupError("no more")

    with ReadAhead(store, order(), kind="bits") as ring:
        with next(ring) as sample:
            assert sample.sample_id == store.sample_ids[5]
        with pytest.raises(LookupError, match="no more"):
            next(ring)
        with pytest.raises(StopIteration):
            next(ring)


def test_a_consumer_that_stops_early_leaves_no_thread(store: Store) -> None:
    with ReadAhead(store, itertools.cycle(range(20)), kind="bits") as ring:
        for n, lease in enumerate(ring):
            lease.release()
            if n == 2:
                break
        assert alive()
    assert not alive()
    with pytest.raises(StopIteration):
        next(ring)
    ring.close()


def test_a_ring_that_is_dropped_ends_its_threads(store: Store) -> None:
    ring = ReadAhead(store, itertools.cycle(range(20)), kind="bits")
    next(ring).release()
    del ring
    gc.collect()  # then the fixture waits for the threads


ABANDONED = """
import atexit, sys, threading, time

def order():
    yield 0
    time.sleep(0.5)
    yield 0

# what is registered first is called last
atexit.register(lambda: print([t.name for t in threading.enumerate() if t.name.startswith("hscache-read")]))
import hscache
from hscache.store.ring import ReadAhead

ring = ReadAhead(hscache.open(sys.argv[1]), order(), buffers=2, threads=1, max_tokens=99, kind="numpy")
with next(ring) as sample:
    print(sample.sample_id)
"""


def test_the_interpreter_ends_only_behind_the_threads_of_a_ring_that_was_never_closed(little: Little) -> None:
    """Python ends such a thread wherever it next asks for the lock; within a C++ library that is an abort."""
    ended = subprocess.run(
        [sys.executable, "-c", ABANDONED, str(little.path)], capture_output=True, text=True, timeout=100, check=False
    )
    assert (ended.returncode, ended.stdout.splitlines()[1:]) == (0, ["[]"]), ended.stderr


def test_an_error_in_the_consumer_ends_the_threads(store: Store) -> None:
    order = itertools.cycle(range(20))
    with pytest.raises(ZeroDivisionError), ReadAhead(store, order, kind="bits") as ring, next(ring):
        1 / 0  # noqa: B018
    assert not alive()


def test_what_is_still_leased_at_the_end_stays_as_it_is(little: Little, store: Store) -> None:
    with ReadAhead(store, range(20), kind="bits") as ring:
        lease = next(ring)
    assert_is(lease.sample, little)
    lease.release()


def test_memory_is_page_locked_where_cuda_is(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    real = Store.buffers

    def buffers(self: Store, *args: Any, pinned: bool = False, **kwargs: Any) -> Any:
        asked.append(pinned)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Store, "buffers", buffers)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    ReadAhead(store, [], buffers=1).close()
    ReadAhead(store, [], buffers=1, kind="bits").close()
    ReadAhead(store, [], buffers=1, pinned=False).close()
    assert asked == [True, False, False]
