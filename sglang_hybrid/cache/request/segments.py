"""Prompts that are put together from segments: the KV of each is in the tree under a key of its own
(`extensions/schemas/declared/modular.py` says why, `serving/requests/cache_fields.py` how a request
names them).

Before such a prompt is looked up, its segments' KV is copied to the beginning of a path of its own;
on a GPU by the stream of the forwards, after what they and loads still write.
From there on it is a prompt like others, whose new tokens have positions behind the schema's end.
With recurrent layers the path ends in a state that is composed of the segments' states
(extensions/schemas/composition). Where a segment is missing the whole prompt is computed, and
nothing of it is kept.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_hybrid.core.extensions import extension
from sglang_hybrid.core.records.nodes import Kind
from sglang_hybrid.serving.device_streams import on_stream
from sglang_hybrid.serving.per_request import PerRequest
from sglang_hybrid.serving.requests.cache_fields import Imported, fields_of
from sglang_hybrid.serving.stored_keys import segment_key, stored_under
from sglang_hybrid.storage.codecs.in_use import keeps_exact

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Sequence

    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.base_prefix_cache import MatchResult

    from sglang_hybrid.cache.radix_cache import HybridRadixCache
    from sglang_hybrid.extensions.schemas.composition.states import SegmentStates


@dataclass
class Composition:
    """The result for one prompt. composed: tokens whose KV was taken from segments, 0 where it was
    computed as a whole. missing: numbers of the segments that were not there. why_never: the reason
    why no prompt is put together here, a sentence; empty if others may be.
    """

    composed: int = 0
    missing: Sequence[int] = ()
    why_never: str = ""


@dataclass(frozen=True)
class StoredSegment:
    """tokens: of the segment. kv: their slots in the pool. node: where they end in the tree."""

    tokens: int
    kv: torch.Tensor
    node: Any


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
        self._states: SegmentStates | None = None  # once a segment was asked for

    def prepare(self, params: MatchPrefixParams) -> MatchPrefixParams:
        """The key to look up for a request: its prompt, or nothing if it must be computed whole."""
        req = params.req
        imported = None if req is None else fields_of(req).imported
        if req is None or imported is None:
            return params
        with_states = self._cache.supports_mamba()
        if with_states and not params.cow_mamba:  # it is ranked
            return params
        known = self._known.get(req)
        if known is None or (known.composed and not self._stored(params.key, imported.length)):
            known = self._known[req] = self._compose(req, params.key, imported)
        whole = bool(imported.segments) and not known.composed
        self._set_placement(req, imported, whole=whole)
        # The transition of a segment is that of all its tokens, so all are computed.
        alone = not imported.segments and with_states and not self._why_not_composed()
        if not whole and not alone:
            return params
        nothing = self._key(params.key, params.key.token_ids[:0], params.key.extra_key)
        return MatchPrefixParams(nothing, cow_mamba=params.cow_mamba, req=req)

    def begin_forward(self, batch: ScheduleBatch) -> None:
        """The prefill of `batch` is about to start. A prompt whose composed state could not be had
        in the end is computed whole.
        """
        if self._states is None:
            return
        for req in batch.reqs:
            known, imported = self._known.get(req), fields_of(req).imported
            if known is None or imported is None or not known.composed:
                continue
            if req.prefix_len < imported.length:
                self._known[req] = Composition()
                self._set_placement(req, imported, whole=True)
                self._cache.plans.drop(req)

    def record(self, batch: ScheduleBatch) -> None:
        """The states that the prefill of `batch` leaves have their slots: the transitions of the
        segments in it are recorded, too.
        """
        if self._states is not None:
            self._states.record(batch)

    def on_request_end(self, req: Req) -> None:
        """Called when `req` has ended, and what it computed is in the tree."""
        if self._states is None:
            return
        imported = fields_of(req).imported
        if imported is None or imported.segments:
            return
        core = self._cache.tree_core
        like = RadixKey(req.origin_input_ids, is_bigram=core.is_eagle, cache_salt=req.cache_salt)
        found, node = self._lookup(req.origin_input_ids, like, req.extra_key)
        if len(found) == len(req.origin_input_ids):
            self._states.keep(req, node, len(found))

    def of(self, req: Req) -> Composition | None:
        """The composition of `req`; None for a request of another kind."""
        return self._known.get(req)

    def forget_all(self) -> None:
        """Forget all transitions, after the tree was emptied."""
        if self._states is not None:
            self._states.forget_all()

    def info(self) -> dict[str, int] | None:
        """The transitions that are kept, for /server_info; None where there are none."""
        return None if self._states is None else self._states.as_dict()

    def _compose(self, req: Req, key: RadixKey, imported: Imported) -> Composition:
        """Make the path of these segments, if that is possible."""
        cache, whole = self._cache, Composition()
        if not imported.segments or cache.page_size > 1 or cache.disable:
            return whole
        if cache.supports_mamba() and (why := self._why_not_composed()):
            return Composition(why_never=why)
        if fields_of(req).hints.exact:
            return whole
        with ExitStack() as held:
            return self._compose_locked(req, key, imported, held)

    def _compose_locked(
        self, req: Req, key: RadixKey, imported: Imported, held: ExitStack
    ) -> Composition:
        """held: what is looked up is held until it ends, so that it stays where it is."""
        cache, whole, length = self._cache, Composition(), imported.length
        have = self._lookup(key.token_ids[:length], key, key.extra_key, held)[0]
        if len(have) == length:
            return Composition(length)
        segments = self._segments(req, key, imported, held)
        missing = [number for number, segment in enumerate(segments) if segment is None]
        if missing:
            fits = self._states is None or self._states.could_hold(len(segments))
            return Composition(0, missing if fits else ())
        stored = [segment for segment in segments if segment is not None]
        nodes, tokens = [one.node for one in stored], [one.tokens for one in stored]
        target, slot = self._room(length - len(have), nodes)
        if target is None:
            return whole
        source = torch.cat([one.kv for one in stored])[len(have) :]
        states = None if slot is None else self._states
        slots = [] if states is None else states.slots(nodes)
        moved = [] if states is None else states.transitions(req, nodes)
        read = (source, target, *slots, *([] if slot is None else [slot]))
        with on_stream(cache.forward_stream, *read):  # after the forward under way
            cache.order_behind_loads()
            self._copy(source, target)
            if slot is not None and states is not None:
                states.compose(moved, tokens, slots, slot)
        with cache.publisher.inserting(req, length, Kind.COMPOSED):
            result = cache.insert(
                InsertParams(
                    key=self._key(key, key.token_ids[:length], key.extra_key),
                    value=torch.cat([have, target]),
                    prev_prefix_len=len(have),
                    inserted_len=len(have),
                    mamba_value=slot,
                )
            )
        if slot is not None and result.mamba_exist:
            cache.slots.give_back(slot)
        if not keeps_exact():
            core = cache.tree_core
            if not all(core.is_exact(core.node_by_id(node)) for node in nodes):
                core.inexact.add(result.last_device_node)
        return Composition(length)

    def _segments(
        self, req: Req, key: RadixKey, imported: Imported, held: ExitStack
    ) -> list[StoredSegment | None]:
        """The segments of a prompt as far as they are stored, with all that is needed of them."""
        found, at = [], 0
        for start, tokens in imported.segments:
            under = stored_under(segment_key(imported.extra_key, start), req.lora_id)
            kv, node = self._lookup(key.token_ids[at : at + tokens], key, under, held)
            there = len(kv) == tokens and (self._states is None or self._states.has(req, node))
            found.append(StoredSegment(tokens, kv, node) if there else None)
            at += tokens
        return found

    def _room(
        self, tokens: int, segments: Sequence[int]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Slots for the KV of so many tokens and, with recurrent layers, for a state [1]; none of
        them if there is no room. segments: their nodes.
        """
        cache, slot = self._cache, None
        if self._states is not None:
            slot = cache.slots.take() if self._fetch_states(segments) else None
            if slot is None:
                return None, None
        evict_from_tree_cache(cache, tokens)
        target = cache.token_to_kv_pool_allocator.alloc(tokens)
        if target is None and slot is not None:
            cache.slots.give_back(slot)
        return target, slot

    def _fetch_states(self, nodes: Sequence[int]) -> bool:
        """Give the states of these nodes, which are held, a slot where they lie in the place of KV;
        False if there are none.
        """
        cache, spilled = self._cache, self._cache.spilled
        return spilled is None or all(
            node not in spilled or (cache.slots.make_room() and spilled.unspill(node))
            for node in nodes
        )

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy KV between these slots."""
        allocator: Any = self._cache.token_to_kv_pool_allocator
        if hasattr(allocator, "translate_kv_loc"):  # in one memory they name rows
            source, target = (allocator.translate_kv_loc(each) for each in (source, target))
        pool = allocator.get_kvcache()
        pool = getattr(pool, "full_kv_pool", pool)
        for layer in range(pool.start_layer, pool.start_layer + pool.layer_num):
            for rows in pool.get_kv_buffer(layer):
                rows[target] = rows[source]

    def _why_not_composed(self) -> str:
        """The reason why no states are composed here, a sentence; empty if they are."""
        if self._states is None:
            self._states = extension("schemas.composition.states").SegmentStates(self._cache)
        return self._states.why_not

    def _set_placement(self, req: Req, imported: Imported, *, whole: bool) -> None:
        """Set the offset of the positions of `req`, and whether it stays out of the tree."""
        req.position_offset = 0 if whole else imported.position - imported.length
        if whole:
            req.skip_radix_cache_insert = True

    def _stored(self, key: RadixKey, length: int) -> bool:
        return len(self._lookup(key.token_ids[:length], key, key.extra_key)[0]) == length

    def _lookup(
        self, ids: array[int], like: RadixKey, extra_key: str | None, held: ExitStack | None = None
    ) -> tuple[torch.Tensor, Any]:
        """Slots [n] of the KV that is stored of these tokens, and the node where it ends. It is
        held until `held` ends, and in the pool; nothing is found where there is no room for it.
        """
        cache = self._cache
        result = self._match(MatchPrefixParams(self._key(like, ids, extra_key)))
        node, displaced = result.last_device_node, cache.parts.displaced_kv
        if held is not None:
            held.callback(cache.unlock, cache.lock(node))
        if displaced is not None and not displaced.make_readable(cache.tree_core.node_by_id(node)):
            result = result._replace(device_prefix_len=0)
        slots = cache.path_device_indices(node)
        return slots[: result.device_prefix_len], node

    def _key(self, like: RadixKey, ids: array[int], extra_key: str | None) -> RadixKey:
        return RadixKey(ids, extra_key, is_bigram=like.is_bigram, cache_salt=like.cache_salt)
