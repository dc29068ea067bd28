"""A radix tree of token sequences: core's records, with the tokens of each edge as their owner."""

from __future__ import annotations

import numpy as np

from sglang_hybrid.core.edges import common_bytes
from sglang_hybrid.core.nodes import Clock, Node, NodeTree
from sglang_hybrid.replay.traces import TokenArray

TOKEN_BYTES = 4  # int32


class TokenTree(NodeTree):
    """`node.owner` is the tokens on the edge to `node`, as bytes. Edges meet at multiples of `page`
    only.
    """

    def __init__(self, page: int = 1, clock: Clock | None = None) -> None:
        super().__init__(clock)
        self.page = page

    def find(self, tokens: TokenArray, below: Node | None = None) -> tuple[list[Node], int]:
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
        start, key_bytes = TOKEN_BYTES * node.depth, TOKEN_BYTES * self.page
        while child := node.children.get(sequence[start : start + key_bytes]):
            edge: bytes = child.owner
            same = common_bytes(edge, sequence, start)
            start += same
            if same < len(edge):
                matched = start // TOKEN_BYTES
                return path, matched - matched % self.page
            path.append(child)
            node = child
        return path, node.depth

    def beyond(self, path: list[Node], matched: int, tokens: TokenArray) -> list[Node]:
        """`path`, and the node whose edge `matched` ends on."""
        deepest = path[-1] if path else self.root
        if matched == deepest.depth:
            return path
        key = as_bytes(tokens[deepest.depth : deepest.depth + self.page])
        return [*path, deepest.children[key]]

    def grow(self, parent: Node, tokens: TokenArray) -> Node:
        """A new leaf with `tokens` [n] on its edge."""
        edge = as_bytes(tokens)
        node = self.add(parent, edge[: TOKEN_BYTES * self.page], len(tokens))
        node.owner = edge
        return node

    def cut(self, node: Node, depth: int) -> Node:
        """Cut `node`'s edge at `depth` and return the new node that ends there. Nobody holds it."""
        edge: bytes = node.owner
        head_tokens = node.tokens - (node.depth - depth)
        split, key_bytes = TOKEN_BYTES * head_tokens, TOKEN_BYTES * self.page
        above, below = edge[:split], edge[split:]
        head = self.split(node, head_tokens, above[:key_bytes], below[:key_bytes])
        head.owner, node.owner = above, below
        self.hold(head, kv=False, state=False)
        return head


def as_bytes(tokens: TokenArray) -> bytes:
    """TOKEN_BYTES per token."""
    return tokens.astype(np.int32, copy=False).tobytes()
