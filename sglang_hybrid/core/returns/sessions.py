"""The times at which sessions are expected back: what they need may be loaded before they come."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable
from itertools import islice
from typing import Final

MOST_EXPECTED: Final = 4_096
"""Sessions; of more, the one that is expected last is forgotten."""

POSITIONS_PER_CALL: Final = 64
"""Positions that one call of `due` looks at; the next call goes on behind them. The size of each is
found by a walk over its prefix, at every step of the scheduler.
"""

OVERDUE: Final = 10.0
"""Seconds after which somebody who did not come is not expected any more."""


class ExpectedReturns:
    """Positions, by any number, and when somebody is expected to come back to them."""

    def __init__(self, most: int = MOST_EXPECTED) -> None:
        self._most = most
        self._times: dict[int, float] = {}
        self._sorted: list[tuple[float, int]] = []
        self._looked: tuple[float, int] | None = None  # where the next call of `due` goes on

    def __len__(self) -> int:
        return len(self._times)

    def expect(self, position: int, time: float) -> None:
        """Somebody comes back to `position` at `time`, in seconds, and not at another time."""
        self.forget(position)
        self._times[position] = time
        insort(self._sorted, (time, position))
        if len(self._sorted) > self._most:
            del self._times[self._sorted.pop()[1]]

    def forget(self, position: int) -> None:
        """Remove a session that has come back, or will not."""
        time = self._times.pop(position, None)
        if time is not None:
            del self._sorted[bisect_left(self._sorted, (time, position))]

    def due(
        self,
        now: float,
        seconds: Callable[[int], float],
        size: Callable[[int], int],
        longest: float = math.inf,
    ) -> int | None:
        """A position whose load must begin by `now` to end in time; it is forgotten. None if there
        is none among those that this call looks at, in the order in which they are expected.

        size: bytes that must be loaded for a position; many need none. seconds: that so many take.
        longest: seconds that any load takes at most; nobody is looked at who is expected later.
        Positions that are overdue are forgotten.
        """
        while self._sorted and self._sorted[0][0] < now - OVERDUE:
            self.forget(self._sorted[0][1])
        begin = 0 if self._looked is None else bisect_left(self._sorted, self._looked)
        self._looked = None
        for looked, (time, position) in enumerate(islice(self._sorted, begin, None)):
            if time - longest > now:
                return None
            if looked == POSITIONS_PER_CALL:
                self._looked = time, position
                return None
            needed = size(position)
            if needed and time - seconds(needed) <= now:
                self.forget(position)
                return position
        return None
