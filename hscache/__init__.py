"""Run a large target model once, keep its hidden states, train speculative-decoding drafters from disk.

``hscache.open(path)`` reads a store; everything else is a command (``hscache --help``).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# OpenMP's threads wait for each other after every product. libgomp lets them spin 300,000 times, which on a busy
# machine keeps the core from the very thread that is waited for: beside four busy processes on two cores a build kept 8
# % of its speed, with 1,000 it keeps a third, and a quiet machine loses nothing (tools/bench/bench_busy.py). It is read
# when torch loads.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

if TYPE_CHECKING:
    from hscache.store.reader import open_store as open  # noqa: A004

__version__ = "0.1.0"
__all__ = ["__version__", "open"]


def __getattr__(name: str) -> Any:
    """Import the reader when it is first asked for: ``hscache --help`` must not pay for zarr."""
    if name == "open":
        from hscache.store.reader import open_store

        return open_store
    raise AttributeError(f"module 'hscache' has no attribute {name!r}")
