"""What a client says of its session when a request ends, and how far that may be believed."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar, Final

MOST_SECONDS: Final = 604_800
"""Of a hint: a week."""

_TIMED: Final = re.compile(r"return *; *seconds *= *(?P<seconds>[0-9]+(\.[0-9]+)?)\Z")


class Next(Enum):
    """ENDS: this was the session's last request. RETURNS: another one will follow. RETURNS_AFTER:
    so many seconds after the end of this one.
    """

    ENDS = "end"
    RETURNS = "return"
    RETURNS_AFTER = "return after"


@dataclass(frozen=True, slots=True)
class Hint:
    """What comes next. seconds: until then, of RETURNS_AFTER; None where they tell nothing."""

    next: Next
    seconds: float | None = None

    ENDS: ClassVar[Hint]
    RETURNS: ClassVar[Hint]

    @classmethod
    def after(cls, seconds: float) -> Hint:
        """Another request follows after so many seconds. Raises ValueError."""
        if not 0 < seconds <= MOST_SECONDS:
            raise ValueError(
                f"a session returns after {seconds:g} seconds; say more than 0 and at most "
                f"{MOST_SECONDS:,}"
            )
        return cls(Next.RETURNS_AFTER, float(seconds))

    @classmethod
    def parse(cls, text: str) -> Hint:
        """`end`, `return`, or `return; seconds=20`. Raises ValueError for anything else."""
        if timed := _TIMED.match(text.strip()):
            return cls.after(float(timed["seconds"]))
        known = {Next.ENDS.value: cls.ENDS, Next.RETURNS.value: cls.RETURNS}
        if text not in known:
            raise ValueError("it is neither 'end' nor 'return' nor 'return; seconds=N'")
        return known[text]

    def __str__(self) -> str:
        if self.seconds is None:
            return "end" if self.next is Next.ENDS else "return"
        return f"return; seconds={self.seconds:g}"

    def without_time(self) -> Hint:
        """The same, for those whose time does not count seconds."""
        return self if self.seconds is None else replace(self, seconds=None)


Hint.ENDS = Hint(Next.ENDS)
Hint.RETURNS = Hint(Next.RETURNS)

FIRST_BELIEF: Final = {Next.ENDS: 0.1, Next.RETURNS: 0.9, Next.RETURNS_AFTER: 0.9, None: 0.5}
"""Probability of a return after a hint from a tenant that gave none of this kind before; None:
without a hint.
"""

LEAST_DIFFERENCE: Final = 0.2
"""Between the probabilities with a hint and without one, from which on the hint says something."""

BELIEF_WEIGHT: Final = 2.0
"""Hints that the first belief counts for: one that proves false is enough to doubt the next."""

MEMORY: Final = 64
"""Hints of a kind after which what one of them proved counts half."""

MOST_SPREAD: Final = 1.0
"""Octaves (root mean square) between seconds that were said and those that passed, up to which the
seconds tell something.
"""

LEAST_SECONDS: Final = 0.125
"""Shorter waits are taken to be so long."""


class HintRecord:
    """How often a return followed the hints of one tenant, by kind, and requests without one; and
    how true the seconds were that it named. Old ones fade.
    """

    def __init__(self) -> None:
        self.times = SaidTimes()
        self._given: dict[Next | None, float] = dict.fromkeys(FIRST_BELIEF, 0.0)
        self._returned: dict[Next | None, float] = dict.fromkeys(FIRST_BELIEF, 0.0)

    def tells(self, hint: Hint) -> bool:
        """Whether returns after `hint` are not as frequent as without a hint."""
        return abs(self.probability(hint) - self.probability(None)) > LEAST_DIFFERENCE

    def probability(self, hint: Hint | None) -> float:
        """Of a return after `hint`: the share of those so far, shrunk towards `FIRST_BELIEF`."""
        kind = None if hint is None else hint.next
        believed = BELIEF_WEIGHT * FIRST_BELIEF[kind]
        return (believed + self._returned[kind]) / (BELIEF_WEIGHT + self._given[kind])

    def followed(self, hint: Hint | None, *, returned: bool, after: float = 0.0) -> None:
        """A return followed a request with this hint, `after` seconds, or none did."""
        kind = None if hint is None else hint.next
        fade = 0.5 ** (1 / MEMORY)
        self._given[kind] = fade * self._given[kind] + 1
        self._returned[kind] = fade * self._returned[kind] + returned
        if hint is not None and hint.seconds is not None and returned:
            self.times.passed(hint.seconds, after)

    def take_back(self, hint: Hint | None) -> None:
        """One of the hints that no return seemed to follow was followed by one after all:
        `followed` is called again for it.
        """
        kind = None if hint is None else hint.next
        self._given[kind] = max(self._given[kind] - 1, self._returned[kind])

    def as_list(self) -> list[float]:
        """All that was learnt, for a file."""
        times = self.times
        return [
            *self._given.values(),
            *self._returned.values(),
            *(times.weight, times.octaves, times.squares),
        ]

    def restore(self, values: list[float]) -> None:
        """What `as_list` gave. Raises ValueError for another number of values."""
        kinds = len(FIRST_BELIEF)
        if len(values) != 2 * kinds + 3:
            raise ValueError(f"a record of hints has {2 * kinds + 3} values, not {len(values)}")
        self._given = dict(zip(FIRST_BELIEF, values, strict=False))
        self._returned = dict(zip(FIRST_BELIEF, values[kinds:], strict=False))
        self.times.weight, self.times.octaves, self.times.squares = values[2 * kinds :]


class SaidTimes:
    """Seconds until a return that a tenant named, against those that passed.

    weight, octaves, squares: of the hints so far, sums of 1, x and x^2 for x = log2(passed / said);
    old ones fade.
    """

    def __init__(self) -> None:
        self.weight = self.octaves = self.squares = 0.0

    def passed(self, said: float, passed: float) -> None:
        """A hint said so many seconds, and so many passed until the return."""
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
