"""Orders of the waiting queue, replayed on traces."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, TypeVar

import numpy as np

from scripts.bench.report import Table
from scripts.bench.traces import COST, ONE_MEMORY, TRACES, Folder, read_named
from sglang_hybrid.core.queue.orders import (
    AgedPrefix,
    Car,
    FirstCome,
    HighestResponseRatio,
    LongestPrefix,
    Order,
    Window,
)
from sglang_hybrid.core.queue.queue_order import QueueOrder
from sglang_hybrid.core.queue.waiting import Bound
from sglang_hybrid.replay.systems import Setting, Spec
from sglang_hybrid.serving.config import HybridConfig
from sglang_hybrid.simulation.prefill_time import PAPER
from sglang_hybrid.simulation.simulator import Cache, Simulator, hit_rate
from sglang_hybrid.simulation.tiers.tier_budgets import TierBudgets
from sglang_hybrid.simulation.timing import Timeline
from sglang_hybrid.simulation.traces.arrivals import Azure
from sglang_hybrid.simulation.traces.requests import Request

Item = TypeVar("Item")
Result = TypeVar("Result")
SIZES = {
    "taubench_airline": 10.0,
    "sharegpt_55": 4.0,
    "bbh_fewshot": 2.0,
    "claude_code_64k": 40.0,
    "mooncake_conversation_trace": 40.0,
}
"""GB, by trace."""

AZURE = "AzureLLMInferenceTrace_conv.csv.gz"
UNBOUNDED = Bound()
MILLISECOND = 0.001
WITH_GAPS = ("taubench_airline", "sharegpt_55", "claude_code_64k")
"""Traces of sessions."""


@dataclass(frozen=True)
class Row:
    """A trace with arrivals at one load, in a cache of so many bytes, or in tiers."""

    trace: str
    azure: bool
    load: float
    requests: Sequence[Request]
    memory: int
    tiers: bool = False
    seed: int = 0

    @property
    def cells(self) -> tuple[str, str, str]:
        return self.trace.split("_")[0], "Azure" if self.azure else "own", f"{self.load:g}"


@dataclass(frozen=True)
class Served:
    """What became of the requests of a row under one order. Seconds to the first token by
    percentile; tokens of prompts per second; the share of tokens hit.
    """

    p50: float
    p95: float
    p99: float
    worst: float
    tokens_per_second: float
    hit_rate: float
    most_overtaken: int


def orders() -> dict[str, tuple[Order, Bound]]:
    """By name. Only car and window are bounded."""
    default = HybridConfig()
    bound = Bound(default.hybrid_schedule_overtaken, default.hybrid_schedule_seconds)
    window = default.hybrid_schedule_window
    unbounded = (FirstCome(), LongestPrefix(), AgedPrefix(), HighestResponseRatio())
    bounded = (Car(window), Window(window))
    return {order.name: (order, UNBOUNDED) for order in unbounded} | {
        order.name: (order, bound) for order in bounded
    }


def cache_of(row: Row) -> Cache:
    if row.tiers:
        tiers = TierBudgets.of(row.memory // 10, row.memory, 8 * row.memory)
        speeds = tiers.speeds(COST, PAPER)
        setting = Setting(COST, None, row.requests, tiers=tiers, speeds=speeds)
    else:
        setting = Setting(COST, row.memory, row.requests, serving=ONE_MEMORY)
    cache: Cache = Spec("reuse").build(setting)
    return cache


def serve(row: Row, order: Order, bound: Bound) -> Served:
    timeline = Timeline(cache_of(row), PAPER, order=QueueOrder(order, bound))
    served = timeline.run(row.requests)
    ttft = np.array([one.ttft for one in served])
    tokens = sum(one.outcome.input_len for one in served)
    busy = max(one.first_token for one in served) - min(one.arrival for one in served)
    p50, p95, p99, worst = np.percentile(ttft, [50, 95, 99, 100]).tolist()
    return Served(
        *(p50, p95, p99, worst),
        tokens_per_second=tokens / busy,
        hit_rate=hit_rate(one.outcome for one in served),
        most_overtaken=timeline.queue.most_overtaken,
    )


def with_starts(requests: Sequence[Request], starts: Sequence[float]) -> list[Request]:
    """The same sessions, beginning at `starts`, with their own gaps."""
    first: dict[int, float] = {}
    for request in requests:
        first.setdefault(request.session, request.arrival)
    begin = dict(zip(first, starts, strict=False))
    moved = [
        replace(one, arrival=begin[one.session] + one.arrival - first[one.session])
        for one in requests
    ]
    return sorted(moved, key=lambda one: one.arrival)


def jittered(requests: Sequence[Request], seed: int) -> list[Request]:
    """The same sessions, beginning earlier or later by up to the mean time between two beginnings;
    as they are with seed 0.
    """
    first: dict[int, float] = {}
    for request in requests:
        first.setdefault(request.session, request.arrival)
    if not seed:
        return list(requests)
    starts = np.array(list(first.values()))
    mean = (starts.max() - starts.min()) / max(1, len(starts) - 1)
    moved = starts + np.random.default_rng(seed).uniform(-mean, mean, len(starts))
    return with_starts(requests, (moved - moved.min()).tolist())


def at_load(row: Row) -> Row:
    """`row` with its arrivals stretched to its load."""
    cache, work = cache_of(row), 0.0
    for request in row.requests:
        if row.tiers and isinstance(cache, Simulator):
            work += cache.to_load(request)[1]
        outcome = cache.serve(request)
        work += PAPER.seconds(outcome.hit_len, outcome.input_len - outcome.hit_len)
    first = row.requests[0].arrival
    factor = work / (row.load * (row.requests[-1].arrival - first))
    stretched = [replace(one, arrival=(one.arrival - first) * factor) for one in row.requests]
    return replace(row, requests=stretched)


def rows(
    folder: Path, loads: Sequence[float], most: int, seeds: int = 1, *, tiers: bool
) -> Iterator[Row]:
    """Of all traces, at most so many requests each."""
    for trace, gigabytes in SIZES.items():
        requests = read_named(folder, trace)[:most]
        arrivals = [False, True] if trace in WITH_GAPS else [False]
        for azure in arrivals:
            if azure:
                starts = Azure.read(folder / AZURE).arrivals
                requests = with_starts(requests, starts)
            for load, seed in product(loads, range(seeds)):
                memory, moved = int(gigabytes * 1e9), jittered(requests, seed)
                yield Row(trace, azure, load, moved, memory, tiers, seed)


def serve_row(row: Row) -> Orders:
    row = at_load(row)
    return {name: serve(row, order, bound) for name, (order, bound) in orders().items()}


Orders = dict[str, Served]
"""What became of one row with one seed, by the order's name."""


