"""Evictions from the host when it runs short: copies that save least over the next best way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.kv_events import StorageMedium
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.components.base import EvictLayer

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.components.base import TreeComponent
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_hybrid.cache.records.tiered_shadow_tree import TieredShadowTree


def evict_from_host(
    component: TreeComponent,
    shadow_tree: TieredShadowTree,
    wanted: int,
    tracker: dict[ComponentType, int],
    device_frees: dict[ComponentType, list[Any]],
    host_frees: dict[ComponentType, list[Any]],
    cache_actions: list[Any],
) -> None:
    """Free `wanted` tokens or states of the host's pool of `component`, or as many as may go
    (SGLang's `drive_host_eviction`, by recency: components/full.py, mamba.py).

    A leaf that only the host has is removed. A leaf of the host's copies that is on the device
    too loses its host copies, KV and state. Any other node loses its state.
    """
    tree = component.tree_core
    kind = component.component_type
    while tracker[kind] < wanted:
        node = shadow_tree.host_victim(kind)
        if node is None:
            return
        if node in tree.evictable_host_leaves:
            tree._evict_host_leaf(node, tracker, device_frees, host_frees, cache_actions)
            continue
        whole = not any(child.backuped for child in node.children.values())
        if whole:
            tree.kv_events.record_remove(node, medium=StorageMedium.CPU)
        for part in _host_parts(tree, node) if whole else [component]:
            tree._evict_component_and_detach_lru(
                node,
                part,
                device_frees,
                host_frees,
                cache_actions,
                target=EvictLayer.HOST,
                tracker=tracker,
            )
        tree._update_evictable_leaf_sets(node)
        tree._update_duplicate_tracking(node)


def _host_parts(tree: Any, node: UnifiedTreeNode) -> list[TreeComponent]:
    """Components of which the host has a copy for `node`; states before their KV."""
    return [
        part
        for part in reversed(tree.components)
        if node.component_data[part.component_type].host_value is not None
    ]
