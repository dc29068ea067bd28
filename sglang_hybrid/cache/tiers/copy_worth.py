"""Judges what is copied to the host: nothing that is worth less than its writing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_hybrid.cache.tiers.inexact import stays_on_device
from sglang_hybrid.core.tiers.writes import AverageReturns, CopyJudge, mark_refused
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
            AverageReturns(lambda: (stats.loaded_requests, stats.demoted)).now,
        )

    def accepts(self, node: UnifiedTreeNode) -> bool:
        """True if `node` should be copied now, with the KV that it needs above it. If it is not
        worth it, or must not be copied, it is judged again only after its next use.
        """
        record = self._shadow_tree.record(node)
        if stays_on_device(node):
            mark_refused(record)
            return False
        if not self._judge.can_judge(record, node.hit_count, self._least_uses()):
            return False
        if self._judge.accepts(record):
            return True
        self._stats.not_written += 1
        return False

    def is_resume_worth(self, node: UnifiedTreeNode) -> bool:
        """True if the state of `node` should be copied, and the path to it that the host lacks."""
        return self._judge.is_resume_worth(self._shadow_tree.record(node))
