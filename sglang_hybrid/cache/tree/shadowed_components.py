"""Components whose victims our policies choose; every change is repeated in the shadow tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.components.base import (
    EvictLayer,
    TreeComponent,
)

from sglang_hybrid.cache.tree.kv_components import CountedFull, value_len
from sglang_hybrid.cache.tree.state_components import RobustMamba

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_hybrid.cache.coded.entries import CodedEntries
    from sglang_hybrid.cache.records.shadow_tree import ShadowTree
    from sglang_hybrid.cache.records.tiered_shadow_tree import TieredShadowTree
    from sglang_hybrid.core.records.nodes import Kind
    from sglang_hybrid.serving.telemetry.stats import Evicted


class _ScoredComponent(TreeComponent):
    """Components whose evicted entries may be coded instead, and whose host copies are evicted by
    worth.
    """

    def __init__(self, cache: Any, params: CacheInitParams) -> None:
        super().__init__(cache, params)
        self._shadow_tree: ShadowTree = cache.parts.shadow_tree
        self._coded: CodedEntries | None = cache.parts.coded

    def _code(self, node: UnifiedTreeNode, tracker: Any, device_frees: Any) -> bool:
        """Code what can be coded of a victim; whether there was anything."""
        if self._coded is None:
            return False
        what = self._shadow_tree.codable(node)
        if what is not None:
            self._coded.code(node, what, tracker, device_frees)
        return what is not None

    def drive_host_eviction(self, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        if self._shadow_tree.follows_copies:
            from sglang_hybrid.cache.tiers.host_eviction import evict_from_host

            records = cast("TieredShadowTree", self._shadow_tree)
            evict_from_host(self, records, num_tokens, *args, **kwargs)
        else:
            super().drive_host_eviction(num_tokens, *args, **kwargs)


class ShadowedMamba(_ScoredComponent, RobustMamba):
    """States that are evicted by what they save."""

    def on_state_gain(self, node: UnifiedTreeNode, kind: Kind) -> None:
        self._shadow_tree.on_state_gain(node, kind)
        if self._parts.spilled is not None:
            self._parts.spilled.on_state_gain(node)

    def on_state_loss(self, node: UnifiedTreeNode, what: Evicted) -> None:
        if node.component_data[self.component_type].host_value is None:
            self._parts.decision_log.on_state_eviction(node, what)
        else:
            self._parts.tier_stats.demoted += 1
        self._shadow_tree.on_state_loss(node)

    def acquire_component_lock(
        self, node: UnifiedTreeNode, result: Any, lock_host: bool = False
    ) -> Any:
        result = super().acquire_component_lock(node, result, lock_host)
        self._on_lock_change(node)
        return result

    def release_component_lock(
        self, node: UnifiedTreeNode, params: Any, lock_host: bool = False
    ) -> None:
        super().release_component_lock(node, params, lock_host)
        self._on_lock_change(node)

    def _on_lock_change(self, node: UnifiedTreeNode) -> None:
        self._shadow_tree.on_state_lock(node, node.component_data[self.component_type].lock_ref > 0)
        if self._coded is not None:
            self._coded.on_state_lock(node)
        if self._parts.spilled is not None:
            self._parts.spilled.on_state_lock(node)

    def _evict_device_start(self, request_cnt: int) -> None:
        self._wanted = request_cnt
        self._last: UnifiedTreeNode | None = None

    def _evict_device_next_node(
        self,
        tracker: dict[ComponentType, int],
        device_frees: Any,
        host_frees: Any,
        cache_actions: Any,
    ) -> int | None:
        """One victim: a leaf is returned for SGLang to delete or to demote, an inner node gives up
        its state, of which the host may get a copy first.
        """
        if tracker[self.component_type] >= self._wanted:
            return None
        node = self._shadow_tree.state_victim()
        if node is None or node is self._last:  # SGLang could not evict it
            return None
        if self._code(node, tracker, device_frees):
            return None
        self._last = node
        if node in self.tree_core.evictable_device_leaves:
            leaf: int = node.id
            return leaf
        if self.tree_core.demotes_states:
            self.cache.copy_before_eviction(node)
        self.tree_core._evict_component_and_detach_lru(
            node,
            self,
            target=EvictLayer.DEVICE,
            tracker=tracker,
            device_frees=device_frees,
            host_frees=host_frees,
            cache_actions=cache_actions,
        )
        self.tree_core._update_evictable_leaf_sets(node)
        return None

    def _evict_device_end(self) -> None:
        self._wanted, self._last = 0, None


class ShadowedFull(_ScoredComponent, CountedFull):
    """KV whose leaves are evicted by what they save."""

    def on_kv_loss(self, node: UnifiedTreeNode) -> None:
        if not node.backuped:
            self._parts.decision_log.on_kv_eviction(node)
        elif not self._shadow_tree.has_states:
            self._parts.tier_stats.demoted += 1

    def acquire_component_lock(
        self, node: UnifiedTreeNode, result: Any, lock_host: bool = False
    ) -> Any:
        result = super().acquire_component_lock(node, result, lock_host)
        if not lock_host:
            self._shadow_tree.on_kv_lock(node, self.tree_core.root_node)
        return result

    def lock_below(self, above: UnifiedTreeNode, node: UnifiedTreeNode) -> None:
        """A request that holds the path to `above` holds the path to `node` below it, too."""
        core, kind = self.tree_core, self.component_type
        self._shadow_tree.on_kv_lock(node, core.root_node)
        while node is not above:
            data = node.component_data[kind]
            if data.lock_ref == 0:
                tokens = value_len(node, kind)
                core.component_evictable_size_[kind] -= tokens
                core.component_protected_size_[kind] += tokens
            data.lock_ref += 1
            core._update_evictable_leaf_sets(node)
            node = node.parent

    def release_component_lock(
        self, node: UnifiedTreeNode, params: Any, lock_host: bool = False
    ) -> None:
        super().release_component_lock(node, params, lock_host)
        if not lock_host:
            self._shadow_tree.on_kv_release(node, self.tree_core.root_node)

    def _evict_device_start(self, request_cnt: int) -> None:
        self._wanted = request_cnt
        self._last: UnifiedTreeNode | None = None

    def _evict_device_next_node(
        self, tracker: dict[ComponentType, int], device_frees: Any, *args: Any, **kwargs: Any
    ) -> int | None:
        if tracker[self.component_type] >= self._wanted:
            return None
        node = self._shadow_tree.kv_victim()
        if node is None or node is self._last:  # SGLang could not evict it
            return None
        if self._code(node, tracker, device_frees):
            return None
        self._last = node
        return int(node.id)

    def _evict_device_end(self) -> None:
        self._wanted, self._last = 0, None
