"""Run a large target model once, keep its hidden states, train speculative-decoding drafters from disk.

``hscache.open(path)`` reads a store; everything else is a command (``hscache --help``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
