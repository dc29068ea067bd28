"""Work that fails because of a replica is tried again, later and later where it lies, and never
given up.
"""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from sglang_hybrid.extensions.router import attempts
from sglang_hybrid.extensions.router.attempts import LONGEST_PAUSE, MOST_SAID, keep_trying, sentence
from sglang_hybrid.extensions.router.reader import OutOfStep
from sglang_hybrid.extensions.router.wire import Malformed


class Closed(threading.Event):
    """Notes the seconds that were waited, without waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waits.append(timeout)
        return self.is_set()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    one = Clock()
    monkeypatch.setattr(attempts, "time", one)
    return one


def tried(clock: Clock, *outcomes: tuple[float, Exception | None]) -> tuple[list[float], list[Any]]:
    """The waits and log lines after attempts that last so many seconds and raise this."""
    left, told = list(outcomes), []
    closed = Closed()

    def attempt() -> None:
        seconds, error = left.pop(0)
        clock.now += seconds
        if error is not None:
            raise error

    keep_trying(attempt, lambda *said: told.append(said), closed, 1.0)
    assert not left
    return closed.waits, told


def test_one_that_lies_is_put_aside_for_twice_as_long_each_time(clock: Clock) -> None:
    lies = [(0.0, Malformed("a lie"))] * 9
    waits, told = tried(clock, *lies, (0.0, None))
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert told == [("a lie", False, True)] * 9


def test_one_that_was_right_for_long_is_put_aside_for_short(clock: Clock) -> None:
    lie = Malformed("a lie")
    long = LONGEST_PAUSE + 1
    waits, _ = tried(clock, (0, lie), (0, lie), (0, lie), (long, lie), (0, lie), (0, None))
    assert waits == [1, 2, 4, 1, 2]


def test_one_that_is_away_is_asked_again_each_second(clock: Clock) -> None:
    away, busy, lost = httpx.ConnectTimeout("gone"), httpx.ReadTimeout("late"), OutOfStep("a gap")
    waits, told = tried(clock, (0.25, away), (5, busy), (0.5, lost), (0, None))
    assert waits == [0.75, -4, 0.5]
    assert told == [("gone", True, False), ("late", False, False), ("a gap", False, False)]


@pytest.mark.parametrize(
    "error", [RecursionError(), MemoryError(), KeyError(1), UnicodeDecodeError("u", b"", 0, 1, "")]
)
def test_nothing_that_is_raised_ends_the_attempts(clock: Clock, error: Exception) -> None:
    waits, told = tried(clock, (0, error), (0, None))
    assert (waits, told[0][1:]) == ([1], (False, True))


def test_they_end_once_they_are_closed(clock: Clock) -> None:
    closed = Closed()
    closed.set()
    keep_trying(lambda: pytest.fail("tried"), lambda *said: None, closed, 1.0)
    assert closed.waits == []


def test_an_error_is_one_line_that_any_terminal_can_show() -> None:
    assert sentence(ValueError("a\nb\x1b[31m")) == "a?b?[31m"
    assert sentence(ValueError()) == "ValueError"
    assert len(sentence(ValueError("x" * 10_000))) == MOST_SAID
