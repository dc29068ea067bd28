"""Orders of the waiting queue on a real server: four clients and a queue of 200.

Four clients keep --open requests open each, until --requests of each are answered. Seven of ten
requests ask about one of --documents documents, more than the cache holds; the others are new
prompts of the same length. Answers have one token. Each order serves the same requests in a server
of its own: all orders in turn, then in reverse.

Seconds from a request to its answer, tokens of prompts per second, share of tokens hit, and how
often the server says that one request was overtaken at most (of its own orders).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from scripts.bench.report import BenchFailed, Table, positive
from scripts.bench.servers import greedy, hybrid_cache, percentile, random_tokens
from sglang_hybrid.serving.server_process import ServerProcess

CLIENTS = 4
ORDERS = ("fcfs", "lpm", "window")
SHARE_OF_HITS = 0.7
QUESTION = 40
SLOTS = 24
"""State slots: those of 8 requests that run, and of some of the documents."""


@dataclass(frozen=True)
class Asked:
    """One answered request: seconds, tokens of its prompt, and those that were hit."""

    seconds: float
    prompt: int
    cached: int


def prompts_of(options: argparse.Namespace) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Documents, and for each client what it sends: questions about them, and new prompts."""
    source = random.Random(0)
    documents = [random_tokens(source, options.tokens) for _ in range(options.documents)]

    def prompt() -> list[int]:
        if source.random() < SHARE_OF_HITS:
            return source.choice(documents) + random_tokens(source, QUESTION)
        return random_tokens(source, options.tokens + QUESTION)

    return documents, [[prompt() for _ in range(options.requests)] for _ in range(CLIENTS)]


async def ask(session: aiohttp.ClientSession, url: str, prompt: list[int], answer: int) -> Asked:
    begin = time.perf_counter()
    async with session.post(url + "/generate", json=greedy(prompt, answer)) as response:
        if response.status != 200:
            raise BenchFailed(f"a request was answered with status {response.status}")
        found: dict[str, Any] = await response.json()
    cached = int(found["meta_info"]["cached_tokens"])
    return Asked(time.perf_counter() - begin, len(prompt), cached)


async def client(
    session: aiohttp.ClientSession, url: str, prompts: list[list[int]], at_once: int, answer: int
) -> list[Asked]:
    """Send all, `at_once` at a time."""
    places = asyncio.Semaphore(at_once)

    async def one(prompt: list[int]) -> Asked:
        async with places:
            return await ask(session, url, prompt, answer)

    return list(await asyncio.gather(*[one(prompt) for prompt in prompts]))


async def all_clients(
    url: str, prompts: list[list[list[int]]], at_once: int, answer: int = 1
) -> list[Asked]:
    """What all clients send, `at_once` requests of each at a time; answers of so many tokens."""
    limits = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=limits, timeout=timeout) as session:
        found = await asyncio.gather(
            *[client(session, url, own, at_once, answer) for own in prompts]
        )
    return [one for answered in found for one in answered]


def serve(order: str, options: argparse.Namespace) -> tuple[list[Asked], float, int]:
    """Answers, seconds until the last one, and the most that one request was overtaken."""
    _, prompts = prompts_of(options)
    kv = 4 * SLOTS * options.tokens // 8
    flags = ["--hybrid-schedule", order, "--max-running-requests", "8"]
    flags += ["--max-mamba-cache-size", str(SLOTS), "--max-total-tokens", str(kv)]
    with ServerProcess(flags, timeout=600) as server:
        begin = time.perf_counter()
        answered = asyncio.run(all_clients(server.url, prompts, options.open))
        seconds = time.perf_counter() - begin
        schedule = hybrid_cache(server.url)["schedule"]
    return answered, seconds, 0 if schedule is None else int(schedule["most_overtaken"])


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=positive, default=120, help="of each client")
    parser.add_argument("--open", type=positive, default=50, help="at once, of each client")
    parser.add_argument("--tokens", type=positive, default=1_500, help="of a document")
    parser.add_argument("--documents", type=positive, default=12)


def run(options: argparse.Namespace) -> None:
    heads = ("P50", "P95", "P99", "worst", "tokens/s", "hit rate", "most overtaken")
    table = Table("order", "run", *heads)
    for number, order in enumerate([*ORDERS, *reversed(ORDERS)], start=1):
        answered, seconds, overtaken = serve(order, options)
        waits = sorted(one.seconds for one in answered)
        tokens = sum(one.prompt for one in answered)
        hit = sum(one.cached for one in answered) / tokens
        table.row(
            *(order, number),
            *(f"{percentile(waits, share):.2f}" for share in (0.5, 0.95, 0.99, 1.0)),
            *(f"{tokens / seconds:,.0f}", f"{hit:.1%}"),
            overtaken if order == "window" else "",
        )
