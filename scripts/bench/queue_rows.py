"""Traces as a waiting queue sees them: their arrivals, at a load, and the orders of the queue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TypeVar

import numpy as np

from scripts.bench.traces import COST, ONE_MEMORY, read_named
from sglang_hybrid.core.queue.orders import (
    AgedPrefix,
    Car,
    FirstCome,
    HighestResponseRatio,
    LongestPrefix,
    Order,
    Window,
)
from sglang_hybrid.core.queue.waiting import Bound
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.lab.simulation.prefill_time import PAPER
from sglang_hybrid.extensions.lab.simulation.simulator import Cache, Simulator
from sglang_hybrid.extensions.lab.simulation.tiers.tier_budgets import TierBudgets
from sglang_hybrid.extensions.lab.simulation.traces.arrivals import Azure
from sglang_hybrid.extensions.lab.simulation.workers import run_all
from sglang_hybrid.extensions.lab.systems import Setting, Spec
from sglang_hybrid.serving.config import HybridConfig

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


def in_processes(
    work: Callable[[Item], Result], items: Sequence[Item], workers: int
) -> list[Result]:
    """`work` for all items in so many processes; results in their order."""
    return run_all(apply, work, items, workers)


def apply(work: Callable[[Item], Result], item: Item, count_step: Callable[[], None]) -> Result:
    return work(item)
