"""KDA as SGLang's Kimi Linear layers call it.

Each function keeps the name, the parameters and the in-place effects of the Triton kernel it stands
for; the arithmetic is in ``sglang_hybrid.kernels.gated_delta_rule``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from sglang_hybrid.checkpoints.tracks import taken_writer
from sglang_hybrid.extensions.cpu.ops.gated_delta import read_drafts, scan, step
from sglang_hybrid.extensions.cpu.ops.tracking import is_grid_read

THRESHOLD = 20.0
"""Input of softplus from which on SGLang's kernels take it for its result."""


def kda_gate(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None, lower_bound: float | None = None
) -> Tensor:
    """Log decay of every channel, float32 [T, H, Dk]: ``-exp(A_log) * softplus(g + dt_bias)``, or
    ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``.

    Shapes: g [T, H, Dk], A_log of H values, dt_bias of H Dk values.
    """
    g = g.float()
    if dt_bias is not None:
        g = g + dt_bias.float().view(g.shape[1:])
    rate = A_log.float().exp().view(-1, 1)
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(rate * g)
    return -rate * softplus(g, threshold=THRESHOLD)


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_intermediate_states: bool = False,
    track_state: Tensor | None = None,
    track_chunk_idx: Tensor | None = None,
    beta_is_raw: bool = False,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Prefill of a packed batch: o [1, T, H, Dv], and with ``output_intermediate_states`` the
    states in front of every 64th token, too, [1, chunks, H, Dv, Dk] (float32).

    Shapes: q, k and g [1, T, H, Dk], v [1, T, H, Dv], beta [1, T, H]. g is what the gate is made of
    where A_log is given, else the log decay; beta is in front of its sigmoid where it is raw.
    Sequence s starts from ``initial_state[initial_state_indices[s]]`` [H, Dv, Dk] and leaves its
    final state there; a negative slot means zeros and nothing left. ``track_state``
    [S, H, Dv, Dk] gets the state in front of token ``64 * track_chunk_idx[s]`` of sequence s, where
    that index is not negative.
    """
    if cu_seqlens is None or initial_state is None or initial_state_indices is None:
        raise ValueError(
            "chunk_kda on the CPU platform serves packed batches only: cu_seqlens, initial_state "
            "and initial_state_indices."
        )
    log_decay = g[0] if A_log is None else kda_gate(g[0], A_log, dt_bias, lower_bound)
    bounds = cu_seqlens.tolist()
    o, h = scan(
        *(q[0], k[0], v[0], log_decay, beta[0].float().sigmoid() if beta_is_raw else beta[0]),
        initial_state,
        initial_state_indices,
        bounds,
        scale=scale,
        l2norm=use_qk_l2norm_in_kernel,
        grid=is_grid_read() and (output_intermediate_states or track_state is not None),
        state_writer=taken_writer(),
    )
    if track_state is not None and track_chunk_idx is not None:
        first = 0
        for s, chunk in enumerate(track_chunk_idx.tolist()):
            if chunk >= 0:
                track_state[s] = h[first + chunk]
            first += -(-(bounds[s + 1] - bounds[s]) // 64)
    return (o[None], h[None]) if output_intermediate_states else o[None]


def fused_recurrent_kda_packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    """One decode step: updates ``initial_state[ssm_state_indices]``, writes and returns ``out``.

    Shapes: mixed_qkv [b, 2 H Dk + H Dv] (q, k and v of all heads), a [b, H Dk] and b [b, H], which
    the gates are made of, initial_state [slots, H, Dv, Dk], out [b, 1, H, Dv]. Rows with a negative
    slot give zeros.
    """
    heads, _, k_dim = initial_state.shape[1:]
    g = kda_gate(a.view(-1, heads, k_dim), A_log, dt_bias, lower_bound)
    step(
        *(mixed_qkv, g, b.float().sigmoid(), scale, initial_state, out, ssm_state_indices),
        use_qk_l2norm_in_kernel,
    )
    return out, initial_state


def fused_sigmoid_gating_delta_rule_update(
    *,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    lower_bound: float | None = None,
    **scan: Any,
) -> Tensor:
    """Reads drafted tokens: o [1, b * T, H, Dv]; see `gated_delta.read_drafts`. Without
    ``cache_steps``, a decode step of one token for each row, which updates the states: SGLang's way
    where decays have a lower bound.

    Shapes: a [b * T, H Dk] and b [b * T, H], which the gates are made of.
    """
    pool: Tensor = scan["initial_state_source"]
    heads, v_dim, k_dim = pool.shape[1:]
    g = kda_gate(a.reshape(-1, heads, k_dim), A_log, dt_bias, lower_bound)
    beta = b.float().sigmoid().view(1, -1, heads)
    if "cache_steps" in scan:
        return read_drafts(g[None], beta, **scan)
    inputs = [scan[name][0] for name in "qkv"]
    out = torch.empty(len(g), 1, heads, v_dim, dtype=inputs[0].dtype)
    scale = scan.get("scale") or k_dim**-0.5
    mixed = torch.cat([t.flatten(1) for t in inputs], dim=1)
    slots, norm = scan["initial_state_indices"], scan["use_qk_l2norm_in_kernel"]
    step(mixed, g, beta[0], scale, pool, out, slots, norm)
    return out.transpose(0, 1)
