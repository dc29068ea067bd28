"""Candidates of one tier: which copies it evicts first, by what each saves over the next best way,
and what copies that are not made yet would be worth there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import ClassVar, Final, Protocol

import numpy as np

from sglang_hybrid.core.costs.cost import CostModel, FloatArray, IntArray
from sglang_hybrid.core.records.nodes import Clock, Node, root_of
from sglang_hybrid.core.tiers.kv_edges import KvEdges
from sglang_hybrid.core.tiers.places import (
    ALL_TIERS,
    Unit,
    copies_of,
    counted_children,
    unit_of,
    was_refused,
)
from sglang_hybrid.core.tiers.rates import Speeds, Tier
from sglang_hybrid.core.victims.eviction import Policy
from sglang_hybrid.core.victims.pool import Pool, Scarce, VictimComparison
from sglang_hybrid.core.victims.table import Table

MOST_COMPARED: Final = 64
"""Victims that a copy is compared with at most."""

NEW_NODES_PER_CALL: Final = 2_048
"""Nodes of a tree that `next_victims` looks at for the first time in one call."""


class SpeedsInForce(Protocol):
    """The object from which the speeds to decide with are read. `speeds` is another object after a
    change.
    """

    speeds: Speeds


class TierPool(Pool):
    """A pool whose candidates are copies in `tier`. Savings are those of `places.seconds_saved`, in
    FLOPs of the prefill that takes as long, so that they compare with what a new state would save.

    A copy that saves nothing, since computing is as fast as the way that it belongs to, is evicted
    first. A victim gives up its unit (`places.unit_of`). A copy below the device that a request
    waits for is no candidate.

    demotes_to: the tier that victims are written to as they are evicted; None if they are not.
    counted: a mask of tiers; copies in others change nothing here. tells_on_choice: the policy is
    told of each victim when it is chosen. Otherwise the cache calls `tell_policy` before it drops
    the victim, when it knows whether a slower tier has a copy.
    """

    further_columns: ClassVar[int] = 1  # the slot in `KvEdges`

    def __init__(
        self,
        tier: Tier,
        scarce: Scarce,
        cost: CostModel,
        policy: Policy,
        clock: Clock,
        speeds: SpeedsInForce,
        demotes_to: Tier | None = None,
        counted: int = ALL_TIERS,
        *,
        tells_on_choice: bool = True,
    ) -> None:
        super().__init__(scarce, cost, policy, clock)
        self.tier = tier
        self.counted = counted
        self.demotes_to = demotes_to
        self._tells_on_choice = tells_on_choice
        self._in_force = speeds
        self._edges: KvEdges | None = None  # from the first `next_victims` on
        self._unfollowed: list[Node] | None = None  # those that are not in them; None: all are
        self._speeds = speeds.speeds  # with which the tables were filled

    def cheapest(self, *, last_resort: bool = False) -> tuple[Node, float] | None:
        if self._speeds is not self._in_force.speeds:
            self._speeds = self._in_force.speeds
            for node in list(self._home):
                self.mark_dirty(node)
        return super().cheapest(last_resort=last_resort)

    def next_victims(self, needed: int) -> list[Node]:
        """The next victims, in order, until `needed` bytes of what is scarce are freed. Those that
        save nothing are left out, but their bytes count. The KV above a leaf that nothing else
        keeps is freed after the leaf, and counts with it. The first calls in a large tree, in each
        of which a part of it is looked at, find none.
        """
        return list(self._next_victims(needed))

    def next_uncopied(self, needed: int) -> Iterator[Node]:
        """The nodes of `next_victims`, in order, of which the next slower tier lacks something and
        has refused nothing since their last use. To be asked anew when one of them was copied.
        Finding the first one takes a few passes over arrays, as the choice of a victim does.
        """
        for node in self._next_victims(needed, KvEdges.LACKS_COPY):
            if was_refused(node):
                self._followed_edges().take_flag(node, KvEdges.LACKS_COPY)
            else:
                yield node

    def _next_victims(self, needed: int, flag: int | None = None) -> Iterator[Node]:
        """`next_victims`, or those with a flag of `KvEdges`, until the tables change."""
        self._describe()
        table = self._candidates
        if not len(table):
            return
        edges = self._followed_edges()
        if self._unfollowed is not None:
            return
        worthless = self._slots(self._stateless)
        if edges.freed_by(worthless) >= needed:
            return
        nodes, scores = list(table.nodes), self.policy.scores(table, self.clock).copy()
        slots, every = self._slots(table), np.arange(len(nodes))

        def is_needed(row: int) -> bool:
            """True if the victims before this row free too little."""
            score = scores[row]
            before = (scores < score) | ((scores == score) & (every < row))
            return edges.freed_by(np.concatenate([worthless, slots[before]])) < needed

        rows = every if flag is None else edges.have(slots, flag).nonzero()[0]
        if not len(rows):
            return
        first = int(rows[scores[rows].argmin()])
        if not is_needed(first):
            return
        yield nodes[first]
        rows = rows[rows != first]
        rows = rows[scores[rows].argsort(kind="stable")]
        count = bisect_left(rows, True, key=lambda row: not is_needed(row))
        for row in rows[:count].tolist():
            yield nodes[row]

    # Arrays of what is freed together

    def _followed_edges(self) -> KvEdges:
        """The edges of the tree, which are followed from the first call on, with a candidate. Of a
        large tree each call looks at a part.
        """
        if self._edges is None:
            self._edges = KvEdges(self.tier, self.scarce, self.cost)
            root = root_of(next(iter(self._home)))
            self._edges.put(root, 0)
            self._unfollowed = list(root.children.values())
        if self._unfollowed is not None:
            self._follow(self._edges, self._unfollowed)
        return self._edges

    def _follow(self, edges: KvEdges, below: list[Node]) -> None:
        """Put some of the nodes `below`, and of those under them, into `edges`."""
        for _ in range(NEW_NODES_PER_CALL):
            if not below:
                break
            node = below.pop()
            if node.parent is not None:  # else it was removed meanwhile
                below.extend(node.children.values())
                edges.put(node, self._weigh(node)[0])
        if not below:
            self._unfollowed = None
            for table in {self._home[node] for node in self._home}:
                table.last_column()[:] = [edges.slot(node) for node in table.nodes]

    @staticmethod
    def _slots(table: Table) -> IntArray:
        """The slots [n] of the nodes in `table`."""
        return table.last_column().astype(np.int64)

    def forget(self, node: Node) -> None:
        super().forget(node)
        if self._edges is not None:
            self._edges.drop(node)

    def _further_values(self, node: Node) -> tuple[float, ...]:
        return (0.0 if self._edges is None else float(self._edges.slot(node)),)

    def _table_of(self, node: Node) -> tuple[Table | None, int, int]:
        found = super()._table_of(node)
        if self._edges is not None:
            self._edges.put(node, found[1])
        return found

    def unit(self, node: Node) -> Unit | None:
        """The unit that evicting `node` would free in this tier now; None if there is none."""
        if node.copies is None:
            return None
        waits = node.kv_locked and not copies_of(node).has_kv(Tier.DEVICE)
        if waits and self.tier is not Tier.DEVICE:
            return None
        to, counted = self.demotes_to, self.counted
        return unit_of(node, self.tier, self.cost, self._speeds, to, counted)

    def tell_policy(self, node: Node, *, lost: bool) -> None:
        """Tell the policy that the last victim, `node`, is evicted from this tier. lost: no other
        tier has its state.
        """
        if self._has_demand(node):
            tell = self.policy.on_eviction if lost else self.policy.on_demotion
            tell(node, self.last_score)

    def compare_copy(self, node: Node) -> VictimComparison | None:
        """The score that a copy of all of `node` would have in this tier, where it may have none or
        a part, beside the cheapest victim's; None if no victim has a score.
        """
        self._describe()
        if len(self._stateless) or not len(self._candidates):
            return None
        return self._compared(node)

    def outranks_pushed_out(self, node: Node, needed: int) -> bool:
        """True if a copy of all of `node` is worth more than each of the first victims that
        together free `needed` bytes. MOST_COMPARED victims are compared at most. False if all
        victims together free less: what would have to be evicted after them is worth more. True
        where the victims have no score.
        """
        self._describe()
        scored = None
        if not len(self._stateless) and len(self._candidates):
            scored = self._scored(node)
        if scored is None:
            return True
        new, scores, nodes = scored
        for row in np.argsort(scores, kind="stable")[:MOST_COMPARED].tolist():
            if new <= float(scores[row]):
                return False
            needed -= self._weigh(nodes[row])[0]
            if needed <= 0:
                return True
        return len(nodes) > MOST_COMPARED

    def score_of_copy(self, node: Node) -> float:
        """The score that a copy of all of `node` would have in this tier; 0 where none can be."""
        self._describe()
        comparison = self._compared(node)
        return 0.0 if comparison is None else comparison.new

    def _compared(self, node: Node) -> VictimComparison | None:
        """`compare_copy` beside what has a score; None if there can be no copy."""
        scored = self._scored(node)
        return None if scored is None else VictimComparison(scored[0], float(scored[1].min()))

    def _scored(self, node: Node) -> tuple[float, FloatArray, list[Node]] | None:
        """The score that a copy of all of `node` would have, and those of the candidates [n] beside
        it, without end in its own row if it is one; scores of different calls do not compare. None
        if there can be no copy.
        """
        table = self._candidates
        copies = copies_of(node)
        before = copies.kv, copies.state, copies.pinned
        copies.pinned = 0
        copies.kv |= 1 << self.tier
        copies.state |= (1 << self.tier) * bool(copies.state & self.counted)
        freed, saved = self._weigh(node)
        copies.kv, copies.state, copies.pinned = before
        if not freed:
            return None
        known = self._home.get(node) is table
        table.put(node, self.policy.describe(node, saved, freed))
        scores = self.policy.scores(table, self.clock).copy()
        row = table.row(node)
        new, scores[row] = float(scores[row]), np.inf
        nodes = list(table.nodes)
        if known:
            self.mark_dirty(node)
        else:
            table.discard(node)
        return new, scores, nodes

    def _weigh(self, node: Node) -> tuple[int, int]:
        unit = self.unit(node)
        if unit is None:
            return 0, 0
        freed = unit.freed
        if self.scarce is Scarce.STATES:
            freed = self._bytes_of(0, int(unit.state))
        elif self.scarce is Scarce.KV:
            freed = self._bytes_of(unit.kv * node.tokens, 0)
        saved = int(unit.saves * self._speeds.prefill)
        leaf = unit.kv and self.scarce is not Scarce.STATES
        if leaf and freed and self.policy.bounded_by_prefix:
            saved = self._share_of_prefix(node, freed, saved)
        return freed, saved

    def _bytes_of(self, kv_tokens: int, states: int) -> int:
        return self.cost.bytes_in(self.tier, kv_tokens, states)

    def _is_worthless(self, node: Node, saved: int) -> bool:
        return saved <= 0

    def _is_fork(self, node: Node) -> bool:
        return super()._is_fork(node) and counted_children(node, self.counted) > 1

    def _tell_policy(self, node: Node, score: float) -> None:
        if self._tells_on_choice:
            others = copies_of(node).state & self.counted & ~(1 << self.tier)
            self.tell_policy(node, lost=not others and self.demotes_to is None)
