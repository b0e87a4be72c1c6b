"""A store is read whole: into reused buffers, by many threads and processes, with few open files, without Zarr."""

from __future__ import annotations

import itertools
import multiprocessing
import pickle
import shutil
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import google_crc32c
import numpy as np
import pytest
import torch

import hscache
from hscache.errors import IntegrityError
from hscache.rows import Sample
from hscache.store.codecs import NAMES
from hscache.store.direct import ArrayFile
from hscache.store.reader import Store
from tests.made.stores import Little, corpus_rows, flip, little_manifest, make_store, same_bits


@pytest.fixture(scope="module", params=NAMES)
def little(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Little:
    rows = corpus_rows([2 + 7 * i % 23 for i in range(30)])
    manifest = little_manifest(store={"codec": request.param})
    return make_store(tmp_path_factory.mktemp("direct") / "store", rows, manifest=manifest)


def assert_whole(store: Store, little: Little, i: int, **how: Any) -> None:
    sample = store.sample(i, kind="bits", **how)
    arrays = little.arrays[sample.sample_id]
    for name in ("input_ids", "loss_mask", "hidden_states", "final_state"):
        assert same_bits(getattr(sample, name), arrays[name]), (i, name)
    assert sample.logits is not None
    for name in ("ids", "logprobs", "lse"):
        assert same_bits(getattr(sample.logits, name), arrays[f"logit_{name}"])


def test_reused_buffers_give_what_fresh_memory_gives(little: Little) -> None:
    store = hscache.open(little.path)
    memory = store.buffers()
    for i in [*range(len(store)), 3, 0]:
        assert_whole(store, little, i, out=memory)
        assert_whole(store, little, i, out=memory, verify=True, crc=False)
        assert np.shares_memory(store.sample(i, kind="bits", out=memory).hidden_states, memory.arrays["hidden_states"])
        states = store.sample(i, out=memory).hidden_states
        assert states.dtype == torch.bfloat16
        assert states.data_ptr() == memory.arrays["hidden_states"].ctypes.data
        numbers = store.sample(i, kind="numpy", out=memory, stop=1)
        assert numbers.hidden_states.dtype == np.float32
        taps = store.buffers(2, taps=1)
        part = store.sample(i, taps=[3], stop=2, kind="bits", out=taps).hidden_states
        assert same_bits(part, little.arrays[store.sample_ids[i]]["hidden_states"][:2, [2]].copy())


def test_buffers_that_are_too_small_are_refused(little: Little) -> None:
    store = hscache.open(little.path)
    i = int(store.n_tokens.argmax())
    for memory, how in (
        (store.buffers(int(store.n_tokens[i]) - 1), {}),
        (store.buffers(taps=1), {}),
        (store.buffers(), {"taps": [0]}),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            store.sample(i, out=memory, **how)  # type: ignore[arg-type]


def test_threads_read_one_shard_at_once_and_files_are_dropped_under_them(little: Little) -> None:
    store = hscache.open(little.path, decode_threads=2)
    store._shards._max_open = 2  # fewer than a sample needs: every read drops a file that another thread may be reading
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        memory = store.buffers()
        try:
            for i in np.random.default_rng(seed).integers(0, len(store), 60).tolist():
                assert_whole(store, little, i, out=memory)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert len(store._shards._open) <= 2


def test_a_file_whose_end_lets_other_threads_run_leaves_the_cache_whole(
    little: Little, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, an entry replaced by two threads at once left the cache's order with a key that its table had not."""
    store = hscache.open(little.path)
    store._shards._max_open = 2
    end = ArrayFile.__del__

    def slow(self: ArrayFile) -> None:
        time.sleep(0)  # as closing does: it gives the interpreter's lock away
        end(self)

    monkeypatch.setattr(ArrayFile, "__del__", slow)
    names = ["input_ids", "loss_mask", "final_state", "logit_lse"]
    deadline = time.monotonic() + 2

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        while time.monotonic() < deadline:
            store._shards.read(0, names[rng.integers(4)], slice(0, 1))

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    finally:
        sys.setswitchinterval(interval)
    assert not any(thread.is_alive() for thread in threads)
    assert len(store._shards._open) == len(list(store._shards._open.items())) <= 2


def _open_files(root: Path) -> int:
    """Return how many descriptors of this process are of files of a store."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the listing's own
            found += str(link.readlink()).startswith(str(root))
    return found


def _settles(root: Path, most: int) -> bool:
    """Wait until a decoding thread has let go of the last file it read."""
    deadline = time.monotonic() + 5
    while _open_files(root) > most and time.monotonic() < deadline:
        time.sleep(0.001)
    return _open_files(root) <= most


def test_descriptors_are_bounded_and_given_back(little: Little, tmp_path: Path) -> None:
    shutil.copytree(little.path, tmp_path / "store")  # one that no other test has open
    root = tmp_path / "store"
    store = hscache.open(root)
    store._shards._max_open = 3
    for i in range(len(store)):
        store.sample(i, kind="bits")
        assert _settles(root, 3)
    assert _open_files(root) == 3
    store.close()
    assert _settles(root, 0)
    store.sample(0, kind="bits")
    assert _open_files(root) > 0
    del store
    assert _settles(root, 0)


def _digest(store: Store, i: int) -> str:
    store.check_digest(i)
    return store.digests[i]


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_store_that_was_read_is_read_in_other_processes(little: Little, method: str) -> None:
    store = hscache.open(little.path, decode_threads=2)
    assert_whole(store, little, 0)
    with multiprocessing.get_context(method).Pool(2) as pool:
        found = pool.starmap(_digest, [(store, i) for i in range(6)])
    assert found == store.digests[:6]


def _read_inherited(store: Store, connection: Any) -> None:
    connection.send([_digest(store, i) for i in range(6)])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_forked_process_reads_the_store_that_it_inherited(little: Little) -> None:
    store = hscache.open(little.path, decode_threads=2)
    assert_whole(store, little, 0)
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_read_inherited, args=(store, there))
    process.start()
    assert here.poll(60)
    assert here.recv() == store.digests[:6]
    process.join()
    assert_whole(store, little, 1)


def test_a_pickle_holds_no_descriptor_nor_thread(little: Little) -> None:
    store = hscache.open(little.path)
    size = len(pickle.dumps(store))
    for i in range(len(store)):
        store.sample(i)
    assert len(pickle.dumps(store)) <= size + 100
    assert_whole(pickle.loads(pickle.dumps(store)), little, 2)


def test_zarr_is_not_imported_to_read_a_store(little: Little) -> None:
    import subprocess

    code = (
        f"import sys, hscache; hscache.open({str(little.path)!r}).sample(0, kind='bits'); print('zarr' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "False\n"


def test_an_array_of_another_layout_is_read_through_zarr(little: Little, tmp_path: Path) -> None:
    """As a future codec would be: the direct reader knows nothing of it."""
    store = hscache.open(little.path)
    with patch("hscache.store.shard_reader.read_layout", return_value=None):
        memory = store.buffers()
        for i in range(len(store)):
            assert_whole(store, little, i, out=memory)
        part = store.sample(1, taps=[3, 0], kind="bits").hidden_states
    assert same_bits(part, little.arrays[store.sample_ids[1]]["hidden_states"][:, [2, 0]].copy())
    shutil.copytree(little.path, tmp_path / "store")
    flip(tmp_path / "store/shards/00000.zarr/hidden_states/c.0.0.0", position=8)
    other_layout = patch("hscache.store.shard_reader.read_layout", return_value=None)
    with other_layout, pytest.raises(IntegrityError, match=r"00000\.zarr/hidden_states: ") as caught:
        list(hscache.open(tmp_path / "store"))
    assert caught.value.code == "store-damaged"


@pytest.mark.parametrize("mask", [(1, 1, 1, 1), (0, 0, 0, 0), (0, 1, 1, 1)])
def test_a_mask_of_another_count_is_damage_and_never_gives_another_samples_logits(
    tmp_path: Path, mask: tuple[int, ...]
) -> None:
    rows = [Sample(i, f"s{i}", np.arange(4, dtype="i4"), np.array([0, 1, 0, 1], "u1")) for i in range(2)]
    root = make_store(tmp_path / "store", rows).path
    path = root / "shards/00000.zarr/loss_mask/c.0"
    data = bytearray(path.read_bytes())
    data[:8] = bytes(mask) * 2
    data[4096:4100] = google_crc32c.value(bytes(data[:4096])).to_bytes(4, "little")
    path.write_bytes(data)
    for i, (start, stop) in itertools.product((0, 1), ((0, 4), (1, 4), (0, 3))):
        store = hscache.open(root)
        if (start == 0 and stop == 4) or sum(mask[1:stop]) > 2:
            with pytest.raises(IntegrityError) as caught:
                store.sample(i, start=start, stop=stop)
            assert caught.value.code == "store-damaged"
            assert "loss_mask" in caught.value.message
