"""Exact states inside a prefill, written to slots of a state pool: one Triton launch per layer.

A chunked prefill has the state in front of every chunk. The state at a position is that of its
chunk, decayed, plus what the chunk's tokens up to the position add; for Mamba2 (Dao & Gu 2024,
"Transformers are SSMs", section 6) and, once the corrections of its chunk are known, for the gated
delta rule as well (Yang, Kautz & Hatamizadeh 2024, "Gated Delta Networks", section 3):

    S_p = exp(a_c + .. + a_p) S_chunk + sum_{c<=t<p} exp(a_{t+1} + .. + a_p) x_t b_t^T

So at most one chunk is read per position, and at a chunk's border the state is the stored one, bit
for bit. Plain twins: the ``states_at`` of ``ssd`` and ``gated_delta_rule``, the windows of
``causal_conv1d``.

Lightning attention (Qin et al. 2024, "Lightning Attention-2") has a constant decay, and SGLang's
kernel leaves no chunk states. Its states are summed from the keys and values, beside the scan.

Nothing here waits for the device: the lists are tensors on it, and what they hold is not checked.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from sglang_hybrid.kernels import checkpoint_states_triton as kernels

DELTA_CHUNK = 64
"""Tokens between the chunk states of the delta rule (flash-linear-attention's chunk size)."""


@dataclass(frozen=True)
class Targets:
    """The states that one prefill shall leave: n of them, in any order.

    The i-th is that of sequence ``sequences[i]`` after the packed tokens up to ``ends[i]``, that
    is cu_seqlens[sequence] <= end <= cu_seqlens[sequence + 1], and goes to slot ``slots[i]``. All
    are integers [n] on the pool's device, contiguous. A slot may appear once and must be none that
    the prefill itself starts from or ends in: programs of one launch run in no order.
    """

    sequences: Tensor
    ends: Tensor
    slots: Tensor

    def __post_init__(self) -> None:
        shapes = {tuple(t.shape) for t in (self.sequences, self.ends, self.slots)}
        if len(shapes) != 1 or self.slots.dim() != 1:
            raise ValueError(
                f"Targets have sequences {tuple(self.sequences.shape)}, ends "
                f"{tuple(self.ends.shape)} and slots {tuple(self.slots.shape)}; they must be three "
                "lists of one length."
            )

    def __len__(self) -> int:
        return len(self.slots)


def ssd_tiles(width: int, size: int, dtype: torch.dtype) -> dict[str, int]:
    """Tile sizes of ``ssd_state`` for states [P, N]: small, since there are few states and many
    multiprocessors; smaller yet for float32, whose products take registers, not tensor cores."""
    most, tokens = (32, 16) if dtype == torch.float32 else (64, 64)
    return {
        "TILE_WIDTH": min(most, triton.next_power_of_2(width)),
        "TILE_SIZE": min(most, triton.next_power_of_2(size)),
        "TILE_TOKENS": tokens,
    }


def delta_tiles(value: int, key: int, dtype: torch.dtype, by_channel: bool) -> dict[str, int]:
    """Tile sizes of ``delta_state`` for states [Dv, Dk]; see ``ssd_tiles``. Decays ``by_channel``
    take registers, too."""
    if dtype == torch.float32:
        most_values, most_keys = 16, 32
    else:
        most_values, most_keys = 64, 32 if by_channel else 64
    return {
        "TILE_VALUE": min(most_values, triton.next_power_of_2(value)),
        "TILE_KEY": min(most_keys, triton.next_power_of_2(key)),
    }


def lightning_tiles(key: int, value: int) -> dict[str, int]:
    """Tile sizes of ``lightning_state`` for states [Dk, Dv]; see ``ssd_tiles``."""
    return {
        "TILE_KEY": min(32, triton.next_power_of_2(key)),
        "TILE_VALUE": min(32, triton.next_power_of_2(value)),
        "TILE_TOKENS": 32,
    }


def window_tiles(past: int) -> dict[str, int]:
    """Tile sizes of ``conv_window`` for windows of ``past`` inputs."""
    return {"TILE_CHANNELS": 256, "TILE_PAST": triton.next_power_of_2(past)}


def save_ssd_states(
    pool: Tensor,
    targets: Targets,
    *,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    chunk_states: Tensor,
    cu_seqlens: Tensor,
    initial_states: Tensor | None = None,
) -> None:
    """Mamba2: writes the states at ``targets`` to the pool, after the prefill's state passing.

    Chunks lie on the packed batch's own grid, as in mamba_ssm and SGLang (ssd_state_passing.py):
    chunk_states[c] is the state in front of packed token ``c * L`` of the sequence that token
    ``c * L - 1`` belongs to. It is not read for a sequence that starts inside the chunk; that one
    starts from its initial state, or from zero.

    Shapes: pool [slots, H, P, N] in any float dtype, its rows contiguous but any distance apart;
    x [T, H, P] and B [T, G, N] with G dividing H, copied unless their last dimensions are dense;
    dt [H, C, L] float32, the final step sizes, a head's in a row; A [H] (negative); chunk_states
    [C, H, P, N]; cu_seqlens [S + 1]; initial_states [S, H, P, N], in the pool's dtype or the kernel
    is compiled once more, where zeros stand for no prefix. Decays are summed from dt and A and not
    taken from the running sum that the scan keeps: differences of that sum lose what the sum has
    grown by. Products are of x's dtype. Raises ValueError where shapes or strides do not fit.
    """
    tokens, heads, width = x.shape
    size, (_, chunks, length) = B.shape[2], dt.shape
    row = (heads, width, size)
    _check_rows("The pool", pool, pool.shape[:1], row)
    _check_rows("chunk_states", chunk_states, (chunks,), row)
    _check_contiguous("chunk_states", chunk_states)
    if initial_states is not None:
        _check_rows("initial_states", initial_states, (len(cu_seqlens) - 1,), row)
        _check_contiguous("initial_states", initial_states)
    if dt.shape[0] != heads or dt.stride()[1:] != (length, 1) or chunks * length < tokens:
        raise ValueError(
            f"dt {tuple(dt.shape)} with strides {dt.stride()} does not hold {tokens} tokens of "
            f"{heads} heads, chunk after chunk."
        )
    if not len(targets):
        return
    x, B = (t if t.stride(2) == 1 else t.contiguous() for t in (x, B))
    tiles = ssd_tiles(width, size, x.dtype)
    grid = (
        len(targets),
        heads,
        triton.cdiv(width, tiles["TILE_WIDTH"]) * triton.cdiv(size, tiles["TILE_SIZE"]),
    )
    kernels.ssd_state[grid](
        pool,
        x,
        dt,
        A,
        B,
        chunk_states,
        pool if initial_states is None else initial_states,
        cu_seqlens,
        targets.sequences,
        targets.ends,
        targets.slots,
        chunks,
        initial_states is not None,
        pool.stride(0),
        *x.stride()[:2],
        dt.stride(0),
        *B.stride()[:2],
        WIDTH=width,
        SIZE=size,
        CHUNK=length,
        HEADS_PER_GROUP=heads // B.shape[1],
        **tiles,
        num_warps=4,
    )


def save_delta_states(
    pool: Tensor,
    targets: Targets,
    *,
    keys: Tensor,
    corrections: Tensor,
    decays: Tensor,
    chunk_states: Tensor,
    rows: Tensor,
    cu_seqlens: Tensor,
    unit: float = 1.0,
) -> None:
    """Gated delta net: writes the states at ``targets`` to the pool, after the chunk states.

    Chunks of 64 tokens are counted from each sequence's own start; chunk_states[rows[i]] is the
    state in front of the one in which the i-th target lies, or of the last one, behind whose end it
    lies. The corrections are the ``u`` of ``gated_delta_rule``, what each token adds along its
    key; flash-linear-attention calls them v_new.

    Shapes: pool [slots, Hv, Dv, Dk] in any float dtype, its rows contiguous but any distance apart;
    keys [T, Hk, Dk] as the scan used them (normalised, if it normalises), corrections [T, Hv, Dv],
    Hk dividing Hv; decays float32, the log decay summed from the chunk's first token on, times
    1 / unit: [T, Hv], one per head, or [T, Hv, Dk], one per channel (KDA); chunk_states
    [R, Hv, Dv, Dk]; rows integers [n]; cu_seqlens [S + 1], no sequence of a target being empty.
    Products are of the corrections' dtype. Raises ValueError where shapes or strides do not fit.
    """
    _, heads, value = corrections.shape
    key = keys.shape[2]
    row = (heads, value, key)
    _check_rows("The pool", pool, pool.shape[:1], row)
    _check_rows("chunk_states", chunk_states, chunk_states.shape[:1], row)
    _check_contiguous("chunk_states", chunk_states)
    per_channel = decays.dim() == 3
    for name, t in (("keys", keys), ("corrections", corrections), ("decays", decays)):
        if t.dim() == 3 and t.stride(2) != 1:
            raise ValueError(f"{name} has strides {t.stride()}; its last dimension must be dense.")
    if not len(targets):
        return
    tiles = delta_tiles(value, key, corrections.dtype, per_channel)
    grid = (
        len(targets),
        heads,
        triton.cdiv(value, tiles["TILE_VALUE"]) * triton.cdiv(key, tiles["TILE_KEY"]),
    )
    kernels.delta_state[grid](
        pool,
        keys,
        corrections,
        decays,
        chunk_states,
        rows,
        cu_seqlens,
        targets.sequences,
        targets.ends,
        targets.slots,
        unit,
        pool.stride(0),
        *keys.stride()[:2],
        *corrections.stride()[:2],
        *decays.stride()[:2],
        KEY=key,
        VALUE=value,
        CHUNK=DELTA_CHUNK,
        HEADS_PER_KEY=heads // keys.shape[1],
        PER_CHANNEL=per_channel,
        **tiles,
        num_warps=4,
    )


def save_kda_states(pool: Tensor, targets: Targets, **scan: Any) -> None:
    """KDA: `save_delta_states` of decays per channel, summed in powers of two, as its scan does."""
    save_delta_states(pool, targets, **scan, unit=math.log(2))


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
    """Lightning attention: writes the states at ``targets`` to the pool, before the scan runs.

    A token's ``k v^T`` fades by ``exp(-slope)`` with each later one. A sequence starts from its own
    slot ``state_indices[s]``, which the scan will overwrite, if ``resumed[s]``, and from zero
    otherwise. Targets are in order: those of a sequence follow one another, by their ends.

    Shapes: pool [slots, H, Dk, Dv] in any float dtype, its rows contiguous but any distance apart;
    keys [T, H, Dk] and values [T, H, Dv], their last dimension dense; slopes [H] float32, in any
    shape; state_indices [S] integers, resumed [S] booleans, cu_seqlens [S + 1]. Products are
    float32. Raises ValueError where shapes or strides do not fit.
    """
    _, heads, key = keys.shape
    value = values.shape[2]
    _check_rows("The pool", pool, pool.shape[:1], (heads, key, value))
    for name, t in (("keys", keys), ("values", values)):
        if t.stride(2) != 1:
            raise ValueError(f"{name} has strides {t.stride()}; its last dimension must be dense.")
    if slopes.numel() != heads or not slopes.is_contiguous():
        raise ValueError(f"{tuple(slopes.shape)} are not the slopes of {heads} heads.")
    if not len(targets):
        return
    tiles = lightning_tiles(key, value)
    grid = (
        len(targets),
        heads,
        triton.cdiv(key, tiles["TILE_KEY"]) * triton.cdiv(value, tiles["TILE_VALUE"]),
    )
    kernels.lightning_state[grid](
        pool,
        keys,
        values,
        slopes,
        state_indices,
        resumed,
        cu_seqlens,
        targets.sequences,
        targets.ends,
        targets.slots,
        len(targets),
        pool.stride(0),
        *keys.stride()[:2],
        *values.stride()[:2],
        KEY=key,
        VALUE=value,
        **tiles,
        num_warps=4,
    )


def save_windows(
    pool: Tensor,
    targets: Targets,
    *,
    inputs: Tensor,
    state_indices: Tensor,
    resumed: Tensor,
    cu_seqlens: Tensor,
) -> None:
    """Writes the convolution's window at ``targets`` to the pool, before the convolution runs.

    A window is the last K-1 inputs; what it lacks in front of this prefill comes from the
    sequence's own slot ``state_indices[s]``, which the convolution will overwrite, if
    ``resumed[s]``, and is zero otherwise.

    Shapes: pool [slots, D, K-1] and inputs [T, D], any strides; state_indices [S] integers and
    resumed [S] booleans; cu_seqlens [S + 1].
    """
    if pool.dim() != 3 or pool.shape[1] != inputs.shape[1]:
        raise ValueError(
            f"The pool {tuple(pool.shape)} holds no windows of inputs {tuple(inputs.shape)}."
        )
    _, channels, past = pool.shape
    if not len(targets) or not past:
        return
    tiles = window_tiles(past)
    kernels.conv_window[(len(targets), triton.cdiv(channels, tiles["TILE_CHANNELS"]))](
        pool,
        inputs,
        state_indices,
        resumed,
        cu_seqlens,
        targets.sequences,
        targets.ends,
        targets.slots,
        channels,
        *pool.stride(),
        *inputs.stride(),
        PAST=past,
        **tiles,
        num_warps=4,
    )


def _check_rows(
    name: str, states: Tensor, rows: tuple[int, ...], row: tuple[int, int, int]
) -> None:
    """Raises ValueError unless ``states`` is [*rows, *row] with contiguous rows."""
    dense = (row[1] * row[2], row[2], 1)
    if tuple(states.shape) != (*rows, *row) or states.stride()[1:] != dense:
        raise ValueError(
            f"{name} {tuple(states.shape)} with strides {states.stride()} does not hold dense "
            f"states {row} of {rows[0]} rows."
        )


def _check_contiguous(name: str, states: Tensor) -> None:
    """Raises ValueError unless ``states`` is contiguous."""
    if not states.is_contiguous():
        raise ValueError(f"{name} with strides {states.stride()} must be contiguous.")
