"""Prometheus metrics of the cache, beside SGLang's own (`--enable-metrics`)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Protocol

from sglang_hybrid.serving.telemetry.answers import AnswerMetrics
from sglang_hybrid.serving.telemetry.memory import MemoryMetrics
from sglang_hybrid.serving.telemetry.schedule import ScheduleMetrics
from sglang_hybrid.serving.telemetry.tiers import TierMetrics

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge

    from sglang_hybrid.core.memory.account import Account
    from sglang_hybrid.core.returns.answers import Calibration
    from sglang_hybrid.serving.telemetry.schedule import ScheduleStats
    from sglang_hybrid.serving.telemetry.stats import CacheStats
    from sglang_hybrid.serving.telemetry.tiers import TierStats

PREFIX = "sglang_hybrid:"


class HasStats(Protocol):
    """What is watched: a cache with its counts and the names of what decides."""

    stats: CacheStats

    @property
    def policy_name(self) -> str: ...

    @property
    def alpha(self) -> float | None: ...

    @property
    def tuner_counts(self) -> Mapping[str, float]: ...

    @property
    def calibration(self) -> Calibration | None: ...

    account: Account | None  # of one memory
    tier_stats: TierStats
    ways: object  # None where there are no tiers

    @property
    def schedule_stats(self) -> ScheduleStats | None: ...


class CacheMetrics:
    """Counters that follow a cache's `CacheStats`; `update` copies what has been added since."""

    def __init__(self, cache: HasStats) -> None:
        # Imported here: prometheus_client chooses its multiprocess mode at import, and SGLang sets
        # the directory for it only when metrics are enabled.
        from prometheus_client import Counter, Gauge

        self._cache = cache
        self._seen: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._counters: dict[str, Counter] = {
            "requests": Counter(PREFIX + "requests", "Requests whose prefill began."),
            "prompt_tokens": Counter(PREFIX + "prompt_tokens", "Prompt tokens of those requests."),
            "hit_tokens": Counter(PREFIX + "hit_tokens", "Prompt tokens that were not prefilled."),
            "kv_only_tokens": Counter(
                PREFIX + "kv_only_tokens",
                "Prompt tokens whose KV was stored but lay behind the deepest state.",
            ),
            "flops_saved": Counter(PREFIX + "flops_saved", "FLOPs that hits made unnecessary."),
        }
        self._labelled: dict[str, Counter] = {
            "admitted": Counter(
                PREFIX + "checkpoints_admitted", "States put into the tree.", ["reason"]
            ),
            "skipped": Counter(
                PREFIX + "checkpoints_skipped", "States not put into the tree.", ["reason"]
            ),
            "evicted": Counter(PREFIX + "evicted", "Evictions by what was taken.", ["kind"]),
        }
        tuner = {
            "runs": "Comparisons of policies on recorded requests.",
            "failures": "Worker processes that did not end well.",
            "seconds": "Seconds that comparisons took.",
            "switches": "Changes of the policy in force.",
            "taken_back": "Changes that a later comparison undid.",
            "regret_tokens": "Tokens that the policy in force missed against the best one.",
        }
        self._tuner: dict[str, Counter] = {
            name: Counter(f"{PREFIX}tuner_{name}", about)
            for name, about in tuner.items()
            if name in cache.tuner_counts
        }
        self._policy = Gauge(
            PREFIX + "policy",
            "1 for the eviction policy in force.",
            ["policy"],
            multiprocess_mode="mostrecent",
        )
        self._alpha: Gauge | None = None
        self._make_alpha = partial(
            Gauge, PREFIX + "alpha", "Marconi's alpha in force.", multiprocess_mode="mostrecent"
        )
        self._answers = None if cache.calibration is None else AnswerMetrics(cache.calibration)
        self._memory = None if cache.account is None else MemoryMetrics(cache.account)
        self._tiers = None if cache.ways is None else TierMetrics(cache.tier_stats)
        waiting = cache.schedule_stats
        self._schedule = None if waiting is None else ScheduleMetrics(waiting, PREFIX)
        self._shown = ""
        self._show_policy()

    def update(self) -> None:
        """Bring the counters up to the cache's counts."""
        stats = self._cache.stats
        for name, counter in self._counters.items():
            counter.inc(self._since(name, "", getattr(stats, name)))
        for name, counter in self._labelled.items():
            tally: Mapping[str, int] = getattr(stats, name)
            for label, total in tally.items():
                counter.labels(label).inc(self._since(name, label, total))
        for name, counter in self._tuner.items():
            counter.inc(self._since("tuner", name, self._cache.tuner_counts[name]))
        if self._answers is not None:
            self._answers.update()
        if self._memory is not None:
            self._memory.update()
        if self._tiers is not None:
            self._tiers.update()
        if self._schedule is not None:
            self._schedule.update()
        self._show_policy()

    def _show_policy(self) -> None:
        """The alpha of a policy that has none is not a number."""
        name, alpha = self._cache.policy_name, self._cache.alpha
        if name != self._shown:
            if self._shown:
                self._policy.labels(self._shown).set(0)
            self._policy.labels(name).set(1)
            self._shown = name
        if alpha is not None and self._alpha is None:
            self._alpha = self._make_alpha()
        if self._alpha is not None:
            self._alpha.set(math.nan if alpha is None else alpha)

    def _since(self, name: str, label: str, total: float) -> float:
        added = total - self._seen[name, label]
        self._seen[name, label] = total
        return added
