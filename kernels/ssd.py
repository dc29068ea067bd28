"""Mamba2 in chunks: a packed batch, and the decode step that Mamba1 shares.

Definition: ``naive.ssd``. Chunked form: Dao & Gu 2024, "Transformers are SSMs", section 6 (SSD):
inside a chunk the recurrence is a masked matrix product, between chunks it is a recurrence over
chunk states.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from sglang_hybrid.kernels.chunks import (
    Block,
    Positions,
    Scanned,
    blocks,
    initial_or_zero,
    states_at_start,
)

CHUNK = 64
SCORES_PER_BLOCK = 1 << 20
"""Elements of the [chunks, H, L, L] matrix held at once: about what stays in a CPU's cache."""


def _consumed(
    inputs: Tensor, B: Tensor, log_decay: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """What the first ``tokens[i]`` tokens of chunk i do to a state: it is scaled, then added to.

    Returns (factor [m, H], addend [m, H, P, N]).
    inputs [m, L, H, P] is dt * x, B [m, L, G, N], log_decay [m, L, H] the running sum of dt * A.
    """
    m, length, heads, width = inputs.shape
    groups, size = B.shape[2:]
    total = log_decay.gather(1, (tokens - 1)[:, None, None].expand(m, 1, heads))
    later = torch.arange(length, device=B.device) >= tokens[:, None]
    weight = (total - log_decay).masked_fill(later[:, :, None], -math.inf).float().exp()
    weighted = (inputs * weight[..., None]).reshape(m, length, groups, -1)
    addend = weighted.permute(0, 2, 3, 1) @ B.transpose(1, 2)
    return total[:, 0].float().exp(), addend.reshape(m, heads, width, size)


def _outputs(inputs: Tensor, B: Tensor, C: Tensor, log_decay: Tensor, entering: Tensor) -> Tensor:
    """y [m, L, H, P] of every chunk, given the states [m, H, P, N] it is entered with."""
    m, length, heads, width = inputs.shape
    groups, size = B.shape[2:]
    B, C = B.transpose(1, 2), C.transpose(1, 2)
    # Differences are taken in float64: log_decay grows along the chunk, its differences need not.
    running = log_decay.transpose(1, 2)
    decay = (running[..., :, None] - running[..., None, :]).float()
    future = torch.ones(length, length, dtype=torch.bool, device=B.device).triu(1)
    decay = decay.masked_fill_(future, -math.inf).exp_()
    scores = decay.view(m, groups, -1, length, length).mul_((C @ B.transpose(-1, -2))[:, :, None])
    within = scores.view(m, heads, length, length) @ inputs.transpose(1, 2)
    before = (C @ entering.reshape(m, groups, -1, size).transpose(-1, -2)).transpose(1, 2)
    y = before.reshape(m, length, heads, width) * log_decay.float().exp()[..., None]
    return y.add_(within.transpose(1, 2))


def _carry(
    block: Block, factor: Tensor, addend: Tensor, initial: Tensor, state: Tensor, final: Tensor
) -> tuple[Tensor, Tensor]:
    """Passes states from chunk to chunk: (state entering each chunk, state leaving the last)."""
    entering = torch.empty_like(addend)
    for i, sequence in enumerate(block.sequence):
        entering[i] = initial[sequence] if block.opens[i] else state
        state = torch.addcmul(addend[i], entering[i], factor[i, :, None, None])
        if block.closes[i]:
            final[sequence] = state
    return entering, state


def ssd_prefill(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    cu_seqlens: list[int],
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_states: Tensor | None = None,
    positions: Positions = (),
    out: Tensor | None = None,
    chunk: int = CHUNK,
) -> Scanned:
    """Mamba2 over a packed batch.

    Shapes: x [T, H, P], dt [T, H], A [H] (negative), B and C [T, G, N], D [H] or [H, P], z
    [T, H, P] (output gated by silu(z)), dt_bias [H], initial_states [S, H, P, N] (None: zeros).
    Returns y [T, H, P] in x's dtype (written to ``out`` if given), and in float32 the final states
    [S, H, P, N] and the states at ``positions`` [n, H, P, N].
    """
    _, heads, width = x.shape
    size = B.shape[-1]
    y = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    step = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    step = softplus(step) if dt_softplus else step
    step = step if dt_limit == (0.0, math.inf) else step.clamp(*dt_limit)
    rate = A.double()

    initial = initial_or_zero(initial_states, len(cu_seqlens) - 1, (heads, width, size), x.device)
    final, found = initial.clone(), states_at_start(initial, positions, cu_seqlens)
    state = initial.new_zeros(heads, width, size)
    per_block = max(1, SCORES_PER_BLOCK // (heads * chunk * chunk))
    for block in blocks(cu_seqlens, chunk, per_block, positions, x.device):
        raw, b, c = block.gather(x), block.gather(B), block.gather(C)
        dt_ = block.gather(step)
        if not block.full:
            dt_ = dt_.masked_fill(~block.valid[..., None], 0.0)
        inputs = raw * dt_[..., None]
        log_decay = (dt_.double() * rate).cumsum(1)
        whole = torch.full((len(block.sequence),), chunk, device=x.device)
        factor, addend = _consumed(inputs, b, log_decay, whole)
        entering, state = _carry(block, factor, addend, initial, state, final)
        result = _outputs(inputs, b, c, log_decay, entering)
        if D is not None:
            result.addcmul_(raw, D.float() if D.dim() == 2 else D.float()[:, None])
        if z is not None:
            result.mul_(silu(block.gather(z)))
        block.store(result, y)
        if block.asked:
            index, at, count = (
                torch.tensor(t, device=x.device) for t in zip(*block.asked, strict=True)
            )
            factor, addend = _consumed(inputs[at], b[at], log_decay[at], count)
            found[index] = torch.addcmul(addend, entering[at], factor[..., None, None])
    return Scanned(y, final, found)


def selective_state_step(
    states: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> tuple[Tensor, Tensor]:
    """One decode step of Mamba2 or Mamba1: (y [b, H, P], new states [b, H, P, N]), both float32.

    Shapes: states [b, H, P, N], x and z [b, H, P], dt [b, H, P or 1], A [H, P or 1, N or 1], B and
    C [b, G, N], D [H, P or 1], dt_bias [H, P or 1]. Mamba1 (``naive.selective_scan``) is H =
    channels, P = 1; Mamba2 (``naive.ssd``) has one step size and one decay per head, so its dt and
    A need no P and N.
    """
    heads = x.shape[1]
    step = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    step = softplus(step) if dt_softplus else step
    inputs = x.float()
    b, c = (t.float().repeat_interleave(heads // t.shape[1], dim=1) for t in (B, C))
    decay = torch.exp(step[..., None] * A.float())
    new = states.float() * decay
    new.addcmul_((step * inputs)[..., None], b[:, :, None, :])
    y = (new @ c[..., None])[..., 0]
    if D is not None:
        y = y + D.float() * inputs
    return (y if z is None else y * silu(z.float())), new
