"""Answers readers of KV events that begin late, or that have missed some: where prompts can be
resumed now (`GET /hybrid_cache/resumable`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_hybrid.cache.memory.shared import shared_memory
from sglang_hybrid.cache.state_slots.slots import free_slots
from sglang_hybrid.core.costs.cost import STATES_OF_A_PREFILL
from sglang_hybrid.core.tiers.published import LEAST_RATE, MOST_RATE, PAGE_TOKENS
from sglang_hybrid.core.tiers.rates import TIERS_BELOW
from sglang_hybrid.explain.messages import ResumableReq, ResumableReqOutput

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_hybrid.cache.radix_cache import HybridRadixCache
    from sglang_hybrid.cache.state_events import PlacedBlocks, StateEvents

READERS = 8
"""Snapshots that are read at once; one more ends the one that began first."""

TIMED_TOKENS = 1_024


class ResumableView:
    """The points where prompts of one cache can be resumed.

    events: what is published of its states; of several ranks, the first one publishes. scheduler:
    whose requests use the cache; a hook sets it (hooks/scheduling.py).
    """

    def __init__(self, cache: HybridRadixCache, events: StateEvents) -> None:
        self.scheduler: Scheduler | None = None
        self._cache = cache
        self._events = events
        self._walks: dict[str, Iterator[list[PlacedBlocks]]] = {}

    def handlers(self) -> list[tuple[type, Callable[[Any], Any]]]:
        """The handlers that the scheduler's dispatcher must know."""
        return [(ResumableReq, self.answer)]

    def publish(self) -> None:
        """Tell the readers what has changed."""
        if self._events.has_changes and self.scheduler is not None:
            self.scheduler.kv_events_publisher.publish_kv_events()

    def answer(self, request: ResumableReq) -> ResumableReqOutput:
        """One page. What had changed before it is published first, so that it is true of all that
        was published.
        """
        from sglang_hybrid.cache.state_events import MEDIA

        self.publish()
        speeds, cost = self._cache.speeds.speeds, self._cache.cost
        rate = TIMED_TOKENS * speeds.prefill / cost.flops(TIMED_TOKENS)
        answer = ResumableReqOutput(
            epoch=self._events.epoch,
            seq=self._events.batches,
            block_size=self._events.page_size,
            prefill_tokens_per_second=min(MOST_RATE, max(LEAST_RATE, rate)),
            waiting=0 if self.scheduler is None else len(self.scheduler.waiting_queue),
            room=self._room(),
            loads={
                MEDIA[tier]: (
                    speeds.loads[tier].seconds(cost.state_bytes_in(tier)),
                    cost.kv_bytes_in(tier) / speeds.loads[tier].bandwidth,
                )
                for tier in TIERS_BELOW
            },
        )
        if request.cursor is not None:
            self._add_page(answer, request)
        return answer

    def _room(self) -> int:
        """Tokens of a prompt that can be computed and kept before anything is evicted."""
        kv, states = self._cache.token_to_kv_pool_allocator, STATES_OF_A_PREFILL
        memory = shared_memory(kv)
        if memory is not None:
            room = memory.free_bytes - states * self._cache.cost.state_bytes
            return max(0, room // memory.token_bytes)
        slots = free_slots(self._cache.req_to_token_pool.mamba_allocator)
        return int(kv.available_size()) if slots >= states else 0

    def _add_page(self, answer: ResumableReqOutput, request: ResumableReq) -> None:
        assert request.cursor is not None
        if request.begin:
            while len(self._walks) >= READERS:
                del self._walks[next(iter(self._walks))]
            self._walks[request.cursor] = self._events.walk()
        if request.cursor not in self._walks:
            answer.error = "this snapshot is over; begin anew, without a cursor."
            return
        told = 0
        for blocks in self._walks[request.cursor]:
            answer.events += [msgspec.to_builtins(event) for event in blocks]
            told += sum(len(event.token_ids) for event in blocks)
            if told >= PAGE_TOKENS:
                answer.more = True
                return
