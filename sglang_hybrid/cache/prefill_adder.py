"""Admission of requests to a prefill batch: only with slots for their states, and not while another
prefill is about to leave a checkpoint that they can resume from."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_policy import AddReqResult, _PrefillAdmission
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.runtime_context import get_disagg

from sglang_hybrid.cache.memory.shared import shared_memory
from sglang_hybrid.cache.queue.adder import ScheduledPrefillAdder
from sglang_hybrid.cache.state_slots.slots import free_slots, send_back
from sglang_hybrid.core.costs.cost import ENDLESS

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.prefill_budget import PrefillBudget

    from sglang_hybrid.cache.memory.shared_budget import SharedBudget
    from sglang_hybrid.cache.queue.served_queue import ServedQueue
    from sglang_hybrid.cache.radix_cache import HybridRadixCache

logger = logging.getLogger(__name__)


class HybridPrefillAdder(ScheduledPrefillAdder):
    """The scheduled adder with four more reasons to say no.

    * A request's own state slots are neither free nor evictable. SGLang counts state slots here
      only for a shared byte pool (schedule_policy.py:688-715) and asserts when a split pool has
      none (memory_pool.py:1595-1622), which ends the scheduler. In one memory the same bytes could
      hold KV, so slots that were promised are taken off the room for tokens, too.
    * A prefill under way will leave a state that the request can resume from and that saves more
      than the wait costs.
    * A state is wanted in the middle of a forward and the kernels cannot take it there: the
      prefill stops there, as if the chunk were full. Without chunked prefill SGLang could not go
      on with a prefill that stopped: there the chunk is larger than any prompt.
    * The next chunk of an unfinished prefill does not fit into the memory. When SGLang has no
      tokens left by its own estimate, it goes on with a whole chunk, whatever is free
      (prefill_budget.py, available_chunk_tokens), and an allocation that fails ends the scheduler.
      Here the prefill waits, and nobody joins a batch before it.

    Args:
        waiting_queue: the scheduler's.
        coming: requests that will reach it.
    """

    tree_cache: HybridRadixCache
    chunked_req_limit: int | None
    rem_chunk_tokens: int | None

    def __init__(
        self, *args: Any, waiting_queue: list[Req], coming: Sequence[Req] = (), **kwargs: Any
    ) -> None:
        super().__init__(*args, waiting_queue=waiting_queue, **kwargs)
        self._shared: SharedBudget | None = None
        memory = shared_memory(self.token_to_kv_pool_allocator)
        if memory is not None and self.tree_cache.supports_mamba():
            from sglang_hybrid.cache.memory.shared_budget import SharedBudget

            self._shared = SharedBudget(memory, self.memory_budget)
            self.memory_budget: PrefillBudget = self._shared
            self._mamba_slot_cost, self.rem_mamba_slots = 0, None  # SGLang's, for its own pool
        self._promised = 0  # slots of requests already in this batch
        running = [] if self.running_batch is None else self.running_batch.reqs
        self._running = sum(not req.finished() for req in running)
        self._rest = 0  # tokens of the prefill that this batch does not finish
        self._reserve()
        self._chunk_waits = False
        self._full_hits = self.tree_cache.plans.full_hits
        if self._full_hits is not None:
            self._full_hits.begin_batch()
        self._unlimited = self.rem_chunk_tokens is None and self.tree_cache.plans.splits_prefills
        if self._unlimited:
            self.rem_chunk_tokens = ENDLESS
        self.tree_cache.plans.prefix_wait.update_waiting([*waiting_queue, *coming])

    def add_one_req(self, req: Req, *args: Any, **kwargs: Any) -> AddReqResult:
        """A request that does not join the batch keeps no slot. SGLang leaves the one of its
        look-up with a request of a session (scheduler.py:4294): lost if the request is aborted in
        the queue, and after a flush another one's, too.
        """
        admitted = len(self.can_run_list)
        result = self._try_to_add(req, *args, **kwargs)
        if len(self.can_run_list) == admitted:
            send_back(req, self.tree_cache.req_to_token_pool)
        return result

    def _try_to_add(self, req: Req, *args: Any, **kwargs: Any) -> AddReqResult:
        if not self.can_run(req):
            return AddReqResult.OTHER
        full = False
        if self._full_hits is not None:
            full = self._full_hits.is_full_hit(req)
            if not full and self.can_run_list and self._full_hits.is_full_hit(self.can_run_list[0]):
                return AddReqResult.CONTINUE
        needed = self._slots_needed(req)
        if self._promised + needed and not self._slots_fit(req, needed):
            self._give_up_load_if_idle(req)
            return AddReqResult.NO_TOKEN
        if self.tree_cache.plans.prefix_wait.waits_for_prefix(req):
            return AddReqResult.CONTINUE
        self.tree_cache.plans.plan(req)
        admitted = len(self.can_run_list)
        self._promise(needed)
        result = super().add_one_req(req, *args, **kwargs)
        if len(self.can_run_list) > admitted:
            if req is self.new_chunked_req:
                self._rest = _rest_of(req)
            self._reserve()
            self.tree_cache.plans.on_admitted(req)
            if self._full_hits is not None and not full:
                self._full_hits.on_computed_request()
        else:
            self._promise(-needed)
            self.tree_cache.plans.drop(req)
        return result

    def _slots_fit(self, req: Req, needed: int) -> bool:
        """True if `needed` slots of its own are free or evictable, beside those promised."""
        if self._shared is not None:
            return self._shared.slots_fit(needed + self._source(req), req.prefix_len)
        free = free_slots(self.tree_cache.req_to_token_pool.mamba_allocator)
        free += self.tree_cache.mamba_evictable_size()
        return bool(self._promised + needed <= free - self._source(req))

    def _give_up_load_if_idle(self, req: Req) -> None:
        """Give up the load of `req` if no other request runs. A load needs one slot more than
        computing does, and then no request ends that would free one (idle sessions hold them).
        """
        ways = self.tree_cache.ways
        alone = not self._running and not self.can_run_list
        if alone and req.mamba_host_hit_length > 0 and ways is not None:
            ways.on_failed_load(req)

    def _promise(self, slots: int) -> None:
        """Take `slots` state slots off what the next requests of this batch may have. In one
        memory, take their bytes off the room for tokens, too. A negative number gives them back.
        """
        self._promised += slots
        if self._shared is not None:
            tokens = self._shared.slots_as_tokens(slots)
            self._shared.total_offset += tokens
            self._shared.current_offset += tokens

    def add_chunked_req(self, req: Req) -> Req | None:
        if self._full_hits is not None:
            self._full_hits.on_computed_request()
        self.tree_cache.plans.on_next_chunk(req)
        cut = self.tree_cache.plans.next_cut(
            req, req.prefix_len, len(req.full_untruncated_fill_ids)
        )
        if cut is not None:
            left = cut - req.prefix_len
            self.chunked_req_limit = min(self.chunked_req_limit or left, left)
        fits = self._chunk_fits(req)
        rest: Req | None = super().add_chunked_req(req) if fits else req
        self._chunk_waits = req not in self.can_run_list
        if not fits and self._must_retract(req):
            self._retract(req)
            return None
        self._rest = _rest_of(req)
        self._reserve()
        return rest

    def can_run(self, req: Req) -> bool:
        return not self._chunk_waits and super().can_run(req)

    def budget_state(self) -> AddReqResult:
        return AddReqResult.OTHER if self._chunk_waits else super().budget_state()

    def _chunk_fits(self, req: Req) -> bool:
        """True if there is memory now for the chunk that SGLang would take, for a token behind it,
        and for the next step of the running requests.
        """
        limits = [self.rem_chunk_tokens, self.chunked_req_limit, int(self.rem_total_tokens)]
        length = len(req.full_untruncated_fill_ids) - req.prefix_len
        length = min([length, *(limit for limit in limits if limit is not None and limit > 0)])
        needed = self.ceil_paged_tokens(length) + self.page_size + self._next_step()
        return bool(needed <= self.cur_rem_tokens)

    def _next_step(self) -> int:
        """Tokens that the running requests need for their next step."""
        if not self._running:
            return 0
        return int(self.running_batch.new_tokens_required_next_decode())

    def _must_retract(self, req: Req) -> bool:
        """True if a prefill that does not fit must give back its memory: to running requests that
        could not go on otherwise, or because nothing runs whose end it could wait for. Not while
        its last chunk is computed, nor while it is sent to another server.
        """
        if req.inflight_middle_chunks or get_disagg().disaggregation_mode == "prefill":
            return False
        return not self._running or self._next_step() > self.cur_rem_tokens

    def _retract(self, req: Req) -> None:
        """Send a prefill back to the queue. What the tree has of it stays there, to be evicted when
        its room is wanted, and a streaming session, which would keep the rest, lets go of it; the
        scheduler takes the request from the list of the preempted.
        """
        logger.warning(
            "sglang_hybrid: The memory is full; a request waits in the queue again, with %s of %s "
            "prompt tokens computed.",
            f"{req.prefix_len:,}",
            f"{len(req.full_untruncated_fill_ids):,}",
        )
        session = req.session
        release_kv_cache(req, self.tree_cache, checkpoint=False)
        if session is not None:
            self.tree_cache.release_session(session.session_id)
        req.reset_for_retract()
        self.preempt_list.append(req)
        self._reserve()

    def _reserve(self) -> None:
        """Checkpoints leave room for what runs, and for what this batch does not finish."""
        self.tree_cache.slots.reserve(self._running + len(self.can_run_list), self._rest)

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
        cut = self.tree_cache.plans.next_cut(req, start, start + admission.extend_len)
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


def _rest_of(req: Req) -> int:
    """Tokens of its prompt behind those of this batch."""
    return len(req.full_untruncated_fill_ids) - int(req.extend_end)


def adder_class(
    schedule: ServedQueue | None, *, with_states: bool
) -> type[ScheduledPrefillAdder] | None:
    """The adder that fills batches, for a model with states or with a queue of ours; None: SGLang
    has its own.
    """
    if with_states:
        return HybridPrefillAdder
    return None if schedule is None else ScheduledPrefillAdder
