"""The report of a cache: the block of /server_info, and Prometheus metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sglang_hybrid.cache.state_slots.slots import free_slots

if TYPE_CHECKING:
    from sglang_hybrid.cache.parts import Parts
    from sglang_hybrid.cache.radix_cache import HybridRadixCache
    from sglang_hybrid.core.records.pins import Pins
    from sglang_hybrid.core.returns.answer_models import AnswerModels
    from sglang_hybrid.serving.telemetry.metric import Metrics
    from sglang_hybrid.serving.telemetry.schedule import ScheduleStats


class CacheReport:
    """Reports of one cache.

    advice: what its flags should rather be as far as the start tells, one sentence each. metrics:
    whether Prometheus is told, which needs one cache in this process that receives requests.
    """

    def __init__(self, cache: HybridRadixCache, parts: Parts, *, metrics: bool) -> None:
        self.advice: list[str] = []
        self.stats, self.account = parts.stats, parts.account
        has_tiers = parts.shadow_tree is not None and parts.shadow_tree.follows_copies
        self.tier_stats = parts.tier_stats if has_tiers else None
        self._cache, self._parts = cache, parts
        self._metrics: Metrics | None = None
        if metrics:
            from sglang_hybrid.serving.telemetry.metrics import cache_metrics, rank_labels

            self._metrics = cache_metrics(self, rank_labels())

    @property
    def policy_name(self) -> str:
        """The eviction policy in force."""
        return self._parts.in_force.name

    @property
    def alpha(self) -> float | None:
        """Marconi's alpha in force, None under another policy."""
        return dict(self._parts.in_force.options).get("alpha")

    @property
    def answers(self) -> AnswerModels | None:
        """The models of answers, by tenant; None where nothing is expected of answers."""
        shadow_tree = self._parts.shadow_tree
        history = None if shadow_tree is None else shadow_tree.history
        return None if history is None else history.answers

    @property
    def schedule_stats(self) -> ScheduleStats | None:
        """Counts of the waiting queue; None where SGLang orders it."""
        return None if self._cache.schedule is None else self._cache.schedule.stats

    @property
    def tuner_counts(self) -> Mapping[str, float]:
        """The tuner's totals, on the rank that has it."""
        tuning = self._cache.tuning
        return {} if tuning is None else tuning.counts

    @property
    def pins(self) -> Pins | None:
        """The pins of clients; None where SGLang's own order decides what is evicted."""
        shadow_tree = self._parts.shadow_tree
        return None if shadow_tree is None else shadow_tree.tree.pins

    @property
    def recorded(self) -> Mapping[str, float] | None:
        """Requests that ended, by whether they are recorded; None where nothing is."""
        tuning = self._cache.tuning
        info = None if tuning is None else tuning.recording()
        return None if info is None else {name: info[name] for name in ("written", "left_out")}

    def update_metrics(self) -> None:
        """Bring the metrics, if there are any, up to the counts."""
        if self._metrics is not None:
            self._metrics.update()

    def server_info(self) -> dict[str, Any]:
        """The block `hybrid_cache` of /server_info."""
        cache, parts, tuning = self._cache, self._parts, self._cache.tuning
        allocator = cache.req_to_token_pool.mamba_allocator if cache.is_mamba_enabled else None
        pins = self.pins
        return {
            "eviction": self.policy_name,
            "alpha": self.alpha,
            "admission": parts.options.hybrid_admission.value,
            "state_bytes": parts.cost.state_bytes,
            "kv_bytes_per_token": parts.cost.kv_bytes_per_token,
            "state_slots_free": None if allocator is None else free_slots(allocator),
            **self.stats.as_dict(),
            "memory": None if self.account is None else self.account.as_dict(),
            "tiers": cache.tiers_info(),
            "coded": None if parts.coded is None else parts.coded.as_dict(),
            "spilled": None if cache.spilled is None else cache.spilled.as_dict(),
            "parked": None if cache.parked is None else cache.parked.as_dict(),
            "schedule": None if cache.schedule is None else cache.schedule.info(),
            "pins": None if pins is None else pins.as_dict(),
            "full_hits": None if parts.full_hits is None else parts.full_hits.info(),
            "transitions": None if cache.modular is None else cache.modular.info(),
            "tuner": None if tuning is None else tuning.info(),
            "recording": None if tuning is None else tuning.recording(),
            "advice": [*self.advice, *([] if tuning is None else tuning.advice)],
        }
