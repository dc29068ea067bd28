"""Gated delta net in chunks: a packed batch, and the decode step.

Definition: ``naive.gated_delta_rule``. Chunked form: Yang, Kautz & Hatamizadeh 2024, "Gated Delta
Networks", section 3 (the WY form of Yang et al. 2024, "Parallelizing Linear Transformers with the
Delta Rule"). With G_i the summed log decay inside a chunk and S the state it is entered with, the
corrections u_i that the chunk writes solve a triangular system

    u_i + sum_{j<i} beta_i exp(G_i - G_j) (k_i . k_j) u_j = beta_i (v_i - exp(G_i) S k_i)

which is linear in S: u = u0 - W S^T, with u0 and W found for all chunks at once. After that only
the states go from chunk to chunk.
"""

import math

import torch
from torch import Tensor

from sglang_hybrid.kernels.chunks import (
    Positions,
    Scanned,
    blocks,
    initial_or_zero,
    states_at_start,
)

CHUNK = 64
SCORES_PER_BLOCK = 1 << 20
"""Elements of the [chunks, H, L, L] matrices that are held at once."""


def l2_normalised(t: Tensor, eps: float = 1e-6) -> Tensor:
    """Unit vectors along the last dimension: ``t / sqrt(sum(t^2) + eps)``."""
    return t * torch.rsqrt((t * t).sum(-1, keepdim=True) + eps)


def gated_delta_rule_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: list[int],
    *,
    scale: float | None = None,
    l2norm: bool = False,
    initial_states: Tensor | None = None,
    positions: Positions = (),
    chunk: int = CHUNK,
) -> Scanned:
    """Gated delta net over a packed batch.

    Shapes: q and k [T, Hk, Dk], v [T, Hv, Dv] with Hk dividing Hv, g (log decay, not positive) and
    beta [T, Hv], initial_states [S, Hv, Dv, Dk] (None: zeros). ``l2norm`` makes q and k unit
    vectors first; scale defaults to ``Dk ** -0.5``. Returns o [T, Hv, Dv] in v's dtype, and in
    float32 the final states [S, Hv, Dv, Dk] and the states at ``positions`` [n, Hv, Dv, Dk].
    """
    heads, v_dim, k_dim = v.shape[1], v.shape[2], k.shape[2]
    repeat = heads // k.shape[1]
    scale = k_dim**-0.5 if scale is None else scale
    o = torch.zeros_like(v, memory_format=torch.contiguous_format)
    initial = initial_or_zero(initial_states, len(cu_seqlens) - 1, (heads, v_dim, k_dim), v.device)
    final, found = initial.clone(), states_at_start(initial, positions, cu_seqlens)
    state = initial.new_zeros(heads, v_dim, k_dim)
    future = torch.ones(chunk, chunk, dtype=torch.bool, device=v.device).triu(1)
    per_block = max(1, SCORES_PER_BLOCK // (heads * chunk * chunk))
    for block in blocks(cu_seqlens, chunk, per_block, positions, v.device):
        keys, queries = block.gather(k), block.gather(q)
        if l2norm:
            keys, queries = l2_normalised(keys), l2_normalised(queries)
        keys, queries = (
            t.transpose(1, 2).repeat_interleave(repeat, dim=1) for t in (keys, queries * scale)
        )
        padding = ~block.valid[..., None]
        gate = block.gather(beta).masked_fill(padding, 0.0).transpose(1, 2)[..., None]
        log_decay = block.gather(g).masked_fill(padding, 0.0).double().cumsum(1).transpose(1, 2)
        decay = (log_decay[..., :, None] - log_decay[..., None, :]).float()
        decay = decay.masked_fill_(future, -math.inf).exp_()
        since_start = log_decay.float().exp()[..., None]
        until_end = (log_decay[..., -1:] - log_decay).float().exp()[..., None]

        values = block.gather(v).transpose(1, 2)
        right = torch.cat([values, since_start * keys], dim=-1) * gate
        system = (keys @ keys.transpose(-1, -2)).mul_(decay).mul_(gate)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        alone, weight = solved.split([v_dim, k_dim], dim=-1)

        written = (keys * until_end).transpose(-1, -2)
        entering = initial.new_empty(len(block.sequence), heads, v_dim, k_dim)
        corrections = torch.empty_like(values)
        for i, sequence in enumerate(block.sequence):
            entering[i] = initial[sequence] if block.opens[i] else state
            torch.sub(alone[i], weight[i] @ entering[i].transpose(-1, -2), out=corrections[i])
            added = (written[i] @ corrections[i]).transpose(-1, -2)
            state = torch.addcmul(added, entering[i], since_start[i, :, -1:, :])
            if block.closes[i]:
                final[sequence] = state

        scores = (queries @ keys.transpose(-1, -2)).mul_(decay)
        result = scores @ corrections
        result += (queries * since_start) @ entering.transpose(-1, -2)
        block.store(result.transpose(1, 2).to(o.dtype), o)
        for index, at, count in block.asked:
            kept = decay[at, :, count - 1, :count, None] * keys[at, :, :count]
            found[index] = corrections[at, :, :count].transpose(-1, -2) @ kept
            found[index].addcmul_(entering[at], since_start[at, :, count - 1 : count, :])
    return Scanned(o, final, found)


def gated_delta_rule_step(
    states: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    l2norm: bool = False,
) -> tuple[Tensor, Tensor]:
    """One decode step: (o [b, Hv, Dv], new states [b, Hv, Dv, Dk]), both float32.

    Shapes: states [b, Hv, Dv, Dk], q and k [b, Hk, Dk], v [b, Hv, Dv], g and beta [b, Hv]. Further
    parameters as in ``gated_delta_rule_prefill``.
    """
    repeat = v.shape[1] // k.shape[1]
    q, k = q.float(), k.float()
    if l2norm:
        q, k = l2_normalised(q), l2_normalised(k)
    q, k = (t.repeat_interleave(repeat, dim=1)[..., None] for t in (q, k))
    new = states.float() * g.float().exp()[..., None, None]
    correction = (v.float()[..., None] - new @ k) * beta.float()[..., None, None]
    new = new.addcmul_(correction, k.transpose(-1, -2))
    o = (new @ q)[..., 0]
    return o * (k.shape[-2] ** -0.5 if scale is None else scale), new
