"""Sending a trace to a server, with answers that are forced to be the trace's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from scripts.bench.forced import ForcedAnswer
from scripts.bench.report import BenchFailed
from scripts.bench.servers import greedy
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.cpu.models.tokenizer import FIRST_TEXT_ID


@dataclass(frozen=True)
class Outcome:
    """The result of one request; ttft: seconds from sending to the first token, seconds: to the
    last.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft: float = 0.0
    seconds: float = 0.0
    error: str = ""

    @property
    def prefilled(self) -> int:
        """Tokens; one at least."""
        return self.prompt_tokens - self.cached_tokens


def next_ready(waiting: Sequence[int], busy: set[int], trace: Sequence[Request]) -> int | None:
    """The first waiting request whose session has none under way."""
    return next((number for number in waiting if trace[number].session not in busy), None)


async def send(client: aiohttp.ClientSession, request: Request, processor: str) -> Outcome:
    """One streamed /generate whose answer must be the trace's."""
    prompt = request.tokens[: request.input_len].tolist()
    # A request generates a token at least. Of a session's answers it is lost anyway: a cache has
    # the KV of all tokens but the last.
    answer = request.tokens[request.input_len :].tolist() or [FIRST_TEXT_ID]
    body = greedy(prompt, len(answer)) | {"custom_logit_processor": processor, "stream": True}
    body["sampling_params"]["custom_params"] = {"answer": answer}
    start, first, last = time.perf_counter(), 0.0, b"{}"
    try:
        async with client.post("/generate", json=body) as response:
            if not response.ok:
                return Outcome(error=f"{response.status}: {(await response.text())[:200]}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    first = first or time.perf_counter()
                    last = line.removeprefix(b"data: ")
    except (aiohttp.ClientError, TimeoutError) as error:
        return Outcome(error=f"{type(error).__name__}: {error}")
    spent = time.perf_counter() - start
    return read_outcome(json.loads(last), len(prompt), answer, first - start, spent)


def read_outcome(
    record: dict[str, Any], prompt: int, answer: list[int], ttft: float, seconds: float
) -> Outcome:
    """The last record of a stream, checked against what was asked for."""
    if "meta_info" not in record:
        return Outcome(error=f"no answer: {json.dumps(record)[:200]}")
    meta = record["meta_info"]
    if meta["prompt_tokens"] != prompt or record["output_ids"] != answer:
        return Outcome(error=f"another answer than the trace's ({meta['finish_reason']})")
    return Outcome(prompt, meta["cached_tokens"], ttft, seconds)


async def drive(url: str, trace: Sequence[Request], concurrency: int) -> list[Outcome]:
    """Send every request of `trace`, at most `concurrency` at a time; outcomes in its order."""
    processor = ForcedAnswer.to_str()
    outcomes = [Outcome(error="not sent")] * len(trace)
    waiting, busy = list(range(len(trace))), set[int]()
    changed = asyncio.Condition()

    async def work(client: aiohttp.ClientSession) -> None:
        while True:
            async with changed:
                while (number := next_ready(waiting, busy, trace)) is None:
                    if not waiting:
                        return
                    await changed.wait()
                waiting.remove(number)
                busy.add(trace[number].session)
            outcomes[number] = await send(client, trace[number], processor)
            async with changed:
                busy.discard(trace[number].session)
                changed.notify_all()

    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(url, timeout=timeout, connector=connector) as client,
        asyncio.TaskGroup() as workers,
    ):
        for _ in range(concurrency):
            workers.create_task(work(client))
    return outcomes


async def drive_in_pairs(urls: Sequence[str], trace: Sequence[Request]) -> list[list[Outcome]]:
    """Send every request to each server, nothing at the same time; outcomes by server.

    Another server begins each time.
    """
    processor = ForcedAnswer.to_str()
    outcomes: list[list[Outcome]] = [[] for _ in urls]
    timeout = aiohttp.ClientTimeout(total=600)
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(aiohttp.ClientSession(url, timeout=timeout))
            for url in urls
        ]
        for number, request in enumerate(trace):
            for turn in range(len(urls)):
                at = (number + turn) % len(urls)
                outcomes[at].append(await send(clients[at], request, processor))
    return outcomes


def hit_rate(outcomes: Sequence[Outcome]) -> float:
    """Cached over prompt tokens. Raises BenchFailed if a request failed."""
    failed = [outcome.error for outcome in outcomes if outcome.error]
    if failed:
        raise BenchFailed(f"{len(failed)} requests failed: {failed[0]}")
    prompts = sum(outcome.prompt_tokens for outcome in outcomes)
    return sum(outcome.cached_tokens for outcome in outcomes) / prompts
