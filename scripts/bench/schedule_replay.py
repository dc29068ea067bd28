"""Orders of the waiting queue, replayed on traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Annotated

import numpy as np

from scripts.bench.queue_rows import (
    Row,
    at_load,
    cache_of,
    in_processes,
    orders,
    rows,
)
from scripts.bench.report import Table
from scripts.bench.traces import TRACES, Folder
from sglang_hybrid.core.queue.orders import (
    Order,
)
from sglang_hybrid.core.queue.waiting import Bound
from sglang_hybrid.extensions.lab.simulation.prefill_time import PAPER
from sglang_hybrid.extensions.lab.simulation.simulator import hit_rate
from sglang_hybrid.extensions.lab.simulation.timing import Timeline

MILLISECOND = 0.001


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


def serve(row: Row, order: Order, bound: Bound) -> Served:
    timeline = Timeline([cache_of(row)], PAPER, order=order, bound=bound)
    served = timeline.run(row.requests)
    ttft = np.array([one.ttft for one in served])
    tokens = sum(one.outcome.input_len for one in served)
    busy = max(one.first_token for one in served) - min(one.arrival for one in served)
    p50, p95, p99, worst = np.percentile(ttft, [50, 95, 99, 100]).tolist()
    return Served(
        *(p50, p95, p99, worst),
        tokens_per_second=tokens / busy,
        hit_rate=hit_rate(one.outcome for one in served),
        most_overtaken=timeline.replicas[0].queue.most_overtaken,
    )


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
    are the Marconi paper's fit. Arrivals are the trace's own; in rows of Azure's, sessions begin
    when requests of its conversation trace arrived, and the gaps within them are the trace's. A
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
