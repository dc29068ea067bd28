"""Loads from the host on a real server: begun before a request's turn, and what they save.

First the time to the first token of requests whose document lies on the host only (reloaded),
beside new ones of the same length (recomputed), one at a time, at simulated bandwidths between host
and device. Medians in milliseconds; `loaded` is how many of them came from the host.

Then a queue: four clients send all requests at once; seven of ten ask about one of --documents
documents, more than the device holds and fewer than the host does. Answers have --answer tokens,
and four requests run at a time, so the others wait for a place. `fcfs` loads when a request has its
turn.
`no time`: of these loads, those whose request waited less than the load takes; `no room`: those for
which the device had none before their turn, beside running requests and those with an earlier turn.
`complete`: of the others, the share that was complete at the turn. `in vain`: bytes loaded for
requests that did not use them.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from scripts.bench.report import Table, positive
from scripts.bench.schedule import QUESTION, all_clients, prompts_of
from scripts.bench.servers import (
    Client,
    flags_of,
    hybrid_cache,
    large_model,
    percentile,
    random_tokens,
)
from sglang_hybrid.core.queue.loads import LoadCounts
from sglang_hybrid.models import ensure_default_model
from sglang_hybrid.serving.server_process import ServerProcess

RUNNING = 4
HOST = 8
"""Bytes of the host for each of the device."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bandwidths", type=float, nargs="+", default=[12, 25, 64], help="GB/s")
    parser.add_argument("--models", choices=["tiny", "100m"], nargs="+", default=["tiny", "100m"])
    parser.add_argument("--tokens", type=positive, default=1_500, help="of a document")
    parser.add_argument("--documents", type=positive, default=12)
    parser.add_argument("--device", type=positive, default=4, help="documents that it holds")
    parser.add_argument("--requests", type=positive, default=25, help="of each client in the queue")
    parser.add_argument("--answer", type=positive, default=24, help="tokens, in the queue")
    parser.add_argument("--only", choices=["reload", "queue"], help="one of the two tables")


def server(
    model: Path, options: argparse.Namespace, bandwidth: float, *flags: str
) -> ServerProcess:
    """With a device that holds some of the documents, and a host that holds all."""
    kv = options.device * options.tokens
    command = [
        *flags_of(model, kv, 2 * RUNNING + 4, RUNNING),
        *("--enable-hierarchical-cache", "--hicache-ratio", str(HOST)),
        *flags,
    ]
    slow = {"SGLANG_HYBRID_SIMULATE_BANDWIDTH": f"host={bandwidth:g}GB/s+20us"}
    return ServerProcess(command, timeout=900, environment=slow)


def tiers(url: str) -> dict[str, Any]:
    found: dict[str, Any] = hybrid_cache(url)["tiers"]
    return found


def reload(model: Path, options: argparse.Namespace, bandwidth: float) -> tuple[float, float, int]:
    """Times to the first token, reloaded and recomputed, in milliseconds; loads from the host."""
    source = random.Random(1)
    documents = [random_tokens(source, options.tokens) for _ in range(options.documents)]
    with server(model, options, bandwidth) as running:
        asks = Client(running.url)
        for _ in range(3):
            asks.first_token(asks.tokens(options.tokens), 0)
        for document in documents:
            asks.first_token(document, 0)
        time.sleep(1)
        before = tiers(running.url)["loaded_requests"]
        again, new = [], []
        for document in documents:  # the first ones were pushed out longest ago
            again.append(asks.first_token(document + asks.tokens(QUESTION), 0))
            new.append(asks.first_token(asks.tokens(options.tokens + QUESTION), 0))
        loads = tiers(running.url)["loaded_requests"] - before
    return 1e3 * median(again), 1e3 * median(new), int(loads)


def queue(
    model: Path, options: argparse.Namespace, bandwidth: float, order: str
) -> tuple[float, float, LoadCounts]:
    """Waits (P50, P95, seconds), and what was loaded."""
    documents, prompts = prompts_of(options)
    with server(model, options, bandwidth, "--hybrid-schedule", order) as running:
        asks = Client(running.url)
        for document in documents:
            asks.first_token(document, 0)
        time.sleep(1)
        before = tiers(running.url)["loaded_requests"]
        answered = asyncio.run(all_clients(running.url, prompts, options.requests, options.answer))
        info = hybrid_cache(running.url)
    if info["schedule"] is None:
        moved = LoadCounts(on_turn=info["tiers"]["loaded_requests"] - before)
    else:
        moved = LoadCounts(**info["schedule"]["loads"])
    waits = sorted(one.seconds for one in answered)
    return percentile(waits, 0.5), percentile(waits, 0.95), moved


def models_of(names: Sequence[str]) -> dict[str, Path]:
    made: dict[str, Callable[[], Path]] = {"tiny": ensure_default_model, "100m": large_model}
    return {name: made[name]() for name in names}


def run(options: argparse.Namespace) -> None:
    models = models_of(options.models)
    if options.only != "queue":
        table = Table(
            "model", "GB/s", "reloaded, ms", "recomputed, ms", "recomputed / reloaded", "loaded"
        )
        for name, model in models.items():
            for bandwidth in options.bandwidths:
                again, new, loads = reload(model, options, bandwidth)
                cells = (f"{again:.0f}", f"{new:.0f}", f"{new / again:.1f}")
                table.row(name, f"{bandwidth:g}", *cells, f"{loads} of {options.documents}")
    if options.only == "reload":
        return
    print()
    table = Table(
        *("model", "GB/s", "order", "P50, s", "P95, s", "loads", "no time", "no room", "complete"),
        "in vain",
        text=3,
    )
    name, model = next(iter(models.items()))
    for bandwidth in options.bandwidths:
        for order in ("fcfs", "window"):
            low, high, moved = queue(model, options, bandwidth, order)
            share = "" if moved.complete is None else f"{moved.complete:.0%}"
            ahead = order == "window"
            missed = (moved.no_time, moved.no_room) if ahead else ("", "")
            in_vain = f"{moved.in_vain:.1%}" if ahead else ""
            times = (f"{low:.2f}", f"{high:.2f}")
            table.row(name, f"{bandwidth:g}", order, *times, moved.loads, *missed, share, in_vain)
