"""Addresses at the largest sizes: 512 sequences, a million tokens, 256 heads; run in Triton's
interpreter by test_checkpoint_states.

The large tensors have no memory. Each stands at an address of its own, far from the others; what a
kernel would load from it is zero, and an address outside of it fails, as does a 32-bit sum or
product that overflows. The lists of sequences, positions and slots are real. The programs at the
corners of the grid run, for the last states, which have the largest offsets.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, interpreter_builder

from sglang_hybrid.kernels import checkpoint_states as cs
from tests.kernels.launches import Launch, noted

TOKENS, HEADS, SEQUENCES, SLOTS = 1 << 20, 256, 512, 100_000
APART = 1 << 50
"""Bytes between two tensors."""
MOST = (2**31 - 1, 2**16 - 1, 2**16 - 1)
"""CUDA's limits of a grid."""
BATCHES = [[TOKENS // SEQUENCES] * SEQUENCES, [TOKENS]]


class Memory:
    """The addresses of the tensors without memory."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def pointer(self, tensor: Tensor) -> tl.tensor:
        self.tensors.append(tensor)
        pointer = interpreter._implicit_cvt(tensor)
        pointer.handle.data = np.array([len(self.tensors) * APART], dtype=np.uint64)
        return pointer

    def check(self, addresses: Any, mask: Any) -> bool:
        """True if these are addresses of such a tensor. Raises AssertionError if some of them are
        outside of it.
        """
        wanted = addresses[mask]
        if not wanted.size or wanted.max() < APART // 2:
            return not wanted.size
        nth = int(np.rint(wanted[0] / APART))
        tensor = self.tensors[nth - 1]
        last = sum((n - 1) * by for n, by in zip(tensor.shape, tensor.stride(), strict=True))
        offsets = wanted.astype(np.int64) - nth * APART
        assert offsets.min() >= 0 and offsets.max() <= last * tensor.itemsize, (
            f"offsets {offsets.min():,} to {offsets.max():,} bytes in a tensor "
            f"{tuple(tensor.shape)} of {tensor.dtype}, which ends at {last * tensor.itemsize:,}"
        )
        return True


@contextmanager
def watched(memory: Memory) -> Iterator[None]:
    """The interpreter with that memory, where sums and products of 32 bits do not overflow."""
    load, compute = InterpreterBuilder.create_masked_load, InterpreterBuilder.binary_op

    def create_masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *more: Any) -> Any:
        if memory.check(ptrs.data, mask.data):
            kind = interpreter._get_np_dtype(ptrs.get_element_ty())
            return TensorHandle(np.zeros(ptrs.data.shape, dtype=kind), ptrs.get_element_ty())
        return load(self, ptrs, mask, other, *more)

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *more: Any) -> None:
        assert memory.check(ptrs.data, mask.data)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        found = compute(self, lhs, rhs, op)
        if op in (np.add, np.subtract, np.multiply) and found.data.dtype == np.int32:
            exact = op(lhs.data.astype(np.int64), rhs.data.astype(np.int64))
            assert (found.data == exact).all(), f"{op.__name__} overflows: {exact.max():,}"
        return found

    with pytest.MonkeyPatch.context() as patch:
        for replaced in (create_masked_load, create_masked_store, binary_op):
            patch.setattr(InterpreterBuilder, replaced.__name__, replaced)
        yield


def run_corners(launch: Launch) -> None:
    """The programs at the corners of a launch's grid, and the grid itself."""
    assert all(n <= most for n, most in zip(launch.grid, MOST, strict=False)), launch.grid
    memory, kernel = Memory(), launch.kernel.rewrite()
    constants = interpreter.GridExecutor(kernel, launch.kernel.arg_names, launch.grid).constexprs
    arguments = {
        name: value
        if name in constants
        else memory.pointer(value)
        if isinstance(value, Tensor) and value.is_meta
        else interpreter._implicit_cvt(value)
        for name, value in launch.arguments.items()
    }
    grid = launch.grid + (1,) * (3 - len(launch.grid))
    scope = interpreter._patch_lang(kernel)
    try:
        interpreter_builder.set_grid_dim(*grid)
        with watched(memory):
            for program in itertools.product(*({0, n - 1} for n in grid)):
                interpreter_builder.set_grid_idx(*program)
                kernel(**arguments)
    finally:
        scope.restore()


def large(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def lists(lengths: list[int], states: int) -> tuple[Tensor, cs.Targets]:
    """Bounds of the sequences, and ``states`` positions that end at the last token, the first one
    and the last one in front of a chunk's end."""
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    sequences = torch.arange(states) % len(lengths)
    sequences[-1] = len(lengths) - 1
    ends = bounds[sequences + 1].long()
    ends[0] -= 1
    ends[-1] -= 1
    slots = torch.arange(SLOTS - states, SLOTS)
    return bounds, cs.Targets(sequences, ends, slots)


@pytest.mark.parametrize("lengths", BATCHES, ids=["512 sequences", "one sequence"])
@pytest.mark.parametrize("states", [2, 80_000])
@pytest.mark.parametrize("by_channel", [False, True], ids=["token by token", "by channel"])
def test_mamba2(lengths: list[int], states: int, by_channel: bool) -> None:
    width, size, chunk, groups = 128, 256, 64, 8
    cu_seqlens, targets = lists(lengths, states)
    shared = (HEADS * width + 2 * groups * size, TOKENS)
    both = large(*shared).T if by_channel else large(*reversed(shared))
    x, B, _ = both.split([HEADS * width, groups * size, groups * size], dim=1)
    run(
        lambda: cs.save_ssd_states(
            large(SLOTS, HEADS, width, size, dtype=torch.float32),
            targets,
            x=x.unflatten(1, (HEADS, width)),
            dt=large(HEADS, TOKENS // chunk, chunk, dtype=torch.float32),
            A=large(HEADS, dtype=torch.float32),
            B=B.unflatten(1, (groups, size)),
            chunk_states=large(TOKENS // chunk, HEADS, width, size, dtype=torch.float32),
            cu_seqlens=cu_seqlens,
            initial_states=large(len(lengths), HEADS, width, size, dtype=torch.float32),
        )
    )


@pytest.mark.parametrize("lengths", BATCHES, ids=["512 sequences", "one sequence"])
@pytest.mark.parametrize("per_channel", [False, True])
def test_delta_rule(lengths: list[int], per_channel: bool) -> None:
    keys, size = 128, 256
    cu_seqlens, targets = lists(lengths, 80_000)
    chunks = cu_seqlens.diff().add(63) // 64
    run(
        lambda: cs.save_delta_states(
            large(SLOTS, HEADS, size, size, dtype=torch.float32),
            targets,
            keys=large(TOKENS, keys, size),
            corrections=large(TOKENS, HEADS, size),
            decays=large(TOKENS, HEADS, *[size] * per_channel, dtype=torch.float32),
            chunk_states=large(int(chunks.sum()), HEADS, size, size),
            rows=chunks.cumsum(0)[targets.sequences] - 1,
            cu_seqlens=cu_seqlens,
        )
    )


@pytest.mark.parametrize("lengths", [[1, TOKENS - 41, 40], [TOKENS // SEQUENCES] * SEQUENCES])
def test_lightning_attention(lengths: list[int]) -> None:
    """States of the first and the last sequence only: a program walks through a whole one."""
    size = 128
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    sequences = torch.tensor([0] + [len(lengths) - 1] * 3)
    ends = torch.tensor([lengths[0], TOKENS - 2, TOKENS - 1, TOKENS])
    run(
        lambda: cs.save_lightning_states(
            large(SLOTS, HEADS, size, size, dtype=torch.float32),
            cs.Targets(sequences, ends, torch.arange(SLOTS - 4, SLOTS)),
            keys=large(TOKENS, HEADS, size, dtype=torch.float32),
            values=large(TOKENS, 3 * HEADS, size, dtype=torch.float32)[:, :HEADS],
            slopes=large(HEADS, 1, 1, dtype=torch.float32),
            state_indices=torch.arange(SLOTS - 4 - len(lengths), SLOTS - 4),
            resumed=torch.ones(len(lengths), dtype=torch.bool),
            cu_seqlens=bounds,
        )
    )


@pytest.mark.parametrize("lengths", BATCHES, ids=["512 sequences", "one sequence"])
@pytest.mark.parametrize("by_channel", [False, True], ids=["token by token", "by channel"])
@pytest.mark.parametrize("slots", [SLOTS, 1 << 22])
def test_windows(lengths: list[int], by_channel: bool, slots: int) -> None:
    cu_seqlens, targets = lists(lengths, 80_000)
    channels = HEADS * 128 + 2 * 256 * 256
    shape = (channels, TOKENS)
    run(
        lambda: cs.save_windows(
            large(slots, channels, 3),
            targets,
            inputs=large(*shape).T if by_channel else large(*reversed(shape)),
            state_indices=torch.arange(slots - len(lengths), slots),
            resumed=torch.ones(len(lengths), dtype=torch.bool),
            cu_seqlens=cu_seqlens,
        )
    )


def run(save: Callable[[], None]) -> None:
    launches = noted(save)
    assert len(launches) == 1
    run_corners(launches[0])
