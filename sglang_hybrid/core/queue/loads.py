"""Loads that begin ahead of their request's turn."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from sglang_hybrid.core.queue.lengths import AnswerLengths
from sglang_hybrid.core.queue.load_times import Decoding, free_places, latest_starts, turns
from sglang_hybrid.core.queue.waiting import Name

MOST_AHEAD: Final = 16
"""Requests at the front of the queue whose loads may begin ahead of their turn."""


@dataclass
class LoadCounts:
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
        """The share of loads, among those for which there was time and room, that was complete at
        the turn; None if there were none.
        """
        possible = self.loads - self.no_time - self.no_room
        return self.used / possible if possible else None


Asked = TypeVar("Asked", contravariant=True)
"""The name of a waiting request that a loader is asked about."""


class Loader(Protocol[Asked]):
    """Moves the bytes: a cache with memory below the device, served or replayed."""

    def load_bytes(self, name: Asked) -> int:
        """Bytes that the waiting request `name` must load before it can run."""
        ...

    def prefill_seconds(self, name: Asked) -> float:
        """Seconds of the prefill of the waiting request `name`."""
        ...

    def begin_load(self, name: Asked, before: Sequence[Asked]) -> tuple[int, bool]:
        """Begin the load of `name`, if that can be; what the requests `before` it need stays on the
        device. Returns its bytes, 0 if it did not begin, and whether the device has room for `name`
        beside running requests and those before it.
        """
        ...


@dataclass
class _Load:
    """A load ahead of its turn. under_way: not all of its bytes have arrived."""

    size: int
    under_way: bool = True


class LoadsAhead(Generic[Name]):
    """Begins the loads of waiting requests so that they end when their requests have their turn,
    and counts what became of them. The caller says what arrived, and which requests start, decode,
    finish or leave the queue.

    Attributes:
        running: requests that decode.
        margin: seconds by which a load begins before it must, since predictions are wrong and
            nothing begins between two rounds.
        per_token: seconds of a decode step.
        places: how many requests may run at once.
    """

    def __init__(
        self, loader: Loader[Name], *, margin: float, per_token: float, places: int
    ) -> None:
        self.counts = LoadCounts()
        self.lengths = AnswerLengths()
        self.running: dict[Name, Decoding] = {}
        self.margin, self.per_token, self.places = margin, per_token, places
        self._loader = loader
        self._loads: dict[Name, _Load] = {}
        self._without_room: set[Name] = set()

    def __len__(self) -> int:
        return len(self._loads)

    def is_under_way(self, name: Name) -> bool:
        """True if a load for `name` has begun and not arrived."""
        load = self._loads.get(name)
        return load is not None and load.under_way

    def begin_due(
        self, queue: Sequence[Name], now: float, bandwidth: float, busy: float = 0.0
    ) -> tuple[list[Name], float]:
        """Begin the loads that would otherwise end after their request's turn, as far as there is
        room. Returns the requests whose loads were due, and seconds until the next one is.

        queue: waiting requests in the order in which they will run. bandwidth: bytes per second.
        busy: seconds that the prefill under way still takes.
        """
        front = list(queue[:MOST_AHEAD])
        sizes = [self._loader.load_bytes(name) for name in front]
        if not any(sizes):
            return [], math.inf
        places = free_places(self.running.values(), now, self.per_token, self.places)
        prefills = [self._loader.prefill_seconds(name) for name in front[: len(places)]]
        seconds = [self._bytes_left(*one) / bandwidth for one in zip(front, sizes, strict=True)]
        starts = latest_starts(seconds, turns(places, prefills, busy))
        due, later = [], math.inf
        for name, size, start in zip(front, sizes, starts, strict=True):
            if not size or name in self._loads:
                continue
            if start <= self.margin:
                due.append(name)
            else:
                later = min(later, start - self.margin)
        for name in due:
            self._begin(name, front[: front.index(name)])
        return due, later

    def cancel_evicted(self, queue: Sequence[Name]) -> None:
        """Cancel loads that were complete and whose bytes were evicted before their turn, so that
        they may begin again. queue: as for `begin_due`. A server does so at every step; the replay
        leaves such a load to its request's turn.
        """
        for name in queue[:MOST_AHEAD]:
            load = self._loads.get(name)
            if load is not None and not load.under_way and self._loader.load_bytes(name):
                self.cancel(name)

    def _bytes_left(self, name: Name, size: int) -> int:
        """Bytes that the link carries for `name` from now on: `size`, if its load has not begun."""
        load = self._loads.get(name)
        if load is None:
            return size
        return load.size if load.under_way else 0

    def _begin(self, name: Name, before: Sequence[Name]) -> None:
        size, has_room = self._loader.begin_load(name, before)
        if has_room:
            self._without_room.discard(name)
        else:
            self._without_room.add(name)
        if size:
            self._loads[name] = _Load(size)
            self.counts.started += 1

    def on_arrival(self, name: Name) -> None:
        """Called when all bytes of the load for `name` are on the device."""
        load = self._loads.get(name)
        if load is not None and load.under_way:
            load.under_way = False
            self.counts.loaded_bytes += load.size

    def on_all_arrived(self) -> None:
        """Note that all loads have arrived."""
        for name in self._loads:
            self.on_arrival(name)

    def on_turn(self, name: Name, missing: int, *, had_time: bool) -> None:
        """`name` has its turn.

        missing: bytes that it must load still, from now on; what was loaded for it before was
        evicted. had_time: it waited longer than that takes.
        """
        if missing:
            self.counts.on_turn += 1
            self.counts.no_time += not had_time
            self.counts.no_room += had_time and name in self._without_room
            self.cancel(name)
            return
        self._without_room.discard(name)
        load = self._loads.get(name)
        if load is not None:
            self.counts.used += not load.under_way
            self.counts.late += load.under_way
            self.on_arrival(name)  # its prefill waits for the rest
            del self._loads[name]

    def cancel(self, name: Name) -> None:
        """Called when `name` has left the queue, or what was loaded for it was evicted."""
        self._without_room.discard(name)
        load = self._loads.pop(name, None)
        if load is not None:
            self.counts.cancelled += 1
            self.counts.wasted_bytes += 0 if load.under_way else load.size

    def on_decode(self, name: Name, keys: Sequence[Hashable], allowed: int, since: float) -> None:
        """`name` decodes from `since` on, in seconds. keys, allowed: as for
        `AnswerLengths.predict`.
        """
        self.running[name] = Decoding(since, self.lengths.predict(keys, allowed))

    def on_request_end(self, name: Name, keys: Sequence[Hashable], tokens: int) -> None:
        """`name`, if it decoded, has an answer of `tokens` tokens."""
        if self.running.pop(name, None) is not None:
            self.lengths.on_request_end(keys, tokens)
