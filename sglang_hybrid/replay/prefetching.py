"""A simulated device with a host behind it: what must be loaded, and when the load starts.

The host is a second cache of its own size in which every prompt and answer is stored as on the
device. What a request finds there beyond the device is loaded if that takes fewer seconds than
computing it. Layers are loaded while others are computed, so a prefill ends when both are done.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from sglang_hybrid.core.lengths import AnswerLengths, Decoding, free_places
from sglang_hybrid.core.prefetch import Prefetcher, turns
from sglang_hybrid.core.queue_order import QueueOrder
from sglang_hybrid.core.rates import Link
from sglang_hybrid.replay.scheduling import WaitingQueue
from sglang_hybrid.replay.simulator import Outcome, Simulator, Ticket
from sglang_hybrid.replay.timing import PrefillTime, Served
from sglang_hybrid.replay.traces import Request


class Loading(Enum):
    """NEVER: what is not on the device is computed. ON_TURN: a load starts when its request has its
    turn. TIMED: it starts so that it ends then.
    """

    NEVER = "never"
    ON_TURN = "on turn"
    TIMED = "timed"


LOADED, FINISHED, PREFILLED, ARRIVED, LOOK = range(5)  # at one moment, in this order

LOOKED_AT = 16
"""Requests at the front of the queue whose loads are thought of."""


@dataclass
class LoadCounts:
    """loads: requests that had to load something. possible: of these, those that waited longer than
    that takes. complete: it was there at their turn.
    """

    loads: int = 0
    possible: int = 0
    complete: int = 0


class TwoTiers:
    """One server: prefills one after the other, `places` requests decode beside them. Requests come
    when they came in the trace.

    device, host: caches with the same rules; link: between them. order: of the waiting requests.
    known: whether the host knew the beginning of each request, at its turn.
    """

    def __init__(
        self,
        device: Simulator,
        host: Simulator,
        link: Link,
        time: PrefillTime,
        order: QueueOrder[int],
        loading: Loading,
        places: int = 32,
    ) -> None:
        self.counts = LoadCounts()
        self.prefetcher: Prefetcher[int] = Prefetcher(margin=time.base)
        self._device, self._host, self._link, self._time = device, host, link, time
        self._loading, self._places = loading, places
        self._queue = WaitingQueue(device, time, order)
        self._lengths = AnswerLengths()
        self._events: list[tuple[float, int, int]] = []  # time, what, index of the request
        self._running: dict[int, Decoding] = {}
        self._tickets: dict[int, tuple[Ticket, Ticket]] = {}
        self._busy = False
        self._busy_until = 0.0
        self._link_until = 0.0
        self._look_at = -1.0  # when the queue is looked at next
        self._loads: dict[int, float] = {}  # under way: when they will be complete

    def run(self, requests: Sequence[Request]) -> list[Served]:
        """Serve all; the result is in the requests' order."""
        self._requests = requests
        self._times = [[0.0] * 4 for _ in requests]
        self._outcomes = [Outcome(request.input_len, 0, 0) for request in requests]
        self.known = [False] * len(requests)
        for index, request in enumerate(requests):
            self._at(request.arrival, ARRIVED, index)
        steps = {
            FINISHED: self._finished,
            PREFILLED: self._prefilled,
            LOADED: self._loaded,
            ARRIVED: self._arrived,
        }
        while self._events:
            now, what, index = heapq.heappop(self._events)
            if what != LOOK:
                steps[what](index, now)
            if len(self._queue) and not self._busy and len(self._running) < self._places:
                self._start(now)
            if self._loading is Loading.TIMED and len(self._queue):
                self._prefetch(now)
        return [
            Served(outcome, *times)
            for outcome, times in zip(self._outcomes, self._times, strict=True)
        ]

    def _at(self, when: float, what: int, index: int) -> None:
        heapq.heappush(self._events, (when, what, index))

    def _arrived(self, index: int, now: float) -> None:
        self._times[index][0] = now
        self._queue.add(index, self._requests[index], now)

    def _missing(self, index: int) -> tuple[int, int]:
        """How far the device's cache is hit, and how far the host's if loading that pays."""
        request = self._requests[index]
        here, there = self._device.peek(request), self._host.peek(request)
        if self._loading is Loading.NEVER or there <= here:
            return here, here
        computed = self._time.seconds(here, there - here) - self._time.base
        return here, there if self._link.seconds(self._size(here, there)) < computed else here

    def _size(self, here: int, there: int) -> int:
        """Bytes of the KV between two positions, and of the state at the second."""
        cost = self._device.cost
        return (there - here) * cost.kv_bytes_per_token + cost.state_bytes if there > here else 0

    def _send(self, now: float, size: int) -> float:
        """When a transfer of `size` bytes ends, behind those under way."""
        self._link_until = max(self._link_until, now) + self._link.seconds(size)
        return self._link_until

    def _start(self, now: float) -> None:
        index = self._queue.take(now)
        request = self._requests[index]
        self.known[index] = self._host.peek(request) > 0
        here, there = self._missing(index)
        under_way = self._loads.pop(index, None)
        self._count(index, now, (here, there), complete=under_way is None)
        ready = now if under_way is None else under_way
        if there > here:
            ready = self._send(now, self._size(here, there))
            self._device.store(request, there)
        self._tickets[index] = self._device.begin(request), self._host.begin(request)
        outcome = self._outcomes[index] = self._tickets[index][0].outcome
        computed = self._time.seconds(outcome.hit_len, request.input_len - outcome.hit_len)
        self._times[index][1] = now
        self._busy, self._busy_until = True, max(now + computed, ready)
        self._at(self._busy_until, PREFILLED, index)

    def _count(self, index: int, now: float, span: tuple[int, int], *, complete: bool) -> None:
        """`index` has its turn. span: how far the device reaches, and the host. complete: no load
        for it is under way.
        """
        here, there = span
        prefetched = index in self.prefetcher
        if not prefetched and there == here:
            return
        if prefetched and there > here:
            self.prefetcher.cancel(index)  # it was evicted again
        elif prefetched:
            self.prefetcher.runs(index)
        complete = complete and there == here
        takes = self._link.seconds(self._size(here, there))
        self.counts.loads += 1
        self.counts.complete += complete
        self.counts.possible += complete or now - self._times[index][0] > takes

    def _prefilled(self, index: int, now: float) -> None:
        for cache, ticket in zip((self._device, self._host), self._tickets[index], strict=True):
            cache.prefilled(ticket)
        self._times[index][2] = now
        request = self._requests[index]
        tokens = len(request.tokens) - request.input_len
        self._busy = False
        self._running[index] = Decoding(now, self._lengths.predicted(_keys(request), tokens))
        self._at(now + self._time.decode * tokens, FINISHED, index)

    def _finished(self, index: int, now: float) -> None:
        request = self._requests[index]
        for cache, ticket in zip((self._device, self._host), self._tickets.pop(index), strict=True):
            cache.finished(ticket)
        self._times[index][3] = now
        del self._running[index]
        self._lengths.ended(_keys(request), len(request.tokens) - request.input_len)
        self._queue.ended(index)

    def _loaded(self, index: int, now: float) -> None:
        """A load that was started early is complete, unless its request did not wait for that."""
        if self._loads.pop(index, None) is not None:
            self.prefetcher.arrived(index, 1 << 62)

    def _prefetch(self, now: float) -> None:
        """Start the loads that would otherwise end after their requests have their turn."""
        front = self._queue.in_order(now)[:LOOKED_AT]
        missing = [self._missing(index) for index in front]
        waiting = [(index, self._size(*span)) for index, span in zip(front, missing, strict=True)]
        due, later = self.prefetcher.due(waiting, self._link.bandwidth, self._turns(now, front))
        for index in due:
            here, there = missing[front.index(index)]
            self._device.store(self._requests[index], there)
            if self._device.peek(self._requests[index]) < there:
                continue  # running requests hold all the room
            self._queue.stored(index)
            self.prefetcher.started(index, self._size(here, there))
            self._loads[index] = self._send(now, self._size(here, there))
            self._at(self._loads[index], LOADED, index)
        when = now + max(later, self._time.base / 4)
        if when < self._look_at or self._look_at <= now < when < math.inf:
            self._look_at = when
            self._at(when, LOOK, -1)

    def _turns(self, now: float, front: Sequence[int]) -> list[float]:
        """Seconds until each of `front` is expected to begin: when the prefills before it are done
        and a place is free.
        """
        running = list(self._running.values())
        places = free_places(running, now, self._time.decode, self._places)
        busy = max(0.0, self._busy_until - now) if self._busy else 0.0
        prefills = []
        for index in front[: len(places)]:
            hit = max(self._missing(index))
            prefills.append(self._time.seconds(hit, self._requests[index].input_len - hit))
        return turns(places, prefills, busy)


def _keys(request: Request) -> list[tuple[str, int]]:
    """Whose answers say how long the next one will be: the conversation's, then the tenant's."""
    return [(request.tenant, request.session), (request.tenant, -1)]
