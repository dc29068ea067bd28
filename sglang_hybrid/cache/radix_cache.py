"""`--radix-cache-backend hybrid`: SGLang's unified radix cache with our decisions."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_hybrid.cache import tree_core  # noqa: F401, it registers BACKEND with SGLang
from sglang_hybrid.cache.components import (
    CountedFull,
    RobustMamba,
    ShadowedFull,
    ShadowedMamba,
)
from sglang_hybrid.cache.prefill_adder import HybridPrefillAdder
from sglang_hybrid.cache.shadow_tree import ShadowTree
from sglang_hybrid.cache.sizes import measured_cost
from sglang_hybrid.cache.slots import free_slots
from sglang_hybrid.cache.state_pool import PoolStateSlots
from sglang_hybrid.cache.tuning import asked_for, make_tuning
from sglang_hybrid.checkpoints import decode
from sglang_hybrid.checkpoints.message_boundaries import MessageBoundaries
from sglang_hybrid.checkpoints.planner import PendingCheckpoint, Planner
from sglang_hybrid.checkpoints.prefix_wait import PrefixWait
from sglang_hybrid.config import BACKEND, Admission, Eviction, HybridConfig
from sglang_hybrid.core.cost import UNBOUNDED
from sglang_hybrid.core.history import History
from sglang_hybrid.core.nodes import Kind
from sglang_hybrid.core.serving import Serving
from sglang_hybrid.explain.decision_log import DecisionLog
from sglang_hybrid.explain.explainer import Explainer
from sglang_hybrid.memory.account import Account
from sglang_hybrid.memory.allocators import OneMemoryKV
from sglang_hybrid.telemetry.metrics import CacheMetrics
from sglang_hybrid.telemetry.stats import CacheStats, Missed, RequestReport
from sglang_hybrid.tenants import tenant_of
from sglang_hybrid.tuner.candidates import make_policies

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    from sglang_hybrid.core.cost import CostModel

logger = logging.getLogger(__name__)

NOTHING_PENDING = (0, Kind.UNKNOWN)


class HybridRadixCache(UnifiedRadixCache):
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
        rank: which of several caches with requests of their own this is; None if another rank
            receives its requests.
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
        rank: int | None = None,
    ) -> None:
        self.options = options or HybridConfig.from_environment()
        self.judicious = self.options.hybrid_admission is Admission.JUDICIOUS
        self.advice: list[str] = []  # what its flags should rather be, for the report
        self.stats = CacheStats()
        self.pending = NOTHING_PENDING  # position and kind of the checkpoint under way
        self.ready: list[PendingCheckpoint] = []  # what the insertion under way publishes
        self.handed_over: PendingCheckpoint | None = None  # the one of them that it carries itself
        self.planner: Planner | None = None
        self.slots = PoolStateSlots(self)
        self.message_boundaries = message_boundaries or MessageBoundaries()
        self.decision_log = DecisionLog(self)
        self.explainer = Explainer(self, self.decision_log)
        self._reports: WeakKeyDictionary[Req, RequestReport] = WeakKeyDictionary()
        self._kv_lens: WeakKeyDictionary[Req, int] = WeakKeyDictionary()
        self._messages: WeakKeyDictionary[Req, list[int]] = WeakKeyDictionary()
        self.cost = measured_cost(cost, params)
        self.account = _account(params)  # of one memory, if KV and states share it
        self.steps_ahead = 0  # steps that are prepared before a prefill's states are in the tree
        has_states = ComponentType.MAMBA in (params.tree_components or ())
        override: dict[ComponentType, Any] = dict(params.component_registry_override or {})
        if self.options.policy is Eviction.SGLANG_LRU or params.disable:
            params = replace(params, tree_core_backend="python")
            if not params.disable:
                override[ComponentType.FULL] = CountedFull
            if has_states:
                override[ComponentType.MAMBA] = RobustMamba
        else:
            history = History(page_size=params.page_size)
            policies = make_policies(asked_for(self.options), history)
            self.shadow_tree = ShadowTree(
                self.cost,
                *policies,
                has_states=has_states,
                one_memory=self.account is not None,
            )
            params = replace(params, tree_core_backend=BACKEND)
            override[ComponentType.FULL] = ShadowedFull
            if has_states:
                override[ComponentType.MAMBA] = ShadowedMamba
        params = replace(params, component_registry_override=override)
        super().__init__(params)
        serving = None
        if has_states and not params.disable:
            if plans and self.judicious:
                grid = self.components[ComponentType.MAMBA].mamba_checkpoint_grid
                chunk = params.chunked_prefill_size or 0
                longest = params.req_to_token_pool.max_context_len
                serving = Serving(chunk if chunk > 0 else longest, grid)
                self.planner = Planner(
                    self.slots,
                    self.stats.skipped,
                    page_size=self.page_size,
                    min_branch_tokens=self.options.hybrid_min_branch_tokens,
                    grid=grid,
                    one_pass=one_pass,
                    note=self.decision_log.not_taken,
                )
            decode.plan_for_pages_of(self.page_size if self.planner is not None else None)
            self.prefix_wait = PrefixWait(
                self.planner, self.stats, self.options.hybrid_min_branch_tokens
            )
            self.prefill_adder_class = HybridPrefillAdder
        self.tuning = make_tuning(self, rank, serving)
        one_of_its_kind = params.enable_metrics and rank is not None  # ranks do the same
        self._metrics = CacheMetrics(self) if one_of_its_kind else None
        logger.info(
            "sglang_hybrid: eviction %s, admission %s; a state is %s bytes, a KV token %s.",
            self.options.policy.value,
            self.options.hybrid_admission.value,
            f"{self.cost.state_bytes:,}",
            f"{self.cost.kv_bytes_per_token:,}",
        )

    @property
    def policy_name(self) -> str:
        """The eviction policy in force."""
        return self.tuning.in_force.name

    @property
    def alpha(self) -> float | None:
        """Marconi's alpha in force, None under another policy."""
        return dict(self.tuning.in_force.options).get("alpha")

    @property
    def tuner_counts(self) -> Mapping[str, float]:
        """The tuner's totals, on the rank that has it."""
        return self.tuning.counts

    def could_hold(self, kv_tokens: int, states: int) -> bool:
        """Whether one memory could hold so much if nothing else were there; of two pools, True."""
        if self.account is None:
            return True
        needed = kv_tokens * self.cost.kv_bytes_per_token + states * self.cost.state_bytes
        return needed <= self.account.budget

    def _evict_components(
        self,
        request_by_type: dict[ComponentType, int],
        tracker: dict[ComponentType, int],
        available_size_targets: dict[ComponentType, tuple[ComponentType, int]] | None = None,
        **more: Any,
    ) -> None:
        """In one memory a victim of either kind makes room for either, so there is one walk: that
        over states, which ends leaves, too (unified_radix_cache.py:952-1060).

        more: `allocation_reclaim_satisfied`, a function or None, which SGLang 0.5.22 does not have.
        """
        if self.account is None:
            super()._evict_components(request_by_type, tracker, available_size_targets, **more)
            return
        satisfied: Callable[[], bool] | None = more.get("allocation_reclaim_satisfied")

        def enough() -> bool:
            if satisfied is not None:
                return satisfied()
            if available_size_targets is None:
                return all(tracker[what] >= request_by_type[what] for what in tracker)
            return all(
                self._component_available_size(what) >= size
                for what, size in available_size_targets.values()
            )

        self.tree_core.evict_device_start(ComponentType.MAMBA, UNBOUNDED)
        try:
            while not enough():
                node_id, made_progress = self._evict_device_next_node(ComponentType.MAMBA, tracker)
                if node_id is not None:
                    self._evict_device_leaf(node_id, tracker)
                elif not made_progress:
                    break
        finally:
            self.tree_core.evict_device_end(ComponentType.MAMBA)

    @property
    def plans_checkpoints(self) -> bool:
        """Whether prefills leave the states that we want, and not those that SGLang tracks."""
        return self.planner is not None

    @property
    def has_shadow_tree(self) -> bool:
        """Whether our own policies choose the victims."""
        return hasattr(self, "shadow_tree")

    def _match_tree(self, params: MatchPrefixParams) -> MatchResult:
        result = self._just_ranked(params) or super()._match_tree(params)
        if params.req is not None and not self.is_mamba_enabled and not self.disable:
            self.looked_up(params.req, params.key, result)
        return result

    def _just_ranked(self, params: MatchPrefixParams) -> MatchResult | None:
        """What a request finds that SGLang looks up to rank it; None if nothing is known of it, or
        if something is to be done with the result.
        """
        if params.cow_mamba or not self.has_shadow_tree or self.linker is not None or self.disable:
            return None
        return self.tree_core.known_match(params)

    def looked_up(self, req: Req, key: Any, result: MatchResult, *, no_slot: bool = False) -> None:
        """A request is about to be admitted with this match.

        SGLang matches a waiting request many times, to rank it and to try to admit it. The first
        time counts as its access; the last one before its prefill is what it is reported to have
        found. A health probe is no traffic: it is not counted, noted or recorded and leaves nothing
        in the tree.
        """
        if req.rid.startswith(HEALTH_CHECK_RID_PREFIX):
            req.skip_radix_cache_insert = True
            return
        self._kv_lens[req] = result.full_kv_hit_length
        known = self._reports.get(req)
        if known is not None and known.started:
            return
        node = self.tree_core.node_by_id(result.best_match_node)
        hit = result.device_prefix_len + result.host_hit_length
        kv_only = max(0, result.full_kv_hit_length - hit) if self.is_mamba_enabled else 0
        if no_slot:
            missed = Missed.NO_SLOT
        elif kv_only:
            missed = Missed.NO_STATE
        else:
            usable = len(key) - len(key) % self.page_size
            missed = Missed.NOTHING if hit >= usable else Missed.NOT_STORED
        report = RequestReport(len(req.origin_input_ids), hit, kv_only, missed)
        self._reports[req] = report
        if known is None and self.has_shadow_tree:
            self.shadow_tree.arrived(req.time_stats.created_time or None)
        self.decision_log.looked_up(req, report, result.full_kv_hit_length, node)
        if known is None and self.has_shadow_tree:
            self.shadow_tree.hit(node)

    def was_looked_up(self, req: Req) -> bool:
        """Whether this request was looked up before."""
        return req in self._reports

    def plan_request(self, req: Req) -> None:
        """`req` may join the next batch: say which states its prefill should leave."""
        if self.planner is None or req.skip_radix_cache_insert:
            return
        prompt = req.full_untruncated_fill_ids
        history_match = (
            self.shadow_tree.match_history(prompt, tenant_of(req)) if self.has_shadow_tree else None
        )
        if history_match is not None:
            self.decision_log.history_matched(req, history_match.known_len)
        self.planner.plan_request(
            req,
            len(prompt),
            self._kv_lens.get(req, req.prefix_len),
            history_match=history_match,
            shared=self.prefix_wait.shared(req),
            message_starts=self.message_starts(req),
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

    def checkpoint_into_tree(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        self._begin(req)
        self.ready = [] if self.planner is None else self.planner.take_ready(req, up_to)
        admitted = self.stats.admitted.total()
        super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        self._report(req, admitted)
        self.handed_over = None
        for checkpoint in self.ready:
            self._insert_above(req, checkpoint)
        self.ready = []
        self.pending = NOTHING_PENDING
        if self._metrics is not None:
            self._metrics.update()
        if not req.finished() or req.last_node is None:
            return
        self.tuning.finished(req, up_to)
        if self.has_shadow_tree:
            self.shadow_tree.finished(
                array("q", req.full_untruncated_fill_ids[:up_to]),
                len(req.origin_input_ids),
                self.tree_core.node_by_id(req.last_node),
                self.tree_core.root_node,
                self.message_starts(req),
                tenant_of(req),
            )

    def on_release(self, req: Req, *args: Any, **kwargs: Any) -> None:
        super().on_release(req, *args, **kwargs)
        self.drop_plan(req)

    def reset(self) -> None:
        super().reset()
        self.decision_log.emptied()
        if self.planner is not None:
            self.planner.forget_all()

    def _insert_above(self, req: Req, checkpoint: PendingCheckpoint) -> None:
        """Publish a state at a position whose KV is in the tree already."""
        position = checkpoint.position
        if position > req.kv.cache_protected_len:  # SGLang kept the request out of the tree
            self.slots.give_back(checkpoint.slot)
            return
        admitted = self.stats.admitted.total()
        self.pending = (position, checkpoint.kind)
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :position]
        result = self.insert(
            InsertParams(
                key=RadixKey(
                    req.full_untruncated_fill_ids[:position],
                    req.extra_key,
                    is_bigram=self.tree_core.is_eagle,
                    cache_salt=req.cache_salt,
                ),
                value=row.to(torch.int64, copy=True),
                mamba_value=checkpoint.slot,
                prev_prefix_len=position,  # nothing is a duplicate: these are the tree's own
                inserted_len=position,
                priority=req.priority or 0,
                session_id=req.session_id,
                rotation_base=req.kv_rotation_base,
            )
        )
        if result.mamba_exist:
            self.slots.give_back(checkpoint.slot)
        self._report(req, admitted)

    def _report(self, req: Req, admitted: int) -> None:
        """Put the state that was just inserted, if any, into the request's report."""
        report = self._reports.get(req)
        if report is not None and self.stats.admitted.total() > admitted:
            report.checkpoints.append(self.pending)
            _publish(req, report)

    def message_starts(self, req: Req) -> list[int]:
        """Where the messages of a prompt begin; looked for once per request."""
        starts = self._messages.get(req)
        if starts is None:
            starts = self._messages[req] = self.message_boundaries.message_starts(
                req.origin_input_ids
            )
        return starts

    def _begin(self, req: Req) -> None:
        """The first prefill of a request has run: count what it found, once."""
        report = self._reports.get(req)
        if report is None or report.started:
            return
        report.started = True
        self.stats.served(report, self.cost.flops(report.hit_tokens))
        _publish(req, report)

    def hit_tokens(self, req: Req) -> int:
        """Prompt tokens of `req` whose prefill was skipped."""
        report = self._reports.get(req)
        return 0 if report is None else report.hit_tokens

    def sanity_check(self) -> None:
        """SGLang's check of its tree, then ours of the shadow tree. Raises AssertionError."""
        super().sanity_check()
        if self.has_shadow_tree:
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
            "tuner": self.tuning.info(),
            "recording": self.tuning.recording(),
            "advice": self.advice,
        }


def _account(params: CacheInitParams) -> Account | None:
    allocator = params.token_to_kv_pool_allocator
    return allocator.account if isinstance(allocator, OneMemoryKV) else None


def _publish(req: Req, report: RequestReport) -> None:
    req.customized_info = {**(req.customized_info or {}), "hybrid_cache": [report.as_dict()]}
