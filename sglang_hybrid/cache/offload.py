"""Copies to the host in the background, so that an eviction on a request's way moves no bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_hybrid.memory.allocators import OneMemoryKV

if TYPE_CHECKING:
    from sglang_hybrid.cache.host_tier import HostTierCache

LOOKED_AT = 16
"""Victims of each pool that one step considers."""


class Offload:
    """Above `watermark` of the device's memory, copies the next victims of one cache, one at a
    time: only while no copy is under way, and no request waits.

    watermark: 0 to 1; at 1 nothing is copied in the background.
    """

    def __init__(self, cache: HostTierCache, watermark: float) -> None:
        self._cache = cache
        self._watermark = watermark

    def step(self) -> None:
        """The scheduler begins another step."""
        cache = self._cache
        controller = cache.cache_controller
        busy = controller is None or controller.ack_write_queue or controller.ack_load_queue
        if busy or cache.requests_wait or self._used() <= self._watermark:
            return
        tree = cache.tree_core
        for node in cache.shadow_tree.next_victims(LOOKED_AT):
            missing = not node.backuped or tree.wants_copy_of_state(node)
            if missing and node.write_through_pending_id is None and cache.copy_to_host(node):
                cache.tier_stats.offloaded += 1
                return

    def _used(self) -> float:
        """The share of the device's memory that is in use, of the fuller pool if there are two."""
        cache = self._cache
        allocator = cache.token_to_kv_pool_allocator
        if isinstance(allocator, OneMemoryKV):
            return 1 - allocator.account.free / allocator.account.budget
        used = 1 - allocator.available_size() / max(1, allocator.size)
        if cache.is_mamba_enabled:
            slots = cache.req_to_token_pool.mamba_allocator
            used = max(used, 1 - slots.available_size() / max(1, slots.size))
        return float(used)
