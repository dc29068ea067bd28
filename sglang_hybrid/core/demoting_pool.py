"""Candidates of one tier whose victims may be written to the next one."""

from __future__ import annotations

import numpy as np

from sglang_hybrid.core.cost import CostModel
from sglang_hybrid.core.eviction import Policy
from sglang_hybrid.core.nodes import Clock, Node
from sglang_hybrid.core.places import Unit, copies_of, unit_of
from sglang_hybrid.core.pool import Scarce, VictimComparison
from sglang_hybrid.core.rates import Tier
from sglang_hybrid.core.tier_pool import SpeedsInForce, TierPool


class DemotingPool(TierPool):
    """A victim gives up its unit (`places.unit_of`): the cache writes that to the tier below or
    not, says which by `leaves`, and drops it here.

    demotes_to: the tier that victims are written to, None if they are lost.
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
    ) -> None:
        super().__init__(tier, scarce, cost, policy, clock, speeds)
        self.demotes_to = demotes_to

    def unit(self, node: Node) -> Unit | None:
        """What evicting `node` takes from this tier now."""
        if node.copies is None:
            return None
        return unit_of(node, self.tier, self.cost, self._speeds, self.demotes_to)

    def frees(self, node: Node) -> tuple[bool, bool]:
        unit = self.unit(node)
        return (False, False) if unit is None else (unit.kv, unit.state)

    def leaves(self, node: Node, *, lost: bool) -> None:
        """The last victim, `node`, is about to leave this tier. lost: its state is in no other."""
        if self._has_demand(node):
            tell = self.policy.evicted if lost else self.policy.demoted
            tell(node, self.last_score)

    def compare_copy(self, node: Node) -> VictimComparison | None:
        """The score that a copy of all of `node` would have in this tier, where it may have none or
        a part, beside the cheapest victim's; None if no victim has a score.
        """
        self._describe()
        if len(self._stateless) or not len(self._candidates):
            return None
        return self._compared(node)

    def score_of_copy(self, node: Node) -> float:
        """The score that a copy of all of `node` would have in this tier; 0 where none can be."""
        self._describe()
        comparison = self._compared(node)
        return 0.0 if comparison is None else comparison.new

    def _compared(self, node: Node) -> VictimComparison | None:
        """`compare_copy` beside what has a score; None if there can be no copy."""
        table = self._candidates
        copies = copies_of(node)
        before = copies.kv, copies.state, copies.pinned
        copies.pinned = 0
        copies.kv |= 1 << self.tier
        copies.state |= (1 << self.tier) * node.has_state
        freed, saved = self._weigh(node)
        copies.kv, copies.state, copies.pinned = before
        if not freed:
            return None
        known = self._home.get(node) is table
        table.put(node, self.policy.describe(node, saved, freed))
        scores = self.policy.scores(table, self.clock).copy()
        row = table.row(node)
        new, scores[row] = float(scores[row]), np.inf
        comparison = VictimComparison(new, float(scores.min()))
        if known:
            self.mark_dirty(node)
        else:
            table.discard(node)
        return comparison

    def _weigh(self, node: Node) -> tuple[int, int]:
        unit = self.unit(node)
        if unit is None:
            return 0, 0
        freed = unit.freed
        if self.scarce is Scarce.STATES:
            freed = unit.state * self.cost.state_bytes
        elif self.scarce is Scarce.KV:
            freed = unit.kv * node.tokens * self.cost.kv_bytes_per_token
        return freed, int(unit.saves * self._speeds.prefill)

    def _tell_policy(self, node: Node, score: float) -> None:
        """`leaves` does, when it is known whether the victim is written down."""
