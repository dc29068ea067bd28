"""SGLang's tree component for states with our admission, and no assertion on a missing slot.

Every override calls SGLang's own method and adds to it, or decides something that SGLang decides
by recency alone; line references are to sglang 0.5.23, mem_cache/unified_cache/components/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.components.base import EvictLayer
from sglang.srt.mem_cache.unified_cache.components.mamba import MambaComponent
from sglang.srt.runtime_context import get_parallel, get_schedule, get_spec

from sglang_hybrid.cache.request.lookups import NoSlotForHit
from sglang_hybrid.cache.state_slots.slots import free_slots
from sglang_hybrid.cache.tree.kv_components import value_len
from sglang_hybrid.core.checkpoints.admission import Skip
from sglang_hybrid.core.checkpoints.checkpoint_plan import CheckpointRequest
from sglang_hybrid.core.records.nodes import Kind
from sglang_hybrid.serving.requests.ids import shown_id
from sglang_hybrid.serving.telemetry.stats import Evicted

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_hybrid.cache.parts import Parts
    from sglang_hybrid.cache.request.publication import Publication


class RobustMamba(MambaComponent):
    """States with admission: a slot that cannot be had costs a checkpoint, never the scheduler."""

    def __init__(self, cache: Any, params: CacheInitParams) -> None:
        super().__init__(cache, params)
        self._parts: Parts = cache.parts
        self._publication: Publication | None = None
        self._speculates = get_spec().speculative_algorithm is not None
        steps_are_alone = get_schedule().disable_overlap_schedule and get_parallel().pp_size == 1
        self._reads_on = self._speculates and not steps_are_alone

    def reclaimable_value_len(self, node: UnifiedTreeNode) -> int:
        return value_len(node, self.component_type)

    def publish(self, publication: Publication | None) -> None:
        """Assign what is inserted from now on to `publication`; None: to none."""
        self._publication = publication

    @property
    def shallowest(self) -> int | None:
        """Position of the shallowest planned state that is being published behind the deepest one;
        None if there is no other.
        """
        ready = [] if self._publication is None else self._publication.ready
        return ready[-1].position if ready else None

    @property
    def adds_to_matches(self) -> bool:
        """True if a look-up says more of states than where to resume: SGLang adds a position on its
        grid, and what only the host has.
        """
        return self._parts.planner is None or self.tree_core.enable_hicache

    def finalize_match_result_in_tree_core(
        self, result: MatchResult, params: MatchPrefixParams, *args: Any, **kwargs: Any
    ) -> MatchResult:
        if not self.adds_to_matches:
            return result
        result = super().finalize_match_result_in_tree_core(result, params, *args, **kwargs)
        branch = result.mamba_branching_seqlen
        if branch is None or self._parts.planner is not None:
            return result._replace(mamba_branching_seqlen=None)
        options = self._parts.options
        gain = branch - result.device_prefix_len - result.host_hit_length
        if options.is_judicious and gain < options.hybrid_min_branch_tokens:
            if params.cow_mamba and params.req not in self._parts.lookups:
                self._parts.stats.skipped[Skip.MICRO_BRANCH.value] += 1
            result = result._replace(mamba_branching_seqlen=None)
        return result

    def finalize_match_result_in_cache(
        self, params: MatchPrefixParams, result: MatchResult
    ) -> MatchResult:
        """Copying the hit state, or decoding it, needs a slot of the request's own; without one it
        is a miss.
        """
        req, coded = params.req, self._parts.coded
        if not params.cow_mamba or req is None:
            return super().finalize_match_result_in_cache(params, result)
        state = self.tree_core.get_component_device_value(
            result.best_match_node, self.component_type
        )
        node = self.tree_core.node_by_id(result.best_match_node)
        displaced_kv = self._parts.displaced_kv
        readable = displaced_kv is None or displaced_kv.make_readable(node)
        if not readable or (
            state is not None and not req.kv.holds_mamba and not self._room_for_a_copy(result)
        ):
            miss = self.tree_core.empty_match_result
            kv_len = result.full_kv_hit_length
            result = NoSlotForHit._make(miss._replace(full_kv_hit_length=kv_len))
            return super().finalize_match_result_in_cache(params, result)
        result = super().finalize_match_result_in_cache(params, result)
        if coded is not None:
            coded.decode_state(node, req)
        if self._parts.spilled is not None:
            self._parts.spilled.fetch(node, req)
        return result

    def prepare_for_caching_req(
        self, req: Req, insert_params: Any, token_ids_len: int, is_finished: bool
    ) -> int | None:
        """Name the checkpoint's kind, and skip it where it is not worth a slot or has none."""
        publication = self._publication
        assert publication is not None, "SGLang asks for a state while it publishes"
        if self._parts.planner is not None:
            own = self._own_position(req, token_ids_len) if is_finished else 0
            if own <= publication.deepest:
                return publication.hand_over(insert_params)
            super().prepare_for_caching_req(
                req=req,
                insert_params=insert_params,
                token_ids_len=token_ids_len,
                is_finished=True,
            )
            publication.inserting = (own, Kind.TAIL)
            return own
        position = token_ids_len
        if self.cache.enable_mamba_extra_buffer:
            position = req.kv.mamba_last_track_seqlen or 0
        kind = _kind(req, position, token_ids_len, is_finished)
        if not is_finished and position > 0:
            skip = self._skip(req, kind)
            if skip is not None:
                self._parts.stats.skipped[skip.value] += 1
                self._parts.decision_log.on_skip(
                    req, CheckpointRequest(position, kind, shown_id(req.rid)), skip
                )
                return 0
        length: int | None = super().prepare_for_caching_req(
            req=req,
            insert_params=insert_params,
            token_ids_len=token_ids_len,
            is_finished=is_finished,
        )
        # A finished request may fall back to an earlier position (mamba.py:582-602).
        publication.inserting = (position if length is None else length, kind)
        return length

    def cleanup_after_caching_req(
        self,
        req: Req,
        is_finished: bool,
        insert_result: Any = None,
        insert_params: Any = None,
    ) -> None:
        """A planned state has a slot of its own beside the request's."""
        publication = self._publication
        if publication is None or publication.carried is None:
            super().cleanup_after_caching_req(
                req, is_finished, insert_result=insert_result, insert_params=insert_params
            )
            return
        publication.on_insert(insert_result)
        if is_finished:
            self.cache.req_to_token_pool.free_mamba_cache(req)

    def _own_position(self, req: Req, token_ids_len: int) -> int:
        """The position of the state that a finished request leaves; 0 if the tree can keep none.

        The step in flight when a request ended has consumed its last token too, and SGLang has
        counted it (`kv_committed_len`): the live state is that of all tokens counted. It can be
        kept if the key ends there as well; elsewhere, with pages, the last tracked one is kept.
        That one is kept, too, where the live state may be of more tokens (`_may_be_ahead`).
        """
        exact = (
            token_ids_len == req.kv.kv_committed_len
            and not token_ids_len % self.cache.page_size
            and not self._may_be_ahead(req)
        )
        if not self.cache.enable_mamba_extra_buffer:
            return token_ids_len if exact else 0
        if exact:
            self._track_the_live_state(req, token_ids_len)
        checkpoint = self._select_finished_checkpoint(req, token_ids_len)
        return 0 if checkpoint is None else checkpoint[0]

    def _may_be_ahead(self, req: Req) -> bool:
        """True if the live state may be that of more tokens than SGLang has counted: a step of
        speculative decoding was under way when the request ended, or a grammar ended inside of one.
        """
        return self._reads_on or (self._speculates and req.grammar is not None)

    def _track_the_live_state(self, req: Req, position: int) -> None:
        """Swap the live state for a tracked one: from there SGLang donates it without a copy."""
        pool = self.cache.req_to_token_pool
        index = req.kv.mamba_ping_pong_empty.index(False)
        spare = req.kv.mamba_ping_pong_track_buffer[index].clone()
        pool.set_mamba_ping_pong_slot(req, index, req.kv.mamba_pool_idx)
        req.kv.mamba_pool_idx = spare
        req.kv.mamba_last_track_idx = index
        req.kv.mamba_last_track_seqlen = position

    def commit_insert_component_data(
        self, node: UnifiedTreeNode, is_new_leaf: bool, *args: Any, **kwargs: Any
    ) -> None:
        had_state = not is_new_leaf and node.component_data[self.component_type].value is not None
        if self._parts.coded is not None and had_state:
            self._parts.coded.drop_coded_state(node)
        super().commit_insert_component_data(node, is_new_leaf, *args, **kwargs)
        if had_state:
            self._parts.stats.skipped[Skip.DUPLICATE.value] += 1
        else:
            publication = self._publication
            kind = Kind.UNKNOWN if publication is None else publication.on_commit()
            self._parts.stats.admitted[kind.value] += 1
            self.on_state_gain(node, kind)

    def evict_component(
        self,
        node: UnifiedTreeNode,
        *args: Any,
        target: EvictLayer = EvictLayer.DEVICE,
        **kwargs: Any,
    ) -> tuple[int, int]:
        had_state = node.component_data[self.component_type].value is not None
        if EvictLayer.DEVICE in target:
            if self._parts.coded is not None:
                self._parts.coded.on_state_eviction(node)
            if self._parts.spilled is not None:
                self._parts.spilled.on_state_eviction(node)
        freed: tuple[int, int] = super().evict_component(node, *args, target=target, **kwargs)
        if had_state and EvictLayer.DEVICE in target:
            whole = node in self.tree_core.evictable_device_leaves
            what = Evicted.LEAF if whole else Evicted.STATE
            self._parts.stats.evicted[what.value] += 1
            self.on_state_loss(node, what)
        return freed

    def on_state_gain(self, node: UnifiedTreeNode, kind: Kind) -> None:
        """`node` just got a state."""

    def on_state_loss(self, node: UnifiedTreeNode, what: Evicted) -> None:
        """`node` just lost its state."""

    def _skip(self, req: Req, kind: Kind) -> Skip | None:
        if self._parts.slots.free() > 0:
            return None
        # It would push out a state that was kept for a reason. Without the extra buffer SGLang
        # takes no state at a branch point: there a chunk's end is all that two prompts can share.
        branches = self.cache.enable_mamba_extra_buffer
        if self._parts.options.is_judicious and branches and kind is Kind.CHUNK:
            return Skip.NOT_WORTH
        if self._frees_source_state(req):
            return None
        return None if self._parts.slots.make_room() else Skip.NO_SLOT

    def _frees_source_state(self, req: Req) -> bool:
        """True if SGLang will free the state that the request resumed from (mamba.py:522-551): with
        extra_buffer_lazy, if no other request holds it.
        """
        lock = req.lock
        if (
            lock is None
            or lock.swa_released
            or not self.cache.req_to_token_pool.enable_mamba_extra_buffer_lazy
            or self.component_type in lock.receipt.skipped_lock_components
        ):
            return False
        state = self.tree_core.node_by_id(lock.node).component_data[self.component_type]
        return state.value is not None and state.lock_ref == 1

    def _room_for_a_copy(self, source: MatchResult) -> bool:
        """True if a request can have a slot beside the state that it copies."""
        pool = self.cache.req_to_token_pool
        own = 1 + (pool.mamba_initial_tracking_slots if pool.enable_mamba_extra_buffer else 0)
        kv = source.device_prefix_len
        if own + 1 > pool.mamba_pool.size or not self._parts.could_hold(kv, own + 1):
            return False
        if free_slots(pool.mamba_allocator) > 0:
            return True
        lock = self.cache.inc_lock_ref(source.best_match_node)
        had = self._parts.slots.make_room()
        self.cache.dec_lock_ref(source.best_match_node, lock.to_dec_params())
        return had


def _kind(req: Req, position: int, up_to: int, is_finished: bool) -> Kind:
    """The reason why SGLang tracked this position (schedule_batch.py:3137-3236)."""
    if position == req.mamba_branching_seqlen:
        return Kind.BRANCH
    if is_finished:
        return Kind.TAIL
    return Kind.CHUNK if up_to < len(req.origin_input_ids) else Kind.PROMPT_END
