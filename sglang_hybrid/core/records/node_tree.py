"""The tree of records, which repeats every change of a cache's own tree.

It keeps depths, anchors and times, and tells the pools which records changed. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, Protocol

from sglang_hybrid.core.records.nodes import Clock, Kind, Node, absorbs, anchor
from sglang_hybrid.core.records.pins import Pins


class Listener(Protocol):
    """An object that is told of changed records, as a pool of candidates is. settle: a function
    that the tree sets, to be called before anchors are read.
    """

    settle: Callable[[], None]

    def mark_dirty(self, node: Node) -> None: ...

    def forget(self, node: Node) -> None:
        """Called when `node`, which is still in the tree, is about to leave it."""


SETTLED_AT_ONCE = 256
"""Nodes whose anchors are brought up to date in one go."""


class NodeTree:
    """The records of one cache. After every method depths are right, and changed records are marked
    dirty at the listeners. Anchors are right too, unless a state was added or removed above more
    than SETTLED_AT_ONCE nodes: then the next calls of `settle` do the rest.

    codes: whether entries may be coded (core/victims/coding.py). pins: those of its nodes; by
    default nothing can be pinned. inner_changes: how often a node with children got or lost its
    state, so that requests below may resume elsewhere.
    """

    def __init__(self, clock: Clock | None = None, pins: Pins | None = None) -> None:
        self.inner_changes = 0
        self.codes = False
        self.clock = clock or Clock()
        self.pins = Pins() if pins is None else pins
        self.pins.follow(self.clock, self.mark_dirty)
        self._unsettled: list[list[Node]] = []  # siblings whose anchor may be another one
        self._listeners: list[Listener] = []
        self._next_id = 1
        self.root = Node(0, None, 0, self.clock)

    def listen(self, listener: Listener, *, from_now: bool = False) -> None:
        """Tell `listener` what changes from now on, beginning with every node there is, unless it
        wants none of these (`from_now`).
        """
        self._listeners.append(listener)
        listener.settle = self.settle
        if not from_now:
            for node in self.walk():
                listener.mark_dirty(node)

    def unlisten(self, listener: Listener) -> None:
        """Tell `listener` no more, as when another policy takes over."""
        self._listeners.remove(listener)

    def add(self, parent: Node, key: Hashable, tokens: int) -> Node:
        """A new leaf of `tokens` tokens under `parent`, whose children it joins as `key`."""
        node = self._new(parent, tokens)
        parent.changes += 1
        self._mark_chain_dirty(parent)
        self._mark_lowest_dirty(parent)
        self._attach(parent, key, node)
        parent.exact_children += 1
        self.mark_dirty(parent)
        self.mark_dirty(node)
        return node

    def split(self, node: Node, head_tokens: int, head_key: Hashable, tail_key: Hashable) -> Node:
        """Cut `node`'s edge after `head_tokens` and return the new node above it.

        `node` keeps its id, state and time. The new node has no state; it is as old as `node`, for
        nobody used it yet.
        """
        if not 0 < head_tokens < node.tokens:
            raise ValueError(f"cannot split {node!r} of {node.tokens} tokens after {head_tokens}")
        parent = node.parent
        assert parent is not None
        head = self._new(parent, head_tokens)
        head.last_used, head.stamp = node.last_used, node.stamp
        head.kv_locked = node.kv_locked
        if node.copies is not None:
            head.copies = node.copies.of_head()
        head.coded_kv, head.inexact = node.coded_kv, node.inexact
        head.stays_exact = node.stays_exact
        head.exact_children = int(not node.coded_kv)
        del parent.children[node.key]
        self._attach(parent, head_key, head)
        self._attach(head, tail_key, node)
        node.tokens -= head_tokens
        self.pins.on_split(head, node)
        self.mark_dirty(head)
        self.mark_dirty(node)
        return head

    def remove(self, node: Node) -> None:
        """Take away a leaf with all it holds."""
        if node.children or node.parent is None:
            raise ValueError(f"only a leaf can be removed, not {node!r}")
        self.pins.on_loss(node)
        node.changes += 1
        if node.has_state:
            self._mark_anchor_dirty(node)
        for listener in self._listeners:
            listener.forget(node)
        parent = node.parent
        del parent.children[node.key]
        parent.exact_children -= not node.coded_kv
        node.parent = None
        self.mark_dirty(parent)
        self._mark_chain_dirty(parent)
        self._mark_lowest_dirty(parent)

    def give_state(self, node: Node, kind: Kind) -> None:
        """`node` now holds a checkpoint, created at this tick. It becomes the anchor of the nodes
        below it, down to the next states.
        """
        if kind is Kind.TAIL and node.parent is not None and node.turn == node.parent.turn:
            node.turn += 1
        node.kind = kind
        self._mark_lowest_dirty(node)
        if not node.has_state:
            node.has_state = True
            node.last_used, node.stamp = node.taken = self.clock.tick, self.clock.stamp
            self._re_anchor(node)
        self.mark_dirty(node)

    def drop_state(self, node: Node) -> None:
        """`node` loses its checkpoint. The nodes that it was the anchor of get its own anchor."""
        if node.has_state:
            self.pins.on_loss(node)
            node.has_state = node.coded_state = False
            self._mark_lowest_dirty(node)
            self._re_anchor(node)
            self.mark_dirty(node)
            self._mark_anchor_dirty(node)

    def hit(self, node: Node) -> None:
        """A request resumed from `node`. Only its own time moves, not its ancestors'."""
        node.hits += 1
        node.last_used = self.clock.tick
        node.stamp = self.clock.stamp
        self.pins.on_hit(node)
        self.mark_dirty(node)

    def lock(self, node: Node, *, kv: bool, state: bool) -> None:
        """Say whether a running request has locked this node's KV and its state."""
        if (node.kv_locked, node.state_locked) != (kv, state):
            node.kv_locked, node.state_locked = kv, state
            self.mark_dirty(node)
            self._mark_lowest_dirty(node)

    def move_demand(self, node: Node, by: int) -> None:
        """Change the demand of `node` by `by`."""
        node.demand += by
        if node.parent is not None and (node.demand == by or not node.demand):
            self.mark_dirty(node)

    def code_kv(self, node: Node, coded: bool) -> None:
        """The KV of `node` is coded from now on, or it is not any more."""
        if node.coded_kv != coded:
            assert node.parent is not None
            self._mark_lowest_dirty(node.parent)
            node.coded_kv = coded
            node.parent.exact_children += -1 if coded else 1
            self.mark_dirty(node)
            self.mark_dirty(node.parent)
            self._mark_chain_dirty(node)
            self._mark_chain_dirty(node.parent)
            self._mark_lowest_dirty(node)
            self._mark_lowest_dirty(node.parent)

    def code_state(self, node: Node, coded: bool) -> None:
        """The state of `node` is coded from now on, or it is not any more."""
        if node.coded_state != coded:
            node.coded_state = True  # with a state that is exact, no KV below would be marked
            self._mark_lowest_dirty(node)
            node.coded_state = coded
            self.mark_dirty(node)

    def link_history(self, node: Node, history_node: Any) -> None:
        """Set the history node whose returns `node` serves."""
        node.history_node = history_node
        self.mark_dirty(node)

    def walk(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _new(self, parent: Node, tokens: int) -> Node:
        node = Node(self._next_id, parent, tokens, self.clock)
        self._next_id += 1
        return node

    def _attach(self, parent: Node, key: Hashable, node: Node) -> None:
        parent.children[key] = node
        node.parent, node.key = parent, key

    def settle(self, most: int = SETTLED_AT_ONCE) -> None:
        """Bring the anchors of at most `most` more nodes up to date."""
        unsettled = self._unsettled
        while unsettled and most > 0:
            siblings = unsettled[-1]
            node = siblings.pop()
            if not siblings:
                unsettled.pop()
            above = node.parent
            if above is None:  # it was removed meanwhile
                continue
            most -= 1
            anchor_depth = above.depth if above.has_state else above.anchor_depth
            if node.anchor_depth == anchor_depth:
                continue
            node.anchor_depth = anchor_depth
            self.mark_dirty(node)
            if not node.has_state and node.children:
                unsettled.append(list(node.children.values()))

    def _re_anchor(self, node: Node) -> None:
        """`node` got or lost its state: the nodes below it, down to the next states, have another
        anchor.
        """
        if not node.children:
            node.changes += 1
            return
        self.inner_changes += 1
        self._unsettled.append(list(node.children.values()))
        self.settle()

    def _mark_chain_dirty(self, node: Node) -> None:
        """Mark the leaf, if any, that `node` is absorbed into: evicting that leaf now frees another
        number of bytes.
        """
        while absorbs(node):
            (node,) = node.children.values()
            self.mark_dirty(node)

    def _mark_lowest_dirty(self, node: Node) -> None:
        """Mark the node, if any, with which the KV of `node` is coded: that gives back another
        number of bytes now.
        """
        if not self.codes or (node.has_state and not node.coded_state):
            return
        while node.exact_children == 1:
            node = next(child for child in node.children.values() if not child.coded_kv)
            self.mark_dirty(node)
            if node.has_state and not node.coded_state:
                return

    def _mark_anchor_dirty(self, node: Node) -> None:
        """Mark the state above `node`: it inherits the demand for the state of `node`."""
        above = anchor(node)
        if above is not None:
            self.mark_dirty(above)

    def mark_dirty(self, node: Node) -> None:
        if node is not self.root:
            for listener in self._listeners:
                listener.mark_dirty(node)
