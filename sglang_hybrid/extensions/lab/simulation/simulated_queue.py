"""The waiting requests of a simulated server, in the queue of `core`."""

from __future__ import annotations

from collections.abc import Callable

from sglang_hybrid.core.queue.orders import Order
from sglang_hybrid.core.queue.waiting import Bound, Prospect, ReuseKind
from sglang_hybrid.core.queue.waiting_queue import Found, WaitingQueue
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.lab.simulation.prefill_time import PrefillTime
from sglang_hybrid.extensions.lab.simulation.simulator import Cache, Simulator


class SimulatedQueue:
    """Requests of a trace, by their index, that wait for their prefill.

    most_overtaken: of all requests, how often the one that was overtaken most was overtaken.
    is_loading: whether a load for a request is under way.
    """

    def __init__(
        self,
        cache: Cache,
        time: PrefillTime,
        order: Order,
        bound: Bound,
        is_loading: Callable[[int], bool] = lambda index: False,
    ) -> None:
        self.most_overtaken = 0
        self._cache, self._time, self._is_loading = cache, time, is_loading
        self._queue: list[int] = []
        self._waiting: dict[int, tuple[Request, float]] = {}
        self._order: WaitingQueue[int] = WaitingQueue(
            order,
            bound,
            self._look_up,
            self._arrived,
            move_demand=cache.tree.move_demand if isinstance(cache, Simulator) else None,
        )

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, index: int, request: Request, now: float) -> None:
        """A request arrives."""
        self._queue.append(index)
        self._waiting[index] = request, now

    def in_order(self, now: float) -> list[int]:
        """All that wait, in the order in which they would run at `now`."""
        self._order.arrange(self._queue, now)
        return list(self._queue)

    def on_load(self, index: int) -> None:
        """More of the prompt of a waiting request was stored: it holds that from now on."""
        self._order.look_up(index)

    def take(self, now: float) -> int:
        """The request that is prefilled next. There must be one."""
        index = self.in_order(now)[0]
        self._queue.remove(index)
        taken = self._order.on_start(index)
        if taken is not None:
            self.most_overtaken = max(self.most_overtaken, taken.overtaken)
        del self._waiting[index]
        return index

    def on_request_end(self, index: int) -> None:
        """A request that was taken has its answer."""
        self._order.on_request_end(index)

    def _arrived(self, index: int) -> float:
        return self._waiting[index][1]

    def _look_up(self, index: int) -> Found:
        request, node, load = self._waiting[index][0], None, 0.0
        if isinstance(self._cache, Simulator):
            node, hit = self._cache.resumes_from(request)
            _, load = self._cache.to_load(request)
        else:
            hit = self._cache.peek(request)
        prospect = Prospect(
            hit,
            load + self._time.seconds(hit, request.input_len - hit),
            self._time.seconds(0, request.input_len),
            ReuseKind.of(hit, loads=load > 0 or self._is_loading(index)),
        )
        return prospect, node
