"""SGLang's Python TreeCore with our look-up and a shorter insertion, and with a shadow tree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import InsertResult
from sglang.srt.mem_cache.unified_cache.tree_core_registry import register_tree_core_backend
from sglang.srt.mem_cache.unified_cache.unified_tree_core import (
    _InsertPhase,
    _InsertWalkState,
)

from sglang_hybrid.cache.inexact import MarkedTreeCore
from sglang_hybrid.cache.tree_match import TreeMatcher
from sglang_hybrid.config import BACKEND

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import (
        InsertParams,
        MatchPrefixParams,
        MatchResult,
    )
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.components import ComponentType
    from sglang.srt.mem_cache.unified_cache.components.base import TreeComponent
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_hybrid.cache.shadow_tree import ShadowTree


class HybridTreeCore(MarkedTreeCore):
    """Repeats every added, split and removed node in the shadow tree of its cache."""

    _ongoing_insert_walk_state: _InsertWalkState | None

    def __init__(
        self,
        params: CacheInitParams,
        components: dict[ComponentType, TreeComponent],
        shadow_tree: ShadowTree,
    ) -> None:
        self.shadow_tree = shadow_tree
        self._matcher = TreeMatcher(self, shadow_tree)
        self._known: UnifiedTreeNode | None = None
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

    @contextmanager
    def inserting_below(self, node_id: int | None) -> Iterator[None]:
        """What is inserted meanwhile begins with the tokens of the path to this node, which a
        running request holds; or with a part of them.
        """
        node = self._node_arena.get(node_id)
        self._known = None if node is self.root_node else node
        try:
            yield
        finally:
            self._known = None

    def begin_insert(self, params: InsertParams) -> Any:
        """SGLang compares and touches every node from the root on (unified_tree_core.py:1129-1177).
        Nodes that the request holds need neither: their KV is the tree's, and who is evicted is
        decided elsewhere.
        """
        known = self._known_part(params)
        if known is None:
            return super().begin_insert(params)
        if self.has_ongoing_insert():
            raise RuntimeError("an insertion began while another one was under way")
        node, depth = known
        key = params.key.page_aligned(self.page_size)
        assert params.value is not None
        self._ongoing_insert_walk_state = _InsertWalkState(
            phase=_InsertPhase.WALK,
            node=node,
            key=key[depth:],
            value=params.value[depth : len(key)],
            params=params,
            priority=params.priority or 0,
            result=InsertResult(prefix_len=0),
            total_prefix_length=depth,
        )
        return self._advance_insert()

    def _known_part(self, params: InsertParams) -> tuple[UnifiedTreeNode, int] | None:
        """The deepest node of the known path whose end lies within the key and within what is the
        tree's already, and where it ends; None if only SGLang can tell.
        """
        if (
            self._known is None
            or self.enable_hicache
            or self.enable_external_cache_linker
            or self.is_eagle
            or params.value is None
            or params.rotation_base is not None
            or params.track_adopted_ranges
            or self._known not in self.shadow_tree
        ):
            return None
        record = self.shadow_tree.record(self._known)
        most = min(len(params.key) // self.page_size * self.page_size, params.prev_prefix_len)
        while record.depth > most and record.parent is not None:
            record = record.parent
        return None if record.parent is None else (record.payload, record.depth)

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
