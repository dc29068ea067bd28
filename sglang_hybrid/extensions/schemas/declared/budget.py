"""Chooses the prefixes of a tree to hold within a budget: the best choice.

A prompt resumes from the deepest prefix on its path that is held. So the expected saving of a set
is the sum over its nodes of the probability that a prompt passes there, times the tokens between
the node and the next one above that is held. A node costs a state, and an edge is charged for its
KV once if anything is held at its end or below it. The best set of every size is found from the
leaves up, for each distance to the next node above that could be held (a knapsack over a tree).
Places of a schema with the same distance share their values, whatever modules lie before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hybrid.extensions.schemas.declared.tree import Edge, PrefixNode, Shape

Values = npt.NDArray[np.float64]

MOST_UNITS = 1_000
"""Units into which a budget is divided; costs are rounded up to whole units."""

MOST_STEPS = 4_000_000
"""Steps of combining values, about 20 seconds on two busy cores. The time grows with about
the fifth power of the number of modules that a prompt may leave out.
"""


@dataclass(frozen=True)
class Plan:
    """A choice of prefixes to hold. nodes: their ends, parents first. saved: tokens per prompt that
    need not be computed, expected. cost: bytes of the states and the KV.
    """

    nodes: list[PrefixNode]
    saved: float
    cost: int


def best_prefixes(root: PrefixNode, budget: int, state_bytes: int, kv_bytes_per_token: int) -> Plan:
    """The best prefixes of the tree to hold within `budget` bytes. Raises ValueError if they take
    too long to choose.
    """
    unit = max(1, -(-budget // MOST_UNITS))
    chosen = _Chooser(budget // unit, unit, state_bytes, kv_bytes_per_token).choose(root)
    return Plan(chosen, saved(chosen), cost(chosen, state_bytes, kv_bytes_per_token))


def saved(chosen: Sequence[PrefixNode]) -> float:
    """Expected tokens that a prompt need not compute if these nodes are held."""
    held = set(chosen)
    return sum(node.probability * (node.depth - _held_above(node, held)) for node in chosen)


def cost(chosen: Sequence[PrefixNode], state_bytes: int, kv_bytes_per_token: int) -> int:
    """Bytes of the states and of the KV before them."""
    needed: set[PrefixNode] = set()
    tokens = 0
    for node in chosen:
        above: PrefixNode | None = node
        while above is not None and above not in needed:
            needed.add(above)
            tokens += above.depth - (above.parent.depth if above.parent else 0)
            above = above.parent
    return len(chosen) * state_bytes + tokens * kv_bytes_per_token


def _held_above(node: PrefixNode, held: set[PrefixNode]) -> int:
    return next((above.depth for above in node.above() if above in held), 0)


class _Chooser:
    """Chooses nodes by a knapsack over the tree. Values [units + 1] are the most tokens that
    exactly 0, 1, ... units of memory can save for one prompt that reaches a place. A distance is
    the number of tokens between a place and the next held prefix above it.
    """

    def __init__(self, units: int, unit: int, state_bytes: int, kv_bytes_per_token: int) -> None:
        self._units = units
        self._unit = unit
        self._state = self._units_of(state_bytes)
        self._kv = kv_bytes_per_token
        self._steps = 0
        self._below: dict[tuple[int, int], list[Values]] = {}
        self._ends: dict[tuple[int, int, int], tuple[Values, Values]] = {}

    def choose(self, root: PrefixNode) -> list[PrefixNode]:
        chosen: list[PrefixNode] = []
        waiting = [(root, 0, int(np.argmax(self._merged(root.shape, 0)[-1])))]
        while waiting:
            node, distance, left = waiting.pop()
            merged = self._merged(node.shape, distance)
            edges = node.shape.edges
            for at in reversed(range(len(edges))):
                edge, child = edges[at], node.children[at]
                own = edge.share * self._best(edge, distance)
                before = merged[at]
                spends = np.arange(max(0, left - len(before) + 1), min(left, len(own) - 1) + 1)
                spent = int(spends[np.argmax(own[spends] + before[left - spends])])
                left -= spent
                if not spent:
                    continue
                holding, passing = self._two_ways(edge, distance)
                spent_below = spent - self._units_of(edge.tokens * self._kv)
                if spent < len(holding) and (
                    spent >= len(passing) or holding[spent] > passing[spent]
                ):
                    chosen.append(child)
                    waiting.append((child, 0, spent_below - self._state))
                else:
                    waiting.append((child, distance + edge.tokens, spent_below))
        return sorted(chosen, key=lambda node: node.depth)

    def _merged(self, shape: Shape, distance: int) -> list[Values]:
        """Values below a place, with none of its edges, its first one, its first two ..."""
        key = (id(shape), distance)
        if key not in self._below:
            found = [np.zeros(1)]
            for edge in shape.edges:
                found.append(self._together(found[-1], edge.share * self._best(edge, distance)))
            self._below[key] = found
        return self._below[key]

    def _best(self, edge: Edge, distance: int) -> Values:
        """Values of an edge's end and all below, for one prompt that takes the edge."""
        holding, passing = self._two_ways(edge, distance)
        size = max(len(holding), len(passing))
        best = np.full(size, -np.inf)
        best[: len(passing)] = passing
        best[: len(holding)] = np.maximum(best[: len(holding)], holding)
        best[0] = 0.0  # nothing is held, so not even the edge's KV
        return best

    def _two_ways(self, edge: Edge, distance: int) -> tuple[Values, Values]:
        """Values if the edge's end is held, and if it is not."""
        key = (id(edge.target), edge.tokens, distance)
        if key not in self._ends:
            kv, reached = self._units_of(edge.tokens * self._kv), distance + edge.tokens
            holding = self._shifted(self._merged(edge.target, 0)[-1], kv + self._state, reached)
            passing = self._shifted(self._merged(edge.target, reached)[-1], kv, 0)
            self._ends[key] = (holding, passing)
        return self._ends[key]

    def _shifted(self, values: Values, units: int, gain: int) -> Values:
        shifted: Values = np.concatenate([np.full(units, -np.inf), values + gain])
        return shifted[: self._units + 1]

    def _together(self, one: Values, other: Values) -> Values:
        """The best sums of two values by units spent on both."""
        size = min(len(one) + len(other) - 1, self._units + 1)
        best = np.full(size, -np.inf)
        short, long = (one, other) if len(one) < len(other) else (other, one)
        self._steps += len(short)
        if self._steps > MOST_STEPS:
            raise ValueError(
                "the schema has so many choices one after another that the best of its prefixes "
                "take too long to find; give mode modular, or divide it into several schemas."
            )
        for spent in np.flatnonzero(short[:size] > -np.inf).tolist():
            end = min(size, spent + len(long))
            np.maximum(best[spent:end], short[spent] + long[: end - spent], out=best[spent:end])
        return best

    def _units_of(self, size: int) -> int:
        return -(-size // self._unit)
