"""Copies of decode states into track slots, as SGLang's hybrid attention backend asks for them.

They stand for the functions of the same names in
``sglang.kernels.ops.mamba.mamba_state_scatter_triton``.
"""

from typing import Any

import torch
from torch import Tensor


def is_grid_read() -> bool:
    """True if SGLang will read the states that a prefill's scan leaves on its grid.

    It does for states that it tracks itself, and not where checkpoints are planned. Outside of a
    forward pass nobody can say, and the answer is yes.
    """
    from sglang.srt.model_executor import forward_context

    if not forward_context.has_forward_context():
        return True
    backend: Any = forward_context.get_attn_backend()
    recurrent = getattr(backend, "linear_attn_backend", backend)
    return bool(getattr(recurrent.forward_metadata, "has_mamba_track_mask", True))


def track_mamba_states_if_needed(
    conv_states: Tensor,
    ssm_states: Tensor,
    cache_indices: Tensor,
    mamba_track_mask: Tensor,
    mamba_track_indices: Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Copies row ``cache_indices[i]`` to row ``mamba_track_indices[i]`` where the mask is set.

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
