"""Loads from the host that no request has joined a batch for yet.

They are SGLang's own loads (`load_back`), begun by themselves: what they bring is in the tree and
held until it has arrived. Running requests keep what their next steps take. A load for a waiting
request is wanted for certain and soon, so it may push out all else that no request with an earlier
turn needs, in the order of eviction: what nobody waits for first. A load for a session that is
expected back is not certain: it pushes out only what is worth no more and nobody waits for.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_hybrid.core.tiers.places import copies_of
from sglang_hybrid.core.tiers.rates import Tier

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_hybrid.cache.radix_cache import HybridRadixCache
    from sglang_hybrid.cache.records.tiered_shadow_tree import TieredShadowTree
    from sglang_hybrid.cache.state_slots.state_pool import PoolStateSlots
    from sglang_hybrid.core.costs.cost import CostModel
    from sglang_hybrid.core.records.nodes import Node
    from sglang_hybrid.core.victims.pool import Pool

STEPS_AHEAD: Final = 64
"""Decode steps of every running request for which room is left."""


class AheadLoads:
    """Loads of one cache, begun by `cache.queue.loads.TimedLoads`."""

    def __init__(
        self,
        cache: HybridRadixCache,
        shadow_tree: TieredShadowTree,
        slots: PoolStateSlots,
        cost: CostModel,
    ) -> None:
        self._cache = cache
        self._shadow_tree = shadow_tree
        self._slots = slots
        self._cost = cost

    def is_loading(self) -> bool:
        """True while a load is under way."""
        controller = self._cache.cache_controller
        return bool(self._cache.ongoing_load_back or controller.load_queue)

    def load_bytes(self, req: Req) -> int:
        """Bytes that `req` must load before it runs, by its last look-up."""
        states = int(getattr(req, "mamba_host_hit_length", 0) > 0)
        return self._bytes(int(req.host_hit_length), states)

    def missing_bytes(self, node_id: int) -> int:
        """Bytes that a request which resumes from this node must load; 0 if it is gone."""
        record = self._record(node_id)
        return 0 if record is None else self._bytes(*self._missing(record))

    @property
    def most_bytes(self) -> int:
        """Bytes that a load can have at most."""
        return self._bytes(int(self._cache.token_to_kv_pool_allocator.size), 1)

    def begin_load(self, node_id: int, keep: Collection[int] | None = None) -> int:
        """Load what of the path to a node only the host has. keep: nodes that stay for it; without
        them all stays that a request waits for, or that is worth more. Returns its bytes; 0 if
        there is no room, or nothing to load.
        """
        cache, record = self._cache, self._record(node_id)
        if record is None:
            return 0
        tokens, states = self._missing(record)
        size = self._bytes(tokens, states)
        if not size:
            return 0
        worth = self._worth(record) if keep is None else None
        stay = [kept for kept in dict.fromkeys([node_id, *(keep or ())]) if self._record(kept)]
        locks = [(kept, cache.inc_lock_ref(kept).to_dec_params()) for kept in stay]
        host_lock = cache.inc_host_lock_ref(node_id).to_dec_params()
        try:
            if not self._make_room(tokens, states, worth) or not cache.load_back(node_id):
                return 0
        finally:
            for kept, lock in locks:
                cache.dec_lock_ref(kept, lock)
            cache.dec_host_lock_ref(node_id, host_lock)
        cache.cache_controller.start_loading()
        return size

    def _record(self, node_id: int) -> Node | None:
        """The record of a node, None if it is gone, or the host does not have what is missing."""
        tree = self._cache.tree_core
        node = tree._node_arena.get(node_id)
        if node is None or node is tree.root_node or node not in self._shadow_tree:
            return None
        return self._shadow_tree.record(node)

    def _missing(self, record: Node) -> tuple[int, int]:
        """Tokens and states on the way to a node that only the host has; nothing where something
        is nowhere.
        """
        tokens, node = 0, record
        while node.parent is not None:
            copies = copies_of(node)
            if copies.kv_tier is not Tier.DEVICE:
                if not copies.has_kv(Tier.HOST):
                    return 0, 0
                tokens += node.tokens
            node = node.parent
        copies = copies_of(record)
        if not self._cache.is_mamba_enabled or copies.has_state(Tier.DEVICE):
            return tokens, 0
        return (tokens, 1) if copies.has_state(Tier.HOST) else (0, 0)

    def _bytes(self, tokens: int, states: int) -> int:
        return tokens * self._cost.kv_bytes_per_token + states * self._cost.state_bytes

    # Room.

    def _worth(self, record: Node) -> tuple[float, float]:
        """Scores of copies on the device, among KV and among states. A node that is held has none,
        so they are asked for before.
        """
        tree = self._shadow_tree
        return tree.kv_pool.score_of_copy(record), tree.state_pool.score_of_copy(record)

    def _make_room(self, tokens: int, states: int, worth: tuple[float, float] | None) -> bool:
        """True if so much is free, after others were evicted: what nobody waits for and is worth no
        more than `worth` (among KV, among states), or without it all that no request holds.
        """
        cache = self._cache
        if tokens > self._free_tokens() + cache.full_evictable_size() - self._reserved():
            return False
        tree = self._shadow_tree
        while self._free_tokens() < tokens:
            before = self._free_tokens()
            if worth is not None and not _has_cheaper_victim(tree.kv_pool, worth[0]):
                return False
            cache.evict_for_alloc(EvictParams(num_tokens=1))
            if self._free_tokens() <= before:
                return False
        if not states or self._slots.free():
            return True
        if worth is not None and not _has_cheaper_victim(tree.state_pool, worth[1]):
            return False
        return bool(self._slots.make_room())

    def _free_tokens(self) -> int:
        return int(self._cache._component_available_size(ComponentType.FULL))

    def _reserved(self) -> int:
        """Tokens that running requests decode next."""
        return int(self._slots.decoding * max(STEPS_AHEAD, self._cache.page_size))


def _has_cheaper_victim(pool: Pool, worth: float) -> bool:
    """True if there is a victim that is worth no more, and nobody waits for it."""
    found = pool.cheapest(last_resort=True)
    return found is not None and found[1] <= worth and not found[0].demand