def met(order: str, served: Orders) -> dict[str, bool]:
    """Whether an order is as good as the best of SGLang's in each respect."""
    one, fcfs, lpm = served[order], served["fcfs"], served["lpm"]
    return {
        "P50": one.p50 < lpm.p50 + MILLISECOND,
        "P99": one.p99 < fcfs.p99 + MILLISECOND,
        "hits": one.hit_rate >= lpm.hit_rate - 0.005,
    }


def missed(seeds: Sequence[Orders], bound: Bound) -> str:
    """The aims that `window` misses, each with how many of the seeds."""
    aims = Counter(
        aim for served in seeds for aim, is_met in met("window", served).items() if not is_met
    )
    aims["bound"] = sum(served["window"].most_overtaken > bound.times for served in seeds)
    of = f" {{}}/{len(seeds)}" if len(seeds) > 1 else ""
    return ", ".join(aim + of.format(times) for aim, times in aims.items() if times)


def middle(ones: Sequence[Served]) -> Served:
    """The medians over the seeds, but for the most that a request was overtaken."""
    medians = {
        field.name: median(getattr(one, field.name) for one in ones) for field in fields(Served)
    }
    return Served(**medians | {"most_overtaken": max(one.most_overtaken for one in ones)})


def show(rows: Sequence[tuple[Row, Sequence[Orders]]]) -> None:
    """Print waits, then throughput and hits, then the orders over all rows."""
    names, (_, bound) = list(orders()), orders()["window"]
    middles = [
        (row, seeds, {name: middle([served[name] for served in seeds]) for name in names})
        for row, seeds in rows
    ]
    print("Seconds to the first token: P50 / P95 / P99 / worst\n")
    table = Table("trace", "arrivals", "load", *names, "misses", text=2)
    for row, seeds, served in middles:
        waits = [
            " / ".join(f"{seconds:.2f}" for seconds in (one.p50, one.p95, one.p99, one.worst))
            for one in served.values()
        ]
        table.row(*row.cells, *waits, missed(seeds, bound))
    print("\nTokens per second, hit rate\n")
    table = Table("trace", "arrivals", "load", *names, text=2)
    for row, _, served in middles:
        table.row(
            *row.cells,
            *(f"{one.tokens_per_second:,.0f}, {one.hit_rate:.1%}" for one in served.values()),
        )
    print("\nAll rows\n")
    table = Table(
        *("order", "P50 / lpm's", "P99 / fcfs's", "hit rate - lpm's", "P50 met", "P99 met"),
        *("hits met", "most overtaken"),
    )
    every = [served for _, seeds in rows for served in seeds]
    for name in names:
        table.row(
            name,
            f"{mean_ratio([served[name].p50 / served['lpm'].p50 for served in every]):.2f}",
            f"{mean_ratio([served[name].p99 / served['fcfs'].p99 for served in every]):.2f}",
            f"{np.mean([s[name].hit_rate - s['lpm'].hit_rate for s in every]):+.1%}",
            *(f"{mostly_met(name, aim, rows)} of {len(rows)}" for aim in ("P50", "P99", "hits")),
            max(served[name].most_overtaken for served in every),
        )


