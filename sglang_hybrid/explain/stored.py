"""What the tree holds of a prompt, read without a change of the tree."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_hybrid.explain.cache_view import ExplainedCache
from sglang_hybrid.explain.decision_log import DecisionLog
from sglang_hybrid.explain.miss_report import BelowDevice
from sglang_hybrid.explain.recent import ResumedFrom
from sglang_hybrid.serving.tenants import Tenant

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode


class StoredPrefixes:
    """What one tenant's prompts find in the tree."""

    def __init__(self, cache: ExplainedCache, decision_log: DecisionLog, whose: Tenant) -> None:
        self._cache = cache
        self._decision_log = decision_log
        self._tenant = whose

    def usable(self, length: int) -> int:
        """Tokens of a prompt that can be hit."""
        page = int(self._cache.page_size)
        return max(0, length - 1) // page * page

    def walk(
        self, prompt: array[int], usable: int
    ) -> tuple[list[tuple[int, UnifiedTreeNode]], int]:
        """Nodes that the prompt covers to their end, with their depths, and how far KV is stored,
        part of an edge included. As SGLang's own walk (unified_tree_core.py:906-955), which cuts
        that edge.
        """
        tree, page = self._cache.tree_core, self._cache.page_size
        extra_key, cache_salt = self._tenant or (None, None)
        key = RadixKey(
            prompt, extra_key, is_bigram=tree.is_eagle, limit=usable, cache_salt=cache_salt
        )
        node, depth = tree.root_node, 0
        path: list[tuple[int, UnifiedTreeNode]] = []
        while depth + page <= len(key):
            child = node.children.get(key.child_key_at(depth, page))
            if child is None or (child.evicted and not child.backuped):
                break
            same = child.key.match_at(key, depth, page_size=page)
            depth += same
            if same < len(child.key):
                break
            path.append((depth, child))
            node = child
        return path, depth

    def deepest(self, path: Sequence[tuple[int, UnifiedTreeNode]]) -> ResumedFrom | None:
        """The deepest state on a path."""
        if not self._cache.is_mamba_enabled:
            return None
        for depth, node in reversed(path):
            state = node.component_data[ComponentType.MAMBA]
            if state.value is not None or state.host_value is not None:
                return self._decision_log.checkpoint_of(node, depth)
        return None

    def below(
        self, path: Sequence[tuple[int, UnifiedTreeNode]], prompt_len: int
    ) -> BelowDevice | None:
        """The deepest point on a path that a request can resume from, if it must load for that."""
        ways = self._cache.ways
        if ways is None or not path:
            return None
        chosen, deepest, resident = ways.of_node(path[-1][1], prompt_len)
        if not any(deepest.load_bytes) or deepest.state_tier is None:
            return None
        host = sum(len(n.key) for depth, n in path if n.evicted and depth <= deepest.depth)
        return BelowDevice(
            deepest.depth,
            deepest.state_tier.name.lower(),
            host,
            deepest.load_seconds,
            resident.compute_seconds - deepest.compute_seconds,
            chosen.depth,
        )

    def hit(self, used: ResumedFrom | None, kv: int) -> int:
        """Tokens that a hit on this state skips, or on so much KV where nothing else is needed."""
        if not self._cache.is_mamba_enabled:
            return kv
        return used.position if used else 0
