"""Inserts what a request has computed below the node that it holds.

SGLang begins at the root each time (unified_radix_cache.py, checkpoint_into_tree): it copies the
tokens and the KV indices of the whole path, compares them with the tree, locks the whole path and
gives the old lock up. A running request holds the node where its path ends in the tree, so here all
that begins at that node: what it costs depends on what is new, not on the length of the prompt.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefParams,
    IncLockRefResult,
    InsertParams,
    TreeLock,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import InsertResult
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_hybrid.cache.radix_cache import HybridRadixCache
    from sglang_hybrid.cache.records.shadow_tree import ShadowTree
    from sglang_hybrid.core.records.nodes import Node


class PathGrowth:
    """Puts what requests have computed into the tree of `cache`, whose nodes are those of
    `shadow_tree`; None where SGLang's own order decides what is evicted.
    """

    def __init__(self, cache: HybridRadixCache, shadow_tree: ShadowTree | None) -> None:
        self._cache = cache
        self._shadow_tree = shadow_tree
        states_stay = envs.SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK.get()
        self._unlocked = (ComponentType.MAMBA,) if states_stay else ()

    def can_grow(self, req: Req) -> bool:
        """True if `req` holds a node, and all that the tree holds is on the device: otherwise
        SGLang has more to do than what is done here.
        """
        core = self._cache.tree_core
        return (
            self._shadow_tree is not None
            and core.is_plain
            and not core.enable_external_cache_linker
            and req.last_node in core._node_arena
        )

    def grow(self, req: Req, up_to: int) -> None:
        """SGLang's `checkpoint_into_tree` for the first `up_to` tokens of `req`, which must be
        served.
        """
        kv, ended = req.kv, req.finished()
        states = self._cache.components.get(ComponentType.MAMBA)
        params = InsertParams(
            prev_prefix_len=kv.cache_protected_len,
            inserted_len=kv.cache_inserted_len,
            priority=req.priority or 0,
            session_id=req.session_id,
        )
        end = up_to = min(up_to, len(req.full_untruncated_fill_ids))
        if states is not None:
            end = states.prepare_for_caching_req(
                req=req, insert_params=params, token_ids_len=up_to, is_finished=ended
            )
        end -= end % self._cache.page_size
        result = None
        if end > 0:
            before = self._cache.tree_core.node_by_id(req.last_node)
            held, depth = self._held(req, min(end, kv.cache_protected_len))
            result = self._insert_below(held, depth, req, params, end)
            self._take_over_duplicates(req, held, depth, result)
            if states is None:
                self._end_prompt(req, params, end)
            self._move_lock(req, before, result.last_device_node)
            kv.cache_inserted_len = max(kv.cache_inserted_len, end)
            kv.cache_protected_len = end
            req.last_node = result.last_device_node
        if states is not None:
            states.cleanup_after_caching_req(
                req, is_finished=ended, insert_result=result, insert_params=params
            )

    def insert(self, req: Req, params: InsertParams, end: int) -> InsertResult:
        """Insert the first `end` tokens of `req` with what `params` says of their states."""
        held, depth = None, 0
        if self.can_grow(req):
            held, depth = self._held(req, min(end, params.prev_prefix_len))
        return self._insert_below(held, depth, req, params, end)

    def _insert_below(
        self, held: UnifiedTreeNode | None, depth: int, req: Req, params: InsertParams, end: int
    ) -> InsertResult:
        """Insert tokens [depth, end) of `req` below `held`, a node that ends after `depth` tokens.
        If `held` is None, it is the root, and `depth` is 0.
        """
        core = self._cache.tree_core
        if held is not None:
            core.insert_below(held, depth)
        row = self._cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        params.value = row[depth:end].to(torch.int64, copy=True)
        params.key = RadixKey(
            req.full_untruncated_fill_ids[depth:end],
            req.extra_key,
            is_bigram=core.is_eagle,
            cache_salt=req.cache_salt,
        )
        return self._cache.insert(params)

    def _held(self, req: Req, most: int) -> tuple[UnifiedTreeNode, int]:
        """The deepest node on the path of `req` that ends within `most` tokens, and where."""
        record = self._record_within(req.last_node, most)
        return record.payload, record.depth

    def _record_within(self, node_id: int, most: int) -> Node:
        """The record of the deepest node that ends within `most` tokens, on the path to the node
        `node_id`.
        """
        assert self._shadow_tree is not None
        record = self._shadow_tree.record(self._cache.tree_core.node_by_id(node_id))
        while record.depth > most:
            assert record.parent is not None
            record = record.parent
        return record

    def _take_over_duplicates(
        self, req: Req, held: UnifiedTreeNode, depth: int, result: InsertResult
    ) -> None:
        """KV below `held`, which ends at `depth`, that the tree had before from another request is
        that of `req` from now on; its own is freed by SGLang.
        """
        start, end = req.kv.cache_protected_len, result.prefix_len
        if start >= end:
            return
        record = self._record_within(result.last_device_node, end)
        indices = self._cache.tree_core.collect_full_device_indices(record.key, held.id)
        self._cache.req_to_token_pool.write(
            (req.kv.req_pool_idx, slice(start, end)), indices[start - depth :]
        )

    def _end_prompt(self, req: Req, params: InsertParams, end: int) -> None:
        """End a node with a stateless model's prompt, so that the answer can be evicted alone."""
        prompt = len(req.origin_input_ids)
        prompt -= prompt % self._cache.page_size
        if 0 < prompt < end:
            self.insert(req, replace(params, prev_prefix_len=prompt, inserted_len=prompt), prompt)

    def _move_lock(self, req: Req, before: UnifiedTreeNode, end_id: int) -> None:
        """`req`, whose lock ends at the node `before`, holds the path to the node `end_id` now."""
        cache, lock = self._cache, req.lock
        end = cache.tree_core.node_by_id(end_id)
        if lock is None or lock.node != before.id or not self._is_below(end, before):
            req.lock = cache.lock(end_id, skip_lock_components=self._unlocked)
            cache.unlock(lock)
            return
        cache.components[ComponentType.FULL].lock_below(before, end)
        states: Any = cache.components.get(ComponentType.MAMBA)
        if states is not None:
            if not self._unlocked:
                states.acquire_component_lock(end, IncLockRefResult())
            if ComponentType.MAMBA not in lock.receipt.skipped_lock_components:
                states.release_component_lock(before, lock.receipt)
        req.lock = TreeLock(
            end_id, DecLockRefParams(node_id=end_id, skipped_lock_components=self._unlocked)
        )

    def _is_below(self, node: UnifiedTreeNode, above: UnifiedTreeNode) -> bool:
        """True if the path to `node`, which both are on, is no shorter than that to `above`."""
        assert self._shadow_tree is not None
        record = self._shadow_tree.record
        return record(node).depth >= record(above).depth
