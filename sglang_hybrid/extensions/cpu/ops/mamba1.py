"""Mamba1 prefill as SGLang's ``MambaMixer1`` calls it.

Its convolutions and its decode step are the Mamba2 ones (``ops.mamba2``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from sglang_hybrid.kernels.selective_scan import selective_scan_prefill

if TYPE_CHECKING:
    from sglang_hybrid.checkpoints.tracks import SequenceWriter


def selective_scan(
    *,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    h0: Tensor,
    state_writer: SequenceWriter | None = None,
) -> tuple[Tensor, Tensor]:
    """One sequence, like ``MambaMixer1._selective_scan``: (final state [D, N], y [T, D]).

    Shapes: x and dt [T, D], A [D, N], B and C [T, N], h0 [D, N]. ``state_writer`` gets the states
    that it asks for.
    """
    wanted = state_writer.positions if state_writer else []
    done = selective_scan_prefill(
        x,
        dt,
        A,
        B,
        C,
        [0, x.shape[0]],
        initial_states=h0[None],
        positions=[(0, tokens) for tokens in wanted],
    )
    if state_writer is not None:
        for state, tokens in zip(done.states_at, wanted, strict=True):
            state_writer.put(state, tokens)
    return done.final_states[0], done.y
