"""Eviction policies: each says what a candidate is worth; the lowest score goes first.

A policy turns a node into a few numbers when it changes (`describe`), and those numbers, in arrays,
into scores when a victim is wanted (`scores`). It knows neither the cache nor the simulator.
"""

from __future__ import annotations

from inspect import signature
from typing import Any, ClassVar

import numpy as np

from sglang_hybrid.core.cost import FloatArray
from sglang_hybrid.core.history import History
from sglang_hybrid.core.nodes import Clock, Node
from sglang_hybrid.core.reuse import class_of
from sglang_hybrid.core.table import Table

NEVER = 2.0**52  # more ticks than will ever be counted
FEW = 3


class Policy:
    """The contract, and its simplest form: one column that is the score.

    columns: how many numbers `describe` returns. blind_to_children: candidates are all that frees
    something, however many children they have, in one order (SGLang's state LRU), instead of nodes
    with at most one child. knows_returns: scores say how likely a position comes back, by what was
    seen. history: what the policy learns from; the cache feeds it every request and links its nodes
    to it (`node.trace`).
    """

    name: ClassVar[str]
    columns: ClassVar[int] = 1
    blind_to_children: bool = False
    knows_returns: ClassVar[bool] = False
    history: History | None = None

    def describe(self, node: Node, saved: int, freed: int) -> tuple[float, ...]:
        """Numbers that hold until the node changes. saved: FLOPs over a hit at its anchor; freed:
        bytes given back, > 0.
        """
        raise NotImplementedError

    def scores(self, table: Table, clock: Clock) -> FloatArray:
        """Scores [n] of all candidates in `table`, n > 0; the lowest is evicted."""
        return table.column(0)

    def evicted(self, node: Node, score: float) -> None:
        """`node` was chosen at `score` and will be evicted."""

    def forget(self, node: Node) -> None:
        """`node` left the cache."""


class Lru(Policy):
    """Least recently used. With `blind_to_children` also over nodes with many children, as SGLang
    0.5.23 does for states.
    """

    name = "lru"
    columns = 0

    def __init__(self, blind_to_children: bool = False) -> None:
        self.blind_to_children = blind_to_children

    def describe(self, node: Node, saved: int, freed: int) -> tuple[float, ...]:
        return ()

    def scores(self, table: Table, clock: Clock) -> FloatArray:
        return table.last_used()


class Marconi(Policy):
    """S = recency + alpha * FLOP efficiency, both min-max normalised over the candidates (paper
    section 4.2).

    Recency is linear in the tick of the last hit. The minima are left out: they shift all scores
    alike.
    """

    name = "marconi"

    def __init__(self, alpha: float = 0.0) -> None:
        if not alpha >= 0:
            raise ValueError(f"alpha must be 0 or more, not {alpha}")
        self.alpha = alpha

    def describe(self, node: Node, saved: int, freed: int) -> tuple[float, ...]:
        return (saved / freed,)

    def scores(self, table: Table, clock: Clock) -> FloatArray:
        times = table.last_used()
        spread = table.span(0) if self.alpha else 0.0
        if not spread:
            return times
        age_spread = table.span(-1)
        scores, efficiency = table.scratch()
        np.multiply(times, 1.0 / age_spread if age_spread else 0.0, out=scores)
        np.multiply(table.column(0), self.alpha / spread, out=efficiency)
        return np.add(scores, efficiency, out=scores)


class SegLen(Policy):
    """Tokens to replay from the nearest state above (SGLang pull request 22172): FLOPs and bytes
    left out.
    """

    name = "seglen"

    def describe(self, node: Node, saved: int, freed: int) -> tuple[float, ...]:
        return (float(node.depth - node.anchor_depth),)


class Gdsf(Policy):
    """Greedy-Dual-Size-Frequency: H = L + uses * savings / bytes, where L is the H of the last
    victim.

    A node keeps the L of when it first stood for eviction after its last use (a running request
    holds it until then), so one that is not used again is overtaken as L rises.
    """

    name = "gdsf"

    def __init__(self) -> None:
        self._inflation = 0.0
        self._base: dict[int, tuple[int, float]] = {}  # node id -> uses, L of the last one

    def describe(self, node: Node, saved: int, freed: int) -> tuple[float, ...]:
        uses = node.hits + 1
        known = self._base.get(node.id)
        if known is None or known[0] != uses:
            known = self._base[node.id] = (uses, self._inflation)
        return (known[1] + uses * saved / freed,)

    def evicted(self, node: Node, score: float) -> None:
        self._inflation = max(self._inflation, score)

    def forget(self, node: Node) -> None:
        self._base.pop(node.id, None)


class Reuse(Policy):
    """U = G(class, age) * savings / bytes: expected FLOPs saved per byte and unit of time
    (marconi-notes.md section 9).

    The class is that of the node's place in the history, where children and turns are counted that
    the cache has lost; the node's own numbers stand in where it has none. The age counts from the
    last hit on the node. Weights change when an age passes into the next bin, at a time that is
    known beforehand, and when the index is rebuilt.
    """

    name = "reuse"
    knows_returns = True
    columns = 5  # class, last use, savings per byte, score, time at which the score expires

    def __init__(self, history: History | None = None) -> None:
        self.history: History = history or History()

    def describe(self, node: Node, saved: int, freed: int) -> tuple[float, ...]:
        place = node.trace
        klass = (
            class_of(len(node.children), node.depth, node.turn) if place is None else place.klass
        )
        return (klass, self.history.time_unit.last_used(node), saved / freed, 0.0, -1.0)

    def scores(self, table: Table, clock: Clock) -> FloatArray:
        now = self.history.time_unit.now(clock)
        index = self.history.index
        scores, expiry = table.column(3), table.column(4)
        stale = (expiry <= now).nonzero()[0]
        if table.version != index.version:
            table.version = index.version
            stale = np.arange(len(table))
        if len(stale) <= FEW:  # as between two victims, where arrays cost more than they save
            for slot in stale.tolist():
                last_used = float(table.column(1)[slot])
                weight, until = index.weight_until(int(table.column(0)[slot]), now - last_used)
                worth = weight * float(table.column(2)[slot])
                scores[slot] = worth if weight > 0 else float(table.last_used()[slot]) - NEVER
                expiry[slot] = last_used + until
        else:
            since = table.column(1).take(stale)
            classes = table.column(0).take(stale).astype(np.int64)
            weights, ends = index.weights(classes, now - since)
            hopeless = table.last_used().take(stale) - NEVER
            scores[stale] = np.where(weights > 0, weights * table.column(2).take(stale), hopeless)
            expiry[stale] = since + ends
        return scores


POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Lru, Marconi, SegLen, Gdsf, Reuse)
}


def make_policy(name: str, **options: Any) -> Policy:
    """The policy called `name`. Raises ValueError, in one sentence, for an unknown name or an
    option it does not have.
    """
    if name not in POLICIES:
        raise ValueError(f"unknown eviction policy {name!r}; known are {', '.join(POLICIES)}")
    accepted = signature(POLICIES[name]).parameters
    for option in options:
        if option not in accepted:
            raise ValueError(f"eviction policy {name!r} has no option {option!r}")
    return POLICIES[name](**options)
