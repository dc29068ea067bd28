"""Components whose victims our policies choose; every change is repeated in the shadow tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.components.base import EvictLayer

from sglang_hybrid.cache.kv_components import CountedFull
from sglang_hybrid.cache.state_components import RobustMamba

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_hybrid.cache.parts import Parts
    from sglang_hybrid.cache.shadow_tree import ShadowTree
    from sglang_hybrid.core.nodes import Kind
    from sglang_hybrid.telemetry.stats import Evicted


class ShadowedMamba(RobustMamba):
    """States that are evicted by what they save."""

    def __init__(self, *args: Any, parts: Parts, shadow_tree: ShadowTree) -> None:
        super().__init__(*args, parts=parts)
        self._shadow_tree = shadow_tree

    def state_given(self, node: UnifiedTreeNode, kind: Kind) -> None:
        self._shadow_tree.state_given(node, kind)

    def state_dropped(self, node: UnifiedTreeNode, what: Evicted) -> None:
        self._parts.decision_log.state_lost(node, what)
        self._shadow_tree.state_dropped(node)

    def acquire_component_lock(
        self, node: UnifiedTreeNode, result: Any, lock_host: bool = False
    ) -> Any:
        result = super().acquire_component_lock(node, result, lock_host)
        self._tell_lock(node)
        return result

    def release_component_lock(
        self, node: UnifiedTreeNode, params: Any, lock_host: bool = False
    ) -> None:
        super().release_component_lock(node, params, lock_host)
        self._tell_lock(node)

    def _tell_lock(self, node: UnifiedTreeNode) -> None:
        self._shadow_tree.state_lock_changed(
            node, node.component_data[self.component_type].lock_ref > 0
        )

    def _evict_device_start(self, request_cnt: int) -> None:
        self._wanted = request_cnt

    def _evict_device_next_node(
        self,
        tracker: dict[ComponentType, int],
        device_frees: Any,
        host_frees: Any,
        **more: Any,
    ) -> int | None:
        """One victim: a leaf is returned for SGLang to delete, an inner node gives up its state.

        more: `cache_actions`, to which SGLang 0.5.23 adds, and which 0.5.22 does not have.
        """
        if tracker[self.component_type] >= self._wanted:
            return None
        node = self._shadow_tree.state_victim()
        if node is None:
            return None
        if node in self.tree_core.evictable_device_leaves:
            leaf: int = node.id
            return leaf
        self.tree_core._evict_component_and_detach_lru(
            node,
            self,
            target=EvictLayer.DEVICE,
            tracker=tracker,
            device_frees=device_frees,
            host_frees=host_frees,
            **more,
        )
        self.tree_core._update_evictable_leaf_sets(node)
        return None

    def _evict_device_end(self) -> None:
        self._wanted = 0


class ShadowedFull(CountedFull):
    """KV whose leaves are evicted by what they save."""

    def __init__(self, *args: Any, parts: Parts, shadow_tree: ShadowTree) -> None:
        super().__init__(*args, parts=parts)
        self._shadow_tree = shadow_tree

    def kv_dropped(self, node: UnifiedTreeNode) -> None:
        self._parts.decision_log.kv_lost(node)

    def acquire_component_lock(
        self, node: UnifiedTreeNode, result: Any, lock_host: bool = False
    ) -> Any:
        result = super().acquire_component_lock(node, result, lock_host)
        if not lock_host:
            self._shadow_tree.kv_locked(node, self.tree_core.root_node)
        return result

    def release_component_lock(
        self, node: UnifiedTreeNode, params: Any, lock_host: bool = False
    ) -> None:
        super().release_component_lock(node, params, lock_host)
        if not lock_host:
            self._shadow_tree.kv_released(self._path(node))

    def _path(self, node: UnifiedTreeNode) -> Iterator[tuple[UnifiedTreeNode, bool]]:
        while node is not self.tree_core.root_node:
            yield node, node.component_data[self.component_type].lock_ref > 0
            node = node.parent

    def _evict_device_start(self, request_cnt: int) -> None:
        self._wanted = request_cnt

    def _evict_device_next_node(
        self, tracker: dict[ComponentType, int], *args: Any, **kwargs: Any
    ) -> int | None:
        if tracker[self.component_type] >= self._wanted:
            return None
        node = self._shadow_tree.kv_victim()
        return None if node is None else int(node.id)

    def _evict_device_end(self) -> None:
        self._wanted = 0
