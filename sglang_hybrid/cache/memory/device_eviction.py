"""Evicts victims of a tree that is on the device, token by token.

SGLang asks for a victim, deletes it and frees its values in steps with a result each, since the
host may have to copy something between them (unified_radix_cache.py, 869-1058;
unified_tree_core.py, 1662-1940). Where nothing is below the device, one call does it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.kv_events import StorageMedium
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.components.base import EvictLayer

if TYPE_CHECKING:
    import torch
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_hybrid.cache.records.shadow_tree import ShadowTree

Tracker = dict[ComponentType, int]
"""KV tokens and states that are to be evicted, or were, by kind."""

Targets = dict[ComponentType, tuple[ComponentType, int]]
"""Free tokens or slots, of the kind named first, with which an eviction by kind may end."""


class DeviceEviction:
    """Evictions from the tree of `cache`, whose victims `shadow_tree` chooses."""

    def __init__(self, cache: Any, shadow_tree: ShadowTree) -> None:
        self._cache = cache
        self._shadow_tree = shadow_tree
        self._victims: dict[ComponentType, Callable[[], UnifiedTreeNode | None]] = {
            ComponentType.FULL: shadow_tree.kv_victim,
            ComponentType.MAMBA: shadow_tree.state_victim,
        }

    def serves(self) -> bool:
        """True if nothing has to be copied, coded or forgotten anywhere else for a victim."""
        core = self._cache.tree_core
        return (
            core.is_plain
            and not core.enable_external_cache_linker
            and self._cache.parts.coded is None
        )

    def evict(self, wanted: Tracker, evicted: Tracker, targets: Targets | None) -> None:
        """Evict what is `wanted` of each kind, but no more once its target is reached, and add it
        to `evicted`. KV that has a target is evicted until that is reached, however much is wanted.
        """
        for kind in self._cache.tree_components:
            target = None if targets is None else targets.get(kind)
            to_target = target is not None and kind is ComponentType.FULL
            last = None
            while (to_target or evicted[kind] < wanted[kind]) and not self._reached(target):
                last = self.evict_next(kind, evicted, last)
                if last is None:
                    break

    def _reached(self, target: tuple[ComponentType, int] | None) -> bool:
        return target is not None and (
            self._cache._component_available_size(target[0]) >= target[1]
        )

    def evict_next(
        self, kind: ComponentType, evicted: Tracker, last: UnifiedTreeNode | None = None
    ) -> UnifiedTreeNode | None:
        """Evict the next victim of a kind: a leaf altogether, an inner node's state. Returns it;
        None if there is none, or if it is the `last` one, which could not be evicted.
        """
        core = self._cache.tree_core
        node = self._victims[kind]()
        if node is None or node is last:
            return None
        if node not in core.evictable_device_leaves:
            if kind is ComponentType.FULL:
                raise RuntimeError(f"node {node.id} is to be evicted, and is no leaf")
            self._drop(node, [core.components_by_type[kind]], EvictLayer.DEVICE, evicted)
            core._update_evictable_leaf_sets(node)
            return node
        core.kv_events.record_remove(node, medium=StorageMedium.GPU)
        self._drop(node, core.components, EvictLayer.ALL, evicted)
        core.evictable_device_leaves.discard(node)
        parent = node.parent
        core._remove_leaf_from_parent(node)
        core._update_evictable_leaf_sets(parent)
        return node

    def _drop(
        self, node: UnifiedTreeNode, components: Any, layers: EvictLayer, evicted: Tracker
    ) -> None:
        """Drop what `node` holds of these components, and free it."""
        lists = self._cache.tree_core.lru_lists
        frees: dict[ComponentType, list[torch.Tensor]] = defaultdict(list)
        for component in components:
            kind = component.component_type
            evicted[kind] += component.evict_component(
                node, target=layers, device_frees=frees, host_frees={}, cache_actions=[]
            )[0]
            if lists[kind].in_list(node):
                lists[kind].remove_node(node)
        self._cache._free_values(frees, {})
