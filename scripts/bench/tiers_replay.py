"""What tiers are worth on traces, replayed: hit rates, times to first token, bytes written down.

A row per trace and size of the device; the host holds so many times as much (--ratio), and the disk
(--disk) as much as is said. Hit rates in percent of those of an unbounded cache, each request
served at once; times with a queue. `hicache` is SGLang's own cache with HiCache, `lru` and `reuse`
are one policy in each tier, `clairvoyant` knows the rest of the trace.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from scripts.bench.report import Table
from scripts.bench.traces import add_traces, read_named
from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.systems import Spec
from sglang_hybrid.replay.runner import Job, Result, Runner
from sglang_hybrid.simulation.prefill_time import PAPER
from sglang_hybrid.simulation.tiers.tier_budgets import TierBudgets

COST = CostModel.paper_7b()
DEVICES: dict[str, tuple[float, ...]] = {  # GB, with a tenfold host: where LRU loses something
    "taubench_airline": (0.8, 1, 2),
    "sharegpt_55": (0.3, 0.4, 1),
    "bbh_fewshot": (0.2, 0.3, 0.4),
    "claude_code_64k": (4.5, 5, 10),
    "mooncake_conversation_trace": (8, 20),
}
AT_ONCE = ("hicache", "lru", "reuse", "clairvoyant", "unbounded")
IN_TIME = ("hicache", "lru", "reuse", "clairvoyant")
ENOUGH = 97.0
"""Percent of the unbounded hit rate that is asked for where LRU has ROOM or less."""
ROOM = 90.0
FAST = 0.8
"""Of HiCache's 95th percentile of the time to first token."""


def rows(folder: Path, ratio: float, disk: float, policy: str) -> Iterator[list[str]]:
    """Cells of each row."""
    for trace, devices in DEVICES.items():
        runner = Runner({trace: read_named(folder, trace)})
        for device in devices:
            own, host, below = (int(device * n * 1e9) for n in (1, ratio, disk))
            tiers = TierBudgets.of(own, host, below)
            specs = {name: Spec.parse(policy if name == "reuse" else name) for name in AT_ONCE}
            jobs = {n: Job(specs[n], trace, COST, None, tiers=tiers) for n in AT_ONCE}
            at_once = {name: runner.run(job) for name, job in jobs.items()}
            in_time = {name: runner.run(replace(jobs[name], time=PAPER)) for name in IN_TIME}
            yield [trace, f"{device:g}", *cells(at_once, in_time)]


def cells(at_once: dict[str, Result], in_time: dict[str, Result]) -> list[str]:
    """Hit rates, times and bytes of one row, and what of the aims it meets."""
    bound = at_once["unbounded"].hit_rate
    share = {name: 100 * at_once[name].hit_rate / bound for name in AT_ONCE}
    p95 = {name: 1000 * in_time[name].ttft_percentile(95) for name in IN_TIME}
    written = [at_once[name].tiers for name in ("hicache", "reuse")]
    aims = (
        "" if share["lru"] > ROOM else met(share["reuse"] >= ENOUGH, share["clairvoyant"] >= ENOUGH)
    )
    faster = {name: p95[name] / p95["hicache"] for name in IN_TIME}
    return [
        f"{100 * bound:.1f}",
        *(f"{share[name]:.1f}" for name in IN_TIME),
        aims,
        *(f"{p95[name]:,.0f}" for name in IN_TIME),
        f"{faster['reuse']:.2f}",
        met(faster["reuse"] <= FAST, faster["clairvoyant"] <= FAST),
        *("" if counts is None else f"{counts.written_per_hit_token:,.0f}" for counts in written),
    ]


def met(ours: bool, clairvoyant: bool) -> str:
    """Whether an aim is met, and if not, whether a cache that knows the future meets it."""
    if ours:
        return "yes"
    return "no" if clairvoyant else "no; nor clairvoyant"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ratio", type=float, default=10.0, help="bytes of the host to the device")
    parser.add_argument("--disk", type=float, default=0.0, help="bytes of the disk to the device")
    parser.add_argument("--policy", default="reuse", help="ours, as NAME or NAME:OPTION=VALUE")
    add_traces(parser)


def run(options: argparse.Namespace) -> None:
    table = Table(
        "trace",
        "device GB",
        "unbounded hit %",
        *(f"{name}, % of it" for name in IN_TIME),
        f"{ENOUGH:g} % where lru has {ROOM:g} or less",
        *(f"P95 TTFT ms: {name}" for name in IN_TIME),
        "reuse / hicache",
        f"at most {FAST:g}",
        "bytes written per hit token: hicache",
        "reuse",
    )
    for row in rows(options.traces, options.ratio, options.disk, options.policy):
        table.row(*row)
