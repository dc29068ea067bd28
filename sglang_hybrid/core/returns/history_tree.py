"""One tenant's part of the history: a radix tree over fingerprints of its prompts and answers."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.records.edges import common_bytes
from sglang_hybrid.core.returns.answers import Answer
from sglang_hybrid.core.returns.hazards import reuse_class_of
from sglang_hybrid.core.returns.reuse import ReuseIndex

HISTORY_NODE_BYTES = 600
ANSWER_BYTES = 500
"""Bytes of what is known of an answer; they are counted where the answer's sequence ends."""
TOKEN_BYTES = 2
NO_INTERVAL = -1


class HistoryNode:
    """A position in the history. It could have been a checkpoint if it has an interval in the reuse
    index (`interval_id`); otherwise it is only a fork.

    turn: sequence ends on its path, its own included. branches: children that it ever had,
    forgotten ones included. last_interval_bucket: bucket of the latest reuse interval
    (`ReuseIndex.interval_bucket`). A new node inherits the bucket of the interval that ended when
    it was created, because the gaps within a session are similar. last: the answer of the request
    that opened the node or resumed from it last, if its returns say something of that answer.
    answer_bytes: what is counted for an answer that ended here. answer_start: where the answer of
    the newest sequence that ended here begins. messages: of that sequence's prompt.
    messages_behind: of the prompt that it left (`HistoryMatch.messages_behind`). Both are 0 where
    that is not known.
    """

    __slots__ = (
        "answer_bytes",
        "answer_start",
        "branches",
        "children",
        "depth",
        "edge",
        "interval_id",
        "is_end",
        "last",
        "last_interval_bucket",
        "messages",
        "messages_behind",
        "parent",
        "turn",
    )

    def __init__(self, parent: HistoryNode | None, edge: bytes) -> None:
        self.parent = parent
        self.edge = edge
        self.children: dict[bytes, HistoryNode] = {}
        self.branches = 0
        self.depth: int = len(edge) // TOKEN_BYTES + (parent.depth if parent else 0)
        self.turn: int = parent.turn if parent else 0
        self.is_end = False
        self.last_interval_bucket = 0
        self.last: Answer | None = None
        self.answer_bytes = 0
        self.answer_start = 0
        self.messages = self.messages_behind = 0
        self.interval_id = NO_INTERVAL

    def adopt(self, child: HistoryNode) -> None:
        self.children[child.edge[:TOKEN_BYTES]] = child
        child.parent = self

    @property
    def return_expected(self) -> float | None:
        """The probability of a return by the answer and the client's hint; None if they tell
        nothing.
        """
        return None if self.last is None else self.last.expected

    @property
    def return_after(self) -> float | None:
        """Seconds after the last answer at which a return is expected, if one is likely; None if
        nothing is known of that.
        """
        return None if self.last is None else self.last.return_after

    @property
    def reuse_class(self) -> int:
        answer = 0 if self.last is None else self.last.bucket
        return reuse_class_of(
            self.branches, self.depth, self.turn, self.last_interval_bucket, answer
        )

    def continued(self) -> HistoryNode:
        """A copy of this node as it will be after another prompt has continued it: with one child
        more and without its latest answer, which is part of that prompt. The copy is in no tree.
        """
        node = HistoryNode(self.parent, self.edge)
        node.turn, node.is_end, node.interval_id = self.turn, self.is_end, self.interval_id
        node.branches = self.branches + 1
        node.last_interval_bucket = self.last_interval_bucket
        return node


class HistoryPath:
    """The history nodes on one sequence's path, shallowest first."""

    def __init__(self, nodes: list[HistoryNode]) -> None:
        self.nodes = nodes
        self._depths = [node.depth for node in nodes]

    def at(self, depth: int) -> HistoryNode | None:
        """The node whose returns a checkpoint at `depth` serves: the node at `depth`, or the next
        one below; a prompt that resumes there has the checkpoint on its path.
        """
        index = bisect_left(self._depths, depth)
        return self.nodes[index] if index < len(self.nodes) else None

    def exactly(self, depth: int) -> HistoryNode | None:
        """The node at exactly `depth`, or None."""
        node = self.at(depth)
        return node if node is not None and node.depth == depth else None

    def turn_at(self, depth: int) -> int:
        """Sequence ends on the path down to `depth`."""
        index = bisect_left(self._depths, depth + 1)
        return self.nodes[index - 1].turn if index else 0


