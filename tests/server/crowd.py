"""Many clients of several tenants at once: what they send, what they remember, what they refuse."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.server.client import greedy, random_prompt
from tests.server.soak import LOGPROBS, Watched, last_event

TENANTS: tuple[dict[str, str], ...] = (
    {},
    {"extra_key": "a gateway's key"},
    {"cache_salt": "salt"},
    {"extra_key": "a gateway's key", "cache_salt": "salt"},
    {"cache_salt": "ein längeres Salz, 盐"},
)
LONGEST = 900
"""Tokens after which a chat begins anew."""

NONSENSE: tuple[bytes, ...] = (
    b"",
    b"{",
    b"[]",
    b'"text"',
    b"\xff\xfe",
    b"{}",
    b'{"text": 7}',
    b'{"input_ids": [-1]}',
    b'{"input_ids": [99999999]}',
    b'{"text": "a", "sampling_params": {"max_new_tokens": -3}}',
    b'{"text": "a", "sampling_params": {"temperature": "hot"}}',
    b'{"text": "a", "kv_hints": {"actions": 3}}',
    b'{"text": "a", "cache_salt": ["b"]}',
    b'{"text": "a", "cache_salt": "\\ud800"}',
    b'{"model": "default", "messages": "hello"}',
    b'{"model": "default", "messages": [{"role": "nobody", "content": {}}]}',
)
"""Bodies that no server can answer, for `/generate` and `/v1/chat/completions` alike."""


@dataclass
class Chat:
    """The conversation of one client, as token ids and as messages."""

    tenant: dict[str, str]
    tokens: list[int] = field(default_factory=list)
    messages: list[dict[str, str]] = field(default_factory=list)


class Crowd:
    """Clients of one server.

    Args:
        url: the server.
        seed: decides what is sent. What runs together is up to the clock.
        clients: how many there are; each waits for its answer before it sends again.

    outcomes: how often what became of a request. kept: greedy answers to be asked for again.
    """

    def __init__(self, url: str, seed: int, clients: int = 32) -> None:
        self.url = url
        self.outcomes: Counter[str] = Counter()
        self.kept: list[Watched] = []
        self._clients = clients
        self._random = random.Random(seed)
        self._documents = [
            random_prompt(self._random.randrange(40, 500), seed=self._random.randrange(2**32))
            for _ in range(12)
        ]

    async def stay(self, seconds: float) -> None:
        """Use the server for so long, and until every answer is there; raises what a client met."""
        timeout = aiohttp.ClientTimeout(300)
        connector = aiohttp.TCPConnector(limit=0)
        until = time.monotonic() + seconds
        async with (
            aiohttp.ClientSession(self.url, timeout=timeout, connector=connector) as self._session,
            asyncio.TaskGroup() as tasks,
        ):
            for number in range(self._clients):
                tasks.create_task(self._client(Chat(TENANTS[number % len(TENANTS)]), until))

    async def _client(self, chat: Chat, until: float) -> None:
        does: dict[Callable[[Chat], Awaitable[None]], float] = {
            self._ask: 30,
            self._go_on: 25,
            self._stream: 15,
            self._talk: 12,
            self._samples: 4,
            self._hang_up: 8,
            self._nonsense: 4,
            self._explain: 2,
        }
        while time.monotonic() < until:
            (act,) = self._random.choices(list(does), list(does.values()))
            await act(chat)

    async def _ask(self, chat: Chat) -> None:
        """A document that all tenants have, and something of its own."""
        await self._generate(chat, self._document() + self._own())

    async def _go_on(self, chat: Chat) -> None:
        """The next turn of the client's chat."""
        if not chat.tokens or len(chat.tokens) > LONGEST:
            chat.tokens = self._document()
        prompt = chat.tokens + self._own()
        chat.tokens = prompt + (await self._generate(chat, prompt))["output_ids"]

    async def _generate(self, chat: Chat, prompt: list[int]) -> dict[str, Any]:
        body = self._body(chat, prompt)
        keep = self._random.random() < 0.12
        record = await self._post("/generate", body | (LOGPROBS if keep else {}))
        assert record["meta_info"]["hybrid_cache"]["hit_tokens"] >= 0
        if keep:
            self.kept.append(Watched(prompt, record, chat.tenant))
        return record

    async def _stream(self, chat: Chat) -> None:
        body = self._body(chat, self._document() + self._own()) | LOGPROBS | {"stream": True}
        async with self._session.post("/generate", json=body) as response:
            assert response.status == 200, await response.text()
            record, ended = await last_event(response, lambda: 0)
        assert ended
        self.outcomes["streamed"] += 1
        self.kept.append(Watched(body["input_ids"], record, chat.tenant))

    async def _talk(self, chat: Chat) -> None:
        """A chat completion; the answer is part of the next one."""
        if len(chat.messages) > 8:
            chat.messages = []
        chat.messages.append({"role": "user", "content": f"Question {len(chat.messages)}: who?"})
        body = {
            "model": "default",
            "messages": chat.messages,
            "max_tokens": 8,
            "temperature": 0,
            **chat.tenant,
        }
        answer = await self._post("/v1/chat/completions", body)
        said = answer["choices"][0]["message"]["content"] or ""
        chat.messages.append({"role": "assistant", "content": said})
        self.outcomes["talked"] += 1

    async def _samples(self, chat: Chat) -> None:
        body = self._body(chat, self._document() + self._own())
        body["sampling_params"] |= {"n": 3, "temperature": 1.0}
        assert len(await self._post("/generate", body)) == 3
        self.outcomes["samples"] += 1

    async def _hang_up(self, chat: Chat) -> None:
        """Close the connection at some moment, in the prefill or in the answer."""
        body = self._body(chat, self._document() + self._own(), new_tokens=80) | {"stream": True}
        wait = self._random.choice((0.01, 0.1, 0.5, 2.0))
        try:
            async with asyncio.timeout(wait), self._session.post("/generate", json=body) as answer:
                await answer.read()
        except TimeoutError:
            self.outcomes["hung up"] += 1

    async def _nonsense(self, chat: Chat) -> None:
        path = self._random.choice(("/generate", "/v1/chat/completions"))
        body = self._random.choice(NONSENSE)
        headers = {"Content-Type": "application/json"}
        async with self._session.post(path, data=body, headers=headers) as response:
            text = await response.text()
            assert 400 <= response.status < 500, (path, body, response.status, text)
        self.outcomes["refused"] += 1

    async def _explain(self, chat: Chat) -> None:
        prompt = self._document() + self._own()
        body = {"input_ids": prompt, **chat.tenant}
        report = await self._post("/hybrid_cache/explain", body)
        assert report, body
        self.outcomes["explained"] += 1

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        async with self._session.post(path, json=body) as response:
            assert response.status == 200, (path, body, response.status, await response.text())
            self.outcomes["answered"] += 1
            return await response.json()

    def _body(self, chat: Chat, prompt: list[int], new_tokens: int = 0) -> dict[str, Any]:
        new_tokens = new_tokens or self._random.choice((1, 2, 4, 8, 16))
        return greedy(prompt, new_tokens, return_logprob=False, **chat.tenant)

    def _document(self) -> list[int]:
        document = self._random.choice(self._documents)
        if self._random.random() < 0.3:
            return document[: self._random.randrange(20, len(document))]
        return list(document)

    def _own(self) -> list[int]:
        return random_prompt(self._random.randrange(1, 50), seed=self._random.randrange(2**32))
