"""Run a large target model once, keep its hidden states, train speculative-decoding drafters from disk.

``hscache.open(path)`` reads a store; everything else is a command (``hscache --help``).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# OpenMP's threads wait for each other after every product. By default libgomp lets them spin 300,000 times; on a busy
# machine this takes the core from the thread they wait for. Next to four busy processes on two cores a build kept 8 %
# of its speed; with 1,000 spins it keeps a third, and on a quiet machine they cost nothing (tools/bench/bench_busy.py).
# The variable is read when torch loads.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

if TYPE_CHECKING:
    from hscache.store.reader import open_store as open  # noqa: A004

__version__ = "0.1.0"
__all__ = ["__version__", "open"]


def __getattr__(name: str) -> Any:
    """Import the reader on first use, so that ``hscache --help`` does not import zarr."""
    if name == "open":
        from hscache.store.reader import open_store

        return open_store
    raise AttributeError(f"module 'hscache' has no attribute {name!r}")
