"""Admission of requests to a prefill batch: only with slots for their states, and not while another
prefill is about to leave a checkpoint that they can resume from."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from sglang.srt.managers.schedule_policy import AddReqResult, _PrefillAdmission
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_hybrid.cache.memory.allocators import OneMemoryBudget
from sglang_hybrid.cache.queue.adder import ScheduledPrefillAdder
from sglang_hybrid.cache.state_slots.slots import free_slots, send_back
from sglang_hybrid.core.costs.cost import ENDLESS

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_hybrid.cache.queue.waiting_queue import QueueSchedule
    from sglang_hybrid.cache.state_slots.state_pool import PoolStateSlots
    from sglang_hybrid.checkpoints.prefix_wait import PrefixWait


class AdmittingCache(Protocol):
    """What the adder asks of its cache, beside what SGLang's adder asks."""

    slots: PoolStateSlots
    prefix_wait: PrefixWait
    tree_core: Any
    req_to_token_pool: Any
    schedule: QueueSchedule | None

    @property
    def splits_prefills(self) -> bool: ...

    def plan_request(self, req: Req) -> None: ...

    def admitted(self, req: Req) -> None: ...

    def drop_plan(self, req: Req) -> None: ...

    def next_cut(self, req: Req, start: int, end: int) -> int | None: ...

    def mamba_evictable_size(self) -> int: ...


class HybridPrefillAdder(ScheduledPrefillAdder):
    """The scheduled adder with three more reasons to say no.

    * A request's own state slots are neither free nor evictable. SGLang counts state slots here
      only for a shared byte pool (schedule_policy.py:688-715) and asserts when a split pool has
      none (memory_pool.py:1595-1622), which ends the scheduler. In one memory the same bytes could
      hold KV, so slots that were promised are taken off the room for tokens, too.
    * A prefill under way will leave a state that the request can resume from and that saves more
      than the wait costs.
    * A state is wanted in the middle of a forward and the kernels cannot take it there: the
      prefill stops there, as if the chunk were full. Without chunked prefill SGLang could not go
      on with a prefill that stopped: there the chunk is larger than any prompt.
    """

    tree_cache: AdmittingCache
    chunked_req_limit: int | None
    rem_chunk_tokens: int | None

    def __init__(self, *args: Any, waiting_queue: list[Req], **kwargs: Any) -> None:
        super().__init__(*args, waiting_queue=waiting_queue, **kwargs)
        self._promised = 0  # slots of requests already in this batch
        running = [] if self.running_batch is None else self.running_batch.reqs
        self._running = sum(not req.finished() for req in running)
        self.tree_cache.slots.reserve(self._running)
        self._unlimited = self.rem_chunk_tokens is None and self.tree_cache.splits_prefills
        if self._unlimited:
            self.rem_chunk_tokens = ENDLESS
        self.tree_cache.prefix_wait.now_waiting(waiting_queue)

    def add_one_req(self, req: Req, *args: Any, **kwargs: Any) -> AddReqResult:
        if not self.may_run(req):
            return AddReqResult.OTHER
        needed = self._slots_needed(req)
        if self._promised + needed and not self._slots_fit(req, needed):
            return AddReqResult.NO_TOKEN
        if self.tree_cache.prefix_wait.waits_for_prefix(req):
            send_back(req, self.tree_cache.req_to_token_pool)
            return AddReqResult.CONTINUE
        self.tree_cache.plan_request(req)
        admitted = len(self.can_run_list)
        self._promise(needed)
        result = super().add_one_req(req, *args, **kwargs)
        if len(self.can_run_list) > admitted:
            self.tree_cache.slots.reserve(self._running + len(self.can_run_list))
            self.tree_cache.admitted(req)
        else:
            self._promise(-needed)
            self.tree_cache.drop_plan(req)
        return result

    def _slots_fit(self, req: Req, needed: int) -> bool:
        """Whether `needed` slots of its own are free or evictable, beside those promised."""
        if isinstance(self.memory_budget, OneMemoryBudget):
            return self.memory_budget.slots_fit(needed + self._source(req), req.prefix_len)
        free = free_slots(self.tree_cache.req_to_token_pool.mamba_allocator)
        free += self.tree_cache.mamba_evictable_size()
        return bool(self._promised + needed <= free - self._source(req))

    def _promise(self, slots: int) -> None:
        """So many slots are not there for the next request; in one memory, nor are their bytes."""
        self._promised += slots
        if isinstance(self.memory_budget, OneMemoryBudget):
            tokens = self.memory_budget.slots_as_tokens(slots)
            self.memory_budget.total_offset += tokens
            self.memory_budget.current_offset += tokens

    def add_chunked_req(self, req: Req) -> Req | None:
        cut = self.tree_cache.next_cut(req, req.prefix_len, len(req.full_untruncated_fill_ids))
        if cut is not None:
            left = cut - req.prefix_len
            self.chunked_req_limit = min(self.chunked_req_limit or left, left)
        rest: Req | None = super().add_chunked_req(req)
        return rest

    def _select_prefill_admission(
        self, req: Req, *, has_chunked_req: bool = False, **kwargs: Any
    ) -> _PrefillAdmission | AddReqResult:
        if self._unlimited and self._too_many_inputs(req):
            return AddReqResult.OTHER
        admission = super()._select_prefill_admission(
            req, has_chunked_req=has_chunked_req, **kwargs
        )
        if isinstance(admission, AddReqResult) or self.rem_chunk_tokens is None:
            return admission
        start = admission.prefix_len
        cut = self.tree_cache.next_cut(req, start, start + admission.extend_len)
        unfinished = has_chunked_req or self.new_chunked_req is not None
        if unfinished and (admission.is_chunked or cut is not None):
            # SGLang tracks one unfinished prefill at a time. By itself it fills the chunk with it;
            # one that stops for a state leaves room in which another could only begin.
            return AddReqResult.OTHER
        if cut is None:
            return admission
        return replace(admission, extend_len=cut - start, is_chunked=True, max_new_tokens=0)

    def _too_many_inputs(self, req: Req) -> bool:
        """SGLang's bound on a batch where nothing is cut into chunks: the first request may exceed
        --max-prefill-tokens, further ones may not.
        """
        new = len(req.full_untruncated_fill_ids) - req.prefix_len - req.host_hit_length
        return bool(self.can_run_list) and self.ceil_paged_tokens(new) >= self.rem_input_tokens

    def _source(self, req: Req) -> int:
        """1 if the state this request is copied from counts as evictable until it is admitted."""
        if req.kv.mamba_cow_src_index is None:
            return 0
        tree = self.tree_cache.tree_core
        node = tree.node_by_id(req.last_node)
        return int(node.component_data[ComponentType.MAMBA].lock_ref == 0)

    def _slots_needed(self, req: Req) -> int:
        pool = self.tree_cache.req_to_token_pool
        needed = 0 if req.kv.holds_mamba else 1
        needed += int(req.mamba_host_hit_length > 0)  # the tree's, beside the request's own
        if pool.enable_mamba_extra_buffer and req.kv.mamba_ping_pong_track_buffer is None:
            needed += pool.mamba_initial_tracking_slots
        return needed
