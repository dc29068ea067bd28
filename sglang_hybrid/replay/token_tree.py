"""A radix tree of token sequences: core's records, with the tokens of each edge as their owner."""

from __future__ import annotations

from collections.abc import Hashable

from sglang_hybrid.core.history import common_length
from sglang_hybrid.core.nodes import Clock, Node, NodeTree
from sglang_hybrid.replay.traces import TokenArray


class TokenTree(NodeTree):
    """`node.owner` is the tokens on the edge to `node`. Edges meet at multiples of `page` only."""

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
        node, total = below or self.root, len(tokens)
        matched = node.depth
        while matched < total:
            child = node.children.get(self._key(tokens[matched : matched + self.page]))
            if child is None:
                break
            edge: TokenArray = child.owner
            same = common_length(edge, tokens[matched : matched + len(edge)])
            matched += same
            if same < len(edge):
                return path, matched - matched % self.page
            path.append(child)
            node = child
        return path, matched

    def beyond(self, path: list[Node], matched: int, tokens: TokenArray) -> list[Node]:
        """`path`, and the node whose edge `matched` ends on."""
        deepest = path[-1] if path else self.root
        if matched == deepest.depth:
            return path
        key = self._key(tokens[deepest.depth : deepest.depth + self.page])
        return [*path, deepest.children[key]]

    def grow(self, parent: Node, tokens: TokenArray) -> Node:
        """A new leaf with `tokens` [n] on its edge."""
        node = self.add(parent, self._key(tokens[: self.page]), len(tokens))
        node.owner = tokens
        return node

    def cut(self, node: Node, depth: int) -> Node:
        """Cut `node`'s edge at `depth` and return the new node that ends there. Nobody holds it."""
        edge: TokenArray = node.owner
        head_tokens = node.tokens - (node.depth - depth)
        tail = edge[head_tokens:]
        keys = self._key(edge[: self.page]), self._key(tail[: self.page])
        head = self.split(node, head_tokens, *keys)
        head.owner, node.owner = edge[:head_tokens], tail
        self.hold(head, kv=False, state=False)
        return head

    def _key(self, tokens: TokenArray) -> Hashable:
        return int(tokens[0]) if self.page == 1 else tokens.tobytes()
