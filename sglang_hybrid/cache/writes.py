"""What is copied to the host at all: nothing that is worth less than its writing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_hybrid.core.places import copies_of
from sglang_hybrid.core.rates import Tier
from sglang_hybrid.core.writing import copy_saves, write_pays

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_hybrid.cache.tiered_shadow_tree import TieredShadowTree
    from sglang_hybrid.core.nodes import Node
    from sglang_hybrid.telemetry.tiers import TierStats

LEAST_RETURNS = 0.05
"""Returns that a copy is expected to serve at least: one that is not made is not seen to serve."""


class WriteJudge:
    """Says for one cache what is worth a copy on the host.

    Whether a copy will serve a return is what the reuse index says of its class and age. Policies
    without an index know only how many returns were served, on average, by the copies that were
    left when the device gave up its own.

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
    def average_returns(self) -> float:
        """Requests that resumed from the host for each copy that was left alone there, with one of
        either before the first.
        """
        served = (self._stats.loaded_requests + 1) / (self._stats.demoted + 1)
        return max(LEAST_RETURNS, served)

    def worth(self, node: UnifiedTreeNode) -> bool:
        """Whether `node`, and the KV that it needs above it, should be copied.

        Where nothing can be resumed from `node`, its KV is copied only with something below. What
        the host continues from `node` already is worth nothing without its KV.
        """
        if any(child.backuped for child in node.children.values()):
            return True  # what the host has below it would be lost
        stateless = node.component_data[ComponentType.MAMBA].value is None
        if self._shadow_tree.has_states and stateless:
            return False
        return self.worth_resuming(node)

    def worth_resuming(self, node: UnifiedTreeNode) -> bool:
        """Whether what is resumed from at `node`, its state or without states its KV, should be
        copied, with what the host lacks of the path to it.
        """
        record = self._shadow_tree.record(node)
        return self._pays(record) and self._beats_the_host(record)

    def _pays(self, record: Node) -> bool:
        tree = self._shadow_tree
        speeds = tree.speeds.speeds
        returns = tree.host_state_pool.policy.return_probability(record, tree.clock)
        if returns is None:
            returns = self.average_returns
        saves = copy_saves(record, Tier.HOST, tree.cost, speeds)
        return write_pays(self._missing(record), saves, returns, Tier.HOST, speeds)

    def _beats_the_host(self, record: Node) -> bool:
        """Whether there is room for the copy, or it is worth more than what it would push out."""
        tree = self._shadow_tree
        cost, tokens = tree.cost, self._missing_tokens(record)
        kinds = [
            (ComponentType.FULL, tree.host_kv_pool, tokens, cost.kv_bytes_per_token),
            (ComponentType.MAMBA, tree.host_state_pool, int(tree.has_states), cost.state_bytes),
        ]
        for kind, pool, needed, size in kinds:
            lacking = needed - self._room(kind) if needed else 0
            if lacking <= 0:
                continue
            comparison = pool.compare_copy(record)
            if comparison is None:  # what goes has no score
                continue
            if comparison.new <= pool.dearest_pushed_out(lacking * size):
                return False
        return True

    def _missing(self, record: Node) -> int:
        """Bytes that the host has not, of the path to `record` and of its state."""
        cost = self._shadow_tree.cost
        state = 0 if copies_of(record).has_state(Tier.HOST) else cost.state_bytes
        return self._missing_tokens(record) * cost.kv_bytes_per_token + state

    def _missing_tokens(self, record: Node) -> int:
        """Tokens of the path to `record` whose KV the host has not."""
        tokens = 0
        above: Node | None = record
        while above is not None and above.parent is not None:
            if copies_of(above).has_kv(Tier.HOST):
                break
            tokens += above.tokens
            above = above.parent
        return tokens
