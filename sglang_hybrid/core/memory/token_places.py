"""Places of tokens in rows of memory that hold several each, and who has each of them."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

PlaceArray = npt.NDArray[np.int64]

FREE = -1
"""The owner of a place that nobody has."""


class TokenPlaces:
    """The places of some rows, `width` each. Place `p` is the place `p % width` of the row
    `p // width`. Owners are named by numbers from 0 on.

    taken: places that somebody has.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.taken = 0
        self._taken_in: dict[int, int] = {}
        self._unused: list[int] = []
        self._owners: PlaceArray = np.empty(0, np.int64)

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self._taken_in)

    @property
    def free(self) -> int:
        """Places that are free."""
        return self.rows * self.width - self.taken

    def add_row(self) -> int:
        """Add a row; returns its number, the smallest that no row has."""
        row = heapq.heappop(self._unused) if self._unused else self.rows
        end = (row + 1) * self.width
        if end > len(self._owners):
            more = np.full(max(end, 2 * len(self._owners)) - len(self._owners), FREE)
            self._owners = np.concatenate([self._owners, more])
        self._taken_in[row] = 0
        return row

    def drop_empty_rows(self) -> list[int]:
        """Drop the rows in which all places are free; returns their numbers."""
        empty = [row for row, taken in self._taken_in.items() if not taken]
        for row in empty:
            self._drop(row)
        return empty

    def take(self, owner: int, count: int) -> PlaceArray:
        """Give `owner` so many places that are free: int64 [count]."""
        places = self._find(count)
        self._owners[places] = owner
        return places

    def give_back(self, places: PlaceArray) -> None:
        """Free these places."""
        self._owners[places] = FREE
        self.taken -= len(places)
        rows, counts = np.unique(places // self.width, return_counts=True)
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            self._taken_in[row] -= count

    def hand_over(self, places: PlaceArray, owner: int) -> None:
        """Give `owner` these places, which somebody has."""
        self._owners[places] = owner

    def vacate_row(self) -> tuple[int, PlaceArray, PlaceArray, PlaceArray]:
        """Drop the row in which the fewest places are taken; there must be as many free ones in
        others.

        Returns its number, the places that were taken there, in ascending order, those that their
        owners have instead, and the owners: int64 [n] each.
        """
        row = min(self._taken_in, key=self._taken_in.__getitem__)
        begin = row * self.width
        there = self._owners[begin : begin + self.width]
        old = np.flatnonzero(there != FREE) + begin
        owners = self._owners[old]
        self._owners[old] = FREE
        self.taken -= len(old)
        self._drop(row)
        new = self._find(len(old))
        self._owners[new] = owners
        return row, old, new, owners

    def _find(self, count: int) -> PlaceArray:
        """Find `count` free places, which are counted as taken from now on."""
        found = [np.empty(0, np.int64)]
        missing = count
        for row, taken in self._taken_in.items():
            if missing and taken < self.width:
                begin = row * self.width
                free = np.flatnonzero(self._owners[begin : begin + self.width] == FREE)[:missing]
                self._taken_in[row] += len(free)
                missing -= len(free)
                found.append(free + begin)
        assert not missing, f"{missing} places more than are free"
        self.taken += count
        return np.concatenate(found)

    def _drop(self, row: int) -> None:
        del self._taken_in[row]
        heapq.heappush(self._unused, row)
