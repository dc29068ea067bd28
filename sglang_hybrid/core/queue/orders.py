"""Orders in which waiting requests run.

An order looks at the requests at the front of the queue and gives each a key; the smallest runs
first. Behind the front the queue is first-come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

from sglang_hybrid.core.queue.waiting import Prospect, ReuseKind, Waiting

MOST_SHARE: Final = 0.75
"""Part of a prefill that remains from which on `Window` is first-come."""

Key = tuple[float, ...]


class Order(Protocol):
    """name: as in flags and tables. holds: whether what requests at the front would resume from is
    kept for them (core/queue/demand.py).
    """

    @property
    def name(self) -> str: ...

    @property
    def holds(self) -> bool: ...

    def front(self, waiting: int) -> int:
        """The number of `waiting` requests, from the front of the queue, that are looked at."""
        ...

    def key(self, waiting: Waiting[Any], prospect: Prospect, now: float) -> Key:
        """The smallest runs first; among equals, the request that came first."""
        ...


@dataclass(frozen=True)
class FirstCome:
    """The order of arrival; SGLang's `fcfs`."""

    name = "fcfs"
    holds = False

    def front(self, waiting: int) -> int:
        return 0

    def key(self, waiting: Waiting[Any], prospect: Prospect, now: float) -> Key:
        return ()


@dataclass(frozen=True)
class Car:
    """CaR's order: within a window of fixed size at the queue's front, by what can be reused, then
    first-come (CaR III B 1).
    """

    window: int
    name = "car"
    holds = True

    def front(self, waiting: int) -> int:
        return min(self.window, waiting)

    def key(self, waiting: Waiting[Any], prospect: Prospect, now: float) -> Key:
        return (prospect.reuse,)


@dataclass(frozen=True)
class Window:
    """CaR's window, with the part of the prefill that remains in the place of its classes: the
    smallest part first.

    Requests that reuse little or nothing, whose prefill remains to `MOST_SHARE` or more, and those
    that must load something, are first-come. So a long prompt never waits for short ones because it
    is long, and a load has the time until its turn. In CaR what must be loaded comes last of all:
    where most prompts lie below the device, it would wait longest.
    """

    window: int
    name = "window"
    holds = True

    def front(self, waiting: int) -> int:
        return min(self.window, waiting)

    def key(self, waiting: Waiting[Any], prospect: Prospect, now: float) -> Key:
        waits = prospect.reuse is ReuseKind.TO_LOAD or prospect.share >= MOST_SHARE
        return (1.0 if waits else prospect.share,)
