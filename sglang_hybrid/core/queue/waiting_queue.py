"""The queue of waiting requests: which are tried next, and which may be overtaken no more."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, MutableMapping
from typing import Generic, TypeAlias

from sglang_hybrid.core.queue.demand import DemandForNodes
from sglang_hybrid.core.queue.orders import Order
from sglang_hybrid.core.queue.waiting import Bound, Name, Prospect, Waiting
from sglang_hybrid.core.records.nodes import Node

Found: TypeAlias = tuple[Prospect, Node | None]
"""The result of a look-up of a request now, and the record of the node that it would resume from;
None: it would resume from nothing.
"""


class WaitingQueue(Generic[Name]):
    """Orders the front of a queue, round by round, and counts how often requests are overtaken.

    The queue is a list to which its owner appends. The owner takes out requests that run or are
    aborted; the others keep their place. So the requests at the front have waited longest, and a
    request among the first `front` stays among them until it leaves the queue: the front is CaR's
    Shuffled Window. A round costs time for the requests at the front, however many wait behind.

    All decisions follow from the queue, the look-ups and the clock: ranks that agree on those agree
    on the order. A server and a replay use this class alike; they differ in the functions below.

    Args:
        order: gives the keys.
        bound: after which a request is overtaken no more.
        look_up: asked for each request at the front, once per round.
        arrived: when a request arrived, in seconds on the clock that all ranks share.
        move_demand: adds to the demand of a node (`NodeTree.move_demand`), for orders that
            keep what requests at the front would resume from. None: there is no tree of records.
        priority: a number that is smaller for requests that run first; None: all have the same.
        known: keeps a record of each request that was at the front, until it has left. A
            WeakKeyDictionary also forgets requests that no other object refers to.
    """

    def __init__(
        self,
        order: Order,
        bound: Bound,
        look_up: Callable[[Name], Found],
        arrived: Callable[[Name], float],
        *,
        move_demand: Callable[[Node, int], None] | None = None,
        priority: Callable[[Name], int] | None = None,
        known: MutableMapping[Name, Waiting[Name]] | None = None,
    ) -> None:
        self.order = order
        self.bound = bound
        self.front: dict[Name, Waiting[Name]] = {}
        self._look_up, self._arrived, self._priority = look_up, arrived, priority
        self._demand: DemandForNodes[Name] | None = None
        if order.holds and move_demand is not None:
            self._demand = DemandForNodes(move_demand)
        self._known: MutableMapping[Name, Waiting[Name]] = {} if known is None else known
        self._last_number = 0
        self._now = 0.0

    @property
    def holds(self) -> int:
        """Requests, waiting or running, whose node is evicted after all others."""
        return 0 if self._demand is None else len(self._demand)

    @property
    def known(self) -> Collection[Name]:
        """Requests that are or were at the front and have not left the queue. A request that
        others push out of the front by their priority is still among them.
        """
        return self._known.keys()

    def arrange(self, queue: list[Name], now: float) -> None:
        """Put the front of `queue` into the order in which requests are tried at `now`, in seconds
        on the clock that all ranks share.
        """
        self._now = now
        priority = self._priority
        if priority is not None:
            queue.sort(key=lambda name: (priority(name), self._number(name)))
        count = self.order.front(len(queue))
        keyed = []
        for name in queue[:count]:
            waiting = self._record(name)
            waiting.rounds += 1
            waiting.prospect = self.look_up(name)
            due = self.bound.reached(waiting, now)
            key = () if due else self.order.key(waiting, waiting.prospect, now)
            keyed.append(((waiting.priority, not due, key, waiting.number), waiting))
        keyed.sort()
        self.front = {waiting.name: waiting for _, waiting in keyed}
        queue[:count] = self.front
        if self._demand is not None:
            self._demand.keep_waiting(self.front)

    def look_up(self, name: Name) -> Prospect:
        """The result of a look-up of `name` now. The node to resume from is kept for it."""
        prospect, node = self._look_up(name)
        if self._demand is not None:
            self._demand.on_wait(name, node)
        return prospect

    def can_run(self, name: Name) -> bool:
        """True if `name` overtakes no request that may be overtaken no more. A request at the front
        may have to be passed over, since it waits for something besides its turn. Those behind the
        front run only when the front is empty.
        """
        own = self.front.get(name)
        if own is None:
            return not self.front
        return not any(
            self._before(waiting, own) and self.bound.reached(waiting, self._now)
            for waiting in self.front.values()
        )

    def on_start(self, name: Name) -> Waiting[Name] | None:
        """The prefill of `name` begins. The requests at the front that came before it were
        overtaken. Returns the record of `name`, if it was ever at the front.
        """
        own = self._leave(name)
        if own is not None:
            for waiting in self.front.values():
                waiting.overtaken += self._before(waiting, own)
        if self._demand is not None:
            self._demand.on_start(name)
        return own

    def on_abort(self, name: Name) -> None:
        """Called when `name` has left the queue and will not run."""
        self._leave(name)
        self.on_request_end(name)

    def on_request_end(self, name: Name) -> None:
        """`name` runs no more: it ended, was aborted, or was retracted."""
        if self._demand is not None:
            self._demand.on_request_end(name)

    def on_flush(self) -> None:
        """Forget the nodes of waiting requests, after the tree was emptied."""
        if self._demand is not None:
            self._demand.forget_all()

    def _leave(self, name: Name) -> Waiting[Name] | None:
        self.front.pop(name, None)
        return self._known.pop(name, None)

    @staticmethod
    def _before(waiting: Waiting[Name], other: Waiting[Name]) -> bool:
        """True if `waiting` came before `other` and has its priority."""
        return waiting.number < other.number and waiting.priority == other.priority

    def _number(self, name: Name) -> float:
        """The number of a request that was at the front; those that never were came later than all
        of them.
        """
        known = self._known.get(name)
        return math.inf if known is None else known.number

    def _record(self, name: Name) -> Waiting[Name]:
        waiting = self._known.get(name)
        if waiting is None:
            self._last_number += 1
            priority = 0 if self._priority is None else self._priority(name)
            arrived = self._arrived(name)
            waiting = self._known[name] = Waiting(name, self._last_number, arrived, priority)
        return waiting
