"""What is copied to the host at all: nothing that is worth less than its writing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_hybrid.core.tiers.writes import CopyJudge, average_returns, refuse, was_refused
from sglang_hybrid.core.victims.pool import Scarce

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_hybrid.cache.records.tiered_shadow_tree import TieredShadowTree
    from sglang_hybrid.serving.telemetry.tiers import TierStats

KINDS = {Scarce.KV: ComponentType.FULL, Scarce.STATES: ComponentType.MAMBA}


class WriteJudge:
    """`core.tiers.writes.CopyJudge` for the nodes of SGLang's tree.

    Args:
        shadow_tree: the records of the cache's nodes; stats: its counts.
        room: free tokens or states of the host's pool of a kind.
        least_uses: requests that must have passed a node.
    """

    def __init__(
        self,
        shadow_tree: TieredShadowTree,
        stats: TierStats,
        room: Callable[[ComponentType], int],
        least_uses: Callable[[], int],
    ) -> None:
        self._shadow_tree = shadow_tree
        self._stats = stats
        self._least_uses = least_uses
        self._judge = CopyJudge(
            shadow_tree,
            lambda kind: room(KINDS[kind]),
            lambda: average_returns(stats.loaded_requests, stats.demoted),
        )

    def takes(self, node: UnifiedTreeNode) -> bool:
        """Whether `node` should be copied now. If it is not worth it, it is judged again only after
        its next use.
        """
        record = self._shadow_tree.record(node)
        seldom = not node.backuped and node.hit_count < self._least_uses()
        if seldom or was_refused(record):
            return False
        if self._worth(node):
            return True
        refuse(record)
        self._stats.not_written += 1
        return False

    def _worth(self, node: UnifiedTreeNode) -> bool:
        """Whether `node`, and the KV that it needs above it, should be copied.

        Where nothing can be resumed from `node`, its KV is copied only with something below. What
        the host continues from `node` already is worth nothing without its KV.
        """
        if not node.backuped and any(child.backuped for child in node.children.values()):
            return True  # what the host has below it would be lost
        stateless = node.component_data[ComponentType.MAMBA].value is None
        if self._shadow_tree.has_states and stateless:
            return False
        return self.worth_resuming(node)

    def worth_resuming(self, node: UnifiedTreeNode) -> bool:
        """Whether the state of `node` should be copied, and the path to it that the host lacks."""
        return self._judge.worth_resuming(self._shadow_tree.record(node))
