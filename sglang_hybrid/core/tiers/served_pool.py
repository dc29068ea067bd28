"""The candidates of one tier of a running server: `core`'s, with what only a server knows."""

from __future__ import annotations

from typing import Final

import numpy as np

from sglang_hybrid.core.records.nodes import Node
from sglang_hybrid.core.tiers.places import Unit, copies_of
from sglang_hybrid.core.tiers.rates import Tier
from sglang_hybrid.core.tiers.tier_pool import TierPool

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
            others = copies_of(node).state & self.counted & ~(1 << self.tier)
            self.leaves(node, lost=not others and self.demotes_to is None)
        return node

    def outranks_pushed_out(self, node: Node, needed: int) -> bool:
        """Whether a copy of all of `node` is worth more than the dearest of the first victims that
        give back `needed` bytes together, as far as LOOKED_AT of them do; not if all there are do
        not: what is above them is dearer. True where what goes has no score.
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
