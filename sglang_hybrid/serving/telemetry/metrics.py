"""Prometheus metrics of the cache, beside SGLang's own (`--enable-metrics`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from sglang_hybrid.core.records.pins import PIN_EVENTS
from sglang_hybrid.serving.telemetry.metric import Metric, Metrics
from sglang_hybrid.serving.telemetry.schedule import schedule_metrics
from sglang_hybrid.serving.telemetry.stats import Missed

if TYPE_CHECKING:
    from sglang_hybrid.cache.report import CacheReport
    from sglang_hybrid.core.memory.account import MemoryAccount
    from sglang_hybrid.core.records.pins import Pins
    from sglang_hybrid.core.returns.answer_models import AnswerModels
    from sglang_hybrid.serving.telemetry.tiers import TierStats

PREFIX = "sglang_hybrid:"
TIER_PREFIX = PREFIX + "tier_"

TOTALS = {
    "requests": "Requests whose prefill began.",
    "prompt_tokens": "Prompt tokens of those requests.",
    "hit_tokens": "Prompt tokens that were not prefilled.",
    "inexact_hit_tokens": "Of these, tokens from smaller copies or behind such: not exact.",
    "kv_only_tokens": "Prompt tokens whose KV was stored but lay behind the deepest state.",
    "flops_saved": "FLOPs that hits made unnecessary.",
    "saved_seconds": "Seconds of prefill that hits made unnecessary, at the measured rate.",
}
"""Counters: attributes of `CacheStats`."""

NO_MISSES = dict.fromkeys((reason.value for reason in Missed), 0)
"""Each reason has its series from the start."""

TUNER = {
    "runs": "Comparisons of policies on recorded requests.",
    "failures": "Worker processes that did not end well.",
    "seconds": "Seconds that comparisons took.",
    "switches": "Changes of the policy in force.",
    "taken_back": "Changes that a later comparison undid.",
    "regret_tokens": "Tokens that the policy in force missed against the best one.",
}
"""Counters of the tuner, those that it has."""

TIER_TOTALS = {
    "written_bytes": "Bytes copied to the host.",
    "written_states": "States copied to the host.",
    "not_written": "Nodes that were not worth their copy.",
    "offloaded": "Nodes that were copied before the device gave them up.",
    "demoted": "Nodes that the device gave up and the host kept.",
    "loads": "Transfers from the host.",
    "loaded_bytes": "Bytes of these transfers.",
    "load_seconds": "Seconds that these transfers took.",
    "expected_seconds": "Seconds that they were expected to take.",
    "loaded_requests": "Requests that resumed from the host.",
    "failed_loads": "Requests that could not, and computed.",
}
"""Counters: attributes of `TierStats`."""

EXPECTED = ("nothing", "unlikely", "possible", "likely")
"""Names of the buckets of `Answer.bucket`."""


def rank_labels() -> dict[str, str]:
    """The labels of SGLang's own metrics of a scheduler, in the process of one: the model's name
    and the ranks (observability/metrics_collector.py, SchedulerMetricsCollector.init_new), and
    those of --extra-metric-labels.
    """
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.runtime_context import get_disagg, get_observability, get_parallel, get_serving

    parallel, disagg = get_parallel(), get_disagg()
    mode = disagg.disaggregation_mode
    kind = "dynamic" if disagg.enable_pd_role_switch else DisaggregationMode.to_engine_type(mode)
    labels = {"model_name": get_serving().served_model_name, "engine_type": kind}
    labels |= {name: getattr(parallel, name) for name in ("tp_rank", "pp_rank", "moe_ep_rank")}
    if parallel.dp_rank is not None:
        labels["dp_rank"] = parallel.dp_rank
    labels |= get_observability().extra_metric_labels or {}
    return {name: str(value) for name, value in labels.items()}


def cache_metrics(cache: CacheReport, labels: Mapping[str, str] = MappingProxyType({})) -> Metrics:
    """All metrics of one cache, with these labels; `update` brings them up to its counts."""
    metrics = [*_totals(cache), *_policy(cache)]
    if cache.answers is not None:
        metrics += answer_metrics(cache.answers)
    if cache.account is not None:
        metrics += memory_metrics(cache.account)
    if cache.tier_stats is not None:
        metrics += tier_metrics(cache.tier_stats)
    if cache.schedule_stats is not None:
        metrics += schedule_metrics(cache.schedule_stats)
    if cache.pins is not None:
        metrics += pin_metrics(cache.pins)
    if cache.recorded is not None:
        metrics.append(_recorded(cache))
    return Metrics(metrics, labels)


def _totals(cache: CacheReport) -> Iterator[Metric]:
    stats = cache.stats
    for name, about in TOTALS.items():
        yield Metric(PREFIX + name, about, partial(getattr, stats, name))
    yield Metric(
        PREFIX + "checkpoints_admitted",
        "States put into the tree.",
        lambda: stats.admitted,
        ("reason",),
    )
    yield Metric(
        PREFIX + "checkpoints_skipped",
        "States not put into the tree.",
        lambda: stats.skipped,
        ("reason",),
    )
    yield Metric(
        PREFIX + "evicted", "Evictions by what was taken.", lambda: stats.evicted, ("kind",)
    )
    yield Metric(
        PREFIX + "missed_requests",
        "Requests whose prefill began, by why their hit was not longer.",
        lambda: NO_MISSES | stats.missed_requests,
        ("reason",),
    )
    yield Metric(
        PREFIX + "missed_tokens",
        "Prompt tokens that were prefilled, by why the hit was not longer.",
        lambda: NO_MISSES | stats.missed_tokens,
        ("reason",),
    )
    for name, about in TUNER.items():
        if name in cache.tuner_counts:
            read = partial(lambda name: cache.tuner_counts[name], name)
            yield Metric(f"{PREFIX}tuner_{name}", about, read)


def _policy(cache: CacheReport) -> Iterator[Metric]:
    """The policy in force, and its alpha; that of a policy without one is not a number."""
    in_force: dict[str, float] = {}
    alphas: list[float] = []

    def policy() -> Mapping[str, float]:
        in_force.update(dict.fromkeys(in_force, 0.0))
        in_force[cache.policy_name] = 1.0
        return in_force

    def alpha() -> float | None:
        if cache.alpha is not None:
            alphas[:] = [cache.alpha]
        return math.nan if alphas and cache.alpha is None else cache.alpha

    about = "1 for the eviction policy in force."
    yield Metric(PREFIX + "policy", about, policy, ("policy",), is_gauge=True)
    yield Metric(PREFIX + "alpha", "Marconi's alpha in force.", alpha, is_gauge=True)


def answer_metrics(models: AnswerModels) -> Iterator[Metric]:
    """Expectations of answers, against what happened: gauges, since an answer that was given up may
    be returned to after all. And how many tenants' models there are, and what was forgotten of them
    where memory was short.
    """
    seen = models.calibration

    def answers() -> Mapping[tuple[str, str], float]:
        returned = {(name, "yes"): seen.returned[at] for at, name in enumerate(EXPECTED)}
        return returned | {(name, "no"): seen.given_up[at] for at, name in enumerate(EXPECTED)}

    yield Metric(
        PREFIX + "answers",
        "Answers that somebody came back to, or did not in the usual time, by what was "
        "expected of them (a return is unlikely, possible, likely; nothing was expected).",
        answers,
        ("expected", "returned"),
        is_gauge=True,
    )
    yield Metric(
        PREFIX + "answers_expected_returns",
        "The sum of the probabilities of a return of the same answers: calibrated where it is "
        "near the number of those that were returned to.",
        lambda: dict(zip(EXPECTED[1:], seen.expected[1:], strict=True)),
        ("expected",),
        is_gauge=True,
    )
    about = "Tenants of whose answers something is kept."
    yield Metric(PREFIX + "answers_tenants", about, lambda: len(models), is_gauge=True)
    yield Metric(
        PREFIX + "answers_forgotten",
        "Times that memory for answers was short: half of what was learnt of a tenant was "
        "forgotten (halved), or all of it (dropped).",
        lambda: models.counts,
        ("part",),
    )


def tier_metrics(stats: TierStats) -> Iterator[Metric]:
    """Metrics of transfers between the device and the host."""
    for name, about in TIER_TOTALS.items():
        yield Metric(TIER_PREFIX + name, about, partial(getattr, stats, name))
    about = "Prompt tokens that were not prefilled."
    yield Metric(TIER_PREFIX + "hit_tokens", about, lambda: stats.hit_tokens, ("tier",))


def pin_metrics(pins: Pins) -> Iterator[Metric]:
    """Metrics of the pins of clients."""
    about = "Positions that are pinned."
    yield Metric(PREFIX + "pins", about, lambda: len(pins), is_gauge=True)
    about = "Bytes of the states and the KV that are pinned."
    yield Metric(PREFIX + "pinned_bytes", about, lambda: pins.held_bytes, is_gauge=True)
    yield Metric(
        PREFIX + "pin_events",
        "Pins that were made (pinned), refused, pushed out by another one (gave_way), expired, or "
        "evicted.",
        lambda: {name: pins.counts[name] for name in PIN_EVENTS},
        ("event",),
    )


def _recorded(cache: CacheReport) -> Metric:
    return Metric(
        PREFIX + "recorded_requests",
        "Requests that ended, by whether the file of --hybrid-record has them (written) or not "
        "(left_out).",
        lambda: cache.recorded,
        ("outcome",),
    )


def memory_metrics(account: MemoryAccount) -> Iterator[Metric]:
    """One memory: which kind has its bytes, and which were moved."""
    prefix = PREFIX + "memory_"

    def sizes() -> dict[tuple[str, str], float]:
        return {
            (kind.value, part): size
            for part in ("used", "kept")
            for kind, size in getattr(account, part).items()
        }

    yield Metric(
        prefix + "bytes",
        "Bytes that a kind uses, or keeps for its next use.",
        sizes,
        ("kind", "part"),
        is_gauge=True,
    )
    about = "Bytes that nobody uses."
    yield Metric(prefix + "free_bytes", about, lambda: account.free, is_gauge=True)
    yield Metric(
        prefix + "moved_bytes",
        "Bytes that a kind got from the other one.",
        lambda: {kind.value: size for kind, size in account.moved.items()},
        ("kind",),
    )
    about = "Times that one kind gave bytes to the other."
    yield Metric(prefix + "moves", about, lambda: account.moves)
