"""Eviction policies: each gives every candidate a score; the lowest score is evicted first.

A policy turns a node into a few numbers when it changes (`describe`), and those numbers, in arrays,
into scores when a victim is wanted (`scores`). It knows neither the cache nor the simulator.

A pin (core/records/pins.py) counts as more evidence of return. Where a policy estimates returns
(`Reuse`), it adds the pin's rate. Where recency stands for them, the node counts as just used, or
as used half as long ago for a low one. Where neither does, what it saves counts 1 + w times for a
weight of w.
"""

from __future__ import annotations

import math
from inspect import signature
from typing import Any, ClassVar

import numpy as np

from sglang_hybrid.core.costs.cost import FloatArray
from sglang_hybrid.core.records.nodes import NEVER, Clock, Node, anchor
from sglang_hybrid.core.returns.hazards import BEFORE_END, NEVER_REUSED, reuse_class_of
from sglang_hybrid.core.returns.history import History
from sglang_hybrid.core.returns.history_tree import NO_INTERVAL, HistoryNode
from sglang_hybrid.core.victims.table import Table

SCALAR_UPDATE_ROWS = 3
"""Up to so many rows, scores are updated one by one: for two victims arrays would cost more."""


class Policy:
    """The contract, and its simplest form: one column that is the score.

    columns: how many numbers `describe` returns. stateless_first: leaves without a state are
    evicted before anything else, since nothing can be resumed from them; otherwise they compete
    (SGLang's order). spares_forks: states with several children are evicted only where nothing else
    is left (the paper's rule, section 4.2). bounded_by_prefix: of KV alone, and of any leaf in
    tiers, a leaf saves no more per byte than its whole prefix, which must stay as long as it does.
    knows_returns: scores say how likely a position comes back, by what was seen. history: what the
    policy learns from; the cache feeds it every request and links its nodes to it
    (`node.history_node`).
    """

    name: ClassVar[str]
    columns: ClassVar[int] = 1
    stateless_first: bool = True
    spares_forks: ClassVar[bool] = False
    bounded_by_prefix: ClassVar[bool] = False
    knows_returns: ClassVar[bool] = False
    history: History | None = None

    def describe(self, node: Node, saved: float, freed: int) -> tuple[float, ...]:
        """Numbers that hold until the node changes. saved: FLOPs over a hit at its anchor; freed:
        bytes given back, > 0.
        """
        raise NotImplementedError

    def scores(self, table: Table, clock: Clock) -> FloatArray:
        """Scores [n] of all candidates in `table`, n > 0; the lowest is evicted."""
        return table.column(0)

    def return_probability(self, node: Node, clock: Clock) -> float | None:
        """The probability that a request resumes from the state of `node` again; None if the policy
        cannot tell.
        """
        return None

    def on_eviction(self, node: Node, score: float) -> None:
        """Called when `node` was chosen at `score` and will be evicted."""

    def on_demotion(self, node: Node, score: float) -> None:
        """Called when `node`, chosen at `score`, leaves a tier, but its state stays in another."""

    def forget(self, node: Node) -> None:
        """Called when `node` has left the cache."""


class Lru(Policy):
    """Least recently used."""

    name = "lru"
    columns = 0

    def __init__(self, stateless_first: bool = True) -> None:
        self.stateless_first = stateless_first

    def describe(self, node: Node, saved: float, freed: int) -> tuple[float, ...]:
        return ()

    def scores(self, table: Table, clock: Clock) -> FloatArray:
        return table.recency(clock.tick)


