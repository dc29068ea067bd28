"""The queue of a simulated server: the orders of `core`, asked about a simulated cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_hybrid.core.queue.queue_order import QueueOrder
from sglang_hybrid.core.queue.standings import Standings
from sglang_hybrid.core.queue.waiting import Prospect, ReuseKind
from sglang_hybrid.simulation.simulator import Cache, Simulator
from sglang_hybrid.simulation.traces.requests import Request

if TYPE_CHECKING:
    from sglang_hybrid.simulation.timing import PrefillTime


class WaitingQueue:
    """Requests of a trace, by their index, that wait for their prefill.

    most_overtaken: requests that came later and ran first, of the request with most of them.
    loading: requests for which a load is under way.
    """

    def __init__(self, cache: Cache, time: PrefillTime, order: QueueOrder[int]) -> None:
        self.most_overtaken = 0
        self.loading: set[int] = set()
        self._cache = cache
        self._time = time
        self._order = order
        self._queue: list[int] = []
        self._waiting: dict[int, tuple[Request, float]] = {}
        self._standings: Standings[int] | None = None
        if order.order.holds and isinstance(cache, Simulator):
            self._standings = Standings(cache.tree.move_standing)

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, index: int, request: Request, now: float) -> None:
        """A request arrives."""
        self._queue.append(index)
        self._waiting[index] = request, now

    def in_order(self, now: float) -> list[int]:
        """All that wait, in the order in which they would run now."""
        self._order.arrange(self._queue, now, self._prospect, self._arrived)
        return list(self._queue)

    def stored(self, index: int) -> None:
        """More of a waiting request's prompt was stored: it holds that from now on."""
        self._prospect(index)

    def take(self, now: float) -> int:
        """The request that is prefilled next. There must be one."""
        index = self.in_order(now)[0]
        self._queue.remove(index)
        del self._waiting[index]
        taken = self._order.left(index, runs=True)
        if taken is not None:
            self.most_overtaken = max(self.most_overtaken, taken.overtaken)
        if self._standings is not None:
            self._standings.runs(index)
        return index

    def ended(self, index: int) -> None:
        """A request that was taken has its answer."""
        if self._standings is not None:
            self._standings.ends(index)

    def _arrived(self, index: int) -> float:
        return self._waiting[index][1]

    def _prospect(self, index: int) -> Prospect:
        """What a waiting request would find now, and how long its prefill would take."""
        request = self._waiting[index][0]
        load = 0.0
        if isinstance(self._cache, Simulator):
            node, hit = self._cache.resumes_from(request)
            _, load = self._cache.to_load(request)
            if self._standings is not None:
                self._standings.waits(index, node)
        else:
            hit = self._cache.peek(request)
        return Prospect(
            hit,
            load + self._time.seconds(hit, request.input_len - hit),
            self._time.seconds(0, request.input_len),
            ReuseKind.TO_LOAD
            if load or index in self.loading
            else ReuseKind.ON_DEVICE
            if hit
            else ReuseKind.NOTHING,
        )
