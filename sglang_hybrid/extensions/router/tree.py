"""A radix tree of token blocks whose nodes say which replicas hold them, and in which tier.

The holders of a block are an int with TIER_COUNT bits for each replica: one for each tier, set if
the replica holds it in this tier or in a faster one. So `kv & state` says for every replica at once
from which tier a resume that needs both is loaded.

    tier of the copy    bit of the device    bit of the host    bit of the disk
    DEVICE                      1                   1                  1
    HOST                        0                   1                  1
    DISK                        0                   0                  1
    no copy                     0                   0                  0
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sglang_hybrid.core.records.edges import common_bytes
from sglang_hybrid.core.tiers.rates import TIERS, Tier

TIER_COUNT: Final = len(TIERS)
ALL_TIERS: Final = (1 << TIER_COUNT) - 1
AT_LEAST_AS_FAST: Final = tuple(ALL_TIERS >> tier << tier for tier in TIERS)
"""The bits of a copy in each tier."""


class ReplicaNode:
    """Some blocks of tokens, and who holds them.

    edge: their tokens as int32, so that two edges are compared as memory. children: by their first
    block. kv: who holds the KV of all these blocks. state: who holds the state at the end of the
    last one. inner: who holds the states at the ends of all the others.
    """

    __slots__ = ("children", "edge", "inner", "kv", "parent", "state")

    def __init__(self, parent: ReplicaNode | None, edge: bytes) -> None:
        self.parent = parent
        self.edge = edge
        self.children: dict[bytes, ReplicaNode] = {}
        self.kv = self.state = self.inner = 0

    def put_kv(self, replica: int, tier: Tier) -> None:
        """Replica number `replica` holds the KV of these blocks in `tier` only."""
        self.kv = _put(self.kv, replica, tier)

    def put_states(self, replica: int, tier: Tier) -> None:
        """Replica number `replica` holds a state at the end of each block, in `tier` only."""
        self.state = _put(self.state, replica, tier)
        self.inner = _put(self.inner, replica, tier)

    def remove_states(self, replica: int) -> None:
        others = ~bits_of(replica)
        self.state &= others
        self.inner &= others

    def remove(self, replica: int) -> None:
        """Note that replica number `replica` holds nothing of these blocks any more."""
        self.kv &= ~bits_of(replica)
        self.remove_states(replica)

    def is_held_by(self, replica: int) -> bool:
        return bool((self.kv | self.state) & bits_of(replica))


def bits_of(replica: int) -> int:
    """All bits of replica number `replica`, 0 being the first."""
    return ALL_TIERS << TIER_COUNT * replica


def tier_of(holders: int, replica: int) -> Tier | None:
    """The tier in which replica number `replica` holds something; None if it does not."""
    bits = holders >> TIER_COUNT * replica & ALL_TIERS
    return Tier(AT_LEAST_AS_FAST.index(bits)) if bits else None


def _put(holders: int, replica: int, tier: Tier) -> int:
    return holders & ~bits_of(replica) | AT_LEAST_AS_FAST[tier] << TIER_COUNT * replica


class Root(ReplicaNode):
    """The top of a tree: of one tenant and one size of block. width: bytes of a block."""

    __slots__ = ("tenant", "width")

    def __init__(self, tenant: str, width: int) -> None:
        super().__init__(None, b"")
        self.tenant = tenant
        self.width = width


def extend(
    top: ReplicaNode, tokens: bytes, width: int
) -> tuple[list[ReplicaNode], list[ReplicaNode]]:
    """Make sure that `tokens` stand below `top`, with a node's end at the last of them.

    width: bytes of a block. Returns the nodes below `top` that these tokens fill, from the top, and
    the nodes that were made by a cut: each holds what the node below it holds, for all replicas.
    """
    path: list[ReplicaNode] = []
    cuts: list[ReplicaNode] = []
    offset = 0
    while offset < len(tokens):
        first = tokens[offset : offset + width]
        child = top.children.get(first)
        if child is None:
            child = top.children[first] = ReplicaNode(top, tokens[offset:])
        else:
            same = common_bytes(child.edge, tokens, offset) // width * width
            if same < len(child.edge):
                child = cut(child, same, width)
                cuts.append(child)
        path.append(child)
        offset += len(child.edge)
        top = child
    return path, cuts


def cut(node: ReplicaNode, size: int, width: int) -> ReplicaNode:
    """Cut the edge of `node` after `size` bytes. Returns the new node above it, which ends there.

    `node` stays the one that ends where it ended, with the rest of its edge.
    """
    above = node.parent
    assert above is not None
    upper = ReplicaNode(above, node.edge[:size])
    above.children[node.edge[:width]] = upper
    upper.kv, upper.state, upper.inner = node.kv, node.inner, node.inner
    node.edge = node.edge[size:]
    node.parent = upper
    upper.children[node.edge[:width]] = node
    return upper


def prune(node: ReplicaNode, width: int) -> ReplicaNode:
    """Remove `node` from its tree, and then its ancestors, as far as nobody holds them and they
    have no children. Returns the first that stays; a root always does.
    """
    above = node.parent
    while above is not None and not (node.children or node.kv or node.state):
        if above.children.get(node.edge[:width]) is node:
            del above.children[node.edge[:width]]
        node, above = above, above.parent
    return node


def stops(
    root: ReplicaNode, prompt: bytes, limit: int, everyone: int, width: int
) -> tuple[list[int], list[int]]:
    """Positions of states on the path of `prompt`, up to `limit` bytes from its start.

    Returns these positions in bytes, from the top, and for each the tiers that can resume there: of
    the bits `everyone`, those of tiers that have both the state and all KV up to it. Inside an edge
    that the prompt does not fill, only the last position counts.
    """
    positions: list[int] = []
    holders: list[int] = []
    whole = everyone
    children, position = root.children, 0
    while (node := children.get(prompt[position : position + width])) is not None:
        whole &= node.kv
        if not whole:
            break
        edge = node.edge
        end = position + len(edge)
        if end > limit or not prompt.startswith(edge, position):
            same = min(common_bytes(edge, prompt, position), limit - position) // width * width
            if same > 0 and whole & node.inner:
                positions.append(position + same)
                holders.append(whole & node.inner)
            break
        both = whole & node.state
        if both:
            positions.append(end)
            holders.append(both)
        children, position = node.children, end
    return positions, holders


def walk(root: ReplicaNode) -> Iterator[ReplicaNode]:
    """All nodes below `root`, in no particular order."""
    waiting = list(root.children.values())
    while waiting:
        node = waiting.pop()
        waiting.extend(node.children.values())
        yield node
