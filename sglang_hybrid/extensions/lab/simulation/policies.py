"""Eviction policies that only a replay needs: baselines, and some that know the future."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sglang_hybrid.core.costs.cost import FloatArray
from sglang_hybrid.core.records.nodes import NEVER, Clock, Node
from sglang_hybrid.core.returns.hazards import DEPTHS, depth_bucket
from sglang_hybrid.core.returns.history import History
from sglang_hybrid.core.victims.eviction import Policy, Reuse
from sglang_hybrid.core.victims.table import Table
from sglang_hybrid.extensions.lab.simulation.future import NextUses


class PathLru(Policy):
    """Least recently used leaf; a use counts for the whole path, as in an attention-only cache.

    Every node with something to free is a candidate (not `stateless_first`), but inner nodes never
    go before a leaf. The cache calls `touch` and marks the nodes dirty.
    """

    name = "path-lru"
    stateless_first = False

    def __init__(self) -> None:
        self._times: dict[int, int] = {}

    def touch(self, path: Iterable[Node], tick: int) -> None:
        for node in path:
            self._times[node.id] = tick

    def describe(self, node: Node, saved: float, freed: int) -> tuple[float, ...]:
        time = self._times.get(node.id, node.last_used)
        return (time + NEVER if node.children else float(time),)

    def forget(self, node: Node) -> None:
        self._times.pop(node.id, None)


class SglangLru(Policy):
    """SGLang's own order, state slots and KV each in one of its own: the longest untouched goes
    first, however many children it has. Every touch is a moment of its own; the cache tells of it
    and marks the node dirty.
    """

    name = "sglang-lru"
    stateless_first = False

    def __init__(self) -> None:
        self._now = 0
        self._times: dict[int, int] = {}

    def touch(self, node: Node) -> None:
        self._now += 1
        self._times[node.id] = self._now

    def describe(self, node: Node, saved: float, freed: int) -> tuple[float, ...]:
        return (float(self._times.get(node.id, 0)),)

    def forget(self, node: Node) -> None:
        self._times.pop(node.id, None)


class TailLru(Policy):
    """T-LRU (Zhang et al., arXiv 2510.15152): what cannot push a next prompt over the threshold
    goes first, then the least recently used.

    Without a state at depth L, a prompt that continues there by `next_prompt` tokens resumes at the
    anchor; it is safe to evict if no more than `threshold` tokens are left to compute. By default
    200 ms of the paper's linear prefill time.
    """

    name = "tlru"

    def __init__(self, threshold: float = 3_440, next_prompt: float = 128) -> None:
        if not (threshold >= 0 and next_prompt >= 0):
            raise ValueError("T-LRU's threshold and next prompt must be 0 tokens or more")
        self.threshold = threshold
        self.next_prompt = next_prompt

    def describe(self, node: Node, saved: float, freed: int) -> tuple[float, ...]:
        left = node.depth + self.next_prompt - node.anchor_depth
        return (NEVER if left <= self.threshold else 0.0,)

    def scores(self, table: Table, clock: Clock) -> FloatArray:
        times: FloatArray = table.last_used() - table.column(0)
        return times


class Clairvoyant(Policy):
    """FLOPs saved per byte, over the requests until the next use. `node.history_node` is the tick
    of that use. Entries that are never used again are evicted first, by FLOPs per byte: their KV
    may still show a branch.
    """

    name = "clairvoyant"
    knows_returns = True
    columns = 2

    def describe(self, node: Node, saved: float, freed: int) -> tuple[float, ...]:
        known = isinstance(node.history_node, float)
        return (saved / freed, node.history_node if known else NEVER)

    def scores(self, table: Table, clock: Clock) -> FloatArray:
        scores: FloatArray = table.column(0) / np.maximum(table.column(1) - clock.tick, 1.0)
        return scores

    def return_probability(self, node: Node, clock: Clock) -> float:
        return float(isinstance(node.history_node, float) and node.history_node < NEVER)


class Whether(Reuse):
    """`Reuse` that knows whether a position returns: what no prompt passes any more is evicted
    first. When the others return, it guesses as `Reuse` does.
    """

    name = "whether"
    columns = Reuse.columns + 1

    def __init__(self, next_uses: NextUses, history: History | None = None) -> None:
        super().__init__(history)
        self._next_uses = next_uses

    def describe(self, node: Node, saved: float, freed: int) -> tuple[float, ...]:
        return (*super().describe(node, saved, freed), self._next_uses.of(node))

    def scores(self, table: Table, clock: Clock) -> FloatArray:
        ended = table.column(Reuse.columns) >= NEVER
        return np.where(ended, table.last_used() - NEVER, super().scores(table, clock))

    def return_probability(self, node: Node, clock: Clock) -> float:
        return float(self._next_uses.of(node) < NEVER)

    def forget(self, node: Node) -> None:
        self._next_uses.forget(node)


class When(Whether):
    """`Reuse` that knows when a position returns: FLOPs saved per byte, over the requests until
    then. It admits as `Reuse` does, which `Clairvoyant` does not.
    """

    name = "when"
    bounded_by_prefix = False
    columns = 2

    def describe(self, node: Node, saved: float, freed: int) -> tuple[float, ...]:
        return (saved / freed, self._next_uses.of(node))

    def scores(self, table: Table, clock: Clock) -> FloatArray:
        scores: FloatArray = table.column(0) / np.maximum(table.column(1) - clock.tick, 1.0)
        return scores


class Density(Policy):
    """Hits to expect per unit of time, times FLOPs saved per byte, as in LHD (Beckmann et al.,
    NSDI'18).

    Learnt from the cache's own hits and evictions, by class (children 0, 1, more; depth) and age in
    requests. An eviction cuts its interval short, so what was thrown away too early is never seen
    to have come back.
    """

    name = "density"
    columns = 3  # class, tick of last use, savings per byte

    BINS = 40  # of age, each sqrt(2) times as wide as the one before
    PRIOR = 8.0  # events that the mean over all classes counts for
    REBUILD_EVERY = 32  # events

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int, int]] = {}  # node id -> hits, last use, class
        self._cuts = 2.0 ** (np.arange(1, self.BINS) / 2)
        self._hits = np.zeros((3 * DEPTHS, self.BINS))
        self._ends = np.zeros((3 * DEPTHS, self.BINS))
        self._table = np.zeros((3 * DEPTHS, self.BINS))
        self._events = 0
        self._tick = 0

    def describe(self, node: Node, saved: float, freed: int) -> tuple[float, ...]:
        reuse_class = min(len(node.children), 2) * DEPTHS + depth_bucket(node.depth)
        hits, last_used, before = self._seen.get(node.id, (node.hits, 0, reuse_class))
        if node.hits > hits:
            self._count(self._hits, before, node.last_used - last_used)
        self._seen[node.id] = (node.hits, node.last_used, reuse_class)
        return (reuse_class, node.last_used, saved / freed)

    def on_eviction(self, node: Node, score: float) -> None:
        if node.id in self._seen:
            _, last_used, reuse_class = self._seen[node.id]
            self._count(self._ends, reuse_class, self._tick - last_used)

    def forget(self, node: Node) -> None:
        self._seen.pop(node.id, None)

    def scores(self, table: Table, clock: Clock) -> FloatArray:
        self._tick = clock.tick
        bins = self._cuts.searchsorted(clock.tick - table.column(1), "right")
        rates = self._table[table.column(0).astype(np.int64), bins]
        scores: FloatArray = rates * table.column(2)
        return scores

    def _count(self, events: FloatArray, reuse_class: int, age: float) -> None:
        events[reuse_class, self._cuts.searchsorted(age, "right")] += 1
        self._events += 1
        if self._events % self.REBUILD_EVERY == 0:
            self._rebuild()

    def _rebuild(self) -> None:
        """Hits still to come over the time until an event, per class and age; shrunk towards all
        classes together.
        """
        ends = self._hits + self._ends
        edges = np.concatenate([[0.0], self._cuts])
        middle = np.concatenate([(edges[:-1] + edges[1:]) / 2, edges[-1:] * 1.2])

        def later(values: FloatArray) -> FloatArray:
            total: FloatArray = np.flip(np.cumsum(np.flip(values, -1), axis=-1), -1)
            return total

        hits, count = later(self._hits), later(ends)
        time = later(ends * middle) - count * edges
        known = np.maximum(count.sum(0), 1.0)
        prior_hits, prior_time = hits.sum(0) / known, time.sum(0) / known
        rates = (hits + self.PRIOR * prior_hits) / np.maximum(
            time + self.PRIOR * prior_time, np.finfo(float).tiny
        )
        self._table = np.where(hits.sum(0) > 0, rates, 0.0)
