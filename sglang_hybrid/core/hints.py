"""What a client says of its session when a request ends, and how far that may be believed."""

from __future__ import annotations

from enum import Enum
from typing import Final


class Hint(Enum):
    """ENDS: this was the session's last request. RETURNS: another one will follow."""

    ENDS = "end"
    RETURNS = "return"


FIRST_BELIEF: Final = {Hint.ENDS: 0.1, Hint.RETURNS: 0.9}
"""Probability of a return after a hint from a tenant that gave none of this kind before."""

BELIEF_WEIGHT: Final = 2.0
"""Hints that the first belief counts for: one that proves false is enough to doubt the next."""

MEMORY: Final = 64
"""Hints of a kind after which what one of them proved counts half."""


class HintRecord:
    """How often a return followed the hints of one tenant, by kind; old ones fade."""

    def __init__(self) -> None:
        self._given = dict.fromkeys(Hint, 0.0)
        self._returned = dict.fromkeys(Hint, 0.0)

    def probability(self, hint: Hint) -> float:
        """Of a return after `hint`: the share of those so far, shrunk towards `FIRST_BELIEF`."""
        believed = BELIEF_WEIGHT * FIRST_BELIEF[hint]
        return (believed + self._returned[hint]) / (BELIEF_WEIGHT + self._given[hint])

    def followed(self, hint: Hint, *, returned: bool) -> None:
        """A return followed the hint, or none did."""
        fade = 0.5 ** (1 / MEMORY)
        self._given[hint] = fade * self._given[hint] + 1
        self._returned[hint] = fade * self._returned[hint] + returned

    def take_back(self, hint: Hint) -> None:
        """One of the hints that no return seemed to follow was followed by one after all:
        `followed` is called again for it.
        """
        self._given[hint] = max(self._given[hint] - 1, self._returned[hint])
