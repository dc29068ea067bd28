"""Seconds that all ranks agree on.

They are counted from the first arrival or tick, and belong to no host: how long a host has been up
differs from host to host. Two things move them on, both of which every rank sees at the same step:

* Ticks. The rank that receives requests adds the seconds that have passed on its own clock, and
  tells all ranks the sum (cache/step_messages.py). It does so often while somebody there waits for
  a time, and now and then in any case.
* The stamps of requests that arrive (hooks/serving.py), by the differences between them.

Both are bounded. A clock that jumps moves the time by MOST_AT_ONCE at most. So does a stamp; one
that is further ahead, or days behind, is of another host, and counts as of now.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sglang_hybrid.serving.per_request import PerRequest

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

SECONDS_BETWEEN_TICKS: Final = 0.05
SECONDS_WITHOUT_A_TICK: Final = 5.0
"""Seconds after which a tick is sent again if nobody waits for a time. Then the time is right to
that extent, and a stamp that is far ahead of it cannot be of this host.
"""

FIRST_TICK: Final = 1.0
"""The first second: 0 is no time where arrivals are recorded."""

MOST_AT_ONCE: Final = 60.0
"""Seconds that one tick or stamp moves the time at most."""

LONGEST_WAIT: Final = 86_400.0
"""Seconds that a request may have waited before anything was looked up for it."""


@dataclass(frozen=True)
class ClockTick:
    """seconds: what time it is, for all ranks."""

    seconds: float


class StepClock:
    """The time of the latest tick or arrival. It never goes back.

    read: this rank's clock; of the rank that receives requests, it is what ticks count.
    """

    def __init__(self, read: Callable[[], float] = time.perf_counter) -> None:
        self.now = 0.0
        self.read = read
        self._moved = -math.inf  # reading of this rank's clock when `now` was last right
        self._offered = ClockTick(0.0), 0.0  # the last tick, and the reading that it is of
        self._offset: float | None = None  # from stamps to the time of all ranks
        self._ticks = False
        self._arrivals: PerRequest[float] = PerRequest()
        self._needs: list[Callable[[float], bool]] = []
        self._listeners: list[Callable[[float], None]] = []

    def join(
        self, needs_tick: Callable[[float], bool], listener: Callable[[float], None] | None = None
    ) -> None:
        """Ticks are sent often when `needs_tick`, asked with the seconds of now, says so. listener:
        called with each tick, on every rank.
        """
        self._needs.append(needs_tick)
        if listener is not None:
            self._listeners.append(listener)

    def poll(self) -> list[ClockTick]:
        """The ticks to send to all ranks now; called on the rank that receives requests."""
        reading = self.read()
        passed = reading - self._moved
        if passed < 0:  # this rank's clock went back
            self._moved, passed = reading, 0.0
        if not self._needs or passed < SECONDS_BETWEEN_TICKS:
            return []
        seconds = self.now + (min(passed, MOST_AT_ONCE) if self._ticks else FIRST_TICK)
        if passed < SECONDS_WITHOUT_A_TICK and not any(needs(seconds) for needs in self._needs):
            return []
        self._offered = ClockTick(seconds), reading
        return [self._offered[0]]

    def handlers(self) -> list[tuple[type, Callable[[ClockTick], None]]]:
        """The handlers that the scheduler's dispatcher must know."""
        return [(ClockTick, self.tick)]

    def tick(self, tick: ClockTick) -> None:
        """Set the clock to `tick`; called on every rank, at the same step."""
        offered, reading = self._offered
        self._ticks = True
        self.now = max(self.now, tick.seconds)
        self._moved = reading if offered == tick else self.read()
        for listener in self._listeners:
            listener(tick.seconds)

    def arrival(self, req: Req) -> float | None:
        """The arrival of `req`, None if it has no stamp. The first time that it is asked, the time
        moves on to that.
        """
        known = self._arrivals.get(req)
        if known is None and req.time_stats.created_time:
            known = self._arrivals[req] = self._arrived(float(req.time_stats.created_time))
        return known

    def _arrived(self, stamp: float) -> float:
        if self._offset is None:
            self._offset = self.now - stamp if self._ticks else 0.0
        seconds = stamp + self._offset
        if self._ticks and not -LONGEST_WAIT <= seconds - self.now <= MOST_AT_ONCE:
            self._offset, seconds = self.now - stamp, self.now
        if seconds > self.now:
            self.now, self._moved = seconds, self.read()
        return seconds
