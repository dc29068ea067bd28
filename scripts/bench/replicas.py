"""How requests are routed to several servers, replayed on traces."""

from __future__ import annotations

from typing import Annotated

from scripts.bench.queue_rows import SIZES, Row, at_load
from scripts.bench.report import Table
from scripts.bench.traces import COST, ONE_MEMORY, TRACES, Folder, read_named
from sglang_hybrid.replay.runner import Job, Runner
from sglang_hybrid.replay.simulation.prefill_time import PAPER
from sglang_hybrid.replay.simulation.replicas import ROUTERS
from sglang_hybrid.replay.systems import Spec

REUSE = Spec("reuse")


def replicas(
    *counts: Annotated[int, {"default": [2, 8], "metavar": "N"}, "servers (2 and 8)"],
    traces: Folder = TRACES,
    load: Annotated[float, "of each server, if all shared one cache"] = 0.3,
    workers: Annotated[int, "processes"] = 2,
) -> None:
    """What routers gain: traces at a load, replayed on servers that divide a memory.

    Each cell has the hit rate in percent, and the 95th percentile of the time to the first token in
    seconds, its wait in the queue included.
    """
    table = Table("trace", "GB in all", "servers", *ROUTERS)
    for trace, gigabytes in SIZES.items():
        requests, memory = read_named(traces, trace), int(gigabytes * 1e9)
        for count in counts:
            row = at_load(Row(trace, False, load * count, requests, memory))
            jobs = [
                Job(
                    REUSE,
                    trace,
                    COST,
                    memory // count,
                    PAPER,
                    serving=ONE_MEMORY,
                    replicas=count,
                    routing=routing,
                )
                for routing in ROUTERS
            ]
            results = Runner({trace: row.requests}).run_all(jobs, workers)
            cells = (
                f"{100 * result.hit_rate:.1f} / {result.ttft_percentile(95):.2f}"
                for result in results
            )
            table.row(trace, f"{gigabytes:g}", count, *cells)
