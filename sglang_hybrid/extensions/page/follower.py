"""The changes of a tree of records since a reader asked last, in slices of bounded time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.records.node_tree import NodeTree
from sglang_hybrid.core.records.nodes import Node
from sglang_hybrid.core.tiers.places import tiers_of
from sglang_hybrid.core.victims.eviction import Policy
from sglang_hybrid.serving.tenants import TenantNames, tenant

Row = tuple[int, int, int, str, str, int, float, float | None, int, int, str | None]
"""A node: the ids that SGLang gives it and its parent (-1 of the root), tokens of its edge, kind of
its state ("" of none), what it is held by (letters: k KV, s state, p pin, w waiting requests),
hits, seconds of its last use on the cache's clock, expected FLOPs that a byte of it saves (None:
told later), the fastest tier of its KV and of its state (-1 of none), and its tenant's name (None:
its parent's).
"""

NODES = 16
"""Nodes between two looks at the clock."""

AGAIN = 16
"""Nodes without a change that an answer tells again, since their values change with time."""


@dataclass(frozen=True)
class NodeRows:
    """Makes rows of nodes. policy: says how likely a node is used again."""

    cost: CostModel
    policy: Callable[[], Policy]
    names: TenantNames

    def row(self, node: Node, tree: NodeTree, *, valued: bool) -> Row:
        """valued: with its value, which takes twice as long as the rest."""
        parent, payload = node.parent, node.payload
        held = "k" * node.kv_locked + "s" * node.state_locked
        held += "p" * (node.pin is not None) + "w" * (node.demand > 0)
        name = None
        if parent is tree.root:
            key = payload.key
            name = self.names.name(tenant(key.extra_key, key.cache_salt))
        return (
            *(payload.id, -1 if parent is None else parent.payload.id, node.tokens),
            node.kind.value if node.has_state else "",
            held,
            *(node.hits, node.stamp, self.value(node, tree) if valued else None),
            *(*row_tiers(node), name),
        )

    def value(self, node: Node, tree: NodeTree) -> float:
        """FLOPs that a byte of `node` is expected to save: those of a hit over one at the state
        above, times the probability that there is one, over the bytes of state and edge.
        """
        if not node.has_state or node is tree.root:
            return 0.0
        saved = self.cost.savings(node.depth, node.anchor_depth)
        likely = self.policy().return_probability(node, tree.clock)
        return saved * (1.0 if likely is None else likely) / max(1, self.size(node))

    def size(self, node: Node) -> int:
        """Bytes of a node's KV and state."""
        return node.tokens * self.cost.kv_bytes_per_token + self.cost.state_bytes * node.has_state


def row_tiers(node: Node) -> tuple[int, int]:
    """The fastest tiers of a node's KV and of its state, as a row has them: -1 of none."""
    kv, state = tiers_of(node)
    return -1 if kv is None else int(kv), -1 if state is None else int(state)


@dataclass
class Changes:
    """Rows of nodes, ids of those that are gone, and whether there is more to tell."""

    nodes: list[Row] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    more: bool = False


class TreeFollower:
    """One reader of a tree. It listens to the tree (`NodeTree.listen`) and reads it only: no
    decision of the cache depends on it.
    """

    def __init__(self, tree: NodeTree, rows: NodeRows) -> None:
        self.tree = tree
        self.settle: Callable[[], None] = lambda: None
        self._rows = rows
        self._changed: dict[Node, None] = {}
        self._gone: list[int] = []
        self._round = self._walk()
        self._told_all = False
        tree.listen(self, from_now=True)

    def leave(self) -> None:
        """Listen no more."""
        self.tree.unlisten(self)

    @property
    def waiting(self) -> int:
        """Changes that are not told yet."""
        return len(self._changed) + len(self._gone)

    # Called by the tree

    def mark_dirty(self, node: Node) -> None:
        self._changed[node] = None

    def forget(self, node: Node) -> None:
        self._changed.pop(node, None)
        self._gone.append(node.payload.id)

    # Called by the reader

    def changes(self, seconds: float, *, valued: bool) -> Changes:
        """The changes, as far as they are told within `seconds`; at first every node there is, with
        its value if `valued`.
        """
        until = time.perf_counter() + seconds
        told = Changes(gone=self._gone)
        self._gone = []
        valued = valued or self._told_all
        for number, node in enumerate(chain(self._take_changed(), self._take_round())):
            told.nodes.append(self._rows.row(node, self.tree, valued=valued))
            if number % NODES == NODES - 1 and time.perf_counter() > until:
                break
        told.more = bool(self._changed) or not self._told_all
        return told

    def _take_changed(self) -> Iterator[Node]:
        while self._changed:
            node, _ = self._changed.popitem()
            yield node

    def _take_round(self) -> Iterator[Node]:
        """The next nodes of this round over the tree; after the first one only a few."""
        left = AGAIN if self._told_all else -1
        for node in self._round:
            yield node
            left -= 1
            if left == 0:
                return
        self._told_all = True
        self._round = self._walk()

    def _walk(self) -> Iterator[Node]:
        """Every node, while the tree may change between two of them: what is added meanwhile has
        changed, and is told for that.
        """
        stack = [self.tree.root]
        while stack:
            node = stack.pop()
            if node.parent is not None or node is self.tree.root:
                yield node
                stack.extend(node.children.values())
