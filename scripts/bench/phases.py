"""Traffic in two phases on a real server: the tuner against fixed policies, and what it costs.

    python scripts/bench.py phases [--few-shot 400] [--chats 120] [--workers 1]

First prompts of few-shot templates, then chats, the same for every server, one server after
another; the answers are forced as `ab` does it. Meanwhile one long answer is streamed, and the
time between its tokens is the scheduler's step time as a client sees it: while the tuner's workers
run, and while they do not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import Sequence

import numpy as np
import psutil

from scripts.bench.report import ROOT, Table
from scripts.bench.servers import flags_of, hybrid_cache, vocabulary_of
from scripts.bench.traces import chats, documents, in_phases, in_vocabulary
from scripts.bench.traffic import Outcome, Steps, beside, drive, hit_rate, probe
from sglang_hybrid.models import ensure_default_model
from sglang_hybrid.serving.server_process import ServerProcess
from sglang_hybrid.simulation.traces.arrivals import Draw
from sglang_hybrid.simulation.traces.requests import Request

FIXED = ("--hybrid-eviction sglang-lru", "--hybrid-eviction marconi:1", "--hybrid-eviction reuse")
CONCURRENCY = 2
LOOK_SECONDS = 0.05
"""Between looks at which workers run."""


def phases(few_shot: int, sessions: int, seed: int) -> list[list[Request]]:
    """Prompts of a thousand tokens behind 24 templates; then chats of some turns."""
    turns = chats(
        sessions,
        shared=Draw("const", 100),
        think=Draw("lognormal", 20, 1.0),
        answer=Draw("lognormal", 24, 0.5),
    )
    return in_phases([documents(few_shot, 24, Draw("lognormal", 800, 0.3)), turns], seed)


async def look_for_workers(server: ServerProcess, steps: Steps) -> None:
    """Note whether a worker runs, until cancelled."""
    while True:
        running = False
        for process in await asyncio.to_thread(server.processes):
            with contextlib.suppress(psutil.Error):
                running |= "sglang_hybrid.simulation.workers" in process.cmdline()
        steps.looks.append((time.perf_counter(), running))
        await asyncio.sleep(LOOK_SECONDS)


async def serve(
    server: ServerProcess, traces: Sequence[Sequence[Request]], steps: Steps
) -> list[list[Outcome]]:
    """All phases, one after another, with the probe and the look-out beside them."""
    async with beside(probe(server.url, steps), look_for_workers(server, steps)):
        return [await drive(server.url, trace, CONCURRENCY, None) for trace in traces]


def milliseconds(intervals: Sequence[float]) -> str:
    """P50 / P99 / count."""
    if not intervals:
        return "none"
    middle, high = np.percentile(np.array(intervals) * 1_000, (50, 99)).tolist()
    return f"{middle:.1f} / {high:.1f} ({len(intervals):,})"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--few-shot", type=int, default=400, help="requests of the first phase")
    parser.add_argument("--chats", type=int, default=120, help="sessions of the second")
    parser.add_argument("--workers", type=int, default=1, help="of the tuner")
    parser.add_argument("--window", type=int, default=100, help="requests that it looks at")
    parser.add_argument("--kv-tokens", type=int, default=16_384)
    parser.add_argument("--state-slots", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)


def run(options: argparse.Namespace) -> None:
    model = ensure_default_model()
    made = phases(options.few_shot, options.chats, options.seed)
    traces = in_vocabulary(made, vocabulary_of(model))
    common = flags_of(model, options.kv_tokens, options.state_slots, CONCURRENCY + 1)
    tuned = f"--hybrid-tuner-workers {options.workers}"
    variables = {"SGLANG_HYBRID_TUNER_WINDOW": str(options.window)}
    table = Table(
        *("server", "few-shot, hit rate", "chats, hit rate", "step P50 / P99, ms (tokens)"),
        "while workers run",
    )
    tuner = None
    for flags in (*FIXED, tuned):
        command = [*common, *flags.split()]
        with ServerProcess(command, directory=ROOT, environment=variables) as server:
            steps = Steps()
            served = asyncio.run(serve(server, traces, steps))
            tuner = hybrid_cache(server.url).get("tuner")
        between = list(steps.between())
        calm = milliseconds([seconds for seconds, busy in between if not busy])
        busy = milliseconds([seconds for seconds, busy in between if busy])
        rates = (f"{hit_rate(outcomes):.1%}" for outcomes in served)
        table.row(f"`{flags}`", *rates, calm, busy)
    if tuner:
        print(f"\nThe tuner: {tuner}")
