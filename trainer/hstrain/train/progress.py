"""Report a run's progress: a log line per interval, the same figures as a JSON record, and optionally TensorBoard."""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hscache.console import duration, say, size
from hscache.errors import EnvironmentFault
from hstrain.data.packs import Pack
from hstrain.drafter.model import DrafterConfig
from hstrain.train.step import Trainer

_PEAK_FLOPS: tuple[tuple[set[str], float], ...] = (
    ({"H100", "PCIe"}, 756e12),
    ({"H800", "PCIe"}, 756e12),
    ({"H100", "NVL"}, 835e12),
    ({"H200", "NVL"}, 835e12),
    ({"A100"}, 312e12),
    ({"H100"}, 989e12),
    ({"H200"}, 989e12),
    ({"GH200"}, 989e12),
    ({"H800"}, 989e12),
    ({"B200"}, 2250e12),
    ({"L40S"}, 362e12),
)
"""Words of a device's name -> dense bf16 FLOP/s from the vendor's data sheet; the first entry that fits counts."""


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
        self._since, self.waited, self._paused = self._begin, 0.0, 0.0
        self._tokens = self._blocks = 0
        self._flops = 0.0
        self._peak = peak_flops(trainer.world.device)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time spent inside (validations, checkpoints) for the speed of training."""
        began = time.monotonic()
        yield
        self._paused += time.monotonic() - began

    def add(self, record: dict[str, Any], packs: list[Pack]) -> None:
        """Count a step's work."""
        self._tokens += sum(len(pack.positions_T) for pack in packs) * self._t.world.size
        rows, blocks = (
            sum(len(x) for x in xs) for xs in zip(*((p.positions_T, p.anchors_N) for p in packs), strict=True)
        )
        self._flops += step_flops(self._t.config, rows=rows, blocks=blocks)
        self._blocks += record["blocks"]

    def line(self, step: int, record: dict[str, Any]) -> dict[str, Any]:
        """Print the line of a step and return its record."""
        now = time.monotonic()
        spent = max(now - self._since - self._paused, 1e-9)
        wait, tokens = self.waited / spent, self._tokens / spent
        left = (now - self._begin) / max(step - self._first, 1) * (self._t.total_steps - step)
        memory = peak_memory_bytes(self._t.world.device)
        mfu = f" | mfu {self._flops / spent / self._peak:.1%}" if self._peak is not None else ""
        acc = " ".join(f"{a:.2f}"[1:] if a < 1 else "1.0" for a in record["acc"][:7])
        say(
            f"step {step}/{self._t.total_steps} | loss {record['loss']:.4f} | tau_all {record['tau']:.3f} | acc {acc} "
            f"| lr {record['lr']:.2e} | norm {record['grad_norm']:.2f} | {tokens:,.0f} tok/s | wait {wait:.1%} | "
            f"{size(memory)}{mfu} | ETA {duration(left)}"
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
        if self._peak is not None:
            out["mfu"] = self._flops / spent / self._peak
        self._since, self.waited, self._paused = time.monotonic(), 0.0, 0.0
        self._tokens, self._blocks, self._flops = 0, 0, 0.0
        return out


class Board:
    """Scalars of a run for TensorBoard, in ``RUN/tensorboard``.

    Args:
        folder: Where it writes.

    Raises:
        EnvironmentFault: ``dependency-missing``.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise EnvironmentFault(
                "dependency-missing", "tensorboard is not installed", hint="pip install 'hscache[tensorboard]'"
            ) from error
        self._writer = SummaryWriter(str(folder))

    def add(self, record: dict[str, Any]) -> None:
        """Write the numbers of a record of ``metrics.jsonl``."""
        for name, value in record.items():
            if isinstance(value, int | float) and name != "step":
                self._writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])
        self._writer.flush()


def step_flops(config: DrafterConfig, *, rows: int, blocks: int) -> float:
    """Return the floating-point operations of the matrix products of a step; attention's own are left out.

    Args:
        config: The drafter.
        rows: Context rows.
        blocks: Blocks.
    """
    H, KD, Q = config.hidden_size, config.num_kv_heads * config.head_dim, blocks * config.block_size
    fc = 2 * rows * len(config.taps) * H * H * 2  # forward and weights: the states take no gradient
    context = 2 * rows * H * 2 * KD * 3
    layer = 2 * Q * H * (2 * config.num_heads * config.head_dim + 2 * KD + 3 * config.intermediate_size) * 3
    head = 2 * blocks * (config.block_size - 1) * H * config.vocab_size * 2  # the head is frozen
    return float(fc + config.num_layers * (context + layer) + head)


def peak_flops(device: torch.device) -> float | None:
    """Return the dense bf16 peak of a GPU in FLOP/s, for the model FLOP utilisation (MFU); None if it is unknown."""
    if device.type != "cuda":
        return None
    words = set(re.split(r"[ -]", torch.cuda.get_device_name(device)))
    if "MIG" in words:  # only a part of the GPU
        return None
    return next((peak for known, peak in _PEAK_FLOPS if known <= words), None)


def peak_memory_bytes(device: torch.device) -> int:
    """Return this process's peak memory: of the device with CUDA, else its resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
