"""Random traffic of few prompts that come again and again, in every way that a client asks."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from tests.server.soak import LOGPROBS, Soak, last_event

LENGTHS = (17, 64, 120, 250, 333, 480)
LONGEST_ANSWER = 24
WISHES: tuple[Callable[[list[int]], dict[str, Any]], ...] = (
    lambda _: {},
    lambda _: {"top_logprobs_num": 2},
    lambda _: {"sampling_params": {"frequency_penalty": 1.0, "repetition_penalty": 1.3}},
    lambda prompt: {"logprob_start_len": len(prompt) - 1},
)
"""Further wishes of a request with a prompt; none of them needs a forward of the prompt."""


@dataclass(frozen=True)
class Asked:
    """A greedy answer, and how it was asked: which prompt, which wish, by which kind of call."""

    prompt: int
    wish: int
    how: str
    record: dict[str, Any]


class Repeats(Soak):
    """Clients that have six prompts between them."""

    def __init__(self, url: str, seed: int) -> None:
        super().__init__(url, seed, priorities=True)
        self.prompts = [self._tokens(length) for length in LENGTHS]
        self.asked: list[Asked] = []

    def _next(self) -> tuple[int, Callable[[], Coroutine[Any, Any, None]]]:
        draw = self._random.random()
        for share, count, make in (
            (0.05, 4, lambda: self._ask_many("batch", 4)),
            (0.10, 3, lambda: self._ask_many("samples", 3)),
            (0.20, 1, self._stream),
            (0.06, 1, self._hang_up),
            (0.06, 1, self._abort),
            (0.005, 0, self._flush),
        ):
            if draw < share:
                return count, make
            draw -= share
        return 1, lambda: self._ask_many("alone", 1)

    def _prompt(self) -> list[int]:
        return self._random.choice(self.prompts)

    async def _ask_many(self, how: str, count: int) -> None:
        """One request, a batch of the same prompt, or one for several greedy samples."""
        body, prompt, wish = self._wished()
        if how == "batch":
            body["input_ids"] = [body["input_ids"]] * count
        elif how == "samples":
            body["sampling_params"]["n"] = count
        records = await self._post(body)
        for record in records if count > 1 else [records]:
            self.asked.append(Asked(prompt, wish, how, record))

    async def _stream(self) -> None:
        body, prompt, wish = self._wished()
        async with self._session.post("/generate", json=body | {"stream": True}) as response:
            record, ended = await last_event(response, lambda: 0)
        assert ended
        self.asked.append(Asked(prompt, wish, "stream", record))

    def _wished(self) -> tuple[dict[str, Any], int, int]:
        """A body, and the numbers of its prompt and of its wish."""
        prompt = self._random.randrange(len(self.prompts))
        wish = self._random.randrange(len(WISHES))
        return self.body_of(prompt, wish), prompt, wish

    def body_of(self, prompt: int, wish: int, new_tokens: int | None = None) -> dict[str, Any]:
        """A greedy request with these; by default for an answer of any length up to the longest."""
        tokens = self.prompts[prompt]
        body = self._body(tokens, new_tokens) | LOGPROBS
        more = WISHES[wish](tokens)
        body["sampling_params"] |= more.pop("sampling_params", {})
        return body | more
