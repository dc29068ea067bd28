"""Loads from the host, replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from scripts.bench.queue_rows import Row, at_load, in_processes, orders, rows
from scripts.bench.report import Table
from scripts.bench.traces import COST, TRACES, Folder
from sglang_hybrid.core.queue.loads import LoadCounts
from sglang_hybrid.core.systems import Setting, Spec
from sglang_hybrid.core.tiers.rates import Tier
from sglang_hybrid.extensions.lab.simulation.prefill_time import PAPER
from sglang_hybrid.extensions.lab.simulation.simulator import Simulator
from sglang_hybrid.extensions.lab.simulation.tiers.prefetching import Loading, LoadingServer
from sglang_hybrid.extensions.lab.simulation.tiers.tier_budgets import BANDWIDTH, TierBudgets

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


def prefetch(
    loads: tuple[float, ...] = (0.8,),
    requests: Annotated[int, "of each trace, at most"] = 300,
    traces: Folder = TRACES,
    bandwidths: Annotated[tuple[float, ...], "GB/s"] = (12, 25, 64),
    places: tuple[int, ...] = (16,),
    workers: int = 2,
) -> None:
    """Loads from the host, replayed: started when a request has its turn, or so that they end then.

    The host has the bytes that the device has in `schedule-replay`, the device a quarter;
    `tiers-replay` has the rules, those of the paper. `never`: the device alone. Prefills run one
    after the other, --places requests decode beside them; times are the Marconi paper's fit.
    Requests come as in `schedule-replay`, in the order of `window`.

    A request runs when a place is free and the device has room for it beside those that run.

    `loads`: requests that had to load something; `no time`: of these, those that waited less than
    their load takes; `no room`: those for which the device had none before their turn, beside
    running requests and those with an earlier turn. `complete`: of the others, the share whose load
    was complete at their turn. `in vain`: bytes loaded for requests that did not use them. Seconds
    to the first token of all requests, P50 and mean.
    """
    # Loads are of what a device with tiers has to do.
    asked = [row for row in rows(traces, loads, requests, tiers=True) if not row.azure]
    jobs = [
        (row, bandwidth, loading, count)
        for row in asked
        for bandwidth in bandwidths
        for count in places
        for loading in (None, *Loading)
    ]
    show(jobs, in_processes(serve, jobs, workers))


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
