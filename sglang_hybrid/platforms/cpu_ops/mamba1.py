"""Mamba1 prefill as SGLang's ``MambaMixer1`` calls it.

Its convolutions and its decode step are the Mamba2 ones (``cpu_ops.mamba2``).
"""

from torch import Tensor

from sglang_hybrid.kernels.selective_scan import selective_scan_prefill


def selective_scan(
    *, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, h0: Tensor
) -> tuple[Tensor, Tensor]:
    """One sequence, like ``MambaMixer1._selective_scan``: (final state [D, N], y [T, D]).

    Shapes: x and dt [T, D], A [D, N], B and C [T, N], h0 [D, N].
    """
    done = selective_scan_prefill(x, dt, A, B, C, [0, x.shape[0]], initial_states=h0[None])
    return done.final_states[0], done.y
