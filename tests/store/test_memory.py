"""A reader's memory does not grow with the store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from synthetic_store import make_samples, random_states, repeat_store, write_store

TIMES = 100
READ = """
import sys
import numpy as np
import hscache
from hscache.store.ring import ReadAhead

store, codec = hscache.open(sys.argv[1], decode_threads=2), sys.argv[2]
order = np.random.default_rng(0).permutation(len(store)).tolist()
tokens = 0
with ReadAhead(store, order, buffers=3, threads=2, kind="bits", verify=codec == "raw") as ring:
    for lease in ring:
        with lease as sample:
            tokens += len(sample.input_ids)
memory = store.buffers(taps=1)
for i in order:
    store.sample(i, taps=[1], kind="bits", out=memory, crc=False)
    store.sample(i, stop=5, kind="numpy")
# VmHWM is this program's own; ru_maxrss would be the parent's where that was larger
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(tokens, status["VmHWM"].split()[0])
"""


def peak_kib(root: Path, codec: str) -> tuple[int, int]:
    """Read all of a store in a process of its own; return its tokens and its peak of resident memory."""
    answer = subprocess.run([sys.executable, "-c", READ, str(root), codec], capture_output=True, text=True, check=True)
    tokens, peak = map(int, answer.stdout.split())
    return tokens, peak


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_peak_memory_of_a_reader_is_that_of_a_store_a_hundredth_the_size(tmp_path: Path, codec: str) -> None:
    lengths = [96, 160, 128, 200, 64, 32]
    samples = make_samples(lengths, 3, 256, random_states(sum(lengths) * 4 * 256))
    write_store(tmp_path / "small", samples, codec=codec, chunk_tokens=32)
    repeat_store(tmp_path / "small", tmp_path / "large", TIMES)
    small_tokens, small = peak_kib(tmp_path / "small", codec)
    large_tokens, large = peak_kib(tmp_path / "large", codec)
    assert large_tokens == TIMES * small_tokens == TIMES * sum(lengths)
    assert large <= 1.05 * small, f"{large} KiB for {TIMES} shards, {small} KiB for one"
