"""A queue of requests before a real server: orders, and loads from the host."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import aiohttp

from scripts.bench.commands import Count, one_of
from scripts.bench.report import BenchFailed, Table
from scripts.bench.servers import (
    Client,
    flags_of,
    greedy,
    hybrid_cache,
    large_model,
    percentile,
    random_tokens,
)
from sglang_hybrid.core.queue.loads import LoadCounts
from sglang_hybrid.extensions.cpu.models import ensure_tiny_model
from sglang_hybrid.serving.server_process import ServerProcess

CLIENTS = 4
ORDERS = ("fcfs", "lpm", "window")
SHARE_OF_HITS = 0.7
QUESTION = 40
SLOTS = 24
"""State slots: those of 8 requests that run, and of some of the documents."""


@dataclass(frozen=True)
class Traffic:
    """Documents, and for each client what it sends: questions about them, and new prompts."""

    documents: list[list[int]]
    prompts: list[list[list[int]]]

    @classmethod
    def of(cls, tokens: int, documents: int, requests: int) -> Traffic:
        source = random.Random(0)
        known = [random_tokens(source, tokens) for _ in range(documents)]

        def prompt() -> list[int]:
            if source.random() < SHARE_OF_HITS:
                return source.choice(known) + random_tokens(source, QUESTION)
            return random_tokens(source, tokens + QUESTION)

        return cls(known, [[prompt() for _ in range(requests)] for _ in range(CLIENTS)])


@dataclass(frozen=True)
class Asked:
    """One answered request: seconds, tokens of its prompt, and those that were hit."""

    seconds: float
    prompt: int
    cached: int


async def ask_all(url: str, traffic: Traffic, at_once: int, answer: int = 1) -> list[Asked]:
    """What all clients send, `at_once` requests of each at a time; answers of so many tokens."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:

        async def ask(prompt: list[int], places: asyncio.Semaphore) -> Asked:
            async with places:
                begin = time.perf_counter()
                async with session.post("/generate", json=greedy(prompt, answer)) as response:
                    if response.status != 200:
                        raise BenchFailed(f"a request was answered with status {response.status}")
                    found: dict[str, Any] = await response.json()
                seconds = time.perf_counter() - begin
            return Asked(seconds, len(prompt), int(found["meta_info"]["cached_tokens"]))

        clients = [(own, asyncio.Semaphore(at_once)) for own in traffic.prompts]
        return await asyncio.gather(*[ask(one, places) for own, places in clients for one in own])


