"""Gated delta net as SGLang's Qwen3-Next and Jet-Nemotron layers call it.

Each function keeps the name, the parameters and the in-place effects of the Triton kernel it stands
for; the arithmetic is in ``sglang_hybrid.kernels.gated_delta_rule``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from sglang_hybrid.checkpoints.tracks import StateWriter, taken_writer
from sglang_hybrid.extensions.cpu.ops.states import (
    advance,
    advance_drafts,
    find_owned,
    keep_behind_drafts,
)
from sglang_hybrid.extensions.cpu.ops.tracking import is_grid_read
from sglang_hybrid.kernels.gated_delta_rule import (
    gated_delta_rule_prefill,
    gated_delta_rule_step,
)

CHUNK = 64
"""Tokens between two of the states that ``chunk_gated_delta_rule`` returns (fla's CHUNK_SIZE)."""


def fused_gdn_gating(
    A_log: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
) -> tuple[Tensor, Tensor]:
    """Gates of every token: (log decay, write strength), both float32 [1, T, Hv].

    ``g = -exp(A_log) * softplus(a + dt_bias)`` and ``sigmoid(b)`` rounded to b's dtype. Shapes:
    A_log and dt_bias [Hv], a and b [T, Hv].
    """
    step = softplus(a.float() + dt_bias.float(), beta=beta, threshold=threshold)
    return (-A_log.float().exp() * step)[None], b.sigmoid().float()[None]


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    inplace_update: bool = True,
) -> tuple[Tensor, None, Tensor]:
    """Prefill of a packed batch: (o [1, T, Hv, Dv], None, states at chunk starts).

    Shapes: q and k [1, T, Hk, Dk], v [1, T, Hv, Dv], g and beta [1, T, Hv], initial_state the pool
    [slots, Hv, Dv, Dk]. Sequence s starts from ``initial_state[initial_state_indices[s]]`` and,
    with ``inplace_update``, leaves its final state there; a negative slot means zeros and nothing
    left.
    The states [1, chunks, Hv, Dv, Dk] (float32) are those in front of every 64th token of each
    sequence, sequence after sequence; none where SGLang will not read them. The layer's
    `StateWriter`, if there is one, gets the states that it is for.
    """
    if cu_seqlens is None or initial_state is None or initial_state_indices is None or head_first:
        raise ValueError(
            "chunk_gated_delta_rule on the CPU platform serves packed batches only: cu_seqlens, "
            "initial_state, initial_state_indices, and tokens before heads."
        )
    o, h = scan(
        *(q[0], k[0], v[0], g[0], beta[0]),
        initial_state,
        initial_state_indices,
        cu_seqlens.tolist(),
        scale=scale,
        l2norm=use_qk_l2norm_in_kernel,
        grid=is_grid_read(),
        inplace_update=inplace_update,
        state_writer=taken_writer(),
    )
    return o[None], None, h[None]


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    indices: Tensor,
    bounds: list[int],
    *,
    scale: float | None,
    l2norm: bool,
    grid: bool,
    inplace_update: bool = True,
    state_writer: StateWriter | None = None,
) -> tuple[Tensor, Tensor]:
    """A prefill of the delta rule: (o [T, Hv, Dv], states in front of every 64th token, float32
    [chunks, Hv, Dv, Dk]; none without ``grid``).

    Sequence s starts from ``pool[indices[s]]`` and, with ``inplace_update``, leaves its final state
    there; a negative slot means zeros and nothing left. Shapes as in ``gated_delta_rule_prefill``.
    """
    sequences = len(bounds) - 1
    owners, slots = find_owned(indices, sequences, -1, q.device)
    states = pool.index_select(0, slots).float()
    if owners is not None:
        some = states
        states = pool.new_zeros((sequences, *pool.shape[1:]), dtype=torch.float32)
        states[owners] = some
    starts = chunk_starts(bounds) if grid else []
    done = gated_delta_rule_prefill(
        *(q, k, v, g, beta, bounds),
        scale=scale,
        l2norm=l2norm,
        initial_states=states,
        positions=[*starts, *(state_writer.tracks.positions if state_writer else ())],
    )
    if state_writer is not None:
        state_writer.put(done.states_at[len(starts) :])
    if inplace_update:
        final = done.final_states if owners is None else done.final_states[owners]
        pool.index_copy_(0, slots, final.to(pool.dtype))
    return done.y, done.states_at[: len(starts)]


def chunk_starts(bounds: list[int]) -> list[tuple[int, int]]:
    """The positions in front of every 64th token of each sequence."""
    return [
        (s, at) for s in range(len(bounds) - 1) for at in range(0, bounds[s + 1] - bounds[s], CHUNK)
    ]


