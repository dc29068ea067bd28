"""Metrics that Prometheus reads."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from sglang_hybrid.core.memory.account import MemoryAccount, MemoryKind
from sglang_hybrid.core.queue.loads import LoadCounts
from sglang_hybrid.core.queue.waiting import Bound, Prospect, ReuseKind, Waiting
from sglang_hybrid.core.records.pins import Pins
from sglang_hybrid.core.returns.answer_models import AnswerModels
from sglang_hybrid.core.returns.answers import Answer
from sglang_hybrid.serving.telemetry.metric import Metrics
from sglang_hybrid.serving.telemetry.metrics import (
    answer_metrics,
    cache_metrics,
    memory_metrics,
    tier_metrics,
)
from sglang_hybrid.serving.telemetry.schedule import ScheduleStats, schedule_metrics
from sglang_hybrid.serving.telemetry.stats import CacheStats, Missed, RequestReport
from sglang_hybrid.serving.telemetry.tiers import TierStats

Shown = dict[str, float]
KV, STATES = MemoryKind


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


class Bytes(MemoryAccount):
    """One memory of 1,000 bytes."""

    budget, moves = 1_000, 0
    used = kept = moved = dict.fromkeys(MemoryKind, 0)

    def __init__(self) -> None:
        self.used, self.kept, self.moved = (dict.fromkeys(MemoryKind, 0) for _ in range(3))


class Cache:
    """A cache, as far as it is reported of."""

    def __init__(self, policy: str = "reuse", alpha: float | None = None, **tuner: float) -> None:
        self.stats = CacheStats()
        self.policy_name, self.alpha, self.tuner_counts = policy, alpha, tuner
        self.account = self.schedule_stats = self.answers = self.tier_stats = None
        self.pins: Pins | None = None
        self.recorded: dict[str, float] | None = None


def test_counters_follow_the_counts(registry: CollectorRegistry) -> None:
    cache = Cache()
    metrics = cache_metrics(cache)
    cache.stats.on_prefill(RequestReport(30, 10, 5, Missed.NO_STATE), 100, 0.25)
    cache.stats.admitted["branch"] += 1
    metrics.update()
    cache.stats.on_prefill(RequestReport(30, 20, 0, Missed.NOTHING), 300, 0.5)
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
            "saved_seconds_total": 0.75,
            "missed_requests_total[no_state]": 1,
            "missed_requests_total[nothing]": 1,
            "missed_tokens_total[no_state]": 20,
            "missed_tokens_total[nothing]": 10,
            "checkpoints_admitted_total[branch]": 1,
            "checkpoints_skipped_total[no_slot]": 2,
            "evicted_total[leaf]": 3,
            "policy[reuse]": 1,
        },
    )
    assert not {"alpha", "tuner_runs_total"} & shown(registry).keys()


def test_ranks_are_apart(registry: CollectorRegistry) -> None:
    """Two processes write files that one reads, with SGLang's label for the rank."""
    cache = Cache()
    cache.stats.admitted["branch"] = 3
    cache_metrics(cache, {"model_name": "m", "dp_rank": "1"})
    assert shows(
        registry,
        {
            "requests_total[m][1]": 0,
            "checkpoints_admitted_total[m][1][branch]": 3,
            "policy[m][1][reuse]": 1,
        },
    )


def test_pins_and_what_is_recorded_are_shown(registry: CollectorRegistry) -> None:
    cache = Cache()
    cache.pins = pins = Pins()
    cache.recorded = {"written": 5, "left_out": 2}
    pins.counts["refused"] += 3
    cache_metrics(cache)
    assert shows(
        registry,
        {
            "pins": 0,
            "pinned_bytes": 0,
            "pin_events_total[refused]": 3,
            "pin_events_total[evicted]": 0,
            "recorded_requests_total[left_out]": 2,
        },
    )


def test_names_and_help_are_as_prometheus_asks(registry: CollectorRegistry) -> None:
    """The rules are those of `promtool check metrics`, but for the colon of SGLang's names."""
    cache: Any = Cache(runs=1, failures=0, seconds=0.5, switches=0, taken_back=0, regret_tokens=0)
    cache.stats.admitted["a"] = cache.stats.skipped["a"] = cache.stats.evicted["a"] = 1
    cache.stats.on_prefill(RequestReport(30, 10, 5, Missed.NO_STATE), 100)
    cache.account, cache.answers, cache.tier_stats = Bytes(), AnswerModels(), TierStats()
    cache.schedule_stats = ScheduleStats(loads=LoadCounts())
    cache.schedule_stats.started["nothing"] = cache.schedule_stats.bound_reached["seconds"] = 1
    cache.pins, cache.recorded = Pins(), {"written": 5}
    cache_metrics(cache, {"model_name": "m", "dp_rank": "1"})
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    ours = [family for family in families if not family.name.endswith("_created")]
    assert len(ours) > 50
    for family in ours:
        assert family.type in ("counter", "gauge"), family.name
        assert family.documentation.endswith("."), family.name
        words = family.name.removesuffix("_total").removeprefix("sglang_hybrid:").split("_")
        assert not {"ms", "us", "kb", "mb", "gb", "counter", "gauge"} & {*words}
        for unit in ("seconds", "bytes"):
            tells = family.documentation.lower().startswith(unit)
            assert (words[-1] == unit) == tells, family.name
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter"), sample.name
            assert (sample.labels["model_name"], sample.labels["dp_rank"]) == ("m", "1")


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
    account = Bytes()
    metrics = Metrics(memory_metrics(account))
    account.used, account.kept = {KV: 0, STATES: 300}, {KV: 0, STATES: 500}
    metrics.update()
    account.moves, account.moved = 1, {KV: 400, STATES: 0}
    account.kept = {KV: 500, STATES: 100}
    metrics.update()
    metrics.update()
    assert shows(
        registry,
        {
            "memory_bytes[states][used]": 300,
            "memory_bytes[states][kept]": 100,
            "memory_bytes[kv][kept]": 500,
            "memory_free_bytes": 700,
            "memory_moved_bytes_total[kv]": 400,
            "memory_moved_bytes_total[states]": 0,
            "memory_moves_total": 1,
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
        "longest_wait_seconds": 70,
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
