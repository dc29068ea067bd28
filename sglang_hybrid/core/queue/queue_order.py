"""The queue of waiting requests: which are tried next, and which may be overtaken no more."""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping
from typing import Generic

from sglang_hybrid.core.queue.orders import Order
from sglang_hybrid.core.queue.waiting import Bound, Name, Prospect, Waiting


class QueueOrder(Generic[Name]):
    """Orders the front of a queue, round by round, and counts who overtakes whom.

    The queue is a list to which its owner appends. Requests that run or are aborted are taken out
    of it, and the others keep their place. So those at the front have waited longest, and a request
    that is among the first `front` stays among them until it leaves the queue: the front is CaR's
    Shuffled Window. A round costs time for the requests at the front, however many wait behind.

    All decisions follow from the queue, the prospects and the clock: ranks that agree on those
    agree on the order.

    Args:
        order: gives the keys.
        bound: after which a request is overtaken no more.
        known: where records are kept until their request has left. A WeakKeyDictionary also forgets
            requests that nobody speaks of any more.
    """

    def __init__(
        self, order: Order, bound: Bound, known: MutableMapping[Name, Waiting[Name]] | None = None
    ) -> None:
        self.order = order
        self.bound = bound
        self.front: dict[Name, Waiting[Name]] = {}
        self._known: MutableMapping[Name, Waiting[Name]] = {} if known is None else known
        self._last_number = 0
        self._now = 0.0

    def arrange(
        self,
        queue: list[Name],
        now: float,
        prospect: Callable[[Name], Prospect],
        arrived: Callable[[Name], float],
        priority: Callable[[Name], int] | None = None,
    ) -> None:
        """Put the front of `queue` into the order in which requests are tried.

        now: seconds on the clock that all ranks share. prospect, arrived, priority: of a request;
        without priorities all have the same one.
        """
        self._now = now
        if priority is not None:
            queue.sort(key=lambda name: (priority(name), self._number(name)))
        count = self.order.front(len(queue))
        keyed = []
        for name in queue[:count]:
            waiting = self._record(name, arrived(name), 0 if priority is None else priority(name))
            waiting.rounds += 1
            waiting.prospect = prospect(name)
            due = self.bound.reached(waiting, now)
            key = () if due else self.order.key(waiting, waiting.prospect, now)
            keyed.append(((waiting.priority, not due, key, waiting.number), waiting))
        keyed.sort()
        self.front = {waiting.name: waiting for _, waiting in keyed}
        queue[:count] = self.front

    def may_run(self, name: Name) -> bool:
        """Whether `name` overtakes nobody that may be overtaken no more. A request at the front may
        have to be passed over, since it waits for something besides its turn. Those behind the
        front run only when nobody is left there.
        """
        own = self.front.get(name)
        if own is None:
            return not self.front
        return not any(
            self._before(waiting, own) and self.bound.reached(waiting, self._now)
            for waiting in self.front.values()
        )

    def left(self, name: Name, *, runs: bool) -> Waiting[Name] | None:
        """`name` is waiting no more: it runs now, or it was aborted. Requests at the front that
        came before one that runs were overtaken. Returns its record, if it was ever at the front.
        """
        self.front.pop(name, None)
        own = self._known.pop(name, None)
        if runs and own is not None:
            for waiting in self.front.values():
                waiting.overtaken += self._before(waiting, own)
        return own

    @staticmethod
    def _before(waiting: Waiting[Name], other: Waiting[Name]) -> bool:
        """Whether `waiting` came before `other` and has its priority."""
        return waiting.number < other.number and waiting.priority == other.priority

    def _number(self, name: Name) -> float:
        """Of a request that was at the front; those that never were came later than all of them."""
        known = self._known.get(name)
        return math.inf if known is None else known.number

    def _record(self, name: Name, arrived: float, priority: int) -> Waiting[Name]:
        waiting = self._known.get(name)
        if waiting is None:
            self._last_number += 1
            waiting = self._known[name] = Waiting(name, self._last_number, arrived, priority)
        return waiting
