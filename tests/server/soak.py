"""Random traffic that shares prefixes: what it sends, what becomes of it, what it remembers."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.server.client import greedy, random_prompt

AT_ONCE = 24
"""Requests that wait or run, three times what the server runs."""

LONGEST_PROMPT = 600
PRIORITIES = (0, 0, 0, 0, 1, 1, 2, 5)
DOCUMENTS = 20
POPULARITY = [1 / (1 + rank) for rank in range(DOCUMENTS)]
WATCHED = 0.1
"""Share of the single requests whose answers are kept, to be asked again; siblings' always are."""

LOGPROBS = {"return_logprob": True, "logprob_start_len": -1}
"""Fields that ask for log probabilities of the answer only: such a request can hit."""


@dataclass(frozen=True)
class Watched:
    """A greedy answer as a tenant got it under load."""

    prompt: list[int]
    record: dict[str, Any]
    tenant: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.record["meta_info"]["finish_reason"]["type"] == "length"


async def last_event(
    response: aiohttp.ClientResponse, seconds: Callable[[], float]
) -> tuple[Any, bool]:
    """The last record of a stream, for a client that spends so many seconds on each, and whether
    the stream was ended by the server.
    """
    last, ended = b"", False
    async for line in response.content:
        if line.startswith(b"data: {"):
            last = line
            await asyncio.sleep(seconds())
        ended = ended or line.startswith(b"data: [DONE]")
    return json.loads(last.removeprefix(b"data: ")), ended


class Soak:
    """Clients of one server.

    Args:
        url: the server.
        seed: decides what is sent. When it arrives, and so what shares a batch, is up to the clock.
        priorities: requests have one, and may push out another.
        behind_router: `url` is that of sglang-router before divided servers, which aborts nothing
            and never answers a request for several samples.
    """

    def __init__(
        self, url: str, seed: int, *, priorities: bool, behind_router: bool = False
    ) -> None:
        self.url = url
        self.priorities = priorities
        self._behind_router = behind_router
        self.watched: list[Watched] = []
        self.outcomes: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._documents = [self._tokens(self._random.randrange(60, 560)) for _ in range(DOCUMENTS)]
        self._conversations: list[list[int]] = []
        self._sent = 0

    async def send(self, requests: int) -> None:
        """Send about so many requests and wait for their ends; raises what any client met."""
        until = self._sent + requests
        places = asyncio.Semaphore(AT_ONCE)

        async def one(count: int, call: Coroutine[Any, Any, None]) -> None:
            await call
            for _ in range(count):
                places.release()

        async with (
            aiohttp.ClientSession(self.url, timeout=aiohttp.ClientTimeout(900)) as self._session,
            asyncio.TaskGroup() as self._tasks,
        ):
            while self._sent < until:
                count, make = self._next()
                for _ in range(count):
                    await places.acquire()
                self._tasks.create_task(one(count, make()))
                self._sent += count

    def _next(self) -> tuple[int, Callable[[], Coroutine[Any, Any, None]]]:
        """The behaviour of a client, and the number of its requests."""
        draw = self._random.random()
        for share, count, make in (
            (0.02, 6, lambda: self._fan_out(6)),
            (0.0 if self._behind_router else 0.02, 4, lambda: self._samples(4)),
            (0.03, 1, self._retry),
            (0.06, 1, self._hang_up),
            (0.0 if self._behind_router else 0.10, 1, self._abort),
            (0.01, 0, self._flush),
        ):
            if draw < share:
                return count, make
            draw -= share
        return 1, self._ask

    async def _ask(self) -> None:
        watched = self._random.random() < WATCHED
        body = self._body(self._prompt())
        if watched:
            body |= LOGPROBS
        record = await self._post(body)
        self._conversations.append(body["input_ids"] + record["output_ids"])
        if watched:
            self._watch(body["input_ids"], record)

    async def _fan_out(self, count: int) -> None:
        """One batch whose prompts share a long prefix that nobody has sent before."""
        shared = self._tokens(self._random.randrange(200, 500))
        prompts = [shared + self._tokens(self._random.randrange(5, 90)) for _ in range(count)]
        records = await self._post(self._body(prompts) | LOGPROBS)
        self._conversations.append(prompts[0] + records[0]["output_ids"])
        for prompt, record in zip(prompts, records, strict=True):
            self._watch(prompt, record)

    async def _retry(self) -> None:
        """The same prompt, three times in turn."""
        body = self._body(self._prompt()) | LOGPROBS
        for _ in range(3):
            self._watch(body["input_ids"], await self._post(body))

    async def _samples(self, count: int) -> None:
        body = self._body(self._prompt())
        body["sampling_params"] |= {"n": count, "temperature": 1.0}
        await self._post(body)

    async def _abort(self) -> None:
        body = self._body(self._prompt(), new_tokens=60)
        body["rid"] = f"soak-{self._random.randrange(2**64)}"
        wait = self._random.random()
        answer = self._tasks.create_task(self._post(body))
        await asyncio.wait([answer], timeout=wait)
        async with self._session.post("/abort_request", json={"rid": body["rid"]}) as response:
            await response.read()
        await answer

    async def _hang_up(self) -> None:
        """Close the connection before the first token, or after it."""
        at_once = self._random.random() < 0.5
        body = self._body(self._prompt(), new_tokens=60) | {"stream": True}
        timeout = aiohttp.ClientTimeout(self._random.random() / 4 if at_once else 600)
        try:
            async with self._session.post("/generate", json=body, timeout=timeout) as response:
                if not at_once:
                    await response.content.readline()
        except TimeoutError:
            pass
        self.outcomes["hung up"] += 1

    def _watch(self, prompt: list[int], record: dict[str, Any]) -> None:
        self.watched.append(Watched(prompt, record))

    async def _flush(self) -> None:
        """Refused while anything runs or waits."""
        async with self._session.post("/flush_cache") as response:
            self.outcomes["flushed" if response.status == 200 else "flush refused"] += 1

    async def _post(self, body: dict[str, Any]) -> Any:
        async with self._session.post("/generate", json=body) as response:
            assert response.status == 200, await response.text()
            answer = await response.json(content_type=None)  # a router names no type
        for record in answer if isinstance(answer, list) else [answer]:
            self.outcomes[record["meta_info"]["finish_reason"]["type"]] += 1
        return answer

    def _body(
        self, prompt: list[int] | list[list[int]], new_tokens: int | None = None
    ) -> dict[str, Any]:
        new_tokens = new_tokens or self._random.choice((1, 2, 4, 8, 8, 12, 24))
        body = greedy(prompt, new_tokens, return_logprob=False)
        if self.priorities:
            body["priority"] = self._random.choice(PRIORITIES)
        return body

    def _prompt(self) -> list[int]:
        """A part of a document and something of its own, or a conversation's next turn."""
        own = self._tokens(self._random.randrange(1, 60))
        if self._conversations and self._random.random() < 0.25:
            prompt = self._random.choice(self._conversations[-8:]) + own
            if len(prompt) <= LONGEST_PROMPT:
                return prompt
        (document,) = self._random.choices(self._documents, POPULARITY)
        if self._random.random() < 0.5:
            document = document[: self._random.randrange(20, len(document))]
        return document + own

    def _tokens(self, count: int) -> list[int]:
        return random_prompt(count, seed=self._random.randrange(2**32))
