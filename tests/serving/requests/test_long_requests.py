"""Long requests: one step of the event loop at a time, and threads for what takes long."""

import asyncio
import os
import threading
import time
from contextvars import ContextVar

import pytest

from sglang_hybrid.serving.requests import long_requests
from sglang_hybrid.serving.requests.long_requests import BodyTurns, in_thread, in_thread_if_long

WHOSE: ContextVar[str] = ContextVar("whose", default="nobody's")


def test_others_run_between_two_long_steps() -> None:
    seen: list[str] = []

    async def long(turns: BodyTurns, name: str) -> None:
        await turns.take()
        seen.append(name)
        time.sleep(0.01)  # as if a body was parsed
        seen.append(name)

    async def others() -> None:
        while seen.count("a") + seen.count("b") + seen.count("c") < 6:
            seen.append("other")
            await asyncio.sleep(0)

    async def run() -> None:
        turns = BodyTurns()
        await asyncio.gather(*(long(turns, name) for name in "abc"), others())

    asyncio.run(run())
    steps = " ".join(seen).split("a a")[1].split("b b")
    assert "other" in steps[0]
    assert "other" in steps[1].split("c c")[0]


def test_a_turn_that_nobody_waits_for_any_more_is_given_on() -> None:
    async def run() -> None:
        turns = BodyTurns()
        await turns.take()
        gone = asyncio.create_task(turns.take())
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait_for(turns.take(), timeout=10)

    asyncio.run(run())


@pytest.mark.parametrize("long", [False, True])
def test_what_is_done_for_a_long_request_is_done_in_a_thread(long: bool) -> None:
    def where(*, of: str) -> tuple[threading.Thread, str, str]:
        return threading.current_thread(), WHOSE.get(), of

    async def run() -> None:
        long_requests._long.set(long)
        WHOSE.set("mine")
        thread, whose, of = await in_thread_if_long(where, of="x")
        assert (thread is threading.current_thread()) is not long
        assert (whose, of) == ("mine", "x")
        assert (long_requests.threads() is None) is not long

    asyncio.run(run())


def test_long_requests_share_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    long_requests._threads.cache_clear()
    running = most = 0

    def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.002)
        running -= 1

    async def run() -> None:
        await asyncio.gather(*(in_thread(work) for _ in range(8)))

    asyncio.run(run())
    assert most == 1
    long_requests._threads.cache_clear()


def test_what_goes_wrong_in_a_thread_is_told() -> None:
    def wrong() -> None:
        raise ValueError("not a number")

    with pytest.raises(ValueError, match="not a number"):
        asyncio.run(in_thread(wrong))
