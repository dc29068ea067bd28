"""What is copied to the host at all: nothing that is worth less than its writing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_hybrid.core.places import copies_of, write_pays
from sglang_hybrid.core.rates import Tier

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_hybrid.cache.tiered_shadow_tree import TieredShadowTree
    from sglang_hybrid.core.nodes import Node
    from sglang_hybrid.telemetry.tiers import TierStats

LEAST_RETURNS = 0.05
"""Returns that a copy is expected to serve at least: one that is not made is not seen to serve."""


class WriteJudge:
    """Says for one cache what is worth a copy on the host.

    How many returns a copy will serve is estimated by how many those have served that were left
    when the device gave up its own.
    """

    def __init__(self, shadow_tree: TieredShadowTree, stats: TierStats) -> None:
        self._shadow_tree = shadow_tree
        self._stats = stats

    @property
    def returns(self) -> float:
        """Requests that resumed from the host for each copy that was left alone there, with one of
        either before the first.
        """
        served = (self._stats.loaded_requests + 1) / (self._stats.demoted + 1)
        return max(LEAST_RETURNS, served)

    def worth(self, node: UnifiedTreeNode) -> bool:
        """Whether `node`, and what it needs above it, should be copied.

        Where nothing can be resumed from `node`, its KV is copied only with something below. What
        the host continues from `node` already is worth nothing without its KV.
        """
        if any(child.backuped for child in node.children.values()):
            return True
        stateless = node.component_data[ComponentType.MAMBA].value is None
        if self._shadow_tree.has_states and stateless:
            return False
        return self._pays(self._shadow_tree.record(node))

    def _pays(self, record: Node) -> bool:
        cost, speeds = self._shadow_tree.cost, self._shadow_tree.speeds.speeds
        span = record.depth - record.anchor_depth
        loaded = span * cost.kv_bytes_per_token + cost.state_bytes
        saves = speeds.compute(cost.savings(record.depth, record.anchor_depth))
        saves -= speeds.loads[Tier.HOST].seconds(loaded)
        return write_pays(self._missing(record), saves, self.returns, Tier.HOST, speeds)

    def _missing(self, record: Node) -> int:
        """Bytes that the host has not, of the path to `record` and of its state."""
        cost, tokens = self._shadow_tree.cost, 0
        state = 0 if copies_of(record).has_state(Tier.HOST) else cost.state_bytes
        above: Node | None = record
        while above is not None and above.parent is not None:
            if copies_of(above).has_kv(Tier.HOST):
                break
            tokens += above.tokens
            above = above.parent
        return tokens * cost.kv_bytes_per_token + state
