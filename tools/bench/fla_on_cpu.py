"""Run fla's own Triton kernels on CPU tensors, through Triton's interpreter. For tests only: it is very slow.

``import fla_on_cpu`` (or call :func:`install`) *before* triton, fla and any transformers model are imported: the
choice of an interpreter is made when a kernel is decorated, and transformers' choice of fla when it is imported.

Triton's interpreter runs kernels in numpy, and lacks four things that fla needs:

1. *Autotuning* measures on a device. The first configuration is taken instead; every configuration must give the same
   result.
2. *Loop counters* of ``for i in range(n)`` are plain integers there, while compiled kernels call ``i.to(tl.int64)``.
3. *bf16* is kept as raw uint16. ``tl.dot`` and arithmetic would compute with the raw integers, and the conversion to
   bf16 truncates. All are replaced by exact float32 arithmetic with round-to-nearest-even, as the hardware does.
4. *Devices*: fla <= 0.5.1 enters ``torch.cpu.device(index)``, which torch lacks.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

_ARITHMETIC = (np.add, np.subtract, np.multiply, np.divide, np.fmax, np.fmin, np.maximum, np.minimum)


def install() -> None:
    """Set up Triton's interpreter for fla. Does nothing the second time."""
    if getattr(install, "done", False):
        return
    if "triton" in sys.modules or "fla" in sys.modules:
        raise RuntimeError("fla_on_cpu must be installed before triton and fla are imported")
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("FLA_CACHE_RESULTS", "0")  # its autotuning cache would ask for a GPU's name
    from triton.runtime import autotuner, interpreter

    autotuner.Autotuner._bench = lambda self, *args, config=None, **meta: [0.0, 0.0, 0.0]
    _give_loop_counters_tensor_methods(interpreter)
    _compute_bf16_in_float32(interpreter)
    if not hasattr(torch.cpu, "device"):
        torch.cpu.device = lambda index=None: contextlib.nullcontext()  # type: ignore[attr-defined]
    install.done = True  # type: ignore[attr-defined]


def bf16_to_float32(raw: np.ndarray) -> np.ndarray:
    """Return the values of bf16 numbers given as uint16."""
    return (np.ascontiguousarray(raw).astype(np.uint32) << 16).view(np.float32).reshape(raw.shape)


def float32_to_bf16(values: np.ndarray) -> np.ndarray:
    """Round to bf16 (to nearest, ties to even) and return the numbers as uint16."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).reshape(values.shape)


def _give_loop_counters_tensor_methods(interpreter: Any) -> None:
    call = interpreter.GridExecutor.__call__

    def number(value: Any) -> int:
        return int(value.handle.data.item()) if hasattr(value, "handle") else int(getattr(value, "value", value))

    def tensor_range(*bounds: Any) -> Iterator[Any]:
        for i in builtins.range(*(number(bound) for bound in bounds)):
            yield interpreter._implicit_cvt(i)

    def call_with_tensor_range(self: Any, *args: Any, **kwargs: Any) -> Any:
        names = self.fn.__globals__
        missing = object()
        before = names.get("range", missing)
        names["range"] = tensor_range
        try:
            return call(self, *args, **kwargs)
        finally:
            if before is missing:
                names.pop("range", None)
            else:
                names["range"] = before

    interpreter.GridExecutor.__call__ = call_with_tensor_range


def _compute_bf16_in_float32(interpreter: Any) -> None:
    import triton.language as tl

    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
    convert, dot, binary = interpreter._convert_float, builder.create_dot, builder.binary_op

    def is_bf16(value: Any) -> bool:
        return bool(value.dtype.scalar == tl.bfloat16)

    def widen(value: Any) -> Any:
        return handle(bf16_to_float32(value.data), tl.float32) if is_bf16(value) else value

    def convert_float(values: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if source == tl.bfloat16 and target == tl.float32:
            return bf16_to_float32(values)
        if source == tl.float32 and target == tl.bfloat16:
            return float32_to_bf16(values)
        result: np.ndarray = convert(values, source, target, rounding)
        return result

    def create_dot(self: Any, a: Any, b: Any, accumulator: Any, precision: Any, imprecise: Any) -> Any:
        return dot(self, widen(a), widen(b), accumulator, precision, imprecise)

    def binary_op(self: Any, left: Any, right: Any, operation: Callable[..., Any]) -> Any:
        if is_bf16(left) and operation in _ARITHMETIC:
            return handle(float32_to_bf16(operation(widen(left).data, widen(right).data)), tl.bfloat16)
        return binary(self, left, right, operation)

    interpreter._convert_float = convert_float
    builder.create_dot = create_dot
    builder.binary_op = binary_op


install()
