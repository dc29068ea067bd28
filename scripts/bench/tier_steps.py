"""What copies in the background cost a step: a real server with host memory below it, and without.

    python scripts/bench.py tier-steps [--requests 150] [--rounds 2]

A slice of sharegpt_55 on a device that holds all of it, so that hits are the same on both servers
and nothing is loaded: first without tiers, then with --hicache-write-policy write_through and a
watermark of 0, so that what every request leaves is copied in the background, and again. Meanwhile
one long answer is streamed; the time between its tokens is a step as a client sees it.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import replace

import numpy as np

from scripts.bench.ab import PRESETS
from scripts.bench.measured import warm_up
from scripts.bench.report import ROOT, Table, positive
from scripts.bench.servers import flags_of, hybrid_cache, vocabulary_of
from scripts.bench.traces import find, preset_of
from scripts.bench.traffic import Steps, beside, drive, hit_rate, probe
from sglang_hybrid.models import ensure_default_model
from sglang_hybrid.models.tokenizer import FIRST_TEXT_ID
from sglang_hybrid.serving.server_process import ServerProcess
from sglang_hybrid.simulation.traces.formats import read_trace
from sglang_hybrid.simulation.traces.requests import Request
from sglang_hybrid.simulation.traces.slices import to_vocabulary

TRACE = "sharegpt_55"
KV_TOKENS, STATE_SLOTS = 60_000, 500
RUNNING = 3
"""The streamed answer, and two requests of the trace."""

TIERS = ("--enable-hierarchical-cache", "--hicache-ratio", "2")
ALL_IS_COPIED = {"SGLANG_HYBRID_OFFLOAD_WATERMARK": "0"}  # though nothing is evicted
SERVERS = {"without tiers": (), "with copies": TIERS}


async def measure(url: str, trace: list[Request]) -> tuple[float, np.ndarray]:
    """Hit rate of the trace, and milliseconds of all steps meanwhile [n]."""
    steps = Steps()
    async with beside(probe(url, steps)):
        outcomes = await drive(url, trace, RUNNING - 1, None)
    return hit_rate(outcomes), np.array([gap for gap, _ in steps.between()]) * 1e3


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=positive, default=150, help="of the trace")
    parser.add_argument("--rounds", type=positive, default=2, help="of both servers")


def run(options: argparse.Namespace) -> None:
    model, path = ensure_default_model(), find(TRACE)
    cut = replace(preset_of(PRESETS, path).slice, requests=options.requests)
    trace, _ = to_vocabulary(cut.cut(read_trace(path)), FIRST_TEXT_ID, vocabulary_of(model))
    common = flags_of(model, KV_TOKENS, STATE_SLOTS, RUNNING)
    table = Table("server", "hit rate", "MB copied", "steps", "P50, ms", "P99, ms", text=1)
    highest: dict[str, list[float]] = {name: [] for name in SERVERS}
    for _ in range(options.rounds):
        for name, flags in SERVERS.items():
            with ServerProcess(
                [*common, *flags], directory=ROOT, environment=ALL_IS_COPIED
            ) as server:
                warm_up(server.url, RUNNING - 1)
                hits, times = asyncio.run(measure(server.url, trace))
                tiers = hybrid_cache(server.url)["tiers"]
            copied = 0 if tiers is None else tiers["written_bytes"]
            middle, high = np.percentile(times, (50, 99)).tolist()
            highest[name].append(high)
            cells = (f"{hits:.1%}", f"{copied / 1e6:.1f}", f"{len(times):,}")
            table.row(name, *cells, f"{middle:.1f}", f"{high:.1f}")
    without, copying = (float(np.median(highest[name])) for name in SERVERS)
    print(f"\nP99 with copies over without: {copying / without:.2f}")
