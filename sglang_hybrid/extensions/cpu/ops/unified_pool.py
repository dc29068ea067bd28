"""SGLang's unified pool of KV and states (`--enable-unified-memory`) without an accelerator.

Its tables, copies and moves have paths in plain torch. These functions replace its two Triton
kernels, and its refusal of platforms that bring their own classes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from sglang_hybrid.serving.config import CPU_ATTENTION


def rejected(original: Callable[..., None]) -> Callable[..., None]:
    """`reject_out_of_tree_path`, which lets the unified pool through."""

    @wraps(original)
    def reject(platform: Any, *, subsystem: str) -> None:
        if "--enable-unified-memory" not in subsystem:
            original(platform, subsystem=subsystem)

    return reject


def with_ours(backends: frozenset[str]) -> frozenset[str]:
    """Attention backends that find rows of drafts by their names, and that of this platform."""
    return backends | {CPU_ATTENTION}


class Launched:
    """A function in place of a Triton kernel: called as `kernel[grid](...)`."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._function


@Launched
def place_extended(
    prefix_lens: Tensor,
    seq_lens: Tensor,
    last_loc: Tensor,
    free_pages: Tensor,
    out_indices: Tensor,
    batch: int,
    page_size: int,
) -> None:
    """Write to ``out_indices`` where the tokens from ``prefix_lens`` [b] to ``seq_lens`` [b] lie:
    first on the page of ``last_loc`` [b], then on those of ``free_pages``, in their order.
    """
    from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive

    alloc_extend_naive(
        prefix_lens, seq_lens, last_loc, free_pages, out_indices, page_size, out_indices.device
    )


@Launched
def place_decoded(
    seq_lens: Tensor,
    last_loc: Tensor,
    free_pages: Tensor,
    out_indices: Tensor,
    batch: int,
    page_size: int,
) -> None:
    """The same for one token of each sequence, the last of its ``seq_lens`` [b]."""
    from sglang.srt.mem_cache.allocator.paged import alloc_decode_naive
    from sglang.srt.utils import get_num_new_pages

    pages = get_num_new_pages(seq_lens=seq_lens.cpu(), page_size=page_size, decode=True)
    alloc_decode_naive(seq_lens, last_loc, free_pages, out_indices, page_size, pages)
