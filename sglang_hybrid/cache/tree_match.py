"""The longest cached prefix of a request, remembered while it waits.

SGLang looks a waiting request up again in every scheduling round, to rank it and to try to admit
it. Here the second look-up starts at the node where the first one ended.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from sglang.srt.mem_cache.base_prefix_cache import MatchResult
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.components.base import LRURefreshPhase

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_hybrid.cache.tree_core import HybridTreeCore

ON_DEVICE = {ComponentType.FULL, ComponentType.MAMBA}
TOKEN_BYTES = array("q").itemsize


@dataclass(frozen=True, slots=True)
class LastMatch:
    """Where the last look-up of a request ended: `depth` tokens of `prompt`, at the end of `node`.

    prompt: the request's own token ids, which nobody changes; another prompt is another object.
    """

    prompt: array[int]
    namespace: tuple[str | None, str | None]
    node: UnifiedTreeNode
    depth: int


class TreeMatcher:
    """Looks prompts up in the tree of one `HybridTreeCore`.

    A node's position in its prompts never changes while it is in the tree: a split puts a new node
    above it, and what grows is below it. So a request that was looked up goes on from the node
    where that ended, unless the node was removed. SGLang's times of access stay as they were: who
    is evicted is decided elsewhere.
    """

    def __init__(self, core: HybridTreeCore) -> None:
        self._core = core
        self._last: WeakKeyDictionary[Req, LastMatch] = WeakKeyDictionary()

    @property
    def usable(self) -> bool:
        """Whether all that can be matched is on the device, token by token."""
        core = self._core
        known = ON_DEVICE.issuperset(component.component_type for component in core.components)
        return known and not core.enable_hicache and not core.is_eagle

    def match(self, params: MatchPrefixParams) -> MatchResult:
        """What SGLang's `match_prefix` returns for a key of at least one page."""
        key, core = params.key, self._core
        usable = len(key) - len(key) % core.page_size
        node, depth, actions = self._walk(*self._start(params.req, key, usable), key, usable)
        if params.req is not None:
            namespace = key.extra_key, key.cache_salt
            self._last[params.req] = LastMatch(params.req.origin_input_ids, namespace, node, depth)
        return self._result(params, node, depth, actions)

    def _start(self, req: Req | None, key: RadixKey, usable: int) -> tuple[UnifiedTreeNode, int]:
        last = None if req is None else self._last.get(req)
        if (
            req is None
            or last is None
            or last.depth > usable
            or last.prompt is not req.origin_input_ids
            or last.namespace != (key.extra_key, key.cache_salt)
            or last.node not in self._core.mirror
        ):
            return self._core.root_node, 0
        return last.node, last.depth

    def _walk(
        self, node: UnifiedTreeNode, depth: int, key: RadixKey, usable: int
    ) -> tuple[UnifiedTreeNode, int, list[Any]]:
        """Down from `node`, which ends at `depth`; a node that is matched in part is split."""
        page = self._core.page_size
        while depth < usable:
            child = node.children.get(key.child_key_at(depth, page))
            if child is None or child.evicted:
                break
            same = common_tokens(child.key.token_ids, key.token_ids, depth, usable)
            same -= same % page
            depth += same
            if same < len(child.key):
                head, action = self._core._split_node(child.key, child, same)
                return head, depth, [] if action is None else [action]
            node = child
        return node, depth, []

    def _result(
        self, params: MatchPrefixParams, node: UnifiedTreeNode, depth: int, actions: list[Any]
    ) -> MatchResult:
        core = self._core
        best, resumed = self._deepest_state(node, depth)
        result = MatchResult(
            device_prefix_len=resumed,
            last_device_node=best,
            last_host_node=best,
            best_match_node=best,
            last_visited_node_id=None if node is core.root_node else node.id,
            full_kv_hit_length=depth,
        )
        for component in core.components:
            if component.component_type is not ComponentType.FULL:  # which keeps no such list
                component.refresh_lru(LRURefreshPhase.MATCH_END, best, core.root_node)
            result = component.finalize_match_result_in_tree_core(
                result=result, params=params, value_chunks=[], best_value_len=0
            )
        return result._replace(
            last_device_node=best.id,
            last_host_node=best.id,
            best_match_node=best.id,
            cache_actions=actions,
        )

    def _deepest_state(self, node: UnifiedTreeNode, depth: int) -> tuple[UnifiedTreeNode, int]:
        """The nearest node from `node` up that a request can resume from, and where it ends."""
        root = self._core.root_node
        if ComponentType.MAMBA not in self._core.components_by_type:
            return node, depth
        while node is not root and node.component_data[ComponentType.MAMBA].value is None:
            depth -= len(node.key)
            node = node.parent
        return node, depth


def common_tokens(edge: array[int], prompt: array[int], start: int, end: int) -> int:
    """How many tokens `edge` and `prompt` [start, end) begin with alike."""
    count = min(len(edge), end - start)
    mine = np.frombuffer(edge, np.int64, count)
    other = np.frombuffer(prompt, np.int64, count, start * TOKEN_BYTES)
    differs = mine != other
    first = int(differs.argmax())
    return first if differs[first] else count