def fused_recurrent_gated_delta_rule_update(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> Tensor:
    """Prefill or decode step of a packed batch, as Jet-Nemotron calls it: o [1, T, H, Dv].

    Shapes: q and k [1, T, H, Dk], v [1, T, H, Dv], g and beta [1, T, H]. Sequence s starts from
    ``initial_state_source[initial_state_indices[s]]`` and ends there; a negative slot means zeros
    and nothing left.
    """
    given = (q[0], k[0], v[0], g[0], beta[0])
    pool, bounds = initial_state_source, cu_seqlens.tolist()
    if len(bounds) - 1 == bounds[-1]:  # one token each
        out = torch.empty_like(v).transpose(0, 1)
        mixed = torch.cat([t.flatten(1) for t in given[:3]], dim=1)
        step(mixed, g[0], beta[0], None, pool, out, initial_state_indices, use_qk_l2norm_in_kernel)
        return out.transpose(0, 1)
    o, _ = scan(
        *given,
        *(pool, initial_state_indices, bounds),
        scale=None,
        l2norm=use_qk_l2norm_in_kernel,
        grid=False,
    )
    return o[None]


def fused_recurrent_gated_delta_rule_packed_decode(
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
) -> tuple[Tensor, Tensor]:
    """One decode step: updates ``initial_state[ssm_state_indices]``, writes and returns ``out``.

    Shapes: mixed_qkv [b, 2 Hk Dk + Hv Dv] (q, k and v of all heads), a and b [b, Hv], initial_state
    [slots, Hv, Dv, Dk], out [b, 1, Hv, Dv]. Rows with a negative slot give zeros.
    """
    g, beta = fused_gdn_gating(A_log, a, b, dt_bias)
    step(
        *(mixed_qkv, g[0], beta[0], scale, initial_state, out, ssm_state_indices),
        use_qk_l2norm_in_kernel,
    )
    return out, initial_state


def step(
    mixed_qkv: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    pool: Tensor,
    out: Tensor,
    indices: Tensor,
    l2norm: bool,
) -> None:
    """A decode step of the delta rule: changes ``pool[indices]`` and writes ``out``.

    Shapes: mixed_qkv [b, 2 Hk Dk + Hv Dv], g [b, Hv] or [b, Hv, Dk], beta [b, Hv], pool
    [slots, Hv, Dv, Dk], out [b, 1, Hv, Dv]. Rows with a negative slot give zeros.
    """
    heads, v_dim, k_dim = pool.shape[1:]
    q_size = (mixed_qkv.shape[1] - heads * v_dim) // 2
    rows, slots = find_owned(indices, mixed_qkv.shape[0], -1, mixed_qkv.device)
    if rows is not None:
        out.zero_()
        mixed_qkv, g, beta = mixed_qkv[rows], g[rows], beta[rows]
    if not len(slots):
        return
    q, k, v = torch.split(mixed_qkv, [q_size, q_size, heads * v_dim], dim=1)
    q, k = (t.reshape(len(slots), -1, k_dim) for t in (q, k))
    given = (q, k, v.reshape(len(slots), heads, v_dim), g, beta)

    def advanced(states: Tensor, at: slice) -> Tensor:
        some = (t[at] for t in given)
        return gated_delta_rule_step(states, *some, scale=scale, l2norm=l2norm)

    o = advance(pool, slots, advanced).to(out.dtype)
    if rows is None:
        out[:, 0] = o
    else:
        out[rows, 0] = o


def fused_sigmoid_gating_delta_rule_update(
    *,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    softplus_beta: float,
    softplus_threshold: float,
    b: Tensor,
    **drafts: Any,
) -> Tensor:
    """Reads drafted tokens: o [1, b * T, Hv, Dv]; see `read_drafts`.

    Shapes: a and b [b * T, Hv]. Off SGLang's own CPU engine only the verification of drafts comes
    here.
    """
    g, beta = fused_gdn_gating(A_log, a, b, dt_bias, softplus_beta, softplus_threshold)
    return read_drafts(g, beta, **drafts)


def read_drafts(
    g: Tensor,
    beta: Tensor,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cache_steps: int,
    intermediate_states_buffer: Tensor,
    intermediate_state_indices: Tensor,
    retrieve_parent_token: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    scale: float | None = None,
    **_: Any,
) -> Tensor:
    """The delta rule over the ``cache_steps`` drafted tokens of each row: o [1, b * T, Hv, Dv].

    Shapes: g [1, b * T, Hv] or, of KDA, [1, b * T, Hv, Dk], beta [1, b * T, Hv], q and k
    [1, b * T, Hk, Dk], v [1, b * T, Hv, Dv]. States ``initial_state_source[initial_state_indices]``
    stay as they are; the one behind each token goes to the row ``intermediate_state_indices`` [b]
    of ``intermediate_states_buffer`` [m, T, Hv, Dv, Dk]. ``retrieve_parent_token`` [b, T] says from
    which token each goes on; None is a chain. Rows with a negative slot give zeros.
    """
    pool = initial_state_source
    count = v.shape[1] // cache_steps
    rows, slots = find_owned(initial_state_indices, count, -1, pool.device)
    drafts = [t[0].view(count, cache_steps, *t.shape[2:]) for t in (q, k, v, g, beta)]
    parents = retrieve_parent_token
    if rows is not None:
        drafts = [t[rows] for t in drafts]
        parents = None if parents is None else parents[rows]

    def stepped(states: Tensor, node: int) -> Tensor:
        some = (t[:, node] for t in drafts)
        return gated_delta_rule_step(states, *some, scale=scale, l2norm=use_qk_l2norm_in_kernel)

    live = pool.index_select(0, slots).float()
    o, behind = advance_drafts(live, parents, cache_steps, stepped)
    keep_behind_drafts(intermediate_states_buffer, intermediate_state_indices, rows, behind)
    out = torch.zeros(count, *o.shape[1:], dtype=v.dtype)
    out[slice(None) if rows is None else rows] = o.to(out.dtype)
    return out.flatten(0, 1)[None]


def fused_recurrent_gdn_replayssm_decode(**_: object) -> None:
    """Raises RuntimeError: --enable-linear-replayssm saves GPU bandwidth and has no CPU kernel."""
    raise RuntimeError(
        "--enable-linear-replayssm is not available on the CPU platform; start the server without "
        "it."
    )


def fused_qkvzba_split_reshape_cat(
    mixed_qkvz: Tensor,
    mixed_ba: Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sorts projections that come interleaved by key head: (mixed_qkv, z, b, a).

    For each key head mixed_qkvz holds q, k, then v and z of its value heads, and mixed_ba holds b,
    then a. Returns mixed_qkv [T, 2 Hk Dk + Hv Dv] (all q, all k, all v), z [T, Hv, Dv], b and a
    [T, Hv].
    """
    tokens, share = mixed_qkvz.shape[0], num_heads_v // num_heads_qk
    by_head = mixed_qkvz.view(tokens, num_heads_qk, -1)
    q, k, v, z = torch.split(by_head, [head_qk, head_qk, share * head_v, share * head_v], dim=2)
    b, a = mixed_ba.view(tokens, num_heads_qk, -1).chunk(2, dim=2)
    mixed_qkv = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], dim=1)
    z = z.reshape(tokens, num_heads_v, head_v)
    return mixed_qkv, z, b.reshape(tokens, num_heads_v), a.reshape(tokens, num_heads_v)


def fused_qkvzba_split_reshape_cat_contiguous(
    mixed_qkvz: Tensor,
    mixed_ba: Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`fused_qkvzba_split_reshape_cat` for projections that hold all q, then all k, v and z, and
    all b, then all a (Qwen3.5).
    """
    values = num_heads_v * head_v
    sizes = [2 * num_heads_qk * head_qk + values, values]
    mixed_qkv, z = torch.split(mixed_qkvz, sizes, dim=1)
    b, a = (t.contiguous() for t in mixed_ba.chunk(2, dim=1))
    return mixed_qkv.contiguous(), z.reshape(-1, num_heads_v, head_v), b, a


def fused_sigmoid_mul(
    attn_output: Tensor, gate: Tensor, inplace: bool = False, quant: bool = False
) -> Tensor:
    """``attn_output * sigmoid(gate)``, written to attn_output where it is ``inplace``.

    Shapes: attn_output [T, H D], gate the same or [T, H, D].
    """
    if quant:
        raise ValueError("fused_sigmoid_mul on the CPU platform quantizes nothing.")
    gated = (attn_output.float() * gate.reshape(attn_output.shape).float().sigmoid()).to(
        attn_output.dtype
    )
    return attn_output.copy_(gated) if inplace else gated


def layernorm_fn(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    activation: str = "swish",
) -> Tensor:
    """An RMS norm over all channels, or over groups of ``group_size`` of them, and the gate z
    behind it: as Qwen3.5's delta net and Ling 2.5's lightning attention call it.
    """
    if not (norm_before_gate and is_rms_norm):
        raise ValueError("layernorm_fn on the CPU platform is an RMS norm, gated behind it.")
    if activation not in ("swish", "silu", "sigmoid"):
        raise ValueError(f"A gate is swish, silu or sigmoid, not {activation!r}.")
    size = group_size or x.shape[-1]
    groups = x.float().view(*x.shape[:-1], x.shape[-1] // size, size)
    y = (groups * torch.rsqrt((groups * groups).mean(-1, keepdim=True) + eps)).flatten(-2)
    y = y if weight is None else y * weight.float()
    y = y if bias is None else y + bias.float()
    if z is not None:
        gate = z.float().view_as(y)
        y = y * (gate.sigmoid() if activation == "sigmoid" else silu(gate))
    return y.to(x.dtype)


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """``rms_norm(x) * weight + bias``, gated by ``silu(g)`` or ``sigmoid(g)``; shapes [..., D]."""
    if residual is not None or prenorm:
        raise ValueError("rms_norm_gated on the CPU platform takes no residual.")
    return layernorm_fn(x, weight, bias, g, eps, is_rms_norm=True, activation=activation)
