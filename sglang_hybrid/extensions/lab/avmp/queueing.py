"""The same requests where they wait until all that they will need is free, first come first."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sglang_hybrid.core.memory.account import MemoryKind
from sglang_hybrid.extensions.lab.avmp.memory import ModelBytes
from sglang_hybrid.extensions.lab.avmp.requests import LiveRequest

Room = dict[MemoryKind, int]
"""Units of each kind."""


@dataclass(frozen=True)
class Capacity:
    """The size of a memory: pools of so many units of each kind, or bytes that kinds share.

    share: of `total` bytes, what the states have; None: KV and states share all.
    """

    model: ModelBytes
    total: int
    share: float | None = None

    def holds(self, units: Room) -> bool:
        """True if so much of each kind fits."""
        size = {kind: units[kind] * self.model.unit(kind) for kind in MemoryKind}
        if self.share is None:
            return sum(size.values()) <= self.total
        for_states = int(self.total * self.share)
        return (
            size[MemoryKind.STATES] <= for_states and size[MemoryKind.KV] <= self.total - for_states
        )


@dataclass(frozen=True)
class Queued:
    """Requests at the ticks at which they began, the ones that fit never, and the last end."""

    started: list[LiveRequest]
    refused: list[LiveRequest]
    waited: int

    @property
    def makespan(self) -> int:
        """Ticks until the last request has ended."""
        return max((request.end for request in self.started), default=0)


def queue(capacity: Capacity, requests: Sequence[LiveRequest]) -> Queued:
    """Let each of `requests`, in order of arrival, begin as soon as there is room for all that it
    will hold at its end, and all before it have begun.
    """
    model, now, waited = capacity.model, 0, 0
    used: Room = dict.fromkeys(MemoryKind, 0)
    running: list[tuple[int, int, Room]] = []  # end, number, what it holds
    started, refused = [], []
    for request in requests:
        peak = model.peak(request)
        if not capacity.holds(peak):
            refused.append(request)
            continue
        now = max(now, request.arrival)
        while True:
            while running and running[0][0] <= now:
                _, _, freed = heapq.heappop(running)
                used = {kind: used[kind] - freed[kind] for kind in MemoryKind}
            wanted = {kind: used[kind] + peak[kind] for kind in MemoryKind}
            if capacity.holds(wanted):
                break
            now = running[0][0]
        used, begun = wanted, replace(request, arrival=now)
        heapq.heappush(running, (begun.end, begun.number, peak))
        started.append(begun)
        waited += now - request.arrival
    return Queued(started, refused, waited)
