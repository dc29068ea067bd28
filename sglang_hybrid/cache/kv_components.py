"""SGLang's tree component for KV; under our policies leaves are evicted by what they save."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.components.base import EvictLayer
from sglang.srt.mem_cache.unified_cache.components.full import FullComponent

from sglang_hybrid.telemetry.stats import Evicted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_hybrid.cache.parts import Parts
    from sglang_hybrid.cache.shadow_tree import ShadowTree


class CountedFull(FullComponent):
    """KV whose evictions are counted where no state goes with it."""

    def __init__(self, *args: Any, parts: Parts) -> None:
        super().__init__(*args)
        self._parts = parts

    def evict_component(
        self,
        node: UnifiedTreeNode,
        *args: Any,
        target: EvictLayer = EvictLayer.DEVICE,
        **kwargs: Any,
    ) -> tuple[int, int]:
        if EvictLayer.DEVICE in target:
            if not self._has_state(node):
                self._parts.stats.evicted[Evicted.KV.value] += 1
            self.kv_dropped(node)
        freed: tuple[int, int] = super().evict_component(node, *args, target=target, **kwargs)
        return freed

    def kv_dropped(self, node: UnifiedTreeNode) -> None:
        """The leaf `node` loses its KV."""

    def _has_state(self, node: UnifiedTreeNode) -> bool:
        return (
            ComponentType.MAMBA in self.cache.components
            and node.component_data[ComponentType.MAMBA].value is not None
        )


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
