"""Prometheus metrics of the cache, beside SGLang's own (`--enable-metrics`)."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from prometheus_client import Counter

    from sglang_hybrid.telemetry.stats import CacheStats

PREFIX = "sglang_hybrid:"


class HasStats(Protocol):
    """What is watched: a cache with its counts and the names of what decides."""

    stats: CacheStats

    @property
    def policy_name(self) -> str: ...

    @property
    def alpha(self) -> float | None: ...


class CacheMetrics:
    """Counters that follow a cache's `CacheStats`; `update` copies what has been added since."""

    def __init__(self, cache: HasStats) -> None:
        # Imported here: prometheus_client chooses its multiprocess mode at import, and SGLang sets
        # the directory for it only when metrics are enabled.
        from prometheus_client import Counter, Gauge

        self._cache = cache
        self._seen: Tally[tuple[str, str]] = Tally()
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
        policy = Gauge(
            PREFIX + "policy",
            "1 for the eviction policy in force.",
            ["policy"],
            multiprocess_mode="mostrecent",
        )
        policy.labels(cache.policy_name).set(1)
        if cache.alpha is not None:
            Gauge(
                PREFIX + "alpha", "Marconi's alpha in force.", multiprocess_mode="mostrecent"
            ).set(cache.alpha)

    def update(self) -> None:
        """Bring the counters up to the cache's counts."""
        stats = self._cache.stats
        for name, counter in self._counters.items():
            counter.inc(self._since(name, "", getattr(stats, name)))
        for name, counter in self._labelled.items():
            tally: Mapping[str, int] = getattr(stats, name)
            for label, total in tally.items():
                counter.labels(label).inc(self._since(name, label, total))

    def _since(self, name: str, label: str, total: int) -> int:
        added = total - self._seen[name, label]
        self._seen[name, label] = total
        return added
