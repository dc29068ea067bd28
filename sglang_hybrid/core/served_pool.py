"""The candidates of one tier of a running server: `core`'s, with what only a server knows."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from sglang_hybrid.core.nodes import Node
from sglang_hybrid.core.places import Unit, copies_of
from sglang_hybrid.core.rates import Tier
from sglang_hybrid.core.tier_pool import TierPool

LOOKED_AT: Final = 64
"""Victims that a copy is compared with at most."""


class ServedTierPool(TierPool):
    """A pool whose victims are on their way as soon as they are chosen.

    What a request waits for stays on the host, though the device does not have it yet.
    """

    def unit(self, node: Node) -> Unit | None:
        waits = node.kv_locked and not copies_of(node).has_kv(Tier.DEVICE)
        if waits and self.tier is not Tier.DEVICE:
            return None
        return super().unit(node)

    def victim(self, *, last_resort: bool = False) -> Node | None:
        node = super().victim(last_resort=last_resort)
        if node is not None:
            others = copies_of(node).state & ~(1 << self.tier)
            self.leaves(node, lost=not others and self.demotes_to is None)
        return node

    def dearest_pushed_out(self, needed: int) -> float:
        """The highest score among the first victims that give back `needed` bytes together, as far
        as LOOKED_AT of them do; without end if all there are do not: what is above them is dearer.
        """
        table, dearest = self._candidates, 0.0
        scores = self.policy.scores(table, self.clock)
        for row in np.argsort(scores, kind="stable")[:LOOKED_AT].tolist():
            dearest = float(scores[row])
            needed -= self._weigh(table.nodes[row])[0]
            if needed <= 0:
                return dearest
        return dearest if len(table) > LOOKED_AT else math.inf
