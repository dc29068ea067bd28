"""The time of all ranks, while the clocks of hosts jump and differ."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.cache.queue.clock import (
    FIRST_TICK,
    MOST_AT_ONCE,
    SECONDS_BETWEEN_TICKS,
    SECONDS_WITHOUT_A_TICK,
    ClockTick,
    StepClock,
)
from sglang_hybrid.cache.step_messages import StepMessages

DAYS = 30 * 86_400.0
UP = 5_000_000.0
"""The uptime of the first host, in seconds."""


class Ranks:
    """Ranks that share their requests; the first one receives them. clock: of its host, in seconds
    since the test began; the others' tell another time.
    """

    def __init__(self, *, waits: bool = False, count: int = 2) -> None:
        self.clock = 0.0
        self.told: list[float] = []
        self.clocks = [
            StepClock(lambda number=number: UP + self.clock + number * DAYS)  # type: ignore[misc]
            for number in range(count)
        ]
        self._messages = [StepMessages(_Source(clock)) for clock in self.clocks]
        for clock in self.clocks:
            clock.join(lambda seconds: waits)
        self.clocks[0].join(lambda seconds: False, self.told.append)

    @property
    def now(self) -> float:
        """The time of all ranks."""
        (time,) = {clock.now for clock in self.clocks}
        return time

    def step(self, passed: float = 0.0, *, receives: bool = True) -> None:
        """A step of the scheduler, so many seconds after the last one."""
        self.clock += passed
        sent = self._messages[0].poll()
        if receives:
            for messages, message in itertools.product(self._messages, sent):
                ((_, handle),) = messages.handlers()
                handle(message)

    def arrives(self, stamp: float) -> float | None:
        """A request is looked up for the first time."""
        reqs: list[Any] = [_request(stamp) for _ in self.clocks]
        (seconds,) = {clock.arrival(req) for clock, req in zip(self.clocks, reqs, strict=True)}
        return seconds


class _Source:
    def __init__(self, clock: StepClock) -> None:
        self.poll, self.handlers = clock.poll, clock.handlers


def _request(stamp: float) -> Any:
    return SimpleNamespace(time_stats=SimpleNamespace(created_time=stamp))


def test_it_never_goes_back() -> None:
    clock = StepClock(lambda: 0.0)
    clock.tick(ClockTick(5.0))
    clock.tick(ClockTick(4.0))
    assert clock.arrival(_request(100.0)) == 5.0
    assert clock.arrival(_request(98.0)) == 3.0
    assert clock.now == 5.0


def test_ticks_are_sent_often_only_while_somebody_waits_for_a_time() -> None:
    reading = 0.0
    waits = False
    clock = StepClock(lambda: reading)
    assert clock.poll() == [], "nobody uses the time"
    clock.join(lambda seconds: waits)
    assert clock.poll() == [ClockTick(FIRST_TICK)]
    clock.tick(ClockTick(FIRST_TICK))
    reading = SECONDS_BETWEEN_TICKS
    assert clock.poll() == []
    waits = True
    assert clock.poll() == [ClockTick(FIRST_TICK + reading)]
    reading /= 2
    assert clock.poll() == []
    waits, reading = False, SECONDS_WITHOUT_A_TICK
    assert clock.poll() == [ClockTick(FIRST_TICK + reading)]


def test_seconds_pass_as_they_do() -> None:
    """The clock follows ticks, arrivals, or both, whatever the host's own clock says."""
    ranks = Ranks(waits=True)
    ranks.step()
    began = ranks.now
    for _ in range(1_000):
        ranks.step(0.07)
    assert ranks.now - began == pytest.approx(70.0)
    for number in range(100):
        ranks.arrives(UP + ranks.clock)
        ranks.step(0.07, receives=number % 7 == 0)
    ranks.step()
    assert ranks.now - began == pytest.approx(77.0, abs=0.5)
    assert ranks.now < 100.0, "it is not the host's own time"


@pytest.mark.parametrize("jump", [DAYS, -DAYS], ids=["forward", "back"])
def test_a_clock_that_jumps_moves_the_time_by_a_minute_at_most(jump: float) -> None:
    ranks = Ranks(waits=True)
    ranks.step()
    ranks.arrives(UP)
    before = ranks.now
    ranks.step(jump)
    assert before <= ranks.now <= before + MOST_AT_ONCE
    ranks.arrives(UP + ranks.clock)  # stamps jump alike
    assert before <= ranks.now <= before + 2 * MOST_AT_ONCE
    after = ranks.now
    for _ in range(100):
        ranks.step(0.1)
    assert ranks.now - after == pytest.approx(10.0)
    assert ranks.arrives(UP + ranks.clock) == pytest.approx(ranks.now)


@pytest.mark.parametrize("apart", [DAYS, -DAYS], ids=["up for longer", "up for a shorter time"])
def test_requests_come_from_a_host_with_another_uptime(apart: float) -> None:
    """Leaders of data-parallel ranks are on several hosts: ticks count one host's clock, stamps are
    of another.
    """
    ranks = Ranks()
    ranks.step()
    for number in range(20):
        seconds = ranks.arrives(UP + ranks.clock + apart)
        assert seconds == pytest.approx(ranks.now, abs=0.1)
        assert ranks.now == pytest.approx(FIRST_TICK + 3.0 * number, abs=0.1)
        ranks.step(3.0)


@pytest.mark.parametrize("apart", [3_600.0, -3_600.0, DAYS, -DAYS])
def test_requests_come_from_two_hosts(apart: float) -> None:
    """Time passes as it does, to the seconds between two ticks, and no wait grows to days."""
    ranks = Ranks()
    ranks.step()
    for number in range(100):
        seconds = ranks.arrives(UP + ranks.clock + apart * (number % 2))
        assert seconds is not None and seconds <= ranks.now
        assert ranks.now - seconds <= 3_700.0
        ranks.step(3.0)
    assert ranks.now == pytest.approx(FIRST_TICK + 300.0, abs=10.0)


def test_a_request_arrives_once() -> None:
    ranks = Ranks(count=1)
    ranks.step()
    req = _request(UP)
    first = ranks.clocks[0].arrival(req)
    ranks.arrives(UP + DAYS)
    assert ranks.clocks[0].arrival(req) == first
    assert ranks.clocks[0].arrival(_request(0.0)) is None, "it has no stamp"


def test_without_ticks_stamps_tell_the_time() -> None:
    """A replay has no ticks, and its requests may be days apart."""
    clock = StepClock(lambda: 0.0)
    assert [clock.arrival(_request(stamp)) for stamp in (7.0, 5.0, DAYS)] == [7.0, 5.0, DAYS]
    assert clock.now == DAYS


def test_a_step_that_takes_minutes_counts_as_one() -> None:
    ranks = Ranks(waits=True)
    ranks.step()
    ranks.arrives(UP)
    ranks.step(300.0)
    assert ranks.now == FIRST_TICK + MOST_AT_ONCE
    assert ranks.arrives(UP + 299.0) == pytest.approx(ranks.now)
    assert ranks.told == [FIRST_TICK, FIRST_TICK + MOST_AT_ONCE]
