"""What Prometheus reads. Metrics are registered once per process, so each test takes its own."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

READ = """
import json
from prometheus_client import REGISTRY
from sglang_hybrid.serving.telemetry.metric import Metrics
from sglang_hybrid.serving.telemetry.metrics import cache_metrics
from sglang_hybrid.serving.telemetry.stats import CacheStats, Missed, RequestReport

class Cache:
    stats = CacheStats()
    policy_name = {policy!r}
    alpha = {alpha!r}
    tuner_counts = {tuner!r}
    account = None
    schedule_stats = None
    calibration = None
    tier_stats = None

cache = Cache()
metrics = cache_metrics(cache)
{steps}
print(json.dumps({{
    sample.name + "".join(f"[{{value}}]" for value in sample.labels.values()): sample.value
    for family in REGISTRY.collect()
    for sample in family.samples
    if sample.name.startswith("sglang_hybrid:") and not sample.name.endswith("_created")
}}))
"""


def read(
    steps: str,
    policy: str = "reuse",
    alpha: float | None = None,
    tuner: dict[str, float] | None = None,
) -> dict[str, float]:
    code = READ.format(steps=steps, policy=policy, alpha=alpha, tuner=tuner or {})
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def test_counters_follow_the_counts() -> None:
    found = read("""
cache.stats.on_prefill(RequestReport(30, 10, 5, Missed.NO_STATE), 100)
cache.stats.admitted["branch"] += 1
metrics.update()
cache.stats.on_prefill(RequestReport(30, 20, 0, Missed.NOTHING), 300)
cache.stats.skipped["no_slot"] += 2
cache.stats.evicted["leaf"] += 3
metrics.update()
metrics.update()
""")
    assert found["sglang_hybrid:requests_total"] == 2
    assert found["sglang_hybrid:prompt_tokens_total"] == 60
    assert found["sglang_hybrid:hit_tokens_total"] == 30
    assert found["sglang_hybrid:kv_only_tokens_total"] == 5
    assert found["sglang_hybrid:flops_saved_total"] == 400
    assert found["sglang_hybrid:checkpoints_admitted_total[branch]"] == 1
    assert found["sglang_hybrid:checkpoints_skipped_total[no_slot]"] == 2
    assert found["sglang_hybrid:evicted_total[leaf]"] == 3
    assert found["sglang_hybrid:policy[reuse]"] == 1
    assert "sglang_hybrid:alpha" not in found
    assert "sglang_hybrid:tuner_runs_total" not in found


def test_alpha_is_shown_where_there_is_one() -> None:
    found = read("", policy="marconi", alpha=2.5)
    assert found["sglang_hybrid:alpha"] == 2.5
    assert found["sglang_hybrid:policy[marconi]"] == 1


def test_a_switch_is_shown() -> None:
    steps = """
cache.policy_name, cache.alpha = "marconi", 3.0
cache.tuner_counts.update(runs=2, seconds=1.5, switches=1)
metrics.update()
cache.policy_name, cache.alpha = "lru", None
metrics.update()
"""
    found = read(steps, tuner={"runs": 1, "failures": 0, "seconds": 0.5, "switches": 0})
    policies = [found[f"sglang_hybrid:policy[{name}]"] for name in ("reuse", "marconi", "lru")]
    assert policies == [0, 0, 1]
    assert math.isnan(found["sglang_hybrid:alpha"])
    assert found["sglang_hybrid:tuner_runs_total"] == 2
    assert found["sglang_hybrid:tuner_seconds_total"] == 1.5
    assert found["sglang_hybrid:tuner_switches_total"] == 1
    assert found["sglang_hybrid:tuner_failures_total"] == 0


def test_one_memory_is_shown() -> None:
    found = read("""
from sglang_hybrid.core.memory.account import Account, MemoryKind as Kind
from sglang_hybrid.serving.telemetry.metrics import memory_metrics
account = Account(1_000)
account.join(Kind.STATES, lambda wanted: account.on_release(Kind.STATES, 400) or 400)
shown = Metrics(memory_metrics(account))
account.claim(Kind.STATES, 800)
account.charge(Kind.STATES, used=250, waste=50, kept=-300)
shown.update()
account.claim(Kind.KV, 500)
shown.update()
shown.update()
""")
    assert found["sglang_hybrid:memory_bytes[states][used]"] == 250
    assert found["sglang_hybrid:memory_bytes[states][waste]"] == 50
    assert found["sglang_hybrid:memory_bytes[states][kept]"] == 100
    assert found["sglang_hybrid:memory_bytes[kv][kept]"] == 500
    assert found["sglang_hybrid:memory_free_bytes"] == 700
    assert found["sglang_hybrid:memory_moved_bytes_total[kv]"] == 400
    assert found["sglang_hybrid:memory_moved_bytes_total[states]"] == 0
    assert found["sglang_hybrid:memory_moves_total"] == 1
    assert found["sglang_hybrid:memory_state[balanced]"] == 1
    assert found["sglang_hybrid:memory_state[kv_short]"] == 0


def test_what_was_expected_of_answers_is_shown() -> None:
    found = read("""
