"""`--radix-cache-backend hybrid`: SGLang's unified radix cache with our decisions."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestOutcome
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_hybrid.cache.host_tier import HostTierCache
from sglang_hybrid.cache.parts import build_parts
from sglang_hybrid.cache.queue.adder import ScheduledPrefillAdder
from sglang_hybrid.cache.queue.clock import StepClock
from sglang_hybrid.cache.queue.waiting_queue import QueueSchedule, make_schedule
from sglang_hybrid.cache.records.tiered_shadow_tree import TieredShadowTree
from sglang_hybrid.cache.request.growth import PathGrowth
from sglang_hybrid.cache.request.pinning import pin_published
from sglang_hybrid.cache.request.publication import Publication
from sglang_hybrid.cache.request.segments import ModularPrompts
from sglang_hybrid.cache.state_slots.prefill_adder import HybridPrefillAdder
from sglang_hybrid.cache.state_slots.slots import free_slots, send_back_if_waiting
from sglang_hybrid.cache.step_messages import StepMessages
from sglang_hybrid.cache.tiers.ahead_loads import AheadLoads
from sglang_hybrid.cache.tiers.background_copies import Offload
from sglang_hybrid.cache.tiers.copy_worth import WriteJudge
from sglang_hybrid.cache.tiers.inexact import ExactPartsCache
from sglang_hybrid.cache.tiers.request_loads import WayChooser
from sglang_hybrid.cache.tree import tree_core  # noqa: F401, it registers BACKEND with SGLang
from sglang_hybrid.cache.tree.components import with_our_components
from sglang_hybrid.cache.tuning import make_tuning
from sglang_hybrid.checkpoints import decode
from sglang_hybrid.checkpoints.message_boundaries import MessageBoundaries
from sglang_hybrid.checkpoints.prefix_wait import PrefixWait
from sglang_hybrid.core.returns.answers import Calibration
from sglang_hybrid.core.returns.hints import Hint
from sglang_hybrid.explain.explainer import Explainer
from sglang_hybrid.serving.config import HybridConfig
from sglang_hybrid.serving.per_request import PerRequest
from sglang_hybrid.serving.requests.kv_hints import declared_positions, session_hint
from sglang_hybrid.serving.telemetry.metrics import CacheMetrics
from sglang_hybrid.serving.tenants import tenant_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.base_prefix_cache import (
        CacheRequestHandle,
        MatchPrefixParams,
        MatchResult,
    )
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    from sglang_hybrid.core.costs.cost import CostModel
    from sglang_hybrid.core.records.pins import Pins
    from sglang_hybrid.core.returns.history import HistoryMatch
    from sglang_hybrid.serving.telemetry.schedule import ScheduleStats

logger = logging.getLogger(__name__)


class HybridRadixCache(HostTierCache, ExactPartsCache):
    """SGLang's tree and pools with our choice of victims, admission and reports.

    Under `--hybrid-eviction sglang-lru` SGLang's own order decides and there is no shadow tree.

    Args:
        params: SGLang's.
        options: our flags; those in the environment by default.
        cost: FLOPs of the served model; every token counts alike without it.
        message_boundaries: finds where messages begin; none are found without it.
        one_pass: the model's kernels can take states in the middle of a prefill.
        plans: states are taken where we want them; otherwise where SGLang tracks them, as for
            speculative decoding.
        tiers: there is host memory below the device, whose copies are chosen by value.
        rank: which of several caches with requests of their own this is; None if another rank
            receives its requests.
        priority_sign: times a request's priority gives a number that is smaller for those that run
            first; None where SGLang's priorities are off.
    """

    def __init__(
        self,
        params: CacheInitParams,
        options: HybridConfig | None = None,
        cost: CostModel | None = None,
        message_boundaries: MessageBoundaries | None = None,
        *,
        one_pass: bool = True,
        plans: bool = True,
        tiers: bool = False,
        rank: int | None = None,
        priority_sign: int | None = None,
    ) -> None:
        self.options = options or HybridConfig.from_environment()
        self.message_boundaries = message_boundaries or MessageBoundaries()
        self._messages: PerRequest[list[int]] = PerRequest()
        self._history_matches: PerRequest[HistoryMatch] = PerRequest()
        self.advice: list[str] = []  # what its flags should rather be, for the report
        parts = build_parts(
            self, params, self.options, cost, one_pass=one_pass, plans=plans, tiers=tiers
        )
        self.cost, self.account, self.stats = parts.cost, parts.account, parts.stats
        self.shadow_tree, self.planner, self.slots = parts.shadow_tree, parts.planner, parts.slots
        self.lookups, self.decision_log = parts.lookups, parts.decision_log
        self.growth = PathGrowth(self, parts.shadow_tree)
        self.explainer = Explainer(self, self.decision_log)
        self.speeds, self.ways, self.tier_stats = parts.speeds, None, parts.tier_stats
        self.offload, self.prefix_wait, self.learning = None, None, parts.learning
        self.step_clock = StepClock()
        if self.shadow_tree is not None:
            self.step_clock.join(self._pins_end, self.shadow_tree.time_passes)
        self.schedule: QueueSchedule | None = None
        if not params.disable:
            self.schedule = make_schedule(self, self.options, priority_sign)
        super().__init__(with_our_components(params, parts))
        if isinstance(self.shadow_tree, TieredShadowTree) and not self.disable:
            self.ways = self.tree_core.ways = WayChooser(self.shadow_tree)
            self.tree_core.writes = WriteJudge(
                self.shadow_tree, self.tier_stats, self.host_room, self._least_uses
            )
            self.offload = Offload(self, self.options.hybrid_offload_watermark)
            if self.schedule is not None and self.speeds is not None:
                self.schedule.load_ahead(AheadLoads(self), self.speeds)
        if self.schedule is not None:
            self.prefill_adder_class: type[ScheduledPrefillAdder] = ScheduledPrefillAdder
        if self.is_mamba_enabled and not self.disable:
            self._admit_with_states()
        self.modular = ModularPrompts(self, super()._match_tree)
        self.tuning = make_tuning(self, parts, rank)
        self.step_messages = StepMessages(self.tuning, self.step_clock)
        one_of_its_kind = params.enable_metrics and rank is not None  # ranks do the same
        self._metrics = CacheMetrics(self) if one_of_its_kind else None
        logger.info(
            "sglang_hybrid: eviction %s, admission %s; a state is %s bytes, a KV token %s.",
            self.options.policy.value,
            self.options.hybrid_admission.value,
            f"{self.cost.state_bytes:,}",
            f"{self.cost.kv_bytes_per_token:,}",
        )

    def _admit_with_states(self) -> None:
        """Requests join a batch as `HybridPrefillAdder` says."""
        decode.plan_for_pages_of(self.page_size if self.planner is not None else None)
        least = self.options.hybrid_min_branch_tokens
        self.prefix_wait = PrefixWait(self.planner, self.stats, least)
        self.prefill_adder_class = HybridPrefillAdder

    @property
    def policy_name(self) -> str:
        """The eviction policy in force."""
        return self.tuning.in_force.name

    @property
    def alpha(self) -> float | None:
        """Marconi's alpha in force, None under another policy."""
        return dict(self.tuning.in_force.options).get("alpha")

    @property
    def calibration(self) -> Calibration | None:
        """How true what was expected of answers has been; None where nothing is expected."""
        history = None if self.shadow_tree is None else self.shadow_tree.history
        return None if history is None else history.calibration

    def _pins_end(self, seconds: float) -> bool:
        """Whether the time of a pin is over."""
        return self.shadow_tree is not None and seconds >= self.shadow_tree.tree.pins.next_expiry

    @property
    def pins(self) -> Pins | None:
        """What clients pin; None where SGLang's own order decides what is evicted."""
        return None if self.shadow_tree is None else self.shadow_tree.tree.pins

    @property
    def schedule_stats(self) -> ScheduleStats | None:
        """Counts of the waiting queue; None where SGLang orders it."""
        return None if self.schedule is None else self.schedule.stats

    @property
    def tuner_counts(self) -> Mapping[str, float]:
        """The tuner's totals, on the rank that has it."""
        return self.tuning.counts

    @property
    def plans_checkpoints(self) -> bool:
        """Whether prefills leave the states that we want, and not those that SGLang tracks."""
        return self.planner is not None

    # What requests find.

    def _match_tree(self, params: MatchPrefixParams) -> MatchResult:
        send_back_if_waiting(params, self.req_to_token_pool)
        params = self.modular.prepare(params)
        result = self._just_ranked(params) or super()._match_tree(params)
        self.lookups.looked_up(params, result)
        return result

    def changed_matches(self, waiting: list[Req], least_hit: int) -> list[Req]:
        """Those of `waiting` that must be looked up again to be ranked: their prompts might match
        otherwise than the last time, or hit at most `least_hit` tokens. SGLang asks (patch 0062).
        """
        if not self._remembers_matches or not self.is_mamba_enabled:  # there it is an access
            return waiting
        changed: list[Req] = self.tree_core.changed_matches(waiting, least_hit)
        return changed

    @property
    def _remembers_matches(self) -> bool:
        """Whether a look-up may be answered from the last one of its request."""
        return not (self.shadow_tree is None or self.linker is not None or self.disable)

    def _just_ranked(self, params: MatchPrefixParams) -> MatchResult | None:
        """What a request finds that SGLang looks up to rank it; None if nothing is known of it, or
        if something is to be done with the result.
        """
        if params.cow_mamba or not self._remembers_matches:
            return None
        return self.tree_core.known_match(params)

    def message_starts(self, req: Req) -> list[int]:
        """Where the messages of a prompt begin; looked for once per request."""
        starts = self._messages.get(req)
        if starts is None:
            starts = self._messages[req] = self.message_boundaries.message_starts(
                req.origin_input_ids
            )
        return starts

    # Which states their prefills leave.

    def plan_request(self, req: Req) -> None:
        """`req` may join the next batch: say which states its prefill should leave."""
        if self.planner is None or req.skip_radix_cache_insert:
            return
        prompt = req.full_untruncated_fill_ids
        history_match = None
        if self.shadow_tree is not None:
            last = self._history_matches.get(req)
            history_match = self.shadow_tree.match_history(prompt, tenant_of(req), last)
        if history_match is not None:
            self._history_matches[req] = history_match
            self.decision_log.history_matched(req, history_match.known_len)
        self.planner.plan_request(
            req,
            len(prompt),
            self.lookups.hit_len(req),
            self.lookups.kv_len(req),
            history_match=history_match,
            shared=self.prefix_wait.shared(req),
            message_starts=self.message_starts(req),
            declared=declared_positions(req.kv_hints),
        )

    def admitted(self, req: Req) -> None:
        """It joined."""
        self.prefix_wait.admitted(req)
        if self.planner is not None:
            self.planner.admitted(req)

    def drop_plan(self, req: Req) -> None:
        """It did not join."""
        if self.planner is not None:
            self.planner.drop(req)

    @property
    def splits_prefills(self) -> bool:
        """Whether a prefill must stop where a state is wanted."""
        return self.planner is not None and not self.planner.one_pass

    def next_cut(self, req: Req, start: int, end: int) -> int | None:
        """Where a prefill of tokens [start, end) must stop so that a state can be copied."""
        return None if self.planner is None else self.planner.next_cut(req, start, end)

    def plan_forward(self, batch: ScheduleBatch) -> None:
        """The prefill of `batch` is about to start: give its states their slots."""
        if self.planner is not None:
            self.planner.assign_slots(batch)

    # What they leave.

    def checkpoint_into_tree(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        self.lookups.began(req)
        ready = [] if self.planner is None else self.planner.take_ready(req, up_to)
        publication = Publication(req, self.slots, ready)
        self._insertions_belong_to(publication)
        try:
            if self.growth.serves(req) and not self.disable:
                self.growth.grow(req, up_to)
            else:
                super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
            publication.publish_rest(self.growth)
        finally:
            self._insertions_belong_to(None)
        pinned: list[int] = []
        if self.shadow_tree is not None:
            pinned = pin_published(self, self.shadow_tree, req, self.page_size)
        self.lookups.published(req, publication.published, pinned)
        if self._metrics is not None:
            self._metrics.update()
        if req.finished() and req.last_node is not None:
            self._ended(req, up_to)

    def _insertions_belong_to(self, publication: Publication | None) -> None:
        """The states that are inserted from now on are those of `publication`; None: nobody's."""
        states = self.components.get(ComponentType.MAMBA)
        if states is not None:
            states.publish(publication)

    def _ended(self, req: Req, up_to: int) -> None:
        """Tuner and history learn of a request with `up_to` tokens in the tree; of one that was put
        together from segments they could not.
        """
        if self.modular.composed(req) is not None:
            return
        if self.tuning.listens:
            self.tuning.finished(req, up_to, self.message_starts(req))
        if self.shadow_tree is not None:
            self.shadow_tree.finished(
                np.asarray(req.full_untruncated_fill_ids)[:up_to],  # no copy
                len(req.origin_input_ids),
                self.tree_core.node_by_id(req.last_node),
                self.tree_core.root_node,
                self.message_starts(req),
                tenant_of(req),
                self._history_matches.get(req),
                session_hint(req.kv_hints),
            )
            if self.learning is not None:
                self.learning.finished()
            if self.schedule is not None:
                self._expect_return(req)

    def _expect_return(self, req: Req) -> None:
        """The session of `req` may be expected back at some time."""
        node = self.tree_core.node_by_id(req.last_node)
        if self.schedule is None or self.shadow_tree is None or node is self.tree_core.root_node:
            return
        place = self.shadow_tree.record(node).history_node
        seconds = None if place is None else place.return_after
        if seconds is not None:
            self.schedule.expected(node.id, seconds)

    def session_closed(self, last: Sequence[Req]) -> None:
        """A client closed its session, whose `last` requests nobody continued (patch 0041)."""
        history = None if self.shadow_tree is None else self.shadow_tree.history
        if history is None:
            return
        for req in last:
            history.hint(req.full_untruncated_fill_ids, Hint.ENDS, tenant_of(req))

    def on_release(self, req: Req, *args: Any, **kwargs: Any) -> None:
        super().on_release(req, *args, **kwargs)
        self.slots.ended()
        self.drop_plan(req)
        if self.schedule is not None:
            self.schedule.ended(req)

    def finish(self, handle: CacheRequestHandle, outcome: CacheRequestOutcome) -> None:
        super().finish(handle, outcome)
        if self.schedule is not None and outcome is CacheRequestOutcome.ABORT:
            self.schedule.aborted(handle)

    def reset(self) -> None:
        super().reset()
        self.decision_log.emptied()
        if self.schedule is not None:
            self.schedule.emptied()
        if self.planner is not None:
            self.planner.forget_all()

    # Whether it is all true.

    def sanity_check(self) -> None:
        """SGLang's check of its tree, then ours of the shadow tree. Raises AssertionError."""
        super().sanity_check()
        if self.shadow_tree is not None:
            tree = self.tree_core
            self.shadow_tree.check(
                tree.root_node,
                kv_tokens=tree.full_evictable_size() + tree.full_protected_size(),
                states=tree.mamba_evictable_size() + tree.mamba_protected_size(),
            )

    def server_info(self) -> dict[str, Any]:
        """The block `hybrid_cache` of /server_info."""
        allocator = self.req_to_token_pool.mamba_allocator if self.is_mamba_enabled else None
        return {
            "eviction": self.policy_name,
            "alpha": self.alpha,
            "admission": self.options.hybrid_admission.value,
            "state_bytes": self.cost.state_bytes,
            "kv_bytes_per_token": self.cost.kv_bytes_per_token,
            "state_slots_free": None if allocator is None else free_slots(allocator),
            **self.stats.as_dict(),
            "memory": None if self.account is None else self.account.as_dict(),
            "tiers": self.tiers_info(),
            "schedule": None if self.schedule is None else self.schedule.info(),
            "pins": None if self.pins is None else self.pins.as_dict(),
            "tuner": self.tuning.info(),
            "recording": self.tuning.recording(),
            "advice": self.advice,
        }
