"""Mamba2 (and the convolution all recurrent layers share) as SGLang's mixers call it.

Each function keeps the name, the parameters and the in-place effects of the kernel it stands for in
``sglang.srt.layers.attention.mamba.mamba``; the arithmetic is in ``sglang_hybrid.kernels``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import silu

from sglang_hybrid.checkpoints.tracks import taken_writer
from sglang_hybrid.extensions.cpu.ops import draft_trees
from sglang_hybrid.extensions.cpu.ops.states import (
    advance,
    advance_drafts,
    find_owned,
    keep_behind_drafts,
)
from sglang_hybrid.extensions.cpu.ops.tracking import is_grid_read
from sglang_hybrid.kernels.causal_conv1d import causal_conv1d_prefill, causal_conv1d_step
from sglang_hybrid.kernels.ssd import (
    StepInputs,
    selective_state_step,
    ssd_prefill,
    step_inputs,
)

PAD_SLOT_ID = -1


def activation_name(activation: bool | str | None) -> str | None:
    """SGLang also writes True for "silu" and False for none."""
    if isinstance(activation, bool):
        return "silu" if activation else None
    return activation


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    conv_states: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    seq_lens_cpu: list[int] | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: bool | str | None = "silu",
    pad_slot_id: int = PAD_SLOT_ID,
    validate_data: bool = False,
    block_table: Tensor | None = None,
    **_: object,
) -> Tensor:
    """Prefill convolution: x [D, T] packed, weight [D, K]; returns y like x, in x's dtype.

    A sequence starts from ``conv_states[cache_indices[s]]`` [D, K-1] where
    ``has_initial_state[s]``, else from zeros, and leaves its last K-1 inputs there. Sequences with
    the padding slot, and empty ones, leave no window. Columns of x behind the last sequence give
    zeros.
    """
    if query_start_loc is None:
        raise ValueError("causal_conv1d_fn on the CPU platform needs query_start_loc.")
    bounds = query_start_loc.tolist()
    sequences, past = len(bounds) - 1, weight.shape[1] - 1
    windows, owners, slots = None, None, None
    if conv_states is not None:
        rows, slots = find_owned(cache_indices, sequences, pad_slot_id, x.device)
        owners = torch.arange(sequences, device=x.device) if rows is None else rows
        if has_initial_state is not None:
            windows = x.new_zeros(sequences, x.shape[0], past, dtype=torch.float32)
            starts = has_initial_state[owners]
            windows[owners[starts]] = conv_states[slots[starts], :, :past].float()
    done = causal_conv1d_prefill(
        x.transpose(0, 1),
        weight,
        bias,
        bounds,
        activation=activation_name(activation),
        initial_windows=windows,
    )
    if conv_states is not None and owners is not None and slots is not None:
        moved = query_start_loc.diff()[owners] > 0
        conv_states[slots[moved], :, :past] = done.final_states[owners[moved]].to(conv_states.dtype)
    return done.y.transpose(0, 1)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: bool | str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    num_accept_tokens: Tensor | None = None,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    retrieve_next_token: Tensor | None = None,
    retrieve_next_sibling: Tensor | None = None,
    retrieve_parent_token: Tensor | None = None,
    pad_slot_id: int = PAD_SLOT_ID,
    metadata: object = None,
    validate_data: bool = False,
) -> Tensor:
    """Decode convolution: x [b, D] or [b, D, T]; shifts ``conv_state[conv_state_indices]``.

    Returns y like x. Rows with the padding slot give zeros and touch no window.

    With ``intermediate_conv_window`` [m, T, D, K-1] the T tokens of a row are a draft: windows stay
    as they are, and the one behind each token goes to the row ``intermediate_state_indices`` [b].
    Drafts are chains, or trees given by both ``retrieve_next_`` links [b, T]; of a tree, the
    parents are written to ``retrieve_parent_token`` [b, T].
    """
    rows, slots = find_owned(conv_state_indices, x.shape[0], pad_slot_id, x.device)
    steps = x if rows is None else x[rows]
    past = weight.shape[1] - 1
    windows = conv_state.index_select(0, slots)[:, :, :past]
    if intermediate_conv_window is not None and intermediate_state_indices is not None:
        parents = None
        if retrieve_next_token is not None and retrieve_next_sibling is not None:
            parents = draft_trees.parents(retrieve_next_token, retrieve_next_sibling)
            if retrieve_parent_token is not None:
                retrieve_parent_token.copy_(parents)
        parents = parents if parents is None or rows is None else parents[rows]

        def convolved(reached: Tensor, node: int) -> Tensor:
            token = steps[:, :, node : node + 1]
            y, moved = causal_conv1d_step(token, reached, weight, bias, activation_name(activation))
            reached.copy_(moved)
            return y[..., 0]

        y, behind = advance_drafts(windows, parents, x.shape[2], convolved)
        keep_behind_drafts(intermediate_conv_window, intermediate_state_indices, rows, behind)
        return _spread(y.transpose(1, 2), rows, x)
    y, windows = causal_conv1d_step(
        steps if x.dim() == 3 else steps[:, :, None],
        windows,
        weight,
        bias,
        activation_name(activation),
    )
    if conv_state.shape[2] == past:
        conv_state.index_copy_(0, slots, windows)
    else:
        conv_state[slots, :, :past] = windows
    return _spread(y.view(steps.shape), rows, x)


def _spread(y: Tensor, rows: Tensor | None, like: Tensor) -> Tensor:
    """The results for rows of the batch; zeros for the others. None: ``y`` has all rows."""
    if rows is None:
        return y.to(like.dtype)
    out = torch.zeros_like(like)
    out[rows] = y.to(like.dtype)
    return out


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    out: Tensor | None = None,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    return_intermediate_states: bool = False,
    state_dtype: torch.dtype | None = None,
    return_track_states: bool = False,
    track_seq_idx: Tensor | None = None,
    track_end_locs: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Mamba2 prefill: (states on SGLang's grid, final states, tracked states); y goes to ``out``.

    Shapes: x [1, T, H, P], dt [1, T, H], A [H], B and C [1, T, G, N], initial_states [S, H, P, N],
    out [1, T, H, P]. States come in ``state_dtype``:

    * grid [1, ceil(T / chunk_size), H, P, N], or nothing where SGLang will not read it: row c is
      the state where token ``c * chunk_size`` of the packed batch starts. Between two sequences
      that is the final state of the one that ends there, as in SGLang's ``_state_passing_fwd``; row
      0 is the first sequence's initial state.
    * final [S, H, P, N].
    * tracked [1, n, H, P, N]: the state of sequence ``track_seq_idx[i]`` when the packed batch has
      been read up to ``track_end_locs[i]``; None if nothing is tracked.

    The layer's `StateWriter`, if there is one, gets the states that it is for.

    This is the varlen call that ``MambaMixer2`` makes; anything else raises ValueError.
    """
    if not (return_varlen_states and return_track_states) or cu_seqlens is None or x.shape[0] != 1:
        raise ValueError(
            "mamba_chunk_scan_combined on the CPU platform serves packed batches only: batch size "
            "1, cu_seqlens, return_varlen_states and return_track_states."
        )
    if out is None:
        raise ValueError("mamba_chunk_scan_combined on the CPU platform needs `out`.")
    bounds = cu_seqlens.tolist()
    grid = grid_positions(bounds, chunk_size) if is_grid_read() else []
    tracked: list[tuple[int, int]] = []
    if track_seq_idx is not None and track_end_locs is not None:
        pairs = zip(track_seq_idx.tolist(), track_end_locs.tolist(), strict=True)
        tracked = [(s, end - bounds[s]) for s, end in pairs]
    state_writer = taken_writer()
    written = state_writer.tracks.positions if state_writer else ()
    done = ssd_prefill(
        x[0],
        dt[0],
        A,
        B[0],
        C[0],
        bounds,
        D=D,
        z=None if z is None else z[0],
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
        initial_states=initial_states,
        positions=[*grid, *tracked, *written],
        out=out[0],
    )
    dtype = C.dtype if state_dtype is None else state_dtype
    behind = len(grid) + len(tracked)
    if state_writer is not None:
        state_writer.put(done.states_at[behind:])
    states = done.states_at[:behind].to(dtype)
    return (
        states[: len(grid)].unsqueeze(0),
        done.final_states.to(dtype),
        states[len(grid) :].unsqueeze(0) if tracked else None,
    )


