"""The candidates of one tier of a running server: `core`'s, with what only a server knows."""

from __future__ import annotations

from sglang_hybrid.core.demoting_pool import DemotingPool
from sglang_hybrid.core.nodes import Node
from sglang_hybrid.core.places import Unit, copies_of
from sglang_hybrid.core.rates import Tier


class ServedTierPool(DemotingPool):
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
