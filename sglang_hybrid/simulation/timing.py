"""When what was computed is there: requests that overlap, queue for the prefill, and decode."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.queue.orders import FirstCome, Order
from sglang_hybrid.core.queue.waiting import Bound
from sglang_hybrid.simulation.prefill_time import PAPER, PrefillTime
from sglang_hybrid.simulation.simulated_queue import SimulatedQueue
from sglang_hybrid.simulation.simulator import Cache, Outcome, Ticket
from sglang_hybrid.simulation.traces.requests import Request

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
    """One server: prefills one after the other; decoding beside them takes its time per token. A
    session's next request waits for the answer to the one before.

    done: called when a request has ended. order: which of the waiting requests is prefilled next;
    by default the one that came first. bound: on overtaking; by default there is none.
    """

    def __init__(
        self,
        cache: Cache,
        time: PrefillTime,
        done: Callable[[], None] = lambda: None,
        order: Order | None = None,
        bound: Bound | None = None,
    ) -> None:
        self.cache = cache
        self.time = time
        self.done = done
        self.queue = SimulatedQueue(cache, time, order or FirstCome(), bound or Bound())
        self._events: list[tuple[float, int, int]] = []  # time, what, index of the request
        self._busy = False

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
            now, what, index = heapq.heappop(self._events)
            steps[what](index, now)
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
        self._times[index, 0] = now
        self.queue.add(index, self._requests[index], now)
        if not self._busy:
            self._start(now)

    def _start(self, now: float) -> None:
        index = self.queue.take(now)
        ticket = self._tickets[index] = self.cache.begin(self._requests[index])
        outcome = self._outcomes[index] = ticket.outcome
        self._times[index, 1] = now
        self._busy = True
        took = self.time.seconds(outcome.hit_len, outcome.input_len - outcome.hit_len)
        took += ticket.load_seconds
        heapq.heappush(self._events, (now + took, PREFILLED, index))

    def _prefilled(self, index: int, now: float) -> None:
        self.cache.end_prefill(self._tickets[index])
        self._times[index, 2] = now
        request = self._requests[index]
        decoding = self.time.decode * (len(request.tokens) - request.input_len)
        heapq.heappush(self._events, (now + decoding, FINISHED, index))
        self._busy = False
        if len(self.queue):
            self._start(now)

    def _finished(self, index: int, now: float) -> None:
        self.cache.finish(self._tickets.pop(index))
        self.queue.on_finish(index)
        self._times[index, 3] = now
        self.done()
        self._release(self._sessions[self._requests[index].session], now)
