"""Counts, and the report of one request."""

from __future__ import annotations

import json
from types import SimpleNamespace

import msgspec

from sglang_hybrid.core.records.nodes import Kind
from sglang_hybrid.core.tiers.rates import Link
from sglang_hybrid.serving.telemetry.stats import CacheStats, Missed, RequestReport
from sglang_hybrid.serving.telemetry.tiers import TierStats


def test_a_report_says_what_was_hit_and_why_not_more() -> None:
    report = RequestReport(
        prompt_tokens=30, hit_tokens=10, kv_only_tokens=5, missed=Missed.NO_STATE
    )
    report.checkpoints.append((15, Kind.BRANCH))
    assert report.as_dict() == {
        "hit_tokens": 10,
        "kv_only_tokens": 5,
        "missed": "no_state",
        "checkpoints": [{"position": 15, "kind": "branch"}],
    }
    json.dumps(report.as_dict())


def test_totals_add_up_reports() -> None:
    stats = CacheStats()
    assert stats.as_dict()["hit_rate"] == 0.0
    stats.on_prefill(RequestReport(30, 10, 5, Missed.NO_STATE), flops_saved=100)
    stats.on_prefill(RequestReport(10, 0, 0, Missed.NOT_STORED), flops_saved=0)
    stats.admitted["branch"] += 2
    found = stats.as_dict()
    assert (found["requests"], found["prompt_tokens"], found["hit_tokens"]) == (2, 40, 10)
    assert (found["kv_only_tokens"], found["flops_saved"]) == (5, 100)
    assert found["hit_rate"] == 0.25
    assert found["checkpoints_admitted"] == {"branch": 2}
    json.dumps(found)


def test_what_is_handed_out_does_not_change_later() -> None:
    stats = CacheStats()
    stats.evicted["leaf"] += 1
    found = stats.as_dict()
    stats.evicted["leaf"] += 1
    assert found["evicted"] == {"leaf": 1}


def test_totals_of_years_can_be_sent() -> None:
    """SGLang's messages refuse integers beyond 64 bits."""
    stats = CacheStats()
    stats.on_prefill(RequestReport(30, 10, 5, Missed.NO_STATE), flops_saved=2**70)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats.as_dict()))["flops_saved"] == 2.0**70


def test_times_of_loads_are_seconds() -> None:
    """SGLang's events tell milliseconds."""
    events = {"start_event": SimpleNamespace(elapsed_time=lambda end: 1_500.0), "finish_event": 0}
    stats = TierStats()
    stats.on_load(SimpleNamespace(num_bytes=4_000, timing_enabled=True, **events), Link(1_000.0))
    assert (stats.load_seconds, stats.expected_seconds) == (1.5, 4.0)
    stats.on_load(SimpleNamespace(num_bytes=4_000, timing_enabled=False, **events), Link(1_000.0))
    assert (stats.loads, stats.loaded_bytes) == (2, 8_000)
    assert (stats.load_seconds, stats.expected_seconds) == (1.5, 4.0)
