"""SGLang's tree component for KV; what it evicts is counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.components.base import EvictLayer
from sglang.srt.mem_cache.unified_cache.components.full import FullComponent

from sglang_hybrid.serving.telemetry.stats import Evicted

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_hybrid.cache.parts import Parts


class CountedFull(FullComponent):
    """KV whose evictions are counted where no state is evicted with it."""

    def __init__(self, cache: Any, params: CacheInitParams) -> None:
        super().__init__(cache, params)
        self._parts: Parts = cache.parts

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
            self.on_kv_loss(node)
            if self._parts.displaced_kv is not None:
                self._parts.displaced_kv.on_kv_eviction(node)
        freed: tuple[int, int] = super().evict_component(node, *args, target=target, **kwargs)
        return freed

    def reclaimable_value_len(self, node: UnifiedTreeNode) -> int:
        return value_len(node, self.component_type)

    def update_component_on_insert_overlap(
        self, node: UnifiedTreeNode, *args: Any, value_slice: Any, **named: Any
    ) -> int:
        """Put what a request has computed anew into the place of coded KV, or of parked KV."""
        displaced_kv = self._parts.displaced_kv
        if displaced_kv is not None and displaced_kv.adopt(node, value_slice):
            return 0
        return int(
            super().update_component_on_insert_overlap(
                node, *args, value_slice=value_slice, **named
            )
        )

    def redistribute_on_node_split(
        self, new_parent: UnifiedTreeNode, child: UnifiedTreeNode
    ) -> None:
        coded, data = self._parts.coded, child.component_data[self.component_type]
        if coded is None or not coded.has_kv(child):
            super().redistribute_on_node_split(new_parent, child)
            if self._parts.parked is not None:
                self._parts.parked.split(new_parent, child)
            return
        data.value = None
        super().redistribute_on_node_split(new_parent, child)
        coded.split(new_parent, child)

    def on_kv_loss(self, node: UnifiedTreeNode) -> None:
        """The leaf `node` loses its KV."""

    def _has_state(self, node: UnifiedTreeNode) -> bool:
        return (
            ComponentType.MAMBA in self.cache.components
            and node.component_data[ComponentType.MAMBA].value is not None
        )


def value_len(node: UnifiedTreeNode, kind: ComponentType) -> int:
    """KV tokens or state slots that `node` holds on the device. SGLang asks at each node of a path
    that is locked or released, and `len` of a tensor takes several times as long as this.
    """
    value = node.component_data[kind].value
    return 0 if value is None else int(value.numel())
