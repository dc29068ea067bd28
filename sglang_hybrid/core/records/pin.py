"""What clients declare to come back, for a time: one pin, asked for and in force.

A pin is evidence of return (design.md 7), a rate of returns with a lifetime: a normal one says that
somebody comes back before its lifetime is over. That adds to what is known of the position anyway.
So a pin is a bias and no lock: what is worth more than all that is pinned still pushes it out, and
the pins of a tenant may take a share of the memory and no more.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Final

DEFAULT_SHARE: Final = 0.25
"""Of the memory, for the pins of one tenant."""

MOST_OF_ALL: Final = 0.5
"""Of the memory, for the pins of all tenants."""


class Priority(Enum):
    """How much a pin counts for, beside others."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"

    @property
    def weight(self) -> float:
        """How pins rank, and what they count where nothing estimates returns
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

    tenant: Hashable
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
