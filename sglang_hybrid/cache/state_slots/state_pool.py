"""The state pool as the planner sees it: what is free, and what a new state competes with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_hybrid.cache.memory.shared import shared_memory
from sglang_hybrid.cache.state_slots.slots import free_slots, send_back
from sglang_hybrid.core.checkpoints.admission import SlotBudget
from sglang_hybrid.core.checkpoints.checkpoint_plan import slot_budget_for

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator

    from sglang_hybrid.cache.radix_cache import HybridRadixCache
    from sglang_hybrid.cache.records.shadow_tree import ShadowTree
    from sglang_hybrid.checkpoints.planner import CheckpointPlan
    from sglang_hybrid.core.checkpoints.checkpoint_plan import CheckpointRequest
    from sglang_hybrid.explain.decision_log import DecisionLog


class PoolStateSlots:
    """The slots of one cache's state pool.

    steps_ahead: steps that are prepared before a prefill's states are in the tree.
    """

    def __init__(
        self, cache: HybridRadixCache, shadow_tree: ShadowTree | None, decision_log: DecisionLog
    ) -> None:
        self.steps_ahead = 0
        self._cache = cache
        self._shadow_tree = shadow_tree
        self._decision_log = decision_log
        self._decoding = 0  # requests that will decode
        self._rest = 0  # tokens of an unfinished prefill that have no KV yet

    def reserve(self, requests: int, rest: int = 0) -> None:
        """Note that so many requests run, or will, and that the prefill which this batch does not
        finish needs KV for `rest` tokens more. In one memory these tokens, and those of the
        requests' next steps, come before checkpoints.
        """
        self._decoding, self._rest = requests, rest

    def on_resources_freed(self) -> None:
        """Note that a running request ended, or was put back into the queue."""
        self._decoding = max(0, self._decoding - 1)

    @property
    def decoding(self) -> int:
        """Requests that run, or will."""
        return self._decoding

    def send_back_if_waiting(self, req: Req | None) -> None:
        """Called before a look-up: give back the slot that an earlier look-up of the request took
        for a copy of a state, if it still waits for that. The state might be evicted meanwhile.

        SGLang leaves it there when it asks the disk again for what the device has lost of a waiting
        prompt (scheduler.py:4261-4264). What does not join a batch has given it back
        (`HybridPrefillAdder.add_one_req`).
        """
        if req is not None and req.kv.mamba_cow_src_index is not None and not req.kv.holds_kv:
            send_back(req, self._cache.req_to_token_pool)

    def free(self) -> int:
        """Slots that cost nothing: free ones, and those of states and of KV that can move to free
        KV.
        """
        spilled, parked = self._cache.spilled, self._cache.parked
        free = free_slots(self._allocator) + (0 if parked is None else parked.room)
        kept = 0 if parked is None else parked.tokens
        return free + (0 if spilled is None else spilled.room(kept))

    def take(self, request: CheckpointRequest | None = None) -> torch.Tensor | None:
        """A slot [1] for `request`, pushing out the cheapest victim if none is free; None if
        nothing may go.
        """
        if not self._leaves_room_to_decode():
            return None
        if free_slots(self._allocator) == 0:
            with self._decision_log.making_room_for(request):
                if not self.make_room():
                    return None
        slot: torch.Tensor | None = self._allocator.alloc(1)
        return slot

    def make_room(self) -> bool:
        """True if a slot is free, moving or evicting a state if that helps."""
        if free_slots(self._allocator) == 0:
            self._cache.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=1))
        return free_slots(self._allocator) > 0

    def _leaves_room_to_decode(self) -> bool:
        """True if running requests could still decode, and an unfinished prefill end: a state under
        way cannot be evicted before it is in the tree, nor then, while that prefill goes on from
        it; and with the overlap scheduler steps are prepared until then.
        """
        allocator = self._cache.token_to_kv_pool_allocator
        steps = self._decoding * self.steps_ahead
        memory = shared_memory(allocator) if steps or self._rest else None
        if memory is None:
            return True
        spare = allocator.available_size() + self._cache.full_evictable_size()
        spare -= steps * allocator.page_size + self._rest
        spare = spare * memory.token_bytes
        spare += self._cache.mamba_evictable_size() * memory.state_bytes
        return bool(spare >= memory.state_bytes)

    def give_back(self, slot: torch.Tensor) -> None:
        """`take` undone."""
        self._allocator.free(slot)

    def budget(self, plan: CheckpointPlan) -> SlotBudget:
        """The competitors of a state of `plan`. Where SGLang's own order decides, what is new is
        worth more than what is old.
        """
        if self._shadow_tree is None:
            return SlotBudget(self.free(), evictable=self._cache.mamba_evictable_size() > 0)
        return slot_budget_for(plan, self.free(), self._shadow_tree.state_pool)

    @property
    def _allocator(self) -> MambaSlotAllocator:
        allocator: MambaSlotAllocator = self._cache.req_to_token_pool.mamba_allocator
        return allocator
