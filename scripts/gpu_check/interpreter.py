"""Triton's interpreter, made to compute with bfloat16 and to round to it as a device does.

Importing this module changes the interpreter of the process.
"""

from typing import Any

import numpy as np
import torch
from triton import language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_multiply, _cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl
_compute = InterpreterBuilder.binary_op


def _multiply_values(self: Any, a: Any, b: Any, *more: Any) -> Any:
    """The interpreter holds bf16 as its bits, and would multiply those."""
    a, b = (_cast(self, t, tl.float32) if t.dtype.scalar == tl.bfloat16 else t for t in (a, b))
    return _multiply(self, a, b, *more)


def _compute_values(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
    """Sums, products and comparisons of bf16: in float32, rounded."""
    if lhs.dtype.scalar != tl.bfloat16:
        return _compute(self, lhs, rhs, op)
    found = _compute(self, *(_cast(self, t, tl.float32) for t in (lhs, rhs)), op)
    is_number = found.data.dtype == np.float32
    return _cast_to_nearest(self, found, tl.bfloat16) if is_number else found


def _cast_to_nearest(self: Any, value: Any, dtype: Any) -> Any:
    """The interpreter would cut float32 off to bf16; devices round to the nearest, ties to even."""
    if (value.dtype.scalar, dtype.scalar) == (tl.float32, tl.bfloat16):
        bits = torch.from_numpy(np.ascontiguousarray(value.data)).bfloat16().view(torch.uint16)
        return TensorHandle(bits.numpy(), dtype.scalar)
    return _cast(self, value, dtype)


def _constant(self: Any, value: float) -> TensorHandle:
    """The interpreter has none of bf16."""
    bits = torch.tensor([value]).bfloat16().view(torch.uint16)
    return TensorHandle(bits.numpy(), tl.bfloat16)


InterpreterBuilder.get_bf16 = _constant
InterpreterBuilder.create_dot = _multiply_values
InterpreterBuilder.binary_op = _compute_values
InterpreterBuilder.cast_impl = _cast_to_nearest
