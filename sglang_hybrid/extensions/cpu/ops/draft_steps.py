"""Steps of speculative decoding: where drafted tokens keep their KV, and what an accepted one
leaves.

Functions that stand for one of SGLang's keep its parameters and in-place effects.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from sglang_hybrid.serving.config import CPU_ATTENTION


def leave_overlap(_: object) -> None:
    """Stands for what turns the overlap scheduler off on a CPU: here it works as on a GPU."""


def draft_backend(original: Callable[..., Any]) -> Callable[..., Any]:
    """`DraftBackendFactory._create_backend`, which knows SGLang's own attention backends."""

    @wraps(original)
    def create(self: Any, backend_name: str, *_: Any, **__: Any) -> Any:
        from sglang_hybrid.extensions.cpu.attention import DraftSteps, HybridCpuAttnBackend

        runner = self.draft_model_runner
        if backend_name == "decode_attention_backend":
            backend: Any = DraftSteps(runner, self.speculative_num_steps)
        else:
            backend = HybridCpuAttnBackend(runner)
        backend.prefill_attention_backend_str = backend.decode_attention_backend_str = CPU_ATTENTION
        return backend

    return create


def slots_behind(
    *,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    batch_size: int,
    draft_token_num: int,
    device: object,
) -> Tensor:
    """KV slots of the tokens [start, end) of each request, one request after another, int64.

    Shapes: ``req_pool_indices``, ``start_offset`` and ``end_offset`` [b], ``req_to_token``
    [requests, context].
    """
    return _slots_of(req_pool_indices, req_to_token, start_offset, end_offset)


def _slots_of(rows: Tensor, table: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """The result of `slots_behind`."""
    spans = zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
    return torch.cat([table[row, start:end] for row, start, end in spans]).long()


def gather_rows(
    indices: Tensor,
    topk_p_buf: Tensor,
    topk_index_buf: Tensor,
    output_tokens_buf: Tensor,
    hidden_states_buf: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Rows ``indices`` [b] of what the last step left for the next one."""
    rows = indices.long()
    hidden = None if hidden_states_buf is None else hidden_states_buf[rows]
    return topk_p_buf[rows], topk_index_buf[rows], output_tokens_buf[rows], hidden


def give_slots(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    batch_size: int,
) -> None:
    """Write KV slots to the table of requests: ``out_cache_loc`` has those of the tokens
    [start, end) of each request, one request after another. Shapes as in `slots_behind`.
    """
    taken = 0
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in spans:
        count = end - start
        req_to_token[row, start:end] = out_cache_loc[taken : taken + count].to(req_to_token.dtype)
        taken += count


def draft_slots(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    topk: int,
    num_cols: int,
    positions: Tensor | None = None,
    mrope: Tensor | None = None,
) -> None:
    """Write to ``out_cache_loc`` the ``topk * num_cols`` KV slots behind each request's tokens."""
    ends = seq_lens + topk * num_cols
    out_cache_loc.copy_(_slots_of(req_pool_indices, req_to_token, seq_lens, ends))


def last_accepted(
    accept_tokens: Tensor,
    accept_lens: Tensor,
    bonus_tokens: Tensor,
    accept_stride: int,
    batch_size: int,
) -> None:
    """Write the last of each request's ``accept_lens`` [b] tokens to ``bonus_tokens`` [b]; it has
    ``accept_stride`` places among ``accept_tokens``.
    """
    rows = accept_tokens.view(batch_size, accept_stride)
    bonus_tokens.copy_(rows.gather(1, (accept_lens.long() - 1)[:, None])[:, 0])


def fill_front_out_cache_loc(
    num_front: Tensor, out_cache_loc: Tensor, front_out_cache_loc: Tensor
) -> None:
    """Write the first ``num_front[i]`` slots of request i's part of ``out_cache_loc`` [b * n] to
    the front of ``front_out_cache_loc``, one request after another.
    """
    window = out_cache_loc.view(num_front.numel(), -1)
    front = window[torch.arange(window.shape[1]) < num_front[:, None]]
    front_out_cache_loc[: len(front)] = front


def fill_accept_out_cache_loc(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor, size: int
) -> None:
    """Write the slots of the accepted nodes, ``accept_index`` [b, depth] without its -1, to the
    front of ``accept_out_cache_loc`` [size].
    """
    accepted = accept_index[accept_index >= 0].long()
    accept_out_cache_loc[: len(accepted)] = out_cache_loc[accepted]


def move_rows_in_torch(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """`MHATokenToKVPool._init_kv_copy_and_warmup`: KV of accepted tokens is moved by torch."""

    @wraps(original)
    def use_torch(pool: Any) -> None:
        pool.use_native_move_kv_cache = True

    return use_torch


def scatter_accepted_states(
    mamba_caches: Any,
    state_indices_tensor: Tensor,
    last_correct_step_indices: Tensor,
    mamba_track_indices: Tensor | None,
    mamba_steps_to_track: Tensor | None,
    src_indices_raw: Tensor | None = None,
) -> None:
    """Each request's state becomes the one behind its last accepted node, in all layers.

    ``state_indices_tensor`` [b] are the slots of the requests, ``last_correct_step_indices`` [b]
    the nodes. Where ``mamba_steps_to_track`` is not -1, the state behind that node goes to the slot
    ``mamba_track_indices``, too. ``src_indices_raw`` [b]: rows of the verified states; None is 0 to
    b.
    """
    steps = [(state_indices_tensor, last_correct_step_indices)]
    if mamba_track_indices is not None and mamba_steps_to_track is not None:
        steps.append((mamba_track_indices, mamba_steps_to_track))
    count = len(last_correct_step_indices)
    rows = torch.arange(count) if src_indices_raw is None else src_indices_raw.long()
    pairs = [
        (mamba_caches.temporal, mamba_caches.intermediate_ssm),
        *zip(mamba_caches.conv, mamba_caches.intermediate_conv_window, strict=True),
    ]
    for slots, nodes in steps:
        some = (nodes >= 0) & (slots[:count] >= 0)
        for pool, verified in pairs:
            if pool.numel():
                pool[:, slots[:count][some].long()] = verified[:, rows[some], nodes[some].long()]
