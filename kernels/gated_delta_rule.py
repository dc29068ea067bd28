"""Gated delta net and KDA in chunks: a packed batch, and the decode step.

Definition: ``naive.gated_delta_rule``. Chunked form: Yang, Kautz & Hatamizadeh 2024, "Gated Delta
Networks", section 3 (the WY form of Yang et al. 2024, "Parallelizing Linear Transformers with the
Delta Rule"). With G_i the summed log decay inside a chunk and S the state it is entered with, the
corrections u_i that the chunk writes solve a triangular system

    u_i + sum_{j<i} beta_i exp(G_i - G_j) (k_i . k_j) u_j = beta_i (v_i - exp(G_i) S k_i)

which is linear in S: u = u0 - W S^T, with u0 and W found for all chunks at once. After that only
the states go from chunk to chunk.

KDA (Kimi Team 2025, "Kimi Linear", section 3) has a decay for each channel of the key, which stands
inside the products of keys: sum_c exp(G_ic - G_jc) k_ic k_jc. They are summed as they stand, in
chunks so short that this is cheap: factors exp(G_i) and exp(-G_j) would leave float32.
"""

import math

import torch
from torch import Tensor

from sglang_hybrid.kernels.chunks import Block, Positions, Scanned, States, blocks, find_inside

CHUNK = 64
CHUNK_BY_CHANNEL = 16
"""Tokens of a chunk where each channel has a decay of its own."""
L2_EPS = 1e-6
SCORES_PER_BLOCK = 1 << 20
"""Elements of the [chunks, H, L, L] decays, of KDA [chunks, H, L, L, Dk], held at once."""


