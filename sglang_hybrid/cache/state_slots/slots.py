"""State slots: the free ones, those that a running request counts for, and their return."""

from __future__ import annotations

from operator import length_hint
from typing import TYPE_CHECKING, Any

from sglang.srt.runtime_context import get_memory, get_schedule

from sglang_hybrid.serving.config import HybridConfig
from sglang_hybrid.serving.startup import StartupError

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator


def free_slots(allocator: MambaSlotAllocator) -> int:
    """Slots that a request can have without an eviction.

    While SGLang fills a prefill batch it sets one slot aside for every waiting request, out of
    sight of `available_size` (allocator/mamba.py, alloc_group_begin).
    """
    aside = getattr(allocator, "_alloc_iter", None)
    return int(allocator.schedulable_available_size()) + (
        0 if aside is None else length_hint(aside)
    )


def count_state_slots() -> int | None:
    """State slots that requests and checkpoints can have; None until it is known. In one memory,
    one more that SGLang counts is for padding.
    """
    counted: int | None = get_schedule().max_mamba_cache_size
    return None if counted is None else counted - bool(get_memory().enable_unified_memory)


def slots_per_request(needed: int) -> int | None:
    """The value of SGLANG_HYBRID_SLOTS_PER_REQUEST, but never less than `needed`; None if unset.

    SGLang divides the state pool by it to cap the running requests. The slots that a request counts
    for but does not need are left for checkpoints. Raises `StartupError` for more than there are.
    """
    asked = HybridConfig.from_environment().hybrid_slots_per_request
    there = count_state_slots()
    if asked and there is not None and there < asked:
        raise StartupError(
            f"SGLANG_HYBRID_SLOTS_PER_REQUEST={asked} is more than the {there} state slots that "
            "there are, so that no request could run; give less, or raise --max-mamba-cache-size."
        )
    return max(needed, asked) if asked else None


def send_back(req: Req, pool: Any) -> None:
    """Undo the look-up of a request that stays in the queue (scheduler.py:4283-4300): the slot that
    it took of `pool`, SGLang's pool of requests, is free again, and nothing is copied into it. The
    turn of a streaming session has the slot of its session, beside KV, and keeps it.
    """
    req.kv.mamba_cow_src_index = None
    req.kv.mamba_needs_clear = False
    if req.kv.holds_mamba and not req.kv.holds_kv:
        pool.mamba_allocator.free(req.kv.mamba_pool_idx.unsqueeze(-1))
        req.kv.mamba_pool_idx = None
