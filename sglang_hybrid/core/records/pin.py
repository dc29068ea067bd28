"""One pin, asked for and in force: a client declares that requests will return to a position.

A pin counts as evidence of a return, beside what is known of the position anyway. It is a rate of
returns with a lifetime: a normal pin says that one request returns before its lifetime is over. So
a pin is a bias and no lock. A state that is worth more still pushes a pinned one out, and the pins
of a payer take at most a share of the memory.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Final

DEFAULT_SHARE: Final = 0.25
"""The share of the memory for the pins of one payer."""

MOST_OF_ALL: Final = 0.5
"""The share of the memory for the pins of all payers."""


class Priority(Enum):
    """The weight of a pin beside others."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"

    @property
    def weight(self) -> float:
        """The rank of pins, and their weight where nothing estimates returns
        (core/victims/eviction.py).
        """
        return {Priority.LOW: 0.5, Priority.NORMAL: 1.0, Priority.HIGH: 4.0}[self]

    def rate(self, ttl: float) -> float:
        """Returns per second that a pin of `ttl` seconds adds. A normal one is a return that is
        certain by then, at any moment before alike: after half of it on average. A low one is half
        a return. A high one has no bound but that of all positions (`ReuseIndex.peak`).
        """
        return math.inf if self is Priority.HIGH else 2 * self.weight / ttl


@dataclass(frozen=True, slots=True)
class PinRequest:
    """A client wants the prefix of `position` tokens kept for `ttl` seconds after its last use."""

    position: int
    ttl: float
    priority: Priority = Priority.NORMAL


@dataclass(slots=True, eq=False)
class Pin:
    """A pin in force. until: seconds of the cache's clock at which it ends."""

    payer: Hashable
    position: int
    ttl: float
    priority: Priority
    until: float

    @property
    def weight(self) -> float:
        return self.priority.weight

    @property
    def rate(self) -> float:
        """Returns per second that it adds."""
        return self.priority.rate(self.ttl)
