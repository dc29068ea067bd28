"""Our parts of one cache, built once and before SGLang's part of it.

Components, tuner and cache share them; none of their files imports `radix_cache.py`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.runtime_context import (
    get_exec,
    mamba_checkpoint_grid,
    max_speculative_num_draft_tokens,
)

from sglang_hybrid.cache.memory.shared import shared_memory
from sglang_hybrid.cache.queue.clock import StepClock
from sglang_hybrid.cache.records.shadow_tree import ShadowTree
from sglang_hybrid.cache.request.lookups import LookUps
from sglang_hybrid.cache.request.pinning import make_pins
from sglang_hybrid.cache.sizes import measured_cost
from sglang_hybrid.cache.state_slots.state_pool import PoolStateSlots
from sglang_hybrid.cache.tiers.measured_speeds import MeasuredSpeeds
from sglang_hybrid.checkpoints import decode
from sglang_hybrid.checkpoints.planner import Planner
from sglang_hybrid.core.extensions import extension
from sglang_hybrid.core.returns.history import History
from sglang_hybrid.core.server_settings import Serving
from sglang_hybrid.core.specs import PolicySwitch, Spec, make_policies
from sglang_hybrid.explain.decision_log import DecisionLog
from sglang_hybrid.explain.explainer import Explainer
from sglang_hybrid.serving.flag_values import Eviction
from sglang_hybrid.serving.telemetry.stats import CacheStats
from sglang_hybrid.serving.telemetry.tiers import TierStats
from sglang_hybrid.storage.codecs.in_use import device_codecs

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    from sglang_hybrid.cache.coded.entries import CodedEntries
    from sglang_hybrid.cache.radix_cache import HybridRadixCache
    from sglang_hybrid.cache.request.full_hits import FullHits
    from sglang_hybrid.cache.state_slots.parked_kv import ParkedKv
    from sglang_hybrid.cache.state_slots.spilled_states import SpilledStates
    from sglang_hybrid.core.costs.cost import CostModel
    from sglang_hybrid.core.memory.account import MemoryAccount
    from sglang_hybrid.extensions.disk.learning import Learning
    from sglang_hybrid.serving.config import HybridConfig

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Parts:
    """The parts of one cache that decide, count and record.

    in_force: the policy; at first that of the flags. account: of one memory, None where KV and
    states have a pool each. shadow_tree: None where SGLang's own order decides what is evicted.
    planner: None where states are taken where SGLang tracks them. serving: how the server runs,
    None there. speeds: of prefills and transfers. full_hits: prompts that need no forward; None
    where all do. learning: what is learnt outlives the server; None without tiers. coded: entries
    kept coded on the device; None where none are. spilled: states in the place of KV; parked: KV in
    slots without a state; None where pools lend each other nothing. step_clock: the time that all
    ranks agree on.
    """

    options: HybridConfig
    in_force: Spec
    cost: CostModel
    account: MemoryAccount | None
    stats: CacheStats
    shadow_tree: ShadowTree | None
    decision_log: DecisionLog
    explainer: Explainer
    slots: PoolStateSlots
    lookups: LookUps
    tier_stats: TierStats
    speeds: MeasuredSpeeds
    full_hits: FullHits | None
    coded: CodedEntries | None = None
    spilled: SpilledStates | None = None
    parked: ParkedKv | None = None
    planner: Planner | None = None
    serving: Serving | None = None
    learning: Learning | None = None
    step_clock: StepClock = field(default_factory=StepClock)

    @property
    def displaced_kv(self) -> CodedEntries | ParkedKv | None:
        """The KV that is on the device in another form, or place, than requests read it."""
        return self.parked if self.coded is None else self.coded

    def use_policy(self, switch: PolicySwitch) -> None:
        """Put the policy of `switch` into force; called on every rank at the same step."""
        assert self.shadow_tree is not None, "only a policy of ours is tuned"
        self.shadow_tree.use(*make_policies(switch.spec, self.shadow_tree.history))
        self.in_force = switch.spec
        logger.info(
            "sglang_hybrid: eviction is %s from request %d on: %s.",
            *(switch.spec, self.shadow_tree.clock.tick, switch.reason),
        )

    def could_hold(self, kv_tokens: int, states: int) -> bool:
        """True if one memory could hold so much if nothing else were there; of two pools, True."""
        if self.account is None:
            return True
        needed = kv_tokens * self.cost.kv_bytes_per_token + states * self.cost.state_bytes
        return needed <= self.account.budget


def build_parts(
    cache: HybridRadixCache,
    params: CacheInitParams,
    options: HybridConfig,
    cost: CostModel | None,
    *,
    one_pass: bool,
    plans: bool,
    tiers: bool,
    full_hits: bool,
    spills: bool,
) -> Parts:
    """The parts of `cache`, whose attributes they read only later. The arguments are those of
    `HybridRadixCache`.
    """
    alpha = options.alpha
    start = Spec(options.policy.value, () if alpha is None else (("alpha", alpha),))
    allocator = params.token_to_kv_pool_allocator
    memory = shared_memory(allocator)
    account = None if memory is None else memory.account
    measured, stats = measured_cost(cost, params), CacheStats()
    coded, codecs = None, device_codecs()
    if codecs is not None and not params.disable:
        from sglang_hybrid.cache.coded.entries import CodedEntries

        coded = CodedEntries(cache, params, codecs)
        sizes = coded.sizes(measured.kv_bytes_per_token, measured.state_bytes)
        measured = replace(measured, coded=sizes)
    spilled = parked = None
    if spills:
        from sglang_hybrid.cache.state_slots.parked_kv import make_parked_kv
        from sglang_hybrid.cache.state_slots.spilled_states import make_spilled_states

        spilled = make_spilled_states(cache, params)
        if spilled is not None and not tiers:  # SGLang's walk over copies counts the KV in the pool
            parked = make_parked_kv(cache, params, spilled.freed)
    shadow_tree: ShadowTree | None = None
    on_cpu = str(getattr(allocator, "device", "cpu")) == "cpu"
    speeds = MeasuredSpeeds(measured, on_cpu=on_cpu)
    has_states = ComponentType.MAMBA in (params.tree_components or ())
    if options.policy is not Eviction.SGLANG_LRU and not params.disable:
        history = History(
            max_bytes=options.hybrid_history_mb << 20,
            page_size=params.page_size,
            answer_bytes=options.hybrid_answers_mb << 20,
        )
        policies = make_policies(start, history)
        one_memory = account is not None or spilled is not None
        pins = make_pins(measured, params, options.hybrid_pin_share, spills=spilled is not None)
        if tiers:
            from sglang_hybrid.cache.records.tiered_shadow_tree import TieredShadowTree

            shadow_tree = TieredShadowTree(
                measured,
                *policies,
                speeds,
                has_states=has_states,
                one_memory=one_memory,
                pins=pins,
            )
        else:
            shadow_tree = ShadowTree(
                measured, *policies, has_states=has_states, one_memory=one_memory, pins=pins
            )
    decision_log = DecisionLog(cache)
    slots = PoolStateSlots(cache, shadow_tree, decision_log)
    tier_stats = TierStats(measured.kv_bytes_per_token, measured.state_bytes)
    lookups = LookUps(cache, measured, stats, shadow_tree, decision_log, tier_stats)
    parts = Parts(
        options,
        start,
        measured,
        account,
        stats,
        shadow_tree,
        decision_log,
        Explainer(cache, decision_log),
        slots,
        lookups,
        tier_stats,
        speeds,
        _full_hits(cache, params) if full_hits and shadow_tree is not None else None,
        coded,
        spilled,
        parked,
    )
    if shadow_tree is not None:
        parts.step_clock.join(shadow_tree.is_pin_over, shadow_tree.on_time)
    if tiers and shadow_tree is not None and shadow_tree.history is not None:
        from sglang_hybrid.cache.tiers.served_tiers import disk_of

        learning = extension("disk.learning")
        parts.learning = learning.Learning(shadow_tree.history, partial(disk_of, cache))
    if has_states and not params.disable:
        if plans and options.is_judicious:
            add_planner(parts, params, one_pass=one_pass)
        _plan_decodes(parts, params)
    return parts


def _full_hits(cache: HybridRadixCache, params: CacheInitParams) -> FullHits | None:
    """Each hidden state that is kept needs a state of the pool beside it."""
    from sglang_hybrid.cache.request.full_hits import FullHits

    pool = getattr(params.req_to_token_pool, "mamba_pool", None)
    return None if pool is None else FullHits(cache, int(pool.size))


def _plan_decodes(parts: Parts, params: CacheInitParams) -> None:
    """Decodes leave the states that prefills do not."""
    if parts.planner is None:
        decode.use_sglang_grid()
        return
    lazily = get_exec().mamba.enable_mamba_extra_buffer_lazy
    decode.plan_for(params.page_size, max_speculative_num_draft_tokens(), lazily=lazily)


def add_planner(parts: Parts, params: CacheInitParams, *, one_pass: bool) -> None:
    """Prefills leave the states that we want."""
    grid = mamba_checkpoint_grid(params.page_size)
    chunk = params.chunked_prefill_size or 0
    longest = params.req_to_token_pool.max_context_len
    one_memory = parts.account is not None
    parts.serving = Serving(
        chunk if chunk > 0 else longest, grid, one_memory, parts.options.hybrid_pin_share
    )
    parts.planner = Planner(
        parts.slots,
        parts.stats.skipped,
        page_size=params.page_size,
        min_branch_tokens=parts.options.hybrid_min_branch_tokens,
        grid=grid,
        one_pass=one_pass,
        note=parts.decision_log.on_skip,
    )
