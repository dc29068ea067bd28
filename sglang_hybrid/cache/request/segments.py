"""Prompts that are put together from segments: the KV of each is in the tree under a key of its own
(`extensions/schemas/declared/modular.py` says why, `serving/requests/cache_fields.py` how a request
names them).

Before such a prompt is looked up, its segments' KV is copied to the beginning of a path of its own;
on a GPU by the stream of the forwards, after what they and loads still write.
From there on it is a prompt like others, whose new tokens have positions behind the schema's end.
Where a segment is missing, or for a model with recurrent state, the whole prompt is computed and
nothing of it is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_hybrid.serving.device_streams import on_stream
from sglang_hybrid.serving.per_request import PerRequest
from sglang_hybrid.serving.requests.cache_fields import Imported, fields_of
from sglang_hybrid.serving.stored_keys import segment_key, stored_under
from sglang_hybrid.storage.codecs.exactness import apart_if_exact

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable

    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import MatchResult

    from sglang_hybrid.cache.radix_cache import HybridRadixCache


@dataclass
class Composition:
    """The result for one prompt. composed: tokens whose KV was taken from segments, 0 where it was
    computed as a whole.
    """

    composed: int = 0


class ModularPrompts:
    """The prompts of one cache that are put together from segments.

    Args:
        cache: whose tree has the segments.
        match: its look-up of what is stored, which counts nothing.
    """

    def __init__(
        self, cache: HybridRadixCache, match: Callable[[MatchPrefixParams], MatchResult]
    ) -> None:
        self._cache = cache
        self._match = match
        self._known: PerRequest[Composition] = PerRequest()

    def prepare(self, params: MatchPrefixParams) -> MatchPrefixParams:
        """The key to look up for a request: its prompt, or nothing if it must be computed whole."""
        req = params.req
        asked = None if req is None else fields_of(req).imported
        if req is None or asked is None:
            return params
        known = self._known.get(req)
        if known is None or (known.composed and not self._stored(params.key, asked.length)):
            known = self._known[req] = Composition(self._compose(req, params.key, asked))
        whole = asked.segments and not known.composed
        req.position_offset = 0 if whole else asked.position - asked.length
        if not whole:
            return params
        req.skip_radix_cache_insert = True
        nothing = self._key(params.key, params.key.token_ids[:0], params.key.extra_key)
        return MatchPrefixParams(nothing, cow_mamba=params.cow_mamba, req=req)

    def composed(self, req: Req) -> int | None:
        """Tokens of `req` that came from segments; None for a request of another kind."""
        known = self._known.get(req)
        return None if known is None else known.composed

    def _compose(self, req: Req, key: RadixKey, asked: Imported) -> int:
        """Make the path of these segments, and return its tokens; 0 if that is not possible."""
        cache = self._cache
        if not asked.segments or cache.is_mamba_enabled or cache.page_size > 1 or cache.disable:
            return 0
        length = asked.length
        have, head = self._lookup(key.token_ids[:length], key, key.extra_key)
        missing = length - len(have)
        if not missing:
            return length
        parts, nodes, at = [], [], 0
        for start, tokens in asked.segments:
            ids = key.token_ids[at : at + tokens]
            under = stored_under(segment_key(asked.extra_key, start), req.lora_id)
            found, node = self._lookup(ids, key, apart_if_exact(under, fields_of(req)))
            if len(found) < tokens:
                return 0
            parts.append(found)
            nodes.append(node)
            at += tokens
        source = torch.cat(parts)[len(have) :]
        held = [*nodes, head]
        locks = [cache.lock(node) for node in held]
        try:
            evict_from_tree_cache(cache, missing)
            target = cache.token_to_kv_pool_allocator.alloc(missing)
        finally:
            for lock in locks:
                cache.unlock(lock)
        if target is None:
            return 0
        pool = cache.token_to_kv_pool_allocator.get_kvcache()
        with on_stream(cache.forward_stream, source, target):  # after the forward under way
            cache.order_behind_loads()
            for layer in range(pool.start_layer, pool.start_layer + pool.layer_num):
                for rows in pool.get_kv_buffer(layer):
                    rows[target] = rows[source]
        cache.insert(
            InsertParams(
                key=self._key(key, key.token_ids[:length], key.extra_key),
                value=torch.cat([have, target]),
                prev_prefix_len=len(have),
                inserted_len=len(have),
            )
        )
        return length

    def _stored(self, key: RadixKey, length: int) -> bool:
        return len(self._lookup(key.token_ids[:length], key, key.extra_key)[0]) == length

    def _lookup(
        self, ids: array[int], like: RadixKey, extra_key: str | None
    ) -> tuple[torch.Tensor, Any]:
        """Slots [n] of the KV that is stored of these tokens, and the node where it ends."""
        result = self._match(MatchPrefixParams(self._key(like, ids, extra_key)))
        slots = self._cache.path_device_indices(result.last_device_node)
        return slots[: result.device_prefix_len], result.last_device_node

    def _key(self, like: RadixKey, ids: array[int], extra_key: str | None) -> RadixKey:
        return RadixKey(ids, extra_key, is_bigram=like.is_bigram, cache_salt=like.cache_salt)
