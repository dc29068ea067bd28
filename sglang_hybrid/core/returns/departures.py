"""Requests that leave a sequence which nothing has continued yet: at its end, or before it."""

from __future__ import annotations

from typing import Final

FADE: Final = 1 - 1 / 512
"""The share of its weight that a request keeps when the next one comes."""
PRIOR: Final = 10.0
"""Requests that count as having left at an end before any came: a few requests say little."""


class Departures:
    """Counts of such requests, over all tenants. Old ones fade."""

    def __init__(self) -> None:
        self._at_end = 0.0
        self._before = 0.0

    def add(self, *, before: bool) -> None:
        """Count a request that left such a sequence at its end, or before it."""
        self._at_end = FADE * self._at_end + (not before)
        self._before = FADE * self._before + before

    @property
    def share(self) -> float:
        """Requests that left before the end for each one that left at it; 0 before any came."""
        return self._before / (self._at_end + PRIOR)
