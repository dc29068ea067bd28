"""The credibility of a tenant's hints: how often they proved true so far."""

from __future__ import annotations

import math
from typing import Final

from sglang_hybrid.core.returns.hints import LEAST_SECONDS, Hint, Next

FIRST_BELIEF: Final = {Next.ENDS: 0.1, Next.RETURNS: 0.9, Next.RETURNS_AFTER: 0.9, None: 0.5}
"""Probability of a return after a hint from a tenant that gave none of this kind before; None:
without a hint.
"""

LEAST_DIFFERENCE: Final = 0.2
"""The difference between the probabilities with a hint and without one, from which on the hint says
something.
"""

BELIEF_WEIGHT: Final = 2.0
"""Hints that the first belief counts for: one that proves false is enough to doubt the next."""

MEMORY: Final = 64
"""Hints of a kind after which what one of them proved counts half."""

MOST_SPREAD: Final = 1.0
"""Octaves (root mean square) between seconds that were said and those that passed, up to which the
seconds tell something.
"""


class HintRecord:
    """Counts of returns that followed the hints of one tenant, by kind, and requests without one;
    and of how true the seconds were that it named. Old ones fade.
    """

    def __init__(self) -> None:
        self.times = HintedTimes()
        self._counts: dict[Next | None, float] = dict.fromkeys(FIRST_BELIEF, 0.0)
        self._returned: dict[Next | None, float] = dict.fromkeys(FIRST_BELIEF, 0.0)

    def is_informative(self, hint: Hint) -> bool:
        """True if returns after `hint` are clearly more, or less, frequent than without a hint."""
        return abs(self.probability(hint) - self.probability(None)) > LEAST_DIFFERENCE

    def probability(self, hint: Hint | None) -> float:
        """The probability of a return after `hint`: the share of those so far, shrunk towards
        `FIRST_BELIEF`.
        """
        kind = None if hint is None else hint.next
        believed = BELIEF_WEIGHT * FIRST_BELIEF[kind]
        return (believed + self._returned[kind]) / (BELIEF_WEIGHT + self._counts[kind])

    def on_outcome(self, hint: Hint | None, *, returned: bool, after: float = 0.0) -> None:
        """A return followed a request with this hint, `after` seconds later, or none did. hint:
        None for a request without one.
        """
        kind = None if hint is None else hint.next
        fade = 0.5 ** (1 / MEMORY)
        self._counts[kind] = fade * self._counts[kind] + 1
        self._returned[kind] = fade * self._returned[kind] + returned
        if hint is not None and hint.seconds is not None and returned:
            self.times.on_return(hint.seconds, after)

    def retract(self, hint: Hint | None) -> None:
        """Undo `on_outcome(hint, returned=False)` for one request: a return followed it after all,
        and `on_outcome` is called for that.
        """
        kind = None if hint is None else hint.next
        self._counts[kind] = max(self._counts[kind] - 1, self._returned[kind])

    def as_list(self) -> list[float]:
        """All that was learnt, for a file."""
        times = self.times
        return [
            *self._counts.values(),
            *self._returned.values(),
            *(times.weight, times.octaves, times.squares),
        ]

    def restore(self, values: list[float]) -> None:
        """Take over what `as_list` has written. Raises ValueError for values that no record has."""
        kinds = len(FIRST_BELIEF)
        if len(values) != 2 * kinds + 3:
            raise ValueError(f"a record of hints has {2 * kinds + 3} values, not {len(values)}")
        *counts, weight, octaves, squares = values
        if not all(0 <= one < math.inf for one in (*counts, weight, squares, abs(octaves))):
            raise ValueError(f"a record of hints has sums that are not below 0, not {values}")
        self._counts = dict(zip(FIRST_BELIEF, counts, strict=False))
        self._returned = dict(zip(FIRST_BELIEF, counts[kinds:], strict=False))
        self.times.weight, self.times.octaves, self.times.squares = weight, octaves, squares


class HintedTimes:
    """Seconds until a return that a tenant named, against those that passed.

    weight, octaves, squares: of the hints so far, sums of 1, x and x^2 for x = log2(passed / said);
    old ones fade.
    """

    def __init__(self) -> None:
        self.weight = self.octaves = self.squares = 0.0

    def on_return(self, said: float, passed: float) -> None:
        """A hint named `said` seconds until the return, and `passed` seconds passed."""
        x = math.log2(max(passed, LEAST_SECONDS) / max(said, LEAST_SECONDS))
        fade = 0.5 ** (1 / MEMORY)
        self.weight = fade * self.weight + 1
        self.octaves = fade * self.octaves + x
        self.squares = fade * self.squares + x * x

    def expected(self, said: float) -> float | None:
        """Seconds until a return where `said` are named: so many times as many as has been usual.
        None where that varies too much to tell anything. The first one is believed.
        """
        weight = BELIEF_WEIGHT + self.weight
        usual = self.octaves / weight
        spread = max(self.squares / weight - usual * usual, 0.0)
        return None if spread > MOST_SPREAD**2 else said * 2.0**usual