class Marconi(Policy):
    """S = recency + alpha * FLOP efficiency, both min-max normalised over the candidates (paper
    section 4.2).

    Recency is linear in the tick of the last hit. The minima are left out: they shift all scores
    alike. States with several children are spared, as in the paper; where traffic forks often and
    never comes back to the forks, that fills the cache with them (docs/benchmarks.md).
    """

    name = "marconi"
    spares_forks = True

    def __init__(self, alpha: float = 0.0) -> None:
        if not alpha >= 0:
            raise ValueError(f"alpha must be 0 or more, not {alpha}")
        self.alpha = alpha

    def describe(self, node: Node, saved: float, freed: int) -> tuple[float, ...]:
        return (saved / freed,)

    def scores(self, table: Table, clock: Clock) -> FloatArray:
        times = table.recency(clock.tick)
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

    def describe(self, node: Node, saved: float, freed: int) -> tuple[float, ...]:
        return (float(node.depth - node.anchor_depth),)

    def scores(self, table: Table, clock: Clock) -> FloatArray:
        pins = table.pins()
        return table.column(0) if pins is None else table.column(0) * (1 + pins)


class Gdsf(Policy):
    """Greedy-Dual-Size-Frequency: H = L + uses * savings / bytes, where L is the H of the last
    victim.

    A node keeps the L of when it first stood for eviction after its last use (a running request
    holds it until then), so one that is not used again is overtaken as L rises. One that is pinned
    has the L of now.
    """

    name = "gdsf"
    columns = 2  # L, and the rest

    def __init__(self) -> None:
        self._inflation = 0.0
        self._base: dict[int, tuple[int, float]] = {}  # node id -> uses, L of the last one

    def describe(self, node: Node, saved: float, freed: int) -> tuple[float, ...]:
        uses = node.hits + 1
        known = self._base.get(node.id)
        if known is None or known[0] != uses:
            known = self._base[node.id] = (uses, self._inflation)
        return (known[1], uses * saved / freed)

    def scores(self, table: Table, clock: Clock) -> FloatArray:
        pins = table.pins()
        if pins is None:
            return table.column(0) + table.column(1)
        base = np.where(pins > 0, self._inflation, table.column(0))
        scores: FloatArray = base + table.column(1) * (1 + pins)
        return scores

    def on_eviction(self, node: Node, score: float) -> None:
        self._inflation = max(self._inflation, score)

    def on_demotion(self, node: Node, score: float) -> None:
        self.on_eviction(node, score)

    def forget(self, node: Node) -> None:
        self._base.pop(node.id, None)


