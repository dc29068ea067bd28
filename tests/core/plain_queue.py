"""The plain twin of `core.queue.waiting_queue`: a list of who ran when says who overtook whom."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_hybrid.core.queue.orders import Order
from sglang_hybrid.core.queue.waiting import Bound, Prospect, Waiting


@dataclass
class Arrived:
    name: str
    prospect: Prospect
    at: float
    priority: int
    rounds: int = 0
    ran: float | None = None


class PlainQueue:
    """Every request that ever came, in the order in which they came."""

    def __init__(self, order: Order, bound: Bound) -> None:
        self.order = order
        self.bound = bound
        self.all: list[Arrived] = []
        self.front: list[Arrived] = []
        self.now = 0.0

    def add(self, name: str, prospect: Prospect, at: float, priority: int) -> None:
        self.all.append(Arrived(name, prospect, at, priority))

    def waiting(self) -> list[Arrived]:
        """The waiting requests, the most urgent first, then in the order in which they came."""
        return sorted((one for one in self.all if one.ran is None), key=lambda one: one.priority)

    def overtaken(self, one: Arrived) -> int:
        """Requests of its priority behind it in the list that ran while it waited."""
        behind = self.all[self.all.index(one) + 1 :]
        return sum(
            other.ran is not None
            and other.priority == one.priority
            and (one.ran is None or other.ran < one.ran)
            for other in behind
        )

    def is_due(self, one: Arrived) -> bool:
        return self.overtaken(one) >= self.bound.times or self.now - one.at >= self.bound.seconds

    def arrange(self, now: float, count: int) -> list[str]:
        """The names at the front, in the order in which they are tried."""
        self.now = now
        self.front = self.waiting()[:count]
        for one in self.front:
            one.rounds += 1

        def key(one: Arrived) -> tuple[object, ...]:
            due = self.is_due(one)
            record = Waiting(one.name, 0, one.at, rounds=one.rounds)
            own = () if due else self.order.key(record, one.prospect, now)
            return one.priority, not due, own

        self.front.sort(key=key)  # stable: among equals, who came first
        return [one.name for one in self.front]

    def can_run(self, name: str) -> bool:
        left = [one for one in self.front if one.ran is None]
        if name not in [one.name for one in left]:
            return not left
        own = next(one for one in left if one.name == name)
        before = self.all[: self.all.index(own)]
        return not any(
            one in before and one.priority == own.priority and self.is_due(one) for one in left
        )

    def run(self, name: str, now: float) -> int:
        """`name` runs; how many had overtaken it."""
        one = next(one for one in self.all if one.name == name)
        overtaken = self.overtaken(one)
        one.ran = now + 1e-6 * sum(other.ran is not None for other in self.all)
        return overtaken
