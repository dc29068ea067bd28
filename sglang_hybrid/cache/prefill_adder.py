"""Admission of requests to a prefill batch: none without the state slots that it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_hybrid.cache.slots import free_slots

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class SlotAwarePrefillAdder(PrefillAdder):
    """Leaves a request waiting while its own state slots are neither free nor evictable.

    SGLang counts state slots here only for a shared byte pool (schedule_policy.py:688-715) and
    asserts when a split pool has none (memory_pool.py:1595-1622), which ends the scheduler.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._promised = 0  # slots of requests already in this batch

    def add_one_req(self, req: Req, *args: Any, **kwargs: Any) -> AddReqResult:
        needed = self._slots_needed(req)
        allocator = self.tree_cache.req_to_token_pool.mamba_allocator
        if needed:
            free = free_slots(allocator) + self.tree_cache.mamba_evictable_size()
            if self._promised + needed > free - self._source(req):
                return AddReqResult.NO_TOKEN
        admitted = len(self.can_run_list)
        result = super().add_one_req(req, *args, **kwargs)
        if len(self.can_run_list) > admitted:
            self._promised += needed
        return result

    def _source(self, req: Req) -> int:
        """1 if the state this request is copied from counts as evictable until it is admitted."""
        if req.kv.mamba_cow_src_index is None:
            return 0
        tree = self.tree_cache.tree_core
        node = tree.node_by_id(req.last_node)
        return int(node.component_data[ComponentType.MAMBA].lock_ref == 0)

    def _slots_needed(self, req: Req) -> int:
        pool = self.tree_cache.req_to_token_pool
        needed = 0 if req.kv.holds_mamba else 1
        if pool.enable_mamba_extra_buffer and req.kv.mamba_ping_pong_track_buffer is None:
            needed += pool.mamba_initial_tracking_slots
        return needed
