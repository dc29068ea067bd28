"""Evictions where KV and states share all bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_hybrid.core.costs.cost import UNBOUNDED

if TYPE_CHECKING:
    from sglang_hybrid.cache.records.shadow_tree import ShadowTree
    from sglang_hybrid.core.memory.account import MemoryAccount


class OneMemoryCache(UnifiedRadixCache):
    """SGLang's cache on one memory, or on its two pools if there is no `account`.

    shadow_tree: None where SGLang's own order decides, and its walks stay.
    """

    account: MemoryAccount | None
    shadow_tree: ShadowTree | None

    def _evict_components(
        self,
        request_by_type: dict[ComponentType, int],
        tracker: dict[ComponentType, int],
        available_size_targets: dict[ComponentType, tuple[ComponentType, int]] | None = None,
        *,
        allocation_reclaim_satisfied: Callable[[], bool] | None = None,
    ) -> None:
        """Evict in one memory, where a victim of either kind makes room for either: so there is one
        walk: that over states, which ends leaves, too (unified_radix_cache.py:952-1060).
        """
        if self.account is None or self.shadow_tree is None:
            super()._evict_components(
                request_by_type,
                tracker,
                available_size_targets,
                allocation_reclaim_satisfied=allocation_reclaim_satisfied,
            )
            return

        def enough() -> bool:
            if allocation_reclaim_satisfied is not None:
                return allocation_reclaim_satisfied()
            if available_size_targets is None:
                return all(tracker[what] >= request_by_type[what] for what in tracker)
            return all(
                self._component_available_size(what) >= size
                for what, size in available_size_targets.values()
            )

        self.tree_core.evict_device_start(ComponentType.MAMBA, UNBOUNDED)
        try:
            while not enough():
                node_id, made_progress = self._evict_device_next_node(ComponentType.MAMBA, tracker)
                if node_id is not None:
                    self._give_up_leaf(node_id, tracker)
                elif not made_progress:
                    break
        finally:
            self.tree_core.evict_device_end(ComponentType.MAMBA)

    def _give_up_leaf(self, node_id: int, tracker: dict[ComponentType, int]) -> None:
        """Evict a leaf; where SGLang writes back, after its copy to the host (1028-1052)."""
        backup = self._evict_device_leaf(node_id, tracker)
        if backup is None:
            return
        if self._execute_and_commit_kv_backup(backup, write_back=True):
            self.writing_check(write_back=True)
            self._demote(node_id, tracker)
        else:
            self._drop_subtree_no_host(node_id, tracker)
