"""Seconds that all ranks agree on.

The rank that receives requests sends its clock to all ranks, with the requests of a step (patch
0060), while somebody there waits for a time. Between two such ticks the stamps of requests that
arrive move the clock on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

SECONDS_BETWEEN_TICKS: Final = 0.05


@dataclass(frozen=True)
class ClockTick:
    """seconds: `time.perf_counter` of the rank that receives requests, as in the arrival stamps."""

    seconds: float


class StepClock:
    """The time of the latest tick or arrival. It never goes back.

    read: the clock of the rank that receives requests.
    """

    def __init__(self, read: Callable[[], float] = time.perf_counter) -> None:
        self.now = 0.0
        self._read = read
        self._sent = 0.0
        self._wanted: list[Callable[[float], bool]] = []
        self._told: list[Callable[[float], None]] = []

    def join(
        self, wanted: Callable[[float], bool], told: Callable[[float], None] | None = None
    ) -> None:
        """Ticks are sent when `wanted`, asked with the seconds of now, says so. told: what each
        tick is given to, on every rank.
        """
        self._wanted.append(wanted)
        if told is not None:
            self._told.append(told)

    def poll(self) -> list[ClockTick]:
        """On the rank that receives requests: what is sent to all ranks now."""
        seconds = self._read()
        if seconds - self._sent < SECONDS_BETWEEN_TICKS:
            return []
        if not any(wanted(seconds) for wanted in self._wanted):
            return []
        self._sent = seconds
        return [ClockTick(seconds)]

    def handlers(self) -> list[tuple[type, Callable[[ClockTick], None]]]:
        """What the scheduler's dispatcher must know."""
        return [(ClockTick, self.tick)]

    def tick(self, tick: ClockTick) -> None:
        """On every rank, at the same step."""
        self.advance(tick.seconds)
        for told in self._told:
            told(tick.seconds)

    def advance(self, seconds: float) -> None:
        """A request arrived then."""
        self.now = max(self.now, seconds)
