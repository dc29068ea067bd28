"""Times at which results are there: requests that overlap, queue for the prefill, and decode."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.queue.orders import FirstCome, Order
from sglang_hybrid.core.queue.waiting import Bound
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.lab.simulation.prefill_time import PAPER, PrefillTime
from sglang_hybrid.extensions.lab.simulation.replicas import Replica, Router, Told, hear
from sglang_hybrid.extensions.lab.simulation.shared_store import SimulatedStore
from sglang_hybrid.extensions.lab.simulation.simulated_queue import SimulatedQueue
from sglang_hybrid.extensions.lab.simulation.simulator import Cache, Outcome, Simulator, Ticket

Floats = npt.NDArray[np.float64]

PAPER_GRID, PAPER_LONGEST = 50, 31_950
"""Tokens: what the paper rounds prefills up to, and the longest that it knows."""


def paper_ttft(outcomes: Iterable[Outcome]) -> Floats:
    """The paper's TTFT [n] in seconds: linear in the tokens that are computed, rounded up to a grid
    of 50 and cut at 31,950; no queue.
    """
    new = np.array([o.input_len - o.hit_len for o in outcomes])
    grid = np.minimum((new // PAPER_GRID + 1) * PAPER_GRID, PAPER_LONGEST)
    times: Floats = PAPER.base + PAPER.per_token * grid
    return times


@dataclass(frozen=True, slots=True)
class Served:
    """A request in time. arrival: at the server, later than in the trace if the session's request
    before it was still under way. Seconds.
    """

    outcome: Outcome
    arrival: float
    start: float
    first_token: float
    end: float

    @property
    def ttft(self) -> float:
        return self.first_token - self.arrival


FINISHED, PREFILLED, ARRIVED = range(3)  # at one moment, in this order


class Timeline:
    """Servers, each with one of `caches`: prefills one after the other; decoding beside them takes
    its time per token. A session's next request waits for the answer to the one before.

    done: called when a request has ended. order: which of the waiting requests is prefilled next;
    by default the one that came first. bound: on overtaking; by default there is none. router:
    chooses the server; needed for several. late: seconds until a router hears of a state that came
    or went; 0: it knows them as they are. store: what the servers share. Both are for caches that
    are `Simulator`s.
    """

    def __init__(
        self,
        caches: Sequence[Cache],
        time: PrefillTime,
        done: Callable[[], None] = lambda: None,
        order: Order | None = None,
        bound: Bound | None = None,
        router: Router | None = None,
        late: float = 0.0,
        store: SimulatedStore | None = None,
    ) -> None:
        self.time = time
        self.done = done
        self.replicas = [
            Replica(
                cache, SimulatedQueue(cache, time, order or FirstCome(), bound or Bound()), time
            )
            for cache in caches
        ]
        self._router = router
        self._store = store
        self._late = late
        self._now = 0.0
        for replica in self.replicas if late else ():
            replica.told = Told(_tree_cache(replica).tree, late, lambda: self._now)
        self._events: list[tuple[float, int, int]] = []  # time, what, index of the request
        self._sent: dict[int, Replica] = {}

    def run(self, requests: Sequence[Request]) -> list[Served]:
        """Serve all; the result is in the requests' order."""
        self._requests = requests
        self._tickets: dict[int, Ticket] = {}
        self._times = np.zeros((len(requests), 4))
        self._outcomes: list[Outcome | None] = [None] * len(requests)
        self._sessions: dict[int, deque[int]] = defaultdict(deque)
        for index, request in enumerate(requests):
            self._sessions[request.session].append(index)
        for waiting in self._sessions.values():
            self._release(waiting, 0.0)
        steps = {ARRIVED: self._arrived, PREFILLED: self._prefilled, FINISHED: self._finished}
        while self._events:
            self._now, what, index = heapq.heappop(self._events)
            steps[what](index, self._now)
        return [
            Served(outcome, *times)
            for outcome, times in zip(self._outcomes, self._times.tolist(), strict=True)
            if outcome is not None
        ]

    def _release(self, waiting: deque[int], now: float) -> None:
        if waiting:
            index = waiting.popleft()
            arrival = max(now, self._requests[index].arrival)
            heapq.heappush(self._events, (arrival, ARRIVED, index))

    def _arrived(self, index: int, now: float) -> None:
        request = self._requests[index]
        replica = self._sent[index] = self._route(request, now)
        self._times[index, 0] = now
        replica.unfinished += 1
        replica.queue.add(index, request, now)
        if not replica.busy:
            self._start(replica, now)
        elif self._router is not None:
            replica.waiting[index] = replica.seconds(request, replica.cache.peek(request))

    def _route(self, request: Request, now: float) -> Replica:
        if self._router is None:
            return self.replicas[0]
        if self._late:
            hear(self.replicas, request)
        return self.replicas[self._router.choose(request, self.replicas, now)]

    def _start(self, replica: Replica, now: float) -> None:
        index = replica.queue.take(now)
        replica.waiting.pop(index, None)
        request, loading = self._requests[index], 0.0
        if self._store is not None:
            loading = self._store.load(request, _tree_cache(replica))
        ticket = self._tickets[index] = replica.cache.begin(request)
        outcome = self._outcomes[index] = ticket.outcome
        self._times[index, 1] = now
        replica.busy = True
        took = replica.seconds(request, outcome.hit_len) + ticket.load_seconds + loading
        replica.free_at = now + took
        heapq.heappush(self._events, (now + took, PREFILLED, index))

    def _prefilled(self, index: int, now: float) -> None:
        replica = self._sent[index]
        replica.cache.end_prefill(self._tickets[index])
        self._times[index, 2] = now
        request = self._requests[index]
        if self._store is not None:
            self._store.save(request, _tree_cache(replica), ended=False)
        decoding = self.time.decode * (len(request.tokens) - request.input_len)
        heapq.heappush(self._events, (now + decoding, FINISHED, index))
        replica.busy = False
        if len(replica.queue):
            self._start(replica, now)

    def _finished(self, index: int, now: float) -> None:
        replica = self._sent.pop(index)
        replica.cache.finish(self._tickets.pop(index))
        if self._store is not None:
            self._store.save(self._requests[index], _tree_cache(replica), ended=True)
        replica.queue.on_request_end(index)
        replica.unfinished -= 1
        self._times[index, 3] = now
        self.done()
        self._release(self._sessions[self._requests[index].session], now)


def _tree_cache(replica: Replica) -> Simulator:
    """The cache of `replica`. Raises ValueError if it has no tree of tokens."""
    if not isinstance(replica.cache, Simulator):
        raise ValueError("late events and a store are for caches that keep a tree of tokens")
    return replica.cache
