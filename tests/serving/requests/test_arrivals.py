"""Prompts that reach an idle server together are sent together, and one alone is sent at once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

from sglang_hybrid.serving.requests import arrivals
from sglang_hybrid.serving.requests.arrivals import Arrivals, are_gathered


class Process:
    """A tokenizing process that notes its messages. busy: a request is in the scheduler."""

    def __init__(self, busy: bool = False, error: Exception | None = None) -> None:
        self.messages: list[list[str]] = []
        self.error = error
        self.arrivals = Arrivals(lambda: busy, self._send, self._send_all)

    async def _send(self, prompt: str) -> None:
        await self._send_all([prompt])

    async def _send_all(self, prompts: list[str]) -> None:
        if self.error is not None:
            raise self.error
        self.messages.append(prompts)

    async def handle(self, prompt: str, turns: int = 0) -> None:
        """A prompt that takes so many turns of the event loop from its connection to here."""
        for _ in range(turns):
            await asyncio.sleep(0)
        await self.arrivals.send(prompt)


def handled(process: Process, **turns: int) -> list[list[str]]:
    async def all_of_them() -> None:
        await asyncio.gather(*(process.handle(name, count) for name, count in turns.items()))

    asyncio.run(all_of_them())
    return process.messages


def test_what_arrives_together_is_one_message() -> None:
    assert handled(Process(), a=0, b=3, c=8, d=12) == [["a", "b", "c", "d"]]


def test_a_prompt_that_comes_later_is_another_message() -> None:
    assert handled(Process(), a=0, b=60) == [["a"], ["b"]]


def test_a_busy_server_gets_each_at_once() -> None:
    assert handled(Process(busy=True), a=0, b=0) == [["a"], ["b"]]


def test_no_prompt_is_held_while_others_go_on_arriving(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)

    def monotonic() -> float:
        clock.now += 0.001
        return clock.now

    monkeypatch.setattr(arrivals, "time", SimpleNamespace(monotonic=monotonic))
    names = {f"p{number}": number for number in range(40)}
    first = handled(Process(), **names)[0]
    assert "p0" in first and len(first) < 10


def test_who_waits_for_nobody_loses_no_time() -> None:
    """A sequential client: as many turns for each prompt, and no pause between them."""
    process = Process()

    async def one_by_one() -> int:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        for number in range(50):
            await process.handle(str(number))
        counting.cancel()
        return turns

    assert asyncio.run(one_by_one()) <= 50 * (arrivals.QUIET_TURNS + 4)
    assert process.messages == [[str(number)] for number in range(50)]


def test_a_client_that_goes_away_is_not_sent_and_holds_up_nobody() -> None:
    process = Process()

    async def run() -> None:
        leaving = asyncio.create_task(process.handle("leaves"))
        staying = asyncio.create_task(process.handle("stays"))
        await asyncio.sleep(0)
        leaving.cancel()
        await staying

    asyncio.run(run())
    assert process.messages == [["stays"]]


def test_each_sender_is_told_that_sending_failed() -> None:
    process = Process(error=RuntimeError("no scheduler"))

    async def run() -> list[str]:
        both = process.handle("a"), process.handle("b")
        return [str(error) for error in await asyncio.gather(*both, return_exceptions=True)]

    assert asyncio.run(run()) == ["no scheduler"] * 2


def tokenized(**fields: Any) -> Any:
    """A tokenized request with these fields; all others are empty."""
    kind = TokenizedGenerateReqInput
    return kind(**{**dict.fromkeys(kind.__struct_fields__), **fields})


@pytest.mark.parametrize(
    ("backend", "admission", "images", "gathered"),
    [
        ("hybrid", "judicious", None, True),
        ("hybrid", "judicious", "images", False),
        ("hybrid", "all", None, False),
        ("auto", "judicious", None, False),
    ],
)
def test_only_where_the_cache_decides(
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    admission: str,
    images: str | None,
    gathered: bool,
) -> None:
    monkeypatch.setenv("SGLANG_HYBRID_ADMISSION", admission)
    manager = SimpleNamespace(server_args=SimpleNamespace(radix_cache_backend=backend))
    prompt = tokenized(mm_inputs=images)
    assert are_gathered(manager, prompt) is gathered
    assert not are_gathered(manager, [prompt])