class HistoryTree:
    """The sequences of one tenant. It tells the reuse index, which all tenants share, when a node
    is forgotten.

    held_bytes: its memory in bytes, as HISTORY_NODE_BYTES, TOKEN_BYTES and ANSWER_BYTES count it.
    version: changes with every change of the tree; no two trees ever have the same version.
    """

    def __init__(self, index: ReuseIndex) -> None:
        self.held_bytes = 0
        self.version = 0
        self.root = HistoryNode(None, b"")
        self.leaves: OrderedDict[HistoryNode, None] = OrderedDict()  # oldest use first
        self._index = index

    def walk(self, fingerprints: bytes, known: list[HistoryNode]) -> tuple[list[HistoryNode], int]:
        """Nodes whose edges `fingerprints` cover completely, shallowest first, and how many of its
        tokens are in the tree, part of a further edge included. known: the first of these nodes,
        where an earlier search found them.
        """
        path = list(known)
        node = path[-1] if path else self.root
        start = TOKEN_BYTES * node.depth
        while child := node.children.get(fingerprints[start : start + TOKEN_BYTES]):
            same = common_bytes(child.edge, fingerprints, start)
            start += same
            if same < len(child.edge):
                break
            path.append(child)
            node = child
        return path, start // TOKEN_BYTES

    def behind(
        self, fingerprints: bytes, path: list[HistoryNode], matched: int
    ) -> Iterator[HistoryNode]:
        """The nodes behind the first `matched` tokens of `fingerprints`, shallowest first; where
        several sequences go on from there, those of the newest. path, matched: as `walk` returned
        them.
        """
        node = path[-1] if path else self.root
        if node.depth < matched:
            node = node.children[part(fingerprints, node.depth, node.depth + 1)]
            yield node
        while node.children:
            node = next(reversed(node.children.values()))
            yield node

    def insert(
        self, fingerprints: bytes, path: list[HistoryNode], matched: int, ends: set[int]
    ) -> list[HistoryNode]:
        """Make nodes at all `ends` and where `fingerprints` leave the tree; return all nodes on the
        path of `fingerprints`.
        """
        nodes = list(path)
        node = path[-1] if path else self.root
        at = {node.depth for node in path}
        for cut in sorted({matched, *ends} - at - {0}):
            if cut > matched:
                node = self._grow(node, part(fingerprints, node.depth, cut))
                nodes.append(node)
                continue
            index = bisect_left(nodes, cut, key=lambda node: node.depth)
            above = nodes[index - 1] if index else self.root
            below = above.children[part(fingerprints, above.depth, above.depth + 1)]
            head = self._split(below, cut - above.depth)
            nodes.insert(index, head)
            node = nodes[-1]
        if nodes and nodes[-1] in self.leaves:
            self.leaves.move_to_end(nodes[-1])
        return nodes

    def hold_answer(self, node: HistoryNode) -> None:
        """Count the memory of an answer that ends at `node`, where none was counted before."""
        node.answer_bytes = ANSWER_BYTES
        self.held_bytes += ANSWER_BYTES

    def forget_oldest(self) -> None:
        """Drop the leaf that was used longest ago. There must be one."""
        node, _ = self.leaves.popitem(last=False)
        parent = node.parent
        assert parent is not None
        del parent.children[node.edge[:TOKEN_BYTES]]
        self.held_bytes -= HISTORY_NODE_BYTES + len(node.edge) + node.answer_bytes
        if node.interval_id != NO_INTERVAL:
            self._index.close(node.interval_id)
            node.interval_id = NO_INTERVAL
        if not parent.children and parent is not self.root:
            self.leaves[parent] = None
            self.leaves.move_to_end(parent, last=False)

    def _split(self, below: HistoryNode, head_tokens: int) -> HistoryNode:
        assert below.parent is not None
        cut = TOKEN_BYTES * head_tokens
        head = HistoryNode(below.parent, below.edge[:cut])
        below.parent.adopt(head)
        below.edge = below.edge[cut:]
        head.adopt(below)
        head.branches = 1
        self.held_bytes += HISTORY_NODE_BYTES
        return head

    def _grow(self, parent: HistoryNode, edge: bytes) -> HistoryNode:
        leaf = HistoryNode(parent, edge)
        parent.adopt(leaf)
        parent.branches += 1
        if parent.interval_id != NO_INTERVAL:
            self._index.reclass(parent.interval_id, parent.reuse_class)
        self.leaves.pop(parent, None)
        self.leaves[leaf] = None
        self.held_bytes += HISTORY_NODE_BYTES + len(edge)
        return leaf


def part(fingerprints: bytes, start: int, end: int) -> bytes:
    """The fingerprints of tokens [start, end)."""
    return fingerprints[TOKEN_BYTES * start : TOKEN_BYTES * end]


def longest_start(fingerprints: bytes, begin: int, text: bytes) -> tuple[int, int]:
    """The position, from `begin` on, at which most tokens of `fingerprints` are those with which
    `text` starts, the last of several; and how many tokens that are. Both are 0 if there is none.
    """
    tokens, wanted = (np.frombuffer(ids, np.uint16) for ids in (fingerprints, text))
    places = np.flatnonzero(tokens[begin:] == wanted[0]) + begin if len(wanted) else wanted
    if not len(places):
        return 0, 0
    length = 1
    for fingerprint in wanted[1:]:
        in_range = places[: np.searchsorted(places, len(tokens) - length)]
        longer = in_range[tokens[in_range + length] == fingerprint]
        if not len(longer):
            break
        places, length = longer, length + 1
    return int(places[-1]), length


def fingerprint_tokens(tokens: npt.ArrayLike) -> bytes:
    """TOKEN_BYTES per token id [n], spread over all values; buffers such as array('q') are read
    without a copy.

    Two different tokens look alike once in 65,536 pairs; a fork is then seen one token late, on
    every rank alike.
    """
    ids = np.asarray(tokens).astype(np.uint32, copy=False)
    return ((ids * np.uint32(2654435761)) >> np.uint32(16)).astype(np.uint16).tobytes()
