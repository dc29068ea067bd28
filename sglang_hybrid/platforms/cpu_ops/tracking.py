"""Copies of decode states into track slots, as SGLang's hybrid attention backend asks for them.

They stand for the functions of the same names in
``sglang.kernels.ops.mamba.mamba_state_scatter_triton``.
"""

import torch
from torch import Tensor


def track_mamba_states_if_needed(
    conv_states: Tensor,
    ssm_states: Tensor,
    cache_indices: Tensor,
    mamba_track_mask: Tensor,
    mamba_track_indices: Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Where the mask is set, copies row ``cache_indices[i]`` to row ``mamba_track_indices[i]``.

    Shapes: conv_states and ssm_states [slots, ...], the rest [batch_size]. With
    ``check_freed_slots`` rows with a negative slot are left out.
    """
    _copy_rows(
        (conv_states, ssm_states),
        0,
        *_pairs(
            cache_indices, mamba_track_mask, mamba_track_indices, batch_size, check_freed_slots
        ),
    )


def track_mamba_states_all_layers(
    conv_states_pool: Tensor,
    ssm_states_pool: Tensor,
    cache_indices: Tensor,
    mamba_track_mask: Tensor,
    mamba_track_indices: Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """``track_mamba_states_if_needed`` for pools of all layers [layers, slots, ...] at once."""
    _copy_rows(
        (conv_states_pool, ssm_states_pool),
        1,
        *_pairs(
            cache_indices, mamba_track_mask, mamba_track_indices, batch_size, check_freed_slots
        ),
    )


def _pairs(
    source: Tensor, mask: Tensor, target: Tensor, batch_size: int, check_freed_slots: bool
) -> tuple[Tensor, Tensor]:
    chosen = mask[:batch_size].bool()
    if check_freed_slots:
        chosen = chosen & (source[:batch_size] >= 0) & (target[:batch_size] >= 0)
    rows = chosen.nonzero(as_tuple=True)[0]
    return source[rows].long(), target[rows].long()


def _copy_rows(pools: tuple[Tensor, ...], dim: int, source: Tensor, target: Tensor) -> None:
    if source.numel():
        for pool in pools:
            pool.index_copy_(dim, target, torch.index_select(pool, dim, source))
