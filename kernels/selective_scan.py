"""Mamba1 over a packed batch.

Definition: ``naive.selective_scan`` (Gu & Dao 2023, "Mamba"). A is a full matrix, so no matrix
product stands for the recurrence as it does in Mamba2. Instead all chunks of a block step through
their tokens side by side, twice: first from zero, to learn what each chunk adds; then from the
state each chunk is really entered with. Decays are only multiplied, never divided by, so nothing
overflows.
"""

import torch
from torch import Tensor

from sglang_hybrid.kernels.chunks import (
    Positions,
    Scanned,
    blocks,
    initial_or_zero,
    states_at_start,
)

CHUNK = 16
STATES_PER_BLOCK = 1 << 20
"""Elements of the [L, chunks, D, N] states held at once: a few megabytes."""


def selective_scan_prefill(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    cu_seqlens: list[int],
    *,
    initial_states: Tensor | None = None,
    positions: Positions = (),
    chunk: int = CHUNK,
) -> Scanned:
    """Mamba1 over a packed batch.

    Shapes: x and dt [T, D] (dt the final step size), A [D, N] (negative), B and C [T, N],
    initial_states [S, D, N] (None: zeros). Returns y [T, D] in x's dtype, and in float32 the final
    states [S, D, N] and the states at ``positions`` [n, D, N]. Skip connection and gate are the
    caller's.
    """
    channels, size = A.shape
    rate = A.float()
    y = torch.zeros_like(x, memory_format=torch.contiguous_format)
    initial = initial_or_zero(initial_states, len(cu_seqlens) - 1, (channels, size), x.device)
    final, found = initial.clone(), states_at_start(initial, positions, cu_seqlens)
    state = initial.new_zeros(channels, size)
    per_block = max(1, STATES_PER_BLOCK // (chunk * channels * size))
    for block in blocks(cu_seqlens, chunk, per_block, positions, x.device):
        step = block.gather(dt)
        if not block.full:
            step = step.masked_fill(~block.valid[..., None], 0.0)
        # Time comes first, so that one token of every chunk is one contiguous slice.
        step = step.transpose(0, 1)
        inputs = step * block.gather(x).transpose(0, 1)
        decay = (step[..., None] * rate).exp_()
        states = inputs[..., None] * block.gather(B).transpose(0, 1)[:, :, None, :]

        added = states[0]
        for t in range(1, chunk):
            added = torch.addcmul(states[t], decay[t], added)
        factor = (step.sum(0)[..., None] * rate).exp_()
        entering = torch.empty_like(added)
        for i, sequence in enumerate(block.sequence):
            entering[i] = initial[sequence] if block.opens[i] else state
            state = torch.addcmul(added[i], factor[i], entering[i])
            if block.closes[i]:
                final[sequence] = state

        before = entering
        for t in range(chunk):
            before = states[t].addcmul_(decay[t], before)
        read = states @ block.gather(C).transpose(0, 1)[..., None]
        block.store(read[..., 0].transpose(0, 1).to(y.dtype), y)
        for index, at, count in block.asked:
            found[index] = states[count - 1, at]
    return Scanned(y, final, found)
