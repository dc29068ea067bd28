"""A server with tiers below the device, replayed: when what must be loaded is.

What a request loads, and whether it does, is the cache's way (`tier_simulator.py`). Layers are
loaded while others are computed, so a prefill ends when both are done.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from enum import Enum

from sglang_hybrid.core.queue.loads import LoadsAhead
from sglang_hybrid.core.queue.orders import Order
from sglang_hybrid.core.queue.waiting import Bound
from sglang_hybrid.core.tiers.rates import Link
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.lab.simulation.prefill_time import PrefillTime
from sglang_hybrid.extensions.lab.simulation.server_simulator import way_to
from sglang_hybrid.extensions.lab.simulation.simulated_queue import SimulatedQueue
from sglang_hybrid.extensions.lab.simulation.simulator import Outcome, Simulator, Ticket
from sglang_hybrid.extensions.lab.simulation.timing import Served


class Loading(Enum):
    """ON_TURN: a load starts when its request has its turn. TIMED: it starts so that it ends
    then.
    """

    ON_TURN = "on turn"
    TIMED = "timed"


LOADED, FINISHED, PREFILLED, ARRIVED, LOOK = range(5)  # at one moment, in this order


class LoadingServer:
    """One server: prefills one after the other, `places` requests decode beside them. Requests come
    when they came in the trace. The first in the queue waits until the device has room for all of
    it beside those that run; if nothing runs, it runs all the same.

    cache: in tiers, or on the device alone. link: what loads pass, one after the other. order,
    bound: of the waiting requests. Raises ValueError for a device that is not one number of bytes.
    """

    def __init__(
        self,
        cache: Simulator,
        link: Link,
        time: PrefillTime,
        order: Order,
        bound: Bound,
        loading: Loading,
        places: int = 32,
    ) -> None:
        if not isinstance(cache.budget, int):
            raise ValueError(f"loads are replayed on a device of so many bytes, not {cache.budget}")
        self.loads: LoadsAhead[int] = LoadsAhead(
            self, margin=time.base, per_token=time.decode, places=places
        )
        self._cache, self._link, self._time = cache, link, time
        self._loading = loading
        self._device = cache.budget
        self._queue = SimulatedQueue(cache, time, order, bound, self.loads.is_under_way)
        self._events: list[tuple[float, int, int]] = []  # time, what, index of the request
        self._tickets: dict[int, Ticket] = {}
        self._busy = False
        self._busy_until = 0.0
        self._link_until = 0.0
        self._look_at = -1.0  # when the queue is looked at next
        self._arrivals: dict[int, float] = {}  # of loads under way: when they will be complete

    def run(self, requests: Sequence[Request]) -> list[Served]:
        """Serve all; the result is in the requests' order."""
        self._requests = requests
        self._times = [[0.0] * 4 for _ in requests]
        self._outcomes = [Outcome(request.input_len, 0, 0) for request in requests]
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
            if len(self._queue) and not self._busy and len(self.loads.running) < self.loads.places:
                self._start_next(now)
            if self._loading is Loading.TIMED and len(self._queue):
                self._load_ahead(now)
        return [
            Served(outcome, *times)
            for outcome, times in zip(self._outcomes, self._times, strict=True)
        ]

    def _at(self, when: float, what: int, index: int) -> None:
        heapq.heappush(self._events, (when, what, index))

    def _arrived(self, index: int, now: float) -> None:
        self._times[index][0] = now
        self._queue.add(index, self._requests[index], now)

    def _send(self, now: float, seconds: float) -> float:
        """When a transfer of so many seconds ends, behind those under way."""
        self._link_until = max(self._link_until, now) + seconds
        return self._link_until

    def _start_next(self, now: float) -> None:
        """Start the first request in the queue, if it has room beside those that run."""
        first = self._queue.in_order(now)[0]
        if not self.loads.running or self._room_left() >= self._needs(first):
            self._start(self._queue.take(now), now)

    def _start(self, index: int, now: float) -> None:
        request = self._requests[index]
        size, seconds = self._cache.to_load(request)
        waited = now - self._times[index][0]
        self.loads.on_turn(index, size, had_time=waited > seconds)
        ready = self._arrivals.pop(index, now)
        if size:
            ready = self._send(now, seconds)
        ticket = self._tickets[index] = self._cache.begin(request)
        outcome = self._outcomes[index] = ticket.outcome
        computed = self._time.seconds(outcome.hit_len, request.input_len - outcome.hit_len)
        self._times[index][1] = now
        self._busy, self._busy_until = True, max(now + computed, ready)
        self._at(self._busy_until, PREFILLED, index)

    def _prefilled(self, index: int, now: float) -> None:
        self._cache.end_prefill(self._tickets[index])
        self._times[index][2] = now
        request = self._requests[index]
        tokens = len(request.tokens) - request.input_len
        self._busy = False
        self.loads.on_decode(index, _keys(request), tokens, since=now)
        self._at(now + self._time.decode * tokens, FINISHED, index)

    def _finished(self, index: int, now: float) -> None:
        request = self._requests[index]
        self._cache.finish(self._tickets.pop(index))
        self._times[index][3] = now
        self.loads.on_finish(index, _keys(request), len(request.tokens) - request.input_len)
        self._queue.on_finish(index)

    def _loaded(self, index: int, now: float) -> None:
        """A load that was started early is complete, unless its request did not wait for that."""
        if self._arrivals.pop(index, None) is not None:
            self.loads.on_arrival(index)

    def _load_ahead(self, now: float) -> None:
        """Begin the loads that would otherwise end after their requests have their turn."""
        self._now = now
        busy = max(0.0, self._busy_until - now) if self._busy else 0.0
        queue, bandwidth = self._queue.in_order(now), self._link.bandwidth
        _, later = self.loads.begin_due(queue, now, bandwidth, busy)
        when = now + max(later, self._time.base / 4)
        if when < self._look_at or self._look_at <= now < when < math.inf:
            self._look_at = when
            self._at(when, LOOK, -1)

    # What `LoadsAhead` asks.

    def load_bytes(self, name: int) -> int:
        return self._cache.to_load(self._requests[name])[0]

    def prefill_seconds(self, name: int) -> float:
        request = self._requests[name]
        _, hit = self._cache.resumes_from(request)
        return self._time.seconds(hit, request.input_len - hit)

    def begin_load(self, name: int, before: Sequence[int]) -> tuple[int, bool]:
        has_room = sum(map(self._needs, [*before, name])) <= self._room_left()
        size, seconds = self._cache.to_load(self._requests[name])
        keep = [self._requests[other] for other in before]
        if not self._cache.fetch(self._requests[name], *self._soon(), keep):
            return 0, has_room
        self._queue.on_load(name)
        self._arrivals[name] = self._send(self._now, seconds)
        self._at(self._arrivals[name], LOADED, name)
        return size, has_room

    # Room on the device.

    def _room_left(self) -> int:
        """Bytes of the device that no running request holds, or is about to."""
        held = {node for ticket in self._tickets.values() for node in way_to(ticket.locked_node)}
        kv, states = self._soon()
        return self._device - self._bytes(kv + sum(node.tokens for node in held), states)

    def _needs(self, index: int) -> int:
        """Bytes that a waiting request would take: all of it, but what others hold already."""
        request = self._requests[index]
        node, _ = self._cache.resumes_from(request)
        held = next((one for one in way_to(node) if one.kv_locked), None)
        return self._bytes(len(request.tokens) - (0 if held is None else held.depth), 1)

    def _bytes(self, kv: int, states: int) -> int:
        cost = self._cache.cost
        return kv * cost.kv_bytes_per_token + states * cost.state_bytes

    def _soon(self) -> tuple[int, int]:
        """Tokens and states that running requests are about to leave in the cache."""
        kv = states = 0
        for index, ticket in self._tickets.items():
            request, prefilled = self._requests[index], index in self.loads.running
            known = request.input_len if prefilled else ticket.outcome.hit_len
            kv += len(request.tokens) - known
            states += 1 + (0 if prefilled else len(ticket.ends))
        return kv, states


def _keys(request: Request) -> list[tuple[str, int]]:
    """Whose answers say how long the next one will be: the conversation's, then the tenant's."""
    return [(request.tenant, request.session), (request.tenant, -1)]
