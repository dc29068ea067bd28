"""The longest cached prefix of a request, remembered while it waits.

SGLang looks a waiting request up again in every scheduling round, to rank it and to try to admit
it. Here the second look-up starts at the node where the first one ended, and to rank requests only
those are looked up again that might find something else (hooks/scheduling.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.srt.mem_cache.base_prefix_cache import MatchResult
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.components.base import LRURefreshPhase

from sglang_hybrid.serving.per_request import PerRequest

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import (
        UnifiedTreeCore,
        UnifiedTreeNode,
    )

    from sglang_hybrid.cache.records.shadow_tree import ShadowTree
    from sglang_hybrid.cache.tree.tree_core import HybridTreeCore
    from sglang_hybrid.core.records.nodes import Node

TOKEN_BYTES = array("q").itemsize


@dataclass(slots=True)
class LastMatch:
    """The end of the last look-up of a request: `depth` tokens of `prompt`, at the end of `node`;
    `best`: the node that it resumes from. next_key: the child of `node` that would continue the
    prompt, whatever part of it was looked up; None at its end. record: of `node`. changes: when all
    this was last seen to hold, as `TreeMatcher._changes` counts.

    prompt: the request's own token ids, which nobody changes; another prompt is another object.
    """

    prompt: array[int]
    extra_key: str | None
    cache_salt: str | None
    node: UnifiedTreeNode
    depth: int
    best: UnifiedTreeNode
    next_key: Any
    result: MatchResult
    record: Node
    changes: int


class TreeMatcher:
    """Looks prompts up in the tree of one `core`, whose nodes are those of `shadow_tree`.

    A node's position in its prompts never changes while it is in the tree: a split puts a new node
    above it, and what grows is below it. So a request that was looked up goes on from the node
    where that ended, unless the node was removed. SGLang's times of access stay as they were: who
    is evicted is decided elsewhere.
    """

    def __init__(self, core: HybridTreeCore, shadow_tree: ShadowTree) -> None:
        self._core = core
        self._shadow_tree = shadow_tree
        self._last: PerRequest[LastMatch] = PerRequest()

    def forget_all(self) -> None:
        """Forget all matches, after the tree was emptied."""
        self._last.clear()

    def match(self, params: MatchPrefixParams) -> MatchResult | None:
        """The result of SGLang's `match_prefix`; None if only SGLang can tell: nothing to match, or
        not all that can be matched is on the device, token by token.
        """
        key, core, req = params.key, self._core, params.req
        if not core.is_plain:
            return None
        usable = len(key)
        usable -= usable % core.page_size
        if not usable:
            return None
        last = None if req is None else self._reusable_match(req, key, usable)
        start = (core.root_node, 0) if last is None else (last.node, last.depth)
        node, depth, actions = self._walk(*start, key, usable)
        best, resumed = self._deepest_state(node, depth)
        result = self._result(params, node, depth, best, resumed)
        if req is not None:
            record = self._shadow_tree.record(node)
            self._last[req] = LastMatch(
                req.origin_input_ids,
                key.extra_key,
                key.cache_salt,
                node,
                depth,
                best,
                self._next_key(req, key, depth),
                result,
                record,
                self._changes(record),
            )
        return result._replace(cache_actions=actions) if actions else result

    def known(self, params: MatchPrefixParams) -> MatchResult | None:
        """The result of the last look-up of the same request, if it would be returned again."""
        key, req, page = params.key, params.req, self._core.page_size
        usable = len(key)
        last = None if req is None else self._reusable_match(req, key, usable)
        if last is None:
            return None
        deeper = last.depth + page <= usable
        if deeper and key.child_key_at(last.depth, page) in last.node.children:
            return None
        return last.result if self._is_still_nearest(last) else None

    def following(self, req: Req, depth: int) -> UnifiedTreeNode | None:
        """The child with which the prompt of `req` goes on behind `depth` tokens, where its last
        look-up ended; None if that ended elsewhere or there is none.
        """
        last = self._last.get(req)
        if last is None or last.depth != depth or last.node not in self._shadow_tree:
            return None
        child: UnifiedTreeNode | None = last.node.children.get(last.next_key)
        return child

    def changed(self, waiting: Iterable[Req], least_hit: int) -> list[Req]:
        """The requests of `waiting` whose whole prompt might match otherwise than it did at their
        last look-up, and those that hit at most `least_hit` tokens.
        """
        last = self._last.get
        return [
            req for req in waiting if req.prefix_len <= least_hit or not self._holds(req, last(req))
        ]

    def _holds(self, req: Req, last: LastMatch | None) -> bool:
        """True if the prompt of `req` would match as it did at its `last` look-up, and `req` says
        so.
        """
        return (
            last is not None
            and last.prompt is req.origin_input_ids
            and not req.output_ids
            and req.prefix_len == last.result.device_prefix_len
            and req.last_node == last.result.last_device_node
            and (last.changes == self._changes(last.record) or self._is_still_valid(last))
        )

    def _changes(self, record: Node) -> int:
        """Grows with every change of the tree after which a prompt whose path ends at the node of
        `record` may match otherwise.
        """
        return record.changes + self._shadow_tree.tree.inner_changes

    def _is_still_valid(self, last: LastMatch) -> bool:
        """True if the tree is such that the whole prompt would match as it did."""
        if (
            last.node not in self._shadow_tree
            or last.next_key in last.node.children
            or not self._is_still_nearest(last)
        ):
            return False
        last.changes = self._changes(last.record)
        return True

    def _is_still_nearest(self, last: LastMatch) -> bool:
        """True if the node of the last match is still the nearest one that can be resumed from."""
        node = last.node
        if ComponentType.MAMBA not in self._core.components_by_type:
            return node is last.best
        while node.component_data[ComponentType.MAMBA].value is None and node.parent is not None:
            node = node.parent
        return node is last.best

    def _next_key(self, req: Req, key: RadixKey, depth: int) -> Any:
        """The key that tells children apart below `depth` tokens of the prompt of `req`."""
        page = self._core.page_size
        if depth + page <= len(key):
            return key.child_key_at(depth, page)
        whole = RadixKey(
            req.origin_input_ids, key.extra_key, key.is_bigram, cache_salt=key.cache_salt
        )
        return whole.child_key_at(depth, page) if depth + page <= len(whole) else None

    def _reusable_match(self, req: Req, key: RadixKey, usable: int) -> LastMatch | None:
        """The last look-up of `req`, if it was of this prompt and ended in what is still cached."""
        last = self._last.get(req)
        if (
            last is None
            or last.depth > usable
            or last.prompt is not req.origin_input_ids
            or last.extra_key != key.extra_key
            or last.cache_salt != key.cache_salt
            or last.node not in self._shadow_tree
        ):
            return None
        return last

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
        self,
        params: MatchPrefixParams,
        node: UnifiedTreeNode,
        depth: int,
        best: UnifiedTreeNode,
        resumed: int,
    ) -> MatchResult:
        core = self._core
        states = core.components_by_type.get(ComponentType.MAMBA)
        if states is not None:
            states.refresh_lru(LRURefreshPhase.MATCH_END, best, core.root_node)
        adds = states is not None and states.adds_to_matches
        found = best if adds else best.id
        result = MatchResult(
            device_prefix_len=resumed,
            last_device_node=found,
            last_host_node=found,
            best_match_node=found,
            full_kv_hit_length=depth,
            cache_actions=[],
            last_visited_node_id=None if node is core.root_node else node.id,
        )
        if not adds:
            return result
        result = states.finalize_match_result_in_tree_core(
            result=result, params=params, value_chunks=[], best_value_len=0
        )
        return result._replace(
            last_device_node=best.id, last_host_node=best.id, best_match_node=best.id
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


def deepest_within(core: UnifiedTreeCore, key: RadixKey, most: int) -> tuple[UnifiedTreeNode, int]:
    """The deepest node on the path of `key` that ends within `most` tokens, and where it ends."""
    node, depth, page = core.root_node, 0, core.page_size
    while depth + page <= most:
        child = node.children.get(key.child_key_at(depth, page))
        if child is None or child.evicted:
            break
        tokens = len(child.key)
        if common_tokens(child.key.token_ids, key.token_ids, depth, most) < tokens:
            break
        node, depth = child, depth + tokens
    return node, depth


def common_tokens(edge: array[int], prompt: array[int], start: int, end: int) -> int:
    """The number of tokens that `edge` and `prompt` [start, end) begin with alike."""
    count = min(len(edge), end - start)
    mine = np.frombuffer(edge, np.int64, count)
    other = np.frombuffer(prompt, np.int64, count, start * TOKEN_BYTES)
    differs = mine != other
    first = int(differs.argmax())
    return first if differs[first] else count
