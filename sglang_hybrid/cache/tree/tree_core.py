"""SGLang's Python TreeCore with our look-up and a shorter insertion, and with a shadow tree."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import InsertResult
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.tree_core_registry import register_tree_core_backend
from sglang.srt.mem_cache.unified_cache.unified_tree_core import (
    _InsertPhase,
    _InsertWalkState,
)
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import InsertStepResult

from sglang_hybrid.cache.request.tree_match import TreeMatcher, deepest_within
from sglang_hybrid.cache.tiers.inexact import MarkedTreeCore
from sglang_hybrid.serving.config import BACKEND

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import (
        InsertParams,
        MatchPrefixParams,
        MatchResult,
    )
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.events import KVCacheEventRecorder
    from sglang.srt.mem_cache.unified_cache.components.base import TreeComponent
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_hybrid.cache.records.shadow_tree import ShadowTree
    from sglang_hybrid.cache.state_events import StateEvents
    from sglang_hybrid.cache.state_slots.parked_kv import ParkedKv
    from sglang_hybrid.cache.tiers.copy_worth import WriteJudge
    from sglang_hybrid.cache.tiers.request_loads import WayChooser

ON_DEVICE = {ComponentType.FULL, ComponentType.MAMBA}
MOST_CHANGED_LEAVES = 256
"""Nodes that may have become leaves, or none, before they are looked at."""


class HybridTreeCore(MarkedTreeCore):
    """Repeats every added, split and removed node in the shadow tree of its cache."""

    _ongoing_insert_walk_state: _InsertWalkState | None
    kv_events: KVCacheEventRecorder

    def __init__(
        self,
        params: CacheInitParams,
        components: dict[ComponentType, TreeComponent],
        shadow_tree: ShadowTree,
    ) -> None:
        self.shadow_tree = shadow_tree
        self._matcher = TreeMatcher(self, shadow_tree)
        self._start: tuple[UnifiedTreeNode, int] | None = None
        self._splitting = False
        self.ways: WayChooser | None = None
        self.writes: WriteJudge | None = None
        self.parked: ParkedKv | None = None
        self.due_copies: dict[int, None] = {}
        self.state_events: StateEvents | None = None
        super().__init__(params, components)
        if params.enable_kv_cache_events and shadow_tree.has_states:
            from sglang_hybrid.cache.state_events import StateEvents

            self.state_events = StateEvents.in_place_of(self.kv_events)
            self.state_events.follow(shadow_tree.tree)
            self.kv_events = self.state_events

    def reset(self) -> None:
        super().reset()
        self._matcher.forget_all()
        self.due_copies.clear()
        self.shadow_tree.reset(self.root_node)
        if self.state_events is not None:
            self.state_events.follow(self.shadow_tree.tree)

    @property
    def is_plain(self) -> bool:
        """True if the tree holds KV and states on the device, token by token, and nothing else."""
        return (
            not self.enable_hicache
            and not self.is_eagle
            and ON_DEVICE.issuperset(self.components_by_type)
        )

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        result = self._matcher.match(params)
        if result is not None:
            return result
        result = super().match_prefix(params)
        return result if self.ways is None else self.ways.choose(self, params, result)

    def known_match(self, params: MatchPrefixParams) -> MatchResult | None:
        """The result of the last look-up of `params.req`, if it holds still; None otherwise."""
        return self._matcher.known(params)

    def following(self, req: Req, depth: int) -> UnifiedTreeNode | None:
        """The node with which the prompt of `req` goes on behind `depth` tokens, where its last
        look-up ended; None if there is none.
        """
        return self._matcher.following(req, depth)

    def changed_matches(self, waiting: Iterable[Req], least_hit: int) -> list[Req]:
        """The requests of `waiting` whose prompt might match otherwise than at their last look-up,
        and those that hit at most `least_hit` tokens.
        """
        return self._matcher.changed(waiting, least_hit)

    def insert_below(self, node: UnifiedTreeNode, depth: int) -> None:
        """The next insertion begins at `node`, which ends at `depth` tokens: its key and its value
        are those of the tokens behind.
        """
        self._start = node, depth

    def begin_insert(self, params: InsertParams) -> Any:
        """SGLang compares and touches every node from the root on (unified_tree_core.py:1129-1177).
        Nodes that the request holds need neither: their KV is the tree's, and who is evicted is
        decided elsewhere.
        """
        begun, self._start = self._start, None
        key, value = params.key, params.value
        start = begun or self._start_of(params)
        if start is None:
            return super().begin_insert(params)
        if self.has_ongoing_insert():
            raise RuntimeError("an insertion began while another one was under way")
        node, depth = start
        if begun is None:
            end = len(key) // self.page_size * self.page_size
            key, value = key[depth:end], value[depth:end]
        if len(key) and key.child_key(self.page_size) not in node.children:
            return self._insert_leaf(node, depth, key, value, params)
        self._ongoing_insert_walk_state = _InsertWalkState(
            phase=_InsertPhase.WALK,
            node=node,
            key=key,
            value=value,
            params=params,
            priority=params.priority or 0,
            result=InsertResult(prefix_len=0),
            total_prefix_length=depth,
        )
        return self._advance_insert()

    def _start_of(self, params: InsertParams) -> tuple[UnifiedTreeNode, int] | None:
        """The node where an insertion of a whole path may begin, and its tokens; None if only
        SGLang can tell: what the inserter holds may be compared at once, and nothing of it is
        freed.
        """
        if (
            not self.is_plain
            or self.enable_external_cache_linker
            or params.value is None
            or len(params.key) < self.page_size
            or params.rotation_base is not None
            or params.track_adopted_ranges
        ):
            return None
        return deepest_within(self, params.key, min(len(params.key), params.prev_prefix_len))

    def _insert_leaf(
        self, parent: UnifiedTreeNode, depth: int, key: Any, value: Any, params: InsertParams
    ) -> InsertStepResult:
        """Insert a leaf in one step: no token of `key` is stored, as is usual below a held path."""
        priority, session = params.priority or 0, params.session_id
        leaf = self._add_new_node(parent, key, value, priority, session)
        result = InsertResult(prefix_len=depth, last_device_node=leaf.id)
        actions: list[Any] = []
        for component in self.components:
            component.commit_insert_component_data(
                node=leaf, is_new_leaf=True, params=params, result=result, cache_actions=actions
            )
        return InsertStepResult(actions=actions, result=result)

    def _add_new_node(self, parent: UnifiedTreeNode, *args: Any, **kwargs: Any) -> UnifiedTreeNode:
        node = super()._add_new_node(parent, *args, **kwargs)
        self.shadow_tree.on_add(node)
        if self.parked is not None:
            self.parked.on_add(node)
        return node

    def _split_node(
        self, key: Any, child: UnifiedTreeNode, split_len: int
    ) -> tuple[UnifiedTreeNode, Any]:
        self._splitting = True  # until the shadow tree knows the new node
        try:
            head, action = super()._split_node(key, child, split_len)
        finally:
            self._splitting = False
        self.shadow_tree.on_split(head, child)
        return head, action

    # Copies to the host

    @property
    def demotes_states(self) -> bool:
        """True if a state that the device gives up may be copied to the host first."""
        return bool(self.enable_hicache and not self.is_host_memory_buffer_only)

    def wants_copies(self, node: UnifiedTreeNode) -> bool:
        """True if what the host lacks of `node` should be copied before the device gives it up."""
        lacks = not node.backuped or self.lacks_state(node)
        if not lacks or node.evicted or node.write_through_pending_id is not None:
            return False
        return self.writes is None or self.writes.accepts(node)

    def wants_copies_now(self, node: UnifiedTreeNode) -> bool:
        """True if the device, which gives `node` up, should wait for these copies. Where SGLang
        writes through, nothing waits for a copy of KV, only for that of a state above KV that the
        host has.
        """
        return (node.backuped or self.is_write_back) and self.wants_copies(node)

    @staticmethod
    def lacks_state(node: UnifiedTreeNode) -> bool:
        """True if the device has a state of `node`, and the host has not."""
        states = node.component_data[ComponentType.MAMBA]
        return states.value is not None and states.host_value is None

    def _build_backup_spec(self, node: UnifiedTreeNode) -> Any:
        """KV that is copied for what is below it takes its state along only if that is worth it."""
        value, transfers = super()._build_backup_spec(node)
        state = ComponentType.MAMBA
        if state in transfers and not (self.writes is None or self.writes.is_resume_worth(node)):
            del transfers[state]
        return value, transfers

    def evict_device_leaf(self, node_id: int, is_write_back: bool) -> Any:
        """A leaf that was worth its writing has been copied by now; another one is forgotten, where
        SGLang writes back, too.
        """
        return super().evict_device_leaf(node_id, is_write_back and self.writes is None)

    def _should_backup_after_insert(self, state: _InsertWalkState) -> bool:
        """A state that comes to a node whose KV is just being copied is copied after that; SGLang
        would leave it out (unified_tree_core.py, _should_backup_after_insert).
        """
        node = state.target_node
        assert node is not None
        pending = node.write_through_pending_id is not None
        if self.enable_hicache and not self.is_write_back and pending and self.lacks_state(node):
            self.due_copies[node.id] = None
        return bool(super()._should_backup_after_insert(state))

    def take_due_copies(self) -> list[UnifiedTreeNode]:
        """Nodes that were to be copied, are not being copied now, and are held by no request.

        What a request holds cannot be forgotten. Once the request has ended, the history knows
        what became of the positions that it passed, and whether they are worth a copy.
        """
        ready = []
        for node_id in list(self.due_copies):
            node = self._node_arena.get(node_id)
            if node is not None and not node.evicted:
                held = node.component_data[ComponentType.FULL].lock_ref > 0
                if held or node.write_through_pending_id is not None:
                    continue
                ready.append(node)
            del self.due_copies[node_id]
        return [node for node in ready if not node.backuped or self.lacks_state(node)]

    def sanity_check(
        self, ongoing_write_through: list[tuple[int, int]], ongoing_load_back: list[tuple[int, int]]
    ) -> None:
        """SGLang's check, in which a node that is being copied may be locked on the host instead of
        on the device, which has given it up. Raises AssertionError.
        """
        kept = [pair for pair in ongoing_write_through if not self._locked_on_host(pair[1])]
        super().sanity_check(kept, ongoing_load_back)

    def _locked_on_host(self, node_id: int) -> bool:
        node = self._node_arena.get(node_id)
        return node is not None and node.component_data[ComponentType.FULL].host_lock_ref > 0

    def _reclaim_full_host_duplicates(self, *args: Any, **kwargs: Any) -> None:
        """SGLang frees these before others, in the order of their age (unified_tree_core.py); here
        copies of either kind compete.
        """

    # Events of copies

    @property
    def evictable_device_leaves(self) -> set[UnifiedTreeNode]:
        """SGLang's set of the leaves that may be evicted."""
        self._update_changed_leaves()
        return self._device_leaves

    @evictable_device_leaves.setter
    def evictable_device_leaves(self, leaves: set[UnifiedTreeNode]) -> None:
        self._device_leaves = leaves
        self._changed_leaves: set[UnifiedTreeNode] = set()

    def _update_changed_leaves(self) -> None:
        for node in self._changed_leaves:
            if self._is_device_leaf(node):
                self._device_leaves.add(node)
            else:
                self._device_leaves.discard(node)
        self._changed_leaves.clear()

    def _update_evictable_leaf_sets(self, node: UnifiedTreeNode) -> None:
        """SGLang calls this several times per request, and asks for the set when something is
        evicted or locked: only then, or when there are many, are the nodes looked at. Without
        copies below the device there are no leaves of theirs (unified_tree_core.py,
        _update_evictable_leaf_sets).
        """
        if self.enable_hicache or self.enable_external_cache_linker:
            super()._update_evictable_leaf_sets(node)
        else:
            self._changed_leaves.add(node)
            if len(self._changed_leaves) > MOST_CHANGED_LEAVES:
                self._update_changed_leaves()
        if self.shadow_tree.follows_copies:
            self._sync(node)

    def _is_device_leaf(self, node: UnifiedTreeNode) -> bool:
        """The same as SGLang's (unified_tree_core.py, _is_device_leaf), without generators."""
        data = node.component_data
        if node is self.root_node or data[ComponentType.FULL].value is None:
            return False
        for component in data:
            if component.lock_ref > 0:
                return False
        for child in node.children.values():
            if child.component_data[ComponentType.FULL].value is not None:
                return False
        return True

    def set_component_device_value(self, node_id: int, *args: Any, **kwargs: Any) -> None:
        super().set_component_device_value(node_id, *args, **kwargs)
        self._sync(self.node_by_id(node_id))

    def commit_backup(self, node_id: int, *args: Any, **kwargs: Any) -> None:
        super().commit_backup(node_id, *args, **kwargs)
        self._sync(self.node_by_id(node_id))

    def commit_hicache_transfers(
        self, node_id: int, *args: Any, insert_result: InsertResult | None = None, **kwargs: Any
    ) -> None:
        super().commit_hicache_transfers(node_id, *args, insert_result=insert_result, **kwargs)
        if insert_result is not None and insert_result.inserted_host_node is not None:
            self._sync(self.node_by_id(insert_result.inserted_host_node))

    def mark_write_through_pending(self, node_ids: list[int], ack_id: int) -> list[int]:
        marked: list[int] = super().mark_write_through_pending(node_ids, ack_id)
        for node_id in marked:
            self._sync(self.node_by_id(node_id))
        return marked

    def finish_write_through(self, node_ids: list[int], ack_id: int) -> None:
        super().finish_write_through(node_ids, ack_id)
        for node_id in node_ids:
            self._sync(self.node_by_id(node_id))

    def finish_load_back(self, anchor_node_id: int) -> None:
        super().finish_load_back(anchor_node_id)
        node = self.node_by_id(anchor_node_id)
        while node is not None and node is not self.root_node:
            self._sync(node)
            node = node.parent

    def _sync(self, node: UnifiedTreeNode) -> None:
        if node is not self.root_node and not self._splitting and node.id in self._node_arena:
            self.shadow_tree.sync(node)

    def _remove_leaf_from_parent(self, node: UnifiedTreeNode) -> None:
        super()._remove_leaf_from_parent(node)
        self.shadow_tree.on_remove(node)


def _build(
    params: CacheInitParams, components: dict[ComponentType, TreeComponent]
) -> HybridTreeCore:
    shadow_tree = next(iter(components.values())).cache.shadow_tree
    return HybridTreeCore(params, components, shadow_tree)


register_tree_core_backend(BACKEND, _build)