from sglang_hybrid.core.returns.answers import Answer, Calibration
from sglang_hybrid.serving.telemetry.metrics import answer_metrics
seen = Calibration()
shown = Metrics(answer_metrics(seen))
for expected, returned in ((None, True), (0.9, True), (0.95, False), (0.1, False)):
    answer = Answer([], 0.0, 0.5, None, expected, returned=returned)
    seen.judge(answer)
seen.judge(answer, -1)
shown.update()
""")
    assert found["sglang_hybrid:answers[nothing][yes]"] == 1
    assert found["sglang_hybrid:answers[likely][yes]"] == 1
    assert found["sglang_hybrid:answers[likely][no]"] == 1
    assert found["sglang_hybrid:answers[unlikely][no]"] == 0
    assert abs(found["sglang_hybrid:answers_expected_returns[likely]"] - 1.85) < 1e-9
    assert "sglang_hybrid:answers_expected_returns[nothing]" not in found


def test_tiers_are_shown() -> None:
    found = read("""
from sglang_hybrid.serving.telemetry.tiers import TierStats, tier_metrics
stats = TierStats(token_bytes=10, state_bytes=1_000)
shown = Metrics(tier_metrics(stats))
stats.on_write(tokens=7, states=2)
shown.update()
stats.loads += 3
stats.hit_tokens["host"] += 64
shown.update()
shown.update()
""")
    assert found["sglang_hybrid:tier_written_bytes_total"] == 2_070
    assert found["sglang_hybrid:tier_loads_total"] == 3
    assert found["sglang_hybrid:tier_hit_tokens_total[host]"] == 64


def test_the_queue_is_shown() -> None:
    found = read("""
from sglang_hybrid.core.queue.waiting import Bound, Prospect, ReuseKind, Waiting
from sglang_hybrid.serving.telemetry.schedule import ScheduleStats, schedule_metrics
stats = ScheduleStats(front=7)
shown = Metrics(schedule_metrics(stats))
hit = Prospect(90, 1.0, 10.0, ReuseKind.ON_DEVICE)
stats.on_start(Waiting("a", 1, 10.0, prospect=hit), Bound(3, 60.0), 12.0)
shown.update()
stats.on_start(Waiting("b", 2, 10.0, overtaken=3), Bound(3, 60.0), 14.0)
stats.on_start(Waiting("c", 3, 10.0, overtaken=1), Bound(3, 60.0), 80.0)
shown.update()
shown.update()
""")
    assert found["sglang_hybrid:schedule_started_total[on_device]"] == 1
    assert found["sglang_hybrid:schedule_started_total[nothing]"] == 2
    assert found["sglang_hybrid:schedule_overtaken_total"] == 4
    assert found["sglang_hybrid:schedule_most_overtaken"] == 3
    assert found["sglang_hybrid:schedule_waited_seconds_total"] == 76
    assert found["sglang_hybrid:schedule_longest_wait"] == 70
    assert found["sglang_hybrid:schedule_bound_reached_total[overtaken]"] == 1
    assert found["sglang_hybrid:schedule_bound_reached_total[seconds]"] == 1
    assert found["sglang_hybrid:schedule_front"] == 7


def test_loads_before_their_turn_are_shown() -> None:
    found = read("""
from sglang_hybrid.core.queue.loads import LoadCounts
from sglang_hybrid.serving.telemetry.schedule import ScheduleStats, schedule_metrics
stats = ScheduleStats(loads=LoadCounts())
shown = Metrics(schedule_metrics(stats))
stats.loads.started = 3
shown.update()
stats.loads.started, stats.loads.used, stats.loads.wasted_bytes = 5, 4, 100
shown.update()
""")
    assert found["sglang_hybrid:schedule_loads_started_total"] == 5
    assert found["sglang_hybrid:schedule_loads_used_total"] == 4
    assert found["sglang_hybrid:schedule_loads_wasted_bytes_total"] == 100
    assert found["sglang_hybrid:schedule_loads_late_total"] == 0
    assert found["sglang_hybrid:schedule_loads_no_room_total"] == 0
