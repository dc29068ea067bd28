"""Triton's interpreter, made to multiply and round bfloat16 as a device does.

Importing this module changes the interpreter of the process.
"""

import numpy as np
import torch
from triton import language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_multiply, _cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl


def _multiply_values(self, a, b, *more):
    """The interpreter holds bf16 as its bits, and would multiply those."""
    a, b = (_cast(self, t, tl.float32) if t.dtype.scalar == tl.bfloat16 else t for t in (a, b))
    return _multiply(self, a, b, *more)


def _cast_to_nearest(self, value, dtype):
    """The interpreter would cut float32 off to bf16; devices round to the nearest, ties to even."""
    if (value.dtype.scalar, dtype.scalar) == (tl.float32, tl.bfloat16):
        bits = torch.from_numpy(np.ascontiguousarray(value.data)).bfloat16().view(torch.uint16)
        return TensorHandle(bits.numpy(), dtype.scalar)
    return _cast(self, value, dtype)


InterpreterBuilder.create_dot = _multiply_values
InterpreterBuilder.cast_impl = _cast_to_nearest
