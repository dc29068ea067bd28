"""What a client says of its session when a request ends, and how far that may be believed."""

from __future__ import annotations

from enum import Enum
from typing import Final


class Hint(Enum):
    """ENDS: this was the session's last request. RETURNS: another one will follow."""

    ENDS = "end"
    RETURNS = "return"


FIRST_BELIEF: Final = {Hint.ENDS: 0.1, Hint.RETURNS: 0.9, None: 0.5}
"""Probability of a return after a hint from a tenant that gave none of this kind before; None:
without a hint.
"""

LEAST_DIFFERENCE: Final = 0.2
"""Between the probabilities with a hint and without one, from which on the hint says something."""

BELIEF_WEIGHT: Final = 2.0
"""Hints that the first belief counts for: one that proves false is enough to doubt the next."""

MEMORY: Final = 64
"""Hints of a kind after which what one of them proved counts half."""


class HintRecord:
    """How often a return followed the hints of one tenant, by kind, and requests without one; old
    ones fade.
    """

    def __init__(self) -> None:
        self._given: dict[Hint | None, float] = dict.fromkeys(FIRST_BELIEF, 0.0)
        self._returned: dict[Hint | None, float] = dict.fromkeys(FIRST_BELIEF, 0.0)

    def tells(self, hint: Hint) -> bool:
        """Whether returns after `hint` are not as frequent as without a hint."""
        return abs(self.probability(hint) - self.probability(None)) > LEAST_DIFFERENCE

    def probability(self, hint: Hint | None) -> float:
        """Of a return after `hint`: the share of those so far, shrunk towards `FIRST_BELIEF`."""
        believed = BELIEF_WEIGHT * FIRST_BELIEF[hint]
        return (believed + self._returned[hint]) / (BELIEF_WEIGHT + self._given[hint])

    def followed(self, hint: Hint | None, *, returned: bool) -> None:
        """A return followed a request with this hint, or none did."""
        fade = 0.5 ** (1 / MEMORY)
        self._given[hint] = fade * self._given[hint] + 1
        self._returned[hint] = fade * self._returned[hint] + returned

    def take_back(self, hint: Hint | None) -> None:
        """One of the hints that no return seemed to follow was followed by one after all:
        `followed` is called again for it.
        """
        self._given[hint] = max(self._given[hint] - 1, self._returned[hint])
