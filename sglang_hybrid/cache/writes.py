"""What is copied to the host at all: nothing that is worth less than its writing."""

from __future__ import annotations

from collections.abc import Callable
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

    Args:
        shadow_tree: the records of the cache's nodes; stats: its counts.
        room: free tokens or states of the host's pool of a kind.
    """

    def __init__(
        self,
        shadow_tree: TieredShadowTree,
        stats: TierStats,
        room: Callable[[ComponentType], int],
    ) -> None:
        self._shadow_tree = shadow_tree
        self._stats = stats
        self._room = room

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
            return True  # what the host has below it would be lost
        stateless = node.component_data[ComponentType.MAMBA].value is None
        if self._shadow_tree.has_states and stateless:
            return False
        record = self._shadow_tree.record(node)
        return self._pays(record) and self._beats_the_host(record)

    def _pays(self, record: Node) -> bool:
        cost, speeds = self._shadow_tree.cost, self._shadow_tree.speeds.speeds
        span = record.depth - record.anchor_depth
        loaded = span * cost.kv_bytes_per_token + cost.state_bytes
        saves = speeds.compute(cost.savings(record.depth, record.anchor_depth))
        saves -= speeds.loads[Tier.HOST].seconds(loaded)
        return write_pays(self._missing(record), saves, self.returns, Tier.HOST, speeds)

    def _beats_the_host(self, record: Node) -> bool:
        """Whether there is room for the copy, or it is worth more than what it would push out."""
        tree = self._shadow_tree
        kinds = [(ComponentType.FULL, tree.host_kv_pool, record.tokens)]
        if tree.has_states:
            kinds.append((ComponentType.MAMBA, tree.host_state_pool, 1))
        for kind, pool, needed in kinds:
            if self._room(kind) >= needed:
                continue
            comparison = pool.compare_copy(record)
            if comparison is not None and not comparison.beats_victim:
                return False
        return True

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
