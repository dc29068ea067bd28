"""Traffic in two phases on a real server: the tuner against fixed policies."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Annotated

import numpy as np
import psutil

from scripts.bench import traces
from scripts.bench.report import ROOT, Table
from scripts.bench.servers import flags_of, hybrid_cache, vocabulary_of
from scripts.bench.traffic import Outcome, Steps, beside, drive, hit_rate, probe
from sglang_hybrid.models import ensure_tiny_model
from sglang_hybrid.replay.simulation.traces.arrivals import Draw
from sglang_hybrid.replay.simulation.traces.requests import Request
from sglang_hybrid.serving.server_process import ServerProcess

FIXED = ("--hybrid-eviction sglang-lru", "--hybrid-eviction marconi:1", "--hybrid-eviction reuse")
CONCURRENCY = 2
LOOK_SECONDS = 0.05
"""Between looks at which workers run."""


def two_phases(few_shot: int, sessions: int, seed: int) -> list[list[Request]]:
    """Prompts of a thousand tokens behind 24 templates; then chats of some turns."""
    turns = traces.chats(
        sessions,
        shared=Draw("const", 100),
        think=Draw("lognormal", 20, 1.0),
        answer=Draw("lognormal", 24, 0.5),
    )
    return traces.in_phases(
        [traces.documents(few_shot, 24, Draw("lognormal", 800, 0.3)), turns], seed
    )


async def look_for_workers(server: ServerProcess, steps: Steps) -> None:
    """Note whether a worker runs, until cancelled."""
    while True:
        running = False
        for process in await asyncio.to_thread(server.processes):
            with contextlib.suppress(psutil.Error):
                running |= "sglang_hybrid.replay.simulation.workers" in process.cmdline()
        steps.looks.append((time.perf_counter(), running))
        await asyncio.sleep(LOOK_SECONDS)


async def serve(
    server: ServerProcess, phases: Sequence[Sequence[Request]], steps: Steps
) -> list[list[Outcome]]:
    """All phases, one after another, with the probe and the look-out beside them."""
    async with beside(probe(server.url, steps), look_for_workers(server, steps)):
        return [await drive(server.url, trace, CONCURRENCY) for trace in phases]


def milliseconds(intervals: Sequence[float]) -> str:
    """P50 / P99 / count."""
    if not intervals:
        return "none"
    middle, high = np.percentile(np.array(intervals) * 1_000, (50, 99)).tolist()
    return f"{middle:.1f} / {high:.1f} ({len(intervals):,})"


def phases(
    few_shot: Annotated[int, "requests of the first phase"] = 400,
    chats: Annotated[int, "sessions of the second"] = 120,
    workers: Annotated[int, "of the tuner"] = 1,
    window: Annotated[int, "requests that it looks at"] = 100,
    kv_tokens: int = 16_384,
    state_slots: int = 24,
    seed: int = 0,
) -> None:
    """Traffic in two phases on a real server: the tuner against fixed policies, and what it costs.

    First prompts of few-shot templates, then chats, the same for every server, one server after
    another; the answers are forced as `ab` does it. Meanwhile one long answer is streamed, and the
    time between its tokens is the scheduler's step time as a client sees it: while the tuner's
    workers run, and while they do not.
    """
    model = ensure_tiny_model()
    made = two_phases(few_shot, chats, seed)
    traffic = traces.in_vocabulary(made, vocabulary_of(model))
    common = flags_of(model, kv_tokens, state_slots, CONCURRENCY + 1)
    tuned = f"--hybrid-tuner-workers {workers}"
    variables = {"SGLANG_HYBRID_TUNER_WINDOW": str(window)}
    table = Table(
        *("server", "few-shot, hit rate", "chats, hit rate", "step P50 / P99, ms (tokens)"),
        "while workers run",
    )
    tuner = None
    for flags in (*FIXED, tuned):
        command = [*common, *flags.split()]
        with ServerProcess(command, directory=ROOT, environment=variables) as server:
            steps = Steps()
            served = asyncio.run(serve(server, traffic, steps))
            tuner = hybrid_cache(server.url).get("tuner")
        between = list(steps.between())
        calm = milliseconds([seconds for seconds, busy in between if not busy])
        busy = milliseconds([seconds for seconds, busy in between if busy])
        rates = (f"{hit_rate(outcomes):.1%}" for outcomes in served)
        table.row(f"`{flags}`", *rates, calm, busy)
    if tuner:
        print(f"\nThe tuner: {tuner}")
