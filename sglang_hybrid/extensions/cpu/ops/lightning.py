"""Lightning attention as SGLang's layers of Ling 2.5 and MiniCPM-SALA call it.

``S_t = exp(-slope) S_(t-1) + k_t v_t^T`` and ``o_t = scale S_t^T q_t`` (Qin et al. 2024, "Lightning
Attention-2"): Mamba2's recurrence with a constant step, whose chunks compute it. Functions keep the
name, the parameters and the in-place effects of the Triton kernel that each stands for.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sglang_hybrid.extensions.cpu.ops.states import (
    advance,
    advance_drafts,
    find_owned,
    keep_behind_drafts,
)
from sglang_hybrid.kernels.checkpoint_states import Targets
from sglang_hybrid.kernels.ssd import ssd_prefill

FADED = -80.0
"""Logarithm of the least weight of a token in a state. Where smaller ones are not zero, cores
multiply numbers below float32's normal range, which takes them many times as long.
"""


def seg_la_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    decay_scales: Tensor,
    meta: Any,
    caches: Tensor | None = None,
    cache_indices: Tensor | None = None,
    track_lens: Tensor | None = None,
    track_state_indices: Tensor | None = None,
    softmax_scale: float | None = None,
) -> Tensor:
    """A prefill of a packed batch, a decode step, or drafted tokens: o [T, H, D].

    Shapes: q, k and v [T, H, D], s [slots, H, D, D] (keys by values), decay_scales of H slopes.
    ``meta`` is SGLang's ``SegLaMeta``: sequence i is tokens q_offsets[i] to q_offsets[i + 1], goes
    on from slot s_offsets[i] if s_scales[i] is not zero, and leaves its final state there; -1 owns
    no slot. With ``track_lens`` [b] the state after so many of its tokens goes to
    ``track_state_indices[i]``, where the length is positive and the index not negative. ``caches``
    [m, T / b, H, D, D] make a batch of drafted tokens: states stay, and those behind each token go
    to rows ``cache_indices`` [b].
    """
    slopes = decay_scales.flatten().float()
    q = q.float() * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if caches is not None and cache_indices is not None:
        return _read_drafts(q, k, v, s, slopes, meta, caches, cache_indices)
    if len(q) == meta.batch_size:
        return _step(q, k, v, s, slopes, meta)
    rows, slots = find_owned(meta.s_offsets, meta.batch_size, -1, q.device)
    states = s.new_zeros((meta.batch_size, *s.shape[1:]), dtype=torch.float32)
    owners = slice(None) if rows is None else rows
    states[owners] = s[slots].float() * meta.s_scales[owners].view(-1, 1, 1, 1)
    tracked: list[tuple[int, int]] = []
    if track_lens is not None and track_state_indices is not None:
        wanted = ((track_lens > 0) & (track_state_indices >= 0)).nonzero()[:, 0].tolist()
        tracked = [(i, int(track_lens[i])) for i in wanted]
    done = ssd_prefill(
        *(v, torch.ones(len(v), len(slopes)), -slopes, k, q, meta.q_offsets.tolist()),
        initial_states=states.transpose(-1, -2),
        positions=tracked,
    )
    s[slots] = done.final_states[owners].transpose(-1, -2).to(s.dtype)
    if tracked and track_state_indices is not None:
        kept = track_state_indices[[i for i, _ in tracked]].long()
        s[kept] = done.states_at.transpose(-1, -2).to(s.dtype)
    return done.y


def _step(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, slopes: Tensor, meta: Any) -> Tensor:
    rows, slots = find_owned(meta.s_offsets, len(q), -1, q.device)
    owners = slice(None) if rows is None else rows
    live_q, live_k, live_v = (t[owners].float() for t in (q, k, v))
    decays = (-slopes).exp()
    out = torch.zeros_like(v)

    def step(states: Tensor, some: slice) -> Tensor:
        return _advanced(states, live_q[some], live_k[some], live_v[some], decays)

    out[owners] = advance(pool, slots, step).to(out.dtype)
    return out


def _read_drafts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool: Tensor,
    slopes: Tensor,
    meta: Any,
    buffer: Tensor,
    places: Tensor,
) -> Tensor:
    nodes = len(q) // meta.batch_size
    rows, slots = find_owned(meta.s_offsets, meta.batch_size, -1, q.device)
    owners = slice(None) if rows is None else rows
    drafts = [t.view(-1, nodes, *t.shape[1:])[owners].float() for t in (q, k, v)]
    decays = (-slopes).exp()

    def step(states: Tensor, node: int) -> Tensor:
        q, k, v = (t[:, node] for t in drafts)
        return _advanced(states, q, k, v, decays)

    read, behind = advance_drafts(pool.index_select(0, slots).float(), None, nodes, step)
    keep_behind_drafts(buffer, places, rows, behind)
    out = torch.zeros_like(v)
    out.view(-1, nodes, *v.shape[1:])[owners] = read.to(out.dtype)
    return out


def _advanced(states: Tensor, q: Tensor, k: Tensor, v: Tensor, decays: Tensor) -> Tensor:
    """One token of each row: changes states [b, H, Dk, Dv] in place, returns o [b, H, Dv]."""
    states.mul_(decays[:, None, None]).addcmul_(k[..., None], v[..., None, :])
    return (q[..., None, :] @ states)[..., 0, :]


def save_lightning_states(
    pool: Tensor,
    targets: Targets,
    *,
    keys: Tensor,
    values: Tensor,
    slopes: Tensor,
    state_indices: Tensor,
    resumed: Tensor,
    cu_seqlens: Tensor,
) -> None:
    """``checkpoint_states.save_lightning_states`` in plain torch; the same parameters."""
    slopes = slopes.flatten().float()
    starts = cu_seqlens.tolist()
    owner, begin, state = -1, 0, pool.new_empty(0)
    for sequence, end, slot in zip(*map(Tensor.tolist, vars(targets).values()), strict=True):
        if sequence != owner:
            owner, begin = sequence, starts[sequence]
            state = pool[state_indices[sequence]].float() * resumed[sequence]
        logs = -slopes * torch.arange(end - begin - 1, -1, -1)[:, None]
        weights = torch.exp(logs.masked_fill(logs < FADED, -math.inf))
        faded = keys[begin:end].float() * weights[..., None]
        added = faded.permute(1, 2, 0) @ values[begin:end].float().transpose(0, 1)
        state = torch.addcmul(added, state, torch.exp(-slopes * (end - begin))[:, None, None])
        pool[slot] = state.to(pool.dtype)
        begin = end