def grid_positions(bounds: list[int], chunk_size: int) -> list[tuple[int, int]]:
    """The positions (sequence, tokens consumed) that lie on a grid laid over the packed batch."""
    positions, s = [(0, 0)], 0
    for at in range(chunk_size, bounds[-1], chunk_size):
        while bounds[s + 1] < at:
            s += 1
        positions.append((s, at - bounds[s]))
    return positions


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    pad_slot_id: int = PAD_SLOT_ID,
    out: Tensor | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
) -> None:
    """One decode step: updates ``state[state_batch_indices]`` [slots, H, P, N] and writes ``out``.

    Shapes: x, dt, z and out [b, H, P], A [H, P, N], B and C [b, G, N], D and dt_bias [H, P]. Rows
    with the padding slot give zeros and touch no state.

    With ``intermediate_states_buffer`` [m, T, H, P, N] the rows have T drafted tokens each: x, dt
    and out [b, T, H, P], B and C [b, T, G, N]. States stay as they are, and the one behind each
    token goes to the row ``intermediate_state_indices`` [b]. ``retrieve_parent_token`` [b, T] says
    from which token each goes on; None is a chain.
    """
    if out is None or state.dim() != 4 or x.dim() != 3 + (intermediate_states_buffer is not None):
        raise ValueError(
            "selective_state_update on the CPU platform needs `out`, a pool of shape "
            "[slots, heads, dim, state] and x of shape [batch, heads, dim], of drafts [batch, "
            "tokens, heads, dim]."
        )
    rows, slots = find_owned(state_batch_indices, x.shape[0], pad_slot_id, x.device)
    if rows is not None:
        out.zero_()
        x, dt, B, C = (t[rows] for t in (x, dt, B, C))
    if not len(slots):
        return

    rate = _once_per_head(A, 1)
    bias = None if dt_bias is None else _once_per_head(dt_bias, 1)

    def inputs(x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> StepInputs:
        steps = _once_per_head(dt, 2)
        return step_inputs(x, steps, rate, B, C, D=D, dt_bias=bias, dt_softplus=dt_softplus)

    if intermediate_states_buffer is not None and intermediate_state_indices is not None:
        parents = retrieve_parent_token
        y, behind = advance_drafts(
            state.index_select(0, slots).float(),
            parents if parents is None or rows is None else parents[rows],
            x.shape[1],
            lambda states, node: selective_state_step(
                states, inputs(x[:, node], dt[:, node], B[:, node], C[:, node])
            ),
        )
        keep_behind_drafts(intermediate_states_buffer, intermediate_state_indices, rows, behind)
    else:
        read = inputs(x, dt, B, C)
        y = advance(state, slots, lambda states, at: selective_state_step(states, read.of(at)))
    if z is not None:
        y = y * silu((z if rows is None else z[rows]).float())
    if rows is None:
        out.copy_(y)
    else:
        out[rows] = y.to(out.dtype)


def _once_per_head(t: Tensor, head_dims: int) -> Tensor:
    """Undoes ``expand`` behind the first ``head_dims`` dimensions: equal values are kept once."""
    if all(t.stride(d) == 0 for d in range(head_dims, t.dim())):
        for d in range(head_dims, t.dim()):
            t = t.narrow(d, 0, 1)
    return t
