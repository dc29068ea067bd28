"""Marks of the nodes that come from smaller copies (`--hybrid-tier-codec`,
`--hybrid-device-codec`), and of those that must not.

A node is marked when a copy that is not exact is loaded or decoded into it. A hit is exact if no
node on its path is marked: what was computed behind a marked node read the node's KV or state, so
it is as inexact, and needs no mark of its own. A mark stays for as long as the node does, so some
hits are called inexact that are not: those on states that were there before the node was loaded
again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_hybrid.serving.stored_keys import is_exact_part
from sglang_hybrid.storage.codecs.in_use import host_codecs

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.cache_action import BackupKV
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode


class MarkedTreeCore(UnifiedTreeCore):
    """SGLang's tree core with marks. `inexact`: ids of marked nodes."""

    inexact: set[int]

    def reset(self) -> None:
        super().reset()
        self.inexact = set()

    def is_exact(self, node: UnifiedTreeNode) -> bool:
        """True if nothing on the path to `node` comes from a copy that is not exact."""
        while node is not self.root_node and node.id not in self.inexact:
            node = node.parent
        return node is self.root_node

    def commit_load_back(
        self, node_id: int, device_indices: Any, kv_xfer: Any, comp_xfers: dict[Any, list[Any]]
    ) -> Any:
        actions = super().commit_load_back(node_id, device_indices, kv_xfer, comp_xfers)
        if host_codecs() is not None:
            self.inexact.add(node_id)
            for transfer in (kv_xfer, *(one for each in comp_xfers.values() for one in each)):
                self.inexact.update(transfer.nodes_to_load or ())
        return actions

    def _split_node(
        self, key: Any, child: UnifiedTreeNode, split_len: int
    ) -> tuple[UnifiedTreeNode, Any]:
        head, action = super()._split_node(key, child, split_len)
        if child.id in self.inexact:
            self.inexact.add(head.id)
        return head, action

    def _remove_leaf_from_parent(self, node: UnifiedTreeNode) -> None:
        super()._remove_leaf_from_parent(node)
        self.inexact.discard(node.id)


def stays_on_device(node: UnifiedTreeNode) -> bool:
    """True if copies of `node` would not be exact, and it must be."""
    return host_codecs() is not None and is_exact_part(node.key.extra_key)


class ExactPartsCache(UnifiedRadixCache):
    """SGLang's cache, which copies nothing down of requests that ask for exactness."""

    def _execute_and_commit_kv_backup(self, action: BackupKV, write_back: bool = False) -> int:
        """Returns 0 for nodes that stay on the device, as SGLang does if the host has no room."""
        if any(stays_on_device(self.tree_core.node_by_id(each)) for each in action.node_ids):
            return 0
        written: int = super()._execute_and_commit_kv_backup(action, write_back)
        return written
