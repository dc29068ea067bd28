"""How requests are routed to several servers, and what these share, replayed on traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from scripts.bench.queue_rows import SIZES, Row, at_load
from scripts.bench.report import Table
from scripts.bench.traces import COST, ONE_MEMORY, TRACES, Folder, read_named
from sglang_hybrid.extensions.lab.runner import Job, Result, Runner
from sglang_hybrid.extensions.lab.simulation.prefill_time import PAPER
from sglang_hybrid.extensions.lab.simulation.replicas import ROUTERS
from sglang_hybrid.extensions.lab.simulation.shared_store import StoreBudget
from sglang_hybrid.extensions.lab.systems import Spec

REUSE = Spec("reuse")

MOST_THAT_DIVIDE = 8
"""Servers among which the memory of `SIZES` is divided. More of them have as much as one of these,
since a smaller one would not hold one long prompt."""

STORE_TIMES = 4
"""Bytes of the store, by those that all servers have."""

COUNTS = {"default": [2, 8], "metavar": "N"}
ALL_COUNTS = {"default": [2, 8, 64], "metavar": "N"}
OfEach = Annotated[float, "load of each server, if all shared one cache"]


class Way(NamedTuple):
    """How requests are sent. routing: name of a router, which hears `late` seconds late of states.
    store_rate: of the store below all servers, as 3GB/s; "" if there is none.
    """

    routing: str
    late: float = 0.0
    store_rate: str = ""


def replicas(
    *counts: Annotated[int, COUNTS, "servers (2 and 8)"],
    traces: Folder = TRACES,
    load: OfEach = 0.3,
    workers: Annotated[int, "processes"] = 2,
) -> None:
    """What routers gain: traces at a load, replayed on servers that divide a memory.

    Each cell has the hit rate in percent, and the 95th percentile of the time to the first token in
    seconds, its wait in the queue included.
    """
    ways = {routing: Way(routing) for routing in ROUTERS}
    _print(counts, traces, load, workers, ways)


def shared_store(
    *counts: Annotated[int, ALL_COUNTS, "servers (2, 8 and 64)"],
    traces: Folder = TRACES,
    load: OfEach = 0.3,
    rate: Annotated[str, "bytes per second from the store to each server"] = "3GB",
    workers: Annotated[int, "processes"] = 2,
) -> None:
    """What one store for all servers gains, and what routers lose whose events are late.

    Cells are as those of `replicas`. The store has four times the memory of all servers.
    """
    ways = {"by_states": Way("by_states")}
    ways |= {f"{late} s late": Way("by_states", late=late) for late in (1, 10)}
    ways |= {
        f"{routing}, a store": Way(routing, store_rate=f"{rate}/s")
        for routing in ("by_states", "sticky", "cache_aware", "round_robin")
    }
    _print(counts, traces, load, workers, ways)


def _print(
    counts: Sequence[int], traces: Path, load: float, workers: int, ways: Mapping[str, Way]
) -> None:
    """A row for each trace and number of servers, and a column for each of `ways`."""
    table = Table("trace", "GB in all", "servers", *ways)
    for trace, gigabytes in SIZES.items():
        requests = read_named(traces, trace)
        for count in counts:
            of_each = int(gigabytes * 1e9) // min(count, MOST_THAT_DIVIDE)
            memory = of_each * count
            row = at_load(Row(trace, False, load * count, requests, memory))
            store = f"{STORE_TIMES * memory}@"
            jobs = [
                Job(
                    *(REUSE, trace, COST, of_each, PAPER),
                    serving=ONE_MEMORY,
                    replicas=count,
                    routing=way.routing,
                    late=way.late,
                    store=StoreBudget.parse(store + way.store_rate) if way.store_rate else None,
                )
                for way in ways.values()
            ]
            results = Runner({trace: row.requests}).run_all(jobs, workers)
            table.row(trace, f"{memory / 1e9:g}", count, *map(_cell, results))


def _cell(result: Result) -> str:
    return f"{100 * result.hit_rate:.1f} / {result.ttft_percentile(95):.2f}"