class Reuse(Policy):
    """U = G(class, age) * savings / bytes: expected FLOPs saved per byte and unit of time
    (marconi-notes.md section 9).

    The class is that of the cache node's history node, which also counts children and turns that
    the cache has lost. A cache node without a history node gets a class from its own numbers. A
    cache node that lies too far above its history node (`History.max_offset`) has no returns of its
    own, but on the way to an end that nothing has continued it serves requests that leave before
    that end (`Departures`). The age counts from the last hit on the node. When a state is evicted,
    later requests for it resume from the next state above, its anchor. So the anchor inherits that
    demand: its G is its own plus that of the evicted state. A weight changes when the age enters
    the next bin, at a time that is known beforehand, and when the index is rebuilt.

    Args:
        history: shared by the policies that learn from the same requests.
        answers: 0: answers and hints, which the history goes on to learn from, do not count.
    """

    name = "reuse"
    bounded_by_prefix = True
    knows_returns = True
    # class, last use, class and last use of the inherited demand, savings per byte, score, time at
    # which the score expires, rate of the pin
    columns = 8

    def __init__(self, history: History | None = None, answers: float = 1) -> None:
        self.history: History = history or History()
        self.history.answers_count = bool(answers)

    def describe(self, node: Node, saved: float, freed: int) -> tuple[float, ...]:
        rate = 0.0 if node.pin is None else node.pin.rate
        return (*self._demand(node), saved / freed, 0.0, -1.0, rate)

    def _demand(self, node: Node) -> tuple[int, float, int, float]:
        """Class and time of last use of `node`, and of the demand that it inherited."""
        history_node, inherited = node.history_node, self._inherited_by(node)
        if history_node is None:
            reuse_class = reuse_class_of(len(node.children), node.depth, node.turn)
        else:
            reuse_class = history_node.reuse_class
            if not self._is_near(node):
                alone = not history_node.branches and inherited is None
                reuse_class = reuse_class + BEFORE_END if alone else NEVER_REUSED
        used = self.history.time_unit.last_used(node)
        if inherited is None:
            return reuse_class, used, NEVER_REUSED, 0.0
        since = self.history.index.since(inherited.interval_id)
        return reuse_class, used, inherited.reuse_class, since

    def return_probability(self, node: Node, clock: Clock) -> float:
        now, index = self.history.time_unit.now(clock), self.history.index
        reuse_class, used, inherited, since = self._demand(node)
        own = index.return_probability(reuse_class, now - used)
        declared = 0.0 if node.pin is None else min(node.pin.weight, 1.0)
        known = (own, index.return_probability(inherited, now - since), declared)
        return 1.0 - math.prod(1.0 - probability for probability in known)

    def scores(self, table: Table, clock: Clock) -> FloatArray:
        now = self.history.time_unit.now(clock)
        index = self.history.index
        scores, expiry, pinned = table.column(5), table.column(6), table.pins() is not None
        stale = (expiry <= now).nonzero()[0]
        if table.version != index.version:
            table.version = index.version
            stale = np.arange(len(table))
        if len(stale) <= SCALAR_UPDATE_ROWS:
            for row in stale.tolist():
                reuse_class, last, inherited, since, saved = (
                    float(table.column(i)[row]) for i in range(5)
                )
                weight, until = index.weight_until(int(reuse_class), now - last)
                extra_weight, extra_until = index.weight_until(int(inherited), now - since)
                weight += extra_weight
                if pinned:
                    weight += min(float(table.column(7)[row]), index.peak)
                scores[row] = weight * saved if weight > 0 else table.last_used()[row] - NEVER
                expiry[row] = min(last + until, since + extra_until)
        else:
            last_used, classes, used, heirs, since, saved = table.rows(stale)[:6]
            weights, ends = index.weights(classes.astype(np.int64), now - used)
            ends += used
            if np.count_nonzero(heirs != NEVER_REUSED):  # there is inherited demand
                extra, extra_ends = index.weights(heirs.astype(np.int64), now - since)
                weights += extra
                np.minimum(ends, since + extra_ends, out=ends)
            if pinned:
                weights += np.minimum(table.column(7).take(stale), index.peak)
            found = weights * saved
            if np.count_nonzero(weights) < len(weights):
                found = np.where(weights, found, last_used - NEVER)
            scores[stale] = found
            expiry[stale] = ends
        return scores

    def on_eviction(self, node: Node, score: float) -> None:
        above = anchor(node)
        passed_on, node.inherited_demand = self._inherited_by(node), None
        if above is not None and node.has_state:
            self._inherit(above, node, passed_on)

    def on_demotion(self, node: Node, score: float) -> None:
        """Later requests for what left the tier still need the KV above it, which stayed."""
        above = node.parent
        if above is not None and not above.has_state:
            self._inherit(above, node, self._inherited_by(node))

    def _inherit(self, above: Node, node: Node, passed_on: HistoryNode | None) -> None:
        """`above` now serves the demand for `node` too, and what `node` itself inherited; the
        latest demand counts.
        """
        index = self.history.index
        own = node.history_node if self._is_near(node) else None
        demand = [own, passed_on, self._inherited_by(above)]
        known = [at for at in demand if at is not None and at.interval_id != NO_INTERVAL]
        if known:
            latest = max(known, key=lambda at: index.since(at.interval_id))
            above.inherited_demand = (above.last_used, latest)

    def _is_near(self, node: Node) -> bool:
        """True if a request that returns to the history node of `node` can resume from `node`."""
        at = node.history_node
        return at is not None and at.depth - node.depth < self.history.max_offset

    def _inherited_by(self, node: Node) -> HistoryNode | None:
        """The history node of an evicted state whose demand `node` inherited; None if there is
        none, or if `node` was used since.
        """
        used, at = node.inherited_demand or (0, None)
        known = at is not None and at.interval_id != NO_INTERVAL
        return at if known and used == node.last_used else None


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
