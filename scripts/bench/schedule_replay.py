"""Orders of the waiting queue, replayed on traces: waits, throughput and hits.

Requests are prefilled one after the other by the reuse index as served with one memory; times are
the Marconi paper's fit. Arrivals are the trace's own; with --azure sessions begin when requests of
Azure's conversation trace arrived, and the gaps within them are the trace's. A session's next
request waits for the answer before. All times are stretched by one factor, so that the prefills,
served one by one without a queue, would take the device for --loads of the time.

The table has, for each row, what every order did. `window` meets its aims where its P99 is not
above fcfs's, its P50 not above lpm's, its hit rate at most 0.5 points below lpm's, and nobody was
overtaken more often than the bound says. P50, P95, P99, worst: seconds to the first token.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from scripts.bench.report import Table
from scripts.bench.traces import TRACES, read_named
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.core.cost import CostModel
from sglang_hybrid.core.orders import (
    AgedPrefix,
    Car,
    FirstCome,
    HighestResponseRatio,
    LongestPrefix,
    Order,
    Window,
)
from sglang_hybrid.core.queue_order import QueueOrder
from sglang_hybrid.core.serving import Serving
from sglang_hybrid.core.waiting import Bound
from sglang_hybrid.replay.arrivals import Azure
from sglang_hybrid.replay.simulator import Cache, hit_rate
from sglang_hybrid.replay.systems import Setting, Spec
from sglang_hybrid.replay.timing import PAPER, Timeline
from sglang_hybrid.replay.traces import Request

COST = CostModel.paper_7b()
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
WITH_GAPS = ("taubench_airline", "sharegpt_55", "claude_code_64k")
"""Traces of sessions."""


@dataclass(frozen=True)
class Row:
    """A trace with arrivals at one load, in a cache of so many bytes."""

    trace: str
    azure: bool
    load: float
    requests: Sequence[Request]
    memory: int


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
    serving = Serving(one_memory=True)
    return Spec("reuse").build(Setting(COST, row.memory, row.requests, serving=serving))


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


def at_load(row: Row) -> Row:
    """`row` with its arrivals stretched to its load."""
    cache, work = cache_of(row), 0.0
    for request in row.requests:
        outcome = cache.serve(request)
        work += PAPER.seconds(outcome.hit_len, outcome.input_len - outcome.hit_len)
    first = row.requests[0].arrival
    factor = work / (row.load * (row.requests[-1].arrival - first))
    stretched = [replace(one, arrival=(one.arrival - first) * factor) for one in row.requests]
    return replace(row, requests=stretched)


def rows(options: argparse.Namespace) -> Iterator[Row]:
    for trace, gigabytes in SIZES.items():
        requests = read_named(options.traces, trace)[: options.requests]
        arrivals = [False, True] if trace in WITH_GAPS else [False]
        for azure in arrivals:
            if azure:
                starts = Azure.read(options.traces / AZURE).arrivals
                requests = with_starts(requests, starts)
            for load in options.loads:
                yield Row(trace, azure, load, requests, int(gigabytes * 1e9))


def serve_row(row: Row) -> dict[str, Served]:
    row = at_load(row)
    return {name: serve(row, order, bound) for name, (order, bound) in orders().items()}


def missed(served: dict[str, Served], bound: Bound) -> list[str]:
    """The aims that `window` misses."""
    window, fcfs, lpm = served["window"], served["fcfs"], served["lpm"]
    met = {
        "P99": window.p99 <= fcfs.p99,
        "P50": window.p50 <= lpm.p50,
        "hits": window.hit_rate >= lpm.hit_rate - 0.005,
        "bound": window.most_overtaken <= bound.times,
    }
    return [aim for aim, is_met in met.items() if not is_met]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8, 0.95, 1.1])
    parser.add_argument("--requests", type=int, default=2_000, help="of each trace, at most")
    parser.add_argument("--traces", type=Path, default=TRACES, help="the folder they are in")
    parser.add_argument("--workers", type=int, default=2)


def run(options: argparse.Namespace) -> None:
    table = Table(
        *("trace", "arrivals", "load", "order", "P50", "P95", "P99", "worst", "tokens/s"),
        *("hit rate", "most overtaken", "misses"),
        text=4,
    )
    _, bound = orders()["window"]
    aims: dict[str, int] = {}
    count = 0
    context = multiprocessing.get_context("spawn")
    asked = list(rows(options))
    with ProcessPoolExecutor(options.workers, context) as pool:
        for row, served in zip(asked, pool.map(serve_row, asked), strict=True):
            count += 1
            for aim in missed(served, bound):
                aims[aim] = aims.get(aim, 0) + 1
            for name, one in served.items():
                table.row(
                    *(row.trace.split("_")[0], "Azure" if row.azure else "own", f"{row.load:g}"),
                    *(name, f"{one.p50:.2f}", f"{one.p95:.2f}", f"{one.p99:.2f}"),
                    *(f"{one.worst:.2f}", f"{one.tokens_per_second:,.0f}", f"{one.hit_rate:.1%}"),
                    one.most_overtaken,
                    ", ".join(missed(served, bound)) if name == "window" else "",
                )
    print(f"\n`window` misses, of {count} rows: ", end="")
    print(", ".join(f"{aim} in {times}" for aim, times in sorted(aims.items())) or "nothing")
