"""Work that takes long for a long request is done in a thread."""

import asyncio
import os
import threading
import time
from contextvars import ContextVar

import pytest

from sglang_hybrid.serving.requests import long_requests
from sglang_hybrid.serving.requests.long_requests import in_thread, in_thread_if_long

WHOSE: ContextVar[str] = ContextVar("whose", default="nobody's")


@pytest.mark.parametrize("long", [False, True])
def test_what_is_done_for_a_long_request_is_done_in_a_thread(long: bool) -> None:
    def where(*, of: str) -> tuple[threading.Thread, str, str]:
        return threading.current_thread(), WHOSE.get(), of

    async def run() -> None:
        long_requests.set_long(long)
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
