"""The record of a cache node: what it holds, where it stands, and when it was used."""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from typing import Any, Final

from sglang_hybrid.core.records.pin import Pin

NEVER: Final = 2.0**52
"""A tick later than any that will be counted."""


class Kind(Enum):
    """The reason why a checkpoint was taken."""

    DECLARED = "declared"
    BRANCH = "branch"
    MESSAGE = "message"
    PROMPT_END = "prompt_end"
    TAIL = "tail"
    CHUNK = "chunk"
    COMPOSED = "composed"
    UNKNOWN = "unknown"


class Clock:
    """Logical time: one tick per request, and the latest arrival stamp that any request carried.

    Nothing reads a rank's own clock, so every rank sees the same times. Where no time is ever told,
    seconds are requests.
    """

    __slots__ = ("_knows_time", "stamp", "tick")

    def __init__(self) -> None:
        self.tick = 0
        self.stamp = 0.0
        self._knows_time = False

    def advance(self, stamp: float | None = None) -> None:
        """A request arrives. A stamp older than the latest one leaves the time where it is, and so
        does a request without a stamp where others, or `advance_to`, have told the time.
        """
        self.tick += 1
        if stamp is not None:
            self.advance_to(stamp)
        elif not self._knows_time:
            self.stamp += 1.0

    def advance_to(self, stamp: float) -> None:
        """Set the time to `stamp` seconds, unless it is later already."""
        self._knows_time = True
        self.stamp = max(self.stamp, stamp)


class Node:
    """One node of the cache: the KV of `tokens` tokens on its edge and, where `has_state`, the
    state at its end.

    depth: tokens from the root to its end. anchor_depth: depth of the nearest ancestor with a
    state, 0 if none. turn: sequence ends on its path, itself included. last_used, stamp: tick and
    seconds of the last hit on this node, or of its creation. history_node: the
    history_tree.HistoryNode whose returns this node serves, None if there is none (a clairvoyant
    policy stores the tick of the next use). inherited_demand: what a policy notes of states evicted
    below. taken: tick and seconds at which its state was taken. prefix_hash: hash of all tokens
    down to its end, None until it is asked for. demand: requests of the window that would resume
    from it count 1 each, running ones that did 2. pin: that clients keep it by, None without one.
    payload: what the cache attaches to the record: SGLang's tree node, or the tokens of the edge.
    copies: where its KV and its state have copies (places.Copies), None without tiers. changes: how
    often a child was added to it, its state came or went while it had none, or it was removed.
    coded_kv, coded_state: they are kept as smaller numbers, to be decoded before they are used
    (core/victims/coding.py). inexact: in a replay, what was decoded of either is there.
    stays_exact: neither is ever coded. exact_children: children whose KV is not coded.
    """

    __slots__ = (
        "anchor_depth",
        "changes",
        "children",
        "coded_kv",
        "coded_state",
        "copies",
        "demand",
        "depth",
        "exact_children",
        "has_state",
        "history_node",
        "hits",
        "id",
        "inexact",
        "inherited_demand",
        "key",
        "kind",
        "kv_locked",
        "last_used",
        "parent",
        "payload",
        "pin",
        "prefix_hash",
        "stamp",
        "state_locked",
        "stays_exact",
        "taken",
        "tokens",
        "turn",
    )

    def __init__(self, node_id: int, parent: Node | None, tokens: int, clock: Clock) -> None:
        self.id = node_id
        self.parent = parent
        self.key: Hashable = None  # its name among the parent's children
        self.children: dict[Hashable, Node] = {}
        self.tokens = tokens
        self.has_state = False
        self.kind = Kind.UNKNOWN
        self.hits = 0
        self.last_used = clock.tick
        self.stamp = clock.stamp
        self.kv_locked = False
        self.state_locked = False
        self.history_node: Any = None
        self.inherited_demand: Any = None
        self.taken = (clock.tick, clock.stamp)
        self.prefix_hash: int | None = None
        self.demand = 0
        self.pin: Pin | None = None
        self.payload: Any = None
        self.copies: Any = None
        self.changes = 0
        self.coded_kv = self.coded_state = self.inexact = self.stays_exact = False
        self.exact_children = 0
        if parent is None:
            self.depth = self.anchor_depth = self.turn = 0
        else:
            self.depth = parent.depth + tokens
            self.anchor_depth = parent.depth if parent.has_state else parent.anchor_depth
            self.turn = parent.turn

    def __repr__(self) -> str:
        state = self.kind.value if self.has_state else "no state"
        return f"Node({self.id}, depth {self.depth}, {len(self.children)} children, {state})"


def absorbs(node: Node) -> bool:
    """True if `node`'s KV serves only what is below its one child: no state to resume from, no
    second child.
    """
    return not node.has_state and len(node.children) == 1 and node.parent is not None


def anchor(node: Node) -> Node | None:
    """The nearest node above with a state: without a state on `node`, a request resumes there."""
    above = node.parent
    while above is not None and not above.has_state:
        above = above.parent
    return above


def root_of(node: Node) -> Node:
    """The root of the tree that `node` is in."""
    while node.parent is not None:
        node = node.parent
    return node
