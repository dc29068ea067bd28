"""Names of all metrics of ours that some server, router or shadow exports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from prometheus_client import CollectorRegistry

from sglang_hybrid.core.queue.loads import LoadCounts
from sglang_hybrid.core.records.pins import Pins
from sglang_hybrid.core.returns.answer_models import AnswerModels
from sglang_hybrid.extensions.lab.shadow import ShadowMetrics
from sglang_hybrid.extensions.router.metrics import RouterMetrics
from sglang_hybrid.serving.telemetry.metrics import TUNER, cache_metrics
from sglang_hybrid.serving.telemetry.schedule import ScheduleStats
from sglang_hybrid.serving.telemetry.tiers import TierStats
from tests.serving.telemetry.test_metrics import Bytes, Cache


def exported(registry: CollectorRegistry) -> set[str]:
    """Names of metrics, with everything on that has some; registry: as of `test_metrics`."""
    cache: Any = Cache("marconi", 1.0, **dict.fromkeys(TUNER, 0.0))
    cache.stats.admitted["branch"] = cache.stats.skipped["no_slot"] = cache.stats.evicted[
        "leaf"
    ] = 1
    cache.pins, cache.recorded = Pins(), {"written": 0, "left_out": 0}
    cache.answers, cache.account, cache.tier_stats = AnswerModels(), Bytes(), TierStats()
    cache.schedule_stats = ScheduleStats(loads=LoadCounts())
    cache.schedule_stats.started["nothing"] = cache.schedule_stats.bound_reached["seconds"] = 1
    cache_metrics(cache).update()
    replicas = SimpleNamespace(errors={}, followers={"http://a": MagicMock()})
    picker: Any = SimpleNamespace(looked_up=0, unknown=0, failed=0, replicas=replicas)
    shadow: Any = SimpleNamespace(name="lru", tokens=0, hit=0)
    families = [
        *registry.collect(),
        *RouterMetrics(picker).collect(),
        *ShadowMetrics([shadow]).collect(),
    ]
    return {sample.name for family in families for sample in family.samples}
