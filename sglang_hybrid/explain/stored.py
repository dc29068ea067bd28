"""The stored part of a prompt, read without a change of the tree."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_hybrid.explain.decision_log import DecisionLog
from sglang_hybrid.explain.miss_report import BelowDevice
from sglang_hybrid.explain.recent import ResumedFrom
from sglang_hybrid.serving.tenants import Tenant

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_hybrid.cache.radix_cache import HybridRadixCache


class StoredPath(NamedTuple):
    """The stored part of a key. nodes: those that the key covers to their end, each with its depth.
    part: the node within whose edge the key ends or leaves the tree. kv: tokens with KV on the
    device or in host memory.
    """

    nodes: list[tuple[int, UnifiedTreeNode]]
    part: UnifiedTreeNode | None
    kv: int


def stored_path(cache: HybridRadixCache, key: RadixKey) -> StoredPath:
    """The stored path of `key`, found as by SGLang's own walk (unified_tree_core.py:906-955), which
    also cuts the edge that `key` covers in part.
    """
    tree, page = cache.tree_core, cache.page_size
    node, depth = tree.root_node, 0
    nodes: list[tuple[int, UnifiedTreeNode]] = []
    while depth + page <= len(key):
        child = node.children.get(key.child_key_at(depth, page))
        if child is None or (child.evicted and not child.backuped):
            break
        same = child.key.match_at(key, depth, page_size=page)
        depth += same
        if same < len(child.key):
            return StoredPath(nodes, child, depth)
        nodes.append((depth, child))
        node = child
    return StoredPath(nodes, None, depth)


def prefix_key(cache: HybridRadixCache, tokens: array[int], whose: Tenant, limit: int) -> RadixKey:
    """The key of the first `limit` tokens, at most, of a tenant's prompt."""
    extra_key, salt = whose or (None, None)
    is_bigram = cache.tree_core.is_eagle
    return RadixKey(tokens, extra_key, is_bigram=is_bigram, limit=limit, cache_salt=salt)


class StoredPrefixes:
    """Look-ups of one tenant's prompts in the tree."""

    def __init__(self, cache: HybridRadixCache, decision_log: DecisionLog, whose: Tenant) -> None:
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
        """Nodes that the usable prompt covers to their end, with their depths, and the tokens whose
        KV is stored, part of an edge included.
        """
        key = prefix_key(self._cache, prompt, self._tenant, usable)
        found = stored_path(self._cache, key)
        return found.nodes, found.kv

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

    def resume(
        self, path: Sequence[tuple[int, UnifiedTreeNode]], kv: int, prompt_len: int
    ) -> tuple[BelowDevice | None, ResumedFrom | None, int]:
        """The copies to load to resume deepest on a path with `kv` tokens, the state that a request
        resumes from, and the tokens that it skips.
        """
        below, used = self.below(path, prompt_len), self.deepest(path)
        if below is not None:  # what is loaded, or what is faster to compute from
            used = self.deepest([step for step in path if step[0] <= below.resumes_at])
        if self._cache.is_mamba_enabled:
            return below, used, used.position if used else 0
        return below, used, kv if below is None else below.resumes_at
