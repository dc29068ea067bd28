"""Loads from the host, replayed: started when a request has its turn, or so that they end then.

The host has the bytes that the device has in `schedule-replay`, the device a quarter;
`tiers-replay` has the rules, those of the paper. `never`: the device alone. Prefills run one after
the other, --places requests decode beside them; times are the Marconi paper's fit. Requests come as
in `schedule-replay`, in the order of `window`.

A request runs when a place is free and the device has room for it beside those that run.

`loads`: requests that had to load something; `no time`: of these, those that waited less than their
load takes; `no room`: those for which the device had none before their turn, beside running
requests and those with an earlier turn. `complete`: of the others, the share whose load was
complete at their turn. `in vain`: bytes loaded for requests that did not use them. Seconds to the
first token of all requests, P50 and mean.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np

from scripts.bench.report import Table
from scripts.bench.schedule_replay import Row, at_load, orders, rows
from scripts.bench.traces import add_traces
from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.queue.loads import LoadCounts
from sglang_hybrid.core.systems import Setting, Spec
from sglang_hybrid.core.tiers.rates import Tier
from sglang_hybrid.simulation.prefill_time import PAPER
from sglang_hybrid.simulation.simulator import Simulator
from sglang_hybrid.simulation.tiers.prefetching import Loading, LoadingServer
from sglang_hybrid.simulation.tiers.tier_budgets import BANDWIDTH, TierBudgets

COST = CostModel.paper_7b()
QUARTER = 4
"""Bytes of the host for each of the device."""


@dataclass(frozen=True)
class Found:
    """What loading did in one row."""

    moved: LoadCounts
    p50: float
    mean: float


def serve(job: tuple[Row, float, Loading | None, int]) -> Found:
    row, bandwidth, loading, places = job
    row = at_load(row)
    bandwidths = {Tier.HOST: bandwidth * 1e9, Tier.DISK: BANDWIDTH[Tier.DISK]}
    tiers = TierBudgets.of(row.memory // QUARTER, row.memory, 0, bandwidths)
    cache = cache_of(row, None if loading is None else tiers)
    it = LoadingServer(
        cache,
        tiers.links[Tier.HOST],
        PAPER,
        *orders()["window"],
        loading or Loading.ON_TURN,
        places,
    )
    served = it.run(row.requests)
    ttft = np.array([one.ttft for one in served])
    return Found(it.loads.counts, float(np.median(ttft)), float(ttft.mean()))


def cache_of(row: Row, tiers: TierBudgets | None) -> Simulator:
    """By the paper's rules, in tiers or on the device alone."""
    speeds = None if tiers is None else tiers.speeds(COST, PAPER)
    memory = row.memory // QUARTER if tiers is None else None
    setting = Setting(COST, memory, row.requests, tiers=tiers, speeds=speeds)
    cache: Simulator = Spec("reuse").build(setting)
    return cache


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--loads", type=float, nargs="+", default=[0.8])
    parser.add_argument("--requests", type=int, default=300, help="of each trace, at most")
    add_traces(parser)
    parser.add_argument("--bandwidths", type=float, nargs="+", default=[12, 25, 64], help="GB/s")
    parser.add_argument("--places", type=int, nargs="+", default=[16])
    parser.add_argument("--workers", type=int, default=2)


def run(options: argparse.Namespace) -> None:
    options.tiers, options.seeds = True, 1  # loads are of what a device with tiers has to do
    asked = [row for row in rows(options) if not row.azure]
    jobs = [
        (row, bandwidth, loading, places)
        for row in asked
        for bandwidth in options.bandwidths
        for places in options.places
        for loading in (None, *Loading)
    ]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, context) as pool:
        show(jobs, list(pool.map(serve, jobs)))


def show(jobs: Sequence[tuple[Row, float, Loading | None, int]], found: Sequence[Found]) -> None:
    table = Table(
        *("trace", "GB/s", "places", "loads start", "loads", "no time", "no room", "complete"),
        *("in vain", "P50", "mean"),
    )
    for (row, bandwidth, loading, places), one in zip(jobs, found, strict=True):
        moved, timed = one.moved, loading is Loading.TIMED
        share = "" if moved.complete is None else f"{moved.complete:.0%}"
        table.row(
            *(row.cells[0], f"{bandwidth:g}", places, loading.value if loading else "never"),
            *((moved.loads, moved.no_time) if moved.loads else ("", "")),
            *((moved.no_room, share, f"{moved.in_vain:.1%}") if timed else ("", share, "")),
            *(f"{one.p50:.3f}", f"{one.mean:.3f}"),
        )
