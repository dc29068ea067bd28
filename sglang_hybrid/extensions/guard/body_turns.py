"""Steps of the event loop that take long, as to read a long body, one at a time, with time for
other work between them.
"""

from __future__ import annotations

import asyncio
import math
import time
import types
from collections.abc import Awaitable, Callable, Generator
from itertools import islice
from typing import Any, Final, TypeVar

T = TypeVar("T")

FREE: Final = 3.0
"""The time for other work of the event loop after a long step, in durations of that step."""

MADE_UP: Final = 0.05
"""Seconds of other work before a step, at most, that count as such time. A loop that is busy, as
with many streams, comes back late: several steps may then follow one another.
"""

WOKEN: Final = 16
"""Callers that look at once whether they may begin."""


class BodyTurns:
    """Steps of the event loop that take long, one at a time, in the order in which they were asked
    for; after each the loop is free for `FREE` times as long as it took.
    """

    def __init__(self) -> None:
        self._waiting: dict[object, asyncio.Future[None] | None] = {}
        self._free_at = -math.inf
        self._begin: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def take(self) -> None:
        """Return when the caller may begin a step. The step ends where the caller awaits next."""
        loop, own = asyncio.get_running_loop(), object()
        self._waiting[own] = None
        try:
            while not self._may_begin(own):
                self._waiting[own] = woken = loop.create_future()
                self._wake_later()
                await woken
        finally:
            del self._waiting[own]
            self._wake_later()
        self._begin = time.monotonic()  # uvloop's own time stands still within a step
        loop.call_soon(self.end)  # at the latest; `stepwise` tells when the caller awaits

    def _may_begin(self, caller: object) -> bool:
        self.end()  # of a step before, since others run by now
        is_first = next(iter(self._waiting)) is caller
        return is_first and self._free_at <= time.monotonic()

    def end(self) -> None:
        """The step that has begun, if there is one, has ended."""
        if self._begin is not None:
            now = time.monotonic()
            took, self._begin = now - self._begin, None
            self._free_at = max(self._free_at, now - took - MADE_UP) + (1 + FREE) * took

    def _wake_later(self) -> None:
        if self._waiting and self._timer is None:
            delay = max(0.0, self._free_at - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._wake)

    def _wake(self) -> None:
        self._timer = None
        for future in islice(self._waiting.values(), WOKEN):
            if future is not None and not future.done():
                future.set_result(None)


@types.coroutine
def stepwise(work: Awaitable[T], on_pause: Callable[[], None]) -> Generator[Any, Any, T]:
    """`await work`, with a call of `on_pause` each time that it gives way to others."""
    steps = work.__await__()
    step: Callable[[Any], Any] = steps.send
    given = None
    while True:
        try:
            awaited = step(given)
        except StopIteration as end:
            result: T = end.value
            return result
        on_pause()
        try:
            given = yield awaited
            step = steps.send
        except BaseException as error:
            given, step = error, steps.throw
