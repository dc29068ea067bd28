"""A dense struct of arrays over nodes: O(1) put and discard, vector passes over what is in it."""

from __future__ import annotations

import numpy as np

from sglang_hybrid.core.costs.cost import FloatArray, IntArray
from sglang_hybrid.core.records.nodes import Node


class Table:
    """Rows of float64 [columns, n] for n nodes, always without holes; a discarded node's place is
    taken by the last one. Beside the policy's columns there are the last use and the pin's weight.
    """

    def __init__(self, columns: int) -> None:
        self.nodes: list[Node] = []
        self.version = -1  # for a policy that must know when it last went over the whole table
        self._row: dict[Node, int] = {}
        self._pinned = 0  # nodes with a pin
        self._data = np.empty((columns + 2, 64))
        self._columns = list(self._data)
        self._scratch = np.empty((2, 64))
        self._ranges: dict[int, tuple[float, float]] = {}  # of the rows that were asked for

    def __len__(self) -> int:
        return len(self.nodes)

    def last_used(self) -> FloatArray:
        """Ticks of last use, float64 [n], a view."""
        return self._columns[0][: len(self.nodes)]

    def pins(self) -> FloatArray | None:
        """Weights of pins, 0 where there is none, float64 [n], a view; None if nobody has one."""
        return self._columns[-1][: len(self.nodes)] if self._pinned else None

    def recency(self, now: float) -> FloatArray:
        """Ticks of last use, float64 [n]; for pinned nodes between that and the next request's."""
        used, pins = self.last_used(), self.pins()
        return used if pins is None else used + np.minimum(pins, 1.0) * (now + 1 - used)

    def column(self, index: int) -> FloatArray:
        """The policy's column `index`, float64 [n], a view."""
        return self._columns[index + 1][: len(self.nodes)]

    def last_column(self) -> FloatArray:
        """The last of the columns that are not the policy's own, float64 [n], a view."""
        return self._columns[-2][: len(self.nodes)]

    def rows(self, places: IntArray) -> FloatArray:
        """Ticks of last use, the columns of the policy, and weights of pins, float64 [columns + 2,
        n], a copy.
        """
        return self._data.take(places, axis=1)

    def scratch(self) -> tuple[FloatArray, FloatArray]:
        """Two arrays [n] to compute in; their content is gone at the next call."""
        first, second = self._scratch
        return first[: len(self.nodes)], second[: len(self.nodes)]

    def put(self, node: Node, values: tuple[float, ...]) -> None:
        """Add `node` or overwrite what was known of it."""
        row = self._row.get(node)
        if row is None:
            row = self._row[node] = len(self.nodes)
            self.nodes.append(node)
            if row == self._data.shape[1]:
                self._grow()
        else:
            self._leave_range(row)
            self._pinned -= bool(self._columns[-1][row])
        columns = self._columns
        columns[0][row] = node.last_used
        columns[-1][row] = 0.0 if node.pin is None else node.pin.weight
        self._pinned += node.pin is not None
        for index, value in enumerate(values, start=1):
            columns[index][row] = value
        for index, (low, high) in self._ranges.items():
            value = float(columns[index][row])
            self._ranges[index] = (min(low, value), max(high, value))

    def row(self, node: Node) -> int:
        """The place of `node` in the arrays, until a node is discarded."""
        return self._row[node]

    def discard(self, node: Node) -> None:
        """Forget `node`."""
        row = self._row.pop(node)
        self._leave_range(row)
        self._pinned -= bool(self._columns[-1][row])
        last = self.nodes.pop()
        if last is not node:
            self.nodes[row] = last
            self._row[last] = row
            self._data[:, row] = self._data[:, len(self.nodes)]

    def span(self, index: int) -> float:
        """Largest minus smallest value of the policy's column `index` (-1: of last use)."""
        limits = self._ranges.get(index + 1)
        if limits is None:
            values = self.column(index)
            limits = self._ranges[index + 1] = (float(values.min()), float(values.max()))
        return limits[1] - limits[0]

    def lowest(self, scores: FloatArray) -> tuple[Node, float]:
        """The node of the lowest score [n]; among equals the least recently used one, then the
        lowest id.
        """
        row = int(scores.argmin())
        score = scores.item(row)
        equal = scores == score
        if np.count_nonzero(equal) > 1:
            rows = equal.nonzero()[0]
            times = self._columns[0].take(rows)
            oldest = times.argmin()
            row = rows.item(oldest)
            if np.count_nonzero(times == times[oldest]) > 1:
                rows = rows[times == times[oldest]]
                row = min(rows.tolist(), key=lambda s: self.nodes[s].id)
        return self.nodes[row], score

    def _leave_range(self, row: int) -> None:
        """A value at the edge of its column's range leaves: measure that range anew when it is next
        wanted.
        """
        if self._ranges:
            columns = self._columns
            self._ranges = {r: lim for r, lim in self._ranges.items() if columns[r][row] not in lim}

    def _grow(self) -> None:
        rows, count = self._data.shape
        data = np.empty((rows, count + count // 4 + 64))  # twice as many would be half empty
        data[:, :count] = self._data
        self._data = data
        self._columns = list(data)
        self._scratch = np.empty((2, data.shape[1]))
