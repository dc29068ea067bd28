"""Requests come, grow and end; what an allocator does to them is counted as the authors do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from sglang_hybrid.core.memory.account import MemoryKind
from sglang_hybrid.extensions.lab.avmp.memory import ModelBytes, SimulatedMemory
from sglang_hybrid.extensions.lab.avmp.requests import LiveRequest


class RequestEvent(IntEnum):
    """Events of a request, in the order of one tick."""

    END = 0
    GROWTH = 1
    ARRIVAL = 2


@dataclass(frozen=True)
class Counts:
    """The results of the requests of one run.

    out_of_memory: calls to the allocator that got nothing; a request makes one per layer when it
    arrives, and one per layer with KV for each further page. completed: requests without such a
    call, whether they were evicted or not. evicted: requests of which memory was taken while they
    ran. unharmed: neither.
    """

    requests: int
    out_of_memory: int
    completed: int
    evicted: int
    unharmed: int


def events_of(requests: Sequence[LiveRequest]) -> list[tuple[int, RequestEvent, int]]:
    """Tick, what happens, and the request's number, in order."""
    events = []
    for request in requests:
        events.append((request.arrival, RequestEvent.ARRIVAL, request.number))
        events.append((request.end, RequestEvent.END, request.number))
        events += [(tick, RequestEvent.GROWTH, request.number) for tick in request.page_ticks()]
    return sorted(events)


def run(memory: SimulatedMemory, model: ModelBytes, requests: Sequence[LiveRequest]) -> Counts:
    """Play all `requests` on an empty `memory`."""
    by_number = {request.number: request for request in requests}
    failed: dict[int, int] = dict.fromkeys(by_number, 0)
    running: set[int] = set()
    for _, what, number in events_of(requests):
        if what is RequestEvent.END:
            running.discard(number)
            memory.end(number)
            continue
        takes = [(MemoryKind.KV, 1, model.kv_layers)]
        if what is RequestEvent.ARRIVAL:
            running.add(number)
            takes = [
                (MemoryKind.KV, by_number[number].pages, model.kv_layers),
                (MemoryKind.STATES, 1, model.state_layers),
            ]
        elif number not in running:  # its last page and its end are at the same tick
            continue
        for kind, units, layers in takes:
            failed[number] += sum(not memory.take(kind, number, units) for _ in range(layers))
    completed = {number for number, times in failed.items() if not times}
    return Counts(
        requests=len(requests),
        out_of_memory=sum(failed.values()),
        completed=len(completed),
        evicted=len(memory.evicted),
        unharmed=len(completed - memory.evicted),
    )
