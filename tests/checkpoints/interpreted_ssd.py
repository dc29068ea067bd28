"""SGLang's Triton kernels for Mamba2, patched, in Triton's interpreter: a program for test_triton.

Fails unless every tracked state and every final state is the one of the definition and was computed
from the tensors' own memory. Triton reads TRITON_INTERPRET=1 when it is imported, hence a process
of its own.
"""

import contextlib
import random
from itertools import accumulate, pairwise
from typing import Any

import torch

from sglang_hybrid import patching

patching.install()

import triton  # noqa: E402
from sglang.kernels.ops.mamba.triton_ops import (  # noqa: E402
    mamba_chunk_scan_combined,
    ssd_bmm,
    ssd_chunk_scan,
    ssd_chunk_state,
    ssd_combined,
    ssd_state_passing,
)
from sglang.srt.layers.attention.mamba.mamba2_metadata import Mamba2Metadata  # noqa: E402

from sglang_hybrid.kernels import naive  # noqa: E402

HEADS, WIDTH, GROUPS, SIZE, CHUNK = 2, 16, 1, 16, 16
LENGTHS = [1, 37, 16, 5]


def run_without_a_device() -> None:
    """One configuration per kernel, since choosing needs a clock on the device; no device guard."""
    for module in (ssd_bmm, ssd_chunk_scan, ssd_chunk_state, ssd_state_passing):
        for kernel in vars(module).values():
            if hasattr(kernel, "configs"):
                sizes = dict.fromkeys(kernel.configs[0].kwargs, 16)
                kernel.configs = [triton.Config(sizes)]
    torch.cpu.device = lambda index: contextlib.nullcontext()


def refuse_backward_ranges() -> None:
    """A range that ends before it begins is read from outside the kernel's tensors."""
    kernel = ssd_combined.chunk_state_varlen

    def checked(
        B: Any, x: Any, dt: Any, decays: Any, bounds: torch.Tensor, *more: Any, **named: Any
    ) -> Any:
        assert (bounds.diff(dim=-1) >= 0).all(), f"a range of {bounds.tolist()} runs backwards"
        return kernel(B, x, dt, decays, bounds, *more, **named)

    ssd_combined.chunk_state_varlen = checked


def check(resumed: bool) -> None:
    """All tracks of one prefill, several per sequence and in no order, with or without prefixes."""
    torch.manual_seed(0)
    bounds = list(accumulate(LENGTHS, initial=0))
    tokens, sequences = bounds[-1], len(LENGTHS)
    x, dt = torch.randn(1, tokens, HEADS, WIDTH), torch.randn(1, tokens, HEADS)
    A, D, bias = -torch.rand(HEADS) - 0.1, torch.randn(HEADS), torch.randn(HEADS)
    B, C = torch.randn(2, 1, tokens, GROUPS, SIZE)
    initial = torch.randn(sequences, HEADS, WIDTH, SIZE) if resumed else None
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    indices = offsets = None
    if resumed:
        indices, offsets = Mamba2Metadata._query_start_loc_to_chunk_indices_offsets(
            cu_seqlens, CHUNK, tokens
        )
    borders = [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK]
    asked = [(s, at) for s, n in enumerate(LENGTHS) for at in {*borders, n} if at <= n]
    random.Random(7).shuffle(asked)
    _, final, tracked = mamba_chunk_scan_combined(
        x,
        dt,
        A,
        B,
        C,
        chunk_size=CHUNK,
        D=D,
        dt_bias=bias,
        initial_states=initial,
        seq_idx=torch.repeat_interleave(torch.arange(sequences).int(), cu_seqlens.diff())[None],
        chunk_indices=indices,
        chunk_offsets=offsets,
        cu_seqlens=cu_seqlens,
        dt_softplus=True,
        out=torch.empty_like(x),
        state_dtype=torch.float32,
        return_varlen_states=True,
        return_track_states=True,
        track_seq_idx=torch.tensor([s for s, _ in asked]),
        track_end_locs=torch.tensor([bounds[s] + at for s, at in asked]),
    )
    for s, (a, b) in enumerate(pairwise(bounds)):
        start = None if initial is None else initial[s]
        _, states = naive.ssd(x[0, a:b], dt[0, a:b], A, B[0, a:b], C[0, a:b], D, bias, True, start)
        torch.testing.assert_close(final[s].double(), states[-1], rtol=1e-4, atol=1e-5)
        for i, (owner, at) in enumerate(asked):
            if owner == s:
                torch.testing.assert_close(
                    tracked[0, i].double(), states[at], rtol=1e-4, atol=1e-5, msg=f"{s} at {at}"
                )


if __name__ == "__main__":
    run_without_a_device()
    refuse_backward_ranges()
    check(resumed=False)
    check(resumed=True)
