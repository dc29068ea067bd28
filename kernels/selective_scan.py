"""Mamba1 over a packed batch.

Definition: ``naive.selective_scan`` (Gu & Dao 2023, "Mamba"). A is a full matrix, so no matrix
product stands for the recurrence as it does in Mamba2. Instead all chunks of a block step through
their tokens side by side, twice: first from zero, to learn what each chunk adds; then from the
state each chunk is really entered with. Decays are only multiplied, never divided by, so nothing
overflows.
"""

import torch
from torch import Tensor

from sglang_hybrid.kernels.chunks import Positions, Scanned, States, blocks, find_inside

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
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    passed = States(initial_states, positions, cu_seqlens, (channels, size), x.device)
    per_block = max(1, STATES_PER_BLOCK // (chunk * channels * size))
    for block in blocks(cu_seqlens, chunk, per_block, positions, x.device):
        # Time comes first, so that one token of every chunk is one contiguous slice.
        step = block.without_padding(block.rows(dt)).transpose(0, 1)
        inputs = step * block.rows(x).transpose(0, 1)
        decay = (step[..., None] * rate).exp_()
        states = inputs[..., None] * block.rows(B).transpose(0, 1)[:, :, None, :]

        added = states[0]
        for t in range(1, block.length):
            added = torch.addcmul(states[t], decay[t], added)
        factor = (step.sum(0)[..., None] * rate).exp_()
        before = passed.pass_through(block, factor, added)
        for t in range(block.length):
            before = states[t].addcmul_(decay[t], before)
        read = states @ block.rows(C).transpose(0, 1)[..., None]
        block.store(read[..., 0].transpose(0, 1), y)
        for request, at, count in find_inside(block):
            passed.found[request] = states[count - 1, at]
    return Scanned(y, passed.final(), passed.found)
