"""What Prometheus reads."""

from __future__ import annotations

import math
from functools import partial

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from sglang_hybrid.core.memory.account import Account, MemoryKind
from sglang_hybrid.core.queue.loads import LoadCounts
from sglang_hybrid.core.queue.waiting import Bound, Prospect, ReuseKind, Waiting
from sglang_hybrid.core.returns.answer_models import AnswerModels
from sglang_hybrid.core.returns.answers import Answer
from sglang_hybrid.serving.telemetry.metric import Metrics
from sglang_hybrid.serving.telemetry.metrics import answer_metrics, cache_metrics, memory_metrics
from sglang_hybrid.serving.telemetry.schedule import ScheduleStats, schedule_metrics
from sglang_hybrid.serving.telemetry.stats import CacheStats, Missed, RequestReport
from sglang_hybrid.serving.telemetry.tiers import TierStats, tier_metrics

Shown = dict[str, float]


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    """A test's own; that of a process takes a name once."""
    own = CollectorRegistry()
    for kind in (Counter, Gauge):
        monkeypatch.setattr(prometheus_client, kind.__name__, partial(kind, registry=own))
    return own


def shown(registry: CollectorRegistry) -> Shown:
    """Samples by name, without its prefix, and labels in brackets."""
    return {
        sample.name.removeprefix("sglang_hybrid:")
        + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def shows(registry: CollectorRegistry, expected: Shown) -> bool:
    """Asserts that these samples are shown so, whatever else is."""
    found = shown(registry)
    assert {name: found.get(name) for name in expected} == pytest.approx(expected)
    return True


class Cache:
    """What a cache tells of itself."""

    def __init__(self, policy: str = "reuse", alpha: float | None = None, **tuner: float) -> None:
        self.stats = CacheStats()
        self.policy_name, self.alpha, self.tuner_counts = policy, alpha, tuner
        self.account = self.schedule_stats = self.answers = self.tier_stats = None


def test_counters_follow_the_counts(registry: CollectorRegistry) -> None:
    cache = Cache()
    metrics = cache_metrics(cache)
    cache.stats.on_prefill(RequestReport(30, 10, 5, Missed.NO_STATE), 100)
    cache.stats.admitted["branch"] += 1
    metrics.update()
    cache.stats.on_prefill(RequestReport(30, 20, 0, Missed.NOTHING), 300)
    cache.stats.skipped["no_slot"] += 2
    cache.stats.evicted["leaf"] += 3
    metrics.update()
    metrics.update()
    assert shows(
        registry,
        {
            "requests_total": 2,
            "prompt_tokens_total": 60,
            "hit_tokens_total": 30,
            "kv_only_tokens_total": 5,
            "flops_saved_total": 400,
            "checkpoints_admitted_total[branch]": 1,
            "checkpoints_skipped_total[no_slot]": 2,
            "evicted_total[leaf]": 3,
            "policy[reuse]": 1,
        },
    )
    assert not {"alpha", "tuner_runs_total"} & shown(registry).keys()


def test_alpha_is_shown_where_there_is_one(registry: CollectorRegistry) -> None:
    cache_metrics(Cache("marconi", 2.5))
    assert shows(registry, {"alpha": 2.5, "policy[marconi]": 1})


def test_a_switch_is_shown(registry: CollectorRegistry) -> None:
    cache = Cache(runs=1, failures=0, seconds=0.5, switches=0)
    metrics = cache_metrics(cache)
    cache.policy_name, cache.alpha = "marconi", 3.0
    cache.tuner_counts.update(runs=2, seconds=1.5, switches=1)
    metrics.update()
    cache.policy_name, cache.alpha = "lru", None
    metrics.update()
    assert shows(registry, {"policy[reuse]": 0, "policy[marconi]": 0, "policy[lru]": 1})
    tuner = {"runs": 2, "seconds": 1.5, "switches": 1, "failures": 0}
    assert shows(registry, {f"tuner_{name}_total": value for name, value in tuner.items()})
    assert math.isnan(shown(registry)["alpha"])


def test_one_memory_is_shown(registry: CollectorRegistry) -> None:
    account = Account(1_000)
    states = MemoryKind.STATES

    def release(wanted: int) -> int:
        account.on_release(states, 400)
        return 400

    account.join(states, release)
    metrics = Metrics(memory_metrics(account))
    account.claim(states, 800)
    account.charge(states, used=250, waste=50, kept=-300)
    metrics.update()
    account.claim(MemoryKind.KV, 500)
    metrics.update()
    metrics.update()
    assert shows(
        registry,
        {
            "memory_bytes[states][used]": 250,
            "memory_bytes[states][waste]": 50,
            "memory_bytes[states][kept]": 100,
            "memory_bytes[kv][kept]": 500,
            "memory_free_bytes": 700,
            "memory_moved_bytes_total[kv]": 400,
            "memory_moved_bytes_total[states]": 0,
            "memory_moves_total": 1,
            "memory_state[balanced]": 1,
            "memory_state[kv_short]": 0,
        },
    )


def test_what_was_expected_of_answers_is_shown(registry: CollectorRegistry) -> None:
    models = AnswerModels()
    seen = models.calibration
    metrics = Metrics(answer_metrics(models))
    for expected, returned in ((None, True), (0.9, True), (0.95, False), (0.1, False)):
        answer = Answer([], 0.0, 0.5, None, expected, returned=returned)
        seen.judge(answer)
    seen.judge(answer, -1)
    models.of("a")
    models.counts["halved"] += 2
    metrics.update()
    assert shows(
        registry,
        {
            "answers[nothing][yes]": 1,
            "answers[likely][yes]": 1,
            "answers[likely][no]": 1,
            "answers[unlikely][no]": 0,
            "answers_expected_returns[likely]": 1.85,
            "answers_tenants": 1,
            "answers_forgotten_total[halved]": 2,
            "answers_forgotten_total[dropped]": 0,
        },
    )
    assert "answers_expected_returns[nothing]" not in shown(registry)


def test_tiers_are_shown(registry: CollectorRegistry) -> None:
    stats = TierStats(token_bytes=10, state_bytes=1_000)
    metrics = Metrics(tier_metrics(stats))
    stats.on_write(tokens=7, states=2)
    metrics.update()
    stats.loads += 3
    stats.hit_tokens["host"] += 64
    metrics.update()
    metrics.update()
    written = {"tier_written_bytes_total": 2_070, "tier_loads_total": 3}
    assert shows(registry, written | {"tier_hit_tokens_total[host]": 64})


def test_the_queue_is_shown(registry: CollectorRegistry) -> None:
    stats = ScheduleStats(front=7)
    metrics = Metrics(schedule_metrics(stats))
    hit = Prospect(90, 1.0, 10.0, ReuseKind.ON_DEVICE)
    stats.on_start(Waiting("a", 1, 10.0, prospect=hit), Bound(3, 60.0), 12.0)
    metrics.update()
    stats.on_start(Waiting("b", 2, 10.0, overtaken=3), Bound(3, 60.0), 14.0)
    stats.on_start(Waiting("c", 3, 10.0, overtaken=1), Bound(3, 60.0), 80.0)
    metrics.update()
    metrics.update()
    expected = {
        "started_total[on_device]": 1,
        "started_total[nothing]": 2,
        "overtaken_total": 4,
        "most_overtaken": 3,
        "waited_seconds_total": 76,
        "longest_wait": 70,
        "bound_reached_total[overtaken]": 1,
        "bound_reached_total[seconds]": 1,
        "front": 7,
    }
    assert shows(registry, {f"schedule_{name}": value for name, value in expected.items()})


def test_loads_before_their_turn_are_shown(registry: CollectorRegistry) -> None:
    stats = ScheduleStats(loads=LoadCounts())
    metrics = Metrics(schedule_metrics(stats))
    stats.loads.started = 3
    metrics.update()
    stats.loads.started, stats.loads.used, stats.loads.wasted_bytes = 5, 4, 100
    metrics.update()
    expected = {"started": 5, "used": 4, "wasted_bytes": 100, "late": 0, "no_room": 0}
    assert shows(registry, {f"schedule_loads_{name}_total": n for name, n in expected.items()})
