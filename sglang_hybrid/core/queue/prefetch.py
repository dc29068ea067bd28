"""When to load what waiting requests need: each load ends when its request's place becomes free.

CaR III B 2 starts a transfer at the first t at which

    min over the running requests i of (TPOP * len_i - (t - timer_i))  <=  SIZE / bandwidth

where TPOP is the time per output token, len_i the predicted length of the answer, timer_i when it
began, and SIZE what must be loaded: before that the data would lie on the device unused, after it
the device would wait. That is for one load. Here several wait in the order in which they will run.
`free_k` is when the k-th of them has its turn, and the link carries one load at a time, so each
load must also end early enough for those behind it to follow:

    start_k = min(free_k, start_(k+1)) - seconds_k

`seconds_k` is the whole way, disk to host and host to device. A request that needs nothing takes a
place and no time on the link. With one load and one place this is CaR's rule.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic

from sglang_hybrid.core.queue.waiting import Name


def fetch(free_in: float, size: float, bandwidth: float) -> bool:
    """CaR's fetch(t) for one load of `size` bytes: whether it starts now. free_in: seconds until
    the next running request is expected to end (`lengths.free_places`).
    """
    return free_in <= size / bandwidth


def latest_starts(seconds: Sequence[float], free: Sequence[float]) -> list[float]:
    """Seconds from now at which each load must start so as to end in time; below 0 it ends late.

    seconds: of each load, in the order of the requests; 0 for one that needs none. free: seconds
    until each has its turn, ascending. Loads of requests beyond the last place need not start:
    their start is infinite, unless the link is needed before.
    """
    starts = [math.inf] * len(seconds)
    after = math.inf
    for at in range(min(len(seconds), len(free)) - 1, -1, -1):
        if seconds[at]:
            after = starts[at] = min(free[at], after) - seconds[at]
    return starts


def turns(places: Sequence[float], prefills: Sequence[float], busy: float = 0.0) -> list[float]:
    """Seconds until each waiting request is expected to begin, ascending: when a place is free and
    the prefills before it are done. None for those beyond the last place.

    places: `lengths.free_places`. prefills: seconds of each, in the order of the requests. busy:
    seconds that the prefill under way still takes.
    """
    begin, found = busy, []
    for place, prefill in zip(places, prefills, strict=False):
        found.append(max(begin, place))
        begin = found[-1] + prefill
    return found


@dataclass
class PrefetchCounts:
    """started, cancelled: loads ahead of a turn. used, late: of these, those that were complete at
    their request's turn, and those that were not. expected: loads for requests that had not come
    yet. Bytes: loaded ahead, and of these those that no request used.

    on_turn: loads that began on their request's turn only. no_time: of these, those whose request
    waited less than the load takes. no_room: of these, those for which the device had no room
    before, beside running requests and those with an earlier turn.
    """

    started: int = 0
    expected: int = 0
    cancelled: int = 0
    used: int = 0
    late: int = 0
    on_turn: int = 0
    no_time: int = 0
    no_room: int = 0
    loaded_bytes: int = 0
    wasted_bytes: int = 0

    @property
    def loads(self) -> int:
        """Requests that had to load something and had their turn."""
        return self.used + self.late + self.on_turn

    @property
    def complete(self) -> float | None:
        """Of the loads for which there was time and room, the share that was complete at the turn;
        None if there were none.
        """
        possible = self.loads - self.no_time - self.no_room
        return self.used / possible if possible else None

    @property
    def in_vain(self) -> float:
        """Of the bytes that were loaded ahead, the share that no request used."""
        return self.wasted_bytes / self.loaded_bytes if self.loaded_bytes else 0.0


@dataclass
class Load:
    """A load that was started. left: bytes that are not there yet."""

    size: int
    left: int = field(default=0)


class Prefetcher(Generic[Name]):
    """Which loads are under way or done for requests that wait.

    The caller moves the bytes: it asks `due` what to start, says what arrived, and which requests
    run or have gone. margin: seconds by which a load is started before it must, since predictions
    are wrong and a round has a length.
    """

    def __init__(self, margin: float = 0.0) -> None:
        self.margin = margin
        self.counts = PrefetchCounts()
        self._loads: dict[Name, Load] = {}
        self._without_room: set[Name] = set()

    def __len__(self) -> int:
        return len(self._loads)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._loads

    def due(
        self, waiting: Sequence[tuple[Name, int]], bandwidth: float, free: Sequence[float]
    ) -> tuple[list[Name], float]:
        """Those whose loads start now, in order, and seconds until the next one must start.

        waiting: requests in the order in which they will run, with the bytes that each must load.
        What is under way takes its rest of the link.
        """
        seconds = [
            (self._loads[name].left if name in self._loads else size) / bandwidth
            for name, size in waiting
        ]
        starts = [
            (start, name)
            for (name, size), start in zip(waiting, latest_starts(seconds, free), strict=True)
            if size and name not in self._loads
        ]
        due = [name for start, name in starts if start <= self.margin]
        later = [start - self.margin for start, _ in starts if start > self.margin]
        return due, min(later, default=math.inf)

    def started(self, name: Name, size: int) -> None:
        """The load of `size` bytes for `name` is under way."""
        if name in self._loads:
            raise ValueError(f"a load for {name!r} is under way already")
        self._loads[name] = Load(size, size)
        self.counts.started += 1

    def room(self, name: Name, *, there_is: bool) -> None:
        """The load for `name` is due; whether the device has room for it now."""
        if there_is:
            self._without_room.discard(name)
        else:
            self._without_room.add(name)

    def arrived(self, name: Name, size: int) -> None:
        """So many bytes more are on the device."""
        load = self._loads.get(name)
        if load is not None:
            size = min(size, load.left)
            load.left -= size
            self.counts.loaded_bytes += size

    def runs(self, name: Name) -> bool:
        """`name` has its turn; whether all that was loaded for it was there."""
        self._without_room.discard(name)
        load = self._loads.pop(name, None)
        if load is None:
            return False
        complete = not load.left
        self.counts.used += complete
        self.counts.late += not complete
        self.counts.loaded_bytes += load.left  # its prefill waits for the rest
        return complete

    def loads_on_turn(self, name: Name, *, had_time: bool) -> None:
        """`name` has its turn, and its load begins now. had_time: it waited longer than that takes.
        What was loaded for it before was evicted.
        """
        self.counts.on_turn += 1
        self.counts.no_time += not had_time
        self.counts.no_room += had_time and name in self._without_room
        self.cancel(name)

    def cancel(self, name: Name) -> bool:
        """`name` has gone, or what was loaded for it was evicted; whether a transfer must be
        stopped.
        """
        self._without_room.discard(name)
        load = self._loads.pop(name, None)
        if load is None:
            return False
        self.counts.cancelled += 1
        self.counts.wasted_bytes += load.size - load.left
        return load.left > 0
