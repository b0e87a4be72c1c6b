"""What a run says while it goes: one dense line per interval, the same as a record."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import torch

from hscache.console import duration, say, size
from trainer.data import Pack
from trainer.step import Trainer


class Log:
    """Figures between two log lines.

    Args:
        trainer: What is trained.
        step: Steps done before this session.

    Attributes:
        waited: Seconds that the loop waited for data since the last line; the loop adds to it.
    """

    def __init__(self, trainer: Trainer, step: int) -> None:
        self._t, self._begin, self._first = trainer, time.monotonic(), step
        self._since, self.waited = self._begin, 0.0
        self._tokens = self._blocks = 0

    def add(self, record: dict[str, Any], packs: list[Pack]) -> None:
        """Count a step's work."""
        self._tokens += sum(len(pack.positions_T) for pack in packs) * self._t.world.size
        self._blocks += record["blocks"]

    def line(self, step: int, record: dict[str, Any]) -> dict[str, Any]:
        """Say a line and return it as a record."""
        now = time.monotonic()
        spent = max(now - self._since, 1e-9)
        wait, tokens = self.waited / spent, self._tokens / spent
        left = (now - self._begin) / max(step - self._first, 1) * (self._t.total_steps - step)
        memory = peak_memory_bytes(self._t.world.device)
        acc = " ".join(f"{a:.2f}"[1:] if a < 1 else "1.0" for a in record["acc"][:7])
        say(
            f"step {step}/{self._t.total_steps} | loss {record['loss']:.4f} | tau {record['tau']:.3f} | acc {acc} | "
            f"lr {record['lr']:.2e} | norm {record['grad_norm']:.2f} | {tokens:,.0f} tok/s | wait {wait:.1%} | "
            f"{size(memory)} | ETA {duration(left)}"
        )
        out = {
            "step": step,
            "kind": "train",
            **record,
            "tokens_per_s": tokens,
            "blocks_per_s": self._blocks / spent,
            "wait": wait,
            "peak_memory_bytes": memory,
        }
        self._since, self.waited, self._tokens, self._blocks = time.monotonic(), 0.0, 0, 0
        return out


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that this process had: of the device, or its resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