def schedule(
    requests: Annotated[Count, "of each client"] = 120,
    open_: Annotated[Count, "at once, of each client"] = 50,
    tokens: Annotated[Count, "of a document"] = 1_500,
    documents: Count = 12,
) -> None:
    """Orders of the waiting queue on a real server: four clients and a queue of 200.

    Four clients keep --open requests open each, until --requests of each are answered. Seven of ten
    requests ask about one of --documents documents, more than the cache holds; the others are new
    prompts of the same length. Answers have one token. Each order serves the same requests in a
    server of its own: all orders in turn, then in reverse.

    Seconds from a request to its answer, tokens of prompts per second, share of tokens hit, and how
    often the server says that one request was overtaken at most (of its own orders).
    """
    traffic = Traffic.of(tokens, documents, requests)
    pools = ["--max-running-requests", "8", "--max-mamba-cache-size", str(SLOTS)]
    pools += ["--max-total-tokens", str(4 * SLOTS * tokens // 8)]
    heads = ("P50", "P95", "P99", "worst", "tokens/s", "hit rate", "most overtaken")
    table = Table("order", "run", *heads)
    for number, order in enumerate([*ORDERS, *reversed(ORDERS)], start=1):
        with ServerProcess([*pools, "--hybrid-schedule", order], timeout=600) as server:
            begin = time.perf_counter()
            answered = asyncio.run(ask_all(server.url, traffic, open_))
            seconds = time.perf_counter() - begin
            told = hybrid_cache(server.url)["schedule"]
        waits = sorted(one.seconds for one in answered)
        sent = sum(one.prompt for one in answered)
        table.row(
            *(order, number),
            *(f"{percentile(waits, share):.2f}" for share in (0.5, 0.95, 0.99, 1.0)),
            *(f"{sent / seconds:,.0f}", f"{sum(one.cached for one in answered) / sent:.1%}"),
            told["most_overtaken"] if order == "window" else "",
        )


RUNNING = 4
HOST = 8
"""Bytes of the host for each of the device."""

MODELS: dict[str, Callable[[], Path]] = {"tiny": ensure_tiny_model, "100m": large_model}


@dataclass(frozen=True)
class Loading:
    """A server whose device holds `kv_tokens` of the documents, and whose host holds all."""

    model: Path
    kv_tokens: int
    bandwidth: float
    traffic: Traffic

    @contextmanager
    def server(self, *flags: str) -> Iterator[str]:
        """The address of one that was asked for all documents, of which it has evicted some."""
        command = [
            *flags_of(self.model, self.kv_tokens, 2 * RUNNING + 4, RUNNING),
            *("--enable-hierarchical-cache", "--hicache-ratio", str(HOST), *flags),
        ]
        slow = {"SGLANG_HYBRID_SIMULATE_BANDWIDTH": f"host={self.bandwidth:g}GB/s+20us"}
        with ServerProcess(command, timeout=900, environment=slow) as running:
            client = Client(running.url)
            for _ in range(3):
                client.first_token(client.tokens(len(self.traffic.documents[0])), 0)
            for document in self.traffic.documents:
                client.first_token(document, 0)
            time.sleep(1)
            yield running.url

    def reload(self) -> tuple[float, float, int]:
        """Times to the first token, reloaded and recomputed, in milliseconds; loads."""
        with self.server() as url:
            client = Client(url, seed=1)
            before = loads_so_far(url)
            again, new = [], []
            for document in self.traffic.documents:  # the first ones were pushed out longest ago
                again.append(client.first_token(document + client.tokens(QUESTION), 0))
                new.append(client.first_token(client.tokens(len(document) + QUESTION), 0))
            return 1e3 * median(again), 1e3 * median(new), loads_so_far(url) - before

    def queue(self, order: str, answer: int) -> tuple[list[float], LoadCounts]:
        """Seconds that requests waited, ascending, and what was loaded."""
        with self.server("--hybrid-schedule", order) as url:
            before = loads_so_far(url)
            most = len(self.traffic.prompts[0])
            answered = asyncio.run(ask_all(url, self.traffic, most, answer))
            told = hybrid_cache(url)["schedule"]
            moved = LoadCounts(on_turn=loads_so_far(url) - before)
        waits = sorted(one.seconds for one in answered)
        return waits, moved if told is None else LoadCounts(**told["loads"])


def loads_so_far(url: str) -> int:
    """Requests that a server has loaded something for from its host."""
    return int(hybrid_cache(url)["tiers"]["loaded_requests"])


def loads(
    bandwidths: Annotated[tuple[float, ...], "GB/s"] = (12, 25, 64),
    models: Annotated[tuple[str, ...], one_of(MODELS)] = ("tiny", "100m"),
    tokens: Annotated[Count, "of a document"] = 1_500,
    documents: Count = 12,
    device: Annotated[Count, "documents that it holds"] = 4,
    requests: Annotated[Count, "of each client in the queue"] = 25,
    answer: Annotated[Count, "tokens, in the queue"] = 24,
    only: Annotated[Literal["reload", "queue"] | None, "one of the two tables"] = None,
) -> None:
    """Loads from the host on a real server: begun before a request's turn, and what they save.

    First the time to the first token of requests whose document lies on the host only (reloaded),
    beside new ones of the same length (recomputed), one at a time, at simulated bandwidths between
    host and device. Medians in milliseconds; `loaded` is how many of them came from the host.

    Then a queue: four clients send all requests at once; seven of ten ask about one of --documents
    documents, more than the device holds and fewer than the host does. Answers have --answer
    tokens, and four requests run at a time, so the others wait for a place. `fcfs` loads when a
    request has its turn. `no time`: of these loads, those whose request waited less than the load
    takes; `no room`: those for which the device had none before their turn, beside running requests
    and those with an earlier turn. `complete`: of the others, the share that was complete at the
    turn. `in vain`: bytes loaded for requests that did not use them.
    """
    traffic = Traffic.of(tokens, documents, requests)
    cases = [
        (name, f"{bandwidth:g}", Loading(MODELS[name](), device * tokens, bandwidth, traffic))
        for name in models
        for bandwidth in bandwidths
    ]
    if only != "queue":
        times = ("reloaded, ms", "recomputed, ms", "recomputed / reloaded")
        table = Table("model", "GB/s", *times, "loaded")
        for name, speed, case in cases:
            again, new, loaded = case.reload()
            cells = (f"{again:.0f}", f"{new:.0f}", f"{new / again:.1f}")
            table.row(name, speed, *cells, f"{loaded} of {documents}")
    if only == "reload":
        return
    print()
    counts = ("loads", "no time", "no room", "complete", "in vain")
    table = Table("model", "GB/s", "order", "P50, s", "P95, s", *counts, text=3)
    for name, speed, case in cases[: len(bandwidths)]:
        for order in ("fcfs", "window"):
            waits, moved = case.queue(order, answer)
            share = "" if moved.complete is None else f"{moved.complete:.0%}"
            missed: tuple[object, ...] = ("", "", share, "")
            if order == "window":
                missed = (moved.no_time, moved.no_room, share, f"{moved.in_vain:.1%}")
            p50, p95 = (f"{percentile(waits, part):.2f}" for part in (0.5, 0.95))
            table.row(name, speed, order, p50, p95, moved.loads, *missed)
