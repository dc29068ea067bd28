"""Candidates of one tier: which copies it evicts first, by what each saves over the next best way,
and what copies that are not made yet would be worth there.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np

from sglang_hybrid.core.costs.cost import CostModel, FloatArray
from sglang_hybrid.core.records.nodes import Clock, Node
from sglang_hybrid.core.tiers.places import ALL_TIERS, Unit, copies_of, counted_children, unit_of
from sglang_hybrid.core.tiers.rates import Speeds, Tier
from sglang_hybrid.core.victims.eviction import Policy
from sglang_hybrid.core.victims.pool import Pool, Scarce, VictimComparison

LOOKED_AT: Final = 64
"""Victims that a copy is compared with at most."""


class SpeedsInForce(Protocol):
    """Where the speeds to decide with are read. `speeds` is another object after a change."""

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
        keeps is freed after the leaf, and counts with it.
        """
        self._describe()
        gone: set[Node] = set()
        for node in self._stateless.nodes:
            needed -= self._gives_back(node, gone)
            if needed <= 0:
                return []
        table, found = self._candidates, list[Node]()
        if needed <= 0 or not len(table):
            return found
        for row in np.argsort(self.policy.scores(table, self.clock), kind="stable").tolist():
            found.append(table.nodes[row])
            needed -= self._gives_back(found[-1], gone)
            if needed <= 0:
                break
        return found

    def _gives_back(self, node: Node, gone: set[Node]) -> int:
        """Bytes of what is scarce that evicting `node` frees, once the KV of all nodes in `gone`
        has been evicted. Nodes whose KV is freed with it are added to `gone`.
        """
        unit, freed = self.unit(node), self._weigh(node)[0]
        if self.scarce is Scarce.STATES or unit is None or not unit.kv or node in gone:
            return freed
        gone.add(node)
        above = node.parent
        while above is not None and self._only_leads_to(above, gone):
            gone.add(above)
            freed += self._bytes_of(above.tokens, 0)
            above = above.parent
        return freed

    def _only_leads_to(self, node: Node, gone: set[Node]) -> bool:
        """Whether this tier keeps the KV of `node` only for nodes in `gone`."""
        copies = copies_of(node)
        if node.parent is None or node.has_state or node.kv_locked or copies.is_pinned(self.tier):
            return False
        kept = (child for child in node.children.values() if copies_of(child).has_kv(self.tier))
        return all(child in gone for child in kept)

    def unit(self, node: Node) -> Unit | None:
        """What evicting `node` would free in this tier now; None if nothing."""
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
        """Whether a copy of all of `node` is worth more than each of the first victims that
        together free `needed` bytes. LOOKED_AT victims are compared at most. False if all victims
        together free less: what would have to be evicted after them is worth more. True where the
        victims have no score.
        """
        self._describe()
        scored = None
        if not len(self._stateless) and len(self._candidates):
            scored = self._scored(node)
        if scored is None:
            return True
        new, scores, nodes = scored
        for row in np.argsort(scores, kind="stable")[:LOOKED_AT].tolist():
            if new <= float(scores[row]):
                return False
            needed -= self._weigh(nodes[row])[0]
            if needed <= 0:
                return True
        return len(nodes) > LOOKED_AT

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
