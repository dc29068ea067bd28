"""A radix tree of token sequences: records of `core` whose payload is the tokens of the edge."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.records.coded_edges import CodedEdges
from sglang_hybrid.core.records.edges import common_bytes
from sglang_hybrid.core.records.node_tree import NodeTree
from sglang_hybrid.core.records.nodes import Clock, Node
from sglang_hybrid.core.traffic.requests import TokenArray

Hashes = npt.NDArray[np.uint64]
_FACTOR = 0x9E3779B97F4A7C15 | 1
_MIX = np.uint64(0xBF58476D1CE4E5B9)

TOKEN_BYTES = 4  # int32


class TokenTree(NodeTree):
    """`node.payload` is the tokens on the edge to `node`, as bytes. Edges meet at multiples of
    `page` only. Sequences of different tenants have nothing but the root in common. coded: where
    coded KV lies; None where none is.
    """

    def __init__(self, page: int = 1, clock: Clock | None = None) -> None:
        super().__init__(clock)
        self.page = page
        self.coded: CodedEdges[range] | None = None

    def find(
        self, tokens: TokenArray, below: Node | None = None, tenant: str = ""
    ) -> tuple[list[Node], int]:
        """Nodes that `tokens` [n] cover to their end, and how many tokens are stored, the part of
        an edge included. below: a node that `tokens` are known to pass, to save the way there.
        """
        path: list[Node] = []
        node = below or self.root
        while node.parent is not None:
            path.append(node)
            node = node.parent
        path.reverse()
        node, sequence = below or self.root, as_bytes(tokens)
        start = TOKEN_BYTES * node.depth
        while child := node.children.get(self._key(node, sequence, start, tenant)):
            edge: bytes = child.payload
            same = common_bytes(edge, sequence, start)
            start += same
            if same < len(edge):
                matched = start // TOKEN_BYTES
                return path, matched - matched % self.page
            path.append(child)
            node = child
        return path, node.depth

    def beyond(
        self, path: list[Node], matched: int, tokens: TokenArray, tenant: str = ""
    ) -> list[Node]:
        """`path`, and the node whose edge `matched` ends on."""
        deepest = path[-1] if path else self.root
        if matched == deepest.depth:
            return path
        key = as_bytes(tokens[deepest.depth : deepest.depth + self.page])
        return [*path, deepest.children[self._key(deepest, key, 0, tenant)]]

    def grow(self, parent: Node, tokens: TokenArray, tenant: str = "") -> Node:
        """A new leaf with `tokens` [n] on its edge."""
        edge = as_bytes(tokens)
        node = self.add(parent, self._key(parent, edge, 0, tenant), len(tokens))
        node.payload = edge
        return node

    def cut(self, node: Node, depth: int) -> Node:
        """Cut `node`'s edge at `depth` and return the new node that ends there. Nobody holds it."""
        edge: bytes = node.payload
        head_tokens = node.tokens - (node.depth - depth)
        split, key_bytes = TOKEN_BYTES * head_tokens, TOKEN_BYTES * self.page
        above, below = edge[:split], edge[split:]
        head = self.split(node, head_tokens, node.key, below[:key_bytes])
        head.payload, node.payload = above, below
        if self.coded is not None and node.coded_kv:
            self.coded.split(head.id, node.id, head_tokens)
        self.lock(head, kv=False, state=False)
        return head

    def _key(self, parent: Node, sequence: bytes, start: int, tenant: str) -> Hashable:
        """The name of `parent`'s child whose edge begins as `sequence` does at byte `start`."""
        key = sequence[start : start + TOKEN_BYTES * self.page]
        return (tenant, key) if tenant and parent is self.root else key


def as_bytes(tokens: TokenArray) -> bytes:
    """TOKEN_BYTES per token."""
    return tokens.astype(np.int32, copy=False).tobytes()


def prefix_hashes(tokens: TokenArray, tenant: str = "") -> Hashes:
    """A hash of each prefix [n] of `tokens` [n] of `tenant`."""
    mixed = (tokens.astype(np.uint64) + np.uint64(1)) * _MIX
    mixed ^= mixed >> np.uint64(31)
    powers = np.full(len(tokens), _FACTOR, dtype=np.uint64).cumprod(dtype=np.uint64)
    start = np.uint64(hash(tenant) & (2**64 - 1))
    return start + np.cumsum(mixed * powers, dtype=np.uint64)
