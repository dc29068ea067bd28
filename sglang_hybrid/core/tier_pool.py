"""The candidates of one tier: what it holds, ordered by what a copy there is worth."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sglang_hybrid.core.cost import CostModel
from sglang_hybrid.core.eviction import Policy
from sglang_hybrid.core.nodes import Clock, Node
from sglang_hybrid.core.places import Unit, copies_of, unit_of
from sglang_hybrid.core.pool import Pool, Scarce, VictimComparison
from sglang_hybrid.core.rates import Speeds, Tier


class TierPool(Pool):
    """A pool of the copies in one tier. A victim gives up its unit (`places.unit_of`): the cache
    writes it to the tier below or not, and drops it here.

    What a policy takes for the FLOPs that a node saves are those that could be computed in the
    seconds that the unit saves, so that its scores are those of a cache without tiers where
    nothing but computing is the next best way.

    tier: whose copies these are. demotes_to: the tier that victims are written to, None if they
    are lost.
    """

    def __init__(
        self,
        tier: Tier,
        scarce: Scarce,
        cost: CostModel,
        policy: Policy,
        clock: Clock,
        speeds: Speeds,
        demotes_to: Tier | None = None,
    ) -> None:
        super().__init__(scarce, cost, policy, clock)
        self.tier = tier
        self.speeds = speeds
        self.demotes_to = demotes_to

    def use(self, speeds: Speeds, nodes: Iterable[Node]) -> None:
        """Measured speeds changed: all `nodes` there are get new values in the next choices."""
        self.speeds = speeds
        for node in nodes:
            self.mark_dirty(node)

    def unit(self, node: Node) -> Unit | None:
        """What evicting `node` takes from this tier now."""
        if node.copies is None:
            return None
        return unit_of(node, self.tier, self.cost, self.speeds, self.demotes_to)

    def victim(self, *, last_resort: bool = False) -> Node | None:
        """Choose the node whose unit goes now; None if nothing may go. The caller says by `leaves`
        what becomes of it.
        """
        choice = self.cheapest(last_resort=last_resort)
        if choice is None:
            return None
        self.last_score = choice[1]
        return choice[0]

    def leaves(self, node: Node, *, lost: bool) -> None:
        """The last victim, `node`, is about to leave this tier. lost: its state is in no other."""
        if self._is_stateless(node):
            return
        tell = self.policy.evicted if lost else self.policy.demoted
        tell(node, self.last_score)

    def compare_copy(self, node: Node) -> VictimComparison | None:
        """The score that a copy of all of `node` would have in this tier, where it may have none or
        a part, beside the cheapest victim's; None if no victim has a score.
        """
        self._describe()
        table = self._candidates
        if len(self._stateless) or not len(table):
            return None
        copies = copies_of(node)
        before = copies.kv, copies.state, copies.pinned
        copies.pinned = 0
        copies.kv |= 1 << self.tier
        copies.state |= (1 << self.tier) * node.has_state
        saved, freed = self._appraise(node)
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

    def _appraise(self, node: Node) -> tuple[float, int]:
        unit = self.unit(node)
        if unit is None:
            return 0.0, 0
        freed = unit.freed
        if self.scarce is Scarce.STATES:
            freed = unit.state * self.cost.state_bytes
        elif self.scarce is Scarce.KV:
            freed = unit.kv * node.tokens * self.cost.kv_bytes_per_token
        return unit.saves * self.speeds.prefill, freed

    def _is_stateless(self, node: Node) -> bool:
        """Whether nothing is resumed at `node` or below it."""
        return not node.has_state and not node.children and self.policy.stateless_first