def mostly_met(order: str, aim: str, rows: Sequence[tuple[Row, Sequence[Orders]]]) -> int:
    """Rows in which most seeds meet an aim."""
    return sum(
        2 * sum(met(order, served)[aim] for served in seeds) > len(seeds) for _, seeds in rows
    )


def in_processes(
    work: Callable[[Item], Result], items: Sequence[Item], workers: int
) -> list[Result]:
    """`work` for all items in so many processes; results in their order."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context) as pool:
        return list(pool.map(work, items))


def mean_ratio(ratios: Sequence[float]) -> float:
    """The geometric mean."""
    return float(np.exp(np.mean(np.log(ratios))))


def schedule_replay(
    loads: tuple[float, ...] = (0.5, 0.8, 0.95, 1.1),
    requests: Annotated[int, "of each trace, at most"] = 1_000,
    traces: Folder = TRACES,
    workers: int = 2,
    seeds: Annotated[int, "times that each row is served"] = 1,
    tiers: Annotated[bool, "device, host and disk"] = False,
) -> None:
    """Orders of the waiting queue, replayed on traces: waits, throughput and hits.

    Requests are prefilled one after the other by the reuse index as served with one memory; times
    are the Marconi paper's fit. Arrivals are the trace's own; with --azure sessions begin when
    requests of Azure's conversation trace arrived, and the gaps within them are the trace's. A
    session's next request waits for the answer before. All times are stretched by one factor, so
    that the prefills, served one by one without a queue, would take the device for --loads of the
    time.

    Each row is served --seeds times. With all seeds but the first the sessions begin earlier or
    later, by up to the mean time between two beginnings, as a trace of another day might: what all
    seeds have in common is no accident of a few requests. Numbers are medians over the seeds.

    Seconds to the first token (P50 / P95 / P99 / worst), tokens of prompts per second, share of
    tokens hit. `misses`: what of its aims `window` misses in a row, and with how many of the seeds:
    P99 not above fcfs's, P50 not above lpm's (by a millisecond or more), a hit rate at most 0.5
    points below lpm's, and nobody overtaken more often than the bound says. The last table:
    geometric means over rows and seeds of P50 against lpm's and P99 against fcfs's, the mean
    difference of hit rates from lpm's, rows in which the order meets each of these with most of the
    seeds, and the most that a request was overtaken.

    With --tiers the device has a tenth of that memory, the host all of it and the disk eight times
    as much, by the paper's rules; a request waits for its load before its prefill.
    """
    asked = list(rows(traces, loads, requests, seeds, tiers=tiers))
    served = in_processes(serve_row, asked, workers)
    show([(asked[at], served[at : at + seeds]) for at in range(0, len(asked), seeds)])
