"""Candidates of one tier: what it forgets first, by what a copy saves over the next best way."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from sglang_hybrid.core.cost import CostModel
from sglang_hybrid.core.eviction import Policy
from sglang_hybrid.core.nodes import Clock, Node
from sglang_hybrid.core.places import copies_of, seconds_saved
from sglang_hybrid.core.pool import Pool, Scarce
from sglang_hybrid.core.rates import Speeds, Tier


class SpeedsInForce(Protocol):
    """What tells the speeds to decide with; another object once they changed."""

    speeds: Speeds


class TierPool(Pool):
    """A pool whose candidates are copies in `tier`. Savings are those of `places.seconds_saved`, in
    FLOPs of the prefill that takes as long, so that they compare with what a new state would save.

    A copy that saves nothing, since computing is as fast as the way that it belongs to, goes first.
    """

    def __init__(
        self,
        tier: Tier,
        scarce: Scarce,
        cost: CostModel,
        policy: Policy,
        clock: Clock,
        speeds: SpeedsInForce,
    ) -> None:
        super().__init__(scarce, cost, policy, clock)
        self.tier = tier
        self._in_force = speeds
        self._speeds = speeds.speeds  # with which the tables were filled

    def cheapest(self, *, last_resort: bool = False) -> tuple[Node, float] | None:
        if self._speeds is not self._in_force.speeds:
            self._speeds = self._in_force.speeds
            for node in list(self._home):
                self.mark_dirty(node)
        return super().cheapest(last_resort=last_resort)

    def next_victims(self, most: int) -> list[Node]:
        """The candidates that would go first, at most so many; without those that save nothing."""
        self._describe()
        table = self._candidates
        if not len(table):
            return []
        scores = self.policy.scores(table, self.clock)
        first = np.argsort(scores, kind="stable")[:most]
        return [table.nodes[row] for row in first.tolist()]

    def frees(self, node: Node) -> tuple[bool, bool]:
        """Whether evicting `node` frees its KV in the tier, and its state.

        KV goes from below: no child may have KV in the tier. Below the device, the last copy of
        what other nodes continue stays. On the device that one may go: whatever is below has been
        written to the host, and so will this be. What a request or a transfer uses stays.
        """
        copies, tier = copies_of(node), self.tier
        if node.parent is None or copies.is_pinned(tier):
            return False, False
        on_device = tier is Tier.DEVICE
        kv = copies.has_kv(tier) and not copies.kv_children[tier]
        if on_device:
            kv = kv and not (node.kv_locked or node.state_locked)
        elif node.kv_locked and not copies.has_kv(Tier.DEVICE):  # a request waits for its load
            return False, False
        else:
            kv = kv and (copies.kv != 1 << tier or not node.children)
        return kv, copies.has_state(tier) and not (on_device and node.state_locked)

    def _weigh(self, node: Node) -> tuple[int, int]:
        kv, state = self.frees(node)
        freed_kv = kv * node.tokens * self.cost.kv_bytes_per_token
        freed_state = state * self.cost.state_bytes
        freed = {
            Scarce.SHARED: freed_kv + freed_state,
            Scarce.KV: freed_kv,
            Scarce.STATES: freed_state,
        }[self.scarce]
        if not freed:
            return 0, 0
        saves = seconds_saved(node, self.tier, self.cost, self._speeds, kv=kv, state=state)
        return freed, int(saves * self._speeds.prefill)

    def _is_worthless(self, node: Node, saved: int) -> bool:
        return saved <= 0

    def _tell_policy(self, node: Node, score: float) -> None:
        """A state of which another tier has a copy is still resumed from."""
        if copies_of(node).state & ~(1 << self.tier) == 0:
            super()._tell_policy(node, score)
