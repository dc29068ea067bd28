#!/usr/bin/env python3
"""Traffic in two phases on a real server: the tuner against fixed policies, and what it costs.

    python scripts/bench_phases.py [--few-shot 400] [--chats 120] [--workers 1]

First prompts of few-shot templates, then chats, the same for every server, one server after
another; the answers are forced as in bench_ab.py. Meanwhile one long answer is streamed, and the
time between its tokens is the scheduler's step time as a client sees it: while the tuner's workers
run, and while they do not. Prints Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import aiohttp
import numpy as np
import psutil
import requests

from scripts.bench_ab import Outcome, drive, vocabulary_of
from scripts.bench_server import machine
from sglang_hybrid.models import ensure_default_model
from sglang_hybrid.models.tokenizer import FIRST_TEXT_ID
from sglang_hybrid.replay.arrivals import Draw
from sglang_hybrid.replay.generators import generate, traffic
from sglang_hybrid.replay.slices import to_vocabulary
from sglang_hybrid.replay.traces import Request
from sglang_hybrid.server_process import ServerProcess

FIXED = ("--hybrid-eviction sglang-lru", "--hybrid-alpha 1", "--hybrid-eviction reuse")
CONCURRENCY = 2
LOOK_SECONDS = 0.05
"""Between looks at which workers run."""
PROBE_TOKENS = 2_000
"""Of one long answer; the next one follows it."""


@dataclass
class Steps:
    """When each token of the probe came, and when workers were seen; seconds of one clock."""

    tokens: list[list[float]] = field(default_factory=list)
    looks: list[tuple[float, bool]] = field(default_factory=list)

    def between(self) -> Iterator[tuple[float, bool]]:
        """Seconds between two tokens, and whether a worker ran when the second came."""
        times = [time for time, _ in self.looks]
        for answer in self.tokens:
            for before, now in pairwise(answer):
                at = int(np.searchsorted(times, now)) - 1
                yield now - before, at >= 0 and self.looks[at][1]


def phases(few_shot: int, chats: int, seed: int) -> list[list[Request]]:
    """Prompts of a thousand tokens behind 24 templates; then chats of some turns."""
    templates = traffic(
        "few-shot",
        sessions=few_shot,
        templates=24,
        shared=Draw("lognormal", 800, 0.3),
        answer=Draw("const", 4),
    )
    turns = traffic(
        "chat",
        sessions=chats,
        session_rate=1.0,
        shared=Draw("const", 100),
        think=Draw("lognormal", 20, 1.0),
        answer=Draw("lognormal", 24, 0.5),
    )
    return [generate("few-shot", templates, seed), generate("chat", turns, seed + 1)]


async def probe(url: str, steps: Steps) -> None:
    """Long answers, one after another, until cancelled."""
    body = {
        "input_ids": [FIRST_TEXT_ID] * 4,
        "sampling_params": {"temperature": 1, "ignore_eos": True, "max_new_tokens": PROBE_TOKENS},
        "stream": True,
    }
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client:
        while True:
            steps.tokens.append([])
            async with client.post(url + "/generate", json=body) as response:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        steps.tokens[-1].append(time.perf_counter())


async def look_for_workers(server: ServerProcess, steps: Steps) -> None:
    """Note whether a worker runs, until cancelled."""
    while True:
        running = False
        for process in await asyncio.to_thread(server.processes):
            with contextlib.suppress(psutil.Error):
                running |= "sglang_hybrid.tuner.worker" in process.cmdline()
        steps.looks.append((time.perf_counter(), running))
        await asyncio.sleep(LOOK_SECONDS)


async def serve(
    server: ServerProcess, traces: Sequence[Sequence[Request]], steps: Steps
) -> list[list[Outcome]]:
    """All phases, one after another, with the probe and the look-out beside them."""
    beside = [
        asyncio.create_task(probe(server.url, steps)),
        asyncio.create_task(look_for_workers(server, steps)),
    ]
    outcomes = [await drive(server.url, trace, CONCURRENCY, None) for trace in traces]
    for task in beside:
        task.cancel()
    for task in beside:
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return outcomes


def hit_rate(outcomes: Sequence[Outcome]) -> float:
    """Cached over prompt tokens. Raises RuntimeError if a request failed."""
    failed = [outcome.error for outcome in outcomes if outcome.error]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    prompts = sum(outcome.prompt_tokens for outcome in outcomes)
    return sum(outcome.cached_tokens for outcome in outcomes) / prompts


def milliseconds(intervals: Sequence[float]) -> str:
    """P50 / P99 / count."""
    if not intervals:
        return "none"
    middle, high = np.percentile(np.array(intervals) * 1_000, (50, 99)).tolist()
    return f"{middle:.1f} / {high:.1f} ({len(intervals):,})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--few-shot", type=int, default=400, help="requests of the first phase")
    parser.add_argument("--chats", type=int, default=120, help="sessions of the second")
    parser.add_argument("--workers", type=int, default=1, help="of the tuner")
    parser.add_argument("--window", type=int, default=100, help="requests that it looks at")
    parser.add_argument("--kv-tokens", type=int, default=16_384)
    parser.add_argument("--state-slots", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model = ensure_default_model()
    made = phases(options.few_shot, options.chats, options.seed)
    high = vocabulary_of(model)
    traces = [to_vocabulary(trace, FIRST_TEXT_ID, high)[0] for trace in made]
    common = [
        *("--model-path", str(model), "--max-total-tokens", str(options.kv_tokens)),
        *("--max-mamba-cache-size", str(options.state_slots)),
        *("--max-running-requests", str(CONCURRENCY + 1), "--enable-custom-logit-processor"),
    ]
    tuned = f"--hybrid-tuner-workers {options.workers} --hybrid-tuner-window {options.window}"
    print(f"Machine: {machine()}. Date: {date.today()}. ", end="")
    print(f"Command: `python scripts/bench_phases.py {' '.join(sys.argv[1:])}`.\n")
    print("| server | few-shot, hit rate | chats, hit rate | step P50 / P99, ms (tokens) ", end="")
    print("| while workers run |\n|---|---:|---:|---:|---:|", flush=True)
    for flags in (*FIXED, tuned):
        with ServerProcess([*common, *flags.split()]) as server:
            steps = Steps()
            served = asyncio.run(serve(server, traces, steps))
            state = requests.get(server.url + "/server_info", timeout=30).json()
            tuner = state["internal_states"][0]["hybrid_cache"].get("tuner")
        rates = " | ".join(f"{hit_rate(outcomes):.1%}" for outcomes in served)
        between = list(steps.between())
        calm = milliseconds([seconds for seconds, busy in between if not busy])
        busy = milliseconds([seconds for seconds, busy in between if busy])
        print(f"| `{flags}` | {rates} | {calm} | {busy} |", flush=True)
        if tuner:
            print(f"\nThe tuner: {tuner}")


if __name__ == "__main__":
    main()
