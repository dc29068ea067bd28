"""The candidates of one tier of a running server: `core`'s, with what only a server knows."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from sglang_hybrid.core.cost import CostModel
from sglang_hybrid.core.eviction import Policy
from sglang_hybrid.core.nodes import Clock, Node
from sglang_hybrid.core.places import Unit, copies_of
from sglang_hybrid.core.pool import Scarce
from sglang_hybrid.core.rates import Speeds, Tier
from sglang_hybrid.core.tier_pool import TierPool


class SpeedsInForce(Protocol):
    """What tells the speeds to decide with; another object once they changed."""

    speeds: Speeds


class ServedTierPool(TierPool):
    """A `TierPool` that follows the speeds in force, and whose victims are on their way at once.

    What a request waits for stays on the host, though the device does not have it yet.
    """

    def __init__(
        self,
        tier: Tier,
        scarce: Scarce,
        cost: CostModel,
        policy: Policy,
        clock: Clock,
        in_force: SpeedsInForce,
    ) -> None:
        super().__init__(tier, scarce, cost, policy, clock, in_force.speeds)
        self._in_force = in_force

    def unit(self, node: Node) -> Unit | None:
        waits = node.kv_locked and not copies_of(node).has_kv(Tier.DEVICE)
        if waits and self.tier is not Tier.DEVICE:
            return None
        return super().unit(node)

    def cheapest(self, *, last_resort: bool = False) -> tuple[Node, float] | None:
        if self.speeds is not self._in_force.speeds:
            self.use(self._in_force.speeds, list(self._home))
        return super().cheapest(last_resort=last_resort)

    def victim(self, *, last_resort: bool = False) -> Node | None:
        node = super().victim(last_resort=last_resort)
        if node is not None:
            others = copies_of(node).state & ~(1 << self.tier)
            self.leaves(node, lost=not others and self.demotes_to is None)
        return node

    def next_victims(self, most: int) -> list[Node]:
        """The candidates that would go first, at most so many; without those that serve nothing."""
        self._describe()
        table = self._candidates
        if not len(table):
            return []
        scores = self.policy.scores(table, self.clock)
        first = np.argsort(scores, kind="stable")[:most]
        return [table.nodes[row] for row in first.tolist()]
