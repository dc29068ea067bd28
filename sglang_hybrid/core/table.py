"""A dense struct of arrays over nodes: O(1) put and discard, vector passes over what is in it."""

from __future__ import annotations

import numpy as np

from sglang_hybrid.core.cost import FloatArray
from sglang_hybrid.core.nodes import Node


class Table:
    """Rows of float64 [columns, n] for n nodes, always without holes; a discarded node's place is
    taken by the last one.
    """

    def __init__(self, columns: int) -> None:
        self.nodes: list[Node] = []
        self.version = -1  # for a policy that must know when it last went over the whole table
        self._slot: dict[Node, int] = {}
        self._data = np.empty((columns + 1, 64))
        self._rows = list(self._data)
        self._scratch = np.empty((2, 64))
        self._ranges: dict[int, tuple[float, float]] = {}  # of the rows that were asked for

    def __len__(self) -> int:
        return len(self.nodes)

    def last_used(self) -> FloatArray:
        """Ticks of last use, float64 [n], a view."""
        return self._rows[0][: len(self.nodes)]

    def column(self, index: int) -> FloatArray:
        """The policy's column `index`, float64 [n], a view."""
        return self._rows[index + 1][: len(self.nodes)]

    def scratch(self) -> tuple[FloatArray, FloatArray]:
        """Two arrays [n] to compute in; their content is gone at the next call."""
        first, second = self._scratch
        return first[: len(self.nodes)], second[: len(self.nodes)]

    def put(self, node: Node, values: tuple[float, ...]) -> None:
        """Add `node` or overwrite what was known of it."""
        slot = self._slot.get(node)
        if slot is None:
            slot = self._slot[node] = len(self.nodes)
            self.nodes.append(node)
            if slot == self._data.shape[1]:
                self._grow()
        else:
            self._leave_range(slot)
        rows = self._rows
        rows[0][slot] = node.last_used
        for row, value in enumerate(values, start=1):
            rows[row][slot] = value
        for row, (low, high) in self._ranges.items():
            value = float(rows[row][slot])
            self._ranges[row] = (min(low, value), max(high, value))

    def discard(self, node: Node) -> None:
        """Forget `node`."""
        slot = self._slot.pop(node)
        self._leave_range(slot)
        last = self.nodes.pop()
        if last is not node:
            self.nodes[slot] = last
            self._slot[last] = slot
            self._data[:, slot] = self._data[:, len(self.nodes)]

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
        slot = int(scores.argmin())
        score = scores[slot]
        rest = scores[slot + 1 :]
        if len(rest) and rest.min() == score:
            slots = (scores == score).nonzero()[0]
            times = self._rows[0][slots]
            slots = slots[times == times.min()]
            slot = min(slots.tolist(), key=lambda s: self.nodes[s].id)
        return self.nodes[slot], float(score)

    def _leave_range(self, slot: int) -> None:
        """A value at the edge of its column's range leaves: measure that range anew when it is next
        wanted.
        """
        if self._ranges:
            rows = self._rows
            self._ranges = {r: lim for r, lim in self._ranges.items() if rows[r][slot] not in lim}

    def _grow(self) -> None:
        data = np.empty((self._data.shape[0], 2 * self._data.shape[1]))
        data[:, : self._data.shape[1]] = self._data
        self._data = data
        self._rows = list(data)
        self._scratch = np.empty((2, data.shape[1]))
