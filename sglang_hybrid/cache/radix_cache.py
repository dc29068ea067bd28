"""`--radix-cache-backend hybrid`: SGLang's unified radix cache with our decisions.

`HybridRadixCache` is the order of a request's life. Each step is handed to one part.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from sglang.srt.mem_cache.base_prefix_cache import CacheRequestOutcome
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.session.streaming_session import is_virtual_node

from sglang_hybrid.cache.endings import RequestEndObserver
from sglang_hybrid.cache.memory.one_memory import OneMemoryCache
from sglang_hybrid.cache.parts import build_parts
from sglang_hybrid.cache.planning import PrefillPlans
from sglang_hybrid.cache.prefill_adder import adder_class
from sglang_hybrid.cache.publishing import Publisher
from sglang_hybrid.cache.report import CacheReport
from sglang_hybrid.cache.step_messages import StepMessages
from sglang_hybrid.cache.tiers.inexact import ExactPartsCache
from sglang_hybrid.cache.tree.components import kept_components, with_our_components
from sglang_hybrid.core.extensions import extension
from sglang_hybrid.serving.config import HybridConfig
from sglang_hybrid.serving.flag_values import Ui
from sglang_hybrid.serving.requests.cache_fields import fields_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.base_prefix_cache import (
        CacheRequestHandle,
        MatchPrefixParams,
        MatchResult,
    )
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_hybrid.cache.queue.served_queue import ServedQueue
    from sglang_hybrid.cache.request.segments import Composition, ModularPrompts
    from sglang_hybrid.cache.resumable import ResumableView
    from sglang_hybrid.cache.tiers.request_loads import WayChooser
    from sglang_hybrid.cache.tuning import Tuning
    from sglang_hybrid.checkpoints.message_boundaries import MessageBoundaries
    from sglang_hybrid.core.costs.cost import CostModel
    from sglang_hybrid.extensions.page.view import PageView

logger = logging.getLogger(__name__)


class HybridRadixCache(OneMemoryCache, ExactPartsCache):
    """SGLang's tree and pools with our choice of victims, admission and reports.

    Under `--hybrid-eviction sglang-lru` SGLang's own order decides and there is no shadow tree.

    Args:
        params: SGLang's.
        options: our flags; those in the environment by default.
        cost: FLOPs of the served model; every token counts alike without it.
        message_boundaries: finds where messages begin; none are found without it.
        one_pass: the model's kernels can take states in the middle of a prefill.
        unplanned: why states are taken where SGLang tracks them, as with "speculative decoding"; ""
            where we say where.
        full_hits: prompts that were asked before are answered without a forward.
        states_arrive: each request brings its state from a prefill server: the tree keeps KV only.
        spills: states without a slot may lie in the place of KV, if the pools allow it.
        rank: which of several caches with requests of their own this is; None if another rank
            receives its requests.
        priority_sign: times a request's priority gives a number that is smaller for those that run
            first; None where SGLang's priorities are off.
    """

    has_tiers: ClassVar = False
    """True with host memory below the device, for copies chosen by value (`HostTierCache`)."""
    ways: WayChooser | None = None
    """Chooses what a request loads from below the device; None without host memory there."""
    forward_stream: Any = None
    """The CUDA stream of forwards on a GPU, if they have one of their own."""

    def __init__(
        self,
        params: CacheInitParams,
        options: HybridConfig | None = None,
        cost: CostModel | None = None,
        message_boundaries: MessageBoundaries | None = None,
        *,
        one_pass: bool = True,
        unplanned: str = "",
        full_hits: bool = False,
        states_arrive: bool = False,
        spills: bool = False,
        rank: int | None = None,
        priority_sign: int | None = None,
    ) -> None:
        self.options = options or HybridConfig.from_environment()
        kept = kept_components(params, states_arrive=states_arrive)
        self._only_requests_hold_states: bool = kept != params.tree_components
        params = replace(params, tree_components=kept)
        self.parts = parts = build_parts(
            self,
            params,
            self.options,
            cost,
            one_pass=one_pass,
            plans=not unplanned,
            tiers=self.has_tiers,
            full_hits=full_hits,
            spills=spills,
        )
        self.unplanned = unplanned
        self.cost, self.account, self.stats = parts.cost, parts.account, parts.stats
        self.spilled, self.parked = parts.spilled, parts.parked
        self.shadow_tree, self.slots, self.lookups = parts.shadow_tree, parts.slots, parts.lookups
        self.speeds, self.tier_stats, self.learning = parts.speeds, parts.tier_stats, parts.learning
        self.decision_log, self.explainer = parts.decision_log, parts.explainer
        self.step_clock = parts.step_clock
        self.plans = PrefillPlans(parts, message_boundaries)
        self.schedule: ServedQueue | None = None
        if self.options.hybrid_schedule.is_ours and not params.disable:
            from sglang_hybrid.cache.queue.served_queue import make_served_queue

            self.schedule = make_served_queue(self, self.options, priority_sign)
        self.modular: ModularPrompts | None = None  # once a prompt of segments has come
        super().__init__(with_our_components(params, parts))
        if parts.parked is not None:
            self.tree_core.parked = parts.parked
        self.start_tiers(self.schedule, self.options.hybrid_offload_watermark)
        with_states = self.is_mamba_enabled and not self.disable
        self.prefill_adder_class = adder_class(self.schedule, with_states=with_states)
        self.tuning: Tuning | None = None
        if self.options.remembers_requests and not params.disable:
            from sglang_hybrid.cache.tuning import make_tuning

            self.tuning = make_tuning(self, parts, rank)
        sources = (self.speeds, self.learning, self.tuning, self.step_clock)
        self.step_messages = StepMessages(*(each for each in sources if each is not None))
        self.publisher = Publisher(self, parts, self.plans)
        self.end_observer = RequestEndObserver(self, parts)
        one_of_its_kind = params.enable_metrics and rank is not None  # ranks do the same
        self.report = CacheReport(self, parts, metrics=one_of_its_kind)
        if one_of_its_kind:  # gauges change without requests, too: pins end, memory becomes free
            self.step_clock.join(lambda _: False, lambda _: self.report.update_metrics())
        self.page: PageView | None = None
        if self.options.hybrid_ui is not Ui.OFF:
            recent = (lambda: None) if self.tuning is None else self.tuning.recent
            what_if = extension("page.what_if").WhatIf(recent, lambda: parts.in_force)
            self.page = extension("page.view").PageView(self, self.decision_log, what_if)
        self.resumable: ResumableView | None = None
        if (events := getattr(self.tree_core, "state_events", None)) is not None:
            from sglang_hybrid.cache.resumable import ResumableView

            self.resumable = ResumableView(self, events)
        logger.info(
            "sglang_hybrid: eviction %s, admission %s; a state is %s bytes, a KV token %s.",
            self.options.policy.value,
            self.options.hybrid_admission.value,
            f"{self.cost.state_bytes:,}",
            f"{self.cost.kv_bytes_per_token:,}",
        )
        if parts.coded is not None:
            logger.info("sglang_hybrid: %s.", parts.coded.describe())
        if parts.spilled is not None:
            logger.info("sglang_hybrid: %s.", parts.spilled.describe())
        if parts.parked is not None:
            logger.info("sglang_hybrid: %s.", parts.parked.describe())

    @property
    def policy_name(self) -> str:
        """The eviction policy in force."""
        return self.parts.in_force.name

    @property
    def message_boundaries(self) -> MessageBoundaries:
        """Finds where the messages of a prompt begin."""
        return self.plans.message_boundaries

    @property
    def plans_checkpoints(self) -> bool:
        """True if prefills leave the states that we want, and not those that SGLang tracks."""
        return self.plans.planner is not None

    # 1 Look-up

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        req = params.req
        # One that is refused, as beside another turn of its session, runs on nothing of it.
        if req is not None and self.session.will_lend_record(req):
            name = req.session.session_id
            kv = self.session.slots[name].kv
            # A state, as of a retracted turn, cannot be set back, and neither can the tree's part.
            least = kv.kv_committed_len if self.is_mamba_enabled else kv.cache_protected_len
            if len(params.key) < least:
                self.release_session(name)
                if req.kv is kv:  # lent to it when it was ranked
                    req.detach_kv()
        result = super().match_prefix(params)
        if is_virtual_node(result.best_match_node):
            self.lookups.on_session_turn(params, result)
        return result

    # A turn of a streaming session waits at a node of its session's, which is not in the tree.

    def is_root(self, node_id: Any) -> bool:
        return not is_virtual_node(node_id) and bool(super().is_root(node_id))

    def is_backuped(self, node_id: Any) -> bool:
        return not is_virtual_node(node_id) and bool(super().is_backuped(node_id))

    def dfs_weight_order(self, node_handles: Sequence[Any]) -> list[int]:
        root = self.tree_core.root_node.id
        nodes = [root if is_virtual_node(node) else node for node in node_handles]
        order: list[int] = super().dfs_weight_order(nodes)
        return order

    def _match_tree(self, params: MatchPrefixParams) -> MatchResult:
        self.slots.send_back_if_waiting(params.req)
        if params.req is not None and fields_of(params.req).imported is not None:
            params = self.modular_prompts().prepare(params)
        result = self._just_ranked(params) or super()._match_tree(params)
        if params.cow_mamba:
            full_hits = self.plans.full_hits
            result = result if full_hits is None else full_hits.look_up(params, result)
        self.lookups.on_lookup(params, result)
        return result

    def changed_matches(self, waiting: list[Req], least_hit: int) -> list[Req]:
        """The requests of `waiting` that must be looked up again to be ranked: their prompts might
        match otherwise than the last time, or hit at most `least_hit` tokens (hooks/scheduling.py
        asks).
        """
        if not self._remembers_matches or not self.is_mamba_enabled:  # there it is an access
            return waiting
        changed: list[Req] = self.tree_core.changed_matches(waiting, least_hit)
        return changed

    @property
    def _remembers_matches(self) -> bool:
        """True if a look-up may be answered from the last one of its request."""
        return not (self.shadow_tree is None or self.linker is not None or self.disable)

    def _just_ranked(self, params: MatchPrefixParams) -> MatchResult | None:
        """The result for a request that SGLang looks up to rank it; None if nothing is known of it,
        or if something is to be done with the result.
        """
        if params.cow_mamba or not self._remembers_matches:
            return None
        return self.tree_core.known_match(params)

    def modular_prompts(self) -> ModularPrompts:
        """The prompts that are put together from segments; loaded when the first one comes."""
        if self.modular is None:
            from sglang_hybrid.cache.request.segments import ModularPrompts

            self.modular = ModularPrompts(self, super()._match_tree)
        return self.modular

    def composition(self, req: Req) -> Composition | None:
        """The segments that `req` was composed of; None if it is not a modular prompt."""
        return None if self.modular is None else self.modular.of(req)

    # 2 Before a forward

    def plan_forward(self, batch: ScheduleBatch) -> None:
        """Give slots to the states of the prefill of `batch`, which is about to start."""
        if self.modular is None:
            self.plans.assign_slots(batch)
            return
        self.modular.begin_forward(batch)
        self.plans.assign_slots(batch)
        self.modular.record(batch)

    def plan_decode(self, batch: ScheduleBatch) -> None:
        """Plan the states that answers leave in the next decode step, which is that of `batch`."""
        self.plans.plan_decode(batch)

    # 3 After a step

    def checkpoint_into_tree(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        if is_virtual_node(req.last_node) and req.lock is not None:
            req.last_node = req.lock.node  # of its streaming session, which lends it meanwhile
        self.lookups.on_start(req)
        insert = partial(super().checkpoint_into_tree, req, up_to=up_to, **kwargs)
        published = self.publisher.publish(req, up_to, insert)
        if self._has_windows_and_states and not req.finished():
            # SGLang does this with what it inserts, after each chunk; here some chunks insert none.
            self.evict_sliding_windows(req, up_to)
        self.lookups.on_publish(req, published, self.publisher.pin(req))
        self.report.update_metrics()
        if req.finished() and req.last_node is not None:
            if self.modular is not None:
                self.modular.on_request_end(req)
            self.end_observer.on_request_end(req, up_to)

    # 4 End

    def on_session_close(self, last: Sequence[Req]) -> None:
        """A client closed its session, whose `last` requests nobody continued."""
        self.end_observer.on_session_close(last)

    def swa_retain_floor(self, req: Req) -> int | None:
        """The position from which `req` keeps its KV of sliding windows: SGLang's answer, and the
        window behind each state that is being published, without which nobody could resume there.
        """
        floors = [super().swa_retain_floor(req)]
        if self._has_windows_and_states:
            shallowest = self.components[ComponentType.MAMBA].shallowest
            floors.append(None if shallowest is None else shallowest - self.swa_retain_window)
        return min((floor for floor in floors if floor is not None), default=None)

    @property
    def _has_windows_and_states(self) -> bool:
        return bool(self.is_swa_enabled and self.is_mamba_enabled)

    def claim_kv_row(self, req: Req) -> bool:
        """True if a streaming session keeps what its turn `req` has computed. The next turn goes on
        from one that has ended: one that is aborted where it waits, on what the session lent to its
        look-up, was none, and one that is retracted gives all back.
        """
        slot = self.session.borrowed_slot(req)
        if slot is not None and not req.finished():
            if req.extend_end is None:
                req.detach_kv()
                return True
            del self.session.slots[req.session.session_id]
            req.lock, slot.lock = slot.lock, None
            return False
        kept = bool(super().claim_kv_row(req))
        if kept:
            self._on_resources_freed(req)
        return kept

    def release_radix_session(self, session_id: str) -> int:
        self.end_observer.on_radix_session_close(session_id)
        return int(super().release_radix_session(session_id))

    def on_release(self, req: Req, *args: Any, **kwargs: Any) -> None:
        super().on_release(req, *args, **kwargs)
        if self._only_requests_hold_states and req.kv.holds_mamba:
            self.req_to_token_pool.free_mamba_cache(req)
        self._on_resources_freed(req)

    def _on_resources_freed(self, req: Req) -> None:
        """`req` holds nothing any more."""
        self.slots.on_resources_freed()
        self.plans.drop(req)
        if self.schedule is not None:
            self.schedule.on_request_end(req)

    def finish(self, handle: CacheRequestHandle, outcome: CacheRequestOutcome) -> None:
        super().finish(handle, outcome)
        if self.schedule is not None and outcome is CacheRequestOutcome.ABORT:
            self.schedule.on_abort(handle)

    def supports_mamba(self) -> bool:
        """True if requests hold states, as SGLang asks."""
        return self._only_requests_hold_states or bool(self.is_mamba_enabled)

    # Memory below the device (cache/host_tier.py)

    def start_tiers(self, schedule: ServedQueue | None, watermark: float) -> None:
        """Decide about copies and loads from now on, if there is memory below the device.

        schedule: the queue whose loads begin ahead of their turn. watermark: up to which share of
        the device's memory nothing is copied in the background.
        """

    def copy_before_eviction(self, node: UnifiedTreeNode) -> None:
        """The device is about to give `node` up."""

    def order_behind_loads(self) -> None:
        """Let what the current stream is given from now on begin after the loads under way."""

    def tiers_info(self) -> dict[str, Any] | None:
        """The contents of each tier and the transfers between them; None without tiers."""
        return None

    # The whole tree

    def reset(self) -> None:
        super().reset()
        if self.parts.coded is not None:
            self.parts.coded.reset()
        for lent in (self.spilled, self.parked):
            if lent is not None:
                lent.reset()
        self.decision_log.on_flush()
        self.plans.forget_all()
        if self.modular is not None:
            self.modular.forget_all()
        if self.schedule is not None:
            self.schedule.on_flush()

    def sanity_check(self) -> None:
        """SGLang's check of its tree, then ours of the shadow tree. Raises AssertionError."""
        super().sanity_check()
        if self.shadow_tree is not None:
            tree = self.tree_core
            self.shadow_tree.check(
                tree.root_node,
                kv_tokens=tree.full_evictable_size()
                + tree.full_protected_size()
                + (0 if self.parked is None else self.parked.tokens),
                states=tree.mamba_evictable_size()
                + tree.mamba_protected_size()
                + (0 if self.spilled is None else len(self.spilled)),
            )

    def server_info(self) -> dict[str, Any]:
        """The block `hybrid_cache` of /server_info (patch 0003)."""
        return self.report.server_info()
