"""A request that waits, what its prefill would take, and how often others may overtake it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Generic, TypeVar

Name = TypeVar("Name")


class ReuseKind(IntEnum):
    """The reuse of a waiting request, in the order in which CaR runs such requests (CaR III B 1).
    KV without a state at its end cannot be reused and does not count.
    """

    ON_DEVICE = 0  # a prefix, all of which is on the device with its state
    NOTHING = 1
    TO_LOAD = 2  # some of it must come from another tier first

    @classmethod
    def of(cls, hit_len: int, *, loads: bool) -> ReuseKind:
        """The kind of a request that reuses `hit_len` tokens. loads: some of them are not on the
        device, or are still being loaded.
        """
        if loads:
            return cls.TO_LOAD
        return cls.ON_DEVICE if hit_len else cls.NOTHING


@dataclass(frozen=True, slots=True)
class Prospect:
    """The prefill of a waiting request if it began now.

    hit_len: prompt tokens that are reused. cost: what the prefill takes on the device, with the
    part of a load that cannot be hidden behind computing; whole_cost: what it would take if nothing
    was reused. Both in seconds, or in FLOPs where nothing is loaded and no rate is known.
    """

    hit_len: int
    cost: float
    whole_cost: float
    reuse: ReuseKind

    @property
    def share(self) -> float:
        """The part of the prefill that remains."""
        return self.cost / self.whole_cost if self.whole_cost else 1.0


@dataclass(slots=True, eq=False)
class Waiting(Generic[Name]):
    """A request that waits.

    Attributes:
        name: the request.
        number: requests have ascending numbers in the order in which they came.
        arrived: seconds, on a clock that all ranks share.
        priority: those with a smaller one run first, whatever the order says.
        overtaken: requests of its priority that came later and ran first.
        rounds: rounds in which it was looked at.
        prospect: what its prefill would have taken in the last round in which it was looked at.
    """

    name: Name
    number: int
    arrived: float
    priority: int = 0
    overtaken: int = 0
    rounds: int = 0
    prospect: Prospect | None = None


@dataclass(frozen=True, slots=True)
class Bound:
    """A request that was overtaken `times` times, or has waited for `seconds`, is overtaken no more
    by requests of its priority.
    """

    times: float = math.inf
    seconds: float = math.inf

    def reached(self, waiting: Waiting[Any], now: float) -> bool:
        """True if nobody may overtake it any more."""
        return waiting.overtaken >= self.times or now - waiting.arrived >= self.seconds
