"""A queue of items whose keys change."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)

STALE: Final = 64
"""Outdated heap entries that are kept before the heap is built anew."""


class ChangingQueue(Generic[Item]):
    """Items ordered by a key that may change, the least first. Items with equal keys keep the order
    in which they were put, so that every rank has the same order.
    """

    def __init__(self, key: Callable[[Item], tuple[float, ...]]) -> None:
        self._key = key
        self._count = 0
        self._entry: dict[Item, int] = {}  # the number of the entry that holds
        self._heap: list[tuple[tuple[float, ...], int, Item]] = []

    def __len__(self) -> int:
        return len(self._entry)

    def __contains__(self, item: Item) -> bool:
        return item in self._entry

    def put(self, item: Item) -> None:
        """Add `item` with the key that it has now, or order it anew if it is there."""
        self._count += 1
        self._entry[item] = self._count
        heapq.heappush(self._heap, (self._key(item), self._count, item))
        if len(self._heap) > 2 * len(self._entry) + STALE:
            self._heap = [entry for entry in self._heap if self._holds(entry)]
            heapq.heapify(self._heap)

    def drop(self, item: Item) -> None:
        """Take `item` out. Raises KeyError if it is not there."""
        del self._entry[item]

    def least(self) -> Item | None:
        """The item with the least key; None if there is none."""
        while self._heap:
            if self._holds(self._heap[0]):
                return self._heap[0][2]
            heapq.heappop(self._heap)
        return None

    def _holds(self, entry: tuple[tuple[float, ...], int, Item]) -> bool:
        return self._entry.get(entry[2]) == entry[1]
