"""SGLang's Python TreeCore with our look-up; it tells the shadow tree of each change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.tree_core_registry import register_tree_core_backend
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

from sglang_hybrid.cache.tree_match import TreeMatcher
from sglang_hybrid.config import BACKEND

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.components import ComponentType
    from sglang.srt.mem_cache.unified_cache.components.base import TreeComponent
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_hybrid.cache.shadow_tree import ShadowTree


class HybridTreeCore(UnifiedTreeCore):
    """Repeats every added, split and removed node in the shadow tree of its cache."""

    def __init__(
        self,
        params: CacheInitParams,
        components: dict[ComponentType, TreeComponent],
        shadow_tree: ShadowTree,
    ) -> None:
        self.shadow_tree = shadow_tree
        self._matcher = TreeMatcher(self, shadow_tree)
        super().__init__(params, components)

    def reset(self) -> None:
        super().reset()
        self.shadow_tree.reset(self.root_node)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        result = self._matcher.match(params)
        return super().match_prefix(params) if result is None else result

    def known_match(self, params: MatchPrefixParams) -> MatchResult | None:
        """The result of the last look-up of `params.req`, if it holds still; None otherwise."""
        return self._matcher.known(params)

    def _add_new_node(self, parent: UnifiedTreeNode, *args: Any, **kwargs: Any) -> UnifiedTreeNode:
        node = super()._add_new_node(parent, *args, **kwargs)
        self.shadow_tree.added(node)
        return node

    def _split_node(
        self, key: Any, child: UnifiedTreeNode, split_len: int
    ) -> tuple[UnifiedTreeNode, Any]:
        head, action = super()._split_node(key, child, split_len)
        self.shadow_tree.split(head, child)
        return head, action

    def _remove_leaf_from_parent(self, node: UnifiedTreeNode) -> None:
        super()._remove_leaf_from_parent(node)
        self.shadow_tree.removed(node)


def _build(
    params: CacheInitParams, components: dict[ComponentType, TreeComponent]
) -> HybridTreeCore:
    shadow_tree = next(iter(components.values())).cache.shadow_tree
    return HybridTreeCore(params, components, shadow_tree)


register_tree_core_backend(BACKEND, _build)
