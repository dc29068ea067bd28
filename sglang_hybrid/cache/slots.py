"""How many state slots are free, and how many a running request counts for."""

from __future__ import annotations

from operator import length_hint
from typing import TYPE_CHECKING

from sglang_hybrid.config import HybridConfig

if TYPE_CHECKING:
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


def slots_per_request(needed: int) -> int | None:
    """What `--hybrid-slots-per-request` says, but never less than the `needed` ones; None if unset.

    SGLang divides the state pool by it to cap the running requests. Whatever a request counts for
    beyond what it needs is left for checkpoints.
    """
    asked = HybridConfig.from_environment().hybrid_slots_per_request
    return max(needed, asked) if asked else None
