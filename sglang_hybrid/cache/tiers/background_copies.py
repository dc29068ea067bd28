"""Copies to the host in the background, so that an eviction on a request's way moves no bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_hybrid.cache.memory.shared import shared_memory
from sglang_hybrid.core.victims.pool import Scarce

if TYPE_CHECKING:
    from sglang_hybrid.cache.host_tier import HostTierCache

CHECKS = 8
"""The number of times that the next victims are looked for while requests fill the memory above the
watermark.
"""


class Offload:
    """Copies what one cache would evict next, until no more than `watermark` of the device's memory
    were in use: one node at a time, while no copy is under way; under write-back only while no
    request waits, and nothing is loaded.

    watermark: 0 to 1; at 1 nothing is copied here, and the write policy alone says when.
    """

    def __init__(self, cache: HostTierCache, watermark: float) -> None:
        self._cache = cache
        self._watermark = watermark
        self._last: tuple[float, int] | None = None  # time and bytes in use when all was copied

    @property
    def is_on(self) -> bool:
        """True if it copies anything."""
        return self._watermark < 1

    def step(self) -> None:
        """The scheduler begins another step."""
        cache = self._cache
        controller = cache.cache_controller
        if not self.is_on or controller is None or controller.ack_write_queue:
            return
        if cache.is_write_back and (controller.ack_load_queue or cache.has_waiting_requests):
            return
        if self._is_unchanged():
            return
        for node in cache.shadow_tree.next_uncopied(self.needed):
            if cache.copy_to_host(node):
                cache.tier_stats.offloaded += 1
                self._last = None
                return

    def needed(self, scarce: Scarce) -> int:
        """Bytes in use above the watermark, of the memory that `scarce` names."""
        used, whole = self._memory(scarce)
        return used - int(self._watermark * whole)

    def _is_unchanged(self) -> bool:
        """True if what would be evicted next is what it was when all of that was copied."""
        kinds = (Scarce.KV, Scarce.STATES)
        memories = [self._memory(kind) for kind in kinds]
        if all(used <= self._watermark * whole for used, whole in memories):
            return True
        now, used = self._cache.shadow_tree.clock.tick, sum(used for used, _ in memories)
        step = (1 - self._watermark) * sum(whole for _, whole in memories) / CHECKS
        if self._last is not None and self._last[0] == now and used - self._last[1] < step:
            return True
        self._last = now, used
        return False

    def _memory(self, scarce: Scarce) -> tuple[int, int]:
        """Bytes in use and in all, of the pool of a kind or of the memory that both share."""
        cache, cost = self._cache, self._cache.cost
        allocator = cache.token_to_kv_pool_allocator
        memory = shared_memory(allocator)
        if memory is not None:
            account = memory.account
            return account.budget - account.free, account.budget
        free, whole, size = allocator.available_size(), allocator.size, cost.kv_bytes_per_token
        if scarce is Scarce.STATES:
            if not cache.is_mamba_enabled:
                return 0, 0
            slots = cache.req_to_token_pool.mamba_allocator
            free, whole, size = slots.available_size(), slots.size, cost.state_bytes
        return int(whole - free) * size, int(whole) * size