def l2_normalised(t: Tensor, eps: float = L2_EPS) -> Tensor:
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
    chunk: int | None = None,
) -> Scanned:
    """Gated delta net, or KDA, over a packed batch.

    Shapes: q and k [T, Hk, Dk], v [T, Hv, Dv] with Hk dividing Hv, g (log decay, not positive)
    [T, Hv] or, of KDA, [T, Hv, Dk], beta [T, Hv], initial_states [S, Hv, Dv, Dk] (None: zeros).
    ``l2norm`` makes q and k unit vectors first; scale defaults to ``Dk ** -0.5``. Returns o
    [T, Hv, Dv] in v's dtype, and in float32 the final states [S, Hv, Dv, Dk] and the states at
    ``positions`` [n, Hv, Dv, Dk].
    """
    heads, v_dim, k_heads, k_dim = *v.shape[1:], *k.shape[1:]
    scale = k_dim**-0.5 if scale is None else scale
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    states = States(initial_states, positions, cu_seqlens, (heads, v_dim, k_dim), v.device)
    by_channel = g.dim() == 3
    chunk = chunk or (CHUNK_BY_CHANNEL if by_channel else CHUNK)
    decays = k_dim if by_channel else 1
    per_block = max(1, SCORES_PER_BLOCK // (heads * chunk * chunk * decays))
    for block in blocks(cu_seqlens, chunk, per_block, positions, v.device):
        length = block.length
        keys, queries = block.rows(k), block.rows(q)
        if l2norm:
            keys, queries = l2_normalised(keys), l2_normalised(queries)
        keys, queries = keys.transpose(1, 2), (queries * scale).transpose(1, 2)
        gate = block.without_padding(block.rows(beta)).transpose(1, 2)[..., None]
        log_decay = block.without_padding(block.rows(g)).double().cumsum(1).transpose(1, 2)
        log_decay = log_decay.reshape(*log_decay.shape[:3], decays)
        future = torch.ones(length, length, dtype=torch.bool, device=v.device).triu_(1)
        decay = (log_decay[:, :, :, None] - log_decay[:, :, None]).float()
        decay = decay.masked_fill_(future[..., None], -math.inf).exp_()
        since_start = log_decay.float().exp()
        until_end = (log_decay[:, :, -1:] - log_decay).float().exp()

        of_heads = heads // k_heads
        values = block.rows(v).transpose(1, 2)
        wide_keys = keys.repeat_interleave(of_heads, dim=1)
        right = torch.cat([values, since_start * wide_keys], dim=-1) * gate
        system = _products(keys, keys, decay).mul_(gate)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        alone, weight = solved.split([v_dim, k_dim], dim=-1)

        written = (wide_keys * until_end).transpose(-1, -2)
        entering, corrections = _pass_through(states, block, alone, weight, written, since_start)

        result = _products(queries, keys, decay) @ corrections
        wide_queries = queries.repeat_interleave(of_heads, dim=1)
        result += (wide_queries * since_start) @ entering.transpose(-1, -2)
        block.store(result.transpose(1, 2), o)
        for request, at, count in find_inside(block):
            kept = decay[at, :, count - 1, :count] * wide_keys[at, :, :count]
            added = corrections[at, :, :count].transpose(-1, -2) @ kept
            since = since_start[at, :, count - 1 : count, :]
            states.found[request] = torch.addcmul(added, entering[at], since)
    return Scanned(o, states.final(), states.found)


def _products(left: Tensor, right: Tensor, decay: Tensor) -> Tensor:
    """Products of rows [m, Hk, L, Dk] of each value head [m, Hv, L, L]: with every channel, or all
    of them, times decay [m, Hv, L, L, Dk or 1].
    """
    m, k_heads, length, _ = left.shape
    by_key_head = decay.view(m, k_heads, -1, *decay.shape[2:])
    if decay.shape[-1] == 1:
        pairs = by_key_head[..., 0] * (left @ right.transpose(-1, -2))[:, :, None]
    else:
        pairs = by_key_head * left[:, :, None, :, None]
        pairs = pairs.mul_(right[:, :, None, None]).sum(-1)
    return pairs.view(m, -1, length, length)


def _pass_through(
    states: States, block: Block, alone: Tensor, weight: Tensor, written: Tensor, since: Tensor
) -> tuple[Tensor, Tensor]:
    """Advance through a block: (the states [m, H, Dv, Dk] that enter its chunks, what the chunks
    write of every token, [m, H, L, Dv]).

    A chunk entered with S writes ``alone - weight S^T``, and leaves S, times ``since`` of its last
    token, plus what it wrote times ``written``.
    """
    entering: list[Tensor] = []
    corrections = torch.empty_like(alone)
    leaving: list[Tensor] = []
    chunks = zip(block.sequences, alone, weight, written, since, strict=True)
    for i, (sequence, own, read, keys, kept) in enumerate(chunks):
        state = states.current[sequence]
        torch.sub(own, read @ state.transpose(-1, -2), out=corrections[i])
        added = (keys @ corrections[i]).transpose(-1, -2)
        entering.append(state)
        states.current[sequence] = torch.addcmul(added, state, kept[:, -1:, :])
        leaving.append(states.current[sequence])
    states.note(block, leaving, by_chunk=True)
    return torch.stack(entering), corrections


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
) -> Tensor:
    """One decode step: changes states [b, Hv, Dv, Dk] (float32) in place, returns o [b, Hv, Dv].

    Shapes: q and k [b, Hk, Dk], v [b, Hv, Dv], g [b, Hv] or, of KDA, [b, Hv, Dk], beta [b, Hv].
    Further parameters as in ``gated_delta_rule_prefill``.
    """
    b, heads, v_dim, k_dim = states.shape
    q, k = q.float(), k.float()
    if l2norm:
        q, k = l2_normalised(q), l2_normalised(k)
    if k.shape[1] < heads:
        q, k = (t.repeat_interleave(heads // k.shape[1], dim=1) for t in (q, k))
    states.mul_(g.float().exp().view(b, heads, 1, -1))
    matrices = states.view(b * heads, v_dim, k_dim)
    recalled = torch.bmm(matrices, k.reshape(b * heads, k_dim, 1)).view(b, heads, v_dim)
    correction = (v.float() - recalled).mul_(beta.float()[..., None])
    states.addcmul_(correction[..., None], k[:, :, None, :])
    o = torch.bmm(matrices, q.reshape(b * heads, k_dim, 1)).view(b, heads, v_dim)
    return o.mul_(k_dim**-0.5 if scale is None else scale)
